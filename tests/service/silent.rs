//! Servers that are there and do not answer: stopped, or stuck. And those that only take long.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use gms::client::{ClientError, ConnectOptions, Interrupt, Session};
use gms::lock::{Granted, Requested};
use gms::wire::{self, encode_frame};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, Signal, kill_process};

use crate::rig::{Folder, GRANULE, Local, PATIENCE, eventually};
use crate::roles::Process;

/// How long an answer may take where none comes.
const SHORT: Duration = Duration::from_millis(400);

/// And where one comes, too: more than a busy machine needs for it.
const LONG: Duration = Duration::from_secs(2);

fn options(lock: Requested) -> ConnectOptions {
    ConnectOptions::new(lock).answer_timeout(Some(SHORT))
}

/// A session that gives its server up soon, of a server that is there still, however busy the machine is.
fn connected(path: &Path) -> Session {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match Session::connect(path, options(Requested::Rw)) {
            Err(ClientError::Silent { .. }) if Instant::now() < deadline => {}
            session => return session.unwrap(),
        }
    }
}

/// Does something that must end, and fails instead of waiting for ever for it.
fn within<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = mpsc::channel();
    thread::spawn(move || {
        // Whoever waits may have given up.
        let _ = done.send(work());
    });
    ended.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what}: waits for ever"))
}

fn assert_silent<T: std::fmt::Debug>(answer: Result<T, ClientError>) {
    assert!(matches!(answer, Err(ClientError::Silent { time: SHORT })), "{answer:?}");
}

/// A server that grants the lock to whoever asks, in a thread, and reads nothing else and says nothing else.
fn grants_and_sticks(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        let mut held = Vec::new();
        for stream in listener.incoming() {
            let (mut stream, mut bytes) = (stream.unwrap(), [0; 4096]);
            let read = stream.read(&mut bytes).unwrap_or(0);
            let handshake = b"handshake_request";
            if bytes[..read].windows(handshake.len()).any(|part| part == handshake) {
                // Whoever has given up tries again.
                let _ = stream.write_all(&granted());
            }
            held.push(stream);
        }
    });
}

/// The next who asks for the lock.
fn asked(listener: &UnixListener) -> UnixStream {
    let (mut stream, _) = listener.accept().unwrap();
    // The handshake is a small message and comes at once.
    let asked = stream.read(&mut [0; 4096]).unwrap();
    assert!(asked > 0);
    stream
}

/// Grants the lock to the next who asks for it.
fn grant(listener: &UnixListener) -> UnixStream {
    let mut stream = asked(listener);
    stream.write_all(&granted()).unwrap();
    stream
}

/// The message that grants the lock.
fn granted() -> Vec<u8> {
    let granted = wire::HandshakeResponse {
        success: true,
        committed: false,
        granted_lock_type: Some(Granted::Rw),
        extensions: wire::Extensions::default(),
    };
    let mut out = Vec::new();
    encode_frame(&granted, &mut out);
    out
}

/// Whatever is asked for, and while the server is asked for its state.
#[test]
fn a_wait_for_an_answer_ends_where_somebody_says_so() {
    let folder = Folder::new();
    grants_and_sticks(&folder.socket());
    let ends_after = |time: Duration| {
        let started = Instant::now();
        Interrupt::new(move || started.elapsed() >= time)
    };
    type Ask = fn(&mut Session) -> Result<(), ClientError>;
    let ask: [Ask; 4] = [
        |session| session.layout_hash().map(drop),
        |session| session.allocate(GRANULE, "t").map(drop),
        |session| session.export_many(&["a".to_owned()], |_, _| Ok(())),
        // More than the socket takes.
        |session| session.metadata_put("k", "a", 0, &vec![0; 16 << 20]),
    ];
    // Where it is asked for its state the time for the answer is over.
    for (time, until) in [(None, SHORT), (Some(LONG), LONG + SHORT)] {
        for (which, ask) in ask.into_iter().enumerate() {
            let path = folder.socket();
            let waits_for_ever = which == 1;
            if time.is_some() && !waits_for_ever {
                continue;
            }
            within("an answer", move || {
                let options = ConnectOptions::new(Requested::Rw).answer_timeout(time);
                let mut session = Session::connect(path, options).unwrap();
                session.set_interrupt(Some(ends_after(until)));
                let answer = ask(&mut session);
                assert!(matches!(answer, Err(ClientError::Interrupted)), "{which}: {answer:?}");
                assert!(session.is_interrupted());
                let next = session.layout_hash();
                assert!(matches!(next, Err(ClientError::Disconnected)), "{next:?}");
            });
        }
    }
}

