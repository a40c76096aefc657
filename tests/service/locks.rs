//! Who waits for whom.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use gms::client::{ClientError, ConnectOptions, Session};
use gms::lock::{Granted, Requested};
use gms::wire::{self, encode_frame};

use crate::rig::{GRANULE, Local, PATIENCE, eventually, raw};

fn waiting_writers(local: &Local) -> i64 {
    gms::client::runtime_state(local.socket(), PATIENCE).unwrap().waiting_writers
}

fn attempt(local: &Local, lock: Requested, time: Duration) -> Result<Session, ClientError> {
    Session::connect(local.socket(), ConnectOptions::new(lock).timeout(time))
}

/// A client that asks for a lock and waits for it as long as it is there.
fn asks_for(local: &Local, lock_type: Requested) -> UnixStream {
    let mut bytes = Vec::new();
    let extensions = wire::Extensions::default();
    encode_frame(&wire::HandshakeRequest { lock_type, timeout_ms: None, extensions }, &mut bytes);
    let mut stream = raw(local.socket());
    stream.write_all(&bytes).unwrap();
    stream
}

#[test]
fn a_lock_that_is_free_is_granted_without_time() {
    let local = Local::start();
    drop(attempt(&local, Requested::Rw, Duration::ZERO).unwrap());
    local.await_state("EMPTY");
    local.publish(1);
    local.await_state("COMMITTED");
    assert_eq!(attempt(&local, Requested::Ro, Duration::ZERO).unwrap().granted(), Granted::Ro);
}

#[test]
fn a_time_that_no_clock_reaches_is_none() {
    let local = Local::start();
    drop(attempt(&local, Requested::Rw, Duration::MAX).unwrap());
    let spinning = Local::with(1 << 30, |settings| settings.spin = Duration::MAX);
    let options = ConnectOptions::new(Requested::Rw).timeout(PATIENCE).spin(Duration::MAX);
    let mut session = Session::connect(spinning.socket(), options).unwrap();
    for count in 0..3 {
        assert_eq!(session.allocation_count().unwrap(), count);
        session.allocate(1, "t").unwrap();
    }
}

#[test]
fn the_time_for_a_lock_is_kept() {
    let local = Local::start();
    let _writer = local.session(Requested::Rw);
    for lock in [Requested::Rw, Requested::Ro, Requested::RwOrRo, Requested::RwDataOrRw] {
        let started = Instant::now();
        let refused = attempt(&local, lock, Duration::from_millis(50));
        assert!(matches!(refused, Err(ClientError::LockTimeout)), "{lock:?}");
        assert!(started.elapsed() >= Duration::from_millis(50));
    }
    assert_eq!(waiting_writers(&local), 0);
}

#[test]
fn a_waiting_writer_keeps_readers_out_until_its_time_is_up() {
    let local = Local::start();
    local.publish(1);
    let reader = local.session(Requested::Ro);
    // One without a time, so that it waits as long as this takes.
    let writer = asks_for(&local, Requested::Rw);
    eventually("the writer waits", || waiting_writers(&local) == 1);
    for lock in [Requested::Ro, Requested::RwOrRo] {
        let refused = attempt(&local, lock, Duration::from_millis(10));
        assert!(matches!(refused, Err(ClientError::LockTimeout)), "{lock:?}");
    }
    drop(writer);
    let refused = attempt(&local, Requested::Rw, Duration::from_millis(10));
    assert!(matches!(refused, Err(ClientError::LockTimeout)));
    for lock in [Requested::Ro, Requested::RwOrRo] {
        assert_eq!(local.session(lock).granted(), Granted::Ro);
    }
    drop(reader);
}

#[test]
fn who_waits_gets_what_the_writer_leaves() {
    let local = Local::start();
    let writer = local.session(Requested::Rw);
    thread::scope(|scope| {
        let either = [(); 4].map(|()| {
            scope.spawn(|| {
                let session = attempt(&local, Requested::RwOrRo, PATIENCE).unwrap();
                let granted = session.granted();
                if granted == Granted::Rw {
                    session.commit().unwrap();
                }
                granted
            })
        });
        eventually("all wait", || local.metric("waiting") == 4);
        drop(writer);
        let granted = either.map(|thread| thread.join().unwrap());
        let writers = granted.iter().filter(|granted| **granted == Granted::Rw).count();
        assert_eq!(writers, 1, "{granted:?}");
    });
}

/// What is thrown away comes back before the retry interval is over: the writer is told of it.
#[test]
fn a_writer_gets_the_memory_of_the_layout_that_it_replaces() {
    let local = Local::with(8 * GRANULE, |settings| {
        settings.retry_interval = 2 * PATIENCE;
        settings.retry_timeout = None;
    });
    for _ in 0..20 {
        let mut writer = local.session(Requested::Rw);
        let started = Instant::now();
        for _ in 0..7 {
            writer.allocate(GRANULE, "t").unwrap();
        }
        assert!(started.elapsed() < PATIENCE);
        writer.commit().unwrap();
    }
}

