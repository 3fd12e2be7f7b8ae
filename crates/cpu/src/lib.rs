//! The fast CPU kernels: threads and SIMD on weights and caches as stored.
//!
//! **Row invariance.** A row's result bits depend on that row and the weight (or on that query and its keys) alone: not
//! on the number of rows, a row's place, threads or load. The order of every sum is a function of the shape; it is also
//! the same for every [`Isa`], so that all machines give the same bits.
//!
//! - [`Engine::run`]: linear layers over the stored forms of [`checkpoint::Weight`].
//! - [`Engine::run_source`]: the same in the order of the released fp8 and fp4 kernels, for mode `source`.
//! - [`Engine::run_any`]: the same for EXL3 weights too, straight from the trellis.
//! - [`Engine::attention`]: sparse attention with sinks over stored cache rows.
//! - [`Engine::index_scores`]: index scores over stored keys.
//! - [`bench`](mod@bench): what the machine can do and what part of it they reach.

pub mod bench;

mod attention;
mod backend;
mod body;
mod exl3;
mod exp;
mod isa;
mod kernels;
mod linear;
mod order;
mod portable;
mod source;
mod team;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod tables;

pub use attention::{Attention, IndexQueries, Slot};
pub use backend::Cpu;
pub use isa::Isa;
pub use linear::{Engine, Error, Job};
