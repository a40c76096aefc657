//! Resources and stacks of them by name, in every command that compares allocators.

use crate::rig::{File, json, run, stderr, vpmm};

/// Everything that has a name, each over something where it stands on something.
const STACKS: [&str; 19] = [
    "limiting(1GiB,default)",
    "statistics(paged)",
    "thread-safe(cuda-async)",
    "tracking(cuda-malloc)",
    "managed",
    "pinned",
    "coalescing",
    "coalescing(initial=64MiB,max=1GiB,default)",
    "fixed-size(8MiB)",
    "binning(18,22)",
    "binning(16,20,coalescing)",
    "arena(512MiB)",
    "arena(256MiB,paged)",
    "caching",
    "caching(max_split_size_mb=64,garbage_collection_threshold=0.8)",
    "caching(upstream=default)",
    "aligned(4096,coalescing)",
    "prefetch(managed)",
    "limiting(2GiB,statistics(tracking(thread-safe(caching(arena(1GiB))))))",
];

/// Threads, streams, sizes of every order, a leak.
fn rows() -> String {
    let mut rows = String::new();
    for i in 1..300_u64 {
        let (thread, bytes) = (1 + i % 3, 1 + i * 333_333 % (1 << (8 + i % 15)));
        rows += &format!("{thread},x,allocate,{i:#x},{bytes},{}\n", i % 4);
        if i > 20 {
            rows += &format!("{thread},x,free,{:#x},1,{}\n", i - 20, i % 5);
        }
    }
    rows
}

#[test]
fn every_name_replays_with_its_contents_checked() {
    let file = File::rows(&rows());
    let all = STACKS.join(",");
    let args = ["replay", file.path(), "--device=sim", "--verify", "--repeat=2", "--json"];
    for threads in [&[][..], &["--threads"]] {
        let output = run(&[&args[..], threads, &["--allocator", &all]].concat());
        let objects = json(&output, 0);
        let names: Vec<_> = objects.iter().map(|o| o["allocator"].as_str().unwrap()).collect();
        assert_eq!(names, STACKS);
        for object in &objects {
            let [live, mapped] =
                ["peak_live_bytes", "peak_mapped_bytes"].map(|key| object[key].as_u64().unwrap());
            assert!(live > 0 && mapped >= live, "{object}");
            assert_eq!((&object["mismatches"], &object["oom"]), (&0.into(), &false.into()));
            assert!(object["driver_calls"].as_u64().unwrap() > 0, "{object}");
        }
    }
}

/// What an allocator takes at the start may be what there is none of; those behind it have their turn all the same.
#[test]
fn an_allocator_that_cannot_be_made_is_out_of_memory() {
    let file = File::rows("1,x,allocate,0x1,64,0\n");
    let args = ["replay", file.path(), "--device=sim", "--limit=100MiB", "--allocator"];
    let output = run(&[&args[..], &["coalescing(initial=1GiB),default", "--json"]].concat());
    let objects = json(&output, 3);
    let [unmade, made] = &objects[..] else { panic!("{objects:?}") };
    assert_eq!((&unmade["oom"], &unmade["ops"]), (&true.into(), &0.into()), "{unmade}");
    assert!(unmade["error"].as_str().unwrap().starts_with("out of memory: 1 GiB requested"));
    assert!(unmade["error_line"].is_null() && unmade["ns_per_op"].is_null(), "{unmade}");
    assert_eq!((&made["oom"], &made["ops"]), (&false.into(), &1.into()), "{made}");
    let said = "coalescing(initial=1GiB) cannot be set up: out of memory: 1 GiB requested";
    assert!(stderr(&output).contains(said), "{}", stderr(&output));
}

/// Work on it would fail the device for good, at the first allocation and for all that comes after.
#[test]
fn host_memory_is_not_verified() {
    let file = File::rows("1,x,allocate,0x1,64,0\n");
    for stack in ["host", "statistics(thread-safe(host))"] {
        let args = ["replay", file.path(), "--device=sim", "--verify", "--allocator", stack];
        let output = run(&args);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        let said = format!("{stack}: the device does not reach its memory: not with --verify");
        assert!(stderr(&output).contains(&said), "{}", stderr(&output));
        json(&run(&["replay", file.path(), "--device=sim", "--json", "--allocator", stack]), 0);
    }
}

