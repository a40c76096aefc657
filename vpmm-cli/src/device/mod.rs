//! The machine that a command runs on: a GPU, or the simulated one.

mod bare;
mod calls;
mod choice;
mod costs;
mod handles;
mod settle;
mod spent;
mod stall;
mod timer;

pub use bare::Bare;
pub use calls::{Calls, MemoryPool, Patterns, Words};
pub use choice::DeviceChoice;
pub use costs::{EachCosts, HandleCosts, handle_costs};
pub use settle::settle;
pub use spent::{FunctionSpent, Ledger};
pub use stall::Stall;
pub use timer::{DriverSpent, DriverTimer, Reading};

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
}

/// What a machine is wanted for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Setup {
    /// Whether a simulated machine looks for races.
    pub detect_races: bool,
    /// Whether the allocators' driver calls are timed.
    pub time_driver: bool,
}

/// A device, its driver, and, where it is simulated, the simulator.
#[derive(Debug)]
pub struct Machine {
    driver: Driver,
    device: Device,
    label: String,
    timer: Option<DriverTimer>,
    simulator: Option<Simulator>,
}

impl Machine {
    /// A GPU by its number.
    ///
    /// # Errors
    /// [`MachineError::Cuda`]: no driver, no such device, or one without virtual memory management.
    pub fn cuda(ordinal: u32, setup: Setup) -> Result<Self, MachineError> {
        let open = || {
            let driver = Driver::load()?;
            let device = driver.device(ordinal)?;
            let label = format!("cuda:{ordinal} {}", device.name()?);
            Ok(Self::new(device, label, None, setup))
        };
        open().map_err(|source| MachineError::Cuda { ordinal, source })
    }

    /// A simulated machine of its own with one GPU.
    ///
    /// # Errors
    /// [`MachineError::Simulator`].
    pub fn simulated(setup: Setup) -> Result<Self, MachineError> {
        let simulator = Simulator::builder().detect_races(setup.detect_races).build()?;
        let open = || Driver::new(simulator.driver())?.device(0);
        let device = open().map_err(MachineError::Simulated)?;
        Ok(Self::new(device, "sim".to_owned(), Some(simulator), setup))
    }

    /// A device of a driver that was loaded already.
    pub fn of(device: Device) -> Self {
        let label = format!("cuda:{}", device.ordinal());
        Self::new(device, label, None, Setup::default())
    }

    fn new(device: Device, label: String, simulator: Option<Simulator>, setup: Setup) -> Self {
        let driver = device.driver().clone();
        let timer = setup.time_driver.then(|| DriverTimer::start(&driver));
        Self { driver, device, label, timer, simulator }
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
    pub fn timer(&self) -> Option<&DriverTimer> {
        self.timer.as_ref()
    }

    /// The raw calls on this machine that belong to no allocator: counted by
    /// themselves, and not timed.
    pub fn calls(&self) -> Calls<'_> {
        Calls::new(self.driver.raw(), &self.device, None)
    }

    /// The raw calls for an allocator that is made of nothing else: counted by
    /// themselves, and timed if that was asked for.
    pub fn allocator_calls(&self) -> Calls<'_> {
        let clock = self.timer.as_ref().map(DriverTimer::calls);
        Calls::new(self.driver.raw(), &self.device, clock)
    }

    /// Streams that wait for nothing but themselves, one for each stream of a trace.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn streams(&self, count: u32) -> vpmm::Result<Vec<Stream>> {
        (0..count).map(|_| self.device.stream()).collect()
    }
}
