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
    source::Source,
};

/// Alignment that kernels want of a weight's first byte.
pub(crate) const ALIGNMENT: usize = 16;

struct Shard {
    name: String,
    bytes: Bytes,
}

struct Entry {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    offset: usize,
    len: usize,
    group: Group,
    /// The aligned copy of a misaligned tensor, made when it is first asked for.
    copy: OnceLock<Bytes>,
}

/// A checked model: configuration, every tensor's place, bytes mapped from the files as stored.
pub struct Checkpoint {
    config: Config,
    source: Source,
    shards: Vec<Shard>,
    tensors: HashMap<String, Entry>,
    dspark: bool,
    vision: bool,
    copied: AtomicUsize,
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
        let checkpoint = Self::open_headers(dir)?;
        checkpoint.scan(false)?;
        Ok(checkpoint)
    }

    /// As [`Checkpoint::open`], but reads no weight: configuration and headers only.
    pub fn open_headers(dir: &Path) -> Result<Self> {
        Self::load(Source::folder(dir)?)
    }

    /// A model inside the program image: pairs of file name and bytes, checked as a folder is.
    pub fn embedded(files: &'static [(&'static str, &'static [u8])]) -> Result<Self> {
        let checkpoint = Self::load(Source::Embedded(files))?;
        checkpoint.scan(false)?;
        Ok(checkpoint)
    }

    fn load(source: Source) -> Result<Self> {
        let config =
            Config::from_json(&source.text("config.json", MAX_CONFIG_BYTES)?, &source.label("config.json"))?;
        let (names, index) = source.shards()?;
        let mut shards = Vec::with_capacity(names.len());
        let mut tensors = HashMap::new();
        for name in names {
            let label = source.label(&name);
            let bytes = source.bytes(&name)?;
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
            for t in header.tensors {
                if let Some(index) = &index {
                    match index.get(&t.name) {
                        Some(file) if *file == name => {}
                        Some(file) => {
                            let what = format!("is in this file, but the index says {file}");
                            return Err(Error::tensor(&label, t.name, what));
                        }
                        None => return Err(Error::tensor(&label, t.name, "is not in the index")),
                    }
                }
                let entry = Entry {
                    shard: shards.len(),
                    dtype: t.dtype,
                    shape: t.shape,
                    offset: t.offset,
                    len: t.len,
                    group: Group::Embedding,
                    copy: OnceLock::new(),
                };
                if let Some(other) = tensors.insert(t.name.clone(), entry) {
                    let first: &Shard = &shards[other.shard];
                    return Err(Error::tensor(&label, t.name, format!("is also in {}", first.name)));
                }
            }
            shards.push(Shard { name, bytes });
        }
        if let Some((tensor, file)) = index.iter().flatten().find(|(t, _)| !tensors.contains_key(*t)) {
            let what = format!("is said to be in {file}, which does not hold it");
            return Err(Error::tensor(source.label("model.safetensors.index.json"), tensor, what));
        }
        let any = |prefixes: &[&str]| tensors.keys().any(|n| prefixes.iter().any(|p| n.starts_with(p)));
        let (dspark, vision) = (any(&["mtp."]), any(&["vision.", "aligner.", "image_"]));
        let mut checkpoint =
            Self { config, source, shards, tensors, dspark, vision, copied: AtomicUsize::new(0) };
        checkpoint.match_inventory()?;
        Ok(checkpoint)
    }

    /// Draft head and vision may be absent as a whole; everything else must be there, and nothing more.
    fn match_inventory(&mut self) -> Result<()> {
        let mut found = 0;
        for want in self.config.inventory() {
            let optional = match want.group {
                Group::Dspark => !self.dspark,
                Group::Vision | Group::ImageMarks => !self.vision,
                _ => false,
            };
            if optional {
                continue;
            }
            let Some(entry) = self.tensors.get_mut(&want.name) else {
                return Err(Error::tensor(self.source.root(), want.name, "is missing"));
            };
            let label = || self.source.label(&self.shards[entry.shard].name);
            if entry.dtype != want.dtype {
                let what = format!("is {}, not {}", entry.dtype.name(), want.dtype.name());
                return Err(Error::tensor(label(), want.name, what));
            }
            if entry.shape != want.shape {
                let what = format!("has shape {:?}, not {:?}", entry.shape, want.shape);
                return Err(Error::tensor(label(), want.name, what));
            }
            entry.group = want.group;
            found += 1;
        }
        if found == self.tensors.len() {
            return Ok(());
        }
        let expected: std::collections::HashSet<String> = self.config.inventory().map(|t| t.name).collect();
        let extra = self.tensors.iter().filter(|(n, _)| !expected.contains(*n)).min_by_key(|(n, _)| *n);
        let (name, entry) = extra.expect("more tensors than expected ones, so one is not among them");
        let label = self.source.label(&self.shards[entry.shard].name);
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

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.tensors.get(name).ok_or_else(|| Error::tensor(self.source.root(), name, "is missing"))
    }

    fn bytes(&self, e: &Entry) -> Bytes {
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
        let full = format!("{module}.weight");
        let name = if self.tensors.contains_key(&full) { full.as_str() } else { module };
        let e = self.entry(name)?;
        let bad = |what: String| Error::tensor(self.source.label(&self.shards[e.shard].name), name, what);
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
            Some((name, shard, what)) => {
                Err(Error::tensor(self.source.label(&self.shards[shard].name), name, what))
            }
        }
    }
}

/// Whether a tensor is scanned at every load.
fn is_quick(e: &Entry) -> bool {
    match e.dtype {
        Dtype::E8m0 => e.group != Group::EngramTable,
        Dtype::F32 => true,
        Dtype::Bf16 => e.len <= 1 << 20,
        _ => false,
    }
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checkpoint({}, {} tensors)", self.source.root(), self.tensors.len())
    }
}
