//! A server in this process, whose simulator and descriptors can be counted, and machines to use the
//! memory from.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cuda_sim::Simulator;
use cuda_sys::Driver;
use cuda_sys::types::CUresult;
use gms::client::{ConnectOptions, MemoryManager, Session};
use gms::lock::Requested;
use gms::memory::Memory;
use gms::server::{Metrics, Server, ServerError, Settings, Stopper};

pub(crate) const GRANULE: u64 = 2 << 20;

/// How long anything may take before a test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A directory of its own, removed when this is dropped.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("gms-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.join("gms.sock")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server on a thread of this process.
pub(crate) struct Local {
    pub(crate) sim: Simulator,
    pub(crate) stopper: Stopper,
    pub(crate) metrics: Metrics,
    socket: PathBuf,
    settings: Settings,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
    _folder: Folder,
}

impl Local {
    pub(crate) fn start() -> Self {
        Self::with(141 << 30, |_| {})
    }

    pub(crate) fn with(memory_bytes: u64, change: impl FnOnce(&mut Settings)) -> Self {
        let sim = Simulator::builder().memory_bytes(memory_bytes).build().unwrap();
        let driver = sim.driver();
        Self::on(sim, &driver, change)
    }

    /// With a driver that is the simulator's in the end.
    pub(crate) fn on(sim: Simulator, driver: &Driver, change: impl FnOnce(&mut Settings)) -> Self {
        let folder = Folder::new();
        let memory = Memory::open(driver, 0).unwrap();
        let mut settings = Settings::new(folder.socket());
        change(&mut settings);
        let server = Server::bind(memory, settings.clone()).unwrap();
        let (stopper, metrics) = (server.stopper(), server.metrics());
        let thread = Some(std::thread::spawn(move || server.run()));
        Self { sim, stopper, metrics, socket: folder.socket(), settings, thread, _folder: folder }
    }

    /// Another server in its place, with nothing of it.
    pub(crate) fn restart(&mut self) {
        self.stopper.stop();
        self.thread.take().unwrap().join().unwrap().unwrap();
        let memory = Memory::open(&self.sim.driver(), 0).unwrap();
        let server = Server::bind(memory, self.settings.clone()).unwrap();
        (self.stopper, self.metrics) = (server.stopper(), server.metrics());
        self.thread = Some(std::thread::spawn(move || server.run()));
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// A session that is to be granted.
    pub(crate) fn session(&self, lock: Requested) -> Session {
        Session::connect(&self.socket, ConnectOptions::new(lock).timeout(PATIENCE)).unwrap()
    }

    /// A layout of so many allocations of a granule, published.
    pub(crate) fn publish(&self, allocations: usize) {
        let mut writer = self.session(Requested::Rw);
        for n in 0..allocations {
            let made = writer.allocate(GRANULE, "weights").unwrap();
            writer.metadata_put(&format!("t.{n}"), &made.allocation_id, 0, b"v").unwrap();
        }
        writer.commit().unwrap();
    }

    /// A figure of the server's.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let start = format!("gms_{name}{{name=\"default\",device=\"0\"}} ");
        let text = Metrics::render(std::slice::from_ref(&self.metrics));
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    pub(crate) fn state(&self) -> String {
        gms::client::runtime_state(&self.socket, PATIENCE).unwrap().state
    }

    pub(crate) fn events(&self) -> Vec<(String, i64)> {
        let events = gms::client::event_history(&self.socket, PATIENCE).unwrap();
        events.into_iter().map(|event| (event.kind, event.allocation_count)).collect()
    }

    /// Waits until the lock is in a state.
    pub(crate) fn await_state(&self, state: &str) {
        eventually(state, || self.state() == state);
    }

    /// Waits until the server holds so many bytes of memory.
    pub(crate) fn await_memory(&self, bytes: u64) {
        eventually("memory given back", || self.sim.memory_used(0) == bytes);
    }

    pub(crate) fn stop(mut self) -> Result<(), ServerError> {
        self.stopper.stop();
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stopper.stop();
            let ended = thread.join();
            if !std::thread::panicking() {
                ended.unwrap().unwrap();
            }
        }
    }
}

/// Waits until something is so.
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A connection that says only what it is told to.
pub(crate) fn raw(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A machine that uses the service's memory: a simulator of its own, as in another process.
pub(crate) struct Machine {
    pub(crate) sim: Simulator,
    driver: Driver,
}

macro_rules! call {
    ($driver:expr, $name:ident ( $( $arg:expr ),* $(,)? )) => {{
        let function = $driver.$name.expect(stringify!($name));
        // SAFETY: pointers are live and of the right types, ranges within what they point to.
        let code = unsafe { function($( $arg ),*) };
        assert_eq!(code, CUresult::CUDA_SUCCESS, stringify!($name));
    }};
}

impl Machine {
    pub(crate) fn new() -> Self {
        let sim = Simulator::builder().build().unwrap();
        let driver = sim.driver();
        let mut context = ptr::null_mut();
        call!(driver, cuInit(0));
        call!(driver, cuDevicePrimaryCtxRetain(&mut context, 0));
        call!(driver, cuCtxSetCurrent(context));
        Self { sim, driver }
    }

    pub(crate) fn manager(&self, socket: &Path) -> MemoryManager {
        MemoryManager::new(&self.driver, 0, socket).unwrap()
    }

    /// A manager with its lock.
    pub(crate) fn connected(&self, socket: &Path, lock: Requested) -> MemoryManager {
        let mut manager = self.manager(socket);
        manager.connect(ConnectOptions::new(lock).timeout(PATIENCE)).unwrap();
        manager
    }

    pub(crate) fn try_write(&self, at: u64, bytes: &[u8]) -> CUresult {
        let copy = self.driver.cuMemcpyHtoD_v2.unwrap();
        // SAFETY: the pointer is to so many live bytes; an address that is none is an error.
        unsafe { copy(at, bytes.as_ptr().cast(), bytes.len()) }
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        assert_eq!(self.try_write(at, bytes), CUresult::CUDA_SUCCESS);
    }

    pub(crate) fn read(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        call!(self.driver, cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), at, bytes));
        out
    }
}

/// Bytes that tell of where they are.
pub(crate) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..bytes).map(|_| next()).collect()
}

/// Descriptors that a process has open.
pub(crate) fn open_descriptors(process: u32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().count()
}
