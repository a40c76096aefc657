//! The command lines.

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Subcommand};
use cuda_sim::Simulator;

use crate::args::some_bytes;
use crate::bytes::ByteCount;
use crate::device::DeviceChoice;

/// The machine to own memory of: there is no choosing by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServeDevice {
    /// The device of this number of a simulator, which has as many as that takes.
    Sim(u32),
    /// The GPU of this number.
    Cuda(u32),
}

/// A text that is no device to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a GPU's number, cuda:N, sim or sim:N with N below {}", Simulator::MAX_DEVICES)]
pub struct ServeDeviceError;

impl FromStr for ServeDevice {
    type Err = ServeDeviceError;

    fn from_str(text: &str) -> Result<Self, ServeDeviceError> {
        if let Ok(ordinal) = text.parse() {
            return Ok(Self::Cuda(ordinal));
        }
        if let Some(number) = text.strip_prefix("sim:") {
            // As many devices are made.
            let is_one = |number: &u32| (*number as usize) < Simulator::MAX_DEVICES;
            return number.parse().ok().filter(is_one).map(Self::Sim).ok_or(ServeDeviceError);
        }
        match text.parse() {
            Ok(DeviceChoice::Sim) => Ok(Self::Sim(0)),
            Ok(DeviceChoice::Cuda(ordinal)) => Ok(Self::Cuda(ordinal)),
            Ok(DeviceChoice::Auto) | Err(_) => Err(ServeDeviceError),
        }
    }
}

impl fmt::Display for ServeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sim(0) => f.write_str("sim"),
            Self::Sim(number) => write!(f, "sim:{number}"),
            Self::Cuda(ordinal) => write!(f, "{ordinal}"),
        }
    }
}

fn positive_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err("expected more than 0 seconds".to_owned()),
    }
}

/// A time, or that there is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit(pub Option<Duration>);

fn limit(text: &str) -> Result<Limit, String> {
    match text {
        "none" | "inf" => Ok(Limit(None)),
        text => positive_seconds(text).map(|time| Limit(Some(time))),
    }
}

/// What a client sends at a time has to fit.
const LEAST_MESSAGE: ByteCount = ByteCount(512 << 10);

fn message_bytes(text: &str) -> Result<ByteCount, String> {
    match some_bytes(text)? {
        ByteCount(bytes) if bytes < LEAST_MESSAGE.0 => Err("expected 512KiB or more".to_owned()),
        bytes => Ok(bytes),
    }
}

fn group(text: &str) -> Result<u32, String> {
    // The greatest number is no group's.
    let number = text.parse().ok().filter(|number| *number != u32::MAX);
    number.ok_or_else(|| "expected the number of a group".to_owned())
}

fn tag(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if text.is_empty() || text.len() > 64 || !text.chars().all(fits) {
        return Err("expected up to 64 letters, digits, and _ - .".to_owned());
    }
    Ok(text.to_owned())
}

fn loopback(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr =
        text.parse().map_err(|_| "expected ADDRESS:PORT, such as 127.0.0.1:9400".to_owned())?;
    if !address.ip().is_loopback() {
        return Err("only a loopback address, as there is no authentication".to_owned());
    }
    if address.port() == 0 {
        return Err(
            "a port of its own, as nobody is told which one the system would give".to_owned()
        );
    }
    Ok(address)
}

