//! A server for every GPU, each in a process of its own, so that a driver that fails takes its own server
//! along and no other's memory. One that fails is started again; with `--end-together` all end, and
//! whoever supervises this starts anew.

use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use gms::memory::Memory;
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::run::{driver, ordinal};
use super::{ServeArgs, ServeDevice};
use crate::exit::{Abort, Exit};

/// How often the processes are looked after.
const PERIOD: Duration = Duration::from_millis(20);

/// Before one that has failed is started again; twice as long each time that it fails again within
/// [`QUIET`] of its start, up to the other.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
const QUIET: Duration = Duration::from_secs(60);

/// What a server says on its standard output, to the supervisor, once its sockets are there.
pub(super) const SERVING: &str = "serving";

/// Has this process told to stop when the one that started it ends.
pub(super) fn end_with(parent: u32) -> Result<(), Abort> {
    set_parent_process_death_signal(Some(Signal::TERM)).map_err(Abort::failure)?;
    // It may have ended before that. As the first process of a container its number is that of those who
    // take orphans in.
    let now = getppid().and_then(|now| u32::try_from(now.as_raw_nonzero().get()).ok());
    if now == Some(parent) { Ok(()) } else { Err(Abort::failure("the supervisor is gone")) }
}

/// One device's server.
struct Member {
    device: ServeDevice,
    process: Process,
    /// Whether it has had its sockets, at any time.
    has_served: bool,
    started: Instant,
    pause: Duration,
}

enum Process {
    Runs(Child),
    /// It is started again then.
    Failed(Instant),
    /// Somebody has stopped it.
    Stopped,
}

/// How one server's end is taken.
enum Verdict {
    /// It runs, or will.
    GoesOn,
    /// It was stopped, and stays so.
    Stopped,
    /// It cannot be had at all, or its end is to be everybody's.
    EndsAll,
}

impl Member {
    fn start(args: &ServeArgs, device: ServeDevice) -> std::io::Result<Self> {
        let process = Process::Runs(start(args, device)?);
        let (has_served, started) = (false, Instant::now());
        Ok(Self { device, process, has_served, started, pause: FIRST_PAUSE })
    }

    /// Sees how it does, and starts it again when it is time.
    fn look_after(&mut self, args: &ServeArgs) -> std::io::Result<Verdict> {
        match &mut self.process {
            Process::Runs(child) => match child.try_wait()? {
                None => Ok(Verdict::GoesOn),
                Some(status) => {
                    self.has_served |= has_served(child);
                    Ok(self.ended(args, status))
                }
            },
            Process::Failed(again) if Instant::now() >= *again => {
                // Where there is no process for it now, there may be later.
                match start(args, self.device) {
                    Ok(child) => {
                        self.process = Process::Runs(child);
                        self.started = Instant::now();
                    }
                    Err(error) => {
                        tracing::error!(device = %self.device, %error, "no server");
                        self.fail();
                    }
                }
                Ok(Verdict::GoesOn)
            }
            Process::Failed(_) => Ok(Verdict::GoesOn),
            Process::Stopped => Ok(Verdict::Stopped),
        }
    }

    fn ended(&mut self, args: &ServeArgs, status: ExitStatus) -> Verdict {
        let device = self.device;
        if args.end_together || !self.has_served {
            tracing::error!(%device, %status, "a server has ended: all end");
            self.process = Process::Stopped;
            return Verdict::EndsAll;
        }
        if status.success() {
            tracing::warn!(%device, "a server was stopped");
            self.process = Process::Stopped;
            return Verdict::Stopped;
        }
        if self.started.elapsed() >= QUIET {
            self.pause = FIRST_PAUSE;
        }
        tracing::error!(%device, %status, pause = ?self.pause, "a server has ended: it starts again");
        self.fail();
        Verdict::GoesOn
    }

