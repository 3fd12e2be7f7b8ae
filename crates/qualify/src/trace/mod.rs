//! Traces: named intermediates of a run in a safetensors file, by any engine (`docs/trace.md`).
//!
//! A tensor is named `PASS/NAME`; a pass is one prefill or one run of decode steps. Golden files of other engines have
//! the same layout without the header and are read as they are.

mod names;
mod record;

pub use names::{Kind, Place, TABLE, TableRow, place};
pub use record::{Decode, Recorder, record_decode, record_prefill};

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Error, Result, digest::sha256_hex};

/// Key of the header in the file's metadata.
pub const HEADER_KEY: &str = "hallmark.trace";
/// Version of the format that is written.
pub const VERSION: u32 = 1;

/// Who made a trace, of what, and how it rounds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Format version, 1.
    pub version: u32,
    /// Name and version of the engine.
    pub engine: String,
    /// Name of the model.
    pub model: String,
    /// Revision or fingerprint of the checkpoint, where known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub checkpoint: String,
    /// `exact`, `source`, `native`, or the engine's own word for its rounding.
    pub numerics: String,
    /// Device it ran on.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// What was changed on purpose, such as one embedding ulp; empty for a plain run.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub perturbation: String,
    /// SHA-256 over the passes' token ids: for each pass in the order of names its name, a zero byte, and the ids as
    /// little-endian u32.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tokens_sha256: String,
}

/// Elements of a tensor, widened.
#[derive(Clone, Debug, PartialEq)]
pub enum Elements {
    /// Values.
    Float(Vec<f32>),
    /// Indices, ids, flags.
    Int(Vec<i64>),
}

/// One tensor in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Row-major shape; the first dimension counts rows.
    pub shape: Vec<usize>,
    /// Elements.
    pub elements: Elements,
}

impl Tensor {
    /// A tensor of values; panics where the data does not fill the shape.
    pub fn float(shape: &[usize], data: Vec<f32>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "elements of {shape:?}");
        Self { shape: shape.to_vec(), elements: Elements::Float(data) }
    }

    /// A tensor of integers; panics where the data does not fill the shape.
    pub fn int(shape: &[usize], data: Vec<i64>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "elements of {shape:?}");
        Self { shape: shape.to_vec(), elements: Elements::Int(data) }
    }

    /// Number of rows; 1 for a scalar.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// The values, if it holds values.
    pub fn as_float(&self) -> Option<&[f32]> {
        match &self.elements {
            Elements::Float(v) => Some(v),
            Elements::Int(_) => None,
        }
    }

    /// The integers, if it holds integers.
    pub fn as_int(&self) -> Option<&[i64]> {
        match &self.elements {
            Elements::Int(v) => Some(v),
            Elements::Float(_) => None,
        }
    }

    /// `other`'s rows behind these; panics where widths or types differ.
    pub fn append(&mut self, other: &Tensor) {
        assert_eq!(self.shape[1..], other.shape[1..], "rows of different shapes");
        self.shape[0] += other.shape[0];
        match (&mut self.elements, &other.elements) {
            (Elements::Float(a), Elements::Float(b)) => a.extend_from_slice(b),
            (Elements::Int(a), Elements::Int(b)) => a.extend_from_slice(b),
            _ => panic!("values beside integers"),
        }
    }
}

/// A trace that is being made.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// Its header; `version` and `tokens_sha256` are filled in by [`Draft::write`].
    pub header: Header,
    tensors: BTreeMap<String, Tensor>,
}

impl Draft {
    /// An empty trace.
    pub fn new(header: Header) -> Self {
        Self { header, tensors: BTreeMap::new() }
    }

    /// Adds `pass/name`.
    pub fn put(&mut self, pass: &str, name: &str, tensor: Tensor) {
        self.tensors.insert(format!("{pass}/{name}"), tensor);
    }

