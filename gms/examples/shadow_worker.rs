//! A worker loads weights once; it is killed; a shadow worker that was asleep wakes with the weights
//! at the addresses that it knows, without loading anything.
//!
//! ```sh
//! cargo run --release -p vpmm-gms --example shadow_worker            # on the GPU, if there is one
//! cargo run --release -p vpmm-gms --example shadow_worker -- --sim
//! ```
//!
//! Server and worker are processes of their own: this program again, told its part.

use std::error::Error;
use std::ffi::c_void;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cuda_sys::types::CUresult;
use gms::client::{ConnectOptions, MemoryManager};
use gms::lock::{Granted, Requested};
use gms::memory::Memory;
use gms::server::{Server, Settings};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The weights: so many tensors.
const TENSORS: usize = 32;

/// Bytes of each; fewer where the device's memory is the host's.
fn tensor_bytes(device: &str) -> u64 {
    if device == "gpu" { 512 << 20 } else { 2 << 20 }
}

/// How long a lock may take to be had.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["server", device, socket] => serve(device, Path::new(socket)),
        ["worker", device, socket] => work(device, Path::new(socket)),
        ["--sim"] => shadow("sim"),
        _ => shadow(if cuda_sys::Driver::load().is_ok() { "gpu" } else { "sim" }),
    }
}

fn driver(device: &str) -> Result<cuda_sys::Driver> {
    if device == "gpu" {
        return Ok(cuda_sys::Driver::load()?);
    }
    Ok(cuda_sim::Simulator::builder().detect_races(false).build()?.driver())
}

fn options(lock: Requested) -> ConnectOptions {
    ConnectOptions::new(lock).timeout(PATIENCE)
}

/// The server, until its input ends.
fn serve(device: &str, socket: &Path) -> Result<()> {
    let server = Server::bind(Memory::open(&driver(device)?, 0)?, Settings::new(socket))?;
    let stopper = server.stopper();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        stopper.stop();
    });
    Ok(server.run()?)
}

/// The first worker: loads the weights, publishes them, and serves until it is killed.
fn work(device: &str, socket: &Path) -> Result<()> {
    let gpu = Gpu::new(driver(device)?)?;
    let bytes = tensor_bytes(device);
    let started = Instant::now();
    let mut manager = MemoryManager::new(&gpu.driver, 0, socket)?;
    if manager.connect(options(Requested::RwOrRo))? != Granted::Rw {
        return Err("the weights are there already".into());
    }
    let addresses = manager.create_mappings(&[bytes; TENSORS], "weights")?;
    for (tensor, at) in addresses.iter().enumerate() {
        gpu.fill(*at, bytes, value_of(tensor))?;
        let allocation = manager.allocation_at(*at).ok_or("nothing is there")?;
        let id = allocation.allocation_id.clone();
        manager.metadata_put(&format!("layer.{tensor}"), &id, 0, b"u32")?;
    }
    manager.commit()?;
    manager.connect(options(Requested::Ro))?;
    manager.remap_all()?;
    println!("worker: loaded and published in {:.1?}", started.elapsed());
    std::io::stdout().flush()?;
    loop {
        std::thread::park();
    }
}

fn value_of(tensor: usize) -> u32 {
    0x1234_0000 + tensor as u32
}

/// A process that is killed when this is dropped.
struct Process(Child);

impl Process {
    fn start(part: &str, device: &str, socket: &Path) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([part, device]).arg(socket).stdin(Stdio::piped()).stdout(Stdio::piped());
        Ok(Self(command.spawn()?))
    }

    /// The next line that it prints.
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        BufReader::new(self.0.stdout.take().ok_or("heard already")?).read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The shadow worker, which starts the other two.
fn shadow(device: &str) -> Result<()> {
    println!("on the {}", if device == "sim" { "simulator" } else { "GPU" });
    let socket = std::env::temp_dir().join(format!("gms-shadow-{}.sock", std::process::id()));
    let mut server = Process::start("server", device, &socket)?;
    let mut worker = Process::start("worker", device, &socket)?;
    println!("{}", worker.line()?);

    let gpu = Gpu::new(driver(device)?)?;
    let mut shadow = MemoryManager::new(&gpu.driver, 0, &socket)?;
    let started = Instant::now();
    shadow.connect(options(Requested::Ro))?;
    let placed = shadow.import_all(Some("weights"))?;
    let gib = shadow.total_bytes() as f64 / f64::from(1 << 30);
    println!("shadow: {gib:.1} GiB mapped in {:.1?}", started.elapsed());
    let started = Instant::now();
    shadow.unmap_all()?;
    shadow.abort();
    println!("shadow: asleep in {:.1?}, holding addresses and no memory", started.elapsed());

    drop(worker);
    println!("the worker is killed");
    let started = Instant::now();
    shadow.connect(options(Requested::Ro))?;
    shadow.remap_all()?;
    println!("shadow: awake in {:.1?}", started.elapsed());
    let bytes = tensor_bytes(device);
    for (tensor, (_, at)) in placed.iter().enumerate() {
        let words = [*at, at + bytes / 2, at + bytes - 4];
        for word in words {
            if gpu.word(word)? != value_of(tensor) {
                return Err(format!("tensor {tensor} is not what was loaded").into());
            }
        }
    }
    println!("the weights are at the addresses where they were, all {TENSORS} tensors");
    shadow.close()?;
    // Its input ends, and it comes to its own end.
    drop(server.0.stdin.take());
    if server.0.wait()?.success() { Ok(()) } else { Err("the server failed".into()) }
}

/// The few driver calls that this program makes itself.
struct Gpu {
    driver: cuda_sys::Driver,
}

fn check(code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(code.into()) }
}

impl Gpu {
    /// Makes the device's context this thread's.
    fn new(driver: cuda_sys::Driver) -> Result<Self> {
        let init = cuda_sys::require!(driver, cuInit)?;
        let retain = cuda_sys::require!(driver, cuDevicePrimaryCtxRetain)?;
        let set = cuda_sys::require!(driver, cuCtxSetCurrent)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: cuInit takes no pointer, and its flags must be 0.
        check(unsafe { init(0) })?;
        // SAFETY: the pointer is to a live context handle; there is a first device or an error.
        check(unsafe { retain(&mut context, 0) })?;
        // SAFETY: the context was just retained and is never released.
        check(unsafe { set(context) })?;
        Ok(Self { driver })
    }

    fn fill(&self, at: u64, bytes: u64, value: u32) -> Result<()> {
        let set = cuda_sys::require!(self.driver, cuMemsetD32_v2)?;
        // SAFETY: so many bytes are mapped there for writing; a context is current.
        check(unsafe { set(at, value, (bytes / 4) as usize) })
    }

    fn word(&self, at: u64) -> Result<u32> {
        let copy = cuda_sys::require!(self.driver, cuMemcpyDtoH_v2)?;
        let mut word = 0_u32;
        let to = (&raw mut word).cast::<c_void>();
        // SAFETY: `word` has the four bytes that are copied; a context is current.
        check(unsafe { copy(to, at, 4) })?;
        Ok(word)
    }
}
