//! Clients that die, at every byte and at any time: the lock goes on, nothing is left, and no two
//! layouts are ever mixed.

use std::io::Write;
use std::net::Shutdown;
use std::ops::Range;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gms::client::{ClientError, ConnectOptions, MetadataValue, Session};
use gms::lock::{Granted, Requested};
use gms::wire::{self, Message, encode_frame};

use crate::random::{Lcg, cases};
use crate::rig::{Folder, GRANULE, Local, PATIENCE, eventually, open_descriptors, raw};
use crate::roles::Process;

/// What a writer sends from its first byte to its commit, without waiting for answers.
fn script() -> Vec<u8> {
    let handshake = wire::HandshakeRequest {
        lock_type: Requested::Rw,
        timeout_ms: None,
        extensions: wire::Extensions(vec![wire::BATCH.to_owned()]),
    };
    let allocate = || wire::AllocateRequest { size: 1, tag: "t".to_owned() };
    let many =
        wire::BatchAllocateRequest { sizes: vec![1, 2, 3], tag: "t".to_owned(), export: true };
    let put = wire::MetadataPutRequest {
        key: "k".to_owned(),
        allocation_id: "unknown".to_owned(),
        offset_bytes: 0,
        value: vec![7; 20],
    };
    let messages: [Message; 7] = [
        handshake.into(),
        allocate().into(),
        many.into(),
        put.into(),
        wire::ListAllocationsRequest { tag: None }.into(),
        allocate().into(),
        wire::CommitRequest {}.into(),
    ];
    let mut bytes = Vec::new();
    messages.iter().for_each(|message| encode_frame(message, &mut bytes));
    bytes
}

/// A client that has sent so many bytes and is gone, before it read any answer.
#[test]
fn a_writer_may_end_at_any_byte() {
    let local = Local::with(64 * GRANULE, |_| {});
    let script = script();
    // All of it is a commit, which is another matter.
    for end in 0..script.len() {
        let mut stream = raw(local.socket());
        stream.write_all(&script[..end]).unwrap();
        if end % 2 == 0 {
            drop(stream);
        } else {
            // The other end of a crash: half of the connection first.
            stream.shutdown(Shutdown::Write).unwrap();
            drop(stream);
        }
    }
    local.await_state("EMPTY");
    local.await_memory(0);
    eventually("connections end", || local.metric("connections") == 0);
    let mut next = local.session(Requested::Rw);
    assert_eq!(next.allocation_count().unwrap(), 0);
    local.sim.assert_clean();
}

/// A client that was gone before the server first heard of it is not granted anything: it would throw
/// a layout away that nobody replaces.
#[test]
fn a_writer_that_is_dead_already_replaces_nothing() {
    let folder = Folder::new();
    let sim = cuda_sim::Simulator::builder().build().unwrap();
    let memory = gms::memory::Memory::open(&sim.driver(), 0).unwrap();
    let settings = gms::server::Settings::new(folder.socket());
    let server = gms::server::Server::bind(memory, settings).unwrap();
    for lock_type in [Requested::Rw, Requested::RwOrRo, Requested::RwDataOrRw] {
        let extensions = wire::Extensions::default();
        let mut bytes = Vec::new();
        let handshake = wire::HandshakeRequest { lock_type, timeout_ms: None, extensions };
        encode_frame(&handshake, &mut bytes);
        // Held by the kernel until the server runs.
        raw(&folder.socket()).write_all(&bytes).unwrap();
    }
    let (stopper, metrics) = (server.stopper(), server.metrics());
    let thread = std::thread::spawn(move || server.run());
    // Accepted after those three.
    let events = || gms::client::event_history(folder.socket(), PATIENCE).unwrap();
    events();
    let none = "gms_connections{name=\"default\",device=\"0\"} 0\n";
    let metrics = [metrics];
    eventually("connections end", || gms::server::Metrics::render(&metrics).contains(none));
    assert_eq!(events(), []);
    stopper.stop();
    thread.join().unwrap().unwrap();
}

/// Counts who is inside, as the lock should allow it.
#[derive(Default)]
struct Inside {
    writers: AtomicI64,
    readers: AtomicI64,
}