    /// The finished trace, as if it had been written and read again.
    pub fn finish(mut self, file: &str) -> Trace {
        self.seal();
        Trace { file: file.into(), header: Some(self.header), store: Store::Memory(self.tensors) }
    }

    fn seal(&mut self) {
        self.header.version = VERSION;
        let tokens = self.tensors.iter().filter_map(|(name, t)| {
            let (pass, ids) = (name.strip_suffix("/tokens")?, t.as_int()?);
            Some((pass, ids))
        });
        let mut bytes = Vec::new();
        for (pass, ids) in tokens {
            bytes.extend_from_slice(pass.as_bytes());
            bytes.push(0);
            ids.iter().for_each(|id| bytes.extend_from_slice(&(*id as u32).to_le_bytes()));
        }
        self.header.tokens_sha256 = sha256_hex(&bytes);
    }

    /// Writes the file through a temporary beside it: values as F32, integers as I32, flags and masks as U8.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn write(mut self, path: &Path) -> Result<Trace> {
        self.seal();
        let mut header = serde_json::Map::new();
        let text = serde_json::to_string(&self.header).expect("a header is plain data");
        header.insert("__metadata__".into(), serde_json::json!({ "format": "pt", HEADER_KEY: text }));
        let mut offset = 0;
        for (name, t) in &self.tensors {
            let (dtype, size) = stored_type(t);
            let end = offset + size * t.shape.iter().product::<usize>();
            header.insert(
                name.clone(),
                serde_json::json!({ "dtype": dtype, "shape": t.shape, "data_offsets": [offset, end] }),
            );
            offset = end;
        }
        let mut head = Value::from(header).to_string().into_bytes();
        head.resize(head.len().next_multiple_of(8), b' ');
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".part");
        let temporary = Path::new(&temporary);
        let fill = || -> std::io::Result<()> {
            let mut out = BufWriter::new(File::create(temporary)?);
            out.write_all(&(head.len() as u64).to_le_bytes())?;
            out.write_all(&head)?;
            for t in self.tensors.values() {
                write_elements(&mut out, t)?;
            }
            out.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
            std::fs::rename(temporary, path)
        };
        fill().map_err(Error::io(path))?;
        Ok(self.finish(&file_label(path)))
    }
}

/// Stored type and element size of a tensor in memory.
fn stored_type(t: &Tensor) -> (&'static str, usize) {
    match &t.elements {
        Elements::Float(_) => ("F32", 4),
        Elements::Int(v) if !v.is_empty() && v.iter().all(|v| (0..=1).contains(v)) && t.shape.len() > 1 => {
            ("U8", 1)
        }
        Elements::Int(_) => ("I32", 4),
    }
}

fn write_elements(out: &mut impl Write, t: &Tensor) -> std::io::Result<()> {
    let byte = stored_type(t).0 == "U8";
    match &t.elements {
        Elements::Float(v) => v.iter().try_for_each(|v| out.write_all(&v.to_le_bytes())),
        Elements::Int(v) if byte => v.iter().try_for_each(|v| out.write_all(&[*v as u8])),
        Elements::Int(v) => v.iter().try_for_each(|v| out.write_all(&(*v as i32).to_le_bytes())),
    }
}

/// The last part of a path, for messages and reports: no report names a machine's folders.
fn file_label(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    range: std::ops::Range<usize>,
}

enum Store {
    Mapped { map: Mmap, entries: HashMap<String, Entry> },
    Memory(BTreeMap<String, Tensor>),
}

/// A finished trace; tensors are decoded when they are asked for.
pub struct Trace {
    file: String,
    header: Option<Header>,
    store: Store,
}

impl std::fmt::Debug for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Trace({}, {} tensors)", self.file, self.names().len())
    }
}

