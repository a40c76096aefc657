//! What programs run on: a simulated device with a few streams, whose work ends when the program has it end.

use std::collections::BTreeMap;

use arbitrary::Arbitrary;
use cuda_sim::race::AccessKind;
use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::{Device, DevicePtr, Driver, Error, Stream, StreamHandle};

pub(crate) const GRANULE: u64 = 2 << 20;
pub(crate) const MOST_STEPS: usize = 200;
pub(crate) const LANES: usize = 4;

#[derive(Arbitrary, Debug)]
pub(crate) struct Setup {
    order: Order,
    seed: u64,
    device_granules: u8,
}

#[derive(Arbitrary, Debug)]
enum Order {
    Eager,
    Late { patience: u8 },
    Random,
    Manual,
}

#[derive(Arbitrary, Debug)]
pub(crate) enum Size {
    Small(u16),
    Middle(u16),
    Granules { count: u8, beside: i8 },
}

impl Size {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Small(bytes) => u64::from(*bytes) + 1,
            Self::Middle(steps) => (u64::from(*steps) + 1) * 64,
            Self::Granules { count, beside } => {
                (u64::from(*count % 12 + 1) * GRANULE).saturating_add_signed((*beside).into())
            }
        }
    }
}

pub(crate) fn lane_of(lane: u8) -> usize {
    usize::from(lane) % LANES
}

pub(crate) struct Machine {
    pub(crate) simulator: Simulator,
    pub(crate) device: Device,
    pub(crate) lanes: Vec<Stream>,
    /// Ends of live blocks by their starts.
    taken: BTreeMap<u64, u64>,
    /// Which driver call of the next request or free fails.
    pub(crate) fault: Option<u64>,
}

pub(crate) fn done(code: CUresult) {
    assert_eq!(code, CUresult::CUDA_SUCCESS);
}

impl Machine {
    /// None where all simulators are taken.
    pub(crate) fn new(setup: &Setup) -> Option<Self> {
        let schedule = match setup.order {
            Order::Eager => Schedule::Eager,
            Order::Late { patience } => Schedule::Late { patience: u32::from(patience % 20) + 1 },
            Order::Random => Schedule::Random,
            Order::Manual => Schedule::Manual,
        };
        let device_bytes = u64::from(setup.device_granules % 28 + 4) * GRANULE;
        let builder = Simulator::builder().schedule(schedule).seed(setup.seed);
        let simulator = builder.memory_bytes(device_bytes).build().ok()?;
        let device = Driver::new(simulator.driver()).unwrap().device(0).unwrap();
        let lanes = (0..LANES).map(|_| device.stream().unwrap()).collect();
        Some(Self { simulator, device, lanes, taken: BTreeMap::new(), fault: None })
    }

    pub(crate) fn handle(&self, lane: usize) -> StreamHandle {
        self.lanes[lane].handle()
    }

    /// Has a stream's work read or write a block.
    pub(crate) fn work(&self, ptr: DevicePtr, bytes: u64, lane: usize, kind: AccessKind) {
        let start = ptr.address();
        self.simulator
            .enqueue(self.handle(lane).raw(), "use", move |memory| {
                memory.count_as_used(start, bytes, kind)
            })
            .unwrap();
    }

    /// A block is somebody's, and nobody else's; its stream writes it.
    pub(crate) fn take(&mut self, ptr: DevicePtr, bytes: u64, lane: usize) {
        let (start, end) = (ptr.address(), ptr.address() + bytes);
        let before = self.taken.range(..end).next_back();
        assert!(before.is_none_or(|(_, of)| *of <= start), "a block of two owners");
        self.taken.insert(start, end);
        self.work(ptr, bytes, lane, AccessKind::Write);
    }

    pub(crate) fn leave(&mut self, ptr: DevicePtr) {
        assert!(self.taken.remove(&ptr.address()).is_some());
    }

    /// Has one stream's work come after what another has now.
    pub(crate) fn order(&self, from: usize, to: usize) {
        let raw = self.device.driver().raw();
        let mut event = std::ptr::null_mut();
        // SAFETY: pointers to live values, and handles that are alive.
        unsafe {
            done(raw.cuCtxSetCurrent.unwrap()(self.device.context()));
            done(raw.cuEventCreate.unwrap()(&mut event, 2));
            done(raw.cuEventRecord.unwrap()(event, self.handle(from).raw()));
            done(raw.cuStreamWaitEvent.unwrap()(self.handle(to).raw(), event, 0));
            done(raw.cuEventDestroy_v2.unwrap()(event));
        }
    }

    /// A stream's work goes on by a step, or every stream's.
    pub(crate) fn advance(&self, lane: u8, all: bool) {
        if all {
            self.simulator.advance_all();
        } else {
            self.simulator.advance(self.handle(lane_of(lane)).raw());
        }
    }

    /// A call in which the step's fault comes, if there is one; `None` where it failed by that.
    pub(crate) fn call<T>(
        &mut self,
        call: impl FnOnce(&Self) -> vpmm::Result<T>,
    ) -> Option<vpmm::Result<T>> {
        let fault = self.fault.take();
        if let Some(number) = fault {
            self.simulator.fail_call(number, CUresult::CUDA_ERROR_UNKNOWN);
        }
        let result = call(self);
        self.simulator.clear_faults();
        match result {
            Err(Error::Driver { code: CUresult::CUDA_ERROR_UNKNOWN, .. }) if fault.is_some() => {
                None
            }
            result => Some(result),
        }
    }

    /// Every stream's work is done.
    pub(crate) fn settle(&self) {
        self.simulator.run_until_idle();
        for lane in &self.lanes {
            lane.synchronize().unwrap();
        }
    }

    /// Nothing is left, and nothing was wrong.
    pub(crate) fn end(self) {
        let Self { simulator, lanes, .. } = self;
        drop(lanes);
        assert_eq!(simulator.memory_used(0), 0);
        simulator.assert_clean();
    }
}
