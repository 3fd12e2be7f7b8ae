//! The GPU backend. Kernels are written once, in Metal Shading Language (`kernels/*.metal`), and run behind one
//! [`Device`] trait: on Metal, on CUDA and on the emulator that checks them on a CPU.

#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
#[cfg(feature = "emu")]
pub mod emu;
pub mod kernels;
pub mod rewrite;
pub mod selftest;

pub use device::{Binding, Constant, Device, Dispatch, Limits};
pub use kernels::Kernel;