#[test]
fn a_limit_is_that_of_what_makes_memory() {
    // 40 MiB live, in pieces that no allocator loses much to.
    let rows: String = (1..=20).map(|i| format!("1,x,allocate,{i:#x},{},0\n", 2 << 20)).collect();
    let file = File::rows(&rows);
    for stack in ["statistics(default)", "coalescing", "caching", "arena", "tracking(pinned)"] {
        let replay = |limit: &str| {
            let args = ["replay", file.path(), "--device=sim", "--json", "--limit", limit];
            run(&[&args[..], &["--allocator", stack]].concat())
        };
        let within = &json(&replay("100MiB"), 0)[0];
        assert_eq!(within["oom"], false, "{stack}");
        let output = replay("30MiB");
        let beyond = &json(&output, 3)[0];
        assert_eq!(beyond["oom"], true, "{stack}");
        assert!(beyond["peak_mapped_bytes"].as_u64().unwrap() <= 30 << 20, "{beyond}");
        // What stands on what is told where memory has run out.
        assert!(stderr(&output).contains("└─") || !stack.contains('('), "{}", stderr(&output));
    }
}

/// The log that the logging adaptor writes is a trace that replays to the same.
#[test]
fn a_log_is_a_trace() {
    let file = File::rows(&rows());
    let log = File::rows("");
    // Not the default profile, which goes by the clock: on a busy machine it holds now more, now less.
    let logging = format!("logging({},coalescing)", log.path());
    let replay = |path: &str, allocator: &str| {
        let args = ["replay", path, "--device=sim", "--json", "--allocator", allocator];
        json(&run(&args), 0).remove(0)
    };
    let (first, again) = (replay(file.path(), &logging), replay(log.path(), "coalescing"));
    assert_eq!(first["ops"].as_u64().unwrap() + 20, again["ops"].as_u64().unwrap());
    for key in ["peak_live_bytes", "peak_mapped_bytes", "streams"] {
        assert_eq!(first[key], again[key], "{key}");
    }
}

/// A log takes nothing away: no trace that is to be replayed, and no other allocator's log.
#[test]
fn a_log_is_not_written_over_a_trace_or_another_log() {
    let (file, log) = (File::rows(&rows()), File::rows(""));
    let before = std::fs::read(file.path()).unwrap();
    let own = format!("caching,statistics(logging({},default))", file.path());
    let twice = format!("logging({0},default),limiting(1GiB,logging({0},paged))", log.path());
    let device = "--device=sim";
    for (args, part) in [
        (&["replay", file.path(), device, "--allocator", &own][..], "is a trace"),
        (&["fit", file.path(), device, "--allocator", &own], "is a trace"),
        (&["replay", file.path(), device, "--allocator", &twice], "two logs"),
        (&["bench", "--quick", device, "--case=pair_1MiB", "--allocator", &twice], "two logs"),
    ] {
        let output = run(args);
        assert!(stderr(&output).contains(part), "{args:?}: {}", stderr(&output));
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
    // A trace on standard input is a file, too; and one that is not there yet has several names.
    let mut piped = vpmm(&["replay", "-", device, "--allocator", &own]);
    let output = piped.stdin(std::fs::File::open(file.path()).unwrap()).output().unwrap();
    assert!(stderr(&output).contains("is a trace"), "{}", stderr(&output));
    assert!(std::fs::read(file.path()).unwrap() == before);
    let (folder, name) = log.path().rsplit_once('/').unwrap();
    let last = folder.rsplit('/').next().unwrap();
    let again =
        format!("logging({folder}/{name}-2,paged),logging({folder}/../{last}/{name}-2,default)");
    let output = run(&["replay", file.path(), device, "--allocator", &again]);
    assert!(stderr(&output).contains("two logs"), "{}", stderr(&output));
    // By a link to what is not there yet, too.
    let (link, absent) = (format!("{}-link", log.path()), format!("{}-absent", log.path()));
    std::os::unix::fs::symlink(&absent, &link).unwrap();
    let linked = format!("logging({link},paged),logging({absent},default)");
    let output = run(&["replay", file.path(), device, "--allocator", &linked]);
    let _ = (std::fs::remove_file(&link), std::fs::remove_file(&absent));
    assert!(stderr(&output).contains("two logs"), "{}", stderr(&output));
    // Nor over what is found out.
    let out = File::new(b"");
    let over = format!("logging({},default)", out.path());
    let mut piped = crate::rig::vpmm(&["replay", file.path(), device, "--allocator", &over]);
    let writes = std::fs::OpenOptions::new().write(true).open(out.path()).unwrap();
    let output = piped.stdout(writes).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("the output goes there"), "{}", stderr(&output));
    // What is no file may be written to by any number of them.
    let nowhere = "logging(/dev/null,default),logging(/dev/null,paged)";
    let args = ["replay", file.path(), device, "--json", "--allocator", nowhere];
    assert_eq!(json(&run(&args), 0).len(), 2);
}

