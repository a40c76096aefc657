//! What side-by-side.sh measures, and what becomes of the lines that it writes: tables and plots.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::Folder;

#[path = "../../benches/plots/results.rs"]
#[allow(dead_code, reason = "the plots use the rest")]
mod plots;

/// A replay as `vpmm replay --json` prints it, as far as tables and plots read it.
fn replay(ns_per_op: f64, held: u64, error: Option<&str>) -> String {
    let error = error.map_or("null".to_owned(), |error| format!("\"{error}\""));
    format!(
        "{{\"trace\":\"a.csv\",\"allocator\":\"default\",\"device\":\"cuda:0\",\"ns_per_op\":{ns_per_op},\
         \"peak_live_bytes\":1000,\"peak_mapped_bytes\":{held},\"host_ns_per_op\":{ns_per_op},\
         \"error\":{error}}}\n"
    )
}

/// What table.py prints of some lines.
fn tables(folder: &Folder, lines: &str) -> String {
    let results = folder.0.join("results.jsonl");
    fs::write(&results, lines).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers/table.py");
    let output = Command::new("python3").arg(script).arg(&results).output().expect("python3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn plotted(folder: &Folder, lines: &str) -> Vec<f64> {
    let results = folder.0.join("plotted.jsonl");
    fs::write(&results, lines).unwrap();
    let results = plots::Results::read(&results).unwrap();
    results.replays.iter().map(|replay| replay.held).collect()
}

/// A replay that ran out of memory half-way has the figures of that half, which are no trace's.
#[test]
fn a_replay_that_did_not_come_to_its_end_has_no_figures() {
    let folder = Folder::new("unfinished");
    let unfinished = replay(11.0, 1111, Some("out of memory"));
    let whole = replay(22.0, 1222, None);
    let text = tables(&folder, &unfinished);
    assert!(text.contains("a, default: out of memory"), "{text}");
    assert!(!text.contains("11.0") && !text.contains("1.1110"), "{text}");
    assert!(plotted(&folder, &unfinished).is_empty());
    // Of several turns it is not the fastest, whichever came first.
    for lines in [format!("{unfinished}{whole}"), format!("{whole}{unfinished}")] {
        let text = tables(&folder, &lines);
        assert!(text.contains("22.0") && text.contains("1.2220"), "{text}");
        assert!(!text.contains("11.0") && !text.contains("1.1110"), "{text}");
        assert_eq!(plotted(&folder, &lines), [1.222]);
    }
}

/// What the script itself keeps beside the traces is in no trace's place, whatever that is called.
#[test]
fn side_by_side_every_allocator_gets_the_same_traces() {
    const NAMES: [&str; 4] = ["lines", "torch", "traces", "a.csv"];
    let folder = Folder::new("side-by-side");
    // Instead of the command: tells what it finds in each trace.
    let command = folder.0.join("command");
    let tell = "#!/bin/sh\nfor f; do [ -f \"$f\" ] && cksum <\"$f\" | \
                sed \"s/.*/{\\\"trace\\\":\\\"$f\\\",\\\"allocator\\\":\\\"&\\\"}/\"; done; exit 0\n";
    fs::write(&command, tell).unwrap();
    fs::set_permissions(&command, Permissions::from_mode(0o755)).unwrap();
    let traces: Vec<_> = NAMES.iter().map(|name| folder.0.join(name)).collect();
    for (trace, name) in traces.iter().zip(NAMES) {
        fs::write(trace, format!("what {name} holds\n")).unwrap();
    }
    let results = folder.0.join("results.jsonl");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers/side-by-side.sh");
    let output = Command::new("bash")
        .arg(script)
        .arg("--vpmm")
        .arg(&command)
        .args(["--no-torch", "--only", "replay", "--only", "fit", "--turns", "2", "--out"])
        .arg(&results)
        .args(&traces)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results = fs::read_to_string(&results).unwrap();
    let told: Vec<&str> = results.lines().filter(|line| line.contains("\"trace\"")).collect();
    // Of the three allocators in two parts and two turns the first, then all others alike.
    assert_eq!(told.len(), 3 * 2 * 2 * NAMES.len(), "{results}");
    let first = &told[..NAMES.len()];
    assert!(first.iter().zip(NAMES).all(|(line, name)| line.contains(&format!("\"{name}\""))));
    assert!(told.chunks(NAMES.len()).all(|again| again == first), "{results}");
}
