//! EXL3 packs from the released format, calibrated with the model's own forward, and the comparison of two models on
//! texts.
//!
//! [`run`] reads a released checkpoint and writes a pack in a public layout [EXL3 specification, sections 8 to 12]. The
//! bytes of the pack depend on the checkpoint, the texts and the settings only. [`compare()`] says what a pack costs.

mod collect;
mod compare;
mod encode;
mod error;
mod layout;
mod plan;
mod run;
mod texts;
mod work;

pub use compare::{Comparison, Figures, Losses, Worst, compare};
pub use error::{Error, Result};
pub use plan::{Options, Search};
pub use run::{Event, Report, TensorReport, run};
pub use texts::{Text, default_calibration, parse_texts, read_texts};