/// What does not wait for anything is nearly there: the connection need not go with it.
#[test]
fn an_answer_that_comes_soon_is_taken_though_nobody_would_wait_for_it() {
    let folder = Folder::new();
    let listener = UnixListener::bind(folder.socket()).unwrap();
    let server = thread::spawn(move || {
        let mut stream = grant(&listener);
        // As often as it is asked, until the other end is gone.
        while stream.read(&mut [0; 4096]).unwrap_or(0) > 0 {
            thread::sleep(Duration::from_millis(120));
            let mut out = Vec::new();
            let answer = wire::GetStateHashResponse { memory_layout_hash: "h".to_owned() };
            encode_frame(&answer, &mut out);
            stream.write_all(&out).unwrap();
        }
    });
    let mut session = Session::connect(folder.socket(), options(Requested::Rw)).unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    for _ in 0..2 {
        let asks = Arc::clone(&asked);
        session.set_interrupt(Some(Interrupt::new(move || asks.fetch_add(1, SeqCst) < 100)));
        // The second one is asked for while somebody waits no longer.
        for _ in 0..2 {
            assert_eq!(session.layout_hash().unwrap(), "h");
        }
        assert!(!session.is_interrupted());
    }
    // Not where a busy machine has looked for the answer late.
    assert!(asked.load(SeqCst) <= 2, "once each time");
    drop(session);
    server.join().unwrap();
}

#[test]
fn a_server_that_accepts_and_says_nothing_is_given_up() {
    let folder = Folder::new();
    let _listener = UnixListener::bind(folder.socket()).unwrap();
    let path = folder.socket();
    // The lock may take as long as it likes; the server may not.
    let waiting = path.clone();
    assert_silent(within("a lock", move || Session::connect(waiting, options(Requested::Rw))));
    let waiting = path.clone();
    let timed = options(Requested::Ro).timeout(2 * PATIENCE);
    assert_silent(within("a lock in time", move || Session::connect(waiting, timed)));
    let asking = path.clone();
    assert_silent(within("the state", move || gms::client::runtime_state(asking, SHORT)));
    assert_silent(within("the events", move || gms::client::event_history(path, SHORT)));
}

