//! What a pack changes against the released form: linear layers as EXL3, a head in FP8, Engram tables from elsewhere
//! [EXL3 specification, sections 11 and 12]. The tensors decide what a layer is; where the configuration makes a claim
//! about it, it must be true.

use std::collections::HashMap;

use exl3::{Codebook, Linear, Parts, Rate, Tensor};
use serde::Deserialize;

use crate::{
    Checkpoint, Config, Dtype, Exl3, Expected, Group, Weight,
    config::Quantization,
    error::{Error, Result},
    source::Source,
};

/// Tensors of an EXL3 layer.
const PARTS: [&str; 7] = ["trellis", "suh", "svh", "su", "sv", "mcg", "mul1"];
/// Those of which one is enough to make a layer EXL3.
const TELLTALE: usize = 5;
/// Per-tensor facts beside the weights.
const STORAGE: &str = "quantization_config.json";
/// Largest such file; one of the full model has about 30 MB.
const MAX_STORAGE_BYTES: usize = 200_000_000;

/// One EXL3 layer of a weight, as the header and the configuration gave it.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    /// Name before `.trellis`.
    pub name: String,
    /// Output features without padding.
    pub rows: usize,
    pub rate: Rate,
    pub codebook: Codebook,
}

/// The layers of one weight.
#[derive(Clone, Debug)]
pub(crate) struct Module {
    pub layers: Vec<Layer>,
    pub rows: usize,
    pub cols: usize,
    pub group: Group,
}

/// `quantization_config.json`, as far as it can contradict the tensors.
#[derive(Default, Deserialize)]
pub(crate) struct Storage {
    #[serde(default)]
    tensor_storage: HashMap<String, Stored>,
}

#[derive(Deserialize)]
struct Stored {
    quant_format: Option<String>,
    bits_per_weight: Option<f64>,
    mul1_multiplier: Option<u64>,
    mcg_multiplier: Option<u64>,
}

impl Storage {
    /// The file of `source`, if there is one and the configuration says EXL3.
    pub(crate) fn read(source: &Source, quantization: &Quantization) -> Result<Self> {
        if !quantization.exl3 || !source.names()?.iter().any(|n| n == STORAGE) {
            return Ok(Self::default());
        }
        let text = source.text(STORAGE, MAX_STORAGE_BYTES)?;
        serde_json::from_str(&text)
            .map_err(|e| Error::invalid(source.label(STORAGE), format!("is not valid: {e}")))
    }

    /// What it says about `layer` that is not so.
    fn contradiction(&self, layer: &Layer) -> Option<String> {
        let said = self.tensor_storage.get(&layer.name)?;
        let bits = layer.rate.bits();
        if said.quant_format.as_ref().is_some_and(|f| f != "exl3") {
            return Some(format!("is EXL3, but {STORAGE} says {}", said.quant_format.as_deref()?));
        }
        // Some writers count the scales in, which adds at most 16 bits a feature over 128 of them.
        if let Some(b) = said.bits_per_weight.filter(|b| *b < bits || *b >= bits + 0.3) {
            return Some(format!("has {bits} bits per weight, but {STORAGE} says {b}"));
        }
        let multiplier = |of: Codebook| match of {
            Codebook::Mul1 => said.mul1_multiplier,
            Codebook::Mcg => said.mcg_multiplier,
            Codebook::ThreeInst => None,
        };
        [Codebook::Mul1, Codebook::Mcg].into_iter().find_map(|of| {
            let m = multiplier(of)?;
            let good = of == layer.codebook && m == u64::from(of.multiplier());
            let have = layer.codebook.name();
            (!good).then(|| format!("has codebook {have}, but {STORAGE} says {} with {m}", of.name()))
        })
    }
}

