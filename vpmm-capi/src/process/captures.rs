//! Memory of graphs, as frameworks ask for it: by the number of a pool, and a question whether a
//! stream's requests are the pool's.
//!
//! ```text
//! begin(7, filter)       the pool with number 7 is made, or used once more
//!   request on a stream  the filters are asked, one at a time; the first yes opens that pool to the
//!                        stream, which is not asked about again
//! end(7)                 closed to all its streams
//! release(7)             given up, when it was released as often as it was begun
//! ```
//!
//! Filters are a framework's, in C++: what one throws goes out through whoever asks. So they are asked
//! without the lock of the books, and where a caller can let it pass, outside of the guard, which would end
//! the process: first `questions`, then `Questions::ask`, then `open_to`.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vpmm_core::{GraphPool, Pool, StreamHandle};

use super::mode::{self, Mode};
use crate::guard::Failure;
use crate::status::vpmm_status;

/// Whether a stream's requests are a pool's. It may unwind, as C++ does.
pub(crate) trait Filter: Send {
    fn takes(&self, stream: *mut c_void) -> bool;
}

/// A filter, which one thread asks at a time.
type Shared = Arc<Mutex<dyn Filter>>;

/// A framework's number of a pool, on a device.
pub(crate) type Id = (u32, (u64, u64));

struct Open {
    id: Id,
    filter: Shared,
    streams: Vec<StreamHandle>,
}

/// What is to be asked about a stream.
pub(crate) struct Questions {
    stream: StreamHandle,
    /// In order. One without a filter has the stream already.
    of: Vec<(Id, Option<Shared>)>,
}

impl Questions {
    /// The pool that the stream's requests are of. Unwinds as the filters do.
    pub(crate) fn ask(&self) -> Option<Id> {
        let takes = |filter: &Shared| {
            filter.lock().unwrap_or_else(PoisonError::into_inner).takes(self.stream.raw().cast())
        };
        let found = self.of.iter().find(|(_, filter)| filter.as_ref().is_none_or(takes));
        found.map(|(id, _)| *id)
    }
}

struct Graphs {
    pool: GraphPool,
    uses: u64,
}

#[derive(Default)]
struct Captures {
    /// In the order in which they have begun.
    open: Vec<Open>,
    graphs: BTreeMap<Id, Graphs>,
}

static CAPTURES: Mutex<Captures> =
    Mutex::new(Captures { open: Vec::new(), graphs: BTreeMap::new() });

fn captures() -> MutexGuard<'static, Captures> {
    CAPTURES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wrong(text: &str) -> Failure {
    Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text)
}

pub(crate) fn begin(
    pool: &Pool,
    number: (u64, u64),
    filter: impl Filter + 'static,
) -> Result<(), Failure> {
    super::check_process()?;
    let id = (pool.device().ordinal(), number);
    let mut captures = captures();
    if captures.open.iter().any(|open| open.id == id) {
        return Err(wrong("the pool has begun, and not ended"));
    }
    if let Some(graphs) = captures.graphs.get_mut(&id) {
        graphs.uses += 1;
    } else {
        let graphs = Graphs { pool: pool.graph_pool()?, uses: 1 };
        captures.graphs.insert(id, graphs);
    }
    let filter = Arc::new(Mutex::new(filter));
    captures.open.push(Open { id, filter, streams: Vec::new() });
    mode::set(Mode::Capturing, true);
    Ok(())
}

pub(crate) fn end(device: u32, number: (u64, u64)) -> Result<(), Failure> {
    super::check_process()?;
    let mut captures = captures();
    let at = captures.open.iter().position(|open| open.id == (device, number));
    let open = captures.open.remove(at.ok_or_else(|| wrong("the pool has not begun"))?);
    mode::set(Mode::Capturing, !captures.open.is_empty());
    let mut result = Ok(());
    if let Some(graphs) = captures.graphs.get(&open.id) {
        // Every stream, whatever comes of one.
        let ended = open.streams.iter().map(|stream| graphs.pool.end(*stream));
        result = ended.fold(Ok(()), Result::and);
    }
    // A filter may free something as it ends.
    drop(captures);
    drop(open);
    Ok(result?)
}

