//! The servers of one device.

use std::io::{self, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use gms::memory::Memory;
use gms::server::{
    ListenError, Metrics, Server, ServerError, Settings, Stopper, raise_descriptor_limit,
    serve_metrics,
};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::filter::LevelFilter;

use super::{ServeArgs, ServeDevice, fleet};
use crate::exit::{Abort, Exit};

/// The tags that are served where none is named.
const TAGS: [&str; 2] = ["weights", "kv_cache"];

/// `vpmm serve`: until a signal, or until a server fails.
pub(crate) fn serve(args: &ServeArgs) -> Result<Exit, Abort> {
    start_log(args.verbose);
    if args.socket_path.is_some() && args.tags.len() != 1 {
        return Err(Abort::bad_input("--socket-path requires exactly one --tag"));
    }
    let mut tags = args.tags.clone();
    tags.sort();
    tags.dedup();
    if tags.len() != args.tags.len() {
        return Err(Abort::bad_input("--tag values must be unique"));
    }
    if args.all {
        return fleet::serve_all(args);
    }
    let Some(device) = args.device else {
        return Err(Abort::bad_input("--device is required"));
    };
    if let Some(parent) = args.supervised {
        fleet::end_with(parent)?;
    }
    raise_descriptor_limit();
    let signals = Signals::new([SIGTERM, SIGINT]).map_err(Abort::failure)?;
    let driver = driver(device)?;
    let servers = bind(args, device, &driver)?;
    if let Some(address) = args.metrics {
        let metrics: Vec<Metrics> = servers.iter().map(Server::metrics).collect();
        let listener = TcpListener::bind(address)
            .map_err(|error| Abort::failure(format_args!("no metrics at {address}: {error}")))?;
        let answer = move || {
            if let Err(error) = serve_metrics(&listener, || Metrics::render(&metrics)) {
                tracing::error!(%error, "metrics are not served any more");
            }
        };
        thread::Builder::new().name("metrics".to_owned()).spawn(answer).map_err(Abort::failure)?;
    }
    if args.supervised.is_some() {
        // Whoever started it may not listen.
        let _ = writeln!(io::stdout(), "{}", fleet::SERVING);
    }
    run(servers, signals)
}

fn start_log(verbose: bool) {
    let level = if verbose { LevelFilter::DEBUG } else { LevelFilter::INFO };
    // Already there only in tests that call this twice. What is logged to nobody, as the reader of a pipe
    // has gone, is not told either: to fail to tell is a panic, in the thread that stops the servers.
    let _ = tracing_subscriber::fmt()
        .log_internal_errors(false)
        .with_writer(io::stderr)
        .with_max_level(level)
        .with_target(false)
        .with_ansi(false)
        .try_init();
}

/// The driver of a device, or a simulated one, which lives as long.
pub(super) fn driver(device: ServeDevice) -> Result<cuda_sys::Driver, Abort> {
    match device {
        ServeDevice::Cuda(_) => cuda_sys::Driver::load().map_err(Abort::failure),
        ServeDevice::Sim(number) => {
            let builder = cuda_sim::Simulator::builder().detect_races(false);
            let builder = builder.devices(number as usize + 1);
            Ok(builder.build().map_err(Abort::failure)?.driver())
        }
    }
}

pub(super) fn ordinal(device: ServeDevice) -> u32 {
    match device {
        ServeDevice::Sim(ordinal) | ServeDevice::Cuda(ordinal) => ordinal,
    }
}

fn bind(
    args: &ServeArgs,
    device: ServeDevice,
    driver: &cuda_sys::Driver,
) -> Result<Vec<Server>, Abort> {
    let defaults = || TAGS.map(str::to_owned).to_vec();
    let tags = if args.tags.is_empty() { defaults() } else { args.tags.clone() };
    let mut servers = Vec::with_capacity(tags.len());
    for tag in tags {
        let memory = Memory::open(driver, ordinal(device)).map_err(Abort::failure)?;
        let path = match &args.socket_path {
            Some(path) => path.clone(),
            None => gms::socket_path(&memory.uuid().map_err(Abort::failure)?, &tag),
        };
        let mut settings = Settings::new(path);
        settings.name = tag;
        settings.group = args.group;
        settings.retry_interval = args.alloc_retry_interval;
        settings.retry_timeout = args.alloc_retry_timeout.0;
        settings.max_message_bytes = args.max_message.0;
        settings.max_metadata_bytes = args.max_metadata.0;
        settings.ahead_bytes = args.ahead.0;
        if let Some(spin) = args.spin {
            settings.spin = Duration::from_micros(spin);
        }
        servers.push(Server::bind(memory, settings).map_err(|error| match error {
            ServerError::Listen(ListenError::NotASocket { .. }) => Abort::bad_input(error),
            error => Abort::failure(error),
        })?);
    }
    Ok(servers)
}

/// Runs servers until a signal comes or one of them ends, which ends all.
fn run(servers: Vec<Server>, mut signals: Signals) -> Result<Exit, Abort> {
    let stoppers: Arc<[Stopper]> = servers.iter().map(Server::stopper).collect();
    let theirs = Arc::clone(&stoppers);
    let on_signal = move || {
        for signal in signals.forever() {
            tracing::info!(signal, "stopping");
            theirs.iter().for_each(Stopper::stop);
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(on_signal).map_err(Abort::failure)?;
    let (ended, ends) = mpsc::channel();
    let count = servers.len();
    for server in servers {
        let ended = ended.clone();
        let name = format!("gms-{}", server.socket_path().display());
        let work = move || {
            // Whoever listens may have gone first.
            let _ = ended.send(server.run());
        };
        thread::Builder::new().name(name).spawn(work).map_err(Abort::failure)?;
    }
    drop(ended);
    let mut failure = None;
    for end in ends.iter().take(count) {
        stoppers.iter().for_each(Stopper::stop);
        if let Err(error) = end {
            failure.get_or_insert(error);
        }
    }
    match failure {
        Some(error) => Err(Abort::failure(error)),
        None => Ok(Exit::Done),
    }
}
