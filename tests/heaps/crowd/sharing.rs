//! What the threads share with another process, and with the pool's other device: exports and imports.

use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::atomic::Ordering;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::{Access, Error, Export, Imported, Stream};

use super::{Crowd, Home, MOST, Member, TAGS, reach};
use crate::graph::{self, RELAXED};
use crate::rig::GRANULE;
use crate::support::Rig;
use crate::support::chance::{Chances, FAULT, chance, failing, with_faults};
use crate::support::changed::changed;

const REFUSED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;

failing! {
    put_failing_abroad:
    import: cuMemImportFromShareableHandle(
        handle: *mut CUmemGenericAllocationHandle,
        shared: *mut std::ffi::c_void,
        kind: CUmemAllocationHandleType
    );
    map: cuMemMap(
        address: CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: u64
    );
    access: cuMemSetAccess(
        address: CUdeviceptr,
        bytes: usize,
        access: *const CUmemAccessDesc,
        count: usize
    );
    unmap: cuMemUnmap(address: CUdeviceptr, bytes: usize);
}

/// The machine as another process has it.
pub(super) fn abroad(schedule: Schedule, seed: u64) -> Rig {
    let sim = Simulator::builder()
        .devices(2)
        .schedule(schedule)
        .seed(seed)
        .memory_bytes(MOST * GRANULE)
        .fabric(true)
        .build()
        .expect("a simulator");
    Rig::with(changed(&sim, put_failing_abroad), sim)
}

/// An allocation of a thread's, imported.
struct Import {
    memory: Imported,
    /// Which allocation it was.
    seed: u64,
    is_abroad: bool,
}

/// What a thread shares.
#[derive(Default)]
pub(super) struct Shares<'a> {
    imports: Vec<Import>,
    /// The main heap.
    whole: Option<(Export<'a>, Imported)>,
}

/// Sends, and receives in a thread of its own.
fn pass<T: Send>(
    export: &mut Export<'_>,
    receive: impl FnOnce(&UnixStream) -> Result<T, Error> + Send,
) -> (Result<(), Error>, Result<T, Error>) {
    let (here, there) = UnixStream::pair().expect("a socket");
    let chances = Chances::of_this_thread();
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || {
            chances.take_over();
            receive(&there)
        });
        let sent = export.send(&here);
        // The other end waits for more, where that failed.
        drop(here);
        (sent, receiver.join().expect("no panic"))
    })
}

fn finish(looking: Option<Stream>) {
    if let Some(stream) = looking {
        stream.synchronize().expect("the stream finishes");
    }
}

impl Crowd<'_> {
    /// Where driver calls fail a second attempt is made, in which none does.
    fn pass<T: Send>(
        &self,
        export: &mut Export<'_>,
        mut receive: impl FnMut(&UnixStream) -> Result<T, Error> + Send,
    ) -> T {
        if self.is_faulty && chance(2) {
            match with_faults(20, || pass(export, &mut receive)) {
                (Ok(()), Ok(received)) => return received,
                (sent, received) => {
                    let by_fault = |error: &Error| {
                        matches!(
                            error,
                            Error::Driver { code: FAULT, .. }
                                | Error::ImportRefused { code: FAULT }
                        )
                    };
                    let (sent, received) = (sent.expect_err("one end failed"), received.err());
                    let received = received.expect("one end failed");
                    assert!(by_fault(&sent) != by_fault(&received), "{sent}, {received}");
                    reach("faults met in sharing");
                }
            }
        }
        let (sent, received) = pass(export, receive);
        sent.expect("sent");
        received.expect("received")
    }
}

impl<'a> Member<'a> {
    /// Shares an allocation or the whole pool, looks at what is shared, or gives an import back.
    pub(super) fn share(&mut self) {
        let Some(abroad) = self.crowd.abroad else { return };
        match self.below(8) {
            0..3 => self.share_one(abroad),
            3 => self.share_all(abroad),
            4..6 => self.look(abroad),
            6 if !self.shares.imports.is_empty() => self.give_back(abroad),
            7 => self.end_beside_a_capture(abroad),
            _ => match abroad.device.synchronize() {
                // Beside another thread's capture.
                Ok(()) | Err(Error::Driver { code: REFUSED, .. }) => {}
                Err(error) => panic!("{error}"),
            },
        }
    }

    fn share_one(&mut self, abroad: &Rig) {
        let crowd = self.crowd;
        let Some(at) = self.pick() else { return };
        let (is_abroad, access) =
            (self.below(3) > 0, [Access::Read, Access::ReadWrite][self.below(2) as usize]);
        let block = &self.live[at];
        let sleeper = crowd.sleeper(block.home);
        let tagged = match block.home {
            Home::Tag(tag, _) => Some(crowd.pool.tagged(TAGS[tag]).expect("it is there")),
            _ => None,
        };
        let export = match &tagged {
            Some(tagged) => tagged.export(block.ptr),
            None => crowd.pool.export(block.ptr),
        };
        let mut export = match export {
            Ok(export) => export,
            Err(Error::Asleep) if sleeper.is_some_and(|sleeper| sleeper.is_asleep) => return,
            // A small one of the paged profile's.
            Err(Error::NotShareable { .. }) if block.bytes < GRANULE => return,
            Err(error) => panic!("{:?}: {error}", block.home),
        };
        if let Some(sleeper) = &sleeper {
            assert!(!sleeper.is_asleep);
            sleeper.is_exported.store(true, Ordering::Relaxed);
        }
        let device = if is_abroad { &abroad.device } else { &crowd.peer.device };
        let memory = crowd.pass(&mut export, |socket| Imported::receive(device, socket, access));
        drop(export);
        assert!(memory.bytes() >= block.bytes);
        drop(sleeper);
        self.shares.imports.push(Import { memory, seed: block.seed, is_abroad });
        reach(if is_abroad { "allocations shared" } else { "allocations shared with the peer" });
        let last = self.shares.imports.len() - 1;
        let looking = self.look_at(last, at, abroad);
        finish(looking);
    }

