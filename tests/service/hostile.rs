//! Clients that do what they should not, and machines that run short.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use cuda_sim::Simulator;
use gms::client::{ClientError, ConnectOptions, Session};
use gms::lock::Requested;
use gms::memory::Memory;
use gms::server::{ListenError, Server, ServerError, Settings};
use gms::wire::{self, FrameReader, Message, encode_frame};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::random::{Lcg, cases};
use crate::rig::{Folder, GRANULE, Local, PATIENCE, eventually, open_descriptors, raw};
use crate::roles::Process;

fn handshake(lock_type: Requested) -> Vec<u8> {
    let mut bytes = Vec::new();
    let extensions = wire::Extensions::default();
    encode_frame(&wire::HandshakeRequest { lock_type, timeout_ms: None, extensions }, &mut bytes);
    bytes
}

/// A reader that asks and asks and reads nothing.
fn deaf_reader(local: &Local) -> UnixStream {
    let mut deaf = raw(local.socket());
    let mut bytes = handshake(Requested::Ro);
    for _ in 0..20_000 {
        encode_frame(&wire::ListAllocationsRequest { tag: None }, &mut bytes);
    }
    deaf.set_nonblocking(true).unwrap();
    // As much as the sockets hold.
    let mut at = 0;
    let mut idle = 0;
    while at < bytes.len() && idle < 50 {
        match deaf.write(&bytes[at..]) {
            Ok(written) => at += written,
            Err(_) => {
                idle += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    assert!(at < bytes.len(), "the server stops reading what it cannot answer");
    deaf
}

#[test]
fn a_reader_that_does_not_read_stops_nobody() {
    let local = Local::start();
    local.publish(50);
    let deaf: Vec<UnixStream> = (0..4).map(|_| deaf_reader(&local)).collect();
    for _ in 0..20 {
        let mut reader = local.session(Requested::Ro);
        assert_eq!(reader.list(None).unwrap().len(), 50);
    }
    drop(deaf);
    local.await_state("COMMITTED");
}

#[test]
fn noise_ends_its_own_session_and_nothing_else() {
    let local = Local::start();
    local.publish(1);
    local.await_state("COMMITTED");
    let mut witness = local.session(Requested::Ro);
    let mut random = Lcg(99);
    for _ in 0..cases() * 4 {
        let mut stream = raw(local.socket());
        let mut bytes = if random.below(2) == 0 { handshake(Requested::Ro) } else { Vec::new() };
        let length = random.below(200);
        // A length that fits, or whatever comes.
        if random.below(2) == 0 {
            bytes.extend((length as u32).to_be_bytes());
        }
        bytes.extend((0..length).map(|_| random.below(256) as u8));
        // The server may have closed before all of it is there.
        let _ = stream.write_all(&bytes);
    }
    assert_eq!(witness.allocation_count().unwrap(), 1);
    drop(witness);
    local.await_state("COMMITTED");
    eventually("connections end", || local.metric("connections") == 0);
    assert!(local.metric("unreadable_total") > 0);
}

#[test]
fn descriptors_that_a_client_sends_are_closed() {
    // A process of its own, as other tests open descriptors in this one.
    let folder = Folder::new();
    let mut server = Process::server(&folder.socket());
    let before = open_descriptors(server.id());
    let stream = raw(&folder.socket());
    let file = std::fs::File::open("/dev/null").unwrap();
    let bytes = handshake(Requested::Rw);
    for part in bytes.chunks(1) {
        let files = [file.as_fd(); 8];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(&stream, &[IoSlice::new(part)], &mut control, SendFlags::empty()).unwrap();
    }
    let state = || gms::client::runtime_state(folder.socket(), PATIENCE).unwrap().state;
    eventually("all is read", || state() == "RW");
    // The connection's own, once those that asked are gone.
    eventually("they are closed", || open_descriptors(server.id()) <= before + 1);
    drop(stream);
    assert_eq!(server.ask("stop"), "stopped");
}

/// A server that may have few descriptors: what it lacks is an error to who asks for it.
#[test]
fn running_out_of_descriptors_is_an_error_to_one_client() {
    let folder = Folder::new();
    let mut server = Process::start("small-server", &folder.socket());
    assert_eq!(server.hear(), "ready");
    let options = ConnectOptions::new(Requested::Rw).timeout(PATIENCE);
    let mut writer = Session::connect(folder.socket(), options).unwrap();
    let mut ids = Vec::new();
    let refused = loop {
        assert!(ids.len() < 1000, "it never runs out");
        let id = writer.allocate(GRANULE, "t").unwrap().allocation_id;
        ids.push(id);
        match writer.export(&ids[ids.len() - 1]) {
            Ok(_) => {}
            Err(ClientError::Refused { error }) => break error,
            Err(error) => panic!("{error}"),
        }
    };
    assert!(refused.starts_with("cuMemExportToShareableHandle"), "{refused}");
    // There is none for a further connection either; it is closed, not left waiting.
    let probe = gms::client::runtime_state(folder.socket(), PATIENCE);
    assert!(matches!(probe, Err(ClientError::Disconnected | ClientError::Socket(_))), "{probe:?}");
    // The session lives, and so does what it has.
    drop(writer.export(&ids[0]).unwrap());
    let last = ids.len() - 1;
    for id in ids.drain(last - 10..) {
        assert!(writer.free(&id).unwrap());
    }
    eventually("descriptors are there again", || {
        gms::client::runtime_state(folder.socket(), PATIENCE).is_ok()
    });
    drop(writer.export(&ids[last - 11]).unwrap());
    writer.commit().unwrap();
    assert_eq!(server.ask("stop"), "stopped");
    assert!(server.end());
}

/// The kernel takes so many descriptors of a user that nobody has received yet. Readers that come when
/// others have these wait, and are not refused.
#[test]
fn readers_wait_while_too_many_descriptors_are_under_way() {
    let _alone = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = Folder::new();
    let mut server = Process::start("narrow-server", &folder.socket());
    assert_eq!(server.hear(), "ready");
    let options = |lock| ConnectOptions::new(lock).timeout(PATIENCE);
    let mut writer = Session::connect(folder.socket(), options(Requested::Rw)).unwrap();
    let made = writer.allocate_many(&[GRANULE; 250], "t").unwrap();
    let ids: Vec<String> = made.into_iter().map(|made| made.allocation_id).collect();
    writer.commit().unwrap();
    let deaf: Vec<UnixStream> = (0..3)
        .map(|_| {
            let mut stream = raw(&folder.socket());
            let extensions = wire::Extensions(vec![wire::BATCH.to_owned()]);
            let (lock_type, timeout_ms) = (Requested::Ro, None);
            let mut bytes = Vec::new();
            let handshake = wire::HandshakeRequest { lock_type, timeout_ms, extensions };
            encode_frame(&handshake, &mut bytes);
            encode_frame(&wire::BatchExportRequest { allocation_ids: ids.clone() }, &mut bytes);
            stream.write_all(&bytes).unwrap();
            stream
        })
        .collect();
    // Each descriptor's allocation is named beside it, in more bytes than this.
    let is_answered = |stream: &UnixStream| rustix::io::ioctl_fionread(stream).unwrap() > 250 * 36;
    eventually("all three are answered", || deaf.iter().all(is_answered));
    let mut reader = Session::connect(folder.socket(), options(Requested::Ro)).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let reading = std::thread::spawn(move || {
        let mut count = 0;
        let done = reader.export_many(&ids, |_, _| {
            count += 1;
            Ok(())
        });
        sender.send(()).unwrap();
        done.map(|()| count)
    });
    let early = receiver.recv_timeout(Duration::from_millis(300));
    assert!(early.is_err(), "750 descriptors are under way, and 600 may be");
    drop(deaf);
    assert_eq!(reading.join().unwrap().unwrap(), 250);
    assert_eq!(server.ask("stop"), "stopped");
    assert!(server.end());
}

/// Tests of what the kernel counts for a user, in all processes, come one after the other.
static UNDER_WAY: Mutex<()> = Mutex::new(());

/// An answer whose descriptors the kernel does not take is a refusal: what the request had made goes with it.
#[test]
fn what_is_refused_for_its_descriptor_leaves_nothing() {
    let _alone = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = Folder::new();
    let mut server = Process::start("hasty-narrow-server", &folder.socket());
    assert_eq!(server.hear(), "ready");
    let stream = raw(&folder.socket());
    let mut reader = FrameReader::new(1 << 20);
    let send = |message: &Message| {
        let mut bytes = Vec::new();
        encode_frame(message, &mut bytes);
        (&stream).write_all(&bytes).unwrap();
    };
    let mut hear = |mut stream: &UnixStream| loop {
        if let Some(bytes) = reader.next_frame().unwrap() {
            break Message::decode(bytes).unwrap();
        }
        // The kernel closes what comes beside these.
        let bytes = stream.read(reader.space()).unwrap();
        assert!(bytes > 0, "closed");
        reader.arrived(bytes);
    };
    let extensions = wire::Extensions(vec![wire::BATCH.to_owned()]);
    let (lock_type, timeout_ms) = (Requested::Rw, None);
    send(&wire::HandshakeRequest { lock_type, timeout_ms, extensions }.into());
    hear(&stream);
    let tag = "t".to_owned();
    let sizes = vec![1; 250];
    send(&wire::BatchAllocateRequest { sizes, tag: tag.clone(), export: false }.into());
    let Message::BatchAllocateResponse(made) = hear(&stream) else { panic!("not made") };
    let allocation_ids: Vec<String> =
        made.allocations.into_iter().map(|made| made.allocation_id).collect();
    let waiting = || rustix::io::ioctl_fionread(&stream).unwrap();
    for _ in 0..3 {
        let before = waiting();
        let allocation_ids = allocation_ids.clone();
        send(&wire::BatchExportRequest { allocation_ids }.into());
        eventually("it is answered", || waiting() > before + 250 * 36);
    }
    // 750 are under way, and 600 may be.
    let before = waiting();
    send(&wire::BatchAllocateRequest { sizes: vec![1], tag, export: true }.into());
    eventually("it is answered", || waiting() > before);
    for _ in 0..3 {
        assert!(matches!(hear(&stream), Message::BatchExportResponse(_)));
    }
    let Message::ErrorResponse(refused) = hear(&stream) else { panic!("not refused") };
    assert_eq!(refused.error, "Too many descriptors are on their way to clients");
    send(&wire::GetAllocationStateRequest {}.into());
    let left = wire::GetAllocationStateResponse { allocation_count: 250 };
    assert_eq!(hear(&stream), left.into());
    stream.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(server.ask("stop"), "stopped");
    assert!(server.end());
}

/// A client that may have few descriptors loses a part of an answer: what is left of it is not taken for
/// another.
#[test]
fn a_client_that_runs_out_of_descriptors_goes_on_with_a_new_session() {
    let local = Local::start();
    local.publish(600);
    let mut reader = Process::start("short-reader", local.socket());
    assert_eq!(reader.hear(), "done");
    assert!(reader.end());
}

#[test]
fn connections_over_the_limit_are_closed() {
    let local = Local::with(1 << 30, |settings| settings.max_connections = 3);
    let held: Vec<UnixStream> = (0..3).map(|_| raw(local.socket())).collect();
    eventually("all are there", || local.metric("connections") == 3);
    let refused = gms::client::runtime_state(local.socket(), PATIENCE);
    assert!(refused.is_err(), "{refused:?}");
    drop(held);
    eventually("they are gone", || local.metric("connections") == 0);
    assert_eq!(local.state(), "EMPTY");
}

fn memory() -> Memory {
    Memory::open(&Simulator::builder().build().unwrap().driver(), 0).unwrap()
}

#[test]
fn a_socket_is_its_owners_unless_a_group_is_named() {
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    let local = Local::start();
    assert_eq!(mode(local.socket()), 0o600);
    let group = rustix::process::getegid().as_raw();
    let shared = Local::with(1 << 30, |settings| settings.group = Some(group));
    assert_eq!(mode(shared.socket()), 0o660);
}

/// The mode is one thing, the check of who connects another: here the mode lets everybody in.
#[test]
fn another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can be another user");
        return;
    }
    let local = Local::start();
    let everybody = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(local.socket(), everybody.clone()).unwrap();
    std::fs::set_permissions(local.socket().parent().unwrap(), everybody).unwrap();
    assert!(as_stranger(local.socket(), 65534, &[]).is_err());
    assert_eq!(local.metric("connections_refused_total"), 1);
    assert_eq!(local.state(), "EMPTY");
}

/// What a process of another user, and of these groups, is told.
fn as_stranger(socket: &std::path::Path, group: u32, others: &[u32]) -> Result<(), ClientError> {
    use rustix::process::{Gid, Uid};
    use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};
    let others: Vec<Gid> = others.iter().map(|group| Gid::from_raw(*group)).collect();
    let become_and_ask = || {
        set_thread_groups(&others).unwrap();
        set_thread_gid(Gid::from_raw(group)).unwrap();
        set_thread_uid(Uid::from_raw(65534)).unwrap();
        gms::client::runtime_state(socket, PATIENCE).map(drop)
    };
    let asked = std::thread::scope(|scope| scope.spawn(become_and_ask).join().unwrap());
    let refused = matches!(asked, Err(ClientError::Disconnected | ClientError::Socket(_)));
    assert!(asked.is_ok() || refused, "{asked:?}");
    asked
}

