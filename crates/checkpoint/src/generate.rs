//! Test models from a recipe: `weights.json` says how to generate every tensor and what its bytes hash to.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use numerics::generator::{Stored, Tiny};
use rayon::prelude::*;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::{
    Checkpoint, Config, Dtype, Expected,
    error::{Error, Result},
    files, json,
    write::{self, Item},
};

/// Largest recipe that is read.
const MAX_RECIPE_BYTES: u64 = 16 << 20;
/// Most elements of one generated tensor.
const MAX_ELEMENTS: usize = 1 << 28;
/// Files that a generated folder takes over from the recipe's folder.
const SIDE_FILES: [&str; 4] =
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"];
/// Share of the bytes after which the second shard begins.
const FIRST_SHARD: f64 = 0.45;

/// How a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Bf16,
    F32,
    Fp8,
    Fp8Rows,
    Fp4,
}

/// What stored bytes must hash to.
#[derive(Clone, Debug)]
struct Fingerprint {
    shape: Vec<usize>,
    sha256: String,
}

/// One entry of the recipe.
#[derive(Clone, Debug)]
struct Entry {
    name: String,
    kind: Kind,
    logical_shape: Vec<usize>,
    mean: f32,
    multiplier: f32,
    weight: Fingerprint,
    scale: Option<Fingerprint>,
}

/// A parsed recipe.
#[derive(Clone, Debug)]
pub struct Recipe {
    file: String,
    seed: u64,
    entries: Vec<Entry>,
}

/// A finished tensor.
struct Made {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl Recipe {
    /// Reads a `weights.json`.
    pub fn load(path: &Path) -> Result<Self> {
        let file = path.display().to_string();
        let bytes = files::read(path, MAX_RECIPE_BYTES)?;
        let parsed = std::str::from_utf8(&bytes)
            .map_err(|e| format!("is not UTF-8: {e}"))
            .and_then(json::parse)
            .and_then(|tree| {
                let seed = tree.get("seed").and_then(Value::as_u64).ok_or("seed is missing")?;
                let tensors = tree.get("tensors").and_then(Value::as_object).ok_or("tensors is missing")?;
                let entries: std::result::Result<_, _> =
                    tensors.iter().map(|(name, t)| entry(name, t)).collect();
                Ok((seed, entries?))
            });
        let (seed, entries) = parsed.map_err(|what| Error::invalid(&file, what))?;
        Ok(Self { file, seed, entries })
    }

    /// Number of tensors, scales included.
    pub fn tensor_count(&self) -> usize {
        self.entries.iter().map(|e| 1 + usize::from(e.scale.is_some())).sum()
    }

