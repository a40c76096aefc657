//! Memory shared between processes.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::*;
use vpmm::{Access, Error, Imported, Location, Pool, Sharing};

use crate::rig::{GRANULE, LIMIT, Profile};
use crate::support::changed::changed;
use crate::support::streams::{end_capture, make};
use crate::support::{Held, Rig, Watched, call};

const FILES: Sharing = Sharing::FileDescriptor;
/// Set in the process that a test starts: on what kind of device it works.
const CHILD: &str = "VPMM_TEST_CHILD";

fn shareable(rig: &Rig, profile: Profile) -> Watched<'_> {
    let pool = profile.open(&rig.device, Location::Device, FILES).expect("a pool");
    rig.watch(profile, pool)
}

/// Starts this test again in another process, whose standard input is a socket to here.
fn start(test: &str, rig: &Rig) -> (Child, UnixStream) {
    let (here, there) = UnixStream::pair().unwrap();
    let kind = if rig.sim.is_some() { "simulator" } else { "gpu" };
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, kind)
        .stdin(Stdio::from(OwnedFd::from(there)))
        .spawn()
        .unwrap();
    (child, here)
}

/// In the process that was started: its device, and the socket.
fn started() -> Option<(Rig, UnixStream)> {
    let rig = match std::env::var(CHILD).ok()?.as_str() {
        "gpu" => Rig::gpu().expect("the other process has a GPU"),
        _ => Rig::simulated(Schedule::Eager),
    };
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    Some((rig, socket.into()))
}

fn say(mut socket: &UnixStream, words: &[u64]) {
    for word in words {
        socket.write_all(&word.to_le_bytes()).unwrap();
    }
}

fn hear<const N: usize>(mut socket: &UnixStream) -> [u64; N] {
    std::array::from_fn(|_| {
        let mut word = [0; 8];
        socket.read_exact(&mut word).unwrap();
        u64::from_le_bytes(word)
    })
}

/// One allocation over several handles: written there, read here, written here, read there. Of the last one
/// two of the handles are elsewhere, too.
#[test]
fn two_processes_share_an_allocation() {
    const PLACES: [(Profile, bool); 3] =
        [(Profile::Default, false), (Profile::Paged, false), (Profile::Default, true)];
    if let Some((rig, socket)) = started() {
        for _ in PLACES {
            let memory = Imported::receive(&rig.device, &socket, Access::ReadWrite).unwrap();
            let [seed, bytes] = hear(&socket);
            assert!(memory.bytes() >= bytes);
            assert!(memory.stats().mapped_bytes >= bytes);
            let stream = rig.stream();
            let ptr = memory.ptr().unwrap();
            rig.check(ptr.address(), bytes, seed, stream.handle());
            assert_eq!(rig.mismatches(), 0);
            rig.fill(ptr.address(), bytes, seed + 1, stream.handle());
            stream.synchronize().unwrap();
            drop(memory);
            say(&socket, &[1]);
        }
        return rig.assert_clean();
    }
    Rig::everywhere(|rig| {
        let (mut child, socket) = start("sharing::two_processes_share_an_allocation", rig);
        for (profile, splits) in PLACES {
            let watched = shareable(rig, profile);
            let stream = rig.stream();
            let (short, bytes) = (204 * 4096, 5 * GRANULE);
            let beside = if splits {
                let parts = [short, GRANULE - short, GRANULE - short, short, (LIMIT - 7) * GRANULE]
                    .map(|bytes| watched.malloc(bytes, &stream));
                let [a, b, c, d, rest] = parts;
                [a, d].into_iter().for_each(|part| watched.free(part, &stream));
                vec![b, c, rest]
            } else {
                // Made piece by piece, so that it lies on several handles.
                let parts = [(); 3].map(|()| watched.malloc(GRANULE, &stream));
                parts.into_iter().for_each(|part| watched.free(part, &stream));
                vec![]
            };
            let bytes = if splits { bytes + 2 * short } else { bytes };
            let held = watched.malloc(bytes, &stream);
            stream.synchronize().unwrap();
            watched.pool.export(held.ptr).unwrap().send(&socket).unwrap();
            assert!(watched.pool.stats().exported_bytes >= bytes);
            say(&socket, &[held.seed, held.bytes]);
            assert_eq!(hear(&socket), [1]);
            let theirs = Held { seed: held.seed + 1, ..held };
            watched.free(theirs, &stream);
            beside.into_iter().for_each(|part| watched.free(part, &stream));
            watched.assert_intact();
        }
        assert!(child.wait().unwrap().success());
    });
}

/// A whole pool, and what it makes after it was shared; the importer ends after the owner.
#[test]
fn two_processes_share_a_pool_that_grows() {
    if let Some((rig, socket)) = started() {
        for _ in Profile::BOTH {
            let memory = Imported::receive(&rig.device, &socket, Access::Read).unwrap();
            let stream = rig.stream();
            let look = |memory: &Imported| {
                let [address, bytes, seed] = hear(&socket);
                let here = memory.translate(address).expect("an address of the pool");
                let last = memory.translate(address + bytes - 1).expect("its end");
                assert_eq!(last.address() - here.address(), bytes - 1, "contiguous here, too");
                rig.check(here.address(), bytes, seed, stream.handle());
                assert_eq!(rig.mismatches(), 0);
            };
            look(&memory);
            say(&socket, &[1]);
            let before = memory.stats().mapped_bytes;
            memory.receive_more(&socket).unwrap();
            assert!(memory.stats().mapped_bytes > before);
            look(&memory);
            // Nothing new.
            memory.receive_more(&socket).unwrap();
            assert_eq!(memory.translate(0), None);
            say(&socket, &[2]);
        }
        return rig.assert_clean();
    }
    Rig::everywhere(|rig| {
        let (mut child, socket) = start("sharing::two_processes_share_a_pool_that_grows", rig);
        for profile in Profile::BOTH {
            let watched = shareable(rig, profile);
            let stream = rig.stream();
            let first = watched.malloc(3 * GRANULE, &stream);
            stream.synchronize().unwrap();
            let mut export = watched.pool.export_all().unwrap();
            export.send(&socket).unwrap();
            say(&socket, &[first.address(), first.bytes, first.seed]);
            assert_eq!(hear(&socket), [1]);
            let second = watched.malloc(4 * GRANULE, &stream);
            stream.synchronize().unwrap();
            export.send(&socket).unwrap();
            say(&socket, &[second.address(), second.bytes, second.seed]);
            export.send(&socket).unwrap();
            assert_eq!(hear(&socket), [2]);
            watched.free(first, &stream);
            watched.free(second, &stream);
            watched.assert_intact();
        }
        assert!(child.wait().unwrap().success());
    });
}

