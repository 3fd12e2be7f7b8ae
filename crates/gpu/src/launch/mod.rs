//! One launcher for each operator: shapes, memory, and the dispatches of its kernels.

mod attention;
mod attention_rows;
pub mod bytes;
mod cache;
pub mod cost;
mod engram;
mod exl3;
#[cfg(all(test, emulator))]
mod fused_tests;
mod gated;
mod hyper;
mod indexer;
mod linear;
mod mat;
mod moe;
mod norm;
mod publish;
mod quantise;
mod rope;
mod router;
mod rows;
mod shared;
mod slab;
#[cfg(all(test, emulator))]
mod tests;

pub(crate) use attention::Values;
pub(crate) use hyper::{Expand, Finish};
pub use mat::{Experts, Mat};
pub(crate) use shared::Choice;