impl Trace {
    /// Opens a trace, or a golden file without a header.
    ///
    /// # Errors
    /// A file that can't be read, is no safetensors file, has a header of another version, or holds a tensor of a
    /// type that no trace has.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io(path))?;
        let size = file.metadata().map_err(Error::io(path))?.len();
        let label = file_label(path);
        if size < 8 {
            return Err(Error::file(label, "is no safetensors file: it is shorter than the header's length"));
        }
        // SAFETY: the map is read-only and private; a trace that another process truncates while it is read ends this
        // process as any mapped file would.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        Self::from_map(map, label)
    }

    fn from_map(map: Mmap, file: String) -> Result<Self> {
        let bad =
            |e: &dyn std::fmt::Display| Error::file(&file, format!("is no valid safetensors file: {e}"));
        let (head, metadata) = SafeTensors::read_metadata(&map).map_err(|e| bad(&e))?;
        SafeTensors::deserialize(&map).map_err(|e| bad(&e))?;
        let header = match metadata.metadata().as_ref().and_then(|m| m.get(HEADER_KEY)) {
            None => None,
            Some(text) => {
                let header: Header = serde_json::from_str(text)
                    .map_err(|e| Error::file(&file, format!("metadata {HEADER_KEY}: {e}")))?;
                if header.version != VERSION {
                    let what = format!(
                        "is a trace of version {}, and version {VERSION} is read; write it again",
                        header.version
                    );
                    return Err(Error::file(&file, what));
                }
                Some(header)
            }
        };
        let mut entries = HashMap::new();
        for (name, info) in metadata.tensors() {
            if element_size(info.dtype).is_none() {
                let what = format!("tensor {name} is {:?}, which no trace holds: use F32 or I32", info.dtype);
                return Err(Error::file(&file, what));
            }
            let (start, end) = info.data_offsets;
            let range = head + 8 + start..head + 8 + end;
            entries.insert(name, Entry { dtype: info.dtype, shape: info.shape.clone(), range });
        }
        Ok(Self { file, header, store: Store::Mapped { map, entries } })
    }

    /// File name, for messages.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The header; `None` for a golden file of another engine.
    pub fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }

    /// One line about the trace: engine, numerics and perturbation where the header says them.
    pub fn title(&self) -> String {
        match &self.header {
            None => format!("{} (no header)", self.file),
            Some(h) => {
                let mut text = format!("{} ({}, {}", self.file, h.engine, h.numerics);
                if !h.perturbation.is_empty() {
                    text = format!("{text}, {}", h.perturbation);
                }
                text + ")"
            }
        }
    }

    /// Full names, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = match &self.store {
            Store::Mapped { entries, .. } => entries.keys().map(String::as_str).collect(),
            Store::Memory(tensors) => tensors.keys().map(String::as_str).collect(),
        };
        names.sort_unstable();
        names
    }

    /// Names of the passes, `prompt2` before `prompt10`; the empty name for tensors without one.
    pub fn passes(&self) -> Vec<String> {
        let mut passes: Vec<String> = self.names().iter().map(|n| split(n).0.to_owned()).collect();
        passes.dedup();
        passes.sort_by_key(|p| {
            let word = p.trim_end_matches(|c: char| c.is_ascii_digit());
            (word.to_owned(), p[word.len()..].parse::<u64>().unwrap_or(0), p.clone())
        });
        passes.dedup();
        passes
    }

    /// Names in `pass`, in the order in which a forward pass makes them.
    pub fn tensors(&self, pass: &str) -> Vec<String> {
        let mut names: Vec<String> = self
            .names()
            .into_iter()
            .filter_map(|n| {
                let (p, name) = split(n);
                (p == pass).then(|| name.to_owned())
            })
            .collect();
        names.sort_by_key(|n| (place(n).order, n.clone()));
        names
    }

    /// Whether `pass/name` is there.
    pub fn has(&self, pass: &str, name: &str) -> bool {
        let full = join(pass, name);
        match &self.store {
            Store::Mapped { entries, .. } => entries.contains_key(&full),
            Store::Memory(tensors) => tensors.contains_key(&full),
        }
    }

    /// The tensor `pass/name`.
    pub fn get(&self, pass: &str, name: &str) -> Option<Tensor> {
        let full = join(pass, name);
        match &self.store {
            Store::Memory(tensors) => tensors.get(&full).cloned(),
            Store::Mapped { map, entries } => entries.get(&full).map(|e| decode(e, &map[e.range.clone()])),
        }
    }

    /// The values of `pass/name`.
    ///
    /// # Errors
    /// A tensor that is missing or holds no values.
    pub fn floats(&self, pass: &str, name: &str) -> Result<Tensor> {
        match self.get(pass, name) {
            Some(t) if t.as_float().is_some() => Ok(t),
            Some(_) => Err(Error::file(&self.file, format!("tensor {} holds no values", join(pass, name)))),
            None => Err(Error::file(&self.file, format!("tensor {} is missing", join(pass, name)))),
        }
    }

    /// Token ids of a pass.
    ///
    /// # Errors
    /// A pass without `tokens`, or ids that are no u32.
    pub fn tokens(&self, pass: &str) -> Result<Vec<u32>> {
        let name = join(pass, "tokens");
        let t = self
            .get(pass, "tokens")
            .ok_or_else(|| Error::file(&self.file, format!("tensor {name} is missing")))?;
        let ids = t.as_int().and_then(|ids| ids.iter().map(|id| u32::try_from(*id).ok()).collect());
        ids.ok_or_else(|| Error::file(&self.file, format!("tensor {name} holds no token ids")))
    }
}

