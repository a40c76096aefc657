use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;

use super::*;

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

fn read(text: &str) -> Result<Trace, TraceError> {
    Trace::read("t.csv", text.as_bytes())
}

fn good(rows: &str) -> Trace {
    read(&format!("{HEADER}{rows}")).unwrap()
}

/// The message of a trace that must be refused.
fn refused(text: &str) -> String {
    read(text).expect_err("refused").to_string()
}

fn actions(trace: &Trace) -> Vec<(Action, u32)> {
    trace.operations.iter().map(|o| (o.action, o.slot)).collect()
}

use Action::{Allocate, Free};

#[test]
fn rmm_rows_are_read_as_rmm_writes_them() {
    let trace = good(
        "17733,01:45:56.140640,allocate,0x7f000003e800,1000,0\n\
         17733,01:45:56.140685,free,0x7f000003e800,1000,0x2\n\
         17733,01:45:56.140886,allocate,(nil),0,0\n\
         17733,01:45:56.140946,allocate failure,(nil),5000000,0x55d0c0ffee00\n",
    );
    assert_eq!(actions(&trace), [(Allocate, 0), (Free, 0)]);
    assert_eq!(trace.allocations, [Allocation { bytes: 1000, line: 2, stream: 0 }]);
    assert_eq!((trace.streams, trace.threads, trace.peak_live_bytes), (2, 1, 1000));
    assert_eq!(
        trace.oddities,
        Oddities { recorded_failures: 1, empty_rows: 1, ..Oddities::default() }
    );
}

#[test]
fn columns_are_found_by_name_in_any_order() {
    let trace = read(
        "Device,stream,SIZE,Action,Alignment,Pointer\n\
         0,0x5,64,allocate,256,0x10\n\
         0,0x6,64,free,256,0x10\n",
    )
    .unwrap();
    assert_eq!(actions(&trace), [(Allocate, 0), (Free, 0)]);
    assert_eq!((trace.streams, trace.threads), (2, 1));
}

#[test]
fn a_file_without_header_is_in_rmm_order() {
    let trace = read("1,00:00:00.0,allocate,0x10,64,0\n1,00:00:00.1,free,0x10,64,0").unwrap();
    assert_eq!(trace.operations.len(), 2);
    assert_eq!(trace.allocations[0].line, 1);
}

#[test]
fn gzip_is_told_by_its_bytes() {
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    writeln!(gz, "{HEADER}1,x,allocate,0x10,64,0").unwrap();
    let trace = Trace::read("no-suffix", &gz.finish().unwrap()[..]).unwrap();
    assert_eq!(trace.allocations.len(), 1);
}

#[test]
fn broken_gzip_is_an_error_that_names_the_line() {
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    writeln!(gz, "{HEADER}1,x,allocate,0x10,64,0").unwrap();
    let mut bytes = gz.finish().unwrap();
    bytes.truncate(bytes.len() - 6);
    let error = Trace::read("t.gz", &bytes[..]).expect_err("truncated").to_string();
    assert!(error.starts_with("t.gz: line "), "{error}");
}

/// As parallel compressors and `cat` make files of many members, and tapes have whole blocks.
#[test]
fn gzip_may_have_many_members_and_zeroes_behind_them() {
    let member = |text: &str| {
        let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
        gz.write_all(text.as_bytes()).unwrap();
        gz.finish().unwrap()
    };
    // The second begins within a row.
    let whole =
        [member(HEADER), member("1,x,alloc"), member(""), member("ate,0x10,64,0\n")].concat();
    let read = |parts: &[&[u8]]| Trace::read("t.gz", &parts.concat()[..]);
    for zeroes in [0, 1, 2, 300, 300_000] {
        let zeroes = vec![0; zeroes];
        assert_eq!(read(&[&whole, &zeroes]).unwrap().allocations.len(), 1);
    }
    for (behind, word) in [
        (&[b"\0\0\0", &whole[..]].concat(), "zero bytes behind the gzip data"),
        (&b"more than nothing".to_vec(), "invalid gzip header"),
    ] {
        let error = read(&[&whole, behind]).expect_err("others").to_string();
        assert!(error.starts_with("t.gz: line 3: ") && error.contains(word), "{error}");
    }
}

