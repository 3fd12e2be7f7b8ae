//! The operators of DeepSeek-V4.1-Flash: contract, scalar reference, input generator and tolerance of each, and the
//! [`Backend`] trait that every implementation fulfils. Nothing else in the workspace defines an operator.
//!
//! Shapes are written `[rows, …]`; a row is one token. Sections in brackets are those of the model specification.
//! Values travel as `f32`; in mode [`Mode::Source`] they are rounded wherever the released reference rounds [§3.3].

pub mod attention;
mod backend;
pub mod blocks;
pub mod cache;
mod delegate;
pub mod dspark;
pub mod embed;
pub mod engram;
pub mod exl3;
mod host;
pub mod hyper;
pub mod indexer;
pub mod linear;
pub mod moe;
pub mod norm;
pub mod pool;
mod reference;
pub mod registry;
pub mod rope;

pub use attention::{Compressed, Window};
pub use backend::{Backend, ExpertWeights, TapSink, Taps};
pub use checkpoint::Weight;
pub use host::{Data, Host};
pub use hyper::Mix;
pub use linear::Io;
pub use moe::Routing;
pub use reference::Reference;
pub use rope::RopeTable;

use checkpoint::Form;
use numerics::bf16;

/// Where values are rounded between operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Single precision everywhere; only the cache quantisers round.
    Exact,
    /// The released reference's roundings, fp8 activation quantisation included [§3.3].
    Source,
    /// What the backend runs fast; each departure from `Source` is declared in the registry.
    Native,
}

impl Mode {
    /// The name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Exact => "exact",
            Mode::Source => "source",
            Mode::Native => "native",
        }
    }

    /// `v` rounded to bf16 in [`Mode::Source`], unchanged otherwise.
    #[inline]
    pub fn bf16(self, v: f32) -> f32 {
        if self == Mode::Source { bf16::round(v) } else { v }
    }
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "exact" => Ok(Mode::Exact),
            "source" => Ok(Mode::Source),
            "native" => Ok(Mode::Native),
            _ => Err(format!("unknown numerics mode '{s}': use exact, source or native")),
        }
    }
}

/// A device that failed, ran out of memory or refuses.
#[derive(Debug, thiserror::Error)]
#[error("{backend}: {reason}")]
pub struct DeviceError {
    /// Name of the backend.
    pub backend: &'static str,
    /// What happened and what to do.
    pub reason: String,
    /// Whether the backend does not do what was asked, as opposed to failing at it.
    pub refused: bool,
}

/// For a backend without EXL3: refuses the first such weight by its name.
pub fn refuse_exl3<'a>(
    backend: &'static str,
    weights: impl IntoIterator<Item = &'a Weight>,
) -> Result<(), DeviceError> {
    match weights.into_iter().find(|w| w.form() == Form::Exl3) {
        None => Ok(()),
        Some(w) => {
            let reason =
                format!("{} is EXL3, which this backend does not run; use the released form", w.name());
            Err(DeviceError { backend, reason, refused: true })
        }
    }
}
