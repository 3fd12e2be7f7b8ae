//! What becomes EXL3, at which rate, and whose inputs calibrate it.

use checkpoint::{Checkpoint, Group};
use exl3::{Codebook, Rate, encode::Encoder};
use serde::Serialize;

use crate::{Error, Result};

/// How long to search for the best codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// As the format's library does: whole ring twice, the scale of each matrix searched for.
    Full,
    /// Half of the ring's second pass less and the usual scale of the rate: five to eight times faster on small matrices,
    /// one and a half times on large ones, for some percent more error.
    Short,
}

impl Search {
    /// An encoder of this kind.
    pub(crate) fn encoder(self, rate: Rate, codebook: Codebook) -> Encoder {
        let full = Encoder::new(rate, codebook);
        match self {
            Search::Full => full,
            Search::Short => Encoder { context: 32, global_scale: Some(usual_scale(rate, codebook)), ..full },
        }
    }
}

/// The scale that the search usually finds [EXL3 specification, section 8; above 4 bits measured on the demo model].
fn usual_scale(rate: Rate, codebook: Codebook) -> f64 {
    let mul1 = match rate.half_bits() {
        2 => 0.84,
        3 => 0.81,
        4 => 0.79,
        5 => 0.77,
        6 => 0.75,
        7 => 0.74,
        8 => 0.73,
        10 => 0.71,
        12 => 0.69,
        14 => 0.67,
        _ => 0.65,
    };
    // The other codebooks are as much wider.
    if codebook == Codebook::Mul1 { mul1 } else { 1.244 * mul1 }
}

/// Settings of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Rate of the routed experts.
    pub rate: Rate,
    /// Codebook of all layers.
    pub codebook: Codebook,
    /// Rate of attention, shared experts, compressors and Engram projections; none keeps them as released.
    pub dense: Option<Rate>,
    /// Rate of the output head; none keeps it as released.
    pub head: Option<Rate>,
    /// How long to search.
    pub search: Search,
    /// Whether the pack holds the Engram tables.
    pub engram: bool,
    /// Threads; all cores by default.
    pub threads: Option<usize>,
}

impl Options {
    /// # Errors
    /// A half rate with a codebook other than MUL1.
    pub fn check(&self) -> Result<()> {
        let rates = [Some(self.rate), self.dense, self.head];
        match rates.into_iter().flatten().find(|r| r.is_half() && self.codebook != Codebook::Mul1) {
            None => Ok(()),
            Some(rate) => Err(Error::Settings(format!(
                "{rate} bits per weight exist with the codebook mul1 only, not with {}",
                self.codebook.name()
            ))),
        }
    }
}

/// One EXL3 layer to be made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Job {
    /// Its name in the pack.
    pub name: String,
    /// The weight in the released checkpoint.
    pub module: String,
    /// First output row of the weight.
    pub first: usize,
    pub rows: usize,
    pub cols: usize,
    #[serde(skip)]
    pub rate: Rate,
    #[serde(skip)]
    pub group: Group,
    /// Name of the inputs that calibrate it.
    pub inputs: String,
}

/// The name under which the inputs of `layer` are collected: layers that read the same share it.
pub(crate) fn inputs_of(layer: &str) -> String {
    if let Some((block, rest)) = layer.split_once(".attn.") {
        return match rest {
            "wq_a" | "wkv" | "compressor.wkv" | "compressor.wgate" | "indexer.weights_proj" => {
                format!("{block}.attn.wq_a")
            }
            "wq_b" | "indexer.wq_b" => format!("{block}.attn.wq_b"),
            _ => layer.to_owned(),
        };
    }
    match layer.split_once(".ffn.") {
        Some((block, rest)) if !rest.ends_with(".w2") => format!("{block}.ffn.gate"),
        _ => layer.to_owned(),
    }
}

/// Part of the pack that a tensor is written with: 0 is what belongs to no block, then layer by layer, then all else.
pub(crate) fn part_of(tensor: &str, layers: usize) -> usize {
    let number = |rest: &str| rest.split('.').next().and_then(|n| n.parse::<usize>().ok());
    match tensor.strip_prefix("layers.").and_then(number) {
        Some(layer) => layer + 1,
        None if tensor.starts_with("embed.")
            || tensor.starts_with("head.")
            || tensor.starts_with("norm.") =>
        {
            0
        }
        None => layers + 1,
    }
}

/// Every layer to be made, part by part.
pub(crate) fn jobs(ckpt: &Checkpoint, options: &Options) -> Vec<Vec<Job>> {
    let config = ckpt.config();
    let mut parts = vec![Vec::new(); config.num_hidden_layers + 2];
    for t in config.inventory() {
        let (Some([rows, cols]), Some(module)) = (t.linear, t.name.strip_suffix(".weight")) else { continue };
        let rate = match t.group {
            Group::RoutedExperts => Some(options.rate),
            Group::Embedding => options.head,
            Group::Attention | Group::SharedExperts | Group::Engram => options.dense,
            Group::KvIndex => options.dense.and_then(|r| index_rate(module, r)),
            // The draft head changes no answer and is small: it stays as released.
            _ => None,
        };
        let Some(rate) = rate else { continue };
        let groups = if module.ends_with(".attn.wo_a") { config.o_groups } else { 1 };
        for g in 0..groups {
            let name =
                if module.ends_with(".attn.wo_a") { format!("{module}.slice.{g}") } else { module.into() };
            let rows = rows / groups;
            let inputs = inputs_of(&name);
            let (module, group) = (module.to_owned(), t.group);
            parts[part_of(&t.name, config.num_hidden_layers)].push(Job {
                name,
                module,
                first: g * rows,
                rows,
                cols,
                rate,
                group,
                inputs,
            });
        }
    }
    parts
}

/// Rate of a compressor's or indexer's matrix where dense layers have `dense`. The weights of the index heads are few and
/// the keys choose what attention sees: the former stay, the latter get 8 bits, as in public packs.
fn index_rate(module: &str, dense: Rate) -> Option<Rate> {
    if module.ends_with("weights_proj") {
        return None;
    }
    if module.ends_with("indexer.wk") { Rate::from_bits(8.0).ok() } else { Some(dense) }
}