#[test]
fn an_address_is_another_allocation_after_its_free() {
    let trace = good(
        "1,x,allocate,0x10,64,0\n\
         1,x,free,0x10,64,0\n\
         1,x,allocate,0x10,32,0\n\
         1,x,allocate,0x20,8,0\n\
         1,x,free,0x10,32,0\n",
    );
    assert_eq!(
        actions(&trace),
        [(Allocate, 0), (Free, 0), (Allocate, 1), (Allocate, 2), (Free, 1)]
    );
    assert_eq!(trace.leaked, [2]);
    assert_eq!(trace.peak_live_bytes, 64);
}

#[test]
fn a_free_of_an_unknown_pointer_is_counted_and_left_out() {
    let trace = good("1,x,free,0x10,64,0\n1,x,free,(nil),0,0\n");
    assert_eq!(trace.operations, []);
    assert_eq!(trace.oddities, Oddities { unknown_frees: 1, empty_rows: 1, ..Oddities::default() });
}

#[test]
fn a_missing_free_is_put_in() {
    let trace = good("1,x,allocate,0x10,64,5\n2,x,allocate,0x10,32,0\n");
    assert_eq!(actions(&trace), [(Allocate, 0), (Free, 0), (Allocate, 1)]);
    assert_eq!(trace.operations[1].stream, 0, "on the stream that allocated it");
    assert_eq!(trace.oddities.missing_frees, 1);
    assert_eq!(trace.peak_live_bytes, 64);
}

#[test]
fn an_empty_allocation_at_an_address_is_known_when_freed() {
    let trace = good("1,x,allocate,0x10,0,0\n1,x,free,0x10,0,0\n");
    assert_eq!(trace.operations, []);
    assert_eq!(trace.oddities, Oddities { empty_rows: 2, ..Oddities::default() });
}

#[test]
fn streams_are_told_apart_as_cuda_does() {
    let stream_of = |rows: &str| good(rows).streams;
    // Null and the legacy handle are one stream; the number 1 is another.
    assert_eq!(stream_of("1,x,allocate,0x1,1,0\n1,x,allocate,0x2,1,0x1\n"), 1);
    assert_eq!(stream_of("1,x,allocate,0x1,1,0\n1,x,allocate,0x2,1,(nil)\n"), 1);
    assert_eq!(stream_of("1,x,allocate,0x1,1,0\n1,x,allocate,0x2,1,1\n"), 2);
    // The per-thread default stream is another one in each thread.
    assert_eq!(stream_of("1,x,allocate,0x1,1,0x2\n2,x,allocate,0x2,1,0x2\n"), 2);
    assert_eq!(stream_of("1,x,allocate,0x1,1,2\n2,x,allocate,0x2,1,2\n"), 1);
}

#[test]
fn line_ends_and_blank_lines_do_not_matter() {
    let trace = read("\u{feff}Action,Pointer,Size\r\n\r\nallocate,0x10,64\r\n\n free ,0x10, \r\n");
    assert_eq!(trace.unwrap().operations.len(), 2);
}

/// What comes after it would go unread otherwise, and nobody would see that.
#[test]
fn a_carriage_return_within_a_line_is_refused() {
    let rows = "1,x,allocate,0x10,64,0\r1,x,free,0x10,64,0\n";
    let error = refused(&format!("{HEADER}{rows}"));
    assert!(error.starts_with("t.csv: line 2, column 1 (the whole row): "), "{error}");
    // All of an old Macintosh's file is one line.
    let error = refused(&format!("{HEADER}{rows}").replace('\n', "\r"));
    assert!(error.starts_with("t.csv: line 1, column 1 (the whole row): "), "{error}");
    // One too many, as where a line's end was translated twice, hides nothing.
    assert_eq!(good("1,x,allocate,0x10,64,0\r\r\n1,x,free,0x10,64,0\r").operations.len(), 2);
}

