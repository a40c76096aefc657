//! How long a tagged heap takes to sleep and to wake, beside plain copies of the same bytes between
//! the device and page-locked memory:
//!
//! ```sh
//! cargo bench -p vpmm-harness --bench sleep -- --bytes 64GiB
//! ```
//!
//! On the GPU if there is one, else on the simulator, whose copies are the host's: figures of the two
//! do not compare. Prints one JSON object a line.

use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr;
use std::time::{Duration, Instant};

use clap::Parser;
use cuda_sys::types::CUresult;
use serde_json::json;
use vpmm::{Buffers, Contents, Device, DevicePtr, Driver, Pool, PoolConfig, Stream};
use vpmm_cli::bytes::ByteCount;

/// Bytes of one piece of page-locked memory for the plain copies, as a pool's.
const CHUNK: u64 = 1 << 30;

#[derive(Parser)]
struct Args {
    /// What the heap holds.
    #[arg(long, default_value = "1GiB")]
    bytes: ByteCount,
    /// In how many allocations.
    #[arg(long, default_value_t = 64)]
    pieces: u64,
    /// How often it sleeps and wakes with its contents in host memory: the first time with the
    /// locking of pages.
    #[arg(long, default_value_t = 4)]
    cycles: u32,
    /// Also saves the contents in this file, which is removed afterwards.
    #[arg(long)]
    file: Option<PathBuf>,
    /// What `cargo bench` adds.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Calls a driver function by name.
macro_rules! call {
    ($driver:expr, $name:ident ( $( $arg:expr ),* $(,)? )) => {{
        let function = $driver.raw().$name.expect(concat!("the driver has no ", stringify!($name)));
        // SAFETY: pointers are live and of the right types, handles alive, ranges within what was
        // allocated for them; the context is current.
        let code = unsafe { function($( $arg ),*) };
        assert_eq!(code, CUresult::CUDA_SUCCESS, concat!(stringify!($name), ": {}"), code);
    }};
}

fn gb_per_s(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / 1e9 / time.as_secs_f64().max(1e-9)
}

/// The heap's memory, piece by piece.
struct Heap<'a> {
    device: &'a Device,
    stream: &'a Stream,
    pieces: Vec<(DevicePtr, u64)>,
}

impl Heap<'_> {
    /// Copies everything to `chunks` or back, as a program does that has nothing but the driver.
    fn plain(&self, chunks: &[*mut c_void], to_host: bool) -> Duration {
        let driver = self.device.driver();
        let started = Instant::now();
        let mut done = 0;
        for (ptr, bytes) in &self.pieces {
            let mut at = 0;
            while at < *bytes {
                let (chunk, offset) = ((done / CHUNK) as usize, done % CHUNK);
                let length = (bytes - at).min(CHUNK - offset);
                let host = chunks[chunk].cast::<u8>().wrapping_add(offset as usize).cast();
                let (device, stream) = (ptr.address() + at, self.stream.handle().raw());
                if to_host {
                    call!(driver, cuMemcpyDtoHAsync_v2(host, device, length as usize, stream));
                } else {
                    call!(driver, cuMemcpyHtoDAsync_v2(device, host, length as usize, stream));
                }
                (at, done) = (at + length, done + length);
            }
        }
        self.stream.synchronize().expect("the copies finish");
        started.elapsed()
    }

    fn bytes(&self) -> u64 {
        self.pieces.iter().map(|(_, bytes)| bytes).sum()
    }
}

