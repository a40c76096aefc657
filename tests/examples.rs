//! The examples run on the simulator, and say what they are to show.

use std::path::PathBuf;
use std::process::Command;

/// Where cargo puts the examples: beside the directory of the tests. `cargo test` builds them;
/// `cargo test --test examples` does not, and runs what `cargo build --examples` has left there.
fn path(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this test is a file");
    let profile = test.parent().and_then(|deps| deps.parent()).expect("target/<profile>/deps");
    profile.join("examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
}

/// Runs an example; what it printed, where it has ended well.
fn run(name: &str) -> String {
    let path = path(name);
    let output = Command::new(&path).arg("--sim").output().unwrap_or_else(|error| {
        panic!("{}: {error}; `cargo build --examples` makes it", path.display())
    });
    let printed = String::from_utf8(output.stdout).expect("text");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {}\n{printed}{told}", output.status);
    assert!(printed.starts_with("on the simulator, as asked for\n"), "{name}:\n{printed}");
    printed
}

/// Whether some line begins and ends like this.
#[track_caller]
fn says(printed: &str, begin: &str, end: &str) {
    let found = printed.lines().any(|line| line.starts_with(begin) && line.ends_with(end));
    assert!(found, "no line from `{begin}` to `{end}`:\n{printed}");
}

#[test]
fn layered_stack_meets_its_limit() {
    let printed = run("layered_stack");
    says(&printed, "      └─ limiting", "(limit=64 MiB)");
    says(&printed, "refused: out of memory: 100 MiB requested", "live");
}

#[test]
fn find_a_leak_names_the_function_that_forgot() {
    let printed = run("find_a_leak");
    says(&printed, "never freed: 3145728 bytes at 0x", "allocation 5");
    let found = printed.lines().any(|line| {
        line.starts_with("    ") && line.contains("sharpen at ") && line.contains("find_a_leak.rs:")
    });
    assert!(found, "{printed}");
}

#[test]
fn log_and_replay_compares_two_allocators() {
    let printed = run("log_and_replay");
    says(&printed, "384 calls logged", "at most 432 MiB");
    for allocator in ["default", "caching"] {
        let row = printed.lines().find(|line| line.split_whitespace().nth(1) == Some(allocator));
        assert!(row.is_some_and(|row| row.contains("sim")), "{allocator}:\n{printed}");
    }
}

#[test]
fn vector_add_is_right() {
    says(&run("vector_add"), "1000003 sums, 0 wrong", "the last is 1500003");
}
