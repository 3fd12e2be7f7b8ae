//! Qualification: what makes an engine's numerics known.

pub mod bins;
pub mod bisect;
pub mod capabilities;
mod digest;
mod error;
pub mod fault;
pub mod gates;
pub mod identity;
pub mod inputs;
pub mod judge;
mod load;
pub mod machine;
mod memory;
pub mod models;
pub mod noise;
pub mod receipt;
pub mod release;
pub mod run;
pub mod scores;
pub mod synthetic;
pub mod thresholds;
pub mod trace;
pub mod twin;
mod verdict;

pub use digest::{sha256_file, sha256_hex};
pub use error::{Error, Result};
pub use load::{load, token_map};
pub use thresholds::Thresholds;
pub use verdict::Verdict;