/// A log on a full disk lacks rows, which is told: whoever replays it later would not know.
#[test]
fn rows_that_a_log_lacks_are_told() {
    let file = File::rows("1,x,allocate,0x1,64,0\n1,x,free,0x1,64,0\n");
    let stack = "statistics(logging(/dev/full,default)),default";
    let args = ["replay", file.path(), "--device=sim", "--json", "--allocator", stack];
    let output = run(&args);
    let objects = json(&output, 1);
    assert!(objects.len() == 2 && objects[0]["ops"] == 2, "{objects:?}");
    // The header as well.
    let said = "3 rows of the log /dev/full could not be written";
    assert!(stderr(&output).contains(said), "{}", stderr(&output));
    // So it is with what a search has left, and with what is measured.
    let args = ["fit", file.path(), "--device=sim", "--json", "--allocator", stack];
    let output = run(&args);
    let objects = json(&output, 1);
    assert!(objects.len() == 2 && objects[0]["ratio"].is_number(), "{objects:?}");
    assert!(stderr(&output).contains(said), "{}", stderr(&output));
    let bench = ["bench", "--quick", "--case=pair_512,grow_1GiB", "--device=sim", "--json"];
    let output = run(&[&bench[..], &["--allocator", stack]].concat());
    for object in json(&output, 1) {
        let error = object["error"].as_str().unwrap_or_default();
        let is_full = object["allocator"] != "default";
        assert_eq!(error.contains("rows of the log /dev/full"), is_full, "{object}");
    }
}

#[test]
fn fits_and_benches_take_stacks() {
    let file = File::rows(&rows());
    let args = ["fit", file.path(), "--device=sim", "--json", "--allocator"];
    let fits = json(&run(&[&args[..], &["caching,arena,limiting(1TiB,default)"]].concat()), 0);
    assert_eq!(fits.len(), 3);
    for fit in &fits {
        assert!(fit["ratio"].as_f64().unwrap() >= 1.0, "{fit}");
    }
    let args = ["bench", "--quick", "--device=sim", "--json", "--case=pair_1MiB,cross_stream"];
    let cases = json(&run(&[&args[..], &["--allocator=caching,statistics(default)"]].concat()), 0);
    assert_eq!(cases.len(), 4);
    for case in &cases {
        assert!(case["ns_per_op"].as_f64().unwrap() > 0.0, "{case}");
    }
}

#[test]
fn what_is_wrong_with_a_stack_is_usage() {
    let file = File::rows(&rows());
    for (stack, part) in [
        ("limiting(1GiB)", "lacks its upstream"),
        ("limiting(1GiB,arenas)", "there is no allocator \"arenas\""),
        ("caching(max_split_size=1)", "there is no setting \"max_split_size\""),
        ("caching,caching", "named twice"),
        ("statistics(default", "brackets"),
    ] {
        let output = run(&["replay", file.path(), "--device=sim", "--allocator", stack]);
        assert_eq!(output.status.code(), Some(2), "{stack}");
        assert!(stderr(&output).contains(part), "{stack}: {}", stderr(&output));
    }
    // Settings that only the resource itself can judge.
    let commands: [&[&str]; 3] =
        [&["replay", file.path()], &["fit", file.path()], &["bench", "--quick", "--case=pair_512"]];
    for command in commands {
        for (stack, part) in [
            ("aligned(3,default)", "power of two"),
            ("aligned(9223372036854775808,default)", "an alignment of"),
            ("arena(3)", "arena_bytes=3"),
        ] {
            let output = run(&[command, &["--device=sim", "--allocator", stack]].concat());
            assert_eq!(output.status.code(), Some(2), "{command:?} {}", stderr(&output));
            assert!(stderr(&output).contains(part), "{}", stderr(&output));
        }
    }
}

/// What is below never gives as much as what stands there takes at the start: that lacks memory, as a request does.
#[test]
fn a_stack_that_needs_more_at_the_start_than_there_ever_is_lacks_memory() {
    let file = File::rows(&rows());
    let commands: [&[&str]; 3] =
        [&["replay", file.path()], &["fit", file.path()], &["bench", "--quick", "--case=pair_512"]];
    let stacks = ["fixed-size(2MiB,fixed-size(1MiB))", "arena(2GiB,arena(1GiB))"];
    for (command, stack) in commands.into_iter().flat_map(|of| stacks.map(|stack| (of, stack))) {
        let all = format!("{stack},default");
        let last = ["--device=sim", "--json", "--allocator", &all];
        let objects = json(&run(&[command, &last].concat()), 3);
        assert_eq!(objects.len(), 2, "{command:?} {stack}: {objects:?}");
    }
}