/// Pass and name of a full name.
fn split(full: &str) -> (&str, &str) {
    full.split_once('/').unwrap_or(("", full))
}

fn join(pass: &str, name: &str) -> String {
    if pass.is_empty() { name.to_owned() } else { format!("{pass}/{name}") }
}

fn element_size(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::BOOL | Dtype::U8 | Dtype::I8 => Some(1),
        Dtype::F16 | Dtype::BF16 | Dtype::I16 => Some(2),
        Dtype::F32 | Dtype::I32 => Some(4),
        Dtype::F64 | Dtype::I64 => Some(8),
        _ => None,
    }
}

fn decode(e: &Entry, bytes: &[u8]) -> Tensor {
    fn words<const N: usize, T>(bytes: &[u8], f: impl Fn([u8; N]) -> T) -> Vec<T> {
        bytes.chunks_exact(N).map(|c| f(c.try_into().expect("chunks of N"))).collect()
    }
    let elements = match e.dtype {
        Dtype::F32 => Elements::Float(words(bytes, f32::from_le_bytes)),
        Dtype::BF16 => Elements::Float(words(bytes, |b| numerics::bf16::from_bits(u16::from_le_bytes(b)))),
        Dtype::F16 => Elements::Float(words(bytes, |b| f16_value(u16::from_le_bytes(b)))),
        Dtype::F64 => Elements::Float(words(bytes, |b| f64::from_le_bytes(b) as f32)),
        Dtype::I8 => Elements::Int(words(bytes, |b| i64::from(i8::from_le_bytes(b)))),
        Dtype::I16 => Elements::Int(words(bytes, |b| i64::from(i16::from_le_bytes(b)))),
        Dtype::I32 => Elements::Int(words(bytes, |b| i64::from(i32::from_le_bytes(b)))),
        Dtype::I64 => Elements::Int(words(bytes, i64::from_le_bytes)),
        _ => Elements::Int(bytes.iter().map(|b| i64::from(*b)).collect()),
    };
    Tensor { shape: e.shape.clone(), elements }
}

/// The value of an IEEE half.
fn f16_value(bits: u16) -> f32 {
    let (sign, exponent, mantissa) = (bits >> 15, (bits >> 10) & 31, f32::from(bits & 1023));
    let magnitude = match exponent {
        0 => mantissa * 2f32.powi(-24),
        31 if mantissa == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        e => (1.0 + mantissa / 1024.0) * 2f32.powi(i32::from(e) - 15),
    };
    if sign == 1 { -magnitude } else { magnitude }
}