#[test]
fn the_fault_is_named_by_file_line_and_column() {
    let cases = [
        ("1,x,allocate,0x10,abc,0", "line 3, column 5 (Size): \"abc\" is not an unsigned number"),
        ("1,x,allocate,0x10,-5,0", "line 3, column 5 (Size): \"-5\""),
        ("1,x,allocate,0x10,+5,0", "line 3, column 5 (Size): \"+5\""),
        ("1,x,allocate,0x10,18446744073709551616,0", "line 3, column 5 (Size)"),
        ("1,x,allocate,0x10,,0", "line 3, column 5 (Size): \"\""),
        ("1,x,allocate,1234,64,0", "line 3, column 4 (Pointer): \"1234\" is not a pointer"),
        ("1,x,allocate,0xzz,64,0", "line 3, column 4 (Pointer)"),
        ("1,x,allocate,0x,64,0", "line 3, column 4 (Pointer)"),
        ("1,x,allocate,(nil),64,0", "line 3, column 4 (Pointer): an allocation of 64 bytes"),
        ("1,x,malloc,0x10,64,0", "line 3, column 3 (Action): \"malloc\" is not allocate"),
        ("1,x,allocate,0x10", "line 3, column 5 (Size): the row ends"),
        ("1,x,allocate,0x10,64", "line 3, column 6 (Stream): the row ends"),
        ("1,x,allocate,0x10,64,s", "line 3, column 6 (Stream): \"s\""),
        ("me,x,allocate,0x10,64,0", "line 3, column 1 (Thread): \"me\""),
    ];
    for (row, message) in cases {
        // A blank line before the fault must not shift the line's number.
        let error = refused(&format!("{HEADER}\n{row}\n"));
        assert!(error.starts_with(&format!("t.csv: {message}")), "{row} gave {error}");
    }
}

#[test]
fn times_are_since_the_first_row_and_never_go_back() {
    let trace = good(
        "1,23:59:59.500000,allocate,0x10,64,0\n\
         2,23:59:59.400000,allocate,0x20,64,0\n\
         1,23:59:59.75,free,0x10,64,0\n\
         1,00:00:01,free,0x20,64,0\n",
    );
    assert_eq!(trace.times, [0, 0, 250, 1500].map(Duration::from_millis));
    // A row that is late by a moment may be of the day before.
    let trace = good(
        "1,23:59:59.5,allocate,0x10,64,0\n\
         1,00:00:00.5,allocate,0x20,64,0\n\
         2,23:59:59.9,free,0x10,64,0\n\
         1,00:00:01.5,free,0x20,64,0\n",
    );
    assert_eq!(trace.times, [0, 1000, 1000, 2000].map(Duration::from_millis));
    // A night without a request is no row that is late.
    let trace = good(
        "1,20:00:00,allocate,0x10,64,0\n\
         1,09:00:00,free,0x10,64,0\n\
         1,21:30:00,allocate,0x10,64,0\n",
    );
    assert_eq!(trace.times, [0, 13 * 3600, 13 * 3600 + 45_000].map(Duration::from_secs));
    let rows = "1,00:00:00.1,allocate,0x10,64,0\n1,x,free,0x10,64,0\n";
    assert!(good(rows).times.is_empty());
    assert_eq!((good(rows).untimed_line, trace.untimed_line), (Some(3), None));
    for time in [
        "1:2",
        "::",
        "-1:0:0",
        "0:0:-1",
        "99999999999999999999:0:0",
        "0:0:inf",
        "0:0:1e30",
        "25:0:0",
    ] {
        assert!(good(&format!("1,{time},allocate,0x10,64,0\n")).times.is_empty(), "{time}");
    }
}

