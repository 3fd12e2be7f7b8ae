//! CUDA: the rewritten kernels through NVRTC, on one stream.

mod compile;
mod device;
mod graph;
pub mod profile;

pub use compile::{Compiled, cached, compile, registers, version};
pub use device::{Buffer, Cuda, Pipeline};

use ops::DeviceError;

fn refused(reason: impl Into<String>) -> DeviceError {
    DeviceError { backend: "cuda", reason: reason.into(), refused: true }
}

fn failed(reason: impl Into<String>) -> DeviceError {
    DeviceError { backend: "cuda", reason: reason.into(), refused: false }
}

fn no_nvrtc() -> DeviceError {
    refused("NVRTC is not installed (libnvrtc is missing): it comes with the CUDA toolkit")
}
