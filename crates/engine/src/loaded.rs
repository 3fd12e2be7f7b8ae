//! A checkpoint made ready to answer.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use checkpoint::Checkpoint;
use model::Model;
use ops::{Backend, Mode};
use text::{EngramMap, Tokenizer};

use crate::{About, Device, Lm, Result, Visit};

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
        let start = Instant::now();
        let tokenizer = Arc::new(Tokenizer::from_bytes(&ckpt.file("tokenizer.json")?, "tokenizer.json")?);
        let map = EngramMap::checked(&tokenizer, ckpt.config().engram.compressed_vocab_size)?;
        let prepare = Prepare { ckpt, map: map.classes };
        let lm = options.device.visit(options.mode, options.threads, prepare)??;
        Ok(Self { lm, tokenizer, load_time: start.elapsed() })
    }
}

/// Loads a checkpoint on whichever backend it is.
struct Prepare<'a> {
    ckpt: &'a Checkpoint,
    map: Vec<u32>,
}

impl Visit for Prepare<'_> {
    type Output = Result<Arc<dyn Lm>>;

    fn visit<B: Backend + 'static>(self, backend: B, _: About) -> Self::Output {
        Ok(Arc::new(Model::load(backend, self.ckpt, self.map)?))
    }
}
