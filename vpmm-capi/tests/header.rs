//! The committed header is what the code says, and every function that can fail answers a status there.

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
             Made by cbindgen from vpmm-capi/src: see vpmm-capi/tests/header.rs.\n\
             \n   \
             What holds for every function that does not say otherwise:\n   \
             - A status other than VPMM_OK is a failure, whose text `vpmm_last_error` has. What a function writes\n     \
             through its pointers it writes on success only.\n   \
             - Any thread may call it, with the same handles too. A handle is given back once, by its `release`\n     \
             function, and used by nobody while or after that; null is no handle, and ignored there.\n   \
             - A structure that begins with its size goes to its `init` function first: the program's header may be\n     \
             older than the library.\n   \
             - `stream` is a cudaStream_t, which is a CUstream. Null and 1 are the legacy default stream, 2 is the\n     \
             calling thread's own (cudaStreamPerThread).\n   \
             - In a child of the process (a fork) what needs the driver answers VPMM_FORKED. */",
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

/// The functions of the header that answer something else than a status, or nothing.
fn without_a_status(header: &str) -> Vec<&str> {
    let declared = |text: &'_ str| text.contains(" *vpmm_") || text.contains(" vpmm_");
    let ends = header.match_indices(");").map(|(end, _)| &header[..end]);
    let texts = ends.map(|text| &text[text.rfind(";\n").map_or(0, |at| at + 2)..]);
    let codes = texts.map(|text| text.rsplit("*/").next().unwrap_or_default().trim());
    codes
        .filter(|code| !code.starts_with("typedef") && !code.starts_with("enum vpmm_status "))
        .filter(|code| declared(code))
        .map(|code| {
            let name = &code[code.find("vpmm_").unwrap_or_default()..];
            name.split('(').next().unwrap_or_default()
        })
        .collect()
}

#[test]
fn what_can_fail_answers_a_status_but_where_pytorch_calls() {
    const CANNOT_FAIL: [&str; 4] =
        ["vpmm_version", "vpmm_status_name", "vpmm_last_error", "vpmm_process_has_pool"];
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/vpmm.h");
    let header = std::fs::read_to_string(path).unwrap();
    let others = without_a_status(&header);
    let is_known = |name: &&str| {
        CANNOT_FAIL.contains(name)
            || name.ends_with("_init")
            || name.ends_with("_release")
            || name.starts_with("vpmm_torch_")
            || name.starts_with("vpmm_gms_torch_")
    };
    let unknown: Vec<&str> = others.iter().copied().filter(|name| !is_known(name)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    assert!(
        others.len() > 20 && CANNOT_FAIL.iter().all(|name| others.contains(name)),
        "{others:?}"
    );
}