/// Two machines, as two processes are, in one.
fn two(builder: impl Fn() -> cuda_sim::Builder) -> [Rig; 2] {
    [(); 2].map(|()| Rig::on(builder().build().unwrap()))
}

/// Sends and receives at a time.
fn pass(
    mut export: vpmm::Export<'_>,
    to: &Rig,
    access: Access,
) -> (Result<(), Error>, Result<Imported, Error>) {
    let (here, there) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || Imported::receive(&to.device, &there, access));
        let sent = export.send(&here);
        (sent, receiver.join().unwrap())
    })
}

#[test]
fn an_import_is_counted_read_only_and_given_back() {
    for (sharing, profile) in [FILES, Sharing::Fabric]
        .into_iter()
        .flat_map(|sharing| Profile::BOTH.map(|profile| (sharing, profile)))
    {
        let [owner, user] = two(|| Simulator::builder().fabric(true));
        let pool = profile.open(&owner.device, Location::Device, sharing).unwrap();
        let stream = owner.stream();
        let ptr = pool.malloc(3 * GRANULE as usize, &stream).unwrap();
        let (sim, before) = (user.sim.as_ref().unwrap(), user.sim.as_ref().unwrap().leaks());
        let (sent, memory) = pass(pool.export(ptr).unwrap(), &user, Access::Read);
        sent.unwrap();
        let memory = memory.unwrap();
        assert_eq!((memory.access(), memory.bytes()), (Access::Read, 3 * GRANULE));
        let stats = memory.stats();
        assert_eq!(stats.mapped_bytes, pool.stats().exported_bytes);
        assert_eq!((stats.reservation_count, stats.hole_bytes), (1, 0));
        let here = memory.ptr().unwrap().address();
        assert_eq!(memory.translate(ptr.address()).unwrap().address(), here);
        let write = user.driver.raw().cuMemsetD32Async.unwrap();
        let on = user.stream();
        // SAFETY: a live stream; the address is the driver's to judge.
        let code = unsafe { write(here, 1, 4, on.handle().raw()) };
        assert_eq!(code, CUresult::CUDA_ERROR_INVALID_VALUE, "it is to be read only");
        drop((memory, on));
        assert_eq!(sim.leaks(), before);
        pool.free(ptr, &stream).unwrap();
        pool.validate().unwrap();
    }
}

/// A paged pool with few addresses to a reservation has many of these.
#[test]
fn a_pool_of_many_reservations_is_shared_whole() {
    let [owner, user] = two(Simulator::builder);
    let mut config = vpmm::PagedConfig::default();
    (config.va_size_bytes, config.sharing) = (2 * GRANULE, FILES);
    let pool = Pool::paged(&owner.device, &config).unwrap();
    let stream = owner.stream();
    let grow = |count| -> Vec<_> {
        (0..count).map(|_| pool.malloc(2 * GRANULE as usize, &stream).unwrap()).collect()
    };
    let (here, there) = UnixStream::pair().unwrap();
    let mut export = pool.export_all().unwrap();
    let mut held = grow(70);
    let memory = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| Imported::receive(&user.device, &there, Access::Read));
        export.send(&here).unwrap();
        receiver.join().unwrap().unwrap()
    });
    assert_eq!(memory.stats().reservation_count, 70);
    held.extend(grow(70));
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| memory.receive_more(&there));
        export.send(&here).unwrap();
        receiver.join().unwrap().unwrap();
    });
    assert_eq!((memory.stats().reservation_count, memory.stats().extent_count), (140, 280));
    let mut places: Vec<u64> = Vec::new();
    for ptr in &held {
        let at = |offset| memory.translate(ptr.address() + offset).unwrap().address();
        assert_eq!(at(2 * GRANULE - 1), at(0) + 2 * GRANULE - 1, "contiguous here, too");
        places.push(at(0));
    }
    places.sort_unstable();
    assert!(places.windows(2).all(|pair| pair[0] + 2 * GRANULE <= pair[1]), "each its own");
    drop(memory);
    held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
}

/// Addresses come as the driver has them, later ones below earlier ones perhaps; a message has them in order.
#[test]
fn a_pool_whose_later_addresses_are_lower_is_shared_whole() {
    let [owner, user] = two(Simulator::builder);
    let mut config = vpmm::PagedConfig::default();
    (config.va_size_bytes, config.sharing) = (2 * GRANULE, FILES);
    let bytes = config.va_size_bytes as usize;
    let mut low = 0;
    call!(owner.driver, cuMemAddressReserve(&mut low, bytes, 0, 0, 0));
    let pool = Pool::paged(&owner.device, &config).unwrap();
    let stream = owner.stream();
    let first = pool.malloc(bytes, &stream).unwrap();
    call!(owner.driver, cuMemAddressFree(low, bytes));
    let second = pool.malloc(bytes, &stream).unwrap();
    assert!(second.address() < first.address(), "the scene is another");
    let (sent, memory) = pass(pool.export_all().unwrap(), &user, Access::Read);
    sent.unwrap();
    let memory = memory.unwrap();
    assert_eq!(memory.stats().extent_count, 4);
    for ptr in [first, second] {
        assert!(memory.translate(ptr.address()).is_some());
        pool.free(ptr, &stream).unwrap();
    }
}

