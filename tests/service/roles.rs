//! What the processes do that tests start: this test program again, told its role.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use cuda_sim::Simulator;
use gms::client::{ClientError, ConnectOptions, Session};
use gms::lock::{Granted, Requested};
use gms::memory::Memory;
use gms::server::{Server, Settings};
use gms::storage::{StorageOptions, save};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use crate::random::Lcg;
use crate::rig::{GRANULE, Machine, PATIENCE, open_descriptors, pattern};

const ROLE: &str = "GMS_TEST_ROLE";
const SOCKET: &str = "GMS_TEST_SOCKET";
const MARK: &str = "@ ";

/// A process of ours. Killed when this is dropped.
pub(crate) struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    pub(crate) fn start(role: &str, socket: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "roles::enter", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(SOCKET, socket)
            // More than a lone saver has room for.
            .envs((role == LONE_SAVER).then_some(("RUST_MIN_STACK", "67108864")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    /// A server that is ready.
    pub(crate) fn server(socket: &Path) -> Self {
        let mut server = Self::start("server", socket);
        assert_eq!(server.hear(), "ready");
        server
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The next thing it says.
    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let bytes = self.output.read_line(&mut line).unwrap();
            assert!(bytes > 0, "the process ended: {:?}", self.child.try_wait());
            // The test harness writes what it runs before it, on the same line.
            if let Some(at) = line.find(MARK) {
                return line[at + MARK.len()..].trim_end().to_owned();
            }
        }
    }

    pub(crate) fn tell(&mut self, what: &str) {
        writeln!(self.input, "{what}").unwrap();
    }

    pub(crate) fn ask(&mut self, what: &str) -> String {
        self.tell(what);
        self.hear()
    }

    /// kill -9, of one that has not ended by itself.
    pub(crate) fn kill(mut self) {
        assert_eq!(self.child.try_wait().unwrap(), None, "it has ended already");
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until it has ended by itself; whether all was well.
    pub(crate) fn end(mut self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.success();
            }
            assert!(Instant::now() < deadline, "the process does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(what: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{MARK}{what}").unwrap();
    out.flush().unwrap();
}

fn heard() -> Option<String> {
    let mut line = String::new();
    let bytes = std::io::stdin().read_line(&mut line).unwrap();
    (bytes > 0).then(|| line.trim_end().to_owned())
}

/// No test of its own: the entrance of the processes that tests start.
#[test]
fn enter() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let socket = std::env::var(SOCKET).unwrap();
    let socket = Path::new(&socket);
    match role.as_str() {
        "server" => serve(Settings::new(socket)),
        "small-server" => {
            let mut limit = getrlimit(Resource::Nofile);
            limit.current = Some(SMALL);
            setrlimit(Resource::Nofile, limit).unwrap();
            serve(Settings::new(socket));
        }
        "narrow-server" | HASTY => {
            let mut limit = getrlimit(Resource::Nofile);
            limit.current = Some(NARROW);
            setrlimit(Resource::Nofile, limit).unwrap();
            // Whoever may set limits may have more under way than they say.
            let none = CapabilitySet::empty();
            let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
            set_capabilities(None, sets).unwrap();
            let mut settings = Settings::new(socket);
            if role == HASTY {
                settings.handshake_timeout = Duration::from_millis(100);
            }
            serve(settings);
        }
        "writer" => write(socket),
        "reader" => read(socket),
        "short-reader" => run_short(socket),
        LONE_SAVER => save_alone(socket),
        "idle-writer" => hold(socket, Requested::Rw),
        "idle-reader" => hold(socket, Requested::Ro),
        other => match other.strip_prefix("chaos:") {
            Some(seed) => chaos(socket, seed.parse().unwrap()),
            None => panic!("no role {other}"),
        },
    }
}

/// Descriptors that a small server may have.
const SMALL: u64 = 48;

/// Descriptors that a narrow server may have, or have under way.
const NARROW: u64 = 600;

/// A narrow server that does not wait long for those under way.
const HASTY: &str = "hasty-narrow-server";

/// Serves until its input ends; answers what it is asked of itself.
fn serve(settings: Settings) {
    let sim = Simulator::builder().memory_bytes(1 << 30).build().unwrap();
    let memory = Memory::open(&sim.driver(), 0).unwrap();
    let server = Server::bind(memory, settings).unwrap();
    let stopper = server.stopper();
    let thread = std::thread::spawn(move || server.run());
    say("ready");
    while let Some(asked) = heard() {
        match asked.as_str() {
            "memory" => say(sim.memory_used(0)),
            "stop" => break,
            other => panic!("asked {other}"),
        }
    }
    stopper.stop();
    thread.join().unwrap().unwrap();
    assert_eq!(sim.memory_used(0), 0, "memory is left");
    sim.assert_clean();
    say("stopped");
}

/// Writes four allocations and publishes them.
fn write(socket: &Path) {
    let machine = Machine::new();
    let mut manager = machine.connected(socket, Requested::Rw);
    for n in 0..4 {
        let at = manager.create_mapping((n + 1) * GRANULE, "weights").unwrap();
        machine.write(at, &pattern(n, 10_000));
        let mapping = manager.mappings().into_iter().find(|mapping| mapping.address == at).unwrap();
        manager.metadata_put(&format!("t.{n}"), &mapping.allocation_id, 0, b"v").unwrap();
    }
    manager.commit().unwrap();
    machine.sim.assert_clean();
    say("committed");
}

/// Reads what [`write`] wrote, and holds its lock until its input ends.
fn read(socket: &Path) {
    let machine = Machine::new();
    let mut manager = machine.connected(socket, Requested::Ro);
    for (allocation, at) in manager.import_all(None).unwrap() {
        let seed = allocation.layout_slot;
        assert_eq!(machine.read(at, 10_000), pattern(seed, 10_000), "slot {seed}");
    }
    assert_eq!(manager.metadata_list("t.").unwrap().len(), 4);
    say("read");
    while heard().is_some() {}
    manager.close().unwrap();
    machine.sim.assert_clean();
}

/// Asks for more descriptors than it may have, and then, as it may have more, for others.
fn run_short(socket: &Path) {
    let options = ConnectOptions::new(Requested::Ro).timeout(PATIENCE);
    let mut session = Session::connect(socket, options).unwrap();
    let ids = session.list(None).unwrap().into_iter().map(|handle| handle.allocation_id);
    let ids: Vec<String> = ids.collect();
    let limit = getrlimit(Resource::Nofile);
    let few = Some(open_descriptors(std::process::id()) as u64 + 10);
    setrlimit(Resource::Nofile, Rlimit { current: few, ..limit }).unwrap();
    let short = session.export_many(&ids, |_, _| Ok(()));
    assert!(matches!(short, Err(ClientError::Socket(_))), "{short:?}");
    setrlimit(Resource::Nofile, limit).unwrap();
    // The rest of that answer is under way still.
    for _ in 0..3 {
        let after = session.list(None);
        assert!(matches!(after, Err(ClientError::Disconnected)), "{after:?}");
    }
    let mut next = Session::connect(socket, options).unwrap();
    next.export_many(&ids, |_, _| Ok(())).unwrap();
    say("done");
}

/// A process that can have no further thread, and saves a layout.
const LONE_SAVER: &str = "lone-saver";

fn save_alone(socket: &Path) {
    let machine = Machine::new();
    let mut reader = machine.connected(socket, Requested::Ro);
    reader.import_all(None).unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let size: u64 = size.trim_end_matches("kB").trim().parse().unwrap();
    let limit = getrlimit(Resource::As);
    let current = Some((size << 10) + (48 << 20));
    setrlimit(Resource::As, Rlimit { current, ..limit }).unwrap();
    assert!(std::thread::Builder::new().spawn(|| {}).is_err(), "it can have a thread");
    let mut options = StorageOptions::default();
    (options.chunk_bytes, options.workers) = (GRANULE, 4);
    let stored = save(&mut reader, &socket.with_extension("saved"), &options, &|_| {});
    say(stored.unwrap().allocations);
}

/// Takes a lock and holds it until its input ends.
fn hold(socket: &Path, lock: Requested) {
    say("asking");
    let session = Session::connect(socket, ConnectOptions::new(lock).timeout(PATIENCE));
    let mut session = session.unwrap();
    say(session.granted().name());
    while let Some(asked) = heard() {
        match asked.as_str() {
            "allocate" => say(session.allocate(GRANULE, "weights").unwrap().allocation_id),
            other => panic!("asked {other}"),
        }
    }
}

/// Takes locks and writes and reads as it comes, without end.
fn chaos(socket: &Path, seed: u64) {
    let mut random = Lcg(seed * 2 + 1);
    say("begins");
    loop {
        let locks = [Requested::Rw, Requested::Ro, Requested::RwOrRo, Requested::RwDataOrRw];
        let lock = locks[random.below(4) as usize];
        let time = Duration::from_millis(random.below(20));
        let options = ConnectOptions::new(lock).timeout(time).batch(random.below(2) > 0);
        let Ok(mut session) = Session::connect(socket, options) else { continue };
        if session.granted() == Granted::Ro {
            let ids = session.list(None).unwrap().into_iter().map(|handle| handle.allocation_id);
            let ids: Vec<String> = ids.collect();
            session.export_many(&ids, |_, _| Ok(())).unwrap();
            continue;
        }
        for n in 0..random.below(8) {
            if session.granted() == Granted::Rw {
                if random.below(4) == 0 {
                    // Long enough for the next one's memory to be made.
                    std::thread::sleep(Duration::from_micros(300));
                }
                let made = session.allocate_and_export(GRANULE, "t").unwrap().0;
                session.metadata_put(&format!("k{n}"), &made.allocation_id, n, b"v").unwrap();
            }
        }
        match random.below(4) {
            0 => drop(session),
            1 if session.granted() == Granted::Rw => drop(session.commit_layout().unwrap()),
            _ if session.granted() == Granted::Rw => session.commit().unwrap(),
            _ => drop(session.commit().unwrap_err()),
        }
    }
}
