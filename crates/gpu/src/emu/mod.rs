//! The emulator: the same kernels as C++ on CPU threads, with Metal's limits. It is how every kernel is tested where
//! there is no GPU; its speed says nothing about one.

use ops::DeviceError;

#[cfg(emulator)]
mod run;
#[cfg(emulator)]
mod team;
#[cfg(emulator)]
pub use run::{Buffer, Emu, Pipeline};

/// The emulator, refused where it was not built.
#[cfg(not(emulator))]
pub struct Emu(());

#[cfg(not(emulator))]
impl Emu {
    /// Refused: names what the build lacked.
    pub fn open() -> Result<Self, DeviceError> {
        let reason = "this program was built without the emulator: it takes Linux on x86-64 and clang++-19 (Debian: \
                      apt-get install clang-19)";
        Err(DeviceError { backend: "emu", reason: reason.into(), refused: true })
    }

    /// As of one that was built; there is none.
    #[must_use]
    pub fn with_threads(self, _: usize) -> Self {
        self
    }
}

#[cfg(emulator)]
fn failed(reason: impl Into<String>) -> DeviceError {
    DeviceError { backend: "emu", reason: reason.into(), refused: false }
}
