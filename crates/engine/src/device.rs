//! Which backend computes.

use std::str::FromStr;

use crate::Error;

/// A device by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    Cpu,
    /// Apple's GPU.
    Metal,
    /// NVIDIA's GPU.
    Cuda,
    /// The GPU kernels emulated on the processor.
    Emu,
}

impl Device {
    /// The name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Metal => "metal",
            Device::Cuda => "cuda",
            Device::Emu => "emu",
        }
    }

    /// Refuses a device that this build has no backend for.
    ///
    /// # Errors
    /// The refusal, naming what runs instead when asked for.
    pub fn require(self) -> Result<(), Error> {
        match self {
            Device::Cpu => Ok(()),
            other => Err(Error::Refused(format!(
                "--device {} is refused: this build has no {0} backend; use --device cpu",
                other.name()
            ))),
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "cpu" => Ok(Device::Cpu),
            "metal" => Ok(Device::Metal),
            "cuda" => Ok(Device::Cuda),
            "emu" => Ok(Device::Emu),
            _ => Err(format!("unknown device '{s}': use cpu, metal, cuda or emu")),
        }
    }
}
