//! Tests of the state that need its inside.

mod prefill;
mod replay;
mod rollback;
mod size;
mod snapshot;

use std::path::PathBuf;

use checkpoint::Checkpoint;
use cpu::Cpu;
use ops::{Backend, Mode, Taps};
use text::{EngramMap, Tokenizer};

use crate::{Input, Model, Rows, State};

pub(super) const MODELS: [&str; 3] = ["nano", "micro", "demo"];
pub(super) const MODES: [Mode; 3] = [Mode::Exact, Mode::Source, Mode::Native];

pub(super) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Whether the long versions of the tests were asked for.
pub(super) fn full() -> bool {
    std::env::var_os("HALLMARK_FULL").is_some_and(|v| v != "0")
}

pub(super) fn load(name: &str, mode: Mode) -> Model<Cpu> {
    let folder = match name {
        "demo" => root().join("models/demo"),
        _ => checkpoint::generate::cached(name).unwrap(),
    };
    let ckpt = Checkpoint::open(&folder).unwrap();
    let tokenizer = Tokenizer::from_bytes(&ckpt.file("tokenizer.json").unwrap(), "tokenizer.json").unwrap();
    let map = EngramMap::checked(&tokenizer, ckpt.config().engram.compressed_vocab_size).unwrap();
    Model::load(Cpu::new(mode, Some(1), None).unwrap(), &ckpt, map.classes).unwrap()
}

/// Text of no meaning, the same for the same seed.
pub(super) fn random_ids(model: &Model<Cpu>, n: usize, seed: u64) -> Vec<u32> {
    let mut random = Random(seed);
    (0..n).map(|_| random.below(model.config().vocab_size) as u32).collect()
}

/// Logits of every row of a step.
pub(super) fn step(model: &Model<Cpu>, state: &mut State<Cpu>, ids: &[u32]) -> Vec<Vec<f32>> {
    let out = model.forward(state, Input::text(ids), Rows::All, &mut Taps::off()).unwrap().unwrap();
    model
        .backend()
        .read(&out.logits)
        .unwrap()
        .as_f32()
        .chunks(model.config().vocab_size)
        .map(Vec::from)
        .collect()
}

/// A new state that has taken `ids` in one step, and the logits after the last.
pub(super) fn prefilled(model: &Model<Cpu>, ids: &[u32], context: usize) -> (State<Cpu>, Vec<f32>) {
    let mut state = model.new_state(context).unwrap();
    let logits = step(model, &mut state, ids).pop().unwrap();
    (state, logits)
}

pub(super) fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

/// A small generator (SplitMix64).
pub(super) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}