/// The kernel says who has sent before it gives descriptors, where a program has it do so.
#[test]
fn a_socket_that_tells_who_sends_has_room_for_whole_batches() {
    let [owner, user] = two(Simulator::builder);
    let mut config = vpmm::PagedConfig::default();
    config.sharing = FILES;
    let pool = Pool::paged(&owner.device, &config).unwrap();
    let stream = owner.stream();
    let ptr = pool.malloc(200 * GRANULE as usize, &stream).unwrap();
    let (here, there) = UnixStream::pair().unwrap();
    rustix::net::sockopt::set_socket_passcred(&there, true).unwrap();
    let mut export = pool.export(ptr).unwrap();
    let (sent, memory) = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| Imported::receive(&user.device, &there, Access::Read));
        (export.send(&here), receiver.join().unwrap())
    });
    assert_eq!(memory.unwrap().stats().extent_count, 200);
    sent.unwrap();
    pool.free(ptr, &stream).unwrap();
}

/// Nobody can wait for a device while a stream captures: what was imported is unmapped later, by the next wait for
/// the device, and not before. A capture that the library knows of is not harmed by that.
#[test]
fn an_import_ends_while_a_stream_captures() {
    for (by_another, is_known) in [(false, true), (true, true), (false, false)] {
        let [owner, user] = two(Simulator::builder);
        let pool = Profile::Default.open(&owner.device, Location::Device, FILES).unwrap();
        let stream = owner.stream();
        let ptr = pool.malloc(3 * GRANULE as usize, &stream).unwrap();
        let (sim, before) = (user.sim.as_ref().unwrap(), user.sim.as_ref().unwrap().leaks());
        let import = || {
            let (sent, memory) = pass(pool.export(ptr).unwrap(), &user, Access::Read);
            sent.unwrap();
            memory.unwrap()
        };
        let (memory, other) = (import(), by_another.then(&import));
        let capturing = user.stream();
        let (unknown, _) = make(&user, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
        let raw = if is_known { capturing.handle().raw() } else { unknown };
        call!(
            user.driver,
            cuStreamBeginCapture_v2(raw, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
        );
        drop(memory);
        if is_known {
            end_capture(&user, raw);
        } else {
            let end = user.driver.raw().cuStreamEndCapture.unwrap();
            // SAFETY: a live stream, and a live pointer.
            let code = unsafe { end(raw, &mut std::ptr::null_mut()) };
            assert_eq!(code, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        capturing.synchronize().unwrap();
        drop(capturing);
        call!(user.driver, cuStreamDestroy_v2(unknown));
        assert_ne!(sim.leaks(), before, "a stream's wait is not the device's");
        match other {
            Some(other) => drop(other),
            None => user.device.synchronize().unwrap(),
        }
        assert_eq!(sim.leaks(), before);
        pool.free(ptr, &stream).unwrap();
    }
}

/// Nor does a wait for another device prove anything, or one that began before the import ended.
#[test]
fn an_import_that_has_ended_waits_for_a_later_wait_for_its_own_device() {
    let owner = Rig::on(Simulator::builder().build().unwrap());
    let user = Rig::on(Simulator::builder().devices(2).build().unwrap());
    let pool = Profile::Default.open(&owner.device, Location::Device, FILES).unwrap();
    let stream = owner.stream();
    let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
    let sim = user.sim.as_ref().unwrap();
    let other = user.driver.device(1).unwrap();
    let before = sim.leaks();
    let [earlier, later] = [(); 2].map(|()| {
        let (sent, memory) = pass(pool.export(ptr).unwrap(), &user, Access::Read);
        sent.unwrap();
        memory.unwrap()
    });
    let both = sim.leaks();
    let (capturing, busy) = (user.stream(), user.stream());
    let end_in_capture = |memory: Imported| {
        let raw = capturing.handle().raw();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        call!(user.driver, cuStreamBeginCapture_v2(raw, mode));
        drop(memory);
        end_capture(&user, raw);
    };
    end_in_capture(earlier);
    assert_eq!(sim.leaks().mappings, both.mappings);
    let spin = sim.spin(busy.handle().raw()).unwrap();
    std::thread::scope(|scope| {
        let calls = user.driver.calls();
        let waiting = scope.spawn(|| user.device.synchronize().unwrap());
        while user.driver.calls().since(&calls).count("cuCtxSynchronize") == 0 {
            std::thread::yield_now();
        }
        end_in_capture(later);
        spin.release();
        waiting.join().unwrap();
    });
    let left = sim.leaks();
    let one = (both.mappings - before.mappings) / 2;
    assert_eq!(left.mappings, before.mappings + one, "that wait had begun before its end");
    other.synchronize().unwrap();
    assert_eq!(sim.leaks().mappings, left.mappings, "another device");
    user.device.synchronize().unwrap();
    assert_eq!(sim.leaks().mappings, before.mappings);
    pool.free(ptr, &stream).unwrap();
}

/// Shared memory stays at its addresses, where the same program without sharing moves it.
#[test]
fn what_was_exported_does_not_move() {
    for profile in Profile::BOTH {
        let [owner, user] = two(Simulator::builder);
        let moved = |export: bool| {
            let watched = shareable(&owner, profile);
            let stream = owner.stream();
            let mut held: Vec<_> = (0..6).map(|_| watched.malloc(2 * GRANULE, &stream)).collect();
            let memory = export.then(|| {
                let (sent, memory) = pass(watched.pool.export_all().unwrap(), &user, Access::Read);
                sent.unwrap();
                memory.unwrap()
            });
            for index in [4, 2, 0] {
                watched.free(held.remove(index), &stream);
            }
            let result = watched.try_malloc(4 * GRANULE, &stream);
            match (&result, export) {
                (Err(error), true) => assert!(error.is_out_of_memory(), "{error}"),
                (Ok(_), false) => {}
                _ => panic!("{profile:?}, exported {export}: {result:?}"),
            }
            held.extend(result.ok());
            let moved = watched.moved();
            held.into_iter().for_each(|held| watched.free(held, &stream));
            watched.assert_intact();
            drop(memory);
            moved
        };
        assert!(moved(false) > 0);
        assert_eq!(moved(true), 0);
    }
}

#[test]
fn what_cannot_be_shared_is_named() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    for profile in Profile::BOTH {
        let private = profile.open(&rig.device, Location::Device, Sharing::None).unwrap();
        let ptr = private.malloc(GRANULE as usize, &stream).unwrap();
        assert!(matches!(private.export(ptr).unwrap_err(), Error::NotShareable { .. }));
        assert!(matches!(private.export_all().unwrap_err(), Error::NotShareable { .. }));
        let pool = profile.open(&rig.device, Location::Device, FILES).unwrap();
        let error = pool.export(ptr).unwrap_err();
        assert!(matches!(error, Error::ForeignPointer { .. }), "{error}");
        private.free(ptr, &stream).unwrap();
        let ptr = pool.malloc(2 * GRANULE as usize, &stream).unwrap();
        let inside = vpmm::DevicePtr::from_address(ptr.address() + GRANULE);
        let error = pool.export(inside).unwrap_err();
        assert!(matches!(error, Error::InteriorPointer { .. }), "{error}");
        pool.free(ptr, &stream).unwrap();
        let error = pool.export(ptr).unwrap_err();
        assert!(matches!(error, Error::DoubleFree { .. }), "{error}");
        assert_eq!(pool.stats().exported_bytes, 0);
    }
    let paged = Profile::Paged.open(&rig.device, Location::Device, FILES).unwrap();
    let small = paged.malloc(100, &stream).unwrap();
    assert!(matches!(paged.export(small).unwrap_err(), Error::NotShareable { .. }));
    paged.free(small, &stream).unwrap();
}

/// A message with the right form and the wrong descriptor, with none, and no message at all.
#[test]
fn wrong_messages_leave_nothing_behind() {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let rig = Rig::simulated(Schedule::Eager);
    let before = rig.sim.as_ref().unwrap().leaks();
    let address = 0x7000_0000_0000_u64;
    let mut message = b"vpmmshr\0\x01\x00\x01\x01".to_vec();
    message.extend([1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    message.extend(GRANULE.to_le_bytes());
    message.extend([7; 16]);
    for word in [address, 512, address, GRANULE] {
        message.extend(word.to_le_bytes());
    }
    let entry: Vec<u8> = [address, GRANULE].into_iter().flat_map(u64::to_le_bytes).collect();
    let receive = |head: &[u8], file: Option<OwnedFd>| {
        let (here, there) = UnixStream::pair().unwrap();
        (&here).write_all(head).unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files: Vec<_> = file.iter().map(AsFd::as_fd).collect();
        if !files.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        }
        let parts = [std::io::IoSlice::new(&entry)];
        sendmsg(&here, &parts, &mut control, SendFlags::empty()).unwrap();
        here.shutdown(std::net::Shutdown::Write).unwrap();
        let error = Imported::receive(&rig.device, &there, Access::Read).unwrap_err();
        let mut answer = [0];
        (&here).read_exact(&mut answer).unwrap();
        assert_eq!(answer, [2], "the sender is told: {error}");
        error
    };
    let null = || Some(std::fs::File::open("/dev/null").unwrap().into());
    let error = receive(&message, null());
    let named = matches!(error, Error::ImportRefused { code: CUresult::CUDA_ERROR_UNKNOWN });
    assert!(named, "{error}");
    let error = receive(&message, None);
    assert!(matches!(error, Error::BadMessage { .. }), "{error}");
    let error = receive(&[0x55; 64], null());
    assert!(matches!(error, Error::BadMessage { .. }), "{error}");
    let error = receive(&message[..20], None);
    assert!(matches!(error, Error::Socket(_)), "{error}");
    let (_here, there) = UnixStream::pair().unwrap();
    let error = Imported::receive(&rig.device, &there, Access::None).unwrap_err();
    assert!(matches!(error, Error::Config { name: "access", .. }), "{error}");
    assert_eq!(rig.sim.as_ref().unwrap().leaks(), before);
}

/// A message as it goes over the socket; what differs from a good one is a test's.
#[derive(Clone)]
struct Message {
    kind: u8,
    handles: u8,
    granule: u64,
    pool: u8,
    block: (u64, u64),
    window: (u64, u64),
    extents: Vec<(u64, u64)>,
}

impl Message {
    /// Of a whole pool that has made nothing yet.
    fn of_pool() -> Self {
        let window = (0x7000_0000_0000, 4 * GRANULE);
        let (block, extents) = ((0, 0), Vec::new());
        Self { kind: 2, handles: 1, granule: GRANULE, pool: 7, block, window, extents }
    }

    fn head(&self) -> Vec<u8> {
        let mut bytes = b"vpmmshr\0\x01\x00".to_vec();
        bytes.extend([self.kind, self.handles]);
        bytes.extend([1, 0, 0, 0]);
        bytes.extend((self.extents.len() as u32).to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.granule.to_le_bytes());
        bytes.extend([self.pool; 16]);
        for word in [self.block.0, self.block.1, self.window.0, self.window.1] {
            bytes.extend(word.to_le_bytes());
        }
        bytes
    }

    /// Puts all of it into a socket, with a descriptor of new memory for each extent.
    fn put(&self, rig: &Rig, mut socket: &UnixStream) {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        socket.write_all(&self.head()).unwrap();
        let files: Vec<OwnedFd> =
            self.extents.iter().map(|(_, bytes)| memory_of(rig, *bytes)).collect();
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let words = self.extents.iter().flat_map(|(start, bytes)| [*start, *bytes]);
        let entries: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        if !files.is_empty() {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
            let parts = [std::io::IoSlice::new(&entries)];
            sendmsg(socket, &parts, &mut control, SendFlags::empty()).unwrap();
        }
    }

    fn receive(&self, rig: &Rig) -> Result<Imported, Error> {
        let (here, there) = UnixStream::pair().unwrap();
        self.put(rig, &here);
        Imported::receive(&rig.device, &there, Access::Read)
    }

    fn receive_more(&self, rig: &Rig, memory: &Imported) -> Result<(), Error> {
        let (here, there) = UnixStream::pair().unwrap();
        self.put(rig, &here);
        memory.receive_more(&there)
    }
}

/// Memory that can be shared, by a descriptor alone.
fn memory_of(rig: &Rig, bytes: u64) -> OwnedFd {
    use std::os::fd::FromRawFd;
    let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let properties = CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: kind,
        location: CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 },
        ..Default::default()
    };
    let (mut handle, mut file) = (0, -1);
    call!(rig.driver, cuMemCreate(&mut handle, bytes as usize, &properties, 0));
    call!(rig.driver, cuMemExportToShareableHandle((&raw mut file).cast(), handle, kind, 0));
    call!(rig.driver, cuMemRelease(handle));
    // SAFETY: the driver made it just now, for its caller to close.
    unsafe { OwnedFd::from_raw_fd(file) }
}

/// More of a pool is taken from the export that the import is of, as that was announced, and each extent once.
#[test]
fn what_is_added_to_an_import_is_of_the_same_pool() {
    let rig = Rig::simulated(Schedule::Eager);
    let before = rig.sim.as_ref().unwrap().leaks();
    let nothing = Message::of_pool();
    let memory = nothing.receive(&rig).unwrap();
    let (start, _) = nothing.window;
    let first = Message { extents: vec![(start + GRANULE, GRANULE)], ..nothing.clone() };
    nothing.receive_more(&rig, &memory).unwrap();
    first.receive_more(&rig, &memory).unwrap();
    let is = |there| memory.translate(there).is_some();
    let last = start + 2 * GRANULE - 1;
    assert_eq!([start + GRANULE - 1, start + GRANULE, last, last + 1].map(is), {
        [false, true, true, false]
    });
    let stats = memory.stats();
    assert_eq!((stats.mapped_bytes, stats.hole_bytes), (GRANULE, 3 * GRANULE));
    let mapped = rig.sim.as_ref().unwrap().leaks();
    let (block, extents) = ((start, GRANULE), vec![(start, GRANULE)]);
    for wrong in [
        Message { pool: 8, ..nothing.clone() },
        Message { granule: 2 * GRANULE, ..nothing.clone() },
        Message { handles: 2, ..nothing.clone() },
        Message { kind: 1, block, extents, ..nothing.clone() },
        Message { window: (start, 3 * GRANULE), ..nothing.clone() },
        first.clone(),
        Message { extents: vec![(start, 2 * GRANULE)], ..nothing.clone() },
    ] {
        let error = wrong.receive_more(&rig, &memory).unwrap_err();
        assert!(matches!(error, Error::BadMessage { .. }), "{error}");
        assert_eq!(rig.sim.as_ref().unwrap().leaks(), mapped);
    }
    assert_eq!(memory.stats(), stats);
    drop(memory);
    assert_eq!(rig.sim.as_ref().unwrap().leaks(), before);
}

/// Nothing is added to an import of one allocation, and that has all its memory.
#[test]
fn an_allocation_is_imported_whole() {
    let rig = Rig::simulated(Schedule::Eager);
    let before = rig.sim.as_ref().unwrap().leaks();
    let (start, _) = Message::of_pool().window;
    let extents = vec![(start, GRANULE), (start + GRANULE, GRANULE)];
    let whole = Message {
        kind: 1,
        block: (start + 512, 2 * GRANULE - 512),
        window: (start, 2 * GRANULE),
        extents,
        ..Message::of_pool()
    };
    let memory = whole.receive(&rig).unwrap();
    assert_eq!(memory.bytes(), 2 * GRANULE - 512);
    let beside = (start + 4 * GRANULE, GRANULE);
    let pool = Message { window: beside, extents: vec![beside], ..Message::of_pool() };
    let error = pool.receive_more(&rig, &memory).unwrap_err();
    assert!(matches!(error, Error::BadMessage { .. }), "{error}");
    drop(memory);
    let short = Message { extents: whole.extents[..1].to_vec(), ..whole };
    let error = short.receive(&rig).unwrap_err();
    assert!(matches!(error, Error::BadMessage { .. }), "{error}");
    assert_eq!(rig.sim.as_ref().unwrap().leaks(), before);
}

/// A device without memory refuses nothing that it was sent.
#[test]
fn an_import_that_finds_no_memory_says_so() {
    let rig = Rig::simulated(Schedule::Eager);
    let (start, _) = Message::of_pool().window;
    let message = Message { extents: vec![(start, GRANULE)], ..Message::of_pool() };
    let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    rig.sim.as_ref().unwrap().fail_nth("cuMemImportFromShareableHandle", 1, code);
    let error = message.receive(&rig).unwrap_err();
    assert!(matches!(error, Error::Driver { code: named, .. } if named == code), "{error}");
}

/// The device of an import has to reach memory of another one, and reaches that of the host.
#[test]
fn memory_that_the_device_does_not_reach_is_named() {
    let sim = Simulator::builder().devices(2).peer_access(false).build().unwrap();
    let driver = vpmm::Driver::new(sim.driver()).unwrap();
    let [near, far] = [0, 1].map(|ordinal| driver.device(ordinal).unwrap());
    let stream = near.stream().unwrap();
    for (location, is_reached) in [(Location::Device, false), (Location::HostNuma(0), true)] {
        for profile in Profile::BOTH {
            let pool = profile.open(&near, location, FILES).unwrap();
            let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
            let before = sim.leaks();
            let (here, there) = UnixStream::pair().unwrap();
            let memory = std::thread::scope(|scope| {
                let receiver = scope.spawn(|| Imported::receive(&far, &there, Access::Read));
                let sent = pool.export(ptr).unwrap().send(&here);
                assert_eq!(sent.is_ok(), is_reached, "{sent:?}");
                receiver.join().unwrap()
            });
            match memory.map(drop) {
                Ok(()) => assert!(is_reached, "{location:?}"),
                Err(Error::PeerUnsupported { device: 0, peer: 1 }) => assert!(!is_reached),
                Err(error) => panic!("{location:?}: {error}"),
            }
            assert_eq!(sim.leaks(), before);
            pool.free(ptr, &stream).unwrap();
        }
    }
}

#[test]
fn an_answer_that_is_none_is_named() {
    let rig = Rig::simulated(Schedule::Eager);
    let pool = shareable(&rig, Profile::Default);
    let mut export = pool.pool.export_all().unwrap();
    let (mut here, there) = UnixStream::pair().unwrap();
    here.write_all(&[9]).unwrap();
    let error = export.send(&there).unwrap_err();
    assert!(matches!(error, Error::BadMessage { .. }), "{error}");
}

/// One that waits for its sender has others wait that would add to the same import.
#[test]
fn messages_are_taken_one_at_a_time() {
    let rig = Rig::simulated(Schedule::Eager);
    let nothing = Message::of_pool();
    let memory = nothing.receive(&rig).unwrap();
    let (mut here, there) = UnixStream::pair().unwrap();
    let head = nothing.head();
    here.write_all(&head[..20]).unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| memory.receive_more(&there));
        while unread(&there) > 0 {
            std::thread::yield_now();
        }
        let second = scope.spawn(|| nothing.receive_more(&rig, &memory));
        std::thread::sleep(std::time::Duration::from_millis(30));
        let waits = !second.is_finished();
        let known = memory.stats().reservation_count;
        here.write_all(&head[20..]).unwrap();
        first.join().unwrap().unwrap();
        second.join().unwrap().unwrap();
        assert!(waits);
        assert_eq!(known, 1, "who asks does not wait");
    });
}