    /// Ends an import, which waits for whatever still looks at it.
    fn give_back(&mut self, abroad: &Rig) {
        let import = self.below(self.shares.imports.len() as u64) as usize;
        let seed = self.shares.imports[import].seed;
        let at = self.live.iter().position(|block| block.seed == seed);
        let looking = at.and_then(|at| self.look_at(import, at, abroad));
        drop(self.shares.imports.swap_remove(import));
        // Not where a capture is in the way.
        finish(looking);
        reach("imports given back");
    }

    /// Looks at an import of something that is still allocated.
    fn look(&mut self, abroad: &Rig) {
        let imports = self.shares.imports.iter().enumerate();
        let mut both = imports.filter_map(|(at, import)| {
            Some((at, self.live.iter().position(|block| block.seed == import.seed)?))
        });
        if let Some((import, block)) = both.next_back() {
            drop(both);
            let looking = self.look_at(import, block, abroad);
            finish(looking);
            reach("further looks at imports");
        }
    }

    /// Looks at what was imported of an allocation, where that is known, and writes there where it may: on a
    /// stream that is to finish before the owner goes on.
    fn look_at(&mut self, import: usize, at: usize, abroad: &Rig) -> Option<Stream> {
        let crowd = self.crowd;
        let seed = crowd.seeds.fetch_add(1 << 40, Ordering::Relaxed);
        let block = &mut self.live[at];
        let sleeper = crowd.sleeper(block.home);
        if sleeper.as_ref().is_some_and(|sleeper| {
            sleeper.is_asleep
                || !matches!(block.home, Home::Tag(_, losses) if losses == sleeper.losses)
        }) {
            return None;
        }
        block.of.synchronize().expect("the stream finishes");
        if let Some(woken_on) = sleeper.as_ref().and_then(|sleeper| sleeper.woken_on.as_ref()) {
            woken_on.synchronize().expect("the stream finishes");
        }
        let import = &mut self.shares.imports[import];
        let rig = if import.is_abroad { abroad } else { crowd.peer };
        let stream = rig.stream();
        let here = import.memory.ptr().expect("one allocation").address();
        rig.check(here, block.bytes, block.seed, stream.handle());
        if import.memory.access() == Access::ReadWrite && !block.is_used && chance(2) {
            (block.seed, import.seed) = (seed, seed);
            rig.fill(here, block.bytes, seed, stream.handle());
            reach("writes to imports");
        }
        Some(stream)
    }

    fn share_all(&mut self, abroad: &Rig) {
        let crowd = self.crowd;
        match self.shares.whole.take() {
            Some(_) if self.below(4) == 0 => return reach("whole pools given back"),
            Some((mut export, memory)) => {
                crowd.pass(&mut export, |socket| memory.receive_more(socket));
                self.shares.whole = Some((export, memory));
                reach("whole pools shared further");
            }
            None => {
                let mut export = crowd.pool.export_all().expect("an export");
                let receive = |socket: &_| Imported::receive(&abroad.device, socket, Access::Read);
                let memory = crowd.pass(&mut export, receive);
                self.shares.whole = Some((export, memory));
                reach("whole pools shared");
            }
        }
        let stream = abroad.stream();
        let (_, memory) = self.shares.whole.as_ref().expect("shared above");
        for block in &self.live {
            let start = block.ptr.address();
            let Some(here) = memory.translate(start) else {
                let is_small = block.bytes < GRANULE && crowd.pool.export(block.ptr).is_err();
                assert!(block.home != Home::Main || is_small, "{start:#x} +{:#x}", block.bytes);
                continue;
            };
            assert_eq!(block.home, Home::Main);
            let last = memory.translate(start + block.bytes - 1).expect("all of it");
            assert_eq!(last.address() - here.address(), block.bytes - 1);
            block.of.synchronize().expect("the stream finishes");
            abroad.check(here.address(), block.bytes, block.seed, stream.handle());
        }
        stream.synchronize().expect("the stream finishes");
    }

    /// The other process's device cannot be waited for then: the memory goes later.
    fn end_beside_a_capture(&mut self, abroad: &Rig) {
        let stream = abroad.stream();
        graph::begin(abroad, &stream, RELAXED);
        drop(self.shares.imports.pop());
        let end = abroad.driver.raw().cuStreamEndCapture.expect("a function");
        let mut graph = ptr::null_mut();
        // SAFETY: a live stream, and a live pointer.
        let code = unsafe { end(stream.handle().raw(), &mut graph) };
        // By whatever wait for the device, another thread's too.
        if code == CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED {
            return reach("captures that an import's end has ended");
        }
        assert_eq!(code, CUresult::CUDA_SUCCESS);
        crate::support::call!(abroad.driver, cuGraphDestroy(graph));
    }
}
