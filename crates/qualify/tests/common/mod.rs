//! The golden files as traces.
#![allow(dead_code)] // each test binary uses its part

use std::path::PathBuf;

use checkpoint::Checkpoint;
use cpu::Cpu;
use model::Model;
use ops::{Backend, Mode};
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

/// The folder of a test model or of the demo.
pub fn folder(name: &str) -> PathBuf {
    if name == "demo" { root().join("models/demo") } else { checkpoint::generate::cached(name).unwrap() }
}

/// An opened test model.
pub fn opened(name: &str) -> Checkpoint {
    Checkpoint::open(&folder(name)).unwrap()
}

/// A model on `backend`.
pub fn load<B: Backend>(ckpt: &Checkpoint, backend: B) -> Model<B> {
    qualify::load(ckpt, backend).unwrap()
}

/// The CPU backend.
pub fn cpu(mode: Mode) -> Cpu {
    Cpu::new(mode, Some(2), None).unwrap()
}
