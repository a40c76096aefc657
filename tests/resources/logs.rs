//! Logs: what is in them, who can read them, and that no row is lost.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use vpmm::resource::*;
use vpmm::{DevicePtr, Error, MemoryResource, StreamHandle};
use vpmm_cli::trace::Trace;

use crate::support::Rig;

const STREAM: StreamHandle = StreamHandle::PER_THREAD;

/// A path of this test's own, taken away at the end.
struct Path(PathBuf);

impl Path {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("vpmm-{}-{name}.csv", std::process::id())))
    }

    fn read(&self) -> String {
        std::fs::read_to_string(&self.0).expect("the log is there")
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A writer whose text can be read.
#[derive(Clone, Default)]
struct Text(Arc<Mutex<Vec<u8>>>);

impl Text {
    fn read(&self) -> String {
        String::from_utf8(self.0.lock().expect("no panic").clone()).expect("text")
    }
}

impl Write for Text {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn limited() -> Limiting<HostMalloc> {
    Limiting::new(HostMalloc::new(), 10_000)
}

#[test]
fn rows_say_what_was_called_and_how_it_went() {
    let (file, text) = (Path::new("rows"), Text::default());
    let logging = Logging::to_file(limited(), LogFormat::Rmm, &file.0)
        .expect("a log")
        .and_to_writer(text.clone());
    let ptr = logging.allocate(1000, 256, STREAM).expect("memory");
    logging.allocate(5_000_000, 256, StreamHandle::LEGACY).expect_err("above the limit");
    logging.allocate(0, 256, STREAM).expect("nothing");
    logging.deallocate(ptr, 999, 256, STREAM).expect_err("a wrong size");
    logging.deallocate(ptr, 1000, 256, STREAM).expect("freed");
    logging.flush().expect("written");
    assert_eq!(logging.lost_rows(), 0);
    drop(logging);
    let log = file.read();
    assert_eq!(log, text.read(), "both places have the same");
    let rows: Vec<Vec<&str>> = log.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(rows[0], ["Thread", "Time", "Action", "Pointer", "Size", "Stream"]);
    let address = format!("{:#x}", ptr.address());
    let expected = [
        ["allocate", &address, "1000", "0x2"],
        ["allocate failure", "(nil)", "5000000", "0x1"],
        ["allocate", "(nil)", "0", "0x2"],
        ["free", &address, "999", "0x2"],
        // Taken back: it is still allocated, as long as it was.
        ["allocate", &address, "1000", "0x2"],
        ["free", &address, "1000", "0x2"],
    ];
    assert_eq!(rows.len(), 1 + expected.len());
    for (row, expected) in rows[1..].iter().zip(expected) {
        assert_eq!(row[2..], expected);
        assert!(row[0].parse::<u64>().is_ok_and(|thread| thread > 0));
        let shape: String =
            row[1].chars().map(|c| if c.is_ascii_digit() { '9' } else { c }).collect();
        assert_eq!(shape, "99:99:99.999999");
    }
    // RMM's columns are what `vpmm replay` reads.
    let trace = Trace::read("log", log.as_bytes()).expect("a trace");
    assert_eq!(trace.allocations.len(), 2);
}

/// A notebook makes its log anew before the last one has gone: both go on, and the file is the later one's.
#[test]
fn a_file_that_is_being_written_goes_to_the_log_that_was_made_last() {
    let file = Path::new("twice");
    let first = Logging::to_file(HostMalloc::new(), LogFormat::Rmm, &file.0).expect("a log");
    let rows = |logging: &Logging<HostMalloc>, count: usize| {
        for _ in 0..count {
            let ptr = logging.allocate(1000, 256, STREAM).expect("memory");
            logging.deallocate(ptr, 1000, 256, STREAM).expect("freed");
        }
    };
    rows(&first, 10);
    let second = Logging::to_file(HostMalloc::new(), LogFormat::Rmm, &file.0).expect("a log");
    rows(&second, 1000);
    rows(&first, 10);
    drop(first);
    // In a page behind those that the first has left.
    rows(&second, 1000);
    assert_eq!(second.lost_rows(), 0);
    drop(second);
    assert_eq!(file.read().lines().count(), 1 + 2 * 2000);
    // Nobody writes to it any more: it is emptied.
    let third = Logging::to_file(HostMalloc::new(), LogFormat::Rmm, &file.0).expect("a log");
    drop(third);
    assert_eq!(file.read().lines().count(), 1);
}

/// The caller's writer and the caller's resource may panic; what is allocated is known above all the same.
#[test]
fn a_panic_loses_a_row_and_nothing_else() {
    /// Panics as it is told to.
    struct Fails(Arc<AtomicBool>, Text);
    impl Write for Fails {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            assert!(!self.0.load(Ordering::Relaxed), "for the test");
            self.1.write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    for format in [LogFormat::Rmm, LogFormat::Full] {
        let (writer_fails, below_fails) = (Arc::<AtomicBool>::default(), AtomicBool::new(false));
        let host = Arc::new(HostMalloc::new());
        let below = Arc::clone(&host);
        let upstream = Callback::new(
            host.facts(),
            |bytes, align, stream| host.allocate(bytes, align, stream),
            |ptr, bytes, align, stream| {
                assert!(!below_fails.load(Ordering::Relaxed), "for the test");
                below.deallocate(ptr, bytes, align, stream)
            },
        );
        let text = Text::default();
        let writer = Fails(Arc::clone(&writer_fails), text.clone());
        let logging = Logging::to_writer(upstream, format, writer);
        writer_fails.store(true, Ordering::Relaxed);
        let ptr = logging.allocate(1000, 256, STREAM).expect("memory");
        assert_eq!(logging.lost_rows(), 1);
        writer_fails.store(false, Ordering::Relaxed);
        below_fails.store(true, Ordering::Relaxed);
        let free = || logging.deallocate(ptr, 1000, 256, STREAM);
        assert!(catch_unwind(AssertUnwindSafe(free)).is_err());
        // Taken back: it is still allocated.
        let log = text.read();
        let last = log.lines().last().expect("a row");
        assert_eq!(last.split(',').nth(2), Some("allocate"));
        let live = last.split(',').nth(8);
        assert!(live.is_none() || live == Some("1000"), "{last}");
        below_fails.store(false, Ordering::Relaxed);
        logging.deallocate(ptr, 1000, 256, STREAM).expect("freed");
    }
}

#[test]
fn the_full_format_says_more_and_is_read_the_same() {
    Rig::everywhere(|rig| {
        let text = Text::default();
        let mut config = CoalescingConfig::default();
        (config.initial_bytes, config.max_bytes) = (1 << 20, Some(1 << 20));
        let pool = CoalescingPool::new(DeviceMalloc::new(&rig.device), &rig.device, &config);
        let logging = Logging::to_writer(pool.expect("a pool"), LogFormat::Full, text.clone());
        let stream = rig.stream();
        let ptr = logging.allocate(1000, 64, stream.handle()).expect("memory");
        logging.allocate(1 << 20, 256, stream.handle()).expect_err("above what is left");
        logging.deallocate(ptr, 1000, 64, stream.handle()).expect("freed");
        let log = text.read();
        let mut lines = log.lines();
        let columns: Vec<_> = lines.next().expect("a header").split(',').collect();
        assert_eq!(columns.len(), 13);
        let field = |line: &str, name: &str| {
            let at = columns.iter().position(|column| *column == name).expect("a column");
            line.splitn(columns.len(), ',').nth(at).expect("a field").to_owned()
        };
        let rows: Vec<_> = lines.collect();
        assert_eq!(rows.len(), 3);
        let fields = |line: &str| {
            ["Action", "Size", "Device", "Align", "Live", "Held"].map(|name| field(line, name))
        };
        assert_eq!(fields(rows[0]), ["allocate", "1000", "0", "64", "1000", "1048576"]);
        assert_eq!(fields(rows[1]), ["allocate failure", "1048576", "0", "256", "1000", "1048576"]);
        assert_eq!(fields(rows[2]), ["free", "1000", "0", "64", "0", "1048576"]);
        assert!(field(rows[0], "Nanoseconds").parse::<u64>().is_ok_and(|time| time > 0));
        assert_eq!(field(rows[2], "Nanoseconds"), "");
        assert_eq!(field(rows[0], "Date").split('-').count(), 3);
        let failure = field(rows[1], "Failure");
        assert!(failure.starts_with("\"out of memory: 1 MiB requested, "), "{failure}");
        let trace = Trace::read("log", log.as_bytes()).expect("a trace");
        assert_eq!((trace.allocations.len(), trace.operations.len()), (1, 2));
        assert_eq!(trace.oddities.recorded_failures, 1);
    });
}

/// A free that is refused takes nothing away, whatever the size given.
#[test]
fn live_bytes_are_those_of_frees_that_came_about() {
    let text = Text::default();
    let logging = Logging::to_writer(HostMalloc::new(), LogFormat::Full, text.clone());
    let ptr = logging.allocate(1000, 256, STREAM).expect("memory");
    let live = || {
        let log = text.read();
        let last = log.lines().last().expect("a row");
        last.split(',').nth(8).expect("a field").to_owned()
    };
    for bytes in [1, 5000, usize::MAX] {
        logging.deallocate(ptr, bytes, 256, STREAM).expect_err("a wrong size");
        assert_eq!(live(), "1000", "after {bytes}");
    }
    logging.deallocate(ptr, 1000, 256, STREAM).expect("freed");
    assert_eq!(live(), "0");
}

/// A free of what is not allocated leaves no allocation in the log that nobody ever frees.
#[test]
fn a_double_free_is_no_allocation_in_the_log() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    for format in [LogFormat::Rmm, LogFormat::Full] {
        let text = Text::default();
        let logging = Logging::to_writer(crate::subjects::plain_pool(&rig), format, text.clone());
        let kept = logging.allocate(1000, 256, STREAM).expect("memory");
        let ptr = logging.allocate(2000, 256, STREAM).expect("memory");
        logging.deallocate(ptr, 2000, 256, STREAM).expect("freed");
        let again = logging.deallocate(ptr, 2000, 256, STREAM);
        assert!(matches!(again, Err(Error::DoubleFree { .. })), "{again:?}");
        let inside = DevicePtr::from_address(kept.address() + 8);
        let refused = logging.deallocate(inside, 1000, 256, STREAM);
        assert!(matches!(refused, Err(Error::InteriorPointer { .. })), "{refused:?}");
        logging.deallocate(kept, 1000, 256, STREAM).expect("freed");
        let log = text.read();
        let trace = Trace::read("log", log.as_bytes()).expect("a trace");
        assert_eq!((trace.allocations.len(), trace.leaked.len()), (2, 0), "{log}");
        assert_eq!(trace.peak_live_bytes, 3000);
        if format == LogFormat::Full {
            // Why is there all the same, and what is live as it was.
            let failed = log.lines().find(|line| line.contains("double free")).expect("a row");
            assert_eq!(failed.split(',').nth(8), Some("1000"), "{failed}");
        }
    }
}

/// The same where the resource below knows no more of a pointer that was freed.
#[test]
fn a_double_free_of_a_forgotten_pointer_is_no_allocation_in_the_log() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let driver_pool = crate::subjects::driver_pool(&rig).expect("a pool");
    let below: [crate::subjects::Shared; 3] = [
        Arc::new(HostMalloc::new()),
        Arc::new(driver_pool),
        Arc::new(crate::subjects::malloc(&rig)),
    ];
    for (below, format) in
        below.iter().flat_map(|below| [LogFormat::Rmm, LogFormat::Full].map(|of| (below, of)))
    {
        let text = Text::default();
        let logging = Logging::to_writer(below, format, text.clone());
        let ptr = logging.allocate(2000, 256, STREAM).expect("memory");
        logging.deallocate(ptr, 2000, 256, STREAM).expect("freed");
        let again = logging.deallocate(ptr, 2000, 256, STREAM);
        let error = again.expect_err("it was freed");
        assert!(matches!(error, Error::ForeignPointer { .. } | Error::Driver { .. }), "{error}");
        let log = text.read();
        let trace = Trace::read("log", log.as_bytes()).expect("a trace");
        assert_eq!((trace.allocations.len(), trace.leaked.len()), (1, 0), "{log}");
    }
}

/// A free that is refused for its size leaves the allocation in the log as it was, and one of nothing leaves none.
#[test]
fn a_wrong_size_is_no_allocations_in_the_log() {
    for format in [LogFormat::Rmm, LogFormat::Full] {
        let text = Text::default();
        let logging = Logging::to_writer(HostMalloc::new(), format, text.clone());
        let ptr = logging.allocate(2000, 256, STREAM).expect("memory");
        for bytes in [0, 1, 2001, usize::MAX] {
            logging.deallocate(ptr, bytes, 256, STREAM).expect_err("a wrong size");
        }
        logging.deallocate(DevicePtr::NULL, 100, 256, STREAM).expect_err("of nothing");
        logging.deallocate(DevicePtr::NULL, 0, 256, STREAM).expect("nothing");
        let trace = Trace::read("log", text.read().as_bytes()).expect("a trace");
        let live = trace.leaked.iter().map(|slot| trace.allocations[*slot as usize].bytes);
        assert_eq!(live.collect::<Vec<_>>(), [2000], "{}", text.read());
        logging.deallocate(ptr, 2000, 256, STREAM).expect("freed");
        let trace = Trace::read("log", text.read().as_bytes()).expect("a trace");
        assert_eq!((trace.peak_live_bytes, trace.leaked.len()), (2000, 0), "{}", text.read());
    }
}

/// A file of several windows, written by several threads: every row is whole, and every address is freed
/// before it is allocated again.
#[test]
fn rows_of_many_threads_are_whole_and_in_order() {
    let file = Path::new("threads");
    let logging = Logging::to_file(HostMalloc::new(), LogFormat::Rmm, &file.0).expect("a log");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for number in 1..8000 {
                    let ptr = logging.allocate(number, 256, STREAM).expect("memory");
                    logging.deallocate(ptr, number, 256, STREAM).expect("freed");
                }
            });
        }
    });
    assert_eq!(logging.lost_rows(), 0);
    drop(logging);
    let log = file.read();
    assert!(log.len() > 2 << 20, "it crosses windows");
    assert_eq!(log.lines().count(), 1 + 4 * 7999 * 2);
    assert!(log.lines().all(|line| line.split(',').count() == 6));
    let trace = Trace::read("log", log.as_bytes()).expect("a trace");
    assert_eq!((trace.oddities.unknown_frees, trace.oddities.missing_frees), (0, 0));
    assert_eq!(trace.allocations.len(), 4 * 7999);
}

