//! What the examples run on: the first GPU, or the simulator with `--sim` or where there is none.

use std::error::Error;

use cuda_sim::Simulator;
use vpmm::{Device, Driver};

/// A device, and its simulator where it is simulated.
pub(crate) struct Machine {
    pub(crate) device: Device,
    pub(crate) simulator: Option<Simulator>,
}

impl Machine {
    /// Finds the device and says which it is.
    pub(crate) fn find() -> Result<Self, Box<dyn Error>> {
        if std::env::args().skip(1).any(|argument| argument == "--sim") {
            println!("on the simulator, as asked for");
            return Self::simulated();
        }
        match gpu() {
            Ok(device) => {
                println!("on {}", device.name()?);
                Ok(Self { device, simulator: None })
            }
            Err(reason) => {
                println!("on the simulator: {reason}");
                Self::simulated()
            }
        }
    }

    fn simulated() -> Result<Self, Box<dyn Error>> {
        let simulator = Simulator::builder().build()?;
        let device = Driver::new(simulator.driver())?.device(0)?;
        Ok(Self { device, simulator: Some(simulator) })
    }

    /// An error if the simulator saw a race or a wrong use of the driver.
    pub(crate) fn check(&self) -> Result<(), Box<dyn Error>> {
        let Some(simulator) = &self.simulator else { return Ok(()) };
        let report = simulator.report();
        if report.misuse.is_empty() && report.races.is_empty() {
            return Ok(());
        }
        Err(format!("the simulator found {:?} {:?}", report.misuse, report.races).into())
    }
}

fn gpu() -> vpmm::Result<Device> {
    let device = Driver::load()?.device(0)?;
    if device.supports_vmm()? {
        return Ok(device);
    }
    Err(vpmm::Error::VmmUnsupported { ordinal: device.ordinal() })
}

/// An error with this text unless `holds`.
pub(crate) fn ensure(holds: bool, text: &str) -> Result<(), Box<dyn Error>> {
    if holds { Ok(()) } else { Err(text.into()) }
}