#[test]
fn a_server_that_accepts_nobody_is_given_up() {
    let folder = Folder::new();
    let path = folder.socket();
    let address = SocketAddrUnix::new(&path).unwrap();
    let new = |flags| {
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    };
    let listener = new(SocketFlags::CLOEXEC);
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let mut queued = Vec::new();
    loop {
        let socket = new(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        if rustix::net::connect(&socket, &address).is_err() {
            break;
        }
        queued.push(socket);
        assert!(queued.len() < 100, "the queue has no end");
    }
    let asked = within("the queue", move || gms::client::runtime_state(path, SHORT));
    assert!(matches!(asked, Err(ClientError::Connect { .. })), "{asked:?}");
}

#[test]
fn a_server_that_sticks_amid_a_session_is_given_up() {
    type Request = fn(&mut Session) -> Result<(), ClientError>;
    let requests: [(&str, Request); 6] = [
        ("a question", |session| session.layout_hash().map(drop)),
        ("an export", |session| session.export("x").map(drop)),
        ("memory", |session| session.allocate(1, "t").map(drop)),
        ("memory with its descriptor", |session| session.allocate_and_export(1, "t").map(drop)),
        ("more than a socket holds", |session| session.metadata_put("k", "x", 0, &[7; 8 << 20])),
        ("many things", |session| session.metadata_get_many("").map(drop)),
    ];
    for (what, request) in requests {
        let folder = Folder::new();
        grants_and_sticks(&folder.socket());
        let path = folder.socket();
        let (answer, after) = within(what, move || {
            let mut session = connected(&path);
            (request(&mut session), session.allocation_count())
        });
        assert_silent(answer);
        // A late answer would be taken for that of the next request.
        assert!(matches!(after, Err(ClientError::Disconnected)), "{what}: {after:?}");
    }
}

/// Nor is anything waited for over a connection that has failed, or what comes there late taken for an answer.
#[test]
fn what_was_given_up_is_asked_for_nothing_more() {
    let folder = Folder::new();
    let path = folder.socket();
    let listener = UnixListener::bind(&path).unwrap();
    let (given_up, late) = mpsc::channel();
    let server = thread::spawn(move || {
        let mut stream = grant(&listener);
        late.recv().unwrap();
        let mut bytes = Vec::new();
        let error = wire::ErrorResponse { error: "too late".to_owned(), code: 0 };
        encode_frame(&error, &mut bytes);
        stream.write_all(&bytes).unwrap();
        (stream, listener)
    });
    let mut session = Session::connect(&path, options(Requested::Rw)).unwrap();
    assert_silent(session.layout_hash());
    let begin = Instant::now();
    for _ in 0..10 {
        let after = session.free("x");
        assert!(matches!(after, Err(ClientError::Disconnected)), "{after:?}");
    }
    assert!(begin.elapsed() < 5 * SHORT, "{:?}", begin.elapsed());
    given_up.send(()).unwrap();
    let _server = server.join().unwrap();
    let after = session.free("x");
    assert!(matches!(after, Err(ClientError::Disconnected)), "{after:?}");
}

#[test]
fn a_stopped_process_is_given_up_and_serves_again_when_it_goes_on() {
    let folder = Folder::new();
    let mut server = Process::server(&folder.socket());
    let id = Pid::from_raw(server.id() as i32).unwrap();
    let path = folder.socket();
    let mut session = connected(&path);
    kill_process(id, Signal::STOP).unwrap();
    let waiting = path.clone();
    let (connected, asked) = within("a stopped server", move || {
        (Session::connect(waiting, options(Requested::Rw)).map(drop), session.allocation_count())
    });
    kill_process(id, Signal::CONT).unwrap();
    assert_silent(connected);
    assert_silent(asked);
    // It finds that both are gone.
    let next = ConnectOptions::new(Requested::Rw).timeout(PATIENCE);
    assert_eq!(Session::connect(&path, next).unwrap().allocation_count().unwrap(), 0);
    assert_eq!(server.ask("stop"), "stopped");
}

/// One that is stopped, or stuck in the driver where not even SIGKILL reaches it: somebody makes room at its
/// path for another, whose answers are not the first one's.
#[test]
fn a_server_that_is_given_up_by_whoever_started_another_is_given_up_here_too() {
    let folder = Folder::new();
    let path = folder.socket();
    let first = UnixListener::bind(&path).unwrap();
    let mut second = Process::server(&folder.path().join("second"));
    let connect = |options: ConnectOptions| {
        let path = path.clone();
        move || Session::connect(path, options)
    };
    let long = |lock| ConnectOptions::new(lock).answer_timeout(Some(LONG));
    let writer = thread::spawn(connect(long(Requested::Rw)));
    let granted = grant(&first);
    let mut writer = writer.join().unwrap().unwrap();
    let wait = |lock| {
        let connect = connect(lock);
        thread::spawn(|| within("a lock", connect).map(drop))
    };
    let waiters = [wait(long(Requested::Rw)), wait(long(Requested::Ro).timeout(2 * PATIENCE))];
    // Who has asked has looked where it is; before that it would go to the other one.
    let accepted = [(); 2].map(|()| asked(&first));
    std::fs::rename(folder.path().join("second"), &path).unwrap();
    let memory = within("memory", move || writer.allocate(1, "t").map(drop));
    for answer in waiters.into_iter().map(|waiter| waiter.join().unwrap()).chain([memory]) {
        assert!(matches!(answer, Err(ClientError::Replaced { time: LONG })), "{answer:?}");
    }
    drop((granted, accepted));
    // Who tries again is at the other one.
    let next = connect(ConnectOptions::new(Requested::Rw).timeout(PATIENCE))();
    assert_eq!(next.unwrap().granted(), Granted::Rw);
    assert_eq!(second.ask("stop"), "stopped");
}

#[test]
fn who_waits_for_a_lock_waits_longer_than_an_answer_may_take() {
    thread::scope(|scope| {
        scope.spawn(|| waits_for_a_lock_longer(None));
        waits_for_a_lock_longer(Some(2 * PATIENCE));
    });
}

fn waits_for_a_lock_longer(time: Option<Duration>) {
    let local = Local::start();
    let writer = local.session(Requested::Rw);
    let path = local.socket().to_owned();
    let (started, before) = (Instant::now(), local.metric("connections_total"));
    let waiter = thread::spawn(move || {
        let mut options = ConnectOptions::new(Requested::Rw);
        options.timeout = time;
        Session::connect(path, options.answer_timeout(Some(LONG)))
    });
    // It has asked how the server is, twice, over connections of its own.
    eventually("the server is asked", || local.metric("connections_total") >= before + 3);
    assert!(started.elapsed() >= 2 * LONG);
    assert!(!waiter.is_finished());
    drop(writer);
    assert_eq!(waiter.join().unwrap().unwrap().granted(), Granted::Rw);
}

#[test]
fn who_waits_for_memory_waits_longer_than_an_answer_may_take() {
    let local = Local::with(2 * GRANULE, |settings| {
        settings.retry_timeout = Some(LONG * 5 / 2);
        settings.ahead_bytes = 0;
    });
    let options = ConnectOptions::new(Requested::Rw).timeout(PATIENCE);
    let options = options.answer_timeout(Some(LONG));
    let mut writer = Session::connect(local.socket(), options).unwrap();
    for _ in 0..2 {
        writer.allocate(GRANULE, "t").unwrap();
    }
    let refused = writer.allocate(GRANULE, "t");
    assert!(matches!(refused, Err(ClientError::Refused { .. })), "{refused:?}");
    assert_eq!(writer.allocation_count().unwrap(), 2, "the session lives");
}