/// A writer that allocates of what it logs loses the row of that, where it would wait for itself.
#[test]
fn a_writer_may_use_what_it_logs() {
    type Log = Logging<HostMalloc>;
    struct Uses(Text, Arc<OnceLock<Weak<Log>>>);
    impl Write for Uses {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if let Some(log) = self.1.get().and_then(Weak::upgrade) {
                let ptr = log.allocate(100, 256, STREAM).expect("memory");
                log.deallocate(ptr, 100, 256, STREAM).expect("freed");
                log.flush().expect_err("it is being written");
            }
            self.0.write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    for format in [LogFormat::Rmm, LogFormat::Full] {
        let (text, own) = (Text::default(), Arc::new(OnceLock::new()));
        let uses = Uses(text.clone(), Arc::clone(&own));
        let log = Arc::new(Logging::to_writer(HostMalloc::new(), format, uses));
        own.set(Arc::downgrade(&log)).expect("the only one");
        let (done, is_done) = std::sync::mpsc::channel();
        let logs = Arc::clone(&log);
        std::thread::spawn(move || {
            let ptr = logs.allocate(1000, 256, STREAM).expect("memory");
            logs.deallocate(ptr, 1000, 256, STREAM).expect("freed");
            done.send(()).expect("somebody waits");
        });
        is_done.recv_timeout(Duration::from_secs(20)).expect("it waits for itself");
        assert_eq!((text.read().lines().count(), log.lost_rows()), (3, 4));
    }
}

/// A writer that panics loses that row alone.
#[test]
fn a_writer_that_panics_has_the_next_row() {
    struct Panics(Text, u32);
    impl Write for Panics {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.1 += 1;
            assert_ne!(self.1, 2, "for the test");
            self.0.write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let text = Text::default();
    let logging = Logging::to_writer(HostMalloc::new(), LogFormat::Rmm, Panics(text.clone(), 0));
    for _ in 0..2 {
        logging.allocate(0, 256, STREAM).expect("nothing");
    }
    assert_eq!(logging.lost_rows(), 1);
    assert_eq!(text.read().lines().count(), 2, "the header and the second row");
}

#[test]
fn the_environment_names_the_file() {
    let file = Path::new("environment");
    let run = |named: Option<&std::path::Path>| {
        let mut child = Command::new(std::env::current_exe().expect("known on Linux"));
        child.args(["--exact", "logs::child", "--ignored", "--nocapture"]);
        child.env("VPMM_TEST_CHILD", "environment").env_remove("RMM_LOG_FILE");
        if let Some(name) = named {
            child.env("RMM_LOG_FILE", name);
        }
        let output = child.output().expect("the test can run itself");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    for nothing in [None, Some("".as_ref())] {
        assert!(run(nothing).contains("RMM_LOG_FILE="));
    }
    assert!(run(Some(&file.0)).contains("logged"));
    assert_eq!(file.read().lines().count(), 3);
}

/// A program that is killed loses no row: zero bytes behind the last one are all that tells.
#[test]
fn a_crash_loses_no_row() {
    let file = Path::new("crash");
    let output = Command::new(std::env::current_exe().expect("known on Linux"))
        .args(["--exact", "logs::child", "--ignored", "--nocapture"])
        .env("VPMM_TEST_CHILD", "crash")
        .env("RMM_LOG_FILE", &file.0)
        .output()
        .expect("the test can run itself");
    assert!(!output.status.success(), "it crashes");
    let log = file.read();
    let rows = log.trim_end_matches('\0');
    assert!(rows.len() < log.len() && rows.ends_with('\n'));
    assert_eq!(rows.lines().count(), 1 + 30_000);
    assert!(rows.lines().all(|line| line.split(',').count() == 6));
}

#[test]
#[ignore = "started by other tests, in a process with an environment of its own"]
fn child() {
    let Some(what) = std::env::var_os("VPMM_TEST_CHILD") else {
        println!("skipped: means something only when another test starts it");
        return;
    };
    let logging = match Logging::from_environment(HostMalloc::new(), LogFormat::Rmm) {
        Ok(logging) => logging,
        Err(error) => {
            assert!(matches!(error, Error::Config { .. }));
            return println!("{error}");
        }
    };
    let pairs = if what == "crash" { 15_000 } else { 1 };
    for _ in 0..pairs {
        let ptr = logging.allocate(100, 256, STREAM).expect("memory");
        logging.deallocate(ptr, 100, 256, STREAM).expect("freed");
    }
    if what == "crash" {
        std::process::abort();
    }
    println!("logged");
}

#[test]
fn a_log_that_cannot_be_made_or_written_is_told() {
    let missing = Logging::to_file(HostMalloc::new(), LogFormat::Rmm, "/nowhere/at/all.csv");
    let Err(missing) = missing else { panic!("it was made") };
    let text = missing.to_string();
    assert!(
        matches!(missing, Error::LogFile(_)) && text.contains(": /nowhere/at/all.csv: No such"),
        "{text}"
    );
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
    }
    let logging = Logging::to_writer(HostMalloc::new(), LogFormat::Rmm, Full);
    let ptr = logging.allocate(100, 256, STREAM).expect("the call goes on");
    logging.deallocate(ptr, 100, 256, STREAM).expect("the call goes on");
    assert_eq!(logging.lost_rows(), 3, "the header too");
    assert!(matches!(logging.flush(), Err(Error::LogFile(_))));
}