#[test]
fn a_group_that_is_named_lets_its_members_in_and_nobody_else() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can be another user");
        return;
    }
    let local = Local::with(1 << 30, |settings| settings.group = Some(4321));
    let everybody = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(local.socket(), everybody.clone()).unwrap();
    std::fs::set_permissions(local.socket().parent().unwrap(), everybody).unwrap();
    let many: Vec<u32> = (5000..5100).collect();
    let one_of_many: Vec<u32> = many.iter().copied().chain([4321]).collect();
    for (group, others, may) in [
        (4321, &[][..], true),
        (65534, &[4321], true),
        (65534, &[1, 2, 4321], true),
        (65534, &one_of_many, true),
        (65534, &[], false),
        (65534, &[1, 4320], false),
        (65534, &many, false),
    ] {
        assert_eq!(as_stranger(local.socket(), group, others).is_ok(), may, "{group} {others:?}");
    }
    assert_eq!(local.metric("connections_refused_total"), 3);
}

#[test]
fn a_live_servers_socket_and_other_files_are_left_alone() {
    let local = Local::start();
    let second = Server::bind(memory(), Settings::new(local.socket()));
    let message = second.unwrap_err().to_string();
    assert_eq!(message, format!("GMS already running at {}", local.socket().display()));
    assert_eq!(local.state(), "EMPTY");

    let folder = Folder::new();
    std::fs::write(folder.socket(), "mine").unwrap();
    let refused = Server::bind(memory(), Settings::new(folder.socket()));
    assert!(matches!(refused, Err(ServerError::Listen(ListenError::NotASocket { .. }))));
    assert_eq!(std::fs::read(folder.socket()).unwrap(), b"mine");
    std::fs::remove_file(folder.socket()).unwrap();

    // One that answers without a lock on a file: another implementation's.
    let _listener = std::os::unix::net::UnixListener::bind(folder.socket()).unwrap();
    let refused = Server::bind(memory(), Settings::new(folder.socket()));
    assert!(matches!(refused, Err(ServerError::Listen(ListenError::Running { .. }))));
}

