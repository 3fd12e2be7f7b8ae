//! The GPU backend. Kernels are written once, in Metal Shading Language (`kernels/*.metal`), and run behind one
//! [`Device`] trait: on Metal, on CUDA and on the emulator that checks them on a CPU.

mod backend;
mod buf;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
#[cfg(feature = "emu")]
pub mod emu;
mod gpu;
pub mod kernels;
mod launch;
pub mod metal;
mod pending;
mod pool;
mod record;
pub mod rewrite;
pub mod selftest;

pub use buf::{Buf, Element};
pub use device::{Binding, Constant, Device, Dispatch, Limits};
pub use gpu::Gpu;
pub use kernels::Kernel;
pub use launch::{Experts, Mat, bytes, cost};
