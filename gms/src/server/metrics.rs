//! Figures of a server in Prometheus' text format, and a small server of HTTP for them.

use std::fmt::Write;
use std::io::{self, BufRead, BufReader, Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::service::Service;

/// A number that only grows.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
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
    pub(super) memory_waits: Counter,
    pub(super) exports: Counter,
}

/// The figures of a server.
pub(super) fn render(service: &Service) -> String {
    let (lock, allocations, bytes, entries) = {
        let core = service.core();
        let layout = &core.layout;
        (core.lock.snapshot(), layout.len(), layout.bytes(), layout.entry_count())
    };
    let counters = &service.counters;
    let progress = service.memory.progress();
    let labels = format!(
        "name=\"{}\",device=\"{}\"",
        service.settings.name.replace(['"', '\\', '\n'], "_"),
        service.memory.ordinal()
    );
    let mut out = String::new();
    let mut metric = |name: &str, kind: &str, help: &str, value: u64| {
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "# HELP gms_{name} {help}\n# TYPE gms_{name} {kind}\ngms_{name}{{{labels}}} {value}"
        );
    };
    let mut gauge = |name, help, value: u64| metric(name, "gauge", help, value);
    gauge("allocations", "Allocations of the layout.", allocations as u64);
    gauge("allocated_bytes", "Bytes of the layout's memory.", bytes);
    gauge("metadata_entries", "Entries of metadata.", entries as u64);
    gauge("reclaim_pending_bytes", "Bytes still to be given back.", progress.pending_bytes());
    gauge("connections", "Connections now.", service.connections() as u64);
    gauge("writer", "Whether there is a writer.", lock.has_writer.into());
    gauge("readers", "Readers now.", lock.readers as u64);
    gauge("waiting", "Sessions that wait for a lock.", lock.waiting as u64);
    gauge("committed", "Whether a layout is published.", lock.committed.into());
    let mut total = |name, help, value: u64| metric(name, "counter", help, value);
    total("connections_total", "Connections accepted.", counters.connections.get());
    total("connections_refused_total", "Connections refused.", counters.refused.get());
    total("requests_total", "Requests of sessions.", counters.requests.get());
    total("errors_total", "Requests refused.", counters.errors.get());
    total("unreadable_total", "Sessions dropped as unreadable.", counters.unreadable.get());
    total("lock_waits_total", "Sessions that had to wait for a lock.", counters.waits.get());
    total("commits_total", "Layouts published.", counters.commits.get());
    total("allocations_total", "Allocations made.", counters.allocations.get());
    total("memory_waits_total", "Allocations that had to wait.", counters.memory_waits.get());
    total("exports_total", "Descriptors sent.", counters.exports.get());
    total("releases_total", "Allocations given back.", progress.released());
    out
}

/// Answers `GET /metrics` with what `text` says, one connection after the other, for as long as the
/// process lives. The listener should be on a loopback address: there is no authentication.
///
/// # Errors
/// Where connections cannot be accepted any more.
pub fn serve_metrics(listener: &TcpListener, text: impl Fn() -> String) -> io::Result<()> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                if let Err(error) = answer(&stream, &text) {
                    tracing::debug!(%error, "a request for metrics was not answered");
                }
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The longest request that is read.
const REQUEST_BYTES: u64 = 8 << 10;

fn answer(stream: &TcpStream, text: &impl Fn() -> String) -> io::Result<()> {
    let patience = Some(Duration::from_secs(2));
    stream.set_read_timeout(patience)?;
    stream.set_write_timeout(patience)?;
    let mut request = BufReader::new(stream.take(REQUEST_BYTES));
    let mut first = String::new();
    request.read_line(&mut first)?;
    let mut header = String::new();
    while request.read_line(&mut header)? > 2 {
        header.clear();
    }
    let (status, body) = match first.split_ascii_whitespace().collect::<Vec<_>>()[..] {
        ["GET", "/metrics" | "/", _] => ("200 OK", text()),
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
