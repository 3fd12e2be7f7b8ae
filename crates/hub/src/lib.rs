//! Model repositories over HTTP: a revision is pinned, its files come in ranges, in parallel, and nothing is accepted
//! whose hash is not the repository's.
//!
//! ```text
//! Client ─► Repository (revision, files with size and hash) ─► pull (ranges ─► journal ─► hash ─► rename)
//!                                                           └► headers (configuration and safetensors headers only)
//! ```

mod client;
mod error;
mod fetch;
mod headers;
mod journal;
mod pull;
mod record;
mod repository;
mod verify;

pub use checkpoint::Part;
pub use client::{Client, Options};
pub use error::{Error, Result};
pub use headers::headers;
pub use pull::{Progress, Report, Silent, pull};
pub use record::{OWN_FOLDER, Record, Verified};
pub use repository::{Hash, RemoteFile, Repository, Wanted};
pub use verify::{Checked, verify};
