//! EXL3: the trellis format of exllamav3, read, multiplied and written.
//!
//! - [`Linear`] is a checked view of one stored layer; [`mod@reference`] decodes and multiplies it in plain scalar code.
//! - [`rotate_input`] is the input half of a linear; linears with equal `suh` share its result.

#[cfg(test)]
extern crate self as exl3; // the fixtures' reader is shared with the integration tests

mod aligned;
mod codebook;
pub mod encode;
mod error;
mod hadamard;
mod isa;
mod kernel;
mod linear;
mod rate;
pub mod reference;
pub mod trellis;

pub use codebook::{Codebook, STATES};
pub use error::Error;
pub use hadamard::{Arithmetic, BLOCK, FACTOR, hadamard, hadamard_f64, rotate_input, rotate_output};
pub use isa::Isa;
pub use kernel::{Rows, row_major};
pub use linear::{Linear, Parts, Tensor};
pub use rate::{Rate, TILE};
pub use trellis::Trellis;
