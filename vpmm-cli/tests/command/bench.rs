//! `vpmm bench`.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal};

use crate::rig::{json, keys, run, stderr, stdout, vpmm};

/// What is printed of a case: these keys in this order, and no others.
const KEYS: [&str; 14] = [
    "case",
    "allocator",
    "device",
    "threads",
    "ops",
    "ns_per_op",
    "p50_ns",
    "p99_ns",
    "p999_ns",
    "max_ns",
    "mops_per_s",
    "peak_live_bytes",
    "peak_mapped_bytes",
    "driver_calls",
];

/// Every case with its number of threads.
const CASES: [(&str, u64); 23] = [
    ("pair_512", 1),
    ("pair_64KiB", 1),
    ("pair_1MiB", 1),
    ("pair_4MiB", 1),
    ("pair_64MiB", 1),
    ("random_4MiB", 1),
    ("random_64MiB", 1),
    ("live_100", 1),
    ("live_10k", 1),
    ("live_100k", 1),
    ("live_1M", 1),
    ("streams_1000", 1),
    ("zombies_10k", 1),
    ("threads_1", 1),
    ("threads_2", 2),
    ("threads_4", 4),
    ("threads_8", 8),
    ("threads_16", 16),
    ("shared_stream_8", 8),
    ("cross_stream", 1),
    ("grow_1GiB", 1),
    ("grow_512x2MiB", 1),
    ("gather_1GiB", 1),
];

const GIB: u64 = 1 << 30;

/// Every case on the allocator, with what must hold of its figures.
fn every_case(allocator: &str) {
    let args = ["bench", "--quick", "--device=sim", "--json", "--allocator", allocator];
    let output = run(&args);
    let objects = json(&output, 0);
    assert_eq!(objects.len(), CASES.len());
    assert!(keys(&output).iter().all(|keys| *keys == KEYS), "{}", stdout(&output));
    for (object, (case, threads)) in objects.iter().zip(CASES) {
        assert_eq!((&object["case"], &object["threads"]), (&case.into(), &threads.into()));
        assert_eq!((&object["allocator"], &object["device"]), (&allocator.into(), &"sim".into()));
        let number = |key: &str| object[key].as_f64().unwrap_or_else(|| panic!("{key}: {object}"));
        let steps = ["p50_ns", "p99_ns", "p999_ns", "max_ns"].map(number);
        assert!(steps.is_sorted() && steps[3] > 0.0, "{object}");
        assert!(number("ops") >= 1.0 && number("mops_per_s") > 0.0, "{object}");
        assert!(number("ns_per_op") >= 0.0, "{object}");
        if threads == 1 {
            // Of one thread the one is the other, but for rounding.
            let product = number("ns_per_op") * number("mops_per_s");
            assert!((950.0..1050.0).contains(&product) || number("ns_per_op") < 1.0, "{object}");
            assert!(number("peak_live_bytes") <= number("peak_mapped_bytes"), "{object}");
        }
        let hits = ["pair", "threads", "live", "streams"];
        if allocator == "default" && hits.iter().any(|hit| case.starts_with(hit)) {
            assert_eq!(object["driver_calls"], 0, "a hit needs no driver: {object}");
        }
        match case {
            "pair_4MiB" => assert_eq!(object["peak_live_bytes"], 4 << 20),
            "streams_1000" => {
                // One on each stream, of 512 B to 4 KiB, each of which has had its turn.
                assert_eq!(object["ops"], 2_000);
                let least = 1_000.0 * 512.0;
                assert!((least..8.0 * least).contains(&number("peak_live_bytes")), "{object}");
            }
            "zombies_10k" => {
                // A hundred that have moved, as many between them, and as many in one block.
                let of_zombies = 200.0 * f64::from(2 << 20);
                assert!(number("peak_live_bytes") > of_zombies, "{object}");
            }
            "grow_1GiB" => {
                assert_eq!((&object["ops"], &object["peak_live_bytes"]), (&1.into(), &GIB.into()));
                assert!(number("driver_calls") >= 1.0, "memory comes from the driver: {object}");
            }
            "grow_512x2MiB" => {
                assert_eq!(
                    (&object["ops"], &object["peak_live_bytes"]),
                    (&512.into(), &GIB.into())
                );
            }
            "gather_1GiB" => {
                assert_eq!(object["peak_live_bytes"], 32 * GIB);
                assert_eq!(object["peak_mapped_bytes"], 32 * GIB, "the limit was kept: {object}");
            }
            _ => {}
        }
    }
}

