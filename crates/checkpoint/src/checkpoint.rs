//! An opened model folder: checked headers, mapped bytes, weights by name.

use std::{
    collections::HashMap,
    path::Path,
    sync::OnceLock,
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::{
    Bytes, Config, Dtype, Form, Group, Weight,
    config::MAX_CONFIG_BYTES,
    error::{Error, Result},
    header,
    pack::{Module, Storage},
    source::Source,
};

/// Alignment that kernels want of a weight's first byte.
pub(crate) const ALIGNMENT: usize = 16;

pub(crate) struct Shard {
    pub name: String,
    /// Its name in messages.
    pub label: String,
    pub bytes: Bytes,
    /// Whether it comes from the folder of the Engram tables.
    pub engram: bool,
}

pub(crate) struct Entry {
    pub shard: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub offset: usize,
    pub len: usize,
    pub group: Group,
    /// Whether the configuration has a place for it.
    pub taken: bool,
    /// The aligned copy of a misaligned tensor, made when it is first asked for.
    copy: OnceLock<Bytes>,
}

impl Entry {
    pub(crate) fn take(&mut self, group: Group) {
        (self.group, self.taken) = (group, true);
    }
}

/// A checked model: configuration, every tensor's place, bytes mapped from the files as stored.
pub struct Checkpoint {
    pub(crate) config: Config,
    pub(crate) source: Source,
    /// Where the Engram tables come from if not from the model's own folder.
    engram: Option<Source>,
    pub(crate) shards: Vec<Shard>,
    pub(crate) tensors: HashMap<String, Entry>,
    /// Modules that are stored as EXL3.
    pub(crate) exl3: HashMap<String, Module>,
    dspark: bool,
    vision: bool,
    copied: AtomicUsize,
}

/// One file that the model's tensors are read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFile<'a> {
    /// Its name.
    pub name: &'a str,
    /// Where it is; none inside the program.
    pub path: Option<std::path::PathBuf>,
    /// Whether it belongs to the folder that the Engram tables are taken from.
    pub engram: bool,
}

