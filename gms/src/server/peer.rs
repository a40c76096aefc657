//! Who is at the other end of a connection, and whether that one may be there.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The most groups that a user is in, on Linux.
const MOST_GROUPS: usize = 65_536;

/// Whether who has connected is root, this process's user, or of the group that is named; as they were
/// when they connected. The file's mode keeps others out already where the path is honoured; this does
/// wherever the descriptor came from.
///
/// # Errors
/// Who it is, if it is somebody else; or that nobody can tell.
pub(super) fn may_connect(socket: BorrowedFd<'_>, group: Option<u32>) -> Result<(), String> {
    // The kernel's `struct ucred`. The process is 0 where this one cannot see it, as between containers.
    let mut credentials = [0; 3];
    read(socket, libc::SO_PEERCRED, &mut credentials).map_err(|fault| fault.told("who it is"))?;
    let [process, user, first_group] = credentials;
    if user == 0 || user == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    let Some(group) = group else {
        return Err(format!("process {process} is of user {user}"));
    };
    if first_group == group || groups(socket)?.contains(&group) {
        return Ok(());
    }
    Err(format!("process {process} of user {user} is not of group {group}"))
}

/// The further groups of who has connected.
fn groups(socket: BorrowedFd<'_>) -> Result<Vec<u32>, String> {
    let mut groups = vec![0; 32];
    loop {
        match read(socket, libc::SO_PEERGROUPS, &mut groups) {
            Ok(count) => {
                groups.truncate(count);
                return Ok(groups);
            }
            // There are more, and it has said how many.
            Err(Fault { error, needed })
                if error.raw_os_error() == Some(libc::ERANGE)
                    && (groups.len() + 1..=MOST_GROUPS).contains(&needed) =>
            {
                groups.resize(needed, 0);
            }
            Err(fault) => return Err(fault.told("its groups")),
        }
    }
}

/// Why something was not read, and how many numbers there are if that is why.
struct Fault {
    error: io::Error,
    needed: usize,
}

impl Fault {
    fn told(&self, what: &str) -> String {
        format!("{what}: {}", self.error)
    }
}

/// Reads what the kernel knows of a socket, as numbers of 32 bits: how many it wrote.
fn read(socket: BorrowedFd<'_>, what: i32, numbers: &mut [u32]) -> Result<usize, Fault> {
    let bytes = size_of_val(numbers);
    let mut length = libc::socklen_t::try_from(bytes).unwrap_or(libc::socklen_t::MAX);
    let (socket, to) = (socket.as_raw_fd(), numbers.as_mut_ptr().cast());
    // SAFETY: the descriptor is open as long as it is borrowed, which is longer than this. The kernel writes
    // `length` bytes at most, which the numbers have, and then how many to `length`; both are live, and any
    // bytes are numbers.
    let answer = unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, what, to, &raw mut length) };
    let count = length as usize / size_of::<u32>();
    match answer {
        0 => Ok(count.min(numbers.len())),
        _ => Err(Fault { error: io::Error::last_os_error(), needed: count }),
    }
}