#[test]
fn of_servers_that_start_at_once_one_serves() {
    let folder = Folder::new();
    for _ in 0..20 {
        // What a dead server leaves.
        drop(std::os::unix::net::UnixListener::bind(folder.socket()).unwrap());
        let socket = folder.socket();
        // A process that another test is starting has the listener too until it runs its program.
        eventually("nobody there", || std::os::unix::net::UnixStream::connect(&socket).is_err());
        let bound = std::thread::scope(|scope| {
            let attempts: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| Server::bind(memory(), Settings::new(&socket))))
                .collect();
            attempts.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(bound.iter().filter(|bound| bound.is_ok()).count(), 1);
        drop(bound);
        assert!(!socket.exists());
    }
}

/// A descriptor that cannot be made is an error to who asked for it, and may be made the next time.
#[test]
fn an_export_that_fails_is_an_error_to_its_client() {
    use cuda_sys::types::CUresult;
    let local = Local::start();
    let call = "cuMemExportToShareableHandle";
    let code = CUresult::CUDA_ERROR_OPERATING_SYSTEM;
    let mut writer = local.session(Requested::Rw);
    // One for the attempt ahead of the request, one for the request.
    local.sim.fail_nth(call, 1, code);
    local.sim.fail_nth(call, 2, code);
    let id = writer.allocate(1, "t").unwrap().allocation_id;
    let refused = writer.export(&id);
    assert!(matches!(refused, Err(ClientError::Refused { .. })), "{refused:?}");
    assert_eq!(writer.export(&id).unwrap().0.allocation_id, id);
    // In a batch, nothing is left of what was made.
    local.sim.fail_nth(call, 1, code);
    let refused = writer.allocate_and_export(1, "t");
    assert!(matches!(refused, Err(ClientError::Refused { .. })), "{refused:?}");
    assert_eq!(writer.allocation_count().unwrap(), 1);
    local.await_memory(GRANULE);
}

