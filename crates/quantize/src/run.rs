//! The whole run: forward layer by layer, encode what each layer's inputs calibrate, write its shard, go on.

use std::{
    collections::{BTreeMap, HashSet},
    path::Path,
    sync::Mutex,
    time::Instant,
};

use checkpoint::{
    Bytes, Checkpoint, Dtype, Group,
    write::{self, Item},
};
use cpu::Cpu;
use model::{Input, Model, Rows, State, Walk};
use ops::{Mode, Taps};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use text::{EngramMap, Tokenizer};

use crate::{
    Error, Options, Result, Text,
    collect::Collector,
    encode,
    layout::{configuration, mean_bits},
    plan::{self, Job, part_of},
    work::Work,
};

/// Most tokens of one calibration sequence.
const SEQUENCE: usize = 2048;
/// Name of the report beside the weights. It holds times, so it alone differs between equal runs.
const REPORT: &str = "quantize_report.json";
/// Largest side file that is copied.
const MAX_SIDE_FILE: usize = 100 << 20;

/// One EXL3 layer of the report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorReport {
    /// Its name in the pack, without `.trellis`.
    pub name: String,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Bits per weight.
    pub bits: f64,
    /// Shape of the trellis.
    pub trellis: [usize; 3],
    /// Stored bytes, scales and marker included.
    pub bytes: u64,
    /// Input rows that calibrated it; 0 where none were seen.
    pub calibration_rows: u64,
    /// tr((W-Q)^T H (W-Q)) / tr(W^T H W), scales as stored.
    pub proxy_error: f64,
    /// Scale found for the whole matrix.
    pub global_scale: f64,
    /// Wall time, other layers running beside it.
    pub seconds: f64,
}

/// What a run says about itself.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Where the released checkpoint is.
    pub source: String,
    /// Codebook.
    pub codebook: &'static str,
    /// Rate of the routed experts.
    pub bits: f64,
    /// Rate of dense layers; none as released.
    pub dense: Option<f64>,
    /// Rate of the head; none as released.
    pub head_bits: Option<f64>,
    /// Documents that calibrated.
    pub documents: usize,
    /// Their tokens.
    pub tokens: usize,
    /// Mean bits per weight of the EXL3 layers, scales not counted.
    pub mean_bits: f64,
    /// Mean proxy error of the EXL3 layers, by weights.
    pub mean_proxy_error: f64,
    /// Bytes of the pack's tensors.
    pub bytes: u64,
    /// Bytes of the released tensors.
    pub source_bytes: u64,
    /// Seconds of the run, without what an earlier one had finished.
    pub seconds: f64,
    /// Layers taken from an earlier run.
    pub kept: usize,
    /// Every EXL3 layer.
    pub tensors: Vec<TensorReport>,
}

/// What happens during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event<'a> {
    /// The work: weights to encode.
    Start {
        /// All weights that become EXL3.
        weights: u64,
    },
    /// Inputs of part `part` of `parts` are being collected.
    Forward {
        /// The part.
        part: usize,
        /// All parts.
        parts: usize,
    },
    /// A layer is finished.
    Layer {
        /// Its name.
        name: &'a str,
        /// Its weights.
        weights: u64,
        /// Whether an earlier run had finished it.
        kept: bool,
    },
}

