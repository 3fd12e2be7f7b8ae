//! The committed part of `fixtures/source-cuda`.

use std::{collections::BTreeMap, fs, path::Path};

use safetensors::{Dtype, SafeTensors, tensor::Metadata};
use serde::Deserialize;

use crate::{Error, Result, inputs::checkout, receipt::FileHash, sha256_hex};

/// Folder of the fixtures inside a checkout.
const FOLDER: &str = "fixtures/source-cuda";

/// One safetensors file in memory.
pub struct Store {
    file: FileHash,
    bytes: Vec<u8>,
    start: usize,
    header: Metadata,
}

impl Store {
    fn open(root: &Path, name: &str) -> Result<Self> {
        let name = format!("{FOLDER}/{name}");
        let path = root.join(&name);
        let bytes = fs::read(&path).map_err(Error::io(&path))?;
        let bad = |e: safetensors::SafeTensorError| Error::file(&name, format!("is damaged: {e}"));
        let (length, header) = SafeTensors::read_metadata(&bytes).map_err(bad)?;
        let file = FileHash { name: name.clone(), bytes: bytes.len() as u64, sha256: sha256_hex(&bytes) };
        Ok(Self { file, bytes, start: length + 8, header })
    }

    fn get(&self, tensor: &str) -> Result<(&[u8], Dtype, &[usize])> {
        let info = self.header.info(tensor).ok_or_else(|| {
            Error::file(&self.file.name, format!("has no tensor {tensor}; restore the committed file"))
        })?;
        let (from, to) = info.data_offsets;
        Ok((&self.bytes[self.start + from..self.start + to], info.dtype, &info.shape))
    }

    /// Shape of a tensor.
    ///
    /// # Errors
    /// A tensor that is missing.
    pub fn shape(&self, tensor: &str) -> Result<Vec<usize>> {
        Ok(self.get(tensor)?.2.to_vec())
    }

    /// The stored bytes of a tensor.
    ///
    /// # Errors
    /// A tensor that is missing.
    pub fn raw(&self, tensor: &str) -> Result<&[u8]> {
        Ok(self.get(tensor)?.0)
    }

    /// Whether the tensor is there.
    pub fn has(&self, tensor: &str) -> bool {
        self.header.info(tensor).is_some()
    }

    /// A tensor of bf16 or single-precision values.
    ///
    /// # Errors
    /// A tensor that is missing or holds something else.
    pub fn values(&self, tensor: &str) -> Result<Vec<f32>> {
        let (bytes, dtype, _) = self.get(tensor)?;
        match dtype {
            Dtype::F32 => {
                Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
            }
            Dtype::BF16 => Ok(bytes
                .chunks_exact(2)
                .map(|b| numerics::bf16::from_bits(u16::from_le_bytes([b[0], b[1]])))
                .collect()),
            other => Err(Error::file(&self.file.name, format!("{tensor} is {other:?}, not values"))),
        }
    }

    /// A tensor of integers.
    ///
    /// # Errors
    /// A tensor that is missing or holds something else.
    pub fn ints(&self, tensor: &str) -> Result<Vec<i64>> {
        let (bytes, dtype, _) = self.get(tensor)?;
        match dtype {
            Dtype::U8 => Ok(bytes.iter().map(|b| i64::from(*b)).collect()),
            Dtype::I16 => {
                Ok(bytes.chunks_exact(2).map(|b| i64::from(i16::from_le_bytes([b[0], b[1]]))).collect())
            }
            Dtype::I32 => Ok(bytes
                .chunks_exact(4)
                .map(|b| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]])))
                .collect()),
            Dtype::I64 => Ok(bytes
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes(b.try_into().unwrap_or_default()))
                .collect()),
            other => Err(Error::file(&self.file.name, format!("{tensor} is {other:?}, not integers"))),
        }
    }
}

/// Hash, dtype and shape of a whole tensor.
#[derive(Clone, Debug, Deserialize)]
pub struct Whole(pub String, pub String, pub Vec<usize>);

#[derive(Deserialize)]
struct Hashes {
    ops: BTreeMap<String, Whole>,
    unary_bf16: BTreeMap<String, String>,
}

/// How far a variant of the reference moved from its base run.
#[derive(Clone, Debug, Deserialize)]
pub struct Variant {
    /// NRMS of all logits.
    pub nrms: f64,
    /// Mean KL.
    pub kl_mean: f64,
    /// Share of positions with the same best token.
    pub top1_agree: f64,
    /// Expert choices that differ.
    #[serde(default)]
    pub expert_changes: Option<u64>,
    /// NRMS of the sampled stream elements by layer.
    #[serde(default)]
    pub layer_sample_nrms: Vec<f64>,
}

