//! The emulator: the same kernels as C++ on CPU threads, with Metal's limits. It is how every kernel is tested where
//! there is no GPU; its speed says nothing about one.

#[cfg(emulator)]
use ops::DeviceError;

#[cfg(emulator)]
mod run;
#[cfg(emulator)]
mod team;
#[cfg(emulator)]
pub use run::{Buffer, Emu, Pipeline};
#[cfg(not(emulator))]
mod missing;
#[cfg(not(emulator))]
pub use missing::Emu;

#[cfg(emulator)]
fn failed(reason: impl Into<String>) -> DeviceError {
    DeviceError { backend: "emu", reason: reason.into(), refused: false }
}
