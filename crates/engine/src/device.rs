//! Which backend computes.

use std::str::FromStr;

use cpu::Cpu;
use ops::{Backend, DeviceError, Mode};

use crate::Error;

/// What receipts say about a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// The devices that a receipt made here stands for.
    pub family: String,
    /// Which of them it is.
    pub detail: String,
    /// Its driver and compiler.
    pub driver: String,
}

/// Work that any backend can do.
pub trait Visit {
    /// What comes of it.
    type Output;
    /// Does it.
    fn visit<B: Backend + 'static>(self, backend: B, about: About) -> Self::Output;
}

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

    /// Names of the GPU backends that this build has; the emulator is none.
    pub fn gpus() -> Vec<&'static str> {
        let all = [(Device::Metal, cfg!(target_os = "macos")), (Device::Cuda, cfg!(feature = "cuda"))];
        all.into_iter().filter(|(_, built)| *built).map(|(device, _)| device.name()).collect()
    }

    /// Refuses a device that this build or this machine does not have.
    ///
    /// # Errors
    /// The refusal, naming what runs instead when asked for.
    pub fn require(self) -> Result<(), Error> {
        struct Nothing;
        impl Visit for Nothing {
            type Output = ();
            fn visit<B: Backend + 'static>(self, _: B, _: About) {}
        }
        match self {
            Device::Cpu => Ok(()),
            other => other.visit(Mode::Exact, Some(1), Nothing),
        }
    }

    /// Times the kernels that `work` starts, the longest first: name, launches, seconds. Empty where the device can't.
    pub fn profile<T>(self, work: impl FnOnce() -> T) -> (T, Vec<(&'static str, u64, f64)>) {
        #[cfg(feature = "cuda")]
        if self == Device::Cuda {
            gpu::cuda::profile::begin();
            let out = work();
            let times = gpu::cuda::profile::end();
            return (out, times.into_iter().map(|t| (t.kernel, t.launches, t.seconds)).collect());
        }
        (work(), Vec::new())
    }

    /// What receipts say about it.
    ///
    /// # Errors
    /// That of [`Device::require`].
    pub fn about(self) -> Result<About, Error> {
        struct Tell;
        impl Visit for Tell {
            type Output = About;
            fn visit<B: Backend + 'static>(self, _: B, about: About) -> About {
                about
            }
        }
        self.visit(Mode::Exact, Some(1), Tell)
    }

    /// Opens the device's backend and hands it to `work`. `threads` are those of the CPU and of the emulator.
    ///
    /// # Errors
    /// A device that this build or this machine does not have.
    pub fn visit<V: Visit>(self, mode: Mode, threads: Option<usize>, work: V) -> Result<V::Output, Error> {
        let arch = std::env::consts::ARCH;
        match self {
            Device::Cpu => {
                let backend = Cpu::new(mode, threads, None)?;
                let detail = format!("{} kernels", backend.engine().isa().name());
                let about = About { family: format!("cpu-{arch}"), detail, driver: String::new() };
                Ok(work.visit(backend, about))
            }
            #[cfg(feature = "emu")]
            Device::Emu => {
                let open = gpu::emu::Emu::open().map_err(refusal)?;
                let device = match threads {
                    Some(n) => open.with_threads(n),
                    None => open,
                };
                let detail = "Metal kernels as C++ on the processor".into();
                let about = About { family: format!("emu-{arch}"), detail, driver: String::new() };
                gpu::selftest::run(&device).map_err(refusal)?;
                Ok(work.visit(gpu::Gpu::new(mode, device), about))
            }
            #[cfg(feature = "cuda")]
            Device::Cuda => {
                let device = gpu::cuda::Cuda::open().map_err(refusal)?;
                let about = About {
                    family: format!("cuda-{}", device.arch()),
                    detail: device.chip().into(),
                    driver: device.driver().into(),
                };
                gpu::selftest::run(&device).map_err(refusal)?;
                Ok(work.visit(gpu::Gpu::new(mode, device), about))
            }
            #[cfg(target_os = "macos")]
            Device::Metal => {
                let device = gpu::metal::Metal::open().map_err(refusal)?;
                let detail = device.chip();
                let about = About { family: format!("metal-{arch}"), detail, driver: device.system() };
                gpu::selftest::run(&device).map_err(refusal)?;
                Ok(work.visit(gpu::Gpu::new(mode, device), about))
            }
            other => Err(Error::Refused(format!(
                "--device {} is refused: this build has no {0} backend; use --device cpu",
                other.name()
            ))),
        }
    }
}

#[cfg_attr(not(any(feature = "emu", feature = "cuda", target_os = "macos")), allow(dead_code))]
fn refusal(e: DeviceError) -> Error {
    match e.refused {
        true => Error::Refused(format!("--device {} is refused: {}; use --device cpu", e.backend, e.reason)),
        false => Error::Model(e.into()),
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