fn main() {
    let args = Args::parse();
    let (name, driver) = match Driver::load() {
        Ok(driver) => ("gpu", driver),
        Err(reason) => {
            eprintln!("on the simulator: {reason}");
            let sim = cuda_sim::Simulator::builder().detect_races(false).build();
            let driver = sim.expect("a simulator").driver();
            ("sim", Driver::new(driver).expect("the simulated driver starts"))
        }
    };
    let device = driver.device(0).expect("device 0");
    call!(driver, cuCtxSetCurrent(device.context()));
    let stream = device.stream().expect("a stream");
    let pool = Pool::new(&device, &PoolConfig::default()).expect("a pool");
    let tagged = pool.tagged("weights").expect("a heap");
    let each = (args.bytes.0 / args.pieces.max(1)).max(8) / 8 * 8;
    let mut heap = Heap { device: &device, stream: &stream, pieces: Vec::new() };
    for number in 0..args.pieces.max(1) {
        let ptr = tagged.malloc(each as usize, &stream).expect("memory");
        call!(
            driver,
            cuMemsetD32Async(
                ptr.address(),
                number as u32 + 1,
                each as usize / 4,
                stream.handle().raw()
            )
        );
        heap.pieces.push((ptr, each));
    }
    stream.synchronize().expect("the device finishes");
    let bytes = heap.bytes();
    let handles = tagged.stats().extent_count;
    println!("{}", json!({"machine": name, "bytes": bytes, "handles": handles}));

    let started = Instant::now();
    let mut chunks = Vec::new();
    for before in (0..bytes).step_by(CHUNK as usize) {
        let mut chunk: *mut c_void = ptr::null_mut();
        call!(driver, cuMemHostAlloc(&mut chunk, CHUNK.min(bytes - before) as usize, 0));
        chunks.push(chunk);
    }
    let pinning = started.elapsed();
    for _ in 0..2 {
        for (what, to_host) in [("plain copy to the host", true), ("plain copy back", false)] {
            let time = heap.plain(&chunks, to_host);
            let rate = gb_per_s(bytes, time);
            println!("{}", json!({"what": what, "seconds": time.as_secs_f64(), "gb_per_s": rate}));
        }
    }
    for chunk in chunks {
        call!(driver, cuMemFreeHost(chunk));
    }
    println!("{}", json!({"what": "locking the pages", "seconds": pinning.as_secs_f64()}));

    let retain = Contents::Keep(Buffers::Retain);
    let in_memory = (0..args.cycles).map(|_| ("host memory", &retain));
    let file = args.file.clone().map(Contents::Save);
    let in_file = file.iter().map(|contents| ("file", contents));
    for (place, contents) in in_memory.chain(in_file).chain([("nowhere", &Contents::Discard)]) {
        cycle(&pool, &heap, place, contents);
    }
    for (ptr, _) in &heap.pieces {
        pool.free(*ptr, &stream).expect("a free");
    }
    if let Some(path) = args.file {
        std::fs::remove_file(path).expect("the file goes");
    }
}

/// One sleep and one wake, with the first word of every piece compared after.
fn cycle(pool: &Pool, heap: &Heap<'_>, place: &str, contents: &Contents) {
    let free = heap.device.free_memory().expect("an answer");
    let asleep = pool.suspend("weights", heap.stream, contents).expect("it sleeps");
    // Less, where another process has taken it meanwhile.
    let back = heap.device.free_memory().expect("an answer").cast_signed() - free.cast_signed();
    println!(
        "{}",
        json!({
            "what": "suspend", "contents": place, "seconds": asleep.duration.as_secs_f64(),
            "copying_s": asleep.copying.as_secs_f64(), "pinning_s": asleep.pinning.as_secs_f64(),
            "gb_per_s": gb_per_s(asleep.saved_bytes, asleep.duration),
            "copy_gb_per_s": gb_per_s(asleep.saved_bytes, asleep.copying),
            "given_back_bytes": asleep.bytes, "free_memory_rose_by": back,
        })
    );
    let awake = pool.resume("weights", heap.stream).expect("it wakes");
    println!(
        "{}",
        json!({
            "what": "resume", "contents": place, "seconds": awake.duration.as_secs_f64(),
            "copying_s": awake.copying.as_secs_f64(),
            "gb_per_s": gb_per_s(awake.loaded_bytes, awake.duration),
            "copy_gb_per_s": gb_per_s(awake.loaded_bytes, awake.copying),
        })
    );
    if *contents == Contents::Discard {
        return;
    }
    for (number, (ptr, _)) in heap.pieces.iter().enumerate() {
        let mut word = 0_u32;
        call!(heap.device.driver(), cuMemcpyDtoH_v2((&raw mut word).cast(), ptr.address(), 4));
        assert_eq!(word, number as u32 + 1, "what piece {number} held");
    }
}