/// The arguments of `vpmm serve`.
#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    /// Whose memory to own: a GPU's number, as CUDA counts, or sim; sim:N is a simulator's device of
    /// that number.
    #[arg(long, value_name = "DEVICE", required_unless_present = "all")]
    pub device: Option<ServeDevice>,

    /// A name to serve, each with a layout and a socket of its own; may be repeated. weights and
    /// kv_cache, if none is given.
    #[arg(long = "tag", value_name = "TAG", value_parser = tag)]
    pub tags: Vec<String>,

    /// The socket, where one tag is served; else gms_UUID_TAG.sock in $GMS_SOCKET_DIR or the folder
    /// for temporary files.
    #[arg(long, value_name = "PATH", conflicts_with = "all")]
    pub socket_path: Option<PathBuf>,

    /// Seconds between attempts to get memory that there is too little of.
    #[arg(long, value_name = "S", default_value = "0.5", value_parser = positive_seconds)]
    pub alloc_retry_interval: Duration,

    /// Seconds after which such a request fails; none waits for ever.
    #[arg(long, value_name = "S", default_value = "60", value_parser = limit)]
    pub alloc_retry_timeout: Limit,

    /// A group, by its number, whose members may connect beside this user and root.
    #[arg(long, value_name = "GID", value_parser = group)]
    pub group: Option<u32>,

    /// The longest message that is taken: 512KiB at least, since a client sends up to half of that at a time.
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = message_bytes)]
    pub max_message: ByteCount,

    /// What a layout's metadata may take of the server's memory: keys and values, 256 bytes for each entry
    /// beside them, and the tags of allocations. What goes beyond is refused.
    #[arg(long, value_name = "BYTES", default_value = "256MiB", value_parser = some_bytes)]
    pub max_metadata: ByteCount,

    /// Answer GET /metrics in Prometheus' text format at this loopback address; with --all that is the first
    /// device's, and each further one's has the next port.
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = loopback)]
    pub metrics: Option<SocketAddr>,

    /// Microseconds that a session looks for its client's next request without sleeping; 50, or 0 on
    /// machines with fewer than four processors, if not given.
    #[arg(long, value_name = "US")]
    pub spin: Option<u64>,

    /// The largest allocation of which a writer that makes one after the other has the next one made
    /// ahead, between its requests; 0 for none.
    #[arg(long, value_name = "BYTES", default_value = "64MiB")]
    pub ahead: ByteCount,

    /// Serve every GPU, each in a process of its own, which is started again if it fails. With --device
    /// sim, the simulated one; with sim:N those up to that number.
    #[arg(long)]
    pub all: bool,

    /// With --all: if one server ends, all do.
    #[arg(long, requires = "all")]
    pub end_together: bool,

    /// Log requests that are refused, locks that are granted, and how long the driver takes to make and to
    /// export memory, too.
    #[arg(long, short)]
    pub verbose: bool,

    /// End when the process of this number does, which started this one.
    #[arg(long, value_name = "PID", hide = true)]
    pub supervised: Option<u32>,
}

/// The arguments of `vpmm serve-bench`.
#[derive(Args, Clone, Debug)]
pub struct ServeBenchArgs {
    /// Where to run: a GPU's number, as CUDA counts, or sim.
    #[arg(long, value_name = "DEVICE", default_value = "0")]
    pub device: ServeDevice,

    /// The socket of a server that runs already, whose layout is thrown away; one is started if none is
    /// given.
    #[arg(long, value_name = "PATH")]
    pub socket_path: Option<PathBuf>,

    /// Microseconds to look for answers without sleeping; what is usual here, if not given.
    #[arg(long, value_name = "US")]
    pub spin: Option<u64>,

    /// As with vpmm serve, for the server that is started.
    #[arg(long, value_name = "BYTES", conflicts_with = "socket_path")]
    pub ahead: Option<ByteCount>,

    /// Without batches, as with a server that does not have them.
    #[arg(long)]
    pub no_batch: bool,

    /// Also save and load a layout, in a folder of this one, beside what the disk and page-locked
    /// memory give by themselves.
    #[arg(long, value_name = "FOLDER")]
    pub folder: Option<PathBuf>,

    /// How much to save and load.
    #[arg(long, value_name = "BYTES", default_value = "8GiB", requires = "folder")]
    pub bytes: ByteCount,

    /// Be so many of the readers that read at once.
    #[arg(long, hide = true, requires = "socket_path")]
    pub readers: Option<usize>,

