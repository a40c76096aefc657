//! Output that cannot be written.

use std::fs::OpenOptions;

use crate::rig::{run, stderr, stdout, vpmm};

/// Help and the version are output like any other.
#[test]
fn whatever_cannot_be_written_is_a_failure() {
    let all: [&[&str]; 5] = [
        &["--help"],
        &["--version"],
        &["help", "fit"],
        &["replay", "--help"],
        &["info", "--device", "sim"],
    ];
    for args in all {
        let whole = run(args);
        assert_eq!(whole.status.code(), Some(0), "{args:?}: {}", stderr(&whole));
        assert!(stdout(&whole).ends_with('\n') && stderr(&whole).is_empty(), "{args:?}");
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = vpmm(args).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {}", stderr(&output));
        let said = stderr(&output);
        assert!(said.starts_with("vpmm: cannot write the output: "), "{args:?}: {said}");
    }
    // Wrong usage is as before.
    let usage = run(&["--hlep"]);
    assert_eq!((usage.status.code(), stdout(&usage)), (Some(2), ""));
}