/// A driver that fails is nothing to go on with: the server ends and says why.
#[test]
fn a_driver_that_fails_ends_the_server() {
    use cuda_sys::types::CUresult;
    let local = Local::start();
    let mut writer = local.session(Requested::Rw);
    local.sim.fail_nth("cuMemCreate", 1, CUresult::CUDA_ERROR_UNKNOWN);
    assert!(writer.allocate(1, "t").is_err());
    let socket = local.socket().to_owned();
    let ended = local.stop();
    assert!(matches!(ended, Err(ServerError::Driver(_))), "{ended:?}");
    assert!(!socket.exists());
}

/// So is memory that it does not take back: nobody knows what the device has left.
#[test]
fn memory_that_cannot_be_released_ends_the_server() {
    use cuda_sys::types::CUresult;
    let local = Local::start();
    let mut writer = local.session(Requested::Rw);
    let id = writer.allocate(1, "t").unwrap().allocation_id;
    local.sim.fail_nth("cuMemRelease", 1, CUresult::CUDA_ERROR_UNKNOWN);
    // Its answer may come before the server's end.
    assert!(matches!(writer.free(&id), Ok(true) | Err(ClientError::Disconnected)));
    eventually("the server ends", || writer.allocation_count().is_err());
    let ended = local.stop();
    assert!(matches!(ended, Err(ServerError::Driver(_))), "{ended:?}");
}

