//! The gates.

pub mod layers;
pub mod model;
pub mod operators;
