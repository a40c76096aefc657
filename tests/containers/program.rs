//! Random programs over containers against a model: resources with and without the order of streams; streams that go
//! before what is at home on them, threads' own ones and the legacy one; containers that go from stream to stream and
//! from thread to thread; captures beside them; driver calls that fail.
//!
//! What the threads meet in differs from run to run. `VPMM_CROWD_FIRST` and `VPMM_CROWD_CASES` choose other programs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUstreamCaptureMode;
use vpmm::resource::{
    CoalescingConfig, CoalescingPool, DeviceMalloc, DriverPool, DriverPoolConfig, PinnedHost,
};
use vpmm::{DeviceVec, Error, PinnedVec, Stream};

use crate::resources::{Any, all};
use crate::support::chance::{self, FAULT, Reached, chance, failing, number, with_one_fault};
use crate::support::changed::changed;
use crate::support::{Lcg, Meeting, Rig, call};

failing! {
    put_failing:
    event: cuEventCreate(event: *mut CUevent, flags: u32);
    record: cuEventRecord(event: CUevent, stream: CUstream);
    query: cuEventQuery(event: CUevent);
    wait: cuEventSynchronize(event: CUevent);
    hold_back: cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
    wait_for_stream: cuStreamSynchronize(stream: CUstream);
    upload: cuMemcpyHtoDAsync_v2(
        to: CUdeviceptr,
        from: *const std::ffi::c_void,
        bytes: usize,
        stream: CUstream
    );
    download: cuMemcpyDtoHAsync_v2(
        to: *mut std::ffi::c_void,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream
    );
    across: cuMemcpyDtoDAsync_v2(
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream
    );
    anywhere: cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    words: cuMemsetD32Async(to: CUdeviceptr, value: u32, count: usize, stream: CUstream);
    fill: cuMemsetD8Async(to: CUdeviceptr, value: u8, count: usize, stream: CUstream);
    malloc: cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    create: cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        bytes: usize,
        properties: *const CUmemAllocationProp,
        flags: u64
    );
    capture_question: cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
}

static REACHED: Reached = Reached::new();

fn reach(what: &'static str) {
    REACHED.count(what);
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A container, and what is in it where that is known.
struct Known {
    values: DeviceVec<u32, Any>,
    model: Vec<Option<u32>>,
}

struct Crowd<'a> {
    rig: &'a Rig,
    sim: &'a Simulator,
    resources: Vec<Any>,
    pinned: PinnedHost,
    is_faulty: bool,
    shared: Stream,
    given: Mutex<Vec<Known>>,
    /// Held by whoever has a stream capture: a wait of another thread's for the device would end that, where it began
    /// just after the library has looked for captures.
    captures: RwLock<()>,
    is_capturing: AtomicBool,
}

struct Member<'a> {
    crowd: &'a Crowd<'a>,
    random: Lcg,
    streams: Vec<Stream>,
    all: Vec<Known>,
}

impl Crowd<'_> {
    /// A call that may fail where driver calls do, or is refused beside a capture: nothing then.
    fn attempt<T>(&self, call: impl FnOnce() -> Result<T, Error>) -> Option<T> {
        let percent = if self.is_faulty && chance(4) { 15 } else { 0 };
        match with_one_fault(percent, call) {
            Err(Error::Driver { code: FAULT, .. }) => {
                reach("faults met");
                None
            }
            Err(Error::StreamCapturing) if self.is_capturing.load(Ordering::Relaxed) => {
                reach("waits refused");
                None
            }
            result => Some(result.unwrap_or_else(|error| panic!("{error}"))),
        }
    }
}

impl Known {
    fn check(&self, from: usize, found: &[u32]) {
        for (at, (found, known)) in found.iter().zip(&self.model[from..]).enumerate() {
            assert!(known.is_none_or(|known| known == *found), "{found} at {}", from + at);
        }
    }
}