/// One tensor of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Full name.
    pub name: &'a str,
    /// Stored type.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: &'a [usize],
    /// What it belongs to.
    pub group: Group,
    /// Shard file name.
    pub file: &'a str,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Checkpoint {
    /// Opens and checks a model folder: configuration, headers, every tensor's name, type and shape, and all values
    /// that are quick to scan (scales other than the Engram tables', norms, single-precision tensors).
    pub fn open(dir: &Path) -> Result<Self> {
        Self::open_with(dir, None)
    }

    /// As [`Checkpoint::open`]; a pack without Engram tables takes them from the model in `engram_from`.
    pub fn open_with(dir: &Path, engram_from: Option<&Path>) -> Result<Self> {
        let engram = engram_from.map(Source::folder).transpose()?;
        let checkpoint = Self::load(Source::folder(dir)?, engram)?;
        checkpoint.scan(false)?;
        Ok(checkpoint)
    }

    /// As [`Checkpoint::open_with`], but looks at no value yet: [`Checkpoint::scan_quick`] does that, best after the pages
    /// are in memory.
    pub fn open_unscanned(dir: &Path, engram_from: Option<&Path>) -> Result<Self> {
        Self::load(Source::folder(dir)?, engram_from.map(Source::folder).transpose()?)
    }

    /// Looks at all values that are quick to scan, as [`Checkpoint::open`] does.
    pub fn scan_quick(&self) -> Result<()> {
        self.scan(false)
    }

    /// As [`Checkpoint::open`], but reads no weight: configuration and headers only.
    pub fn open_headers(dir: &Path) -> Result<Self> {
        Self::load(Source::folder(dir)?, None)
    }

    /// A model inside the program image: pairs of file name and bytes, checked as a folder is.
    pub fn embedded(files: &'static [(&'static str, &'static [u8])]) -> Result<Self> {
        let checkpoint = Self::load(Source::Embedded(files), None)?;
        checkpoint.scan(false)?;
        Ok(checkpoint)
    }

    fn load(source: Source, engram: Option<Source>) -> Result<Self> {
        let config =
            Config::from_json(&source.text("config.json", MAX_CONFIG_BYTES)?, &source.label("config.json"))?;
        let (names, index) = source.shards()?;
        let mut shards = Vec::with_capacity(names.len());
        let mut tensors = HashMap::new();
        for name in names {
            let (shard, places) = read_shard(&source, name, false)?;
            let (name, label) = (&shard.name, &shard.label);
            for t in places {
                if let Some(index) = &index {
                    match index.get(&t.name) {
                        Some(file) if file == name => {}
                        Some(file) => {
                            let what = format!("is in this file, but the index says {file}");
                            return Err(Error::tensor(label, t.name, what));
                        }
                        None => return Err(Error::tensor(label, t.name, "is not in the index")),
                    }
                }
                let name = t.name.clone();
                if let Some(other) = tensors.insert(name.clone(), entry(shards.len(), t)) {
                    let first: &Shard =
                        if other.shard == shards.len() { &shard } else { &shards[other.shard] };
                    return Err(Error::tensor(label, name, format!("is also in {}", first.name)));
                }
            }
            shards.push(shard);
        }
        if let Some((tensor, file)) = index.iter().flatten().find(|(t, _)| !tensors.contains_key(*t)) {
            let what = format!("is said to be in {file}, which does not hold it");
            return Err(Error::tensor(source.label("model.safetensors.index.json"), tensor, what));
        }
        let any = |prefixes: &[&str]| tensors.keys().any(|n| prefixes.iter().any(|p| n.starts_with(p)));
        let (dspark, vision) = (any(&["mtp."]), any(&["vision.", "aligner.", "image_"]));
        let exl3 = HashMap::new();
        let copied = AtomicUsize::new(0);
        let mut checkpoint = Self { config, source, engram, shards, tensors, exl3, dspark, vision, copied };
        checkpoint.rename_head();
        checkpoint.take_engram()?;
        checkpoint.match_inventory()?;
        Ok(checkpoint)
    }

    /// Adds the Engram tables of the second folder.
    fn take_engram(&mut self) -> Result<()> {
        let Some(source) = &self.engram else { return Ok(()) };
        let wanted: Vec<String> =
            self.config.inventory().filter(|t| t.group == Group::EngramTable).map(|t| t.name).collect();
        if wanted.is_empty() || wanted.iter().any(|n| self.tensors.contains_key(n)) {
            let what = "holds all Engram tables that its configuration has; leave out --engram-from";
            return Err(Error::invalid(self.source.root(), what));
        }
        if source.names()?.iter().any(|n| n == "config.json") {
            let label = source.label("config.json");
            let other = Config::from_json(&source.text("config.json", MAX_CONFIG_BYTES)?, &label)?;
            if other.engram != self.config.engram || other.vocab_size != self.config.vocab_size {
                let what = format!("describes other Engram tables than {}", self.source.label("config.json"));
                return Err(Error::invalid(label, what));
            }
        }
        for file in source.shards_of(&wanted)? {
            let (shard, places) = read_shard(source, file, true)?;
            for t in places.into_iter().filter(|t| wanted.contains(&t.name)) {
                let name = t.name.clone();
                if self.tensors.insert(name.clone(), entry(self.shards.len(), t)).is_some() {
                    return Err(Error::tensor(&shard.label, name, "is in two of the folder's files"));
                }
            }
            self.shards.push(shard);
        }
        match wanted.into_iter().find(|n| !self.tensors.contains_key(n)) {
            Some(name) => Err(Error::tensor(source.root(), name, "is missing")),
            None => Ok(()),
        }
    }

    /// Draft head and vision may be absent as a whole; everything else must be there, and nothing more.
    fn match_inventory(&mut self) -> Result<()> {
        let storage = Storage::read(&self.source, &self.config.quantization)?;
        let mut taken = String::new();
        let config = self.config.clone();
        for want in config.inventory() {
            let optional = match want.group {
                Group::Dspark => !self.dspark,
                Group::Vision | Group::ImageMarks => !self.vision,
                _ => false,
            };
            if optional {
                continue;
            }
            if want.name.strip_suffix(".scale") == Some(&taken) {
                continue;
            }
            if self.take_exl3(&want, &storage)? || self.take_mxfp8_head(&want) {
                taken = want.name.trim_end_matches(".weight").to_owned();
                continue;
            }
            let Some(entry) = self.tensors.get_mut(&want.name) else {
                let what = match want.group {
                    Group::EngramTable => {
                        "is missing; take the tables of the released model: --engram-from DIR"
                    }
                    _ => "is missing",
                };
                return Err(Error::tensor(self.source.root(), want.name, what));
            };
            let label = || self.shards[entry.shard].label.clone();
            if entry.dtype != want.dtype {
                let what = format!("is {}, not {}", entry.dtype.name(), want.dtype.name());
                return Err(Error::tensor(label(), want.name, what));
            }
            if entry.shape != want.shape {
                let what = format!("has shape {:?}, not {:?}", entry.shape, want.shape);
                return Err(Error::tensor(label(), want.name, what));
            }
            entry.take(want.group);
        }
        let extra = self.tensors.iter().filter(|(_, e)| !e.taken).min_by_key(|(n, _)| *n);
        let Some((name, entry)) = extra else { return Ok(()) };
        let label = &self.shards[entry.shard].label;
        Err(Error::tensor(label, name, "is superfluous: the configuration has no place for it"))
    }

    /// The checked configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The folder or the name of the embedded model, for messages.
    pub fn location(&self) -> String {
        self.source.root()
    }

    /// The folder that the Engram tables are taken from, where it is another one.
    pub fn engram_location(&self) -> Option<String> {
        self.engram.as_ref().map(Source::root)
    }

    /// The files that hold the tensors, those of the Engram tables' folder last.
    pub fn files(&self) -> Vec<ModelFile<'_>> {
        let one = |s: &'_ Shard| {
            let source = self.engram.as_ref().filter(|_| s.engram).unwrap_or(&self.source);
            (source.path(&s.name), s.engram)
        };
        let files = self.shards.iter().map(|s| (s, one(s)));
        files.map(|(s, (path, engram))| ModelFile { name: &s.name, path, engram }).collect()
    }

    /// Whether the draft head's tensors are there.
    pub fn has_dspark(&self) -> bool {
        self.config.dspark.stages > 0 && self.dspark
    }

    /// Whether the vision tower's tensors are there.
    pub fn has_vision(&self) -> bool {
        self.config.vision.num_hidden_layers > 0 && self.vision
    }

    /// All tensors in the order of their names.
    pub fn tensors(&self) -> Vec<TensorInfo<'_>> {
        let mut all: Vec<TensorInfo> = self
            .tensors
            .iter()
            .map(|(name, e)| TensorInfo {
                name,
                dtype: e.dtype,
                shape: &e.shape,
                group: e.group,
                file: &self.shards[e.shard].name,
                offset: e.offset as u64,
                len: e.len as u64,
            })
            .collect();
        all.sort_by_key(|t| t.name);
        all
    }

    /// Stored bytes of one group.
    pub fn group_bytes(&self, group: Group) -> u64 {
        self.tensors.values().filter(|e| e.group == group).map(|e| e.len as u64).sum()
    }

    /// Tensors and bytes of each shard.
    pub(crate) fn shard_sums(&self) -> Vec<crate::summary::ShardSum> {
        let mut counts = vec![0; self.shards.len()];
        self.tensors.values().for_each(|e| counts[e.shard] += 1);
        let sum = |(s, tensors): (&Shard, u64)| crate::summary::ShardSum {
            file: s.name.clone(),
            tensors,
            bytes: s.bytes.len() as u64,
        };
        self.shards.iter().zip(counts).map(sum).collect()
    }

    /// Whether the model has a side file of this name.
    pub fn has_file(&self, name: &str) -> bool {
        self.source.names().is_ok_and(|names| names.iter().any(|n| n == name))
    }

    /// A side file, such as `tokenizer.json`.
    pub fn file(&self, name: &str) -> Result<Bytes> {
        self.source.bytes(name)
    }

    /// The side files of at most `limit` bytes that belong to the model's tokenizer and prompts, with their bytes: JSON
    /// and text files other than the configuration and what says where tensors are.
    pub fn side_files(&self, limit: usize) -> Result<Vec<(String, Bytes)>> {
        const OURS: [&str; 3] = ["config.json", "quantization_config.json", "model.safetensors.index.json"];
        let side = |n: &String| {
            let kind = [".json", ".jinja", ".txt", ".model"].iter().any(|e| n.ends_with(e));
            kind && !OURS.contains(&n.as_str())
        };
        let mut out = Vec::new();
        for name in self.source.names()?.into_iter().filter(side) {
            let bytes = self.source.bytes(&name)?;
            if bytes.len() <= limit {
                out.push((name, bytes));
            }
        }
        Ok(out)
    }

    /// Tensors copied so far because the file places them off a multiple of 16 bytes. Engram tables are never copied:
    /// their rows are gathered, and kernels do not read them.
    pub fn copied(&self) -> usize {
        self.copied.load(Ordering::Relaxed)
    }

    /// Tensors that the files place off a multiple of 16 bytes, Engram tables apart.
    pub fn misaligned(&self) -> usize {
        self.tensors.values().filter(|e| !self.is_usable_in_place(e)).count()
    }

    fn is_usable_in_place(&self, e: &Entry) -> bool {
        let start = self.shards[e.shard].bytes.as_ptr().wrapping_add(e.offset);
        e.group == Group::EngramTable || (start as usize).is_multiple_of(ALIGNMENT)
    }

    /// The stored bytes of a tensor by its full name, aligned as kernels want them.
    pub fn tensor(&self, name: &str) -> Result<Bytes> {
        self.entry(name).map(|e| self.bytes(e))
    }

    /// The file that holds a tensor, none inside the program, and its first byte there.
    pub(crate) fn place(&self, name: &str) -> Result<(Option<std::path::PathBuf>, u64)> {
        let e = self.entry(name)?;
        let shard = &self.shards[e.shard];
        let source = self.engram.as_ref().filter(|_| shard.engram).unwrap_or(&self.source);
        Ok((source.path(&shard.name), e.offset as u64))
    }

    pub(crate) fn entry(&self, name: &str) -> Result<&Entry> {
        self.tensors.get(name).ok_or_else(|| Error::tensor(self.source.root(), name, "is missing"))
    }

    /// Counts tensors that are copied for another reason than their place.
    pub(crate) fn count_copies(&self, n: usize) {
        self.copied.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn bytes(&self, e: &Entry) -> Bytes {
        let place = || {
            let shard = &self.shards[e.shard].bytes;
            shard.slice(e.offset, e.len).expect("the header was checked against the file's length")
        };
        if self.is_usable_in_place(e) {
            return place();
        }
        let copy = e.copy.get_or_init(|| {
            self.copied.fetch_add(1, Ordering::Relaxed);
            Bytes::copied(&place())
        });
        copy.clone()
    }

    /// A weight by its module name (`layers.0.attn.wq_a`, `embed`) or, where the file has no `.weight`, by its full
    /// name (`layers.3.hc_attn_fn`, `layers.2.attn.attn_sink`). A vector has one row; higher ranks are flattened to
    /// `[first, rest]`.
    pub fn weight(&self, module: &str) -> Result<Weight> {
        if let Some(exl3) = self.exl3.get(module) {
            return self.exl3_weight(module, exl3);
        }
        let full = format!("{module}.weight");
        let name = if self.tensors.contains_key(&full) { full.as_str() } else { module };
        let e = self.entry(name)?;
        let bad = |what: String| Error::tensor(&self.shards[e.shard].label, name, what);
        let (rows, cols) = match e.shape.as_slice() {
            [] => (1, 1),
            [n] => (1, *n),
            [rows, rest @ ..] => (*rows, rest.iter().product()),
        };
        let scale = match e.dtype {
            Dtype::E4m3 | Dtype::I8 => Some(self.entry(&format!("{module}.scale"))?),
            _ => None,
        };
        let (form, cols) = match (e.dtype, scale) {
            (Dtype::F32, _) => (Form::F32, cols),
            (Dtype::Bf16, _) => (Form::Bf16, cols),
            (Dtype::I8, Some(_)) => (Form::Fp4Row32, cols * 2),
            (Dtype::E4m3, Some(s)) if s.shape == [rows.div_ceil(32), cols.div_ceil(32)] => {
                (Form::Fp8Block32, cols)
            }
            (Dtype::E4m3, Some(_)) => (Form::Fp8Row32, cols),
            (other, _) => return Err(bad(format!("is {}, which is no weight type", other.name()))),
        };
        let scale = scale.map_or(Bytes::from_static(&[]), |s| self.bytes(s));
        Weight::new(module, form, rows, cols, self.bytes(e), scale).map_err(bad)
    }

    /// Reads every byte once and refuses what no weight may hold: an E8M0 scale of 255, an E4M3 NaN, a non-finite
    /// bf16 or f32. [`Checkpoint::open`] has already scanned all but the large tensors.
    pub fn verify(&self) -> Result<()> {
        self.scan(true)
    }

    fn scan(&self, everything: bool) -> Result<()> {
        use rayon::prelude::*;
        // The first fault by name, whatever the threads' order.
        let fault = self
            .tensors
            .par_iter()
            .filter(|(_, e)| everything || is_quick(e))
            .filter_map(|(name, e)| {
                let bytes = &self.shards[e.shard].bytes[e.offset..e.offset + e.len];
                crate::scan::fault(e.dtype, bytes).map(|what| (name, e.shard, what))
            })
            .min_by(|a, b| a.0.cmp(b.0));
        match fault {
            None => Ok(()),
            Some((name, shard, what)) => Err(Error::tensor(&self.shards[shard].label, name, what)),
        }
    }
}

