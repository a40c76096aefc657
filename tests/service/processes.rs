//! Server, writer and readers as processes of their own.

use gms::client::{ClientError, ConnectOptions, Session};
use gms::lock::Requested;

use crate::rig::{Folder, Local, PATIENCE, eventually, open_descriptors};
use crate::roles::Process;

#[test]
fn what_one_process_writes_others_read() {
    let folder = Folder::new();
    let mut server = Process::server(&folder.socket());
    let mut writer = Process::start("writer", &folder.socket());
    assert_eq!(writer.hear(), "committed");
    assert!(writer.end());
    let mut readers = [(); 3].map(|()| Process::start("reader", &folder.socket()));
    for reader in &mut readers {
        assert_eq!(reader.hear(), "read");
    }
    let state = gms::client::runtime_state(folder.socket(), PATIENCE).unwrap();
    assert_eq!((state.state.as_str(), state.ro_session_count), ("RO", 3));
    drop(readers);
    assert_eq!(server.ask("stop"), "stopped");
    assert!(server.end());
    assert!(!folder.socket().exists(), "a server that ends takes its socket along");
}

#[test]
fn a_killed_writer_leaves_nothing_behind() {
    let folder = Folder::new();
    let mut server = Process::server(&folder.socket());
    let mut descriptors = Vec::new();
    for _ in 0..3 {
        let mut writer = Process::start("idle-writer", &folder.socket());
        assert_eq!((writer.hear().as_str(), writer.hear().as_str()), ("asking", "rw"));
        for _ in 0..3 {
            writer.ask("allocate");
        }
        assert_ne!(server.ask("memory"), "0");
        writer.kill();
        eventually("memory given back", || server.ask("memory") == "0");
        eventually("the state", || {
            gms::client::runtime_state(folder.socket(), PATIENCE).unwrap().state == "EMPTY"
        });
        // The simulator keeps one descriptor from its first memory on, so the first time differs.
        let before = descriptors.last().copied().unwrap_or(usize::MAX);
        eventually("descriptors closed", || open_descriptors(server.id()) <= before);
        descriptors.push(open_descriptors(server.id()));
    }
    let next = ConnectOptions::new(Requested::Rw).timeout(PATIENCE);
    assert_eq!(Session::connect(folder.socket(), next).unwrap().allocation_count().unwrap(), 0);
    assert_eq!(server.ask("stop"), "stopped");
}

#[test]
fn a_killed_waiter_is_not_granted_anything() {
    let folder = Folder::new();
    let mut server = Process::server(&folder.socket());
    assert_eq!(Process::start("writer", &folder.socket()).hear(), "committed");
    let state = || gms::client::runtime_state(folder.socket(), PATIENCE).unwrap();
    eventually("committed", || state().state == "COMMITTED");
    let mut reader = Process::start("idle-reader", &folder.socket());
    assert_eq!((reader.hear().as_str(), reader.hear().as_str()), ("asking", "ro"));
    let mut waiter = Process::start("idle-writer", &folder.socket());
    assert_eq!(waiter.hear(), "asking");
    eventually("the writer waits", || state().waiting_writers == 1);
    waiter.kill();
    eventually("nobody waits", || state().waiting_writers == 0);
    // A second reader is let in: nobody is before it.
    let options = ConnectOptions::new(Requested::Ro).timeout(PATIENCE);
    drop(Session::connect(folder.socket(), options).unwrap());
    reader.kill();
    eventually("readers are gone", || state().state == "COMMITTED");
    assert_eq!(state().allocation_count, 4, "the layout is there still");
    assert_eq!(server.ask("stop"), "stopped");
}

#[test]
fn a_killed_server_is_replaced() {
    let folder = Folder::new();
    let server = Process::server(&folder.socket());
    let options = ConnectOptions::new(Requested::Rw).timeout(PATIENCE);
    let mut session = Session::connect(folder.socket(), options).unwrap();
    server.kill();
    assert!(session.allocation_count().is_err(), "its clients learn of it");
    assert!(folder.socket().exists(), "a killed server leaves its socket");
    let mut next = Process::server(&folder.socket());
    Session::connect(folder.socket(), options).unwrap();
    assert_eq!(next.ask("stop"), "stopped");
    assert!(!folder.socket().exists());
}

/// It has the same socket, and answers go to whoever looks first.
#[test]
fn a_child_of_a_clients_process_asks_nothing() {
    let local = Local::start();
    let mut session = local.session(Requested::Rw);
    let made = session.allocate(5, "weights").unwrap();
    // SAFETY: the child asks once, which needs of the process what glibc keeps working after a fork (memory from
    // the heap), and ends at once, by a signal if by nothing else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: a number of seconds.
        unsafe { libc::alarm(20) };
        let is_told = matches!(session.list(None), Err(ClientError::Forked));
        // SAFETY: ends the process; what belongs to the parent is not dropped here.
        unsafe { libc::_exit(i32::from(!is_told)) };
    }
    assert!(child > 0, "no child: {}", std::io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: a child of this process, which nobody else waits for; a live int.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child was answered, or ended by a signal");
    assert_eq!(session.list(None).unwrap(), [made]);
}