impl Member<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    fn stream(&mut self) -> Stream {
        match self.below(7) {
            0 => Stream::per_thread(&self.crowd.rig.device),
            1 => Stream::legacy(&self.crowd.rig.device),
            2 => self.crowd.shared.clone(),
            _ => self.streams[self.random.below(2) as usize].clone(),
        }
    }

    fn resource(&mut self) -> Any {
        let at = self.below(self.crowd.resources.len() as u64) as usize;
        Arc::clone(&self.crowd.resources[at])
    }

    fn len(&mut self) -> usize {
        let most = [3, 300, 5_000, 200_000, 1_500_000][self.random.below(5) as usize];
        self.below(most) as usize
    }

    fn pick(&mut self) -> Option<usize> {
        let len = self.all.len() as u64;
        (len > 0).then(|| self.below(len) as usize)
    }

    /// A range of some container's values.
    fn part(&mut self, at: usize) -> (usize, usize) {
        let len = self.all[at].model.len() as u64;
        let first = self.below(len + 1);
        let count = self.below(len - first + 1);
        (first as usize, (first + count) as usize)
    }

    fn make(&mut self) {
        let (stream, resource, len) = (self.stream(), self.resource(), self.len());
        let value = self.below(1 << 30) as u32;
        let crowd = self.crowd;
        let made = match self.below(3) {
            0 => crowd.attempt(|| DeviceVec::filled(value, len, &stream, resource)),
            1 => crowd.attempt(|| DeviceVec::zeroed(len, &stream, resource)).map(|mut values| {
                // A fill that the host does not wait for.
                if let Some(mut first) = (len > 0).then(|| values.slice_mut(..1).unwrap()) {
                    first.set(0, 0).unwrap();
                }
                values
            }),
            _ => {
                let host: Vec<u32> = (0..len as u32).map(|at| at ^ value).collect();
                let made = crowd.attempt(|| DeviceVec::from_slice(&host, &stream, resource));
                if let Some(values) = made {
                    let model = host.into_iter().map(Some).collect();
                    self.all.push(Known { values, model });
                }
                return;
            }
        };
        let Some(values) = made else { return };
        let found = values.to_vec().unwrap();
        assert!(found.iter().all(|found| *found == value || *found == 0));
        let model = found.into_iter().map(Some).collect();
        self.all.push(Known { values, model });
        reach("made");
    }

    fn act(&mut self) {
        let choice = self.below(30);
        if choice == 29 {
            return self.capture();
        }
        let _none = self.crowd.captures.read().unwrap_or_else(PoisonError::into_inner);
        self.do_one(choice);
    }

    /// What of the thread's containers can be done beside a capture, which none of it ends. None is dropped: what is
    /// another thread's would stay the resource's.
    fn capture(&mut self) {
        let crowd = self.crowd;
        let _alone = crowd.captures.write().unwrap_or_else(PoisonError::into_inner);
        let stream = crowd.rig.stream();
        let mode = CUstreamCaptureMode(self.below(3) as u32);
        call!(crowd.rig.driver, cuCtxSetCurrent(crowd.rig.device.context()));
        call!(crowd.rig.driver, cuStreamBeginCapture_v2(stream.handle().raw(), mode));
        crowd.is_capturing.store(true, Ordering::Relaxed);
        for _ in 0..self.below(6) {
            match self.below(24) {
                4..6 => {}
                6..8 => {
                    if let Some(at) = self.pick() {
                        let refused = self.all[at].values.set_stream(&stream);
                        assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
                    }
                }
                choice => self.do_one(choice),
            }
        }
        crowd.is_capturing.store(false, Ordering::Relaxed);
        let mut graph = std::ptr::null_mut();
        call!(crowd.rig.driver, cuCtxSetCurrent(crowd.rig.device.context()));
        call!(crowd.rig.driver, cuStreamEndCapture(stream.handle().raw(), &mut graph));
        call!(crowd.rig.driver, cuGraphDestroy(graph));
        reach("captures");
    }

    fn do_one(&mut self, choice: u64) {
        let crowd = self.crowd;
        if choice < 4 || self.all.is_empty() {
            return self.make();
        }
        let at = self.pick().expect("one");
        match choice {
            4..6 => {
                let Known { values, .. } = self.all.swap_remove(at);
                match self.below(2) {
                    0 => drop(values),
                    // What could not be freed stays the resource's.
                    _ => _ = crowd.attempt(|| values.release()),
                }
                reach("dropped");
            }
            6..8 => {
                // The stream's last other value goes: containers keep it.
                let of = self.below(2) as usize;
                self.streams[of] = crowd.rig.stream();
            }
            8..11 => {
                let stream = self.stream();
                let values = &mut self.all[at].values;
                crowd.attempt(|| values.set_stream(&stream));
                reach("moved");
            }
            11..13 => {
                let Known { values, model } = &mut self.all[at];
                let len = self.random.below(2 * model.len() as u64 + 10) as usize;
                let value = self.random.below(1 << 30) as u32;
                if crowd.attempt(|| values.resize(len, value)).is_some() {
                    model.resize(len, Some(value));
                }
                assert_eq!(values.len(), model.len());
                reach("resized");
            }
            13 => {
                let values = &mut self.all[at].values;
                let most = self.random.below(400_000) as usize;
                match self.random.below(2) {
                    0 => crowd.attempt(|| values.shrink_to_fit()),
                    _ => crowd.attempt(|| values.reserve(most)),
                };
            }
            14..16 => {
                let (first, end) = self.part(at);
                let Known { values, model } = &mut self.all[at];
                let value = self.random.below(1 << 30) as u32;
                let done = crowd.attempt(|| values.slice_mut(first..end)?.fill(value));
                model[first..end].fill(done.map(|()| value));
            }
            16..18 => {
                let (first, end) = self.part(at);
                let Known { values, model } = &mut self.all[at];
                let host: Vec<u32> = (first..end).map(|at| at as u32 ^ 0x5555).collect();
                let done = crowd.attempt(|| values.slice_mut(first..end)?.copy_from_slice(&host));
                for (of, value) in model[first..end].iter_mut().zip(host) {
                    *of = done.map(|()| value);
                }
            }
            18..21 => {
                let other = self.pick().expect("one");
                let (first, end) = self.part(other);
                let source: Vec<Option<u32>> = self.all[other].model[first..end].to_vec();
                let count = (end - first).min(self.all[at].model.len());
                if other == at || count == 0 {
                    return;
                }
                let to = self.below((self.all[at].model.len() - count + 1) as u64) as usize;
                let mut taken = std::mem::take(&mut self.all[at].model);
                let (target, from) = if at < other {
                    let (one, rest) = self.all.split_at_mut(other);
                    (&mut one[at], &rest[0])
                } else {
                    let (one, rest) = self.all.split_at_mut(at);
                    (&mut rest[0], &one[other])
                };
                let done = crowd.attempt(|| {
                    let from = from.values.slice(first..first + count)?;
                    target.values.slice_mut(to..to + count)?.copy_from(&from)
                });
                for (of, value) in taken[to..to + count].iter_mut().zip(&source) {
                    *of = done.and(*value);
                }
                target.model = taken;
                reach("copied across");
            }
            21 => {
                let (stream, resource) = (self.stream(), self.resource());
                let copied = crowd.attempt(|| self.all[at].values.copy(&stream, resource));
                if let Some(values) = copied {
                    let model = self.all[at].model.clone();
                    self.all.push(Known { values, model });
                }
                reach("copied whole");
            }
            22..24 => {
                let (first, end) = self.part(at);
                let known = &self.all[at];
                let found = crowd.attempt(|| known.values.slice(first..end)?.to_vec());
                found.into_iter().for_each(|found| known.check(first, &found));
                reach("looked at");
            }
            24 => {
                // Beside the host.
                let len = self.all[at].model.len();
                let host: Vec<u32> = (0..len as u32).map(|at| at ^ 0x777).collect();
                let stream = self.stream();
                let pinned = PinnedVec::from_slice(&host, &stream, crowd.pinned.clone()).unwrap();
                let Known { values, model } = &mut self.all[at];
                let sent = crowd.attempt(|| pinned.upload(&mut values.as_mut_slice()));
                for (of, value) in model.iter_mut().zip(host) {
                    *of = sent.as_ref().map(|_| value);
                }
                match self.random.below(3) {
                    0 => drop(sent),
                    1 => {
                        if let Some(sent) = sent
                            && let Some(back) = crowd.attempt(|| sent.wait())
                            && let Some(there) =
                                crowd.attempt(|| back.download(&self.all[at].values.as_slice()))
                            && let Some(found) = crowd.attempt(|| there.wait())
                        {
                            self.all[at].check(0, &found);
                        }
                    }
                    // The container may go first.
                    _ => {
                        drop(self.all.swap_remove(at));
                        drop(sent);
                    }
                }
                reach("transfers");
            }
            25 => {
                locked(&crowd.given).push(self.all.swap_remove(at));
                reach("given");
            }
            26 => {
                let taken = locked(&crowd.given).pop();
                self.all.extend(taken);
            }
            _ => {
                for _ in 0..1 + self.below(6) {
                    crowd.sim.advance_all();
                }
            }
        }
    }
}

