//! The machine that a command runs on: a GPU, or the simulated one.

mod calls;
mod choice;
mod timed;

pub use calls::{Calls, MemoryPool, Patterns, Words};
pub use choice::DeviceChoice;
pub use timed::{DriverSpent, DriverTimer, Reading};

use cuda_sim::Simulator;
use vpmm::{Device, Driver, Stream};

/// Why there is no machine to run on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// The GPU that was asked for cannot be used.
    #[error("cuda:{ordinal} cannot be used: {source}")]
    Cuda {
        /// The number that was asked for.
        ordinal: u32,
        /// What the driver answered.
        source: vpmm::Error,
    },
    /// The simulator could not be set up.
    #[error("the simulated device cannot be set up: {0}")]
    Simulator(#[from] cuda_sim::SimError),
    /// The simulated driver refused to start: a defect.
    #[error("the simulated device cannot be used: {0}")]
    Simulated(vpmm::Error),
    /// Another machine of this process has the clock around its driver calls.
    #[error("the driver calls of another device are being timed in this process")]
    ClockTaken,
}

/// What a machine is wanted for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Setup {
    /// Whether a simulated machine looks for races.
    pub detect_races: bool,
    /// Whether the allocators' driver calls are timed: by one machine of a process at a time.
    pub time_driver: bool,
}

/// A device, its driver, and, where it is simulated, the simulator.
#[derive(Debug)]
pub struct Machine {
    /// What allocators call: with a clock around its functions, if that was asked for.
    driver: Driver,
    device: Device,
    label: String,
    /// The functions without a clock: for device work and waiting.
    plain: cuda_sys::Driver,
    timer: Option<DriverTimer>,
    simulator: Option<Simulator>,
}

impl Machine {
    /// A GPU by its number.
    ///
    /// # Errors
    /// [`MachineError::Cuda`]: no driver, no such device, or one without virtual memory management;
    /// [`MachineError::ClockTaken`].
    pub fn cuda(ordinal: u32, setup: Setup) -> Result<Self, MachineError> {
        let fault = |source| MachineError::Cuda { ordinal, source };
        let driver = Driver::load().map_err(fault)?;
        let plain = driver.raw().clone();
        let (driver, timer) = clocked(driver, setup)?.map_err(fault)?;
        let open = || {
            let device = driver.device(ordinal)?;
            let label = format!("cuda:{ordinal} {}", device.name()?);
            Ok((device, label))
        };
        let (device, label) = open().map_err(fault)?;
        Ok(Self { driver, device, label, plain, timer, simulator: None })
    }

    /// A simulated machine of its own with one GPU.
    ///
    /// # Errors
    /// [`MachineError::Simulator`], [`MachineError::ClockTaken`].
    pub fn simulated(setup: Setup) -> Result<Self, MachineError> {
        let simulator = Simulator::builder().detect_races(setup.detect_races).build()?;
        let plain = simulator.driver();
        let driver = Driver::new(plain.clone()).map_err(MachineError::Simulated)?;
        let (driver, timer) = clocked(driver, setup)?.map_err(MachineError::Simulated)?;
        let device = driver.device(0).map_err(MachineError::Simulated)?;
        let label = "sim".to_owned();
        Ok(Self { driver, device, label, plain, timer, simulator: Some(simulator) })
    }

    /// The driver; its call counts are this machine's.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What reports call it: `sim`, or `cuda:0` and the GPU's name.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The simulator, if that is what this is.
    pub fn simulator(&self) -> Option<&Simulator> {
        self.simulator.as_ref()
    }

    /// The clock around the allocators' driver calls, if it was asked for.
    pub fn timer(&self) -> Option<DriverTimer> {
        self.timer
    }

    /// The raw calls on this machine that belong to no allocator: counted by
    /// themselves, and not timed.
    pub fn calls(&self) -> Calls<'_> {
        Calls::new(&self.plain, &self.device)
    }

    /// The raw calls for an allocator that is made of nothing else: counted by
    /// themselves, and timed if that was asked for.
    pub fn allocator_calls(&self) -> Calls<'_> {
        Calls::new(self.driver.raw(), &self.device)
    }

    /// Streams that wait for nothing but themselves, one for each stream of a trace.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn streams(&self, count: u32) -> vpmm::Result<Vec<Stream>> {
        (0..count).map(|_| self.device.stream()).collect()
    }
}

/// The driver with a clock around its functions, if that is wanted.
fn clocked(
    driver: Driver,
    setup: Setup,
) -> Result<vpmm::Result<(Driver, Option<DriverTimer>)>, MachineError> {
    if !setup.time_driver {
        return Ok(Ok((driver, None)));
    }
    let (timed, timer) = DriverTimer::wrap(driver.raw()).ok_or(MachineError::ClockTaken)?;
    Ok(Driver::new(timed).map(|driver| (driver, Some(timer))))
}

/// A simulated machine with the clock, which the tests of one process take in turn.
#[cfg(test)]
pub(crate) fn timed_machine() -> Machine {
    loop {
        match Machine::simulated(Setup { time_driver: true, ..Setup::default() }) {
            Err(MachineError::ClockTaken) => std::thread::yield_now(),
            other => return other.expect("a simulated machine"),
        }
    }
}