pub(crate) fn release(device: u32, number: (u64, u64)) -> Result<(), Failure> {
    super::check_process()?;
    let mut captures = captures();
    let id = (device, number);
    let graphs = captures.graphs.get_mut(&id).ok_or_else(|| wrong("there is no such pool"))?;
    graphs.uses -= 1;
    if graphs.uses == 0 {
        let graphs = captures.graphs.remove(&id);
        let at = captures.open.iter().position(|open| open.id == id);
        let open = at.map(|at| captures.open.remove(at));
        mode::set(Mode::Capturing, !captures.open.is_empty());
        drop(captures);
        // As in `end`.
        drop((open, graphs));
    }
    Ok(())
}

/// Whether a device has no pool of a graph.
#[cfg(test)]
pub(super) fn is_idle_on(device: u32) -> bool {
    let captures = captures();
    let is_its = |id: &Id| id.0 == device;
    !(captures.open.iter().any(|open| is_its(&open.id)) || captures.graphs.keys().any(is_its))
}

/// What is to be asked about a stream of a device.
pub(super) fn questions(device: u32, stream: StreamHandle) -> Questions {
    let captures = captures();
    let mut of = Vec::new();
    for open in captures.open.iter().filter(|open| open.id.0 == device) {
        let has_it = open.streams.contains(&stream);
        of.push((open.id, (!has_it).then(|| Arc::clone(&open.filter))));
        if has_it {
            break;
        }
    }
    Questions { stream, of }
}

