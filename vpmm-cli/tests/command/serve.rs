//! The service as a process that is started, used, looked at and stopped.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gms::client::{ConnectOptions, Session};
use gms::lock::Requested;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;

use crate::rig::{stderr, stdout, vpmm};

const PATIENCE: Duration = Duration::from_secs(30);

/// A folder for sockets, removed when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("vpmm-serve-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server, killed when this is dropped.
struct Server(Child);

impl Server {
    fn start(folder: &Folder, args: &[&str]) -> Self {
        let mut command = vpmm(&["serve", "--device", "sim"]);
        command.args(args).env("GMS_SOCKET_DIR", &folder.0);
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Ends it as an operator does: the exit code and what it said.
    fn stop(mut self, signal: Signal) -> (Option<i32>, String) {
        let id = Pid::from_raw(self.0.id() as i32).unwrap();
        kill_process(id, signal).unwrap();
        let status = self.0.wait().unwrap();
        let mut said = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (status.code(), said)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn options(lock: Requested) -> ConnectOptions {
    ConnectOptions::new(lock).timeout(PATIENCE)
}

fn publish(socket: &Path) {
    let mut writer = Session::connect(socket, options(Requested::Rw)).unwrap();
    let made = writer.allocate(5 << 20, "weights").unwrap();
    writer.metadata_put("a", &made.allocation_id, 0, b"v").unwrap();
    writer.commit().unwrap();
}

#[test]
fn each_tag_is_served_at_its_own_socket_until_a_signal() {
    for signal in [Signal::TERM, Signal::INT] {
        let folder = Folder::new();
        let server = Server::start(&folder, &[]);
        let started = Instant::now();
        while folder.names().len() < 4 {
            assert!(started.elapsed() < PATIENCE, "{:?}", folder.names());
            std::thread::sleep(Duration::from_millis(2));
        }
        let sockets: Vec<String> =
            folder.names().into_iter().filter(|name| name.ends_with(".sock")).collect();
        assert_eq!(sockets.len(), 2, "{sockets:?}");
        for (socket, tag) in sockets.iter().zip(["kv_cache", "weights"]) {
            assert!(socket.starts_with("gms_GPU-") && socket.ends_with(&format!("_{tag}.sock")));
            publish(&folder.0.join(socket));
        }
        let (code, said) = server.stop(signal);
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("layout committed") && said.contains("stopped"), "{said}");
        assert_eq!(folder.names(), [""; 0], "nothing is left");
    }
}

#[test]
fn a_second_server_is_refused_and_a_dead_ones_socket_replaced() {
    let folder = Folder::new();
    let socket = folder.0.join("s");
    let args = ["--tag", "weights", "--socket-path", socket.to_str().unwrap()];
    let server = Server::start(&folder, &args);
    publish(&socket);
    let second = vpmm(&["serve", "--device", "sim"]).args(args).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let text = format!("vpmm: GMS already running at {}\n", socket.display());
    assert_eq!(stderr(&second), text);
    drop(server);
    assert!(socket.exists(), "it was killed");
    let next = Server::start(&folder, &args);
    publish(&socket);
    assert_eq!(next.stop(Signal::TERM).0, Some(0));
}

/// Where its log goes nobody may be reading any more: it serves all the same, and stops.
#[test]
fn a_server_whose_log_is_not_read_goes_on_and_stops() {
    let folder = Folder::new();
    let socket = folder.0.join("s");
    let path = socket.to_str().unwrap();
    let mut server =
        Server::start(&folder, &["--verbose", "--tag", "weights", "--socket-path", path]);
    drop(server.0.stderr.take());
    for _ in 0..3 {
        publish(&socket);
    }
    kill_process(Pid::from_raw(server.0.id() as i32).unwrap(), Signal::TERM).unwrap();
    eventually(&folder, || server.0.try_wait().unwrap().is_some());
    assert_eq!(server.0.wait().unwrap().code(), Some(0));
    assert_eq!(folder.names(), [""; 0]);
}

/// The processes that a process has started.
fn children(parent: u32) -> Vec<Pid> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let listed = std::fs::read_to_string(path).unwrap();
    listed.split_whitespace().map(|id| Pid::from_raw(id.parse().unwrap()).unwrap()).collect()
}

/// Waits until something is so.
fn eventually(folder: &Folder, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < PATIENCE, "{:?}", folder.names());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A fleet of two simulated devices, each with two sockets, which answer: the sockets by their devices, and
/// the server processes.
struct Fleet {
    supervisor: Server,
    sockets: [[PathBuf; 2]; 2],
    servers: Vec<Pid>,
}

impl Fleet {
    fn start(folder: &Folder, extra: &[&str]) -> Self {
        let mut command = vpmm(&["serve", "--device", "sim:1", "--all"]);
        command.args(extra).env("GMS_SOCKET_DIR", &folder.0);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let supervisor = Server(command.spawn().unwrap());
        // A file beside each says that its server lives.
        eventually(folder, || folder.names().len() == 8);
        let names = folder.names().into_iter().filter(|name| name.ends_with(".sock"));
        let paths: Vec<PathBuf> = names.map(|name| folder.0.join(name)).collect();
        paths.iter().for_each(|path| assert_eq!(state(path), "EMPTY"));
        // In the order of the devices' names, whose last digits are their numbers.
        let [a, b, c, d] = paths.try_into().unwrap();
        let servers = children(supervisor.0.id());
        assert_eq!(servers.len(), 2);
        Self { supervisor, sockets: [[a, b], [c, d]], servers }
    }