impl Inside {
    fn enter(&self, granted: Granted) {
        if granted == Granted::Ro {
            self.readers.fetch_add(1, Ordering::SeqCst);
            assert_eq!(self.writers.load(Ordering::SeqCst), 0, "a reader beside a writer");
        } else {
            let before = self.writers.fetch_add(1, Ordering::SeqCst);
            assert_eq!(before, 0, "two writers");
            assert_eq!(self.readers.load(Ordering::SeqCst), 0, "a writer beside readers");
        }
    }

    /// Before the session lets go of its lock.
    fn leave(&self, granted: Granted) {
        let count = if granted == Granted::Ro { &self.readers } else { &self.writers };
        count.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Writes a layout of which every part says which generation it is of, and may break off anywhere, or leave
/// it sealed. Whether it was published.
fn write(
    mut session: Session,
    generation: u64,
    random: &mut Lcg,
    inside: &Inside,
) -> Result<bool, ClientError> {
    let granted = session.granted();
    inside.enter(granted);
    let tag = format!("g{generation}");
    let mut build = || -> Result<bool, ClientError> {
        let count: u64 = 1 + random.below(6);
        for n in 0..count {
            if random.below(12) == 0 {
                return Ok(false);
            }
            let made = session.allocate(GRANULE, &tag)?;
            let value = MetadataValue {
                allocation_id: made.allocation_id,
                offset_bytes: generation,
                value: count.to_le_bytes().to_vec(),
            };
            session.metadata_put_many(&[(format!("{tag}.{n}"), value)])?;
        }
        Ok(random.below(4) > 0)
    };
    let whole = build();
    let sealed = random.below(3) == 0 && matches!(whole, Ok(true));
    if sealed {
        // What is left is for who asks for it, and only whole.
        session.commit_layout()?;
    }
    inside.leave(granted);
    match whole {
        Ok(true) if !sealed => session.commit().map(|()| true),
        Ok(_) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Reads a layout, published or sealed: every part must be of one generation, and all parts be there.
fn read(mut session: Session, random: &mut Lcg, inside: &Inside) -> Result<(), ClientError> {
    let granted = session.granted();
    inside.enter(granted);
    let mut check = || -> Result<(), ClientError> {
        let handles = session.list(None)?;
        if random.below(6) == 0 {
            return Ok(());
        }
        let entries = session.metadata_get_many("")?;
        assert_eq!(handles.len(), entries.len());
        let tag = &handles[0].tag;
        for (key, value) in &entries {
            assert_eq!(format!("g{}", value.offset_bytes), *tag, "{key}");
            assert_eq!(value.value, (handles.len() as u64).to_le_bytes());
        }
        assert!(handles.iter().all(|handle| handle.tag == *tag));
        let ids: Vec<String> = handles.iter().map(|handle| handle.allocation_id.clone()).collect();
        session.export_many(&ids, |_, _| Ok(()))
    };
    let checked = check();
    inside.leave(granted);
    checked
}

#[test]
fn layouts_are_never_mixed_whoever_breaks_off() {
    let local = Local::with(64 * GRANULE, |settings| {
        settings.retry_interval = Duration::from_millis(2);
    });
    let inside = Inside::default();
    let (generations, committed) = (AtomicU64::new(1), AtomicU64::new(0));
    let rounds = 1 + cases() / 2;
    let locks =
        [Requested::Rw, Requested::Ro, Requested::Ro, Requested::RwOrRo, Requested::RwDataOrRw];
    let adopted = AtomicU64::new(0);
    let crowd = |seeds: Range<u64>| {
        std::thread::scope(|scope| {
            for seed in seeds {
                let (local, inside) = (&local, &inside);
                let (generations, committed, adopted) = (&generations, &committed, &adopted);
                scope.spawn(move || {
                    let mut random = Lcg(seed * 7919);
                    for _ in 0..rounds {
                        let lock = locks[random.below(5) as usize];
                        let time = Duration::from_millis(random.below(30));
                        let options =
                            ConnectOptions::new(lock).timeout(time).batch(random.below(2) > 0);
                        let session = match Session::connect(local.socket(), options) {
                            Ok(session) => session,
                            Err(ClientError::LockTimeout) => continue,
                            Err(error) => panic!("{error}"),
                        };
                        if session.granted() != Granted::Rw {
                            let is_sealed = session.granted() == Granted::RwData;
                            adopted.fetch_add(is_sealed.into(), Ordering::SeqCst);
                            read(session, &mut random, inside).unwrap();
                        } else {
                            let generation = generations.fetch_add(1, Ordering::SeqCst);
                            let published =
                                write(session, generation, &mut random, inside).unwrap();
                            committed.fetch_add(published.into(), Ordering::SeqCst);
                        }
                    }
                });
            }
        })
    };
    // Who gets its lock in time depends on the machine.
    let (mut seed, deadline) = (1, Instant::now() + PATIENCE);
    while [&committed, &adopted].into_iter().any(|count| count.load(Ordering::SeqCst) == 0) {
        assert!(Instant::now() < deadline, "nobody publishes, or nobody takes over what is sealed");
        crowd(seed..seed + 8);
        seed += 8;
    }
    assert_eq!(local.metric("commits_total"), committed.load(Ordering::SeqCst));
    drop(local.session(Requested::Rw));
    local.await_state("EMPTY");
    local.await_memory(0);
    local.sim.assert_clean();
}

/// kill -9 of real processes in the middle of whatever they do.
#[test]
fn killed_processes_leave_nothing_at_the_server() {
    let folder = Folder::new();
    let mut server = Process::server(&folder.socket());
    let mut random = Lcg(20_261_121);
    // The simulator keeps a descriptor from its first memory on.
    let options = ConnectOptions::new(Requested::Rw).timeout(PATIENCE);
    Session::connect(folder.socket(), options).unwrap().allocate(1, "t").unwrap();
    eventually("memory given back", || server.ask("memory") == "0");
    let mut descriptors = open_descriptors(server.id());
    let kills = 8 + cases() / 4;
    for round in 0..kills {
        let mut crowd: Vec<Process> = (0..3)
            .map(|n| {
                let seed = u64::from(round) * 3 + n;
                Process::start(&format!("chaos:{seed}"), &folder.socket())
            })
            .collect();
        for process in &mut crowd {
            assert_eq!(process.hear(), "begins");
        }
        std::thread::sleep(Duration::from_micros(random.below(15_000)));
        while !crowd.is_empty() {
            crowd.swap_remove(random.below(crowd.len() as u64) as usize).kill();
        }
        // Whoever comes next gets the lock, and finds nothing.
        let mut next = Session::connect(folder.socket(), options).unwrap();
        assert_eq!(next.allocation_count().unwrap(), 0, "round {round}");
        drop(next);
        eventually("memory given back", || server.ask("memory") == "0");
        eventually("descriptors closed", || open_descriptors(server.id()) <= descriptors);
        descriptors = descriptors.min(open_descriptors(server.id()));
    }
    assert_eq!(server.ask("stop"), "stopped");
    assert!(server.end());
}

/// kill -9 of the server: its clients are told, and keep the memory that they have mapped.
#[test]
fn clients_outlive_a_killed_server() {
    let folder = Folder::new();
    let server = Process::server(&folder.socket());
    let machine = crate::rig::Machine::new();
    let mut writer = machine.connected(&folder.socket(), Requested::Rw);
    let at = writer.create_mapping(GRANULE, "weights").unwrap();
    machine.write(at, b"kept");
    server.kill();
    assert!(matches!(
        writer.allocate_handle(1, "weights"),
        Err(ClientError::Disconnected | ClientError::Socket(_))
    ));
    assert_eq!(machine.read(at, 4), b"kept");
    writer.abort();
    let mut next = Process::server(&folder.socket());
    writer.connect(ConnectOptions::new(Requested::Rw).timeout(PATIENCE)).unwrap();
    writer.unmap_all().unwrap();
    writer.reallocate_all("weights").unwrap();
    writer.remap_all().unwrap();
    assert_eq!(machine.read(at, 4), [0; 4], "the new server's memory, at the old address");
    writer.close().unwrap();
    assert_eq!(next.ask("stop"), "stopped");
}
