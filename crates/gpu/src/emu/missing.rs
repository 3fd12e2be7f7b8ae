//! What stands for the emulator in a program that was built without it: a device that nobody can open.

use std::convert::Infallible;

use checkpoint::Bytes;
use ops::DeviceError;

use crate::{Constant, Device, Dispatch, Kernel, Limits};

/// The emulator, refused where it was not built.
pub struct Emu(Infallible);

/// Its buffers and pipelines; there are none.
#[derive(Clone)]
pub enum Nothing {}

impl Emu {
    /// Refused: names what the build lacked.
    pub fn open() -> Result<Self, DeviceError> {
        let reason = "this program was built without the emulator: it takes Linux on x86-64 and clang++-19 (Debian: \
                      apt-get install clang-19)";
        Err(DeviceError { backend: "emu", reason: reason.into(), refused: true })
    }

    /// As of one that was built.
    pub fn with_threads(self, _: usize) -> Self {
        self
    }
}

impl Device for Emu {
    type Buffer = Nothing;
    type Pipeline = Nothing;

    fn name(&self) -> &'static str {
        match self.0 {}
    }

    fn description(&self) -> String {
        match self.0 {}
    }

    fn limits(&self) -> &Limits {
        match self.0 {}
    }

    fn allocate(&self, _: usize) -> Result<Nothing, DeviceError> {
        match self.0 {}
    }

    fn import(&self, _: &Bytes) -> Result<Option<(Nothing, u64)>, DeviceError> {
        match self.0 {}
    }

    fn write(&self, _: &Nothing, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        match self.0 {}
    }

    fn read(&self, _: &Nothing, _: u64, _: &mut [u8]) -> Result<(), DeviceError> {
        match self.0 {}
    }

    fn pipeline(&self, _: &'static Kernel, _: &[(u32, Constant)]) -> Result<Nothing, DeviceError> {
        match self.0 {}
    }

    fn submit(&self, _: Vec<Dispatch<Self>>) -> Result<(), DeviceError> {
        match self.0 {}
    }

    fn wait(&self) -> Result<Option<f64>, DeviceError> {
        match self.0 {}
    }
}
