//! The socket's file: whose it is, who may open it, when it goes.
//!
//! A lock on a file beside the socket says that a server lives, and the kernel takes it back however
//! the server ends; so of two that start at once one goes on. A socket that answers is another
//! server's, too, such as the Python service's, which knows no lock. Between `bind` and `listen`
//! nobody can connect, and that is when the socket gets its mode.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Gid, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};

/// Why a socket cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// Another server has it.
    #[error("GMS already running at {}", path.display())]
    Running {
        /// The socket.
        path: PathBuf,
    },
    /// There is something else, which is not touched.
    #[error("{} is there and is not a socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The system refuses.
    #[error("cannot {what} {}: {source}", path.display())]
    System {
        /// What was to be done with the socket.
        what: &'static str,
        /// The socket.
        path: PathBuf,
        /// Why it was not done.
        source: io::Error,
    },
}

/// Connections that the kernel holds before they are accepted.
const BACKLOG: i32 = 1024;

/// A listening socket with its file, which goes when this does.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the socket's file, so that no other is removed.
    identity: (u64, u64),
    /// Kept so that there is a descriptor to turn somebody away with when there are no more.
    spare: Option<File>,
    /// Held as long as this lives. Its file goes with it.
    _lock: LockFile,
}

impl Listener {
    pub(super) fn bind(path: &Path, group: Option<u32>) -> Result<Self, ListenError> {
        let failed = |what: &'static str| {
            move |source: Errno| ListenError::System {
                what,
                path: path.to_owned(),
                source: source.into(),
            }
        };
        if group == Some(u32::MAX) {
            // No group's number: to the system it means the one that there is.
            return Err(failed("give to its group")(Errno::INVAL));
        }
        let address = SocketAddrUnix::new(path).map_err(failed("name"))?;
        let lock = LockFile::take(path)?;
        let make = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        };
        remove_dead(path, &make().map_err(failed("make"))?, &address)?;
        let socket = make().map_err(failed("make"))?;
        bind(&socket, &address).map_err(failed("bind"))?;
        // From here on the file is there and goes if anything fails.
        let system = |what: &'static str| {
            move |source: io::Error| ListenError::System { what, path: path.to_owned(), source }
        };
        let identity = std::fs::symlink_metadata(path).map_err(system("look at"))?;
        let listener = Self {
            socket,
            path: path.to_owned(),
            identity: (identity.dev(), identity.ino()),
            spare: File::open("/dev/null").ok(),
            _lock: lock,
        };
        if let Some(group) = group {
            let group = Some(Gid::from_raw(group));
            rustix::fs::chown(path, None, group).map_err(failed("give to its group"))?;
        }
        let mode = if group.is_some() { 0o660 } else { 0o600 };
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(path, permissions).map_err(system("set the mode of"))?;
        listen(&listener.socket, BACKLOG).map_err(failed("listen at"))?;
        Ok(listener)
    }

    /// Accepts a connection only to close it, so that its client learns of it.
    pub(super) fn turn_one_away(&mut self) {
        self.spare = None;
        if accept_with(&self.socket, SocketFlags::CLOEXEC).is_err() {
            // Descriptors are short in all of the system: others may give some back.
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        self.spare = File::open("/dev/null").ok();
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|file| (file.dev(), file.ino()) == self.identity);
        if ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes the socket of a server that is dead.
fn remove_dead(path: &Path, probe: &OwnedFd, address: &SocketAddrUnix) -> Result<(), ListenError> {
    let file = match std::fs::symlink_metadata(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            return Err(ListenError::System { what: "look at", path: path.to_owned(), source });
        }
    };
    if !file.file_type().is_socket() {
        return Err(ListenError::NotASocket { path: path.to_owned() });
    }
    match connect(probe, address) {
        Err(Errno::CONNREFUSED) => {}
        Err(Errno::NOENT) => return Ok(()),
        // Whatever else it answers, somebody is there.
        _ => return Err(ListenError::Running { path: path.to_owned() }),
    }
    tracing::info!(socket = %path.display(), "removing the socket of a server that has died");
    std::fs::remove_file(path).map_err(|source| ListenError::System {
        what: "remove",
        path: path.to_owned(),
        source,
    })
}

/// A locked file, removed when this is dropped.
#[derive(Debug)]
struct LockFile {
    _file: File,
    path: PathBuf,
}

impl LockFile {
    fn take(socket: &Path) -> Result<Self, ListenError> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        let system = |source| ListenError::System { what: "lock", path: path.clone(), source };
        loop {
            let mut options = OpenOptions::new();
            // In a folder that others can write to, a link would lead anywhere.
            let no_link = OFlags::NOFOLLOW.bits() as i32;
            let file = options
                .write(true)
                .create(true)
                .mode(0o600)
                .custom_flags(no_link)
                .open(&path)
                .map_err(system)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    return Err(ListenError::Running { path: socket.to_owned() });
                }
                Err(error) => return Err(system(error.into())),
            }
            // The one that had it may have removed it between the two calls.
            let mine = file.metadata().map_err(system)?;
            let there = std::fs::metadata(&path);
            if there.is_ok_and(|there| (there.dev(), there.ino()) == (mine.dev(), mine.ino())) {
                return Ok(Self { _file: file, path });
            }
        }
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // Before the lock is given back, so that nobody removes another's.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// To the system it means to leave the group as it is.
    #[test]
    fn no_group_has_the_greatest_number() {
        let name = format!("gms-no-group-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let refused = Listener::bind(&path, Some(u32::MAX));
        assert!(matches!(refused, Err(ListenError::System { .. })), "{refused:?}");
        let lock = path.with_extension("lock");
        assert!(!path.exists() && !lock.exists());
    }
}