#[test]
fn a_header_without_a_needed_column_is_refused() {
    for (header, message) in [
        (
            "Thread,Time,Action,Address,Size,Stream",
            "line 2: the header names no Pointer, but Thread, Time, Action, Address, Size, Stream",
        ),
        ("size", "line 2: the header names no Action and no Pointer, but size"),
        (
            "Time,\" a, b\"",
            "line 2: the header names no Action and no Pointer and no Size, but Time, a, b",
        ),
        (
            "a,b,c,d,e,f",
            "line 2, column 3 (Action): \"c\" is no action, and the first row is no header either, \
             with Action, Pointer and Size",
        ),
        (
            "Thread;Time;Action;Pointer;Size;Stream",
            "line 2, column 1 (the whole row): \"Thread;Time;Action;Pointer;Size;Stream\" is neither a \
             header, with Action, Pointer and Size, nor a row of RMM's log, with commas between",
        ),
        (
            "# recorded, by hand",
            "line 2, column 1 (the whole row): \"# recorded, by hand\" is neither a header, with Action, \
             Pointer and Size, nor a row of RMM's log, with commas between",
        ),
    ] {
        assert_eq!(refused(&format!("\n{header}\n")), format!("t.csv: {message}"));
    }
    let error = refused(&format!("Action,Pointer{}\n", ",x".repeat(10_000)));
    assert!(error.len() < 200 && error.ends_with("x, x, …"), "{error}");
}

#[test]
fn an_empty_file_is_refused_but_an_empty_trace_is_not() {
    assert!(refused("").contains("no rows"));
    assert!(refused("\n\n").contains("no rows"));
    assert_eq!(read(HEADER).unwrap().operations, []);
}

/// As a log has them whose program was killed, or goes on: it is written ahead.
#[test]
fn zeroes_at_the_end_are_no_rows() {
    let row = "1,x,allocate,0x10,64,0\n";
    for zeroes in [1, 300, 300_000] {
        let zeroes = "\0".repeat(zeroes);
        assert_eq!(good(&format!("{row}{zeroes}")).operations.len(), 1);
        assert_eq!(read(&format!("{HEADER}{zeroes}")).unwrap().operations, []);
        assert!(refused(&zeroes).contains("no rows"));
        for behind in [row, "\n"] {
            let error = refused(&format!("{HEADER}{row}{zeroes}{behind}"));
            assert!(
                error.starts_with("t.csv: line 3, column 1 (the whole row): zero bytes"),
                "{error}"
            );
        }
        // A row that was not finished is no row.
        let error = refused(&format!("{HEADER}{row}1,x,allo{zeroes}"));
        assert!(error.starts_with("t.csv: line 3, column 3 (Action): \"allo"), "{error}");
    }
}

/// As of /dev/zero, plain or behind what looks like a log.
#[test]
fn zeroes_without_end_are_no_trace() {
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    gz.write_all(HEADER.as_bytes()).unwrap();
    let gz = gz.finish().unwrap();
    for head in [&b""[..], HEADER.as_bytes(), &gz] {
        let (told, heard) = std::sync::mpsc::channel();
        let head = head.to_vec();
        std::thread::spawn(move || {
            let endless = std::io::Cursor::new(head).chain(std::io::repeat(0));
            let error = Trace::read("t.csv", endless).expect_err("endless").to_string();
            told.send(error).unwrap();
        });
        let error = heard.recv_timeout(std::time::Duration::from_secs(60)).expect("an end");
        assert!(error.contains("more than 67108864 zero bytes"), "{error}");
    }
}

#[test]
fn a_line_without_end_is_refused_early() {
    let error = refused(&"x".repeat(1 << 20));
    assert!(error.contains("longer than"), "{error}");
}

#[test]
fn sums_beyond_64_bits_do_not_wrap() {
    let trace = good(
        "1,x,allocate,0x10,18446744073709551615,0\n\
         1,x,allocate,0x20,18446744073709551615,0\n",
    );
    assert_eq!(trace.peak_live_bytes, u64::MAX);
}

#[test]
fn an_interrupted_replay_has_a_peak_of_its_own() {
    let trace = good("1,x,allocate,0x10,64,0\n1,x,free,0x10,64,0\n1,x,allocate,0x20,128,0\n");
    let mut left = 2;
    let peak = trace.peak_live_bytes_of(|_| {
        let done = left > 0;
        left -= i32::from(done);
        done
    });
    assert_eq!((peak, trace.peak_live_bytes), (64, 128));
}

