//! A checkpoint made ready to answer.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use checkpoint::Checkpoint;
use cpu::Cpu;
use model::Model;
use ops::Mode;
use text::{EngramMap, Tokenizer};

use crate::{Device, Lm, Result};

/// How to load.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// The device; must be one that this build has.
    pub device: Device,
    /// The numerics.
    pub mode: Mode,
    /// Threads of the CPU backend; all cores by default.
    pub threads: Option<usize>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { device: Device::Cpu, mode: Mode::Native, threads: None }
    }
}

/// A model with its tokenizer, ready to answer.
#[derive(Clone)]
pub struct Loaded {
    /// The model.
    pub lm: Arc<dyn Lm>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Time from the open checkpoint to here.
    pub load_time: Duration,
}

impl Loaded {
    /// Prepares an open checkpoint.
    ///
    /// # Errors
    /// A refused device, a bad tokenizer, an Engram map that does not fit the model, a bad tensor.
    pub fn new(ckpt: &Checkpoint, options: LoadOptions) -> Result<Self> {
        options.device.require()?;
        let start = Instant::now();
        let tokenizer = Arc::new(Tokenizer::from_bytes(&ckpt.file("tokenizer.json")?, "tokenizer.json")?);
        let map = EngramMap::checked(&tokenizer, ckpt.config().engram.compressed_vocab_size)?;
        let backend = Cpu::new(options.mode, options.threads, None)?;
        let lm: Arc<dyn Lm> = Arc::new(Model::load(backend, ckpt, map.classes)?);
        Ok(Self { lm, tokenizer, load_time: start.elapsed() })
    }
}