fn run(seed: u64) {
    let mut random = Lcg(seed ^ 0x1F2E_3D4C);
    random.below(1);
    let schedule = match random.below(4) {
        0 => Schedule::Eager,
        1 => Schedule::Late { patience: 1 + random.below(20) as u32 },
        2 => Schedule::Random,
        _ => Schedule::Manual,
    };
    let is_faulty = random.below(3) == 0;
    let threads = 1 + random.below(3) as usize;
    let steps = random.below(40);
    println!("{seed}: {threads} threads, {steps} steps, {schedule:?}, faulty {is_faulty}");
    let sim = Simulator::builder().schedule(schedule).seed(seed).build().unwrap();
    let rig = Rig::with(changed(&sim, put_failing), sim.clone());
    {
        let mut resources: Vec<Any> = all(&rig).into_iter().map(|(_, resource)| resource).collect();
        resources
            .push(Arc::new(DriverPool::new(&rig.device, &DriverPoolConfig::default()).unwrap()));
        let config = CoalescingConfig::default();
        let upstream = DeviceMalloc::new(&rig.device);
        resources.push(Arc::new(CoalescingPool::new(upstream, &rig.device, &config).unwrap()));
        resources.push(Arc::new(PinnedHost::new(&rig.device)));
        let crowd = Crowd {
            rig: &rig,
            sim: &sim,
            resources,
            pinned: PinnedHost::new(&rig.device),
            is_faulty,
            shared: rig.stream(),
            given: Mutex::default(),
            captures: RwLock::default(),
            is_capturing: AtomicBool::new(false),
        };
        let meeting = Meeting::of(threads);
        std::thread::scope(|scope| {
            for number in 0..threads {
                let (meeting, crowd) = (&meeting, &crowd);
                scope.spawn(move || {
                    let mut random = Lcg(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number as u64);
                    chance::seed(random.below(u64::MAX));
                    let streams = [(); 2].map(|()| crowd.rig.stream()).into();
                    let mut member = Member { crowd, random, streams, all: Vec::new() };
                    for _ in 0..3 {
                        let part = || (0..steps).for_each(|_| member.act());
                        if !meeting.after(part, || ()) {
                            return;
                        }
                    }
                    for known in member.all {
                        known.check(0, &known.values.to_vec().unwrap());
                        locked(&crowd.given).push(known);
                    }
                });
            }
        });
        // In another thread than most of them are at home in.
        for known in std::mem::take(&mut *locked(&crowd.given)) {
            known.check(0, &known.values.to_vec().unwrap());
        }
    }
    drop(rig);
    sim.assert_clean();
    let leaks = sim.leaks();
    assert!(is_faulty || leaks.is_empty(), "{leaks:?}");
}

#[test]
fn random_programs() {
    const CASES: u64 = 40;
    let first = number("VPMM_CROWD_FIRST", 0);
    let cases = number("VPMM_CROWD_CASES", CASES);
    for seed in first..first + cases {
        run(seed);
    }
    // Not "waits refused": whether a capture is open just then is up to the processors.
    let expected =
        ["captures", "copied across", "copied whole", "faults met", "given", "transfers"];
    REACHED.assert_all(if cases < CASES { &[] } else { &expected });
}