#[test]
fn every_case_runs_on_the_default_pool() {
    every_case("default");
}

#[test]
fn every_case_runs_on_the_paged_pool() {
    every_case("paged");
}

#[test]
fn every_case_runs_on_the_drivers_pool() {
    every_case("cuda-async");
}

#[test]
fn cases_and_allocators_are_picked_and_keep_their_order() {
    let output = run(&[
        "bench",
        "--quick",
        "--device=sim",
        "--case=gather_1GiB,pair_512",
        "--allocator=cuda-malloc,paged",
        "--json",
    ]);
    let objects = json(&output, 0);
    let named: Vec<_> = objects
        .iter()
        .map(|object| (object["case"].as_str().unwrap(), object["allocator"].as_str().unwrap()))
        .collect();
    let expected = [
        ("gather_1GiB", "cuda-malloc"),
        ("gather_1GiB", "paged"),
        ("pair_512", "cuda-malloc"),
        ("pair_512", "paged"),
    ];
    assert_eq!(named, expected);
    // One driver call per call of this allocator, and all of them during the timed calls.
    assert_eq!(objects[2]["driver_calls"], objects[2]["ops"]);
}

/// What may wait for the device would wait for the stream that stands still, for ever.
#[test]
fn zombies_are_left_out_where_an_allocator_may_wait_for_the_device() {
    let output = run(&[
        "bench",
        "--quick",
        "--device=sim",
        "--case=zombies_10k,live_100",
        "--allocator=cuda-malloc,arena",
        "--json",
    ]);
    let objects = json(&output, 0);
    for (object, allocator) in objects.iter().zip(["cuda-malloc", "arena"]) {
        assert_eq!(
            (&object["case"], &object["allocator"]),
            (&"zombies_10k".into(), &allocator.into())
        );
        assert!(object["ns_per_op"].is_null(), "{object}");
        assert!(object["error"].as_str().unwrap().starts_with("left out: it may wait"), "{object}");
        assert!(stderr(&output).contains(&format!("zombies_10k: {allocator}: left out")));
    }
    assert!(objects[2..].iter().all(|object| object["ns_per_op"].is_number()), "{objects:?}");
}

/// Blocks that are shorter than a page come from the driver's pool, which moves nothing.
#[test]
fn zombies_that_do_not_come_to_be_are_told() {
    let output = vpmm(&["bench", "--quick", "--device=sim", "--json", "--allocator=paged"])
        .arg("--case=zombies_10k")
        .env("VPMM_PAGE_SIZE", "12582912")
        .output()
        .unwrap();
    let objects = json(&output, 0);
    assert!(objects[0]["ns_per_op"].is_null(), "{objects:?}");
    assert_eq!(objects[0]["error"], "left out: only 0 of 100 zombies wait");
}

#[test]
fn without_json_a_table_is_printed() {
    let output = run(&["bench", "--quick", "--device=sim", "--case=pair_64KiB"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for part in ["case", "ns/op", "p99.9", "Mops/s", "driver calls", "pair_64KiB"] {
        assert!(stdout(&output).contains(part), "{part} is missing in\n{}", stdout(&output));
    }
    assert_eq!(stdout(&output).lines().count(), 2);
    assert_eq!(stderr(&output), "", "no progress bar where there is no terminal");
}

/// A bench takes minutes: who has seen enough, or has to go, has what was found out.
#[test]
fn a_signal_prints_the_rows_that_are_there() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        if is_ignored(signal) {
            println!("{signal:?} is skipped: whoever runs the tests has it ignored");
            continue;
        }
        let rest = "zombies_10k,pair_512,pair_1MiB,random_4MiB,live_10k,live_100k,live_1M";
        let mut child = vpmm(&["bench", "--device=sim", "--allocator=arena,managed"])
            .args(["--case", rest])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Both are left out of the first case. When the second is told of the first one's row is there.
        let told = BufReader::new(child.stderr.take().unwrap()).lines().nth(1).unwrap().unwrap();
        assert!(told.contains("zombies_10k: managed: left out"), "{told}");
        rustix::process::kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(
            output.status.signal(),
            Some(signal.as_raw()),
            "it ends as by the signal: {output:?}"
        );
        let rows: Vec<&str> = stdout(&output).lines().skip(1).collect();
        assert!(rows[0].contains("zombies_10k") && rows[0].contains("arena"), "{rows:?}");
        assert!(rows.len() < 14, "{rows:?}");
    }
}

