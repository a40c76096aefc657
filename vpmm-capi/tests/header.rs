//! The committed header is what the code says.

use std::path::Path;

/// In the order in which a reader of the header wants them; with a folder's module come those in it.
const SOURCES: [&str; 22] = [
    "version",
    "status",
    "guard",
    "driver",
    "stream",
    "options",
    "stats",
    "pool",
    "context",
    "shortage",
    "tagged",
    "graph",
    "share",
    "service",
    "service/heap",
    "service/place",
    "service/scratch",
    "service/tensors",
    "process/mod",
    "resource/mod",
    "snapshot",
    "torch/mod",
];

fn generated() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("settings");
    let mut builder = cbindgen::Builder::new()
        .with_config(config)
        .with_language(cbindgen::Language::C)
        .with_cpp_compat(true)
        .with_include_guard("VPMM_H")
        .with_no_includes()
        .with_sys_include("stddef.h")
        .with_sys_include("stdint.h")
        .with_header(
            "/* The C ABI of vpmm: GPU memory pools on CUDA's virtual memory management.\n   \
             Made by cbindgen from vpmm-capi/src: see vpmm-capi/tests/header.rs. */",
        )
        .with_documentation(true)
        .with_style(cbindgen::Style::Both)
        .with_line_length(100);
    for source in SOURCES {
        builder = builder.with_src(root.join(format!("src/{source}.rs")));
    }
    let mut header = Vec::new();
    builder.generate().expect("a header").write(&mut header);
    String::from_utf8(header).unwrap()
}

#[test]
fn the_header_is_what_the_code_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/vpmm.h");
    let generated = generated();
    if std::env::var_os("VPMM_BLESS").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == generated,
        "include/vpmm.h is not what the code says: run this test with VPMM_BLESS=1"
    );
}