/// Bytes that wait in a socket.
fn unread(socket: &UnixStream) -> i32 {
    use std::os::fd::AsRawFd;
    let mut bytes = 0;
    // SAFETY: a live descriptor, and a pointer to a live int, as this request takes it.
    let code = unsafe { libc::ioctl(socket.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    assert_eq!(code, 0);
    bytes
}

/// A process that may have no more descriptors is told so, and not that the message is wrong.
#[test]
fn an_import_without_descriptors_says_so() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if let Some((rig, socket)) = started() {
        let limit = getrlimit(Resource::Nofile);
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        setrlimit(Resource::Nofile, Rlimit { current: Some(open + 4), ..limit }).unwrap();
        let error = Imported::receive(&rig.device, &socket, Access::Read).unwrap_err();
        setrlimit(Resource::Nofile, limit).unwrap();
        let text = error.to_string();
        let Error::Socket(error) = error else { panic!("{text}") };
        let short = rustix::io::Errno::MFILE.raw_os_error();
        assert_eq!(error.raw_os_error(), Some(short), "{text}");
        return rig.assert_clean();
    }
    let rig = Rig::simulated(Schedule::Eager);
    let (mut child, socket) = start("sharing::an_import_without_descriptors_says_so", &rig);
    let watched = shareable(&rig, Profile::Paged);
    let stream = rig.stream();
    let held = watched.malloc(LIMIT * GRANULE, &stream);
    let refused = watched.pool.export(held.ptr).unwrap().send(&socket);
    assert!(matches!(refused, Err(Error::PeerRefused)), "{refused:?}");
    assert!(child.wait().unwrap().success());
    watched.free(held, &stream);
    watched.assert_intact();
}

/// The socket's other end is gone before anything was said, at either end.
#[test]
fn a_closed_socket_is_named() {
    for profile in Profile::BOTH {
        let rig = Rig::simulated(Schedule::Eager);
        let watched = shareable(&rig, profile);
        let stream = rig.stream();
        let held = watched.malloc(3 * GRANULE, &stream);
        let before = rig.sim.as_ref().unwrap().leaks();
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        for mut export in
            [watched.pool.export(held.ptr).unwrap(), watched.pool.export_all().unwrap()]
        {
            let error = export.send(&here).unwrap_err();
            assert!(matches!(error, Error::Socket(_)), "{error}");
        }
        let error = Imported::receive(&rig.device, &here, Access::Read).unwrap_err();
        assert!(matches!(error, Error::Socket(_)), "{error}");
        assert_eq!(rig.sim.as_ref().unwrap().leaks(), before);
        watched.free(held, &stream);
        watched.assert_intact();
    }
}

mod export {
    use std::ffi::{c_int, c_void};

    use crate::support::changed::{nothing, replaced};

    /// As a driver may make them, of which that is said nowhere: programs that are started have it as well.
    unsafe fn inherit(out: *mut c_void) {
        // SAFETY: the caller's pointer is to a descriptor that was made just now.
        unsafe { libc::fcntl(*out.cast::<c_int>(), libc::F_SETFD, 0) };
    }

    replaced!(
        cuMemExportToShareableHandle(
            out: *mut c_void,
            handle: CUmemGenericAllocationHandle,
            kind: CUmemAllocationHandleType,
            flags: u64
        ),
        nothing(),
        // SAFETY: the driver has put a descriptor there, as no call fails here.
        unsafe { inherit(out) }
    );
}

/// Descriptors of this process that programs which it starts have, too, and that are of a simulator's memory.
fn inherited() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let is_memory = |number: &i32| {
        let link = std::fs::read_link(format!("/proc/self/fd/{number}"));
        link.is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:"))
    };
    let numbers = files.filter_map(|file| file.unwrap().file_name().to_str()?.parse().ok());
    // SAFETY: takes no pointer.
    numbers
        .filter(is_memory)
        .filter(|number| unsafe { libc::fcntl(*number, libc::F_GETFD) } == 0)
        .count()
}

