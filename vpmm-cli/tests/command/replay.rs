//! `vpmm replay` and `vpmm info`.

use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;

use crate::rig::{File, HEADER, json, run, stderr, stdout, vpmm};

/// Keys that scripts may rely on, in their order.
const KEYS: [&str; 11] = [
    "trace",
    "allocator",
    "device",
    "ops",
    "ns_per_op",
    "peak_live_bytes",
    "peak_mapped_bytes",
    "utilisation",
    "driver_calls",
    "driver_time_us",
    "oom",
];

/// Two threads on two streams, sizes under and over a page, a leak.
fn mixed_rows() -> String {
    let mut rows = String::new();
    for i in 1..60_u64 {
        let (thread, bytes) = (1 + i % 2, 512 + i * 333_333 % 7_000_000);
        rows += &format!("{thread},x,allocate,{i:#x},{bytes},{}\n", i % 2);
        if i > 8 {
            rows += &format!("{thread},x,free,{:#x},1,{}\n", i - 8, i % 2);
        }
    }
    rows
}

#[test]
fn json_is_one_object_per_trace_and_allocator() {
    let (one, two) = (File::rows(&mixed_rows()), File::rows("1,x,allocate,0x1,2097152,0\n"));
    let allocators = "cuda-malloc,default,paged,cuda-async";
    let args =
        ["replay", one.path(), two.path(), "--device=sim", "--allocator", allocators, "--json"];
    let output = run(&args);
    let objects = json(&output, 0);
    let of = |o: &Value, key: &str| o[key].as_str().unwrap().to_owned();
    let pairs: Vec<_> = objects.iter().map(|o| (of(o, "trace"), of(o, "allocator"))).collect();
    let expected: Vec<_> = [&one, &two]
        .iter()
        .flat_map(|file| allocators.split(',').map(|a| (file.path().to_owned(), a.to_owned())))
        .collect();
    assert_eq!(pairs, expected);
    for (line, object) in stdout(&output).lines().zip(&objects) {
        let places: Vec<_> =
            KEYS.iter().map(|key| line.find(&format!("\"{key}\":")).expect(key)).collect();
        assert!(places.is_sorted(), "{line}");
        assert_eq!((&object["device"], &object["oom"]), (&Value::from("sim"), &Value::from(false)));
        assert!(object["ns_per_op"].as_f64().unwrap() > 0.0);
        assert!(object["driver_calls"].as_u64().unwrap() > 0);
        assert!(object["driver_time_us"].as_f64().unwrap() > 0.0);
        let (all, host) = (object["ns_per_op"].as_f64(), object["host_ns_per_op"].as_f64());
        // Every cold pass calls the driver.
        assert!(host.unwrap() < all.unwrap(), "{line}");
        let live = object["peak_live_bytes"].as_u64().unwrap();
        let mapped = object["peak_mapped_bytes"].as_u64().unwrap();
        assert!(0 < live && live <= mapped, "{line}");
        let utilisation = object["utilisation"].as_f64().unwrap();
        assert!((utilisation - live as f64 / mapped as f64).abs() < 1e-4);
    }
    assert_eq!(objects[0]["ops"], 110);
    assert_eq!(objects[4]["ops"], 1);
    assert_eq!(objects[4]["peak_live_bytes"], 2 << 20);
    assert_eq!(objects[5]["peak_mapped_bytes"], 2 << 20);
    assert_eq!(objects[6]["peak_mapped_bytes"], 2 << 20);
}

