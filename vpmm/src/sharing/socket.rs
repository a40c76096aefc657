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

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    /// A socket with a timeout may take a part of a message, and the rest when there is room again.
    #[test]
    fn a_message_that_is_taken_in_parts_comes_whole_with_its_descriptors_once() {
        let bytes: Vec<u8> = (0..1 << 20_u32).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect();
        let file = File::open("/dev/null").unwrap();
        let pass = || {
            let (here, there) = UnixStream::pair().unwrap();
            here.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
            std::thread::scope(|scope| {
                let receiving = scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(75));
                    let mut came = vec![0; bytes.len()];
                    receive(there.as_fd(), &mut came).map(|files| (came, files.len()))
                });
                let sent = send(here.as_fd(), &bytes, &[file.as_fd()]);
                drop(here);
                let received = receiving.join().unwrap();
                sent.map(|()| received.unwrap())
            })
        };
        // The receiver may come so late that the second part finds no room in time either.
        let (came, files) = (0..20).find_map(|_| pass().ok()).expect("one goes through");
        assert!(came == bytes);
        assert_eq!(files, 1);
    }

    /// What a sender may have the receiver hold open is bounded, however it sends them.
    #[test]
    fn no_message_has_more_descriptors_than_a_batch() {
        let file = File::open("/dev/null").unwrap();
        for (counts, is_taken) in [([BATCH / 2, BATCH / 2], true), ([BATCH / 2, BATCH], false)] {
            let (here, there) = UnixStream::pair().unwrap();
            for count in counts {
                send(here.as_fd(), &[7], &vec![file.as_fd(); count]).unwrap();
            }
            let came = receive(there.as_fd(), &mut [0; 2]);
            match came {
                Ok(files) => assert!(is_taken && files.len() == BATCH),
                Err(error) => {
                    assert!(!is_taken && matches!(error, Error::BadMessage { .. }), "{error}");
                }
            }
        }
    }
}
