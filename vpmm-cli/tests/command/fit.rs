//! `vpmm fit`.

use crate::rig::{File, json, keys, run, stderr, stdout};

/// What is printed of a fit: these keys in this order, and no others.
const KEYS: [&str; 8] = [
    "trace",
    "allocator",
    "peak_live_bytes",
    "limit_bytes",
    "ratio",
    "ns_per_op",
    "driver_time_us",
    "fails_above",
];

const MIB: u64 = 1 << 20;

/// Three allocations of 5 MiB at one time, then one of 14 MiB.
fn rows() -> String {
    let mut rows: String = (1..=3).map(|i| format!("1,x,allocate,{i:#x},5242880,0\n")).collect();
    rows += &(1..=3).map(|i| format!("1,x,free,{i:#x},5242880,0\n")).collect::<String>();
    rows + "1,x,allocate,0x9,14680064,0\n"
}

#[test]
fn the_smallest_limit_is_found() {
    // In pages of 2 MiB each of the three takes 6 MiB: 18 in all, for 15 that are live.
    let three = File::rows(&rows());
    // Ten pages, of which five are free and scattered; five more have to come from these.
    let mut scattered = String::new();
    for i in 1..=10 {
        scattered += &format!("1,x,allocate,{i:#x},2097152,0\n");
    }
    for i in (1..=10).step_by(2) {
        scattered += &format!("1,x,free,{i:#x},2097152,0\n");
    }
    scattered += "1,x,allocate,0x99,10485760,0\n";
    let scattered = File::rows(&scattered);
    let args = ["fit", three.path(), scattered.path(), "--device=sim", "--allocator=paged"];
    let output = run(&[&args[..], &["--json"]].concat());
    let objects = json(&output, 0);
    assert_eq!(keys(&output), [KEYS, KEYS]);
    assert_eq!(objects[0]["trace"], three.path());
    assert_eq!(objects[0]["allocator"], "paged");
    assert_eq!(objects[0]["peak_live_bytes"], 15 * MIB);
    assert_eq!(objects[0]["limit_bytes"], 18 * MIB);
    assert_eq!(objects[0]["ratio"], 1.2);
    assert_eq!(objects[1]["limit_bytes"], 20 * MIB);
    assert_eq!(objects[1]["ratio"], 1.0);
    for object in &objects {
        assert!(object["ns_per_op"].as_f64().unwrap() > 0.0, "{object}");
        // Ten pages cost some 30 µs each, moved or made; setting a driver up costs far more.
        let us = object["driver_time_us"].as_f64().unwrap();
        assert!((100.0..10_000.0).contains(&us), "{object}");
        assert!(object["fails_above"].is_null(), "{object}");
    }
    assert_eq!(stderr(&output), "", "no progress bar where there is no terminal");

    let output = run(&args);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for part in ["limit / live", "driver time", "18 MiB", "1.20000", "20 MiB", "1.00000"] {
        assert!(stdout(&output).contains(part), "{part} is missing in\n{}", stdout(&output));
    }
}

#[test]
fn a_replay_completes_at_the_limit_and_not_below() {
    let file = File::rows(&rows());
    for allocator in ["default", "paged", "cuda-async"] {
        let args = ["--device=sim", "--json", "--allocator", allocator];
        let fit = json(&run(&[&["fit", file.path()], &args[..]].concat()), 0);
        let limit = fit[0]["limit_bytes"].as_u64().unwrap();
        assert!(limit >= 15 * MIB && limit.is_multiple_of(2 * MIB), "{limit}");
        for (bytes, code) in [(limit, 0), (limit - 2 * MIB, 3)] {
            let limit = format!("--limit={bytes}");
            json(&run(&[&["replay", file.path(), &limit], &args[..]].concat()), code);
        }
    }
}

/// With some room to spare the last request finds none: the larger limit led the pool another way.
#[test]
fn a_limit_above_at_which_it_fails_is_told() {
    let bytes = [14 * MIB, 10 * MIB, 2 * MIB, 4 * MIB, 5 * MIB, 700_000];
    let mut rows: String =
        (1..).zip(bytes).map(|(i, b)| format!("1,x,allocate,{i:#x},{b},0\n")).collect();
    rows += &format!("1,x,free,0x4,{},0\n1,x,allocate,0x9,{},0\n", 4 * MIB, 6 * MIB);
    let file = File::rows(&rows);
    let args = ["fit", file.path(), "--device=sim", "--json", "--allocator=cuda-async"];
    let output = run(&args);
    let object = &json(&output, 0)[0];
    let [limit, above] = ["limit_bytes", "fails_above"].map(|key| object[key].as_u64().unwrap());
    assert_eq!((limit, above), (38 * MIB, 42 * MIB));
    let said = stderr(&output);
    assert!(said.contains(&format!("but not with {}, {above}", 40 * MIB)), "{said}");
    for (bytes, code) in [(limit, 0), (above, 3), (above + 2 * MIB, 0)] {
        let limit = format!("--limit={bytes}");
        let replay =
            ["replay", file.path(), "--device=sim", "--json", "--allocator=cuda-async", &limit];
        json(&run(&replay), code);
    }
}

#[test]
fn an_allocator_without_a_limit_is_refused() {
    let file = File::rows(&rows());
    let output = run(&["fit", file.path(), "--device=sim", "--allocator=paged,cuda-malloc"]);
    assert_eq!(output.status.code(), Some(2));
    let said = stderr(&output);
    assert!(said.contains("cuda-malloc has no limit"), "{said}");
    assert!(said.contains("cuda-async"), "those that have one are named: {said}");
    assert_eq!(stdout(&output), "");
}

#[test]
fn bad_input_ends_with_2() {
    let bad = File::rows("1,x,free,oops,64,0\n");
    let cases: [(&[&str], &str); 5] = [
        (&["fit"], "TRACE"),
        (&["fit", "/nonexistent.csv"], "/nonexistent.csv: cannot open"),
        (&["fit", bad.path()], "line 2, column 4 (Pointer)"),
        (&["fit", bad.path(), "--allocator=malloc"], "there is no allocator"),
        (&["fit", bad.path(), "--device=gpu"], "expected auto, sim or cuda:N"),
    ];
    for (args, message) in cases {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn what_no_device_holds_ends_with_3() {
    // 2 TiB, on a device with 141 GiB.
    let file = File::rows("1,x,allocate,0x1,2199023255552,0\n");
    let output = run(&["fit", file.path(), "--device=sim", "--json", "--allocator=paged"]);
    let objects = json(&output, 3);
    assert_eq!(keys(&output), [KEYS]);
    assert!(objects[0]["limit_bytes"].is_null() && objects[0]["ratio"].is_null());
    assert!(stderr(&output).contains("does not complete"), "{}", stderr(&output));
}

#[test]
fn a_trace_of_nothing_fits_anywhere() {
    let file = File::rows("");
    let objects = json(&run(&["fit", file.path(), "--device=sim", "--json"]), 0);
    assert_eq!((&objects[0]["peak_live_bytes"], &objects[0]["ratio"]), (&0.into(), &().into()));
    assert_eq!(objects[0]["limit_bytes"], 2 * MIB);
}

#[test]
fn help_tells_what_is_done() {
    let output = run(&["fit", "--help"]);
    assert_eq!(output.status.code(), Some(0));
    for part in ["3  out of memory", "bisection", "not quite monotonic", "--allocator"] {
        assert!(stdout(&output).contains(part), "{part} is missing in {}", stdout(&output));
    }
}