/// The other way round: what a server says is not trusted either.
#[test]
fn a_server_that_speaks_noise_is_an_error_to_its_client() {
    let folder = Folder::new();
    let listener = std::os::unix::net::UnixListener::bind(folder.socket()).unwrap();
    let rounds = cases() * 2;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Lcg(7);
            for _ in 0..rounds {
                let (mut stream, _) = listener.accept().unwrap();
                let mut bytes = Vec::new();
                if random.below(2) == 0 {
                    // A lock, and noise after that.
                    let granted = wire::HandshakeResponse {
                        success: true,
                        committed: true,
                        granted_lock_type: Some(gms::lock::Granted::Ro),
                        extensions: wire::Extensions(vec![wire::BATCH.to_owned()]),
                    };
                    encode_frame(&granted, &mut bytes);
                }
                let length = random.below(100);
                if random.below(2) == 0 {
                    bytes.extend((length as u32).to_be_bytes());
                }
                bytes.extend((0..length).map(|_| random.below(256) as u8));
                // The client may have closed before all of it is there.
                let _ = stream.write_all(&bytes);
            }
        });
        for _ in 0..rounds {
            let options = ConnectOptions::new(Requested::Ro).timeout(PATIENCE);
            if let Ok(mut session) = Session::connect(folder.socket(), options) {
                session.list(None).unwrap_err();
                session.export("x").unwrap_err();
                session.metadata_get_many("").unwrap_err();
            }
        }
    });
}
