//! One launcher for each operator.

pub mod cost;
mod exl3;
mod gated;
mod linear;
mod mat;
mod moe;
mod quantise;
mod slab;
#[cfg(all(test, emulator))]
mod tests;

pub use mat::{Experts, Mat};
