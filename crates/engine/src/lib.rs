//! From a request to its answer: devices, sessions, generation and the one host sampler.
//!
//! ```text
//! Loaded ─► Session (owns one State) ─► logits ─► Sampler ─► ids ─► Parser ─► events
//! ```
//! [`Lm`] and [`Session`] are object-safe, so that everything above is independent of the backend. Row invariance makes
//! a session's logits a function of its tokens alone: how they were cut into steps, or which of them were reused from
//! an earlier turn, changes no bit.

mod answer;
mod device;
mod error;
mod loaded;
pub mod sampler;
mod session;

pub use answer::{Answer, Prompt, Timing, Usage, answer};
pub use device::Device;
pub use error::Error;
pub use loaded::{LoadOptions, Loaded};
pub use session::{Lm, Session, Stopped};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
