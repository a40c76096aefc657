//! Bytes and descriptors over a Unix stream socket, and whether there is anybody at its other end.

#![forbid(unsafe_code)]

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, send, sendmsg,
};

use crate::wire::MAX_DESCRIPTORS;

/// Sends all bytes, and waits until a moment for the other end to take them: [`Errno::TIMEDOUT`] then,
/// with some of them sent, perhaps. So also where a signal ends the wait: [`Errno::INTR`].
pub(crate) fn send_until(
    socket: BorrowedFd<'_>,
    mut bytes: &[u8],
    deadline: Option<Instant>,
    signals: Signals<'_>,
) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                ready_until(socket, PollFlags::OUT, deadline, signals)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends all bytes, and with the first of them the descriptors. Waits as long as the other end takes.
pub(crate) fn send_all(
    socket: BorrowedFd<'_>,
    mut bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> rustix::io::Result<()> {
    if !files.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(Errno::TOOMANYREFS);
        }
        let parts = [IoSlice::new(bytes)];
        let flags = SendFlags::NOSIGNAL;
        let sent = retry_on_intr(|| sendmsg(socket, &parts, &mut control, flags))?;
        bytes = bytes.get(sent..).unwrap_or_default();
    }
    while !bytes.is_empty() {
        let sent = retry_on_intr(|| send(socket, bytes, SendFlags::NOSIGNAL))?;
        bytes = bytes.get(sent..).unwrap_or_default();
    }
    Ok(())
}

/// What a signal that this thread handles does to a wait.
#[derive(Clone, Copy)]
pub(crate) enum Signals<'a> {
    /// Nothing.
    Ignored,
    /// It ends it.
    End,
    /// Somebody is asked whether it ends it. Also now and then without one: it may have come just before the
    /// wait, or to another thread.
    Ask(&'a dyn Fn() -> bool),
}

/// How long a wait lasts at most until somebody is asked: as soon as whoever sent the signal sees it.
const UNTIL_ASKED: Duration = Duration::from_millis(100);

impl Signals<'_> {
    /// How long a wait may last that nothing but a signal disturbs.
    fn at_most(self, time: Option<Duration>) -> Option<Duration> {
        match self {
            Self::Ask(_) => Some(time.map_or(UNTIL_ASKED, |time| time.min(UNTIL_ASKED))),
            Self::Ignored | Self::End => time,
        }
    }

    /// Whether the wait ends: after a signal, or after the longest time without one.
    fn end(self) -> bool {
        match self {
            Self::Ignored => false,
            Self::End => true,
            Self::Ask(ask) => ask(),
        }
    }
}

/// How long to look for bytes without sleeping: a time that is given, or longer where it was just too
/// short lately. A writer that maps what it has made is back in little more than that, and a sleep in
/// between costs more than all of its request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spin {
    learned: Duration,
}

impl Spin {
    /// How many times as long it may become.
    const MOST: u32 = 8;

    fn most(given: Duration) -> Duration {
        given.saturating_mul(Self::MOST)
    }

    fn time(self, given: Duration) -> Duration {
        if given.is_zero() { given } else { self.learned.clamp(given, Self::most(given)) }
    }

    /// Learns from how long it took until something came.
    fn learn(&mut self, given: Duration, took: Duration) {
        self.learned = match took <= Self::most(given) {
            // Half as long again, and less only by and by.
            true => (took + took / 2).max(self.learned - self.learned / 8),
            // The other end has something else to do.
            false => Duration::ZERO,
        };
    }
}

/// Receives what is there, at least a byte unless the other end has closed, and the descriptors that
/// come with it. Looks for it without sleeping for so long first, and waits until a moment then:
/// [`Errno::TIMEDOUT`]. Where a signal ends that wait: [`Errno::INTR`].
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    files: &mut Vec<OwnedFd>,
    spin: &mut Spin,
    given: Duration,
    deadline: Option<Instant>,
    signals: Signals<'_>,
) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(bytes)];
    let receive =
        |flags| recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC | flags);
    let before_sleep = || match (deadline, signals) {
        (None, Signals::Ignored) => Ok(()),
        _ => ready_until(socket, PollFlags::IN, deadline, signals),
    };
    let got = spinning(spin, given, receive, before_sleep)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            files.extend(received);
        }
    }
    if got.flags.contains(ReturnFlags::CTRUNC) {
        // The kernel had descriptors to give and this process no room for them.
        return Err(Errno::MFILE);
    }
    Ok(got.bytes)
}

/// Receives bytes in the same way. The kernel closes descriptors that come with them. Where none are
/// there in time, something is done before sleeping.
pub(crate) fn receive_bytes(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    spin: &mut Spin,
    given: Duration,
    before_sleep: impl FnOnce() -> rustix::io::Result<()>,
) -> rustix::io::Result<usize> {
    let receive = |flags| recv(socket, &mut *bytes, flags).map(|(read, _)| read);
    spinning(spin, given, receive, before_sleep)
}

/// Tries without sleeping for so long, and sleeps then. Waking a thread takes the kernel as long as
/// everything else about a request together.
fn spinning<T>(
    spin: &mut Spin,
    given: Duration,
    mut receive: impl FnMut(RecvFlags) -> rustix::io::Result<T>,
    before_sleep: impl FnOnce() -> rustix::io::Result<()>,
) -> rustix::io::Result<T> {
    let time = spin.time(given);
    if time.is_zero() {
        before_sleep()?;
        return retry_on_intr(|| receive(RecvFlags::empty()));
    }
    let started = Instant::now();
    let received = loop {
        match receive(RecvFlags::DONTWAIT) {
            // The other end may be waiting for this very processor.
            Err(Errno::AGAIN) if started.elapsed() < time => std::thread::yield_now(),
            Err(Errno::AGAIN) => {
                before_sleep()?;
                break retry_on_intr(|| receive(RecvFlags::empty()));
            }
            Err(Errno::INTR) => {}
            received => break received,
        }
    };
    spin.learn(given, started.elapsed());
    received
}