    fn all_sockets(&self) -> impl Iterator<Item = &PathBuf> {
        self.sockets.iter().flatten()
    }
}

fn state(socket: &Path) -> String {
    gms::client::runtime_state(socket, PATIENCE).unwrap().state
}

#[test]
fn a_fleet_has_a_server_for_each_device_and_ends_in_order() {
    let folder = Folder::new();
    let fleet = Fleet::start(&folder, &[]);
    let tag = |path: &PathBuf| {
        path.to_str()
            .unwrap()
            .rsplit_once('_')
            .map(|(device, tag)| (device.to_owned(), tag.to_owned()))
    };
    let [first, second] = &fleet.sockets;
    for (one, other) in first.iter().zip(second) {
        let ((device, tag), (other, same)) = (tag(one).unwrap(), tag(other).unwrap());
        assert!(device != other && tag == same, "{device} {other} {tag} {same}");
    }
    // Each has a layout of its own.
    publish(&first[1]);
    assert_eq!((state(&first[1]).as_str(), state(&second[1]).as_str()), ("COMMITTED", "EMPTY"));
    publish(&second[1]);
    let (code, said) = fleet.supervisor.stop(Signal::TERM);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(said.matches("stopped").count(), 4, "{said}");
    assert_eq!(folder.names(), [""; 0], "nothing is left");
}

/// The memory of the others is nothing to a server that dies, and its own device has another soon.
#[test]
fn a_server_of_a_fleet_that_dies_is_started_again_and_the_others_go_on() {
    let folder = Folder::new();
    let fleet = Fleet::start(&folder, &[]);
    fleet.all_sockets().for_each(|socket| publish(socket));
    let states = || {
        let all = fleet.all_sockets().map(|socket| {
            gms::client::runtime_state(socket, Duration::from_millis(20))
                .map_or_else(|_| "none".to_owned(), |state| state.state)
        });
        all.collect::<Vec<_>>()
    };
    let supervisor = fleet.supervisor.0.id();
    let mut running = fleet.servers.clone();
    for turn in 0..3 {
        let (dies, stays) = (running[turn % 2], running[(turn + 1) % 2]);
        kill_process(dies, Signal::KILL).unwrap();
        eventually(&folder, || {
            running = children(supervisor);
            running.len() == 2 && !running.contains(&dies)
        });
        assert!(running.contains(&stays), "the same process");
        // Two layouts that are new, and two that were never away.
        eventually(&folder, || {
            let states = states();
            let count = |name| states.iter().filter(|state| *state == name).count();
            (count("EMPTY"), count("COMMITTED")) == (2, 2)
        });
        fleet.all_sockets().for_each(|socket| publish(socket));
    }
    let (code, said) = fleet.supervisor.stop(Signal::INT);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(said.matches("it starts again").count(), 3, "{said}");
    assert_eq!(folder.names(), [""; 0], "nothing is left");
}

#[test]
fn a_server_of_a_fleet_that_was_stopped_stays_so() {
    let folder = Folder::new();
    let mut fleet = Fleet::start(&folder, &[]);
    kill_process(fleet.servers[0], Signal::TERM).unwrap();
    eventually(&folder, || folder.names().len() == 4);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(children(fleet.supervisor.0.id()).len(), 1);
    // With the last of them the fleet is over.
    kill_process(fleet.servers[1], Signal::TERM).unwrap();
    assert_eq!(fleet.supervisor.0.wait().unwrap().code(), Some(0));
    assert_eq!(folder.names(), [""; 0]);
}

#[test]
fn a_fleet_may_end_together() {
    let folder = Folder::new();
    // One that is killed leaves its sockets, and the fleet says that it failed.
    let mut fleet = Fleet::start(&folder, &["--end-together"]);
    kill_process(fleet.servers[1], Signal::KILL).unwrap();
    assert_eq!(fleet.supervisor.0.wait().unwrap().code(), Some(1));
    // When the supervisor is killed, its servers end by themselves, and in order.
    let folder = Folder::new();
    let mut fleet = Fleet::start(&folder, &[]);
    fleet.supervisor.0.kill().unwrap();
    fleet.supervisor.0.wait().unwrap();
    eventually(&folder, || folder.names().is_empty());
}

/// A container's program is the first process of its own numbers, as whose children orphans are taken in.
#[test]
fn a_fleet_may_be_the_first_process_of_a_container() {
    let alone = ["--pid", "--fork", "--kill-child"];
    if !Command::new("unshare").args(alone).arg("true").status().is_ok_and(|it| it.success()) {
        println!("skipped: there are no namespaces for this process");
        return;
    }
    let folder = Folder::new();
    let mut command = Command::new("unshare");
    command.args(alone).arg(vpmm(&[]).get_program());
    command.args(["serve", "--device", "sim:1", "--all"]).env("GMS_SOCKET_DIR", &folder.0);
    let _fleet = Server(command.stderr(Stdio::null()).spawn().unwrap());
    eventually(&folder, || folder.names().len() == 8);
    let names = folder.names().into_iter().filter(|name| name.ends_with(".sock"));
    names.for_each(|name| publish(&folder.0.join(name)));
}

/// A tag may begin as an option does.
#[test]
fn a_fleet_serves_tags_of_any_name() {
    let folder = Folder::new();
    let mut command = vpmm(&["serve", "--device", "sim", "--all", "--tag=-x", "--tag=--all"]);
    command.env("GMS_SOCKET_DIR", &folder.0);
    let fleet = Server(command.stderr(Stdio::piped()).spawn().unwrap());
    eventually(&folder, || folder.names().len() == 4);
    let (code, said) = fleet.stop(Signal::TERM);
    assert_eq!(code, Some(0), "{said}");
}

/// However early: servers that do not listen for signals yet have nothing to put in order.
#[test]
fn a_fleet_that_is_stopped_as_it_starts_ends_well() {
    for turn in 0..20 {
        let folder = Folder::new();
        let mut command = vpmm(&["serve", "--device", "sim:1", "--all"]);
        command.env("GMS_SOCKET_DIR", &folder.0).stderr(Stdio::piped()).process_group(0);
        let supervisor = Server(command.spawn().unwrap());
        eventually(&folder, || children(supervisor.0.id()).len() == 2);
        if turn % 2 == 0 {
            // As a terminal does it: all of them get it.
            let group = Pid::from_raw(supervisor.0.id() as i32).unwrap();
            kill_process_group(group, Signal::INT).unwrap();
        }
        let (code, said) = supervisor.stop(Signal::TERM);
        assert_eq!(code, Some(0), "{turn}: {said}");
        assert_eq!(folder.names(), [""; 0], "nothing is left");
    }
}

/// Where a device cannot be served from the start there is something for the operator to mend.
#[test]
fn a_fleet_that_cannot_begin_ends() {
    let folder = Folder::new();
    let running = Fleet::start(&folder, &[]);
    let mut command = vpmm(&["serve", "--device", "sim:1", "--all"]);
    let second = command.env("GMS_SOCKET_DIR", &folder.0).output().unwrap();
    assert_eq!(second.status.code(), Some(1), "{}", stderr(&second));
    assert!(stderr(&second).contains("GMS already running at"), "{}", stderr(&second));
    running.all_sockets().for_each(|socket| assert_eq!(state(socket), "EMPTY"));
}

#[test]
fn bad_usage_is_told_before_anything_is_begun() {
    for args in [
        &["serve"][..],
        &["serve", "--device", "x"],
        &["serve", "--device", "sim", "--socket-path", "/tmp/x"],
        &["serve", "--device", "sim", "--tag", "a", "--tag", "a"],
        &["serve", "--device", "sim", "--tag", "a/b"],
        &["serve", "--device", "sim", "--alloc-retry-interval", "0"],
        &["serve", "--device", "sim", "--alloc-retry-timeout", "-1"],
        &["serve", "--device", "sim", "--metrics", "0.0.0.0:1"],
        &["serve", "--device", "0", "--all"],
        &["serve", "--device", "0", "--end-together"],
        &["serve", "--all", "--socket-path", "/tmp/x"],
        &["serve", "--device", "sim", "--max-message", "0"],
        // A client's batch of metadata would end its session.
        &["serve", "--device", "sim", "--max-message", "511KiB"],
        &["serve", "--device", "sim", "--max-metadata", "0"],
    ] {
        let output = vpmm(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
    }
}

/// What a server answers to a request of HTTP.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_fleet_tells_the_figures_of_each_device() {
    let folder = Folder::new();
    // A port that was free a moment ago, and so was the next.
    let free = |port| TcpListener::bind(("127.0.0.1", port)).and_then(|it| it.local_addr());
    let two_free = || Some(free(0).ok()?.port()).filter(|port| free(port + 1).is_ok());
    let port = std::iter::repeat_with(two_free).flatten().next().unwrap();
    let fleet = Fleet::start(&folder, &["--metrics", &format!("127.0.0.1:{port}")]);
    publish(&fleet.sockets[1][1]);
    for (device, commits) in [(0, 0), (1, 1)] {
        let answer = get(&format!("127.0.0.1:{}", port + device), "/metrics");
        let line = format!("gms_commits_total{{name=\"weights\",device=\"{device}\"}} {commits}");
        assert!(answer.lines().any(|found| found == line), "{line}: {answer}");
    }
    assert_eq!(fleet.supervisor.stop(Signal::TERM).0, Some(0));
}

#[test]
fn figures_are_told_over_http() {
    let folder = Folder::new();
    // A port that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    let socket = folder.0.join("s");
    let path = socket.to_str().unwrap();
    let args = ["--tag", "weights", "--socket-path", path, "--metrics", &address];
    let server = Server::start(&folder, &args);
    publish(&socket);
    let answer = get(&address, "/metrics");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    for line in [
        "# TYPE gms_commits_total counter",
        "gms_commits_total{name=\"weights\",device=\"0\"} 1",
        "gms_allocated_bytes{name=\"weights\",device=\"0\"} 6291456",
    ] {
        assert!(answer.lines().any(|found| found == line), "{line}: {answer}");
    }
    assert!(get(&address, "/other").starts_with("HTTP/1.1 404"));
    // Who does not come to an end keeps others waiting for moments only.
    let mut slow = TcpStream::connect(&address).unwrap();
    let trickle = std::thread::spawn(move || {
        let turns = (0..150).take_while(|_| {
            std::thread::sleep(Duration::from_millis(100));
            slow.write_all(b"x").is_ok()
        });
        turns.count()
    });
    assert!(get(&address, "/metrics").starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(trickle.join().unwrap() < 100, "it was heard to its end");
    assert_eq!(server.stop(Signal::TERM).0, Some(0));
}

#[test]
fn a_layout_is_saved_and_loaded_into_another_server() {
    let folder = Folder::new();
    let (first, second) = (folder.0.join("1"), folder.0.join("2"));
    let start = |socket: &Path| {
        let path = socket.to_str().unwrap().to_owned();
        Server::start(&folder, &["--tag", "weights", "--socket-path", &path])
    };
    let _servers = [start(&first), start(&second)];
    publish(&first);
    let saved = folder.0.join("saved");
    let snapshot = |way: &str, socket: &Path| {
        let mut command = vpmm(&["snapshot", way, "--device", "sim"]);
        command.arg("--socket-path").arg(socket).arg(&saved).output().unwrap()
    };
    let line = |output: &std::process::Output| -> Value {
        assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
        serde_json::from_str(stdout(output)).unwrap()
    };
    let one = line(&snapshot("save", &first));
    let two = line(&snapshot("load", &second));
    assert_eq!((&one["bytes"], &one["layout_hash"]), (&6_291_456.into(), &two["layout_hash"]));
    // Before the writer's lock is asked for, with which what is published goes.
    let mut command = vpmm(&["snapshot", "load", "--device", "sim", "--workers", "0"]);
    let useless = command.arg("--socket-path").arg(&second).arg(&saved).output().unwrap();
    assert_eq!(useless.status.code(), Some(2), "{}", stderr(&useless));
    let state = gms::client::runtime_state(&second, PATIENCE).unwrap();
    assert_eq!(one["layout_hash"], state.memory_layout_hash);
    let again = snapshot("save", &first);
    assert_eq!(again.status.code(), Some(2));
    assert!(stderr(&again).contains("is there already"));

    std::fs::write(saved.join("shards/shard_0000.bin"), "cut").unwrap();
    let damaged = snapshot("load", &second);
    assert_eq!(damaged.status.code(), Some(2));
    assert!(stderr(&damaged).contains("is damaged: it has 3 bytes"), "{}", stderr(&damaged));
}

#[test]
fn a_server_that_lets_nobody_in_is_told_with_what_is_in_the_way() {
    use std::os::unix::net::UnixListener;

    let folder = Folder::new();
    let (socket, saved, stale) =
        (folder.0.join("1"), folder.0.join("saved"), folder.0.join("stale"));
    let path = socket.to_str().unwrap();
    let _server = Server::start(&folder, &["--tag", "weights", "--socket-path", path]);
    let snapshot = |way: &str, socket: &Path, place: &str| {
        let mut command = vpmm(&["snapshot", way, "--device", "sim"]);
        command.arg("--socket-path").arg(socket).arg(folder.0.join(place));
        command
    };
    // Once it is there.
    drop(Session::connect(&socket, options(Requested::Rw)).unwrap());
    let says = |way: &str, socket: &Path, place: &str, message: &str| {
        let output = snapshot(way, socket, place).args(["--timeout", "0.25"]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{way}: {}", stderr(&output));
        assert_eq!(stderr(&output), format!("vpmm: {message}\n"));
    };
    let lets_in = |session: &str, why: &str| {
        format!("the server at {path} let no {session} in within 0.25 s: {why}")
    };
    says("save", &socket, "new", &lets_in("reader", "no layout is published there"));
    let writer = Session::connect(&socket, options(Requested::Rw)).unwrap();
    says("save", &socket, "new", &lets_in("reader", "a writer is there"));
    drop(writer);
    publish(&socket);
    let output = snapshot("save", &socket, "saved").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let _readers = [(); 2].map(|()| Session::connect(&socket, options(Requested::Ro)).unwrap());
    says("load", &socket, "saved", &lets_in("writer", "2 readers are there"));
    assert!(saved.is_dir());

    let none = folder.0.join("none");
    let nobody = |at: &Path, why: &str| {
        says("load", at, "saved", &format!("no server at {} within 0.25 s: {why}", at.display()));
    };
    nobody(&none, "nothing is at that path");
    let listener = UnixListener::bind(&stale).unwrap();
    let ends = std::thread::spawn(move || drop(listener.accept()));
    let text =
        format!("the server at {} has closed the connection instead of an answer", stale.display());
    says("load", &stale, "saved", &text);
    ends.join().unwrap();
    // Its file stays behind.
    nobody(&stale, "nobody listens at that path");
}

/// How long a command takes that has nothing to wait for; it would wait 30 s for a server.
const AT_ONCE: Duration = Duration::from_secs(15);

#[test]
fn a_folder_that_cannot_be_loaded_is_told_before_any_server_is_waited_for() {
    let folder = Folder::new();
    let (missing, broken) = (folder.0.join("missing"), folder.0.join("broken"));
    std::fs::create_dir(&broken).unwrap();
    std::fs::write(broken.join("manifest.json"), "{").unwrap();
    let file = broken.join("manifest.json");
    let nobody = folder.0.join("nobody.sock");
    for (way, place, word) in [
        ("load", &missing, "manifest.json"),
        ("load", &broken, "manifest.json"),
        ("load", &file, "Not a directory"),
        ("save", &broken, "is there already"),
    ] {
        let started = Instant::now();
        let mut command = vpmm(&["snapshot", way, "--device", "sim", "--timeout", "60"]);
        let output = command.arg("--socket-path").arg(&nobody).arg(place).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{way}: {}", stderr(&output));
        assert!(stderr(&output).contains(word), "{way}: {}", stderr(&output));
        assert!(started.elapsed() < AT_ONCE, "{way} waited");
    }
}

#[test]
fn a_bench_without_a_driver_or_a_server_ends_at_once() {
    if std::fs::exists("/dev/nvidiactl").unwrap_or(false) {
        println!("skipped: this machine has a driver");
        return;
    }
    let started = Instant::now();
    let output = vpmm(&["serve-bench", "--device", "0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert_eq!(stdout(&output), "");
    // A server that cannot have its socket ends, and that is noticed.
    let mut command = vpmm(&["serve-bench", "--device", "sim"]);
    let output = command.env("TMPDIR", "/nonexistent").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("the server has ended"), "{}", stderr(&output));
    assert!(started.elapsed() < AT_ONCE, "it waited");
}

#[test]
fn a_bench_without_its_folder_says_so_before_anything_is_measured() {
    let folder = Folder::new();
    let (missing, file) = (folder.0.join("missing"), folder.0.join("file"));
    std::fs::write(&file, "").unwrap();
    for place in [&missing, &file] {
        let mut command = vpmm(&["serve-bench", "--device", "sim", "--quick", "--folder"]);
        let output = command.arg(place).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains("is no folder"), "{}", stderr(&output));
        assert_eq!(stdout(&output), "");
    }
}

#[test]
fn the_bench_measures_every_case() {
    for extra in [&[][..], &["--no-batch"], &["--ahead", "0"]] {
        let folder = Folder::new();
        let mut command = vpmm(&["serve-bench", "--device", "sim", "--quick", "--folder"]);
        let output = command.arg(&folder.0).args(extra).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let lines: Vec<Value> =
            stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let cases: Vec<&str> = lines.iter().map(|line| line["case"].as_str().unwrap()).collect();
        let expected = [
            "server_ready",
            "server_ready_after_cuinit",
            "connect",
            "round_trip",
            "writer_create_mapping",
            "writer_create_and_fill",
            "reader_create_mapping",
            "driver_floor",
            "bulk_import_2MiB",
            "layout_40GB_in_640",
            "readers_at_once",
            "save",
            "load",
        ];
        assert_eq!(cases, expected);
        let [.., readers, saved, loaded] = lines.as_slice() else { panic!("{lines:?}") };
        assert_eq!((&readers["readers"], &readers["processes"]), (&4.into(), &2.into()));
        for line in [saved, loaded] {
            assert_eq!(line["bytes"], 6 << 20);
            for rate in ["gb_per_s", "disk_gb_per_s", "pinned_copy_gb_per_s", "of_the_slower"] {
                assert!(line[rate].as_f64().is_some_and(|rate| rate > 0.0), "{rate}: {line}");
            }
        }
        assert_eq!(folder.names(), [""; 0], "nothing is left");
    }
}