/// Opens the pool that a stream's requests are of to it, if there is one, and it has not ended meanwhile;
/// answers whether there is.
pub(super) fn open_to(stream: StreamHandle, pool: Option<Id>) -> Result<bool, Failure> {
    let Some(id) = pool else { return Ok(false) };
    let mut captures = captures();
    let Captures { open, graphs } = &mut *captures;
    let Some(open) = open.iter_mut().find(|open| open.id == id) else { return Ok(false) };
    if !open.streams.contains(&stream)
        && let Some(graphs) = graphs.get(&open.id)
    {
        graphs.pool.begin(stream)?;
        open.streams.push(stream);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;

    use cuda_sys::types::{CUresult, CUstreamCaptureMode};
    use vpmm_core::{Device, Stream, StreamHandle};

    use super::Filter;
    use crate::process::{self, Asked, Life};
    use crate::status::vpmm_status;

    /// As PyTorch asks: whether the stream captures.
    struct Captures(Device);

    impl Filter for Captures {
        fn takes(&self, stream: *mut c_void) -> bool {
            // SAFETY: the test's streams are alive.
            let handle = unsafe { StreamHandle::from_raw(stream.cast()) };
            // SAFETY: as above.
            unsafe { Stream::passing(&self.0, handle) }.is_capturing().unwrap()
        }
    }

    fn allocate(device: u32, stream: &Stream) -> u64 {
        // SAFETY: the stream lasts as long as the test, which forgets it.
        let made =
            unsafe { process::allocate(device, 1 << 20, raw(stream), Life::Lasts, Asked::Not) };
        made.map_err(|failure| failure.text().to_owned()).unwrap().addr() as u64
    }

    fn free(device: u32, address: u64, stream: &Stream) {
        let pointer = std::ptr::without_provenance_mut(address as usize);
        // SAFETY: allocated above, and used by nothing.
        let freed = unsafe { process::free(device, pointer, raw(stream), Life::Lasts) };
        freed.map_err(|failure| failure.text().to_owned()).unwrap();
    }

    fn raw(stream: &Stream) -> *mut c_void {
        stream.handle().raw().cast()
    }

    fn ok(answer: CUresult) {
        assert_eq!(answer, CUresult::CUDA_SUCCESS);
    }

    /// The requests of a stream while it captures come from the graph's pool, whether the stream was
    /// seen before or not; those before, after and beside do not.
    #[test]
    fn requests_in_a_capture_are_the_graphs() {
        process::use_simulator();
        let _alone = process::alone();
        let pool = process::pool(0).map_err(|failure| failure.text().to_owned()).unwrap();
        let device = pool.device();
        let driver = device.driver().raw();
        let (begin, end) =
            (driver.cuStreamBeginCapture_v2.unwrap(), driver.cuStreamEndCapture.unwrap());
        let (known, new, beside) =
            (device.stream().unwrap(), device.stream().unwrap(), device.stream().unwrap());
        let of_graph = |address: u64| {
            let segments = pool.snapshot();
            let holds = |at: u64, bytes: u64| address >= at && address < at + bytes;
            let segment = segments.iter().find(|segment| holds(segment.address, segment.bytes));
            segment.unwrap().heap != vpmm_core::snapshot::HeapName::Main
        };
        let before = allocate(0, &known);
        for (turn, stream) in [&known, &new].into_iter().enumerate() {
            let number = (9, turn as u64);
            super::begin(pool, number, Captures(device.clone())).ok().unwrap();
            let early = allocate(0, stream);
            free(0, early, stream);
            assert!(!of_graph(early), "it does not capture yet");
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
            // SAFETY: a live stream of the simulator's.
            ok(unsafe { begin(stream.handle().raw(), mode) });
            let inside = allocate(0, stream);
            assert!(of_graph(inside));
            // Not of a heap that the thread's requests have at the time.
            // SAFETY: it ends with a zero byte.
            let pushed = unsafe { process::vpmm_process_push_tag(c"beside".as_ptr()) };
            assert_eq!(pushed, vpmm_status::VPMM_OK);
            let tagged = allocate(0, stream);
            assert!(of_graph(tagged) && pool.tagged("beside").unwrap().stats().live_count == 0);
            free(0, tagged, stream);
            assert_eq!(process::vpmm_process_pop_tag(), vpmm_status::VPMM_OK);
            let other = allocate(0, &beside);
            assert!(!of_graph(other), "another stream's");
            free(0, other, &beside);
            free(0, inside, stream);
            assert_eq!(allocate(0, stream), inside, "freed in the capture, it serves it again");
            let mut graph = std::ptr::null_mut();
            // SAFETY: as above; the pointer is to a live handle.
            ok(unsafe { end(stream.handle().raw(), &mut graph) });
            // SAFETY: made just now.
            ok(unsafe { driver.cuGraphDestroy.unwrap()(graph) });
            super::end(0, number).ok().unwrap();
            let late = allocate(0, stream);
            assert!(!of_graph(late), "the capture is over");
            free(0, late, stream);
            free(0, inside, stream);
            super::release(0, number).ok().unwrap();
            assert!(super::release(0, number).is_err() && super::end(0, number).is_err());
        }
        free(0, before, &known);
        for stream in [&known, &new, &beside] {
            assert!(super::super::streams::forget(0, raw(stream)));
        }
        assert_eq!(pool.stats().live_count, 0);
        pool.validate().unwrap();
    }
    /// Answers the same to everybody.
    struct Says(bool);

    impl Filter for Says {
        fn takes(&self, _: *mut c_void) -> bool {
            self.0
        }
    }

    /// A pool that ends beside them has the others asked as before.
    #[test]
    fn pools_are_asked_in_the_order_in_which_they_have_begun() {
        process::use_simulator();
        let _alone = process::alone();
        // A device of its own: another test counts what is allocated on the first.
        let pool = process::pool(1).map_err(|failure| failure.text().to_owned()).unwrap();
        let stream = pool.device().stream().unwrap();
        let heap_of = |address: u64| {
            let segments = pool.snapshot();
            let found = segments.iter().find(|segment| {
                address.checked_sub(segment.address).is_some_and(|offset| offset < segment.bytes)
            });
            found.unwrap().heap.clone()
        };
        for (number, takes) in [(0, false), (1, true), (2, true)] {
            super::begin(pool, (10, number), Says(takes)).ok().unwrap();
        }
        let first = allocate(1, &stream);
        super::end(1, (10, 0)).ok().unwrap();
        let second = allocate(1, &stream);
        assert_eq!(heap_of(second), heap_of(first));
        for address in [first, second] {
            free(1, address, &stream);
        }
        for number in [1, 2] {
            super::end(1, (10, number)).ok().unwrap();
        }
        for number in 0..3 {
            super::release(1, (10, number)).ok().unwrap();
        }
        assert!(super::super::streams::forget(1, raw(&stream)));
    }
}