/// Whoever does not answer has the sender wait with the descriptors. A program that another thread starts
/// meanwhile would keep the memory for as long as it runs.
#[test]
fn programs_that_are_started_have_no_descriptors_of_what_is_sent() {
    let sim = Simulator::builder().build().unwrap();
    let rig = Rig::with(changed(&sim, export::put), sim.clone());
    for profile in Profile::BOTH {
        let watched = shareable(&rig, profile);
        let stream = rig.stream();
        let held = watched.malloc(GRANULE, &stream);
        let (mut here, there) = UnixStream::pair().unwrap();
        let found = std::thread::scope(|scope| {
            let sending = scope.spawn(|| watched.pool.export(held.ptr).unwrap().send(&there));
            // The header, a window, an extent.
            here.read_exact(&mut [0; 64 + 16 + 16]).unwrap();
            let found = inherited();
            here.write_all(&[1]).unwrap();
            sending.join().unwrap().unwrap();
            found
        });
        assert_eq!(found, 0, "{profile:?}");
        watched.free(held, &stream);
        watched.assert_intact();
    }
}

/// The owner's driver will not export the second handle: the other process keeps nothing.
#[test]
fn a_failed_export_leaves_nothing_behind() {
    let [owner, user] = two(Simulator::builder);
    let pool = Profile::Paged.open(&owner.device, Location::Device, FILES).unwrap();
    let stream = owner.stream();
    let ptr = pool.malloc(3 * GRANULE as usize, &stream).unwrap();
    let before = user.sim.as_ref().unwrap().leaks();
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    owner.sim.as_ref().unwrap().fail_nth("cuMemExportToShareableHandle", 2, code);
    let (here, there) = UnixStream::pair().unwrap();
    let result = std::thread::scope(|scope| {
        let device = &user.device;
        let receiver = scope.spawn(move || Imported::receive(device, &there, Access::Read));
        let error = pool.export(ptr).unwrap().send(&here).unwrap_err();
        assert!(matches!(error, Error::Driver { code: named, .. } if named == code), "{error}");
        // The socket is of no further use.
        drop(here);
        receiver.join().unwrap()
    });
    assert!(matches!(result, Err(Error::Socket(_))), "{result:?}");
    assert_eq!(user.sim.as_ref().unwrap().leaks(), before);
    pool.free(ptr, &stream).unwrap();
    pool.validate().unwrap();
}

