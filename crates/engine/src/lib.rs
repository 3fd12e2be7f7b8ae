//! From a request to its answer: devices, sessions, generation and the one host sampler.
//!
//! ```text
//! Loaded ─► Session (owns one State) ─► logits ─► Sampler ─► ids ─► Parser ─► events
//! ```
//! [`Lm`] and [`Session`] are object-safe, so that everything above is independent of the backend. Row invariance makes
//! a session's logits a function of its tokens alone: how they were cut into steps, or which of them were reused from
//! an earlier turn, changes no bit.

mod answer;
mod cache;
mod device;
mod drafts;
mod error;
mod generate;
mod loaded;
pub mod memory;
pub mod plan;
mod residency;
pub mod sampler;
mod sequence;
mod session;

pub use answer::{Answer, Prompt, Timing, Usage, Watch, answer, watched};
pub use cache::{CacheOptions, CacheStats, Miss, PAGE, PrefixCache};
pub use device::{About, Device, Visit};
pub use drafts::{DraftStats, Drafter, Drafts, Speculation};
pub use error::Error;
pub use generate::Generator;
pub use loaded::{LoadOptions, Loaded};
pub use residency::Residency;
pub use session::{Drafted, Lm, Prefill, Reuse, Session, SessionOptions, Stopped};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