impl Checkpoint {
    /// Takes `want`, the `.weight` of a linear layer, as EXL3 if it is stored so.
    pub(crate) fn take_exl3(&mut self, want: &Expected, storage: &Storage) -> Result<bool> {
        let (Some([rows, cols]), Some(module)) = (want.linear, want.name.strip_suffix(".weight")) else {
            return Ok(false);
        };
        let groups = if module.ends_with(".attn.wo_a") { self.config.o_groups } else { 1 };
        let slice = |g: usize| format!("{module}.slice.{g}");
        let stored = |layer: &str| {
            PARTS[..TELLTALE].iter().any(|p| self.tensors.contains_key(&format!("{layer}.{p}")))
        };
        let names: Vec<(String, usize)> = if stored(module) {
            vec![(module.into(), rows)]
        } else if module.ends_with(".attn.wo_a") && (0..groups).any(|g| stored(&slice(g))) {
            (0..groups).map(|g| (slice(g), rows / groups)).collect()
        } else {
            return Ok(false);
        };
        if !self.config.quantization.exl3 {
            let what = "is EXL3, but quantization_config.quant_method says fp8";
            return Err(Error::tensor(self.source.label("config.json"), module, what));
        }
        let mut layers = Vec::with_capacity(names.len());
        for (name, rows) in names {
            layers.push(self.exl3_layer(name, rows, cols, want.group, storage)?);
            for part in PARTS {
                let name = format!("{}.{part}", layers.last().expect("just pushed").name);
                if let Some(entry) = self.tensors.get_mut(&name) {
                    entry.take(want.group);
                }
            }
        }
        let cuts = layers.len() == 1 && groups > 1 && !(rows / groups).is_multiple_of(exl3::BLOCK);
        if cuts {
            let what = format!(
                "has one EXL3 layer for {groups} groups of {} outputs, which cannot be cut apart; use one layer a group \
                 ({module}.slice.0 and so on)",
                rows / groups
            );
            return Err(Error::unsupported(self.source.root(), format!("tensor {module} {what}")));
        }
        self.exl3.insert(module.into(), Module { layers, rows, cols, group: want.group });
        Ok(true)
    }

    fn exl3_layer(
        &self,
        name: String,
        rows: usize,
        cols: usize,
        group: Group,
        storage: &Storage,
    ) -> Result<Layer> {
        let part = |part: &str| {
            self.tensors.get(&format!("{name}.{part}")).map(|e| Tensor {
                dtype: e.dtype.name(),
                shape: &e.shape,
                bytes: &self.shards[e.shard].bytes[e.offset..e.offset + e.len],
            })
        };
        let parts = Parts {
            trellis: part("trellis"),
            suh: part("suh"),
            svh: part("svh"),
            su: part("su"),
            sv: part("sv"),
            mcg: part("mcg"),
            mul1: part("mul1"),
        };
        let file = || {
            let shard = PARTS.iter().find_map(|p| self.tensors.get(&format!("{name}.{p}")));
            shard.map_or(self.source.root(), |e| self.shards[e.shard].label.clone())
        };
        let linear = Linear::from_parts(&name, &parts).map_err(|e| refusal(file(), e))?;
        let padded = |n: usize| n.next_multiple_of(exl3::BLOCK);
        let found = [linear.in_features(), linear.out_features()];
        if found != [padded(cols), padded(rows)] {
            let what = format!(
                "has {} inputs and {} outputs, not {} and {}",
                found[0],
                found[1],
                padded(cols),
                padded(rows)
            );
            return Err(Error::tensor(file(), format!("{name}.trellis"), what));
        }
        let (rate, codebook) = (linear.trellis().rate(), linear.codebook());
        let layer = Layer { name: name.clone(), rows, rate, codebook };
        let said = contradiction(&self.config, &layer, group).or_else(|| storage.contradiction(&layer));
        match said {
            None => Ok(layer),
            Some(what) => Err(Error::tensor(file(), format!("{}.trellis", layer.name), what)),
        }
    }

    /// Stored bytes of a layer, marker included.
    pub(crate) fn exl3_bytes(&self, layer: &Layer) -> u64 {
        let parts = PARTS.iter().filter_map(|p| self.tensors.get(&format!("{}.{p}", layer.name)));
        parts.map(|e| e.len as u64).sum()
    }