/// A fault at each call of the importer: nothing stays, the owner is told, and has what it had.
#[test]
fn a_failed_import_leaves_nothing_behind() {
    let mut met = 0;
    for n in 1.. {
        let [owner, user] = two(Simulator::builder);
        let pool: Pool = Profile::Paged.open(&owner.device, Location::Device, FILES).unwrap();
        let stream = owner.stream();
        let ptr = pool.malloc(3 * GRANULE as usize, &stream).unwrap();
        let sim = user.sim.as_ref().unwrap();
        let before = sim.leaks();
        sim.fail_call(n, CUresult::CUDA_ERROR_UNKNOWN);
        let (sent, memory) = pass(pool.export(ptr).unwrap(), &user, Access::ReadWrite);
        sim.clear_faults();
        let failed = memory.is_err();
        // The release of a handle may fail with nobody to tell.
        let released = sim.leaks().handles > before.handles;
        if failed {
            assert!(matches!(sent, Err(Error::PeerRefused | Error::Socket(_))), "{sent:?}");
            assert_eq!(sim.leaks(), before, "call {n}");
            met += 1;
        }
        drop(memory);
        if !released {
            assert_eq!(sim.leaks(), before, "call {n}");
        }
        pool.free(ptr, &stream).unwrap();
        if !failed && n > 20 {
            break;
        }
    }
    assert!(met >= 8, "only {met} faults were met");
}

