//! The example runs on the simulator, and says what it is to show.

use std::process::Command;

#[test]
fn a_shadow_worker_wakes_with_the_weights() {
    // Beside the folder of the tests, where `cargo test` has put it.
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(|deps| deps.parent()).unwrap();
    let path = profile.join("examples/shadow_worker");
    let output = Command::new(&path).arg("--sim").output().unwrap_or_else(|error| {
        panic!("{}: {error}; `cargo build -p vpmm-gms --examples` makes it", path.display())
    });
    let printed = String::from_utf8(output.stdout).unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{printed}{told}", output.status);
    let begins = [
        "on the simulator",
        "worker: loaded and published in ",
        "shadow: 0.1 GiB mapped in ",
        "shadow: asleep in ",
        "the worker is killed",
        "shadow: awake in ",
        "the weights are at the addresses where they were, all 32 tensors",
    ];
    assert_eq!(printed.lines().count(), begins.len(), "{printed}");
    for (line, begin) in printed.lines().zip(begins) {
        assert!(line.starts_with(begin), "{printed}");
    }
}
