//! Model repositories over HTTP: a revision is pinned, its files come in ranges, in parallel, and nothing is accepted
//! whose hash is not the repository's.
//!
//! ```text
//! Client ─► Repository (revision, files with size and hash) ─► pull (ranges ─► journal ─► hash ─► rename)
//!                                                           └► headers (configuration and safetensors headers only)
//! ```
//! Without the feature `http` only what a pull has left in a folder is read: its record, and [`verify`].

#[cfg(feature = "http")]
mod client;
mod error;
#[cfg(feature = "http")]
mod fetch;
mod hash;
#[cfg(feature = "http")]
mod headers;
#[cfg(feature = "http")]
mod journal;
#[cfg(feature = "http")]
mod pull;
mod record;
#[cfg(feature = "http")]
mod repository;
mod verify;

pub use checkpoint::Part;
#[cfg(feature = "http")]
pub use client::{Client, Options};
pub use error::{Error, Result};
pub use hash::Hash;
#[cfg(feature = "http")]
pub use headers::headers;
#[cfg(feature = "http")]
pub use pull::{Progress, Report, Silent, pull};
pub use record::{OWN_FOLDER, Record, Verified};
#[cfg(feature = "http")]
pub use repository::{RemoteFile, Repository, Wanted};
pub use verify::{Checked, verify};
