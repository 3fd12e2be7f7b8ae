//! Fault injection: a backend with one wrong operator, to show what the gates see and what they miss.
//!
//! Diagnostic only: nothing that serves can reach it.

mod backend;
mod list;
pub mod suite;

pub use backend::Faulty;
pub use list::{FAULTS, FaultSpec};

/// How far a fault reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Size {
    /// Every layer, the whole tensor.
    All,
    /// Every layer, a part: one head, one block of 32, one column, one entry.
    Part,
    /// That part in one layer alone, the middle one of those that have the operator.
    One,
}

impl Size {
    /// The word in tables.
    pub fn word(self) -> &'static str {
        match self {
            Size::All => "all",
            Size::Part => "part",
            Size::One => "one layer",
        }
    }
}
