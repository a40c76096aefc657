//! The machine that a command runs on: a GPU, or the simulated one.

mod calls;
mod choice;

pub use calls::{Calls, MemoryPool, Patterns, Words};
pub use choice::DeviceChoice;

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

/// A device, its driver, and, where it is simulated, the simulator.
#[derive(Debug)]
pub struct Machine {
    driver: Driver,
    device: Device,
    label: String,
    simulator: Option<Simulator>,
}

impl Machine {
    /// A GPU by its number.
    ///
    /// # Errors
    /// [`MachineError::Cuda`]: no driver, no such device, or one without virtual memory management.
    pub fn cuda(ordinal: u32) -> Result<Self, MachineError> {
        let open = || {
            let driver = Driver::load()?;
            let device = driver.device(ordinal)?;
            let label = format!("cuda:{ordinal} {}", device.name()?);
            Ok(Self { driver, device, label, simulator: None })
        };
        open().map_err(|source| MachineError::Cuda { ordinal, source })
    }

    /// A simulated machine of its own with one GPU, looking for races if
    /// `detect_races`.
    ///
    /// # Errors
    /// [`MachineError::Simulator`].
    pub fn simulated(detect_races: bool) -> Result<Self, MachineError> {
        let simulator = Simulator::builder().detect_races(detect_races).build()?;
        let open = || {
            let driver = Driver::new(simulator.driver())?;
            let device = driver.device(0)?;
            Ok((driver, device))
        };
        let (driver, device) = open().map_err(MachineError::Simulated)?;
        Ok(Self { driver, device, label: "sim".to_owned(), simulator: Some(simulator) })
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

    /// The raw calls on this machine, counted by themselves.
    pub fn calls(&self) -> Calls<'_> {
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