    fn fail(&mut self) {
        self.process = Process::Failed(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

/// Whether a process that has ended said that it was serving.
fn has_served(child: &mut Child) -> bool {
    let mut said = String::new();
    // What cannot be read was not said.
    let _ = child.stdout.take().map(|mut out| out.read_to_string(&mut said));
    said.lines().any(|line| line == SERVING)
}

/// One server process for each GPU, until a signal comes or all of them have been stopped.
pub(super) fn serve_all(args: &ServeArgs) -> Result<Exit, Abort> {
    let devices = devices(args)?;
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(Abort::failure)?;
    let mut members = Vec::new();
    for device in devices {
        match Member::start(args, device) {
            Ok(member) => members.push(member),
            Err(error) => {
                stop(&mut members);
                return Err(Abort::failure(format_args!("no server for device {device}: {error}")));
            }
        }
    }
    let mut exit = Exit::Done;
    'looking: while signals.pending().next().is_none() {
        std::thread::sleep(PERIOD);
        let mut all_stopped = true;
        for member in &mut members {
            match member.look_after(args).map_err(Abort::failure)? {
                Verdict::GoesOn => all_stopped = false,
                Verdict::Stopped => {}
                Verdict::EndsAll => {
                    // A terminal's signal comes to all, and may have ended a server before it is seen here.
                    if signals.pending().next().is_none() {
                        exit = Exit::Failure;
                    }
                    break 'looking;
                }
            }
        }
        if all_stopped {
            break;
        }
    }
    if !stop(&mut members) {
        exit = Exit::Failure;
    }
    Ok(exit)
}

/// The devices to serve.
fn devices(args: &ServeArgs) -> Result<Vec<ServeDevice>, Abort> {
    match args.device {
        Some(ServeDevice::Sim(last)) => Ok((0..=last).map(ServeDevice::Sim).collect()),
        Some(ServeDevice::Cuda(_)) => Err(Abort::bad_input("--all serves every GPU, not one")),
        None => {
            let driver = driver(ServeDevice::Cuda(0))?;
            match Memory::devices(&driver).map_err(Abort::failure)? {
                0 => Err(Abort::failure("there is no GPU")),
                count => Ok((0..count).map(ServeDevice::Cuda).collect()),
            }
        }
    }
}

fn start(args: &ServeArgs, device: ServeDevice) -> std::io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["serve", "--supervised", &std::process::id().to_string()]);
    command.args(["--device", &device.to_string()]);
    for tag in &args.tags {
        // In one piece: a tag may begin as an option does.
        command.arg(format!("--tag={tag}"));
    }
    let seconds = |time: Duration| time.as_secs_f64().to_string();
    let timeout = args.alloc_retry_timeout.0.map_or("none".to_owned(), seconds);
    command.args(["--alloc-retry-interval", &seconds(args.alloc_retry_interval)]);
    command.args(["--alloc-retry-timeout", &timeout]);
    command.args(["--max-message", &args.max_message.0.to_string()]);
    command.args(["--max-metadata", &args.max_metadata.0.to_string()]);
    command.args(["--ahead", &args.ahead.0.to_string()]);
    if let Some(first) = args.metrics {
        command.args(["--metrics", &metrics_of(first, device)?.to_string()]);
    }
    if let Some(group) = args.group {
        command.args(["--group", &group.to_string()]);
    }
    if let Some(spin) = args.spin {
        command.args(["--spin", &spin.to_string()]);
    }
    if args.verbose {
        command.arg("--verbose");
    }
    command.stdout(Stdio::piped()).spawn()
}

/// Where a device's server tells its figures: as many ports behind the first one's as its number.
fn metrics_of(first: SocketAddr, device: ServeDevice) -> std::io::Result<SocketAddr> {
    let port =
        u16::try_from(ordinal(device)).ok().and_then(|number| first.port().checked_add(number));
    let port = port.ok_or_else(|| std::io::Error::other("there is no port for its metrics"))?;
    Ok(SocketAddr::new(first.ip(), port))
}

/// Tells all to stop and waits for them; whether all ended well.
fn stop(members: &mut [Member]) -> bool {
    let children = |members: &mut [Member]| -> Vec<Child> {
        let taken =
            members.iter_mut().map(|it| std::mem::replace(&mut it.process, Process::Stopped));
        taken
            .filter_map(|it| if let Process::Runs(child) = it { Some(child) } else { None })
            .collect()
    };
    let mut children = children(members);
    for child in &mut children {
        // One that was waited for already has no number any more.
        if matches!(child.try_wait(), Ok(None))
            && let Some(id) = i32::try_from(child.id()).ok().and_then(Pid::from_raw)
        {
            let _ = kill_process(id, Signal::TERM);
        }
    }
    // One that had not begun to listen for the signal yet is ended by it, and had nothing to lose.
    let is_well =
        |status: ExitStatus| status.success() || matches!(status.signal(), Some(SIGTERM | SIGINT));
    let ends = children.iter_mut().map(|child| child.wait().is_ok_and(is_well));
    // Waits for each, whatever the one before did.
    ends.fold(true, |well, this| well & this)
}