/// The importer's driver unmaps nothing where an import fails or ends: what comes next finds the addresses free,
/// and nothing stays beyond the next wait for the device.
#[test]
fn what_an_import_could_not_unmap_is_unmapped_later() {
    let [owner, user] = two(Simulator::builder);
    let pool = Profile::Paged.open(&owner.device, Location::Device, FILES).unwrap();
    let stream = owner.stream();
    let malloc = || pool.malloc(GRANULE as usize, &stream).unwrap();
    let (sim, code) = (user.sim.as_ref().unwrap(), CUresult::CUDA_ERROR_UNKNOWN);
    let before = sim.leaks();
    let first = malloc();
    let send = || pass(pool.export(first).unwrap(), &user, Access::Read);
    // By the failed call, and by the end of what it had begun.
    sim.fail_nth("cuMemSetAccess", 1, code);
    (1..3).for_each(|n| sim.fail_nth("cuMemUnmap", n, code));
    assert!(matches!(send(), (Err(Error::PeerRefused), Err(Error::Driver { .. }))));
    assert_ne!(sim.leaks(), before);
    user.device.synchronize().unwrap();
    assert_eq!(sim.leaks(), before);
    // At its end, and by a wait after that.
    let (sent, memory) = send();
    sent.unwrap();
    (1..3).for_each(|n| sim.fail_nth("cuMemUnmap", n, code));
    drop(memory);
    user.device.synchronize().unwrap();
    assert_ne!(sim.leaks(), before);
    user.device.synchronize().unwrap();
    assert_eq!(sim.leaks(), before);
    // In the window of a whole pool that grows.
    let mut export = pool.export_all().unwrap();
    let (here, there) = UnixStream::pair().unwrap();
    let memory = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| Imported::receive(&user.device, &there, Access::Read));
        export.send(&here).unwrap();
        receiver.join().unwrap().unwrap()
    });
    let second = malloc();
    let mut send_more = || {
        let (here, there) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| memory.receive_more(&there));
            (export.send(&here), receiver.join().unwrap())
        })
    };
    sim.fail_nth("cuMemSetAccess", 1, code);
    sim.fail_nth("cuMemUnmap", 1, code);
    assert!(matches!(send_more(), (Err(Error::PeerRefused), Err(Error::Driver { .. }))));
    assert!(matches!(send_more(), (Ok(()), Ok(()))));
    assert!(memory.translate(second.address()).is_some());
    drop(memory);
    assert_eq!(sim.leaks(), before);
    for ptr in [first, second] {
        pool.free(ptr, &stream).unwrap();
    }
    pool.validate().unwrap();
}

