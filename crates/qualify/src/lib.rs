//! Qualification: what makes an engine's numerics known.

mod digest;
mod error;
pub mod judge;
mod load;
pub mod scores;
pub mod thresholds;
pub mod trace;
mod verdict;

pub use digest::{sha256_file, sha256_hex};
pub use error::{Error, Result};
pub use load::{load, token_map};
pub use thresholds::Thresholds;
pub use verdict::Verdict;