    /// Generates every tensor in parallel and compares each with the recipe's SHA-256.
    fn make(&self) -> Result<Vec<Made>> {
        let parts: Result<Vec<Vec<Made>>> =
            self.entries.par_iter().map(|e| e.make(self.seed, &self.file)).collect();
        Ok(parts?.into_iter().flatten().collect())
    }
}

fn entry(name: &str, tree: &Value) -> std::result::Result<Entry, String> {
    let bad = |field: &str| format!("tensor {name}: {field} is missing or no valid value");
    let text = |field: &str| tree.get(field).and_then(Value::as_str).ok_or_else(|| bad(field));
    let kind = match text("kind")? {
        "bf16" => Kind::Bf16,
        "f32" => Kind::F32,
        "fp8" => Kind::Fp8,
        "fp8rows" => Kind::Fp8Rows,
        "fp4" => Kind::Fp4,
        other => return Err(format!("tensor {name}: kind \"{other}\" is unknown")),
    };
    let logical_shape = shape(tree.get("logical_shape")).ok_or_else(|| bad("logical_shape"))?;
    let quantised = !matches!(kind, Kind::Bf16 | Kind::F32);
    if quantised && logical_shape.len() != 2 {
        return Err(bad("logical_shape"));
    }
    let mean = tree.get("mean").and_then(Value::as_f64).ok_or_else(|| bad("mean"))? as f32;
    let bits = u32::from_str_radix(text("multiplier")?, 16).map_err(|_| bad("multiplier"))?;
    let fingerprint = |field: &str| {
        let object: &Map<_, _> = tree.get(field).and_then(Value::as_object).ok_or_else(|| bad(field))?;
        let sha256 = object.get("sha256").and_then(Value::as_str).ok_or_else(|| bad(field))?.into();
        let shape = shape(object.get("shape")).ok_or_else(|| bad(field))?;
        Ok::<_, String>(Fingerprint { shape, sha256 })
    };
    let scale = quantised.then(|| fingerprint("scale")).transpose()?;
    Ok(Entry {
        name: name.into(),
        kind,
        logical_shape,
        mean,
        multiplier: f32::from_bits(bits),
        weight: fingerprint("weight")?,
        scale,
    })
}

/// A shape of a bounded number of elements.
fn shape(tree: Option<&Value>) -> Option<Vec<usize>> {
    let dims: Vec<usize> =
        tree?.as_array()?.iter().map(|d| d.as_u64().map(|d| d as usize)).collect::<Option<_>>()?;
    let count = dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
    (count <= MAX_ELEMENTS).then_some(dims)
}

impl Entry {
    fn make(&self, seed: u64, file: &str) -> Result<Vec<Made>> {
        let tiny = Tiny::new(&self.name, seed, self.mean, self.multiplier);
        let count: usize = self.logical_shape.iter().product();
        let (dtype, stored) = match self.kind {
            Kind::Bf16 => {
                let codes = (0..count).flat_map(|i| tiny.bf16(i).to_le_bytes()).collect();
                (Dtype::Bf16, Stored { codes, scales: Vec::new() })
            }
            Kind::F32 => {
                let codes = (0..count).flat_map(|i| tiny.f32(i).to_le_bytes()).collect();
                (Dtype::F32, Stored { codes, scales: Vec::new() })
            }
            Kind::Fp8 => (Dtype::E4m3, tiny.fp8_block32(self.logical_shape[0], self.logical_shape[1])),
            Kind::Fp8Rows => (Dtype::E4m3, tiny.fp8_row32(self.logical_shape[0], self.logical_shape[1])),
            Kind::Fp4 if !self.logical_shape[1].is_multiple_of(2) => {
                return Err(Error::tensor(file, &self.name, "is fp4 with an odd number of columns"));
            }
            Kind::Fp4 => (Dtype::I8, tiny.fp4_row32(self.logical_shape[0], self.logical_shape[1])),
        };
        let mut out = vec![finish(file, self.name.clone(), dtype, stored.codes, &self.weight)?];
        if let Some(scale) = &self.scale {
            let module = self.name.strip_suffix(".weight").unwrap_or(&self.name);
            out.push(finish(file, format!("{module}.scale"), Dtype::E8m0, stored.scales, scale)?);
        }
        Ok(out)
    }
}

/// Compares with the recipe's shape and hash.
fn finish(file: &str, name: String, dtype: Dtype, data: Vec<u8>, want: &Fingerprint) -> Result<Made> {
    let made = hex(&Sha256::digest(&data));
    if made != want.sha256 {
        let what = format!("generates to SHA-256 {made}; the recipe says {}", want.sha256);
        return Err(Error::tensor(file, name, what));
    }
    if want.shape.iter().product::<usize>() * dtype.size() != data.len() {
        return Err(Error::tensor(file, name, format!("does not fill the recipe's shape {:?}", want.shape)));
    }
    Ok(Made { name, dtype, shape: want.shape.clone(), data })
}

/// Bytes of a shard of [`deepened`].
const DEEP_SHARD: u64 = 1 << 30;

/// Writes the model `wide` with `layers` layers, at least four, into the new folder `out`: every further layer is the third
/// again, without what its place in the schedule has no use for. About 27 MB a layer, in shards of 1 GiB.
///
/// # Errors
/// A recipe that cannot be built, or a failed write.
pub fn deepened(out: &Path, layers: usize) -> Result<()> {
    const LAST: usize = 2;
    let from = cached("wide")?;
    let path = from.join("config.json");
    let bad = |what: String| Error::invalid(path.display().to_string(), what);
    let mut tree: Value =
        serde_json::from_slice(&files::read(&path, 1 << 20)?).map_err(|e| bad(e.to_string()))?;
    let text = &mut tree["text_config"];
    text["num_hidden_layers"] = layers.into();
    let Some(ratios) = text["compress_ratios"].as_array_mut() else {
        return Err(bad("has no compress_ratios".into()));
    };
    ratios.resize(layers, 1.into());
    let text = tree.to_string();
    let config = Config::from_json(&text, "the deepened configuration")?;
    let source = Checkpoint::open_headers(&from)?;
    // Where each tensor's bytes come from, cut into shards.
    let mut shards: Vec<(u64, Vec<(Expected, String)>)> = Vec::new();
    for t in config.inventory() {
        let name = match t.name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
            Some((l, rest)) if l.parse::<usize>().is_ok_and(|l| l > LAST) => format!("layers.{LAST}.{rest}"),
            _ => t.name.clone(),
        };
        match shards.last_mut() {
            Some((bytes, some)) if *bytes < DEEP_SHARD => {
                *bytes += t.bytes();
                some.push((t, name));
            }
            _ => shards.push((t.bytes(), vec![(t, name)])),
        }
    }
    fs::create_dir_all(out).map_err(Error::io(out))?;
    let count = shards.len();
    let mut index = Vec::new();
    for (k, (_, tensors)) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{count:05}.safetensors", k + 1);
        let data = tensors.iter().map(|(_, name)| source.tensor(name)).collect::<Result<Vec<_>>>()?;
        let items: Vec<Item> = tensors
            .iter()
            .zip(&data)
            .map(|((t, _), data)| Item { name: &t.name, dtype: t.dtype, shape: &t.shape, data })
            .collect();
        write::write_shard(&out.join(&file), &items)?;
        index.extend(tensors.iter().map(|(t, _)| (t.name.clone(), file.clone())));
    }
    let total = shards.iter().map(|s| s.0).sum();
    let names = index.iter().map(|(t, f)| (t.as_str(), f.as_str()));
    write::write_index(&out.join("model.safetensors.index.json"), total, names)?;
    write::replace(&out.join("config.json"), |f| f.write_all(text.as_bytes()))?;
    for name in SIDE_FILES.iter().filter(|n| **n != "config.json") {
        let path = from.join(name);
        if path.exists() {
            fs::copy(&path, out.join(name)).map_err(Error::io(&path))?;
        }
    }
    Ok(())
}