/// What an import holds is another process's memory, and is not to stay when its own context has failed or was reset.
#[test]
fn an_import_behind_a_lost_context_holds_nothing() {
    for reset in [false, true] {
        let [owner, user] = two(Simulator::builder);
        let pool = Profile::Default.open(&owner.device, Location::Device, FILES).unwrap();
        let stream = owner.stream();
        let ptr = pool.malloc(3 * GRANULE as usize, &stream).unwrap();
        let sim = user.sim.as_ref().unwrap();
        let before = sim.leaks();
        let (sent, memory) = pass(pool.export(ptr).unwrap(), &user, Access::Read);
        sent.unwrap();
        assert_ne!(sim.leaks(), before);
        if reset {
            call!(user.driver, cuDevicePrimaryCtxReset_v2(0));
        } else {
            sim.lose_device(0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        }
        drop(memory.unwrap());
        let after = sim.leaks();
        assert_eq!((after.mappings, after.reservations), (before.mappings, before.reservations));
        pool.free(ptr, &stream).unwrap();
        // Its own objects cannot be ended any more.
        std::mem::forget(user);
    }
}

/// Mappings outlive their context: who goes on with the one that comes after a reset may use them there.
#[test]
fn an_import_of_before_a_reset_is_in_use_by_the_context_after() {
    let [owner, user] = two(Simulator::builder);
    let pool = Profile::Default.open(&owner.device, Location::Device, FILES).unwrap();
    let stream = owner.stream();
    let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
    let (sent, memory) = pass(pool.export(ptr).unwrap(), &user, Access::ReadWrite);
    sent.unwrap();
    let memory = memory.unwrap();
    call!(user.driver, cuDevicePrimaryCtxReset_v2(0));
    let sim = user.sim.as_ref().unwrap();
    let after = user.driver.device(0).unwrap();
    let user_stream = after.stream().unwrap();
    let address = memory.ptr().unwrap().address();
    let spin = sim.spin(user_stream.handle().raw()).unwrap();
    sim.enqueue(user_stream.handle().raw(), "uses the import", move |memory| {
        memory.write(address, &[1; 64])
    })
    .unwrap();
    std::thread::scope(|scope| {
        let ends = scope.spawn(|| drop(memory));
        std::thread::sleep(std::time::Duration::from_millis(50));
        spin.release();
        ends.join().unwrap();
    });
    user_stream.synchronize().unwrap();
    sim.assert_clean();
    pool.free(ptr, &stream).unwrap();
    drop((user_stream, after));
    // Its own objects cannot be ended any more.
    std::mem::forget(user);
}

/// Of a message that fails the addresses go with what the driver would not unmap there, whatever comes next.
#[test]
fn the_window_of_a_message_that_failed_goes_when_it_is_empty() {
    let [owner, user] = two(Simulator::builder);
    let mut config = vpmm::PagedConfig::default();
    (config.va_size_bytes, config.sharing) = (2 * GRANULE, FILES);
    let pool = Pool::paged(&owner.device, &config).unwrap();
    let stream = owner.stream();
    let malloc = || pool.malloc(2 * GRANULE as usize, &stream).unwrap();
    let (sim, code) = (user.sim.as_ref().unwrap(), CUresult::CUDA_ERROR_UNKNOWN);
    let nothing = sim.leaks();
    let first = malloc();
    let (here, there) = UnixStream::pair().unwrap();
    let mut export = pool.export_all().unwrap();
    let memory = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| Imported::receive(&user.device, &there, Access::Read));
        export.send(&here).unwrap();
        receiver.join().unwrap().unwrap()
    });
    let second = malloc();
    let mut send_more = |memory: &Imported| {
        let (here, there) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| memory.receive_more(&there));
            (export.send(&here), receiver.join().unwrap())
        })
    };
    let before = (sim.leaks(), memory.stats());
    sim.fail_nth("cuMemSetAccess", 1, code);
    sim.fail_nth("cuMemUnmap", 1, code);
    assert!(matches!(send_more(&memory), (Err(Error::PeerRefused), Err(Error::Driver { .. }))));
    assert_eq!(memory.stats().reservation_count, 2);
    sim.fail_nth("cuMemImportFromShareableHandle", 1, code);
    assert!(matches!(send_more(&memory), (Err(Error::PeerRefused), Err(_))));
    assert_eq!((sim.leaks(), memory.stats()), before);
    assert!(matches!(send_more(&memory), (Ok(()), Ok(()))));
    assert!(memory.translate(second.address()).is_some());
    // Or with the import.
    let third = malloc();
    sim.fail_nth("cuMemSetAccess", 1, code);
    sim.fail_nth("cuMemUnmap", 1, code);
    assert!(matches!(send_more(&memory), (Err(Error::PeerRefused), Err(Error::Driver { .. }))));
    drop(memory);
    assert_eq!(sim.leaks(), nothing);
    [first, second, third].into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
}
