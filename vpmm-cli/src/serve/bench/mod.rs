//! `vpmm serve-bench`: what the service costs its clients, with the server in a process of its own.

mod disk;
mod one_by_one;
mod readers;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gms::client::{ClientError, ConnectOptions, MemoryManager, Session};
use gms::lock::Requested;
use gms::memory::Memory;
use gms::server::{Server as OwnServer, Settings, raise_descriptor_limit};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::ServeBenchArgs;
use super::run::{driver, ordinal};
use crate::bench::Percentiles;
use crate::exit::{Abort, Exit};

const MIB: u64 = 1 << 20;

/// How long a server, or a lock, may take to be there.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long to try before looking whether the server is still running.
const STEP: Duration = Duration::from_millis(20);

/// A server of our own, stopped at the end.
struct Server(Option<Child>);

impl Server {
    /// Waits for the first answer, but not for that of a server that has ended.
    fn wait_until_it_answers(&mut self, socket: &Path) -> Result<(), Abort> {
        let started = Instant::now();
        loop {
            match gms::client::runtime_state(socket, STEP) {
                Ok(_) => return Ok(()),
                Err(ClientError::Connect { .. } | ClientError::Silent { .. })
                    if started.elapsed() < PATIENCE => {}
                Err(error) => return Err(Abort::failure(error)),
            }
            let ended = self.0.as_mut().map(Child::try_wait).transpose().map_err(Abort::failure)?;
            if let Some(Some(status)) = ended {
                return Err(Abort::failure(format_args!("the server has ended: {status}")));
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(child) = &mut self.0 else { return };
        if let Some(id) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(id, Signal::TERM);
        }
        let _ = child.wait();
    }
}

struct Bench<'a> {
    args: &'a ServeBenchArgs,
    driver: cuda_sys::Driver,
    socket: PathBuf,
    out: &'a mut dyn Write,
}

/// Runs every case and prints a JSON object for each.
pub(crate) fn bench(args: &ServeBenchArgs, out: &mut dyn Write) -> Result<Exit, Abort> {
    raise_descriptor_limit();
    // Its turn comes last, minutes later on a GPU.
    if let Some(folder) = args.folder.as_ref().filter(|folder| !folder.is_dir()) {
        return Err(Abort::bad_input(format_args!("{} is no folder", folder.display())));
    }
    // Before the server, as without a driver no server will come either.
    let driver = driver(args.device)?;
    if let (Some(readers), Some(socket)) = (args.readers, &args.socket_path) {
        let socket = socket.clone();
        return readers::read(&mut Bench { args, driver, socket, out }, readers);
    }
    let own = std::env::temp_dir().join(format!("gms-bench-{}.sock", std::process::id()));
    let socket = args.socket_path.clone().unwrap_or(own);
    let started = Instant::now();
    let mut server = match &args.socket_path {
        Some(_) => Server(None),
        None => Server(Some(start(args, &socket).map_err(Abort::failure)?)),
    };
    server.wait_until_it_answers(&socket)?;
    let ready = started.elapsed();
    let mut bench = Bench { args, driver, socket, out };
    if server.0.is_some() {
        // With the start of the process and cuInit, which is most of it on a GPU.
        bench.say(json!({"case": "server_ready", "ms": ms(ready)}))?;
    }
    bench.ready_after_driver()?;
    bench.round_trip()?;
    bench.create_one_by_one()?;
    bench.bulk("bulk_import_2MiB", bench.count(1000, 4), 2 * MIB)?;
    let (count, bytes) = bench.layout();
    bench.bulk("layout_40GB_in_640", count, bytes)?;
    bench.readers_at_once()?;
    if let Some(folder) = &args.folder {
        bench.disk(folder)?;
    }
    Ok(Exit::Done)
}

fn start(args: &ServeBenchArgs, socket: &Path) -> std::io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["serve", "--supervised", &std::process::id().to_string()]);
    command.args(["--tag", "bench", "--device", &args.device.to_string()]);
    if let Some(spin) = args.spin {
        command.args(["--spin", &spin.to_string()]);
    }
    if let Some(ahead) = args.ahead {
        command.args(["--ahead", &ahead.0.to_string()]);
    }
    command.arg("--socket-path").arg(socket);
    command.stdout(Stdio::null()).spawn()
}

fn ms(time: Duration) -> f64 {
    us(time) / 1e3
}

fn us(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e9).round() / 1e3
}

/// The middle and the 99th percentile, in microseconds.
fn spread(times: Vec<Duration>) -> (f64, f64) {
    let nanoseconds = times.iter().map(|time| time.as_secs_f64() * 1e9).collect();
    let of = Percentiles::of(nanoseconds, 0.0);
    (of.p50_ns.round() / 1e3, of.p99_ns.round() / 1e3)
}

