//! Bytes and descriptors over a Unix stream socket.

#![forbid(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::wire::BATCH;
use crate::error::{Error, Result};

fn failed(errno: Errno) -> Error {
    Error::Socket(Arc::new(errno.into()))
}

/// Sends all bytes, and with the first of them the descriptors.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    mut bytes: &[u8],
    mut files: &[BorrowedFd<'_>],
) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    while !bytes.is_empty() {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(failed(Errno::TOOMANYREFS));
        }
        let parts = [IoSlice::new(bytes)];
        let sent = retry_on_intr(|| sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL));
        let sent = sent.map_err(failed)?;
        bytes = bytes.get(sent..).unwrap_or_default();
        files = &[];
    }
    Ok(())
}

/// Receives so many bytes, and every descriptor that comes with them.
pub(super) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<Vec<OwnedFd>> {
    let mut files = Vec::new();
    let mut done = 0;
    while done < bytes.len() {
        // A program may have its socket tell who sends (SO_PASSCRED): the kernel puts that before the descriptors.
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH), ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes[done..])];
        let got =
            retry_on_intr(|| recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC));
        let got = got.map_err(failed)?;
        let before = files.len();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                files.extend(received);
            }
        }
        let came = files.len() - before;
        let cut = got.flags.contains(ReturnFlags::CTRUNC);
        if cut && came < BATCH {
            // There was room for more: the process may have no more of them.
            return Err(failed(Errno::MFILE));
        }
        if cut || files.len() > BATCH {
            return Err(Error::BadMessage { reason: "it has too many descriptors" });
        }
        if got.bytes == 0 {
            return Err(Error::Socket(Arc::new(std::io::ErrorKind::UnexpectedEof.into())));
        }
        done += got.bytes;
    }
    Ok(files)
}
