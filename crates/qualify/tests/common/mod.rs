//! The golden files as traces.
#![allow(dead_code)] // each test binary uses its part

use std::path::PathBuf;

use qualify::{
    Thresholds,
    judge::{Judgement, judge},
    trace::Trace,
};

/// The repository's root.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Golden file `kind` of a test model.
pub fn golden(model: &str, kind: &str) -> Trace {
    Trace::open(&root().join(format!("fixtures/model/{model}/golden/{kind}.safetensors"))).unwrap()
}

/// `candidate` against `reference`, both goldens of `model`.
pub fn judged(model: &str, candidate: &str, reference: &str) -> Judgement {
    judge(&golden(model, reference), &golden(model, candidate), None, Thresholds::built_in()).unwrap()
}
