//! The limits of all gates, in one file with their reasons.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::sha256_hex;

const FILE: &str = include_str!("../thresholds.json");

/// A limit and why it is what it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Largest figure that passes.
    pub limit: f64,
    /// Why.
    pub reason: String,
}

impl std::ops::Deref for Limit {
    type Target = f64;

    fn deref(&self) -> &f64 {
        &self.limit
    }
}

/// What the judge uses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Judge {
    /// Error from which a tensor is named as departing where no noise is known.
    pub departure: Limit,
}

/// G3: the whole model against the reference's own noise N.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct G3 {
    /// d may be this many times N.
    pub factor: Limit,
    /// NRMS that passes whatever N is.
    pub floor_nrms: Limit,
    /// KL that passes whatever N is.
    pub floor_kl: Limit,
    /// The proposed fixed gate; printed only.
    pub proposal: Limit,
}

impl G3 {
    /// Largest NRMS that passes where the reference's own noise is `n`.
    pub fn limit_nrms(&self, n: f64) -> f64 {
        (*self.factor * n).max(*self.floor_nrms)
    }

    /// Largest KL that passes where the reference's own noise is `n`.
    pub fn limit_kl(&self, n: f64) -> f64 {
        (*self.factor * n).max(*self.floor_kl)
    }
}

/// The thresholds file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Thresholds {
    /// The judge.
    pub judge: Judge,
    /// G3.
    pub g3: G3,
}

impl Thresholds {
    /// The thresholds of this build.
    pub fn built_in() -> &'static Self {
        static PARSED: OnceLock<Thresholds> = OnceLock::new();
        PARSED.get_or_init(|| serde_json::from_str(FILE).expect("the thresholds file is checked by a test"))
    }

    /// SHA-256 of the thresholds file of this build.
    pub fn digest() -> String {
        sha256_hex(FILE.as_bytes())
    }
}
