//! A server for every GPU, each in a process of its own, so that a driver that fails takes one along
//! and no more than the operator wants: all end together, and whoever supervises this starts anew.

use std::process::{Child, Command};
use std::time::Duration;

use gms::memory::Memory;
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::run::driver;
use super::{ServeArgs, ServeDevice};
use crate::exit::{Abort, Exit};

/// How often the processes are looked after.
const PERIOD: Duration = Duration::from_millis(20);

/// Has this process told to stop when the one that started it ends.
pub(super) fn end_with_parent() -> Result<(), Abort> {
    set_parent_process_death_signal(Some(Signal::TERM)).map_err(Abort::failure)?;
    // It may have ended before that.
    match getppid() {
        Some(parent) if !parent.is_init() => Ok(()),
        _ => Err(Abort::failure("the supervisor is gone")),
    }
}

/// One server process for each GPU, until a signal comes or one of them ends.
pub(super) fn serve_all(args: &ServeArgs) -> Result<Exit, Abort> {
    let devices = devices(args)?;
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(Abort::failure)?;
    let mut children = Vec::new();
    for device in &devices {
        match start(args, *device) {
            Ok(child) => children.push(child),
            Err(error) => {
                stop(&mut children);
                return Err(Abort::failure(format_args!("no server for device {device}: {error}")));
            }
        }
    }
    let mut exit = Exit::Done;
    let mut ended = None;
    while ended.is_none() && signals.pending().next().is_none() {
        std::thread::sleep(PERIOD);
        for (device, child) in devices.iter().zip(&mut children) {
            if let Some(status) = child.try_wait().map_err(Abort::failure)? {
                tracing::error!(%device, %status, "a server has ended: all end");
                ended = Some(device);
                exit = Exit::Failure;
            }
        }
    }
    if !stop(&mut children) {
        exit = Exit::Failure;
    }
    Ok(exit)
}

/// The devices to serve.
fn devices(args: &ServeArgs) -> Result<Vec<ServeDevice>, Abort> {
    match args.device {
        Some(ServeDevice::Sim) => Ok(vec![ServeDevice::Sim]),
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
    command.args(["serve", "--supervised", "--device", &device.to_string()]);
    for tag in &args.tags {
        command.args(["--tag", tag]);
    }
    let seconds = |time: Duration| time.as_secs_f64().to_string();
    let timeout = args.alloc_retry_timeout.0.map_or("none".to_owned(), seconds);
    command.args(["--alloc-retry-interval", &seconds(args.alloc_retry_interval)]);
    command.args(["--alloc-retry-timeout", &timeout]);
    command.args(["--max-message", &args.max_message.0.to_string()]);
    command.args(["--ahead", &args.ahead.0.to_string()]);
    if let Some(group) = args.group {
        command.args(["--group", &group.to_string()]);
    }
    if let Some(spin) = args.spin {
        command.args(["--spin", &spin.to_string()]);
    }
    if args.verbose {
        command.arg("--verbose");
    }
    command.spawn()
}

/// Tells all to stop and waits for them; whether all ended well.
fn stop(children: &mut [Child]) -> bool {
    for child in children.iter_mut() {
        // One that was waited for already has no number any more.
        if matches!(child.try_wait(), Ok(None))
            && let Some(id) = i32::try_from(child.id()).ok().and_then(Pid::from_raw)
        {
            let _ = kill_process(id, Signal::TERM);
        }
    }
    let ends = children.iter_mut().map(|child| child.wait().is_ok_and(|status| status.success()));
    // Waits for each, whatever the one before did.
    ends.fold(true, |well, this| well & this)
}
