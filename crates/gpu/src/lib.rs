//! The GPU backend. Kernels are written once, in Metal Shading Language (`kernels/*.metal`), and run behind one
//! [`Device`] trait: on Metal, on CUDA and on the emulator that checks them on a CPU.

mod device;

pub use device::{Binding, Constant, Device, Dispatch, Kernel, Limits};
