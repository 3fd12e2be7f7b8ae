//! Models and prompts of the tests.
#![allow(dead_code)] // each test binary uses its part

use std::{ops::ControlFlow, path::PathBuf};

use checkpoint::Checkpoint;
use engine::{Answer, LoadOptions, Loaded, Prompt, Session, SessionOptions};
use ops::Mode;
use text::SamplingParams;

pub const MODELS: [&str; 3] = ["nano", "micro", "demo"];
pub const MODES: [Mode; 3] = [Mode::Exact, Mode::Source, Mode::Native];

/// Whether the long versions of the tests were asked for.
pub fn full() -> bool {
    std::env::var_os("HALLMARK_FULL").is_some_and(|v| v != "0")
}

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub fn load(name: &str, mode: Mode) -> Loaded {
    let folder = match name {
        "demo" => root().join("models/demo"),
        _ => checkpoint::generate::cached(name).unwrap(),
    };
    let threads = Some(1);
    Loaded::new(&Checkpoint::open(&folder).unwrap(), LoadOptions { mode, threads, ..LoadOptions::default() })
        .unwrap()
}

/// A small generator (SplitMix64).
pub struct Random(pub u64);

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

/// Text of no meaning, the same for the same seed.
pub fn random_ids(loaded: &Loaded, n: usize, seed: u64) -> Vec<u32> {
    let mut random = Random(seed);
    (0..n).map(|_| random.below(loaded.lm.config().vocab_size) as u32).collect()
}

/// Texts of the demo model: its recorded prompts with their answers.
pub fn demo_texts() -> Vec<Vec<u32>> {
    let file = std::fs::read_to_string(root().join("models/demo/expected.jsonl")).unwrap();
    let ids = |v: &serde_json::Value| -> Vec<u32> {
        v.as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as u32).collect()
    };
    file.lines()
        .map(|line| {
            let v: serde_json::Value = serde_json::from_str(line).unwrap();
            [ids(&v["prompt_ids"]), ids(&v["bf16"]["ids"])].concat()
        })
        .collect()
}

pub fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

pub fn sampled(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 1.0, seed: Some(seed), ..SamplingParams::default() }
}

pub fn open(loaded: &Loaded, options: SessionOptions) -> Box<dyn Session> {
    loaded.lm.clone().open(options).unwrap()
}

/// `n` tokens behind `ids`.
pub fn answer(
    loaded: &Loaded,
    session: &mut dyn Session,
    ids: &[u32],
    sampling: SamplingParams,
    n: usize,
) -> Answer {
    let prompt = Prompt::from_ids(ids.to_vec(), sampling, n);
    engine::answer(loaded, session, &prompt, &mut |_| {}, &|| false).unwrap()
}

pub fn feed(session: &mut dyn Session, ids: &[u32]) {
    session.feed(ids, &mut |_| ControlFlow::Continue(())).unwrap().unwrap();
}

pub fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}
