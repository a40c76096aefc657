//! Figures of a server in Prometheus' text format, and a small server of HTTP for them.

use std::fmt::Write;
use std::io::{self, BufRead, BufReader, Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::service::Service;

/// A number that only grows.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that is as it was last set.
#[derive(Debug, Default)]
pub(super) struct Gauge(AtomicU64);

impl Gauge {
    pub(super) fn set(&self, now: u64) {
        self.0.store(now, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What is counted.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) connections: Counter,
    pub(super) refused: Counter,
    pub(super) requests: Counter,
    pub(super) errors: Counter,
    pub(super) unreadable: Counter,
    pub(super) waits: Counter,
    pub(super) commits: Counter,
    pub(super) allocations: Counter,
    /// Those of them whose memory was there already.
    pub(super) ahead: Counter,
    /// Bytes of the memory that the writer's session has made ahead; there is one writer at most.
    pub(super) ahead_bytes: Gauge,
    pub(super) memory_waits: Counter,
    pub(super) exports: Counter,
}

/// The figures of a server, for as long as it runs.
#[derive(Clone, Debug)]
pub struct Metrics(Weak<Service>);

/// A figure: its name, whether it only grows, and what it is.
type Kind = (&'static str, bool, &'static str);

const KINDS: [Kind; 23] = [
    ("allocations", false, "Allocations of the layout."),
    ("allocated_bytes", false, "Bytes of the layout's memory."),
    ("metadata_entries", false, "Entries of metadata."),
    ("metadata_bytes", false, "What the metadata takes, as vpmm serve --max-metadata counts it."),
    ("reclaim_pending_bytes", false, "Bytes still to be given back."),
    ("ahead_bytes", false, "Bytes made ahead for the next allocation; in no other figure."),
    ("connections", false, "Connections now."),
    ("writer", false, "Whether there is a writer."),
    ("readers", false, "Readers now."),
    ("waiting", false, "Sessions that wait for a lock."),
    ("committed", false, "Whether a layout is published."),
    ("connections_total", true, "Connections accepted."),
    ("connections_refused_total", true, "Connections refused."),
    ("requests_total", true, "Requests of sessions."),
    ("errors_total", true, "Requests refused."),
    ("unreadable_total", true, "Sessions dropped because a message could not be read."),
    ("lock_waits_total", true, "Sessions that had to wait for a lock."),
    ("commits_total", true, "Layouts published."),
    ("allocations_total", true, "Allocations made."),
    ("ahead_total", true, "Allocations whose memory had been made ahead."),
    ("memory_waits_total", true, "Allocations that had to wait for memory."),
    ("exports_total", true, "Descriptors sent."),
    ("releases_total", true, "Allocations given back."),
];

/// The values of [`KINDS`], in their order.
fn values(service: &Service) -> [u64; KINDS.len()] {
    let (lock, allocations, bytes, entries, metadata_bytes) = {
        let core = service.core();
        let layout = &core.layout;
        let (entries, metadata_bytes) = (layout.entry_count(), layout.metadata_bytes());
        (core.lock.snapshot(), layout.len(), layout.bytes(), entries, metadata_bytes)
    };
    let (counters, progress) = (&service.counters, service.memory.progress());
    [
        allocations as u64,
        bytes,
        entries as u64,
        metadata_bytes,
        progress.pending_bytes(),
        counters.ahead_bytes.get(),
        service.connections() as u64,
        lock.has_writer.into(),
        lock.readers as u64,
        lock.waiting as u64,
        lock.committed.into(),
        counters.connections.get(),
        counters.refused.get(),
        counters.requests.get(),
        counters.errors.get(),
        counters.unreadable.get(),
        counters.waits.get(),
        counters.commits.get(),
        counters.allocations.get(),
        counters.ahead.get(),
        counters.memory_waits.get(),
        counters.exports.get(),
        progress.released(),
    ]
}

impl Metrics {
    pub(super) fn of(service: &Arc<Service>) -> Self {
        Self(Arc::downgrade(service))
    }

    /// The figures of several servers in Prometheus' text format, told apart by the labels `name` and
    /// `device`. Servers that have ended are left out.
    pub fn render(servers: &[Self]) -> String {
        let alive = servers.iter().filter_map(|metrics| metrics.0.upgrade());
        let servers: Vec<_> = alive
            .map(|service| {
                let name = service.settings.name.replace(['"', '\\', '\n'], "_");
                let labels = format!("name=\"{name}\",device=\"{}\"", service.memory.ordinal());
                (labels, values(&service))
            })
            .collect();
        let mut out = String::new();
        for (index, (name, grows, help)) in KINDS.iter().enumerate() {
            let kind = if *grows { "counter" } else { "gauge" };
            // Writing to a String does not fail.
            let _ = writeln!(out, "# HELP gms_{name} {help}\n# TYPE gms_{name} {kind}");
            for (labels, values) in &servers {
                let _ = writeln!(out, "gms_{name}{{{labels}}} {}", values[index]);
            }
        }
        out
    }
}

/// Answers `GET /metrics` with what `text` says, one connection after the other, for as long as the
/// process lives. The listener should be on a loopback address: there is no authentication.
///
/// # Errors
/// Where the listener does not listen.
pub fn serve_metrics(listener: &TcpListener, text: impl Fn() -> String) -> io::Result<()> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                if let Err(error) = answer(&stream, &text) {
                    tracing::debug!(%error, "a request for metrics was not answered");
                }
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) if is_the_listeners(&error) => return Err(error),
            Err(error) => {
                tracing::debug!(%error, "a connection for metrics was not accepted");
                std::thread::sleep(AGAIN);
            }
        }
    }
}

