//! Programs in C and C++ that are built against the header and linked with both libraries.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Builds the libraries, which cargo does not do for tests that cannot link them as Rust, and answers
/// where they are.
fn libraries() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // The folder of this program is `<target>/<profile>/deps`.
        let program = std::env::current_exe().unwrap();
        let target = program.ancestors().nth(3).unwrap();
        // As the tests' own dependencies are built, so that those are built once.
        let output = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--package=vpmm-capi", "--profile=test", "--target-dir"])
            .arg(target)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        target.join("debug")
    })
}

fn target() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

/// Builds a program and runs it on the simulated device.
fn build_and_run(source: &str, flags: &[&str], shared: bool) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = std::env::temp_dir().join(format!(
        "vpmm-capi-{}-{}-{shared}",
        std::process::id(),
        source.replace('.', "-")
    ));
    std::fs::create_dir_all(&folder).unwrap();
    let compiler = cc::Build::new()
        .target(&target())
        .host(&target())
        .opt_level(1)
        .debug(false)
        .cpp(source.ends_with("cpp"))
        .out_dir(&folder)
        .cargo_metadata(false)
        .try_get_compiler()
        .expect("a compiler for C and C++");
    let (libraries, program) = (libraries(), folder.join("program"));
    let mut command: Command = compiler.to_command();
    command.args(flags).args(["-Wall", "-Wextra", "-Werror", "-I"]).arg(root.join("include"));
    command.arg(root.join("tests/c").join(source)).arg("-o").arg(&program);
    if shared {
        command.arg("-L").arg(libraries).arg("-lvpmm");
    } else {
        command.arg(libraries.join("libvpmm.a"));
    }
    command.args(["-lpthread", "-ldl", "-lm"]);
    let built = command.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let ran = Command::new(&program)
        .env("VPMM_DEVICE", "sim")
        .env("LD_LIBRARY_PATH", libraries)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    assert!(ran.stderr.is_empty() && ran.stdout.is_empty());
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_program_in_c_with_the_shared_library() {
    build_and_run("program.c", &["-std=c99"], true);
}

#[test]
fn a_program_in_c_with_the_static_library() {
    build_and_run("program.c", &["-std=c11"], false);
}

#[test]
fn sleep_graphs_sharing_and_shortage_in_c() {
    build_and_run("features.c", &["-std=c99"], true);
}

#[test]
fn a_program_in_cpp() {
    build_and_run("program.cpp", &["-std=c++17"], true);
}