/// Quantises the released checkpoint `ckpt` into the new folder `destination`, calibrated with `texts`.
///
/// A killed run goes on where it was when called again with the same arguments.
///
/// # Errors
/// Settings that do not go together, a folder that exists, a checkpoint that is a pack already, texts that the tokenizer
/// cannot encode, and what the model, the encoder or the system reports.
pub fn run(
    ckpt: &Checkpoint,
    destination: &Path,
    options: &Options,
    texts: &[Text],
    progress: &(dyn Fn(Event<'_>) + Sync),
) -> Result<Report> {
    options.check()?;
    if ckpt.config().quantization.exl3 {
        return Err(Error::Refused(format!(
            "{} is an EXL3 pack already; quantize from the released form",
            ckpt.location()
        )));
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads.unwrap_or(0)).build();
    let pool = pool.map_err(|e| Error::Refused(format!("no threads: {e}")))?;
    pool.install(|| Run::new(ckpt, destination, options, texts)?.go(progress))
}

struct Run<'a> {
    ckpt: &'a Checkpoint,
    destination: &'a Path,
    options: &'a Options,
    start: Instant,
    model: Model<Collector>,
    sequences: Vec<Vec<u32>>,
    documents: usize,
    parts: Vec<Vec<Job>>,
    work: Work,
}

impl<'a> Run<'a> {
    fn new(
        ckpt: &'a Checkpoint,
        destination: &'a Path,
        options: &'a Options,
        texts: &[Text],
    ) -> Result<Self> {
        let start = Instant::now();
        let tokenizer = Tokenizer::from_bytes(&ckpt.file("tokenizer.json")?, "tokenizer.json")?;
        let map = EngramMap::checked(&tokenizer, ckpt.config().engram.compressed_vocab_size)?;
        let longest = SEQUENCE.min(ckpt.config().max_position_embeddings);
        let bos = ckpt.config().bos_token_id;
        let sequences: Vec<Vec<u32>> =
            texts.iter().flat_map(|t| cut(&t.encode(&tokenizer).0, bos, longest)).collect();
        let parts = plan::jobs(ckpt, options);
        let wanted: HashSet<String> = parts.iter().flatten().map(|j| j.inputs.clone()).collect();
        let backend = Collector::new(Cpu::new(Mode::Native, options.threads, None)?, wanted);
        let model = Model::load(backend, ckpt, map.classes)?;
        let work = Work::open(destination, &settings(&model, options, &parts, &sequences))?;
        let documents = texts.len();
        Ok(Self { ckpt, destination, options, start, model, sequences, documents, parts, work })
    }

    fn go(self, progress: &(dyn Fn(Event<'_>) + Sync)) -> Result<Report> {
        let weights = |j: &Job| (j.rows * j.cols) as u64;
        progress(Event::Start { weights: self.parts.iter().flatten().map(weights).sum() });
        let mut walks: Vec<(Walk<Collector>, State<Collector>)> = Vec::new();
        for ids in &self.sequences {
            let mut state = self.model.new_state(ids.len())?;
            walks.push((self.model.start(&mut state, Input::text(ids))?, state));
        }
        // The layers come first: the head's inputs are known after them.
        let order: Vec<usize> = (1..self.parts.len()).chain([0]).collect();
        let layers = self.parts.len() - 2;
        let mut finished: Vec<Option<Vec<TensorReport>>> = Vec::new();
        for part in 0..self.parts.len() {
            finished.push(self.work.kept_shard(&self.file(part))?);
        }
        let kept_parts: usize = finished.iter().flatten().map(Vec::len).sum();
        let mut kept = kept_parts;
        for part in order {
            let rest = (1..=layers).any(|p| p >= part && finished[p].is_none()) || finished[0].is_none();
            if part >= 1 && part <= layers && rest {
                progress(Event::Forward { part, parts: layers });
                for (walk, state) in &mut walks {
                    self.model.advance(walk, state, &mut Taps::off())?;
                }
            }
            if part == 0 && finished[0].is_none() {
                for (walk, mut state) in walks.drain(..) {
                    self.model.finish(walk, &mut state, Rows::All, &mut Taps::off())?;
                }
            }
            let sums = self.model.backend().take();
            if let Some(reports) = &finished[part] {
                for t in reports {
                    progress(Event::Layer { name: &t.name, weights: (t.rows * t.cols) as u64, kept: true });
                }
                continue;
            }
            let (reports, before) = self.encode(part, &sums, progress)?;
            kept += before;
            self.write_shard(part, &reports)?;
            finished[part] = Some(reports);
        }
        self.finish(finished.into_iter().flatten().flatten().collect(), kept)
    }

    /// Encodes the layers of a part that are not kept from before; says how many were.
    fn encode(
        &self,
        part: usize,
        sums: &BTreeMap<String, crate::collect::Sum>,
        progress: &(dyn Fn(Event<'_>) + Sync),
    ) -> Result<(Vec<TensorReport>, usize)> {
        let mut reports = BTreeMap::new();
        let mut missing = Vec::new();
        for job in &self.parts[part] {
            match self.work.kept_tensor(&job.name)? {
                Some(t) => {
                    progress(Event::Layer { name: &t.name, weights: (t.rows * t.cols) as u64, kept: true });
                    reports.insert(t.name.clone(), t);
                }
                None => missing.push(job),
            }
        }
        let kept = reports.len();
        let reports = Mutex::new(reports);
        encode::encode(self.ckpt, self.options, &missing, sums, &|made| {
            let (e, job) = (&made.encoded, made.job);
            let report = TensorReport {
                name: job.name.clone(),
                rows: job.rows,
                cols: job.cols,
                bits: e.rate.bits(),
                trellis: e.trellis_shape(),
                bytes: (e.trellis.len() + e.suh.len() + e.svh.len() + 4) as u64,
                calibration_rows: made.rows,
                proxy_error: e.proxy_error,
                global_scale: e.global_scale,
                seconds: made.time.as_secs_f64(),
            };
            self.work.keep_tensor(e, &report)?;
            progress(Event::Layer { name: &job.name, weights: (job.rows * job.cols) as u64, kept: false });
            reports.lock().expect("no thread panicked").insert(job.name.clone(), report);
            Ok(())
        })?;
        let mut reports = reports.into_inner().expect("no thread panicked");
        let ordered = self.parts[part].iter().filter_map(|j| reports.remove(&j.name)).collect();
        Ok((ordered, kept))
    }

    fn file(&self, part: usize) -> String {
        format!("model-{:05}-of-{:05}.safetensors", part + 1, self.parts.len())
    }

    /// Writes the shard of a part: EXL3 layers, and the other tensors as they are.
    fn write_shard(&self, part: usize, reports: &[TensorReport]) -> Result<()> {
        let gone: HashSet<String> = self.parts[part]
            .iter()
            .flat_map(|j| [format!("{}.weight", j.module), format!("{}.scale", j.module)])
            .collect();
        let mut all: Vec<(String, Dtype, Vec<usize>, Bytes)> = Vec::new();
        for t in self.ckpt.tensors() {
            let layers = self.parts.len() - 2;
            let stays = self.options.engram || t.group != Group::EngramTable;
            if part_of(t.name, layers) == part && stays && !gone.contains(t.name) {
                all.push((t.name.into(), t.dtype, t.shape.to_vec(), self.ckpt.tensor(t.name)?));
            }
        }
        for t in reports {
            let file = Bytes::copied(&self.work.tensor_bytes(&t.name)?);
            // Our own file, whose hash was checked or which was just written.
            for (name, dtype, shape, data) in write::read_shard(&file, &t.name)? {
                all.push((format!("{}.{name}", t.name), dtype, shape, data));
            }
        }
        // What keeps the next tensor on a multiple of 16 bytes comes first.
        all.sort_by_key(|t| !t.3.len().is_multiple_of(16));
        let items: Vec<Item> =
            all.iter().map(|(name, dtype, shape, data)| Item { name, dtype: *dtype, shape, data }).collect();
        write::write_shard(&self.work.path(&self.file(part)), &items)?;
        self.work.seal_shard(&self.file(part), reports)?;
        reports.iter().for_each(|t| self.work.drop_tensor(&t.name));
        Ok(())
    }

    /// Index, configuration, side files and report; then the folder gets its name.
    fn finish(self, tensors: Vec<TensorReport>, kept: usize) -> Result<Report> {
        let files: Vec<String> = (0..self.parts.len()).map(|p| self.file(p)).collect();
        let (mut places, mut bytes) = (BTreeMap::new(), 0);
        for file in &files {
            for (name, _, _, data) in write::read_shard_file(&self.work.path(file))? {
                bytes += data.len() as u64;
                places.insert(name, file.as_str());
            }
        }
        let places = places.iter().map(|(n, f)| (n.as_str(), *f));
        write::write_index(&self.work.path("model.safetensors.index.json"), bytes, places)?;
        let tokens = self.sequences.iter().map(Vec::len).sum();
        let (config, storage) = configuration(self.ckpt, self.options, &tensors, self.documents, tokens)?;
        let put = |name: &str, value: &serde_json::Value| {
            write::replace(&self.work.path(name), |out| writeln!(out, "{value:#}"))
        };
        put("config.json", &config)?;
        put("quantization_config.json", &storage)?;
        for (name, data) in self.ckpt.side_files(MAX_SIDE_FILE)? {
            write::replace(&self.work.path(&name), |out| out.write_all(&data))?;
        }
        let weights: f64 = tensors.iter().map(|t| (t.rows * t.cols) as f64).sum();
        let proxy = tensors.iter().map(|t| t.proxy_error * (t.rows * t.cols) as f64).sum::<f64>();
        let report = Report {
            source: self.ckpt.location(),
            codebook: self.options.codebook.name(),
            bits: self.options.rate.bits(),
            dense: self.options.dense.map(|r| r.bits()),
            head_bits: self.options.head.map(|r| r.bits()),
            documents: self.documents,
            tokens,
            mean_bits: mean_bits(tensors.iter()),
            mean_proxy_error: if weights > 0.0 { proxy / weights } else { 0.0 },
            bytes,
            source_bytes: self.ckpt.tensors().iter().map(|t| t.len).sum(),
            seconds: self.start.elapsed().as_secs_f64(),
            kept,
            tensors,
        };
        let value = serde_json::to_value(&report).map_err(|e| Error::io(Path::new(REPORT))(e.into()))?;
        put(REPORT, &value)?;
        self.work.finish(&files, self.destination)?;
        Ok(report)
    }
}

/// Pieces of at most `longest` ids, each with `bos` in front.
fn cut(ids: &[u32], bos: u32, longest: usize) -> Vec<Vec<u32>> {
    let ids = ids.strip_prefix(&[bos]).unwrap_or(ids);
    let piece = |ids: &[u32]| [&[bos], ids].concat();
    ids.chunks(longest.saturating_sub(1).max(1)).map(piece).collect()
}

/// Hash of everything that the pack's bytes depend on.
fn settings(
    model: &Model<Collector>,
    options: &Options,
    parts: &[Vec<Job>],
    sequences: &[Vec<u32>],
) -> String {
    let mut hash = Sha256::new();
    hash.update(model.identity());
    hash.update(format!("{} {} {:?}", options.codebook.name(), options.engram, options.search));
    for job in parts.iter().flatten() {
        hash.update(format!("{} {} {}\n", job.name, job.rate, job.inputs));
    }
    for ids in sequences {
        hash.update((ids.len() as u64).to_le_bytes());
        ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}