/// One shard and where its tensors lie.
fn read_shard(source: &Source, name: String, engram: bool) -> Result<(Shard, Vec<header::Place>)> {
    let (label, bytes) = (source.label(&name), source.bytes(&name)?);
    let header = header::parse(&bytes).map_err(|lie| match lie.tensor {
        Some(tensor) => Error::tensor(&label, tensor, lie.what),
        None => Error::invalid(&label, lie.what),
    })?;
    if header.format.as_deref() == Some("mlx") {
        return Err(Error::unsupported(
            &label,
            "is an MLX conversion, which is not supported; use the released safetensors checkpoint",
        ));
    }
    Ok((Shard { name, label, bytes, engram }, header.tensors))
}

fn entry(shard: usize, t: header::Place) -> Entry {
    let header::Place { dtype, shape, offset, len, .. } = t;
    Entry { shard, dtype, shape, offset, len, group: Group::Embedding, taken: false, copy: OnceLock::new() }
}

/// Whether a tensor is scanned at every load.
fn is_quick(e: &Entry) -> bool {
    match e.dtype {
        Dtype::E8m0 => e.group != Group::EngramTable,
        Dtype::F32 | Dtype::F16 => true,
        Dtype::Bf16 => e.len <= 1 << 20,
        _ => false,
    }
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checkpoint({}, {} tensors)", self.source.root(), self.tensors.len())
    }
}
