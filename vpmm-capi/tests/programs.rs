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

/// How a program is built.
#[derive(Default)]
struct Build<'a> {
    source: &'a str,
    flags: &'a [&'a str],
    /// With the library as an archive.
    is_static: bool,
    /// Sources of libraries that stand in for others of these names, each of which may use those before it.
    beside: &'a [(&'a str, &'a str)],
    /// What it is told.
    argument: Option<&'a Path>,
}

impl Build<'_> {
    fn compiler(&self, folder: &Path, is_cpp: bool) -> Command {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let compiler = cc::Build::new()
            .target(&target())
            .host(&target())
            .opt_level(1)
            .debug(false)
            .cpp(is_cpp)
            .out_dir(folder)
            .cargo_metadata(false)
            .try_get_compiler()
            .expect("a compiler for C and C++");
        let mut command = compiler.to_command();
        command.args(self.flags).args(["-Wall", "-Wextra", "-Werror", "-I"]);
        command.arg(root.join("include"));
        command
    }

    /// Builds the program and runs it on the simulated device.
    fn run(self) {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
        let name = format!(
            "vpmm-capi-{}-{}-{}-{}",
            std::process::id(),
            self.source.replace(['.', '/'], "-"),
            self.is_static,
            self.beside.len()
        );
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let (libraries, program) = (libraries(), folder.join("program"));
        let mut command = self.compiler(&folder, self.source.ends_with("cpp"));
        command.arg(sources.join(self.source)).arg("-o").arg(&program);
        if self.is_static {
            command.arg(libraries.join("libvpmm.a"));
        } else {
            command.arg("-L").arg(libraries).arg("-lvpmm");
        }
        let mut made: Vec<PathBuf> = Vec::new();
        for (source, library) in self.beside {
            let path = folder.join(library);
            let mut beside = self.compiler(&folder, true);
            beside
                .args(["-shared", "-fPIC", "-o"])
                .arg(&path)
                .arg(format!("-Wl,-soname,{library}"));
            built(beside.arg(sources.join(source)).args(&made));
            made.push(path);
        }
        command.args(&made);
        built(command.args(["-lpthread", "-ldl", "-lm"]));
        let paths = std::env::join_paths([libraries, &folder]).unwrap();
        let ran = Command::new(&program)
            .args(self.argument)
            .env("VPMM_DEVICE", "sim")
            .env("LD_LIBRARY_PATH", paths)
            .output()
            .unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        assert!(ran.stderr.is_empty() && ran.stdout.is_empty());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

fn built(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_program_in_c_with_the_shared_library() {
    Build { source: "program.c", flags: &["-std=c99"], ..Build::default() }.run();
}

#[test]
fn a_program_in_c_with_the_static_library() {
    Build { source: "program.c", flags: &["-std=c11"], is_static: true, ..Build::default() }.run();
}

#[test]
fn the_program_in_the_readme() {
    let readme = include_str!("../README.md");
    let (_, program) = readme.split_once("```c\n").unwrap();
    let (program, _) = program.split_once("```").unwrap();
    let path = std::env::temp_dir().join(format!("vpmm-capi-readme-{}.c", std::process::id()));
    std::fs::write(&path, program).unwrap();
    Build { source: path.to_str().unwrap(), flags: &["-std=c99"], ..Build::default() }.run();
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn sleep_graphs_sharing_and_shortage_in_c() {
    Build { source: "features.c", flags: &["-std=c99"], ..Build::default() }.run();
}

#[test]
fn the_process_s_pool_in_c() {
    Build { source: "process.c", flags: &["-std=c11"], ..Build::default() }.run();
}

#[test]
fn a_child_of_a_process_in_c() {
    Build { source: "forks.c", flags: &["-std=c11"], ..Build::default() }.run();
}

#[test]
fn resources_and_adaptors_in_c() {
    Build { source: "resources.c", flags: &["-std=c99"], ..Build::default() }.run();
}

/// With a server in this process, whose memory the program maps through real descriptors.
#[test]
fn the_memory_service_in_c() {
    let socket = std::env::temp_dir().join(format!("vpmm-capi-{}.sock", std::process::id()));
    let simulator = cuda_sim::Simulator::builder().build().unwrap();
    let memory = gms::memory::Memory::open(&simulator.driver(), 0).unwrap();
    let server = gms::server::Server::bind(memory, gms::server::Settings::new(&socket)).unwrap();
    let stopper = server.stopper();
    let thread = std::thread::spawn(move || server.run());
    let argument = Some(socket.as_path());
    Build { source: "service.c", flags: &["-std=c99"], argument, ..Build::default() }.run();
    stopper.stop();
    thread.join().unwrap().unwrap();
    assert_eq!(simulator.memory_used(0), 0);
    simulator.assert_clean();
}

#[test]
fn a_program_in_cpp() {
    Build { source: "program.cpp", flags: &["-std=c++17"], ..Build::default() }.run();
}

#[test]
fn resources_in_cpp_are_what_cuda_mr_and_rmm_ask_for() {
    let stand_in = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/tests/c/cccl");
    let flags = &["-std=c++17", stand_in];
    Build { source: "resource.cpp", flags, ..Build::default() }.run();
}

#[test]
fn pytorchs_calls_throw_its_exceptions() {
    Build {
        source: "torch.cpp",
        flags: &["-std=c++17", "-DWITH_C10"],
        beside: &[
            ("c10.cpp", "libc10.so"),
            ("c10_cuda.cpp", "libc10_cuda.so"),
            ("torch_cuda.cpp", "libtorch_cuda.so"),
        ],
        ..Build::default()
    }
    .run();
}

#[test]
fn without_pytorch_its_calls_throw_a_runtime_error() {
    Build { source: "torch.cpp", flags: &["-std=c++17"], ..Build::default() }.run();
}
