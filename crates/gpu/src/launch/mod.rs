//! One launcher for each operator: shapes, memory, and the dispatches of its kernels.

mod attention;
mod cache;
pub mod cost;
mod engram;
mod exl3;
mod gated;
mod hyper;
mod indexer;
mod linear;
mod mat;
mod moe;
mod norm;
mod quantise;
mod rope;
mod router;
mod rows;
mod slab;
#[cfg(all(test, emulator))]
mod tests;

pub use mat::{Experts, Mat};