/// The torch CPU port on one layer.
#[derive(Clone, Debug, Deserialize)]
pub struct PortLayer {
    /// The layer.
    pub layer: usize,
    /// Teacher-forced NRMS of the streams.
    pub forced_nrms: f64,
    /// NRMS of the streams in its own run.
    pub free_nrms: f64,
}

#[derive(Deserialize)]
struct Port {
    layers: Vec<PortLayer>,
    logits: Variant,
}

/// Distance from the exact result.
#[derive(Deserialize)]
struct Exact {
    nrms: f64,
}

#[derive(Deserialize)]
struct Attention {
    vs_exact_fp64: Exact,
}

#[derive(Deserialize)]
struct Noise {
    rows_kept: BTreeMap<String, Vec<usize>>,
    variants: BTreeMap<String, Variant>,
    port: Port,
    sparse_attn: Attention,
}

/// All of it.
pub struct Fixtures {
    /// Operators.
    pub ops: Store,
    /// Single blocks.
    pub blocks: Store,
    /// Streams of eight tokens behind eleven layers.
    pub streams: Store,
    /// Logits.
    pub whole: Store,
    hashes: Hashes,
    noise: Noise,
}

impl Fixtures {
    /// Reads the fixtures of the checkout around the working directory.
    ///
    /// # Errors
    /// No checkout, or a file that is missing or damaged.
    pub fn open() -> Result<Self> {
        let root = checkout().ok_or_else(|| {
            Error::Usage(format!("qualify release reads {FOLDER}: run inside a checkout of hallmark"))
        })?;
        let json = |name: &str| -> Result<String> {
            let path = root.join(FOLDER).join(name);
            fs::read_to_string(&path).map_err(Error::io(&path))
        };
        let bad = |name: &str, e: serde_json::Error| Error::file(format!("{FOLDER}/{name}"), e.to_string());
        Ok(Self {
            ops: Store::open(&root, "ops.safetensors")?,
            blocks: Store::open(&root, "blocks.safetensors")?,
            streams: Store::open(&root, "streams8.safetensors")?,
            whole: Store::open(&root, "whole.safetensors")?,
            hashes: serde_json::from_str(&json("sha256.json")?).map_err(|e| bad("sha256.json", e))?,
            noise: serde_json::from_str(&json("noise.json")?).map_err(|e| bad("noise.json", e))?,
        })
    }

    /// The files, for the receipt.
    pub fn files(&self) -> Vec<FileHash> {
        [&self.ops, &self.blocks, &self.streams, &self.whole].map(|s| s.file.clone()).to_vec()
    }

    /// What is known of a whole operator tensor.
    ///
    /// # Errors
    /// A tensor that is not listed.
    pub fn whole_op(&self, name: &str) -> Result<&Whole> {
        self.hashes.ops.get(name).ok_or_else(|| Error::file("sha256.json", format!("has no {name}")))
    }

    /// SHA-256 of a unary function's results in bf16.
    ///
    /// # Errors
    /// A function that is not listed.
    pub fn unary(&self, name: &str) -> Result<&str> {
        let hash = self.hashes.unary_bf16.get(name);
        hash.map(String::as_str).ok_or_else(|| Error::file("sha256.json", format!("has no {name}")))
    }

    /// Rows of an operator tensor that are kept; `None` for all.
    pub fn rows(&self, name: &str) -> Option<&[usize]> {
        self.noise.rows_kept.get(name).map(Vec::as_slice)
    }

    /// A variant of the reference.
    ///
    /// # Errors
    /// A variant that is not listed.
    pub fn variant(&self, name: &str) -> Result<&Variant> {
        self.noise
            .variants
            .get(name)
            .ok_or_else(|| Error::file("noise.json", format!("has no variant {name}")))
    }

    /// The torch CPU port, layer by layer.
    pub fn port(&self) -> &[PortLayer] {
        &self.noise.port.layers
    }

    /// The torch CPU port's logits of eight tokens.
    pub fn port_logits(&self) -> &Variant {
        &self.noise.port.logits
    }

    /// Distance of the CUDA attention from exact softmax.
    pub fn attention_from_exact(&self) -> f64 {
        self.noise.sparse_attn.vs_exact_fp64.nrms
    }
}