/// How long to spin where nothing else is said: as long as a driver call or two take, and not at all
/// where there are too few processors for it.
pub(crate) fn default_spin() -> Duration {
    /// Fewer are better used by whoever is waited for.
    const PROCESSORS: usize = 4;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if processors < PROCESSORS { Duration::ZERO } else { Duration::from_micros(50) }
}

/// What a wait ended with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// The other end of the socket is gone.
    HungUp,
    /// The second descriptor is readable.
    Woken,
    /// Neither, and the time is up.
    TimedOut,
}

/// Waits until the other end of a socket is gone, or something else is readable, or the time is up.
/// Bytes on the socket do not end it.
pub(crate) fn wait(
    socket: BorrowedFd<'_>,
    other: Option<BorrowedFd<'_>>,
    time: Option<Duration>,
) -> io::Result<Waited> {
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut descriptors = [
        PollFd::from_borrowed_fd(socket, PollFlags::RDHUP),
        PollFd::from_borrowed_fd(other.unwrap_or(socket), PollFlags::IN),
    ];
    let watched = if other.is_some() { 2 } else { 1 };
    let time = time.map(timespec);
    match poll(&mut descriptors[..watched], time.as_ref()) {
        // A signal: whoever waits looks at the clock and waits again.
        Err(Errno::INTR) => return Ok(Waited::Woken),
        Err(error) => return Err(error.into()),
        Ok(_) => {}
    }
    if descriptors[0].revents().intersects(gone) {
        Ok(Waited::HungUp)
    } else if watched == 2 && !descriptors[1].revents().is_empty() {
        Ok(Waited::Woken)
    } else {
        Ok(Waited::TimedOut)
    }
}

/// Waits until a socket is ready for something, or its other end is gone; [`Errno::TIMEDOUT`] if the
/// moment comes first, [`Errno::INTR`] if a signal ends it. Other signals do not put it off.
fn ready_until(
    socket: BorrowedFd<'_>,
    what: PollFlags,
    deadline: Option<Instant>,
    signals: Signals<'_>,
) -> rustix::io::Result<()> {
    loop {
        let left = deadline.map(|time| time.saturating_duration_since(Instant::now()));
        let most = signals.at_most(left);
        let time = most.map(timespec);
        match poll(&mut [PollFd::from_borrowed_fd(socket, what)], time.as_ref()) {
            Ok(0) if most == left => return Err(Errno::TIMEDOUT),
            Ok(0) | Err(Errno::INTR) => {
                if signals.end() {
                    return Err(Errno::INTR);
                }
            }
            Ok(_) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Sleeps for a moment; [`Errno::INTR`] where a signal ends it.
pub(crate) fn sleep(time: Duration, signals: Signals<'_>) -> rustix::io::Result<()> {
    let pause = || poll(&mut [], Some(&timespec(time)));
    match signals {
        Signals::Ignored => std::thread::sleep(time),
        Signals::End => pause().map(|_| ())?,
        Signals::Ask(ask) => {
            let _ = pause();
            if ask() {
                return Err(Errno::INTR);
            }
        }
    }
    Ok(())
}

/// Waits until there is something to receive; false if the time is up first.
pub(crate) fn readable(socket: BorrowedFd<'_>, time: Duration) -> rustix::io::Result<bool> {
    let mut descriptors = [PollFd::new(&socket, PollFlags::IN)];
    let time = timespec(time);
    Ok(retry_on_intr(|| poll(&mut descriptors, Some(&time)))? > 0)
}

/// Whether there is nothing to receive for a time: the answer comes at once when there is. Looks for it
/// without sleeping if `spin` is not zero.
pub(crate) fn is_silent(
    socket: BorrowedFd<'_>,
    time: Duration,
    spin: Duration,
) -> rustix::io::Result<bool> {
    if spin.is_zero() || time.is_zero() {
        return Ok(!readable(socket, time)?);
    }
    let started = Instant::now();
    while !readable(socket, Duration::ZERO)? {
        if started.elapsed() >= time {
            return Ok(true);
        }
        // The other end may be waiting for this very processor.
        std::thread::yield_now();
    }
    Ok(false)
}

/// Whether the other end is gone.
pub(crate) fn is_hung_up(socket: impl AsFd) -> bool {
    !matches!(wait(socket.as_fd(), None, Some(Duration::ZERO)), Ok(Waited::TimedOut))
}

fn timespec(time: Duration) -> Timespec {
    // What does not fit is longer than any machine runs.
    let tv_sec = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: time.subsec_nanos().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIVEN: Duration = Duration::from_micros(50);

    fn learned(spin: &mut Spin, took_us: u64) -> u128 {
        spin.learn(GIVEN, Duration::from_micros(took_us));
        spin.time(GIVEN).as_micros()
    }

    #[test]
    fn a_spin_that_is_just_too_short_becomes_longer_and_one_that_is_no_use_does_not() {
        let mut spin = Spin::default();
        assert_eq!(spin.time(GIVEN), GIVEN);
        assert_eq!(learned(&mut spin, 80), 120);
        // A short gap between two long ones does not undo it.
        assert_eq!(learned(&mut spin, 3), 105);
        assert_eq!(learned(&mut spin, 80), 120);
        assert_eq!(learned(&mut spin, 390), 400, "not for ever");
        assert_eq!(learned(&mut spin, 401), 50);
        assert_eq!(spin.time(Duration::ZERO), Duration::ZERO, "never where it was not wanted");
    }
}
