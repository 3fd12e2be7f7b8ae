//! A model folder: typed configuration, inventory of the tensors it implies, memory-mapped weights.

mod bytes;
mod weight;

pub use bytes::Bytes;
pub use weight::{Form, Weight};