    /// The weight of an EXL3 module.
    pub(crate) fn exl3_weight(&self, name: &str, module: &Module) -> Result<Weight> {
        let mut layers = Vec::with_capacity(module.layers.len());
        for layer in &module.layers {
            let tensor = |part: &str| self.entry(&format!("{}.{part}", layer.name));
            let trellis = tensor("trellis")?;
            let label = || self.shards[trellis.shard].label.clone();
            let [a, b, c] = trellis.shape[..] else {
                return Err(Error::tensor(label(), &layer.name, "has no trellis of three dimensions"));
            };
            let (suh, svh) = (self.bytes(tensor("suh")?), self.bytes(tensor("svh")?));
            let bytes = self.bytes(trellis);
            let made =
                Exl3::new(&layer.name, layer.rows, module.cols, [a, b, c], layer.codebook, bytes, suh, svh);
            layers.push(made.map_err(|e| refusal(label(), e))?);
        }
        let groups = if name.ends_with(".attn.wo_a") { self.config.o_groups } else { 1 };
        if let [one] = &layers[..]
            && groups > 1
        {
            let rows = module.rows / groups;
            layers = (0..groups).map(|g| one.columns(g * rows, rows)).collect();
            self.count_copies(groups);
        }
        Weight::exl3(name, layers).map_err(|what| Error::invalid(self.source.root(), what))
    }

    /// Takes the head as FP8 with a scale per row and 32 columns if it is stored so.
    pub(crate) fn take_mxfp8_head(&mut self, want: &Expected) -> bool {
        let is_row_scale = |e: &crate::checkpoint::Entry| {
            matches!(e.dtype, Dtype::E8m0 | Dtype::U8) && e.shape == [want.shape[0], want.shape[1] / 32]
        };
        let head =
            self.tensors.get("head.weight").filter(|e| e.dtype == Dtype::E4m3 && e.shape == want.shape);
        let fits = self.config.quantization.exl3
            && want.name == "head.weight"
            && head.is_some()
            && self.tensors.get("head.scale").is_some_and(is_row_scale);
        if !fits {
            return false;
        }
        for name in ["head.weight", "head.scale"] {
            self.tensors.get_mut(name).expect("just found").take(want.group);
        }
        // Some writers call the scale's bytes U8.
        self.tensors.get_mut("head.scale").expect("just found").dtype = Dtype::E8m0;
        true
    }

    /// Gives the tensors of a head that is stored as `lm_head` their released names.
    pub(crate) fn rename_head(&mut self) {
        if !self.config.quantization.exl3 || self.tensors.keys().any(|n| n.starts_with("head.")) {
            return;
        }
        let old: Vec<String> = self.tensors.keys().filter(|n| n.starts_with("lm_head.")).cloned().collect();
        for name in old {
            let rest = match &name["lm_head.".len()..] {
                "weight_scale" => "scale",
                rest => rest,
            };
            let new = format!("head.{rest}");
            if !self.tensors.contains_key(&new)
                && let Some(entry) = self.tensors.remove(&name)
            {
                self.tensors.insert(new, entry);
            }
        }
    }
}

/// What the configuration says about a layer that is not so.
fn contradiction(config: &Config, layer: &Layer, group: Group) -> Option<String> {
    if group != Group::RoutedExperts {
        return None;
    }
    let said = &config.quantization;
    if let Some(codebook) = said.codebook.as_ref().filter(|c| *c != layer.codebook.name()) {
        let have = layer.codebook.name();
        return Some(format!(
            "has codebook {have}, but config.json says quantization_config.codebook {codebook}"
        ));
    }
    let (number, matrix) = expert(&layer.name)?;
    let (bits, field) = said.expert_rate(number, matrix)?;
    let have = layer.rate.bits();
    (bits != have).then(|| format!("has {have} bits per weight, but config.json says {field} {bits}"))
}

/// Layer and matrix of `layers.7.ffn.experts.3.w2`.
fn expert(name: &str) -> Option<(usize, &str)> {
    let mut parts = name.strip_prefix("layers.")?.split('.');
    let layer = parts.next()?.parse().ok()?;
    Some((layer, parts.next_back()?))
}

/// A refusal of the EXL3 reader, which names the tensor.
fn refusal(file: String, e: exl3::Error) -> Error {
    match e {
        exl3::Error::Legacy { .. } => Error::unsupported(file, e.to_string()),
        e => Error::invalid(file, e.to_string()),
    }
}