/// Writes the recipe's model into `out_dir`, in the released layout: two shards, an index, and the side files of
/// `config_dir`. Every tensor's SHA-256 is compared with the recipe's; every file is replaced whole.
pub fn write_folder(recipe: &Recipe, config_dir: &Path, out_dir: &Path) -> Result<()> {
    let made = recipe.make()?;
    fs::create_dir_all(out_dir).map_err(Error::io(out_dir))?;
    for name in SIDE_FILES {
        let from = config_dir.join(name);
        if from.exists() {
            let bytes = fs::read(&from).map_err(Error::io(&from))?;
            write::replace(&out_dir.join(name), |out| out.write_all(&bytes))?;
        }
    }
    let total: usize = made.iter().map(|t| t.data.len()).sum();
    let mut shards: [Vec<&Made>; 2] = Default::default();
    let mut done = 0;
    for t in &made {
        shards[usize::from(done as f64 >= total as f64 * FIRST_SHARD)].push(t);
        done += t.data.len();
    }
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    for (shard, name) in shards.iter_mut().zip(names) {
        shard.sort_by_key(|t| (storage_rank(t.dtype), &t.name));
        let items: Vec<Item> = shard
            .iter()
            .map(|t| Item { name: &t.name, dtype: t.dtype, shape: &t.shape, data: &t.data })
            .collect();
        // As the safetensors library, which wrote the files that the golden data was computed from.
        write::write_aligned(&out_dir.join(name), &items, 8)?;
    }
    let places = shards.iter().zip(names).flat_map(|(s, f)| s.iter().map(move |t| (t.name.as_str(), f)));
    write::write_index(&out_dir.join("model.safetensors.index.json"), total as u64, places)
}

/// Place of a type in a file: the order in which the safetensors library stores them.
fn storage_rank(dtype: Dtype) -> u8 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::E8m0 => 2,
        Dtype::E4m3 => 3,
        _ => 4,
    }
}

/// The folder of test model `name` (`nano`, `micro`, `wide`), generated from this repository's `fixtures/model/NAME`
/// into the user's cache at the first call. Processes that call at the same time do not disturb each other.
pub fn cached(name: &str) -> Result<PathBuf> {
    // Where the program was built, else the checkout that it runs in.
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/model").join(name);
    let here = Path::new("fixtures/model").join(name);
    let fixture = if !built.exists() && here.exists() { here } else { built };
    let recipe_file = fixture.join("weights.json");
    let mut hash = Sha256::new();
    // Another number where other bytes are written: a cache of older ones would hide it.
    hash.update("layout 2");
    hash.update(files::read(&recipe_file, MAX_RECIPE_BYTES)?);
    for side in SIDE_FILES {
        let path = fixture.join(side);
        if path.exists() {
            hash.update(side);
            hash.update(fs::read(&path).map_err(Error::io(&path))?);
        }
    }
    let root = cache_root();
    let folder = root.join(format!("{name}-{}", &hex(&hash.finalize())[..16]));
    if folder.is_dir() {
        return Ok(folder);
    }
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let temporary = root.join(format!("{name}.part-{}-{call}", std::process::id()));
    write_folder(&Recipe::load(&recipe_file)?, &fixture, &temporary)?;
    let renamed = fs::rename(&temporary, &folder);
    if folder.is_dir() {
        // Another process may have been first; its folder has the same bytes.
        if renamed.is_err() {
            fs::remove_dir_all(&temporary).map_err(Error::io(&temporary))?;
        }
        return Ok(folder);
    }
    renamed.map(|()| folder.clone()).map_err(Error::io(&folder))
}

/// `$XDG_CACHE_HOME` or `$HOME/.cache`, else the system's temporary folder.
fn cache_root() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|h| h.join(".cache")));
    base.unwrap_or_else(std::env::temp_dir).join("hallmark").join("models")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