    /// Do as little as shows that every case works. The figures mean nothing.
    #[arg(long)]
    pub quick: bool,
}

/// The arguments of `vpmm snapshot`.
#[derive(Args, Clone, Debug)]
pub struct SnapshotArgs {
    /// Which way.
    #[command(subcommand)]
    pub command: SnapshotCommand,
}

/// Which way a layout goes.
#[derive(Clone, Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Save the published layout of a server into a folder that is not there yet.
    Save(SaveArgs),
    /// Publish a saved layout at a server; what was published there before goes. Files that are not
    /// whole are refused, and nothing is published then.
    Load(SnapshotPlace),
}

/// The arguments of `vpmm snapshot save`.
#[derive(Args, Clone, Debug)]
pub struct SaveArgs {
    /// What is saved, and where.
    #[command(flatten)]
    pub place: SnapshotPlace,

    /// Bytes after which the next file is begun.
    #[arg(long, value_name = "BYTES", default_value = "4GiB", value_parser = some_bytes)]
    pub shard: ByteCount,
}

/// Where a layout is, and where its files are.
#[derive(Args, Clone, Debug)]
pub struct SnapshotPlace {
    /// The folder of the files.
    pub folder: PathBuf,

    /// Whose memory it is: a GPU's number, as CUDA counts, or sim.
    #[arg(long, value_name = "DEVICE")]
    pub device: ServeDevice,

    /// The server's tag, where its socket is at the usual place.
    #[arg(long, value_name = "TAG", default_value = "weights", value_parser = tag)]
    pub tag: String,

    /// The server's socket.
    #[arg(long, value_name = "PATH", conflicts_with = "tag")]
    pub socket_path: Option<PathBuf>,

    /// Seconds to wait for the server's lock.
    #[arg(long, value_name = "S", default_value = "30")]
    pub timeout: f64,

    /// How many chunks of 16 MiB are under way at a time.
    #[arg(long, value_name = "N", default_value = "8")]
    pub workers: NonZeroUsize,

    /// Through the page cache.
    #[arg(long)]
    pub no_direct: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_numbers_or_the_simulator() {
        assert_eq!("3".parse(), Ok(ServeDevice::Cuda(3)));
        assert_eq!("cuda:3".parse(), Ok(ServeDevice::Cuda(3)));
        assert_eq!("sim".parse(), Ok(ServeDevice::Sim(0)));
        assert_eq!("sim:3".parse(), Ok(ServeDevice::Sim(3)));
        assert_eq!("sim:31".parse(), Ok(ServeDevice::Sim(31)));
        for device in [ServeDevice::Sim(0), ServeDevice::Sim(2), ServeDevice::Cuda(1)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        for text in ["", "auto", "-1", "x", "sim:", "sim:-1", "sim:32"] {
            assert!(text.parse::<ServeDevice>().is_err(), "{text}");
        }
    }

    #[test]
    fn limits_are_positive_or_none() {
        assert_eq!(limit("none"), Ok(Limit(None)));
        assert_eq!(limit("1.5"), Ok(Limit(Some(Duration::from_millis(1500)))));
        for text in ["0", "-1", "nan", "x"] {
            assert!(limit(text).is_err(), "{text}");
        }
    }

    #[test]
    fn groups_are_numbers_but_for_the_greatest() {
        assert_eq!((group("0"), group("4294967294")), (Ok(0), Ok(u32::MAX - 1)));
        for text in ["4294967295", "-1", "staff"] {
            assert!(group(text).is_err(), "{text}");
        }
    }

    #[test]
    fn metrics_are_told_to_this_machine_only() {
        assert!(loopback("127.0.0.1:1").is_ok() && loopback("[::1]:9").is_ok());
        assert!(loopback("0.0.0.0:9400").is_err());
        // With --all the second device's would be port 1.
        assert!(loopback("127.0.0.1:0").is_err());
    }
}