impl Bench<'_> {
    /// A layout of 40 GB: how many allocations, and of how many bytes each.
    fn layout(&self) -> (usize, u64) {
        (self.count(640, 4), self.count(60, 2) as u64 * MIB)
    }

    fn count(&self, full: usize, quick: usize) -> usize {
        if self.args.quick { quick } else { full }
    }

    fn say(&mut self, line: serde_json::Value) -> Result<(), Abort> {
        writeln!(self.out, "{line}")?;
        Ok(self.out.flush()?)
    }

    fn options(&self, lock: Requested) -> ConnectOptions {
        let options = ConnectOptions::new(lock).timeout(PATIENCE).batch(!self.args.no_batch);
        match self.args.spin {
            Some(spin) => options.spin(Duration::from_micros(spin)),
            None => options,
        }
    }

    fn session(&self, lock: Requested) -> Result<Session, Abort> {
        Session::connect(&self.socket, self.options(lock)).map_err(Abort::failure)
    }

    fn manager(&self, lock: Requested) -> Result<MemoryManager, Abort> {
        let open = || -> Result<MemoryManager, ClientError> {
            let ordinal = ordinal(self.args.device);
            let mut manager = MemoryManager::new(&self.driver, ordinal, &self.socket)?;
            manager.connect(self.options(lock))?;
            Ok(manager)
        };
        open().map_err(Abort::failure)
    }

    /// A server of this process, whose driver is initialised: from nothing to its first answer.
    fn ready_after_driver(&mut self) -> Result<(), Abort> {
        let open = || Memory::open(&self.driver, ordinal(self.args.device)).map_err(Abort::failure);
        // Initialises the driver.
        drop(open()?);
        let mut path = self.socket.as_os_str().to_owned();
        path.push(".ready");
        let path = PathBuf::from(path);
        let started = Instant::now();
        let server = OwnServer::bind(open()?, Settings::new(&path)).map_err(Abort::failure)?;
        let stopper = server.stopper();
        let thread = std::thread::spawn(move || server.run());
        let answered = gms::client::runtime_state(&path, PATIENCE);
        let ready = started.elapsed();
        stopper.stop();
        let ended = thread.join().unwrap_or(Ok(()));
        answered.map_err(Abort::failure)?;
        ended.map_err(Abort::failure)?;
        self.say(json!({"case": "server_ready_after_cuinit", "ms": ms(ready)}))
    }

    fn round_trip(&mut self) -> Result<(), Abort> {
        let connects = self.count(200, 3);
        let mut times = Vec::with_capacity(connects);
        for _ in 0..connects {
            let started = Instant::now();
            drop(self.session(Requested::Rw)?);
            times.push(started.elapsed());
        }
        let (p50, p99) = spread(times);
        self.say(json!({"case": "connect", "us_p50": p50, "us_p99": p99}))?;
        let mut session = self.session(Requested::Rw)?;
        let rounds = self.count(20_000, 10);
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let started = Instant::now();
            session.allocation_count().map_err(Abort::failure)?;
            times.push(started.elapsed());
        }
        let (p50, p99) = spread(times);
        self.say(json!({"case": "round_trip", "us_p50": p50, "us_p99": p99}))
    }

    /// A writer makes a layout in bulk; a reader connects and maps all of it, sleeps and wakes.
    fn bulk(&mut self, case: &str, count: usize, bytes: u64) -> Result<(), Abort> {
        let mut writer = self.manager(Requested::Rw)?;
        let started = Instant::now();
        let sizes = vec![bytes; count];
        writer.create_mappings(&sizes, "bench").map_err(Abort::failure)?;
        let created = started.elapsed();
        let started = Instant::now();
        writer.commit().map_err(Abort::failure)?;
        let committed = started.elapsed();
        let mut imports = Vec::new();
        let (mut slept, mut woken) = (Vec::new(), Vec::new());
        let ordinal = ordinal(self.args.device);
        for _ in 0..self.count(5, 1) {
            let manager = MemoryManager::new(&self.driver, ordinal, &self.socket);
            let mut reader = manager.map_err(Abort::failure)?;
            let started = Instant::now();
            reader.connect(self.options(Requested::Ro)).map_err(Abort::failure)?;
            reader.import_all(None).map_err(Abort::failure)?;
            imports.push(started.elapsed());
            let started = Instant::now();
            reader.unmap_all().map_err(Abort::failure)?;
            reader.abort();
            slept.push(started.elapsed());
            let started = Instant::now();
            reader.connect(self.options(Requested::Ro)).map_err(Abort::failure)?;
            reader.remap_all().map_err(Abort::failure)?;
            woken.push(started.elapsed());
            reader.close().map_err(Abort::failure)?;
        }
        let middle = |times| spread(times).0 / 1e3;
        self.say(json!({
            "case": case,
            "allocations": count,
            "bytes": bytes * count as u64,
            "writer_create_ms": ms(created),
            "commit_ms": ms(committed),
            "reader_import_ms": middle(imports),
            "reader_unmap_ms": middle(slept),
            "reader_remap_ms": middle(woken),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a busy machine a server has its socket and does not answer for a while: it is asked again, as one is that
    /// has none yet.
    #[test]
    fn a_server_that_does_not_answer_yet_is_waited_for() {
        let folder = std::env::temp_dir().join(format!("vpmm-slow-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let socket = folder.join("socket");
        let _silent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let mut ended = Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let error = Server(Some(ended)).wait_until_it_answers(&socket).unwrap_err();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(error.message.contains("the server has ended"), "{}", error.message);
    }

    #[test]
    fn percentiles_are_those_of_bench() {
        let times = (1..=100).rev().map(Duration::from_micros).collect();
        assert_eq!(spread(times), (50.0, 99.0));
        assert_eq!(spread(Vec::new()), (0.0, 0.0));
    }
}
