//! A checkpoint made ready to answer.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use checkpoint::{
    Checkpoint,
    engram::{EngramMode, EngramTable},
};
use model::Model;
use ops::{Backend, Mode};
use text::{EngramMap, Tokenizer};

use crate::{About, Device, Lm, Residency, Result, Visit, plan::Parts};

/// How to load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The device; must be one that this build has.
    pub device: Device,
    /// The numerics.
    pub mode: Mode,
    /// Threads of the CPU backend; all cores by default.
    pub threads: Option<usize>,
    /// Where Engram rows are read from, and what was brought into memory before.
    pub residency: Residency,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { device: Device::Cpu, mode: Mode::Native, threads: None, residency: Residency::default() }
    }
}

/// A model with its tokenizer, ready to answer.
#[derive(Clone)]
pub struct Loaded {
    /// The model.
    pub lm: Arc<dyn Lm>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Stored bytes of what is loaded, by the plan: weights, draft stages if there are any, and Engram tables where they are
    /// resident.
    pub planned: u64,
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
        let residency = &options.residency;
        let tables = ckpt.engram_tables(residency.engram, residency.engram_rows.as_deref())?;
        let prepare = Prepare { ckpt, map: map.classes, tables };
        let lm = options.device.visit(options.mode, options.threads, prepare)??;
        let parts = Parts::of_checkpoint(ckpt);
        let engram = if residency.engram == EngramMode::Resident { parts.engram } else { 0 };
        let planned = parts.text() + parts.dspark + engram;
        Ok(Self { lm, tokenizer, planned, load_time: start.elapsed() })
    }
}

/// Loads a checkpoint on whichever backend it is.
struct Prepare<'a> {
    ckpt: &'a Checkpoint,
    map: Vec<u32>,
    tables: Vec<Arc<dyn EngramTable>>,
}

impl Visit for Prepare<'_> {
    type Output = Result<Arc<dyn Lm>>;

    fn visit<B: Backend + 'static>(self, backend: B, _: About) -> Self::Output {
        let mut model = Model::load(backend, self.ckpt, self.map)?;
        model.set_engram(self.tables);
        Ok(Arc::new(model))
    }
}