/// How long to wait where there is no descriptor or memory for a connection, or the network has a fault.
const AGAIN: Duration = Duration::from_millis(100);

/// Whether no connection will be accepted any more. All else that the system says here passes, or is one
/// connection's.
fn is_the_listeners(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::BADF | Errno::INVAL | Errno::NOTSOCK))
}

/// The longest request that is read.
const REQUEST_BYTES: u64 = 8 << 10;

/// How long a request may take to be there, and its answer to be taken.
const PATIENCE: Duration = Duration::from_secs(2);

/// A connection that is read until a moment, however little comes at a time: others wait for it.
struct Until<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(bytes)
    }
}

fn answer(stream: &TcpStream, text: &impl Fn() -> String) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let read = Until { stream, deadline: Instant::now() + PATIENCE };
    let mut request = BufReader::new(read.take(REQUEST_BYTES));
    let mut first = String::new();
    request.read_line(&mut first)?;
    let mut header = String::new();
    while request.read_line(&mut header)? > 2 {
        header.clear();
    }
    let path = match first.split_ascii_whitespace().collect::<Vec<_>>()[..] {
        // Whoever collects them may be told to ask for something in particular, which there is not.
        ["GET", target, _] => target.split('?').next(),
        _ => None,
    };
    let (status, body) = match path {
        Some("/metrics" | "/") => ("200 OK", text()),
        _ => ("404 Not Found", "only GET /metrics\n".to_owned()),
    };
    let mut stream = stream;
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    )
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    #[test]
    fn what_is_asked_for_beside_the_path_does_not_matter() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ask = |request: &str| {
            let mut asking = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            asking.write_all(request.as_bytes()).unwrap();
            answer(&listener.accept().unwrap().0, &|| "told".to_owned()).unwrap();
            let mut text = String::new();
            asking.read_to_string(&mut text).unwrap();
            text.contains(" 200 ") && text.ends_with("told")
        };
        let asked = [
            "GET /metrics",
            "GET /metrics?name[]=gms_held",
            "GET /",
            "GET /metric",
            "PUT /metrics",
        ];
        let told = asked.map(|first| ask(&format!("{first} HTTP/1.1\r\n\r\n")));
        assert_eq!(told, [true, true, true, false, false]);
    }

    #[test]
    fn only_a_listener_that_does_not_listen_ends_the_metrics() {
        let told = |errno: Errno| is_the_listeners(&errno.into());
        assert!([Errno::BADF, Errno::INVAL, Errno::NOTSOCK].into_iter().all(told));
        let passing =
            [Errno::MFILE, Errno::NOBUFS, Errno::NOMEM, Errno::PROTO, Errno::NETDOWN, Errno::PERM];
        assert!(!passing.into_iter().any(told));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connection = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let no_listener = TcpListener::from(OwnedFd::from(connection));
        assert!(serve_metrics(&no_listener, String::new).is_err());
    }
}