#[test]
fn without_json_a_table_is_printed() {
    let file = File::rows(&mixed_rows());
    let output = run(&["replay", file.path(), "--device=sim", "--allocator=paged,cuda-async"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for part in
        ["ns/op", "utilisation", "peak mapped", "driver calls", "paged", "cuda-async", "110"]
    {
        assert!(stdout(&output).contains(part), "{part} is missing in\n{}", stdout(&output));
    }
    assert_eq!(stderr(&output), "", "no progress bar where there is no terminal");
}

#[test]
fn passes_threads_and_checks_are_reported() {
    let file = File::rows(&mixed_rows());
    let args =
        ["replay", file.path(), "--device=sim", "--repeat=3", "--threads", "--verify", "--json"];
    let objects = json(&run(&args), 0);
    assert_eq!(objects[0]["pass_ns_per_op"].as_array().unwrap().len(), 3);
    assert_eq!((&objects[0]["threads"], &objects[0]["streams"]), (&2.into(), &2.into()));
    assert_eq!((&objects[0]["verified"], &objects[0]["mismatches"]), (&true.into(), &0.into()));
    let warm: Vec<f64> = objects[0]["pass_ns_per_op"].as_array().unwrap()[1..]
        .iter()
        .map(|ns| ns.as_f64().unwrap())
        .collect();
    assert_eq!(objects[0]["ns_per_op"].as_f64().unwrap(), warm[0].min(warm[1]));
    assert!(objects[0]["pass_driver_time_us"].is_null(), "what checks contents is not told apart");
}

#[test]
fn each_pass_tells_its_time_in_the_driver() {
    let file = File::rows(&mixed_rows());
    for allocators in ["default", "paged"] {
        let allocator = format!("--allocator={allocators}");
        let args = ["replay", file.path(), "--device=sim", &allocator, "--repeat=3", "--json"];
        let object = &json(&run(&args), 0)[0];
        let passes = object["pass_driver_time_us"].as_array().unwrap();
        let passes: Vec<f64> = passes.iter().map(|us| us.as_f64().unwrap()).collect();
        assert_eq!(passes.len(), 3);
        // All that is needed is made in the first pass; the allocator's making is in none.
        let all = object["driver_time_us"].as_f64().unwrap();
        assert!(
            passes[0] > 1.0 && passes[1..].iter().all(|us| *us < passes[0] / 2.0),
            "{passes:?}"
        );
        assert!((passes[0]..=all).contains(&passes.iter().sum()), "{passes:?} of {all}");
    }
}

#[test]
fn gzip_and_standard_input_are_read() {
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    writeln!(gz, "{HEADER}1,x,allocate,0x1,64,0").unwrap();
    let bytes = gz.finish().unwrap();
    let file = File::new(&bytes);
    assert_eq!(json(&run(&["replay", file.path(), "--device=sim", "--json"]), 0)[0]["ops"], 1);

    let mut child = vpmm(&["replay", "-", "--device=sim", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&bytes).unwrap();
    let objects = json(&child.wait_with_output().unwrap(), 0);
    assert_eq!((&objects[0]["trace"], &objects[0]["ops"]), (&"-".into(), &1.into()));
}

#[test]
fn a_malformed_row_is_named_and_nothing_is_replayed() {
    let good = File::rows("1,x,allocate,0x1,64,0\n");
    let bad = File::rows("1,x,allocate,0x1,64,0\n1,x,free,oops,64,0\n");
    let output = run(&["replay", good.path(), bad.path(), "--device=sim", "--json"]);
    assert_eq!(output.status.code(), Some(2));
    let expected = format!("{}: line 3, column 4 (Pointer): \"oops\"", bad.path());
    assert!(stderr(&output).contains(&expected), "{}", stderr(&output));
    assert_eq!(stdout(&output), "");
}

#[test]
fn bad_input_and_usage_end_with_2() {
    let file = File::rows("1,x,allocate,0x1,64,0\n");
    let path = file.path();
    let cases: [(&[&str], &str); 10] = [
        (&["replay"], "TRACE"),
        (&["replay", "/nonexistent.csv"], "/nonexistent.csv: cannot open"),
        (&["replay", "/"], "/: cannot open"),
        (&["replay", path, "--allocator=malloc"], "there is no allocator"),
        (&["replay", path, "--device=gpu"], "expected auto, sim or cuda:N"),
        (&["replay", path, "--limit=lots"], "expected a number"),
        // To the driver's pool that would be no limit, and to others that nothing fits.
        (&["replay", path, "--limit=0", "--allocator=cuda-async"], "more than 0 bytes"),
        (&["replay", path, "--repeat=0"], "--repeat"),
        (&["replay", path, "--verify-stride=4096"], "--verify"),
        (&["replay", "-", "-", "--device=sim"], "only once"),
    ];
    for (args, message) in cases {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{args:?}: {}", stderr(&output));
    }
}

/// An allocator that cannot be made is found out when its turn comes.
#[test]
fn what_was_found_out_before_bad_input_is_printed() {
    let file = File::rows("1,x,allocate,0x1,64,0\n");
    let bad = "--allocator=default,coalescing(initial=4GiB,max=1GiB)";
    let commands: [&[&str]; 3] = [
        &["replay", file.path(), bad],
        &["fit", file.path(), bad],
        &["bench", "--quick", "--case=pair_512", bad],
    ];
    for command in commands {
        let output = run(&[command, &["--device=sim"]].concat());
        assert_eq!(output.status.code(), Some(2), "{command:?}: {}", stderr(&output));
        assert!(stderr(&output).contains("max_bytes"), "{command:?}: {}", stderr(&output));
        let rows = stdout(&output).lines().filter(|line| line.contains(" default ")).count();
        assert_eq!(rows, 1, "{command:?}: {}", stdout(&output));
        let objects = json(&run(&[command, &["--device=sim", "--json"]].concat()), 2);
        assert_eq!(objects.len(), 1, "{command:?}");
    }
    let output = run(&["replay", file.path(), "--device=sim", &bad.replace("default,", "")]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(2), ""));
}

#[test]
fn a_bad_variable_is_named_and_ends_with_2() {
    let file = File::rows("1,x,allocate,0x1,64,0\n");
    let output = vpmm(&["replay", file.path(), "--device=sim"])
        .env("VPMM_PAGE_SIZE", "two")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = stderr(&output);
    assert!(said.contains("VPMM_PAGE_SIZE") && said.contains("two"), "{said}");
}

#[test]
fn the_environment_sets_the_paged_pool() {
    let file = File::rows("1,x,allocate,0x1,2097152,0\n");
    let output = vpmm(&["replay", file.path(), "--device=sim", "--json", "--allocator=paged"])
        .envs([("VPMM_PAGE_SIZE", "4194304"), ("VPMM_PAGES", "5")])
        .output()
        .unwrap();
    let object = &json(&output, 0)[0];
    assert!(object["peak_mapped_bytes"].as_u64().unwrap() >= 20 << 20, "{object}");
}

#[test]
fn out_of_memory_ends_with_3_and_shows_the_map() {
    let rows: String = (1..9).map(|i| format!("1,x,allocate,{i:#x},2097152,0\n")).collect();
    let file = File::rows(&rows);
    let args = ["replay", file.path(), "--device=sim", "--limit=10MiB", "--json", "--allocator"];
    for allocator in ["default", "paged", "cuda-async", "cuda-malloc"] {
        let output = run(&[&args[..], &[allocator]].concat());
        let objects = json(&output, 3);
        assert_eq!((&objects[0]["oom"], &objects[0]["ops"]), (&true.into(), &5.into()));
        assert_eq!(objects[0]["peak_live_bytes"], 10 << 20);
        assert_eq!(objects[0]["error_line"], 7);
        assert!(objects[0]["peak_mapped_bytes"].as_u64().unwrap() <= 10 << 20);
        let said = stderr(&output);
        assert!(said.contains("line 7"), "{said}");
        assert!(said.contains("at that moment"), "{said}");
        if allocator == "paged" {
            assert!(said.contains("[1][1][1][1][+1]"), "{said}");
        }
    }
    // A second trace that fits is still replayed, and the gravest end is told.
    let small = File::rows("1,x,allocate,0x1,64,0\n");
    let output = run(&[&args[..5], &[small.path()]].concat());
    assert_eq!(json(&output, 3).len(), 2);
}

#[test]
fn odd_rows_are_remarked_on_and_do_no_harm() {
    let file = File::rows(
        "1,x,free,0x9,64,0\n1,x,allocate failure,(nil),5000000,0\n1,x,allocate,(nil),0,0\n\
         1,x,allocate,0x1,64,0\n1,x,allocate,0x1,64,0\n",
    );
    let output = run(&["replay", file.path(), "--device=sim", "--json"]);
    assert_eq!(json(&output, 0)[0]["ops"], 3);
    let said = stderr(&output);
    assert!(said.contains("1 frees of pointers"), "{said}");
    assert!(said.contains("1 allocations at addresses still allocated"), "{said}");
    assert!(said.contains("1 allocations that had failed"), "{said}");
}

#[test]
fn a_trace_without_operations_is_no_error() {
    let file = File::rows("");
    for further in [&[][..], &["--paced"], &["--longest"], &["--threads"], &["--verify"]] {
        let output = run(&[&["replay", file.path(), "--device=sim", "--json"], further].concat());
        let objects = json(&output, 0);
        assert_eq!((&objects[0]["ops"], &objects[0]["ns_per_op"]), (&0.into(), &Value::Null));
    }
}

#[test]
fn a_device_that_is_not_there_is_a_failure() {
    let file = File::rows("1,x,allocate,0x1,64,0\n");
    let output = run(&["replay", file.path(), "--device=cuda:9999"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cuda:9999 cannot be used"), "{}", stderr(&output));
}

#[test]
fn auto_says_where_it_runs() {
    let file = File::rows("1,x,allocate,0x1,64,0\n");
    let output = run(&["replay", file.path(), "--json"]);
    let device = json(&output, 0)[0]["device"].as_str().unwrap().to_owned();
    let said = stderr(&output);
    let expected = if device == "sim" { "device: the simulator" } else { &device };
    assert!(said.contains(expected), "{said}");
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let file = File::rows("1,x,allocate,0x1,64,0\n");
    let mut child = vpmm(&["replay", file.path(), "--device=sim", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), ""));
}

#[test]
fn help_tells_the_exit_codes() {
    for args in [&["--help"][..], &["replay", "--help"]] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains("3  out of memory"), "{}", stdout(&output));
    }
}

#[test]
fn info_shows_devices_or_says_that_there_is_no_driver() {
    let output = run(&["info"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    let none = text.contains("There is no CUDA driver") && text.contains("libcuda.so.1");
    assert!(none || text.contains("driver: CUDA"), "{text}");

    let object = &json(&run(&["info", "--json"]), 0)[0];
    assert_eq!(object["driver"].is_null(), object["no_driver"].is_string(), "{object}");
}

#[test]
fn info_shows_the_simulated_device() {
    let object = &json(&run(&["info", "--device=sim", "--json"]), 0)[0];
    assert_eq!(object["devices"][0]["granularity_bytes"], 2 << 20);
    assert_eq!(object["devices"][0]["attributes"][0]["value"], 1, "{object}");
    assert!(object["devices"][0]["costs"].is_null(), "{object}");
    let output = run(&["info", "--device=sim"]);
    assert!(stdout(&output).contains("virtual memory management   yes"), "{}", stdout(&output));

    let object = &json(&run(&["info", "--device=sim", "--costs", "--json"]), 0)[0];
    let costs = object["devices"][0]["costs"].as_array().unwrap();
    let of = |key: &str| costs.iter().map(|of| of[key].as_f64().unwrap()).collect::<Vec<_>>();
    assert_eq!(of("handle_bytes"), [2, 64, 1024].map(|mib: u32| f64::from(mib << 20)));
    assert!(of("set_access_us").iter().all(|us| *us > 10.0), "{object}");
    let output = run(&["info", "--device=sim", "--costs"]);
    assert!(stdout(&output).contains("4 of 1024 MiB"), "{}", stdout(&output));
}

/// A request for a gigabyte has more made than those before and behind it, and warm passes have none.
#[test]
fn longest_names_the_call_with_the_most_driver_time() {
    let sizes = [900_u64, 3 << 20, 1 << 30, 5 << 20];
    let rows: String = (1..)
        .zip(sizes)
        .map(|(at, bytes)| format!("1,x,allocate,{at:#x},{bytes},0\n"))
        .chain((1..5).map(|at| format!("1,x,free,{at:#x},1,0\n")))
        .collect();
    let file = File::rows(&rows);
    let replay = |further: &[&str]| {
        run(&[&["replay", file.path(), "--device=sim", "--repeat=3"], further].concat())
    };
    let object = json(&replay(&["--json", "--longest"]), 0).remove(0);
    // Behind the line of the header.
    assert_eq!(object["longest_line"], 4, "{object}");
    let [longest, all] =
        ["longest_driver_us", "driver_time_us"].map(|key| object[key].as_f64().unwrap());
    assert!(longest > 100.0 && longest < all, "{object}");
    let sums = |key: &str| {
        let spent = object[key].as_array().unwrap();
        let us: f64 = spent.iter().map(|of| of["us"].as_f64().unwrap()).sum();
        (spent.iter().map(|of| of["calls"].as_u64().unwrap()).sum::<u64>(), us)
    };
    let (by_function, of_longest) = (sums("driver_by_function"), sums("longest_by_function"));
    assert_eq!(by_function.0, object["driver_calls"], "{object}");
    assert!((by_function.1 - all).abs() < 0.1, "{object}");
    assert!((of_longest.1 - longest).abs() < 0.1 && of_longest.0 < by_function.0, "{object}");
    assert_eq!(object["longest_by_function"][0]["function"], "cuMemSetAccess", "{object}");
    let output = replay(&["--longest"]);
    let told =
        "line 4: default: the allocation of 1073741824 bytes spent the most time in the driver";
    assert!(stderr(&output).contains(told), "{}", stderr(&output));
    assert!(stderr(&output).contains(" calls of cuMemSetAccess, "), "{}", stderr(&output));

    let object = json(&replay(&["--json"]), 0).remove(0);
    for key in ["longest_line", "longest_driver_us", "longest_by_function"] {
        assert!(object[key].is_null(), "{object}");
    }
    // Device work is not told from the pool's calls on the simulator, and cuMemAlloc is not the pool's.
    for further in ["--verify", "--allocator=cuda-malloc"] {
        let object = json(&replay(&["--json", further]), 0).remove(0);
        assert!(object["driver_by_function"].is_null(), "{object}");
    }
    let object = json(&replay(&["--json", "--longest", "--allocator=cuda-async"]), 0).remove(0);
    assert!(object["longest_driver_us"].as_f64().unwrap() > 0.0, "{object}");
    assert!(object["longest_by_function"].is_null(), "{object}");
    assert_eq!(replay(&["--longest", "--threads"]).status.code(), Some(2));
}

/// Every call at its time; what lies between is in no timing.
#[test]
fn paced_takes_as_long_as_the_program_did() {
    let rows: String = (0..5)
        .map(|n| format!("1,00:00:00.{:06},allocate,{:#x},900,0\n", n * 60_000, n + 1))
        .collect();
    let file = File::rows(&rows);
    let timed = |further: &[&str]| {
        let args: Vec<&str> = ["replay", file.path(), "--device=sim", "--json"]
            .iter()
            .chain(further)
            .copied()
            .collect();
        let begin = Instant::now();
        let object = json(&run(&args), 0).remove(0);
        (begin.elapsed(), object["ns_per_op"].as_f64().unwrap())
    };
    let (took, ns_per_op) = timed(&["--paced"]);
    assert!(took >= Duration::from_millis(240), "{took:?}");
    assert!(ns_per_op < 30e6, "{ns_per_op} ns an operation, as if waits counted");
    assert!(timed(&["--paced", "--threads", "--repeat=2"]).0 >= Duration::from_millis(480));

    let untimed = File::rows("1,0:0:0,allocate,0x1,900,0\n1,x,free,0x1,900,0\n");
    let output = run(&["replay", untimed.path(), "--device=sim", "--paced"]);
    assert_eq!(output.status.code(), Some(2));
    let error = stderr(&output);
    assert!(error.contains(": line 3: --paced needs a time"), "{error}");
}

/// A request that is longer than all that an allocator may have is one that lacks memory.
#[test]
fn a_request_above_an_allocators_maximum_ends_as_one_that_lacks_memory() {
    let file = File::rows("1,x,allocate,0x1,1000,0\n1,x,allocate,0x2,14680064,0\n");
    for (allocator, limit) in
        [("arena", "--limit=8MiB"), ("coalescing(max=8MiB,default)", "--limit=1GiB")]
    {
        let args =
            ["replay", file.path(), "--device=sim", "--json", "--allocator", allocator, limit];
        let objects = json(&run(&args), 3);
        assert_eq!(objects[0]["oom"], true, "{allocator}: {}", objects[0]);
    }
}

/// No device has so much, nor would the sum with what is allocated be a number of 64 bits.
#[test]
fn a_request_of_all_that_64_bits_count_is_out_of_memory() {
    let rows =
        "1,x,allocate,0x1,512,0\n1,x,allocate,0x2,18446744073709551615,0\n1,x,free,0x1,512,0\n";
    let file = File::rows(rows);
    let allocators = "cuda-malloc,cuda-async,default,paged,arena,caching,host";
    let args = ["replay", file.path(), "--device=sim", "--allocator", allocators, "--json"];
    let output = run(&args);
    for object in json(&output, 3) {
        assert_eq!(object["oom"], true, "{object}");
        assert_eq!(object["error_line"], 3, "{object}");
    }
    let told = "512 B in 1 allocations; the driver does not tell where";
    assert!(stderr(&output).contains(told), "{}", stderr(&output));
}

/// As in the log of a server that makes a thread for each request: few are there at a time.
#[test]
fn a_thread_for_each_request_is_made_when_it_is_due() {
    let rows: String = (1..=50_000).map(|i| format!("{i},x,allocate,{i:#x},512,0\n")).collect();
    let file = File::rows(&rows);
    let begin = Instant::now();
    let output = run(&["replay", file.path(), "--device=sim", "--threads", "--json"]);
    let took = begin.elapsed();
    let objects = json(&output, 0);
    assert_eq!((&objects[0]["ops"], &objects[0]["threads"]), (&50_000.into(), &50_000.into()));
    assert!(took < Duration::from_secs(30), "{took:?}");
}
