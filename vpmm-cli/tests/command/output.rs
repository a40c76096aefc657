//! Output that cannot be written.

use std::fs::OpenOptions;
use std::io;

use crate::rig::{File, run, stderr, stdout, vpmm};

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

/// `vpmm … | head`: nothing is wrong with that, and what else is wrong is told all the same.
#[test]
fn a_reader_that_has_gone_changes_no_exit_code() {
    let fits = File::rows("1,x,allocate,0x1,8388608,0\n");
    let too_large = File::rows("1,x,allocate,0x1,1099511627776,0\n");
    let all: [(&[&str], i32); 6] = [
        (&["replay", fits.path()], 0),
        (&["replay", fits.path(), "--limit=4MiB"], 3),
        (&["replay", too_large.path(), fits.path()], 3),
        (&["fit", fits.path()], 0),
        (&["fit", too_large.path()], 3),
        (
            &[
                "bench",
                "--quick",
                "--case=pair_512",
                "--allocator=logging(/no/such/log.csv,default)",
            ],
            1,
        ),
    ];
    for (args, code) in all {
        for last in [&["--device=sim"][..], &["--device=sim", "--json"][..]] {
            let args = [args, last].concat();
            assert_eq!(run(&args).status.code(), Some(code), "{args:?}, read");
            let (reader, writer) = io::pipe().unwrap();
            drop(reader);
            let output = vpmm(&args).stdout(writer).output().unwrap();
            let said = stderr(&output);
            assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
            assert!(!said.contains("cannot write"), "{args:?}: {said}");
        }
    }
}