#[test]
fn a_writer_that_waits_for_memory_gets_what_is_freed() {
    let local = Local::with(4 * GRANULE, |settings| {
        settings.retry_interval = Duration::from_millis(5);
        settings.retry_timeout = None;
    });
    let held = local.sim.memory_used(0);
    local.sim.set_memory_limit(0, GRANULE);
    let mut writer = local.session(Requested::Rw);
    thread::scope(|scope| {
        let allocated = scope.spawn(move || writer.allocate(2 * GRANULE, "t").map(|_| writer));
        eventually("memory ran out", || local.events().contains(&("allocation_oom".to_owned(), 0)));
        local.sim.set_memory_limit(0, 4 * GRANULE);
        drop(allocated.join().unwrap().unwrap());
    });
    local.await_memory(held);
}

#[test]
fn a_writer_that_dies_as_it_waits_for_memory_is_noticed() {
    let local = Local::with(4 * GRANULE, |settings| settings.retry_timeout = None);
    local.sim.set_memory_limit(0, 0);
    let mut stream = asks_for(&local, Requested::Rw);
    let mut bytes = Vec::new();
    encode_frame(&wire::AllocateRequest { size: 1, tag: "t".to_owned() }, &mut bytes);
    stream.write_all(&bytes).unwrap();
    eventually("memory ran out", || local.events().contains(&("allocation_oom".to_owned(), 0)));
    drop(stream);
    local.await_state("EMPTY");
    drop(local.session(Requested::Rw));
}

#[test]
fn many_readers_are_there_at_once() {
    let local = Local::start();
    local.publish(2);
    let readers: Vec<Session> = (0..128).map(|_| local.session(Requested::Ro)).collect();
    let state = gms::client::runtime_state(local.socket(), PATIENCE).unwrap();
    assert_eq!(state.ro_session_count, 128);
    drop(readers);
    local.await_state("COMMITTED");
}

/// A driver that takes as long as it likes to release memory.
mod slow {
    use std::ffi::{CStr, c_void};
    use std::sync::{Arc, Mutex, OnceLock};

    use cuda_sys::Driver;
    use cuda_sys::types::{CUmemGenericAllocationHandle, CUresult};

    type Release = unsafe extern "C" fn(CUmemGenericAllocationHandle) -> CUresult;
    static RELEASE: OnceLock<Release> = OnceLock::new();
    /// Nothing is released while this is held.
    pub(super) static GATE: Mutex<()> = Mutex::new(());

    unsafe extern "C" fn slowly(handle: CUmemGenericAllocationHandle) -> CUresult {
        // A test that has failed lets it go on.
        drop(GATE.lock());
        // SAFETY: the caller keeps this function's contract, which is that one's.
        unsafe { RELEASE.get().unwrap()(handle) }
    }

    pub(super) fn driver(sim: &cuda_sim::Simulator) -> Driver {
        let real = sim.driver();
        RELEASE.get_or_init(|| real.cuMemRelease.unwrap());
        let lookup = |name: &'static CStr| match name.to_bytes() {
            b"cuMemRelease" => slowly as *const c_void,
            _ => real.symbol(name),
        };
        // SAFETY: all functions are the simulator's, which the last argument keeps, or have the signature of
        // the one whose place they take.
        unsafe { Driver::from_symbols("slow", lookup, Arc::new(real.clone())) }
    }
}

/// It keeps only the thread that gives it back.
#[test]
fn a_large_layout_is_given_back_beside_the_next_writer() {
    const COUNT: u64 = 8;
    let sim = cuda_sim::Simulator::builder().build().unwrap();
    let driver = slow::driver(&sim);
    let local = Local::on(sim, &driver, |settings| settings.ahead_bytes = 0);
    local.publish(COUNT as usize);
    let shut = slow::GATE.lock().unwrap();
    let mut writer = local.session(Requested::Rw);
    let made = writer.allocate(GRANULE, "t").unwrap();
    writer.export(&made.allocation_id).unwrap();
    writer.commit().unwrap();
    let mut reader = local.session(Requested::Ro);
    reader.export(&made.allocation_id).unwrap();
    // All of that while all of the old layout is still there.
    assert_eq!(local.metric("reclaim_pending_bytes"), COUNT * GRANULE);
    drop(shut);
    drop(reader);
    local.await_memory(GRANULE);
    eventually("no figure has it", || local.metric("reclaim_pending_bytes") == 0);
}

/// Nor does it keep a server from its end, which may be asked for because of it.
#[test]
fn a_server_ends_though_memory_does_not_go_back() {
    let sim = cuda_sim::Simulator::builder().build().unwrap();
    let driver = slow::driver(&sim);
    let local = Local::on(sim, &driver, |settings| settings.ahead_bytes = 0);
    let mut writer = local.session(Requested::Rw);
    writer.allocate(GRANULE, "t").unwrap();
    let shut = slow::GATE.lock().unwrap();
    drop(writer);
    local.await_state("EMPTY");
    let begin = Instant::now();
    let stopping = std::thread::spawn(move || local.stop());
    while !stopping.is_finished() && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
    }
    let has_ended = stopping.is_finished();
    drop(shut);
    stopping.join().unwrap().unwrap();
    assert!(has_ended);
}