/// Whether this process has a signal ignored, and so all that it starts.
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() & 1 << (signal.as_raw() - 1) != 0
}

/// As behind the `&` of a script, or with `nohup`.
#[test]
fn a_signal_that_was_ignored_stays_so() {
    let bench = vpmm(&["bench", "--quick", "--device=sim", "--case=zombies_10k,live_100"]);
    let mut child = Command::new("sh")
        .args(["-c", "trap '' INT; exec \"$0\" \"$@\""])
        .arg(bench.get_program())
        .args(bench.get_args())
        .arg("--allocator=arena,managed")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(said.next().unwrap().unwrap().contains("left out"));
    rustix::process::kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), stdout(&output).lines().count()), (Some(0), 5));
}

#[test]
fn bad_usage_ends_with_2() {
    let cases: [(&[&str], &str); 4] = [
        (&["bench", "--case=pair"], "there is no case \"pair\"; known: pair_512"),
        (&["bench", "--case=pair_512,pair_512"], "named twice"),
        (&["bench", "--allocator=malloc"], "there is no allocator"),
        (&["bench", "--device=gpu"], "expected auto, sim or cuda:N"),
    ];
    for (args, message) in cases {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{args:?}: {}", stderr(&output));
    }
    let output = vpmm(&["bench", "--quick", "--device=sim", "--allocator=paged"])
        .env("VPMM_PAGE_SIZE", "two")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("VPMM_PAGE_SIZE"), "{}", stderr(&output));
}

#[test]
fn a_case_that_runs_out_of_memory_is_told_and_the_others_run() {
    // In pages of 12 MiB each piece of 32 MiB takes 36: 64 of them are more than 2 GiB.
    let output = vpmm(&["bench", "--quick", "--device=sim", "--json", "--allocator=paged"])
        .args(["--case=gather_1GiB,pair_4MiB"])
        .env("VPMM_PAGE_SIZE", "12582912")
        .output()
        .unwrap();
    let objects = json(&output, 3);
    assert!(objects[0]["ns_per_op"].is_null() && objects[0]["error"].is_string(), "{objects:?}");
    assert!(objects[1]["ns_per_op"].is_number() && objects[1]["error"].is_null(), "{objects:?}");
    assert!(stderr(&output).contains("gather_1GiB: paged: out of memory"), "{}", stderr(&output));
}

/// As in a replay: an allocator that may have less than one request lacks memory, however it says so.
#[test]
fn a_case_above_an_allocators_maximum_is_out_of_memory() {
    for allocator in ["limiting(1MiB,paged)", "coalescing(max=1MiB)", "fixed-size(1MiB)"] {
        let cases = "--case=pair_64MiB,pair_512";
        let args = ["bench", cases, "--device=sim", "--quick", "--json", "--allocator", allocator];
        let objects = json(&run(&args), 3);
        assert!(objects[0]["error"].is_string() && objects[1]["ns_per_op"].is_f64(), "{objects:?}");
    }
}

#[test]
fn help_names_the_cases() {
    let output = run(&["bench", "--help"]);
    assert_eq!(output.status.code(), Some(0));
    for part in CASES.map(|(case, _)| case).into_iter().chain(["3  out of memory", "--quick"]) {
        assert!(stdout(&output).contains(part), "{part} is missing in {}", stdout(&output));
    }
}
