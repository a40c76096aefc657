//! Which machine the command line asks for.

use std::fmt;
use std::str::FromStr;

use super::{Machine, MachineError, Setup};

/// The value of `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU if there is one that can be used, else the simulator.
    #[default]
    Auto,
    /// The simulator.
    Sim,
    /// The GPU of this number.
    Cuda(u32),
}

/// A text that is no device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected auto, sim or cuda:N")]
pub struct DeviceChoiceError;

impl FromStr for DeviceChoice {
    type Err = DeviceChoiceError;

    fn from_str(text: &str) -> Result<Self, DeviceChoiceError> {
        match text {
            "auto" => Ok(Self::Auto),
            "sim" => Ok(Self::Sim),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                let number = text.strip_prefix("cuda:").ok_or(DeviceChoiceError)?;
                if !number.bytes().all(|b| b.is_ascii_digit()) {
                    return Err(DeviceChoiceError);
                }
                number.parse().map(Self::Cuda).map_err(|_| DeviceChoiceError)
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Sim => f.write_str("sim"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl DeviceChoice {
    /// Turns `auto` into what there is, and says so through `note`, with the
    /// reason where it is not a GPU.
    pub fn settle(self, note: impl FnOnce(&str)) -> Self {
        if self != Self::Auto {
            return self;
        }
        match usable_gpu() {
            Ok(label) => {
                note(&format!("device: {label}"));
                Self::Cuda(0)
            }
            Err(why) => {
                note(&format!("device: the simulator, since no GPU can be used: {why}"));
                Self::Sim
            }
        }
    }

    /// Sets the machine up: a fresh one with every call where it is simulated.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn open(self, setup: Setup) -> Result<Machine, MachineError> {
        match self {
            Self::Cuda(ordinal) => Machine::cuda(ordinal, setup),
            Self::Sim => Machine::simulated(setup),
            Self::Auto => self.settle(|_| {}).open(setup),
        }
    }
}

fn usable_gpu() -> Result<String, String> {
    let machine = Machine::cuda(0, Setup::default()).map_err(|error| match error {
        MachineError::Cuda { source, .. } => source.to_string(),
        other => other.to_string(),
    })?;
    match machine.device().supports_vmm() {
        Ok(true) => Ok(machine.label().to_owned()),
        Ok(false) => Err(format!("{} has no virtual memory management", machine.label())),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_and_shown_alike() {
        for (text, choice) in [
            ("auto", DeviceChoice::Auto),
            ("sim", DeviceChoice::Sim),
            ("cuda:0", DeviceChoice::Cuda(0)),
            ("cuda:17", DeviceChoice::Cuda(17)),
        ] {
            assert_eq!(text.parse(), Ok(choice));
            assert_eq!(choice.to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
    }

    #[test]
    fn what_is_no_device_is_refused() {
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:+1", "cuda:x", "cuda:4294967296"] {
            assert_eq!(text.parse::<DeviceChoice>(), Err(DeviceChoiceError), "{text}");
        }
    }
}
