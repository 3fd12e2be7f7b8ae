//! The gates.

pub mod drafts;
pub mod layers;
pub mod model;
pub mod operators;