fn cell() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("allocate".to_owned()),
        Just("free".to_owned()),
        Just("allocate failure".to_owned()),
        Just("(nil)".to_owned()),
        Just("0x10".to_owned()),
        Just("0x20".to_owned()),
        Just("\"".to_owned()),
        Just("18446744073709551615".to_owned()),
        "[0-9]{1,3}",
        "\\PC{0,6}",
    ]
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = Trace::read("fuzz", &bytes[..]);
    }

    #[test]
    fn any_gzip_body_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut file = vec![0x1f, 0x8b];
        file.extend(bytes);
        let _ = Trace::read("fuzz", &file[..]);
    }

    /// Rows of plausible cells: whatever is accepted must hold together.
    #[test]
    fn what_is_accepted_is_consistent(
        rows in prop::collection::vec(prop::collection::vec(cell(), 6..7), 0..40),
    ) {
        let text: String = rows.iter().map(|r| format!("{}\n", r.join(","))).collect();
        if let Ok(trace) = read(&format!("{HEADER}{text}")) {
            check(&trace)?;
        }
    }

    /// Rows that are all well formed: every one is accepted.
    #[test]
    fn well_formed_rows_are_accepted(
        rows in prop::collection::vec((0..3_u8, 0..6_u64, 0..9_u64, 0..3_u64, 0..4_u64), 0..200),
    ) {
        let text: String = rows
            .iter()
            .map(|&(action, pointer, size, thread, stream)| {
                let action = ["allocate", "free", "allocate failure"][usize::from(action)];
                let size = if pointer == 0 { 0 } else { size };
                format!("{thread},x,{action},{pointer:#x},{size},{stream}\n")
            })
            .collect();
        let trace = read(&format!("{HEADER}{text}"));
        prop_assert!(trace.is_ok(), "{:?}", trace.err());
        check(&trace.unwrap())?;
    }
}

/// Each slot is allocated once, then freed at most once, and never before.
fn check(trace: &Trace) -> Result<(), TestCaseError> {
    let mut live = vec![None; trace.allocations.len()];
    let (mut now, mut peak) = (0_u128, 0_u128);
    for operation in &trace.operations {
        prop_assert!(operation.stream < trace.streams);
        prop_assert!(operation.thread < trace.threads);
        let slot = operation.slot as usize;
        let bytes = u128::from(trace.allocations[slot].bytes);
        prop_assert!(bytes > 0);
        match operation.action {
            Allocate => {
                prop_assert_eq!(live[slot], None);
                live[slot] = Some(true);
                now += bytes;
            }
            Free => {
                prop_assert_eq!(live[slot], Some(true));
                live[slot] = Some(false);
                now -= bytes;
            }
        }
        peak = peak.max(now);
    }
    let leaked: Vec<u32> = (0..trace.allocations.len() as u32)
        .filter(|&slot| live[slot as usize] == Some(true))
        .collect();
    prop_assert!(live.iter().all(Option::is_some));
    prop_assert_eq!(&leaked, &trace.leaked);
    prop_assert_eq!(u64::try_from(peak).unwrap_or(u64::MAX), trace.peak_live_bytes);
    Ok(())
}

/// Of a compressed one those of the file: what it comes to is known at its end only.
#[test]
fn all_bytes_of_a_file_pass_whoever_watches() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../traces/gpt_train.csv.gz");
    let passed = std::cell::Cell::new(0);
    let mut told = None;
    let trace = Trace::open_through(path, |mut source, bytes| {
        told = bytes;
        let passed = &passed;
        let count = move |buffer: &mut [u8]| {
            let read = source.read(buffer)?;
            passed.set(passed.get() + read as u64);
            Ok(read)
        };
        Counted(count)
    });
    assert_eq!(trace.unwrap(), Trace::open(path).unwrap());
    assert_eq!(told, Some(std::fs::metadata(path).unwrap().len()));
    assert_eq!(Some(passed.get()), told);
}

struct Counted<F>(F);

impl<F: FnMut(&mut [u8]) -> std::io::Result<usize>> std::io::Read for Counted<F> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        (self.0)(buffer)
    }
}
