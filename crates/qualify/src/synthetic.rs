//! A model of the released size without its weights: every matrix holds generated codes, so that speed and memory can be
//! measured on a machine to which 150 GB were never copied.
//!
//! Matrices share a pool of random codes (any bits are a valid trellis), so that they cost next to nothing to make and
//! still differ from each other; scales keep the activations where those of `fixtures/source-cuda` are. What such a
//! model says has no meaning; what it costs is that of the real one, apart from the Engram tables, which have as many
//! rows as the caller asks for.

use std::collections::HashMap;

use checkpoint::{Bytes, Config, Dtype, Exl3, Expected, Form, Group, Weight, engram_rows};
use exl3::{BLOCK, Codebook, Rate};
use model::Weights;
use numerics::generator::{fnv1a64, smgen::Tensor};
use serde_json::{Value, json};

use crate::release::generated::{DENSE, E0, RELEASED, bytes, family, plain};

/// Bytes of a pool; longer tensors repeat it.
const POOL: usize = 192 << 20;
/// Backbone layers of the released model.
const LAYERS: usize = 40;

/// The released configuration without draft stages and vision. `engram_vocab` is the least prime of the hash columns
/// (16,000,000 as released): each of the 24 columns of a table has about so many rows of 264 bytes.
///
/// # Errors
/// A sentence where the number makes no configuration.
pub fn config(engram_vocab: u64) -> Result<Config, String> {
    let mut tree: Value = serde_json::from_str(RELEASED).expect("the released configuration is JSON");
    if let Some(root) = tree.as_object_mut() {
        root.remove("vision_config");
    }
    let text = &mut tree["text_config"];
    let ratios: Vec<Value> =
        text["compress_ratios"].as_array().into_iter().flatten().take(LAYERS).cloned().collect();
    text["compress_ratios"] = json!(ratios);
    text["num_nextn_predict_layers"] = json!(0);
    text["engram_vocab_size"] = json!(engram_vocab);
    text["engram_num_embeddings"] = json!(engram_rows(engram_vocab, 2, 24));
    Config::from_json(&tree.to_string(), "the synthetic configuration").map_err(|e| e.to_string())
}

/// A token map of the configuration's sizes: ids wrap around.
pub fn token_map(config: &Config) -> Vec<u32> {
    (0..config.vocab_size).map(|id| (id % config.engram.compressed_vocab_size) as u32).collect()
}

/// Generated weights of a configuration; the routed experts are EXL3 (MCG) of one rate, all else as released.
pub struct Synthetic {
    rate: Rate,
    tensors: HashMap<String, Expected>,
    trellis: Bytes,
    e4m3: Bytes,
}

impl Synthetic {
    /// Weights of every tensor that `config` implies.
    pub fn new(config: &Config, rate: Rate) -> Self {
        Self::with_pool(config, rate, POOL)
    }

    fn with_pool(config: &Config, rate: Rate, pool: usize) -> Self {
        let (random, codes) = (Tensor::new("synthetic.trellis", 1), Tensor::new("synthetic.e4m3", 1));
        Self {
            rate,
            tensors: config.inventory().map(|t| (t.name.clone(), t)).collect(),
            trellis: bytes(pool, |i| random.stream().word(i).to_le_bytes()),
            e4m3: bytes(pool, |i| codes.e4m3_word(i)),
        }
    }

    /// Stored bytes of the weights that one token reads, and of all weights, both without the Engram tables; of the
    /// embedding a token reads one row.
    pub fn bytes(&self, config: &Config) -> [u64; 2] {
        let (top, experts) = (config.num_experts_per_tok as u64, config.n_routed_experts as u64);
        let (mut read, mut all) = (0, 0);
        for t in self.tensors.values().filter(|t| t.group != Group::EngramTable) {
            let routed = t.group == Group::RoutedExperts;
            let bytes = match (routed, t.linear) {
                (true, Some([rows, cols])) => {
                    let padded = |n: usize| n.next_multiple_of(BLOCK) as u64;
                    let trellis = padded(rows) * padded(cols) / 256 * self.rate.tile_bytes() as u64;
                    trellis + 2 * (padded(rows) + padded(cols))
                }
                (true, None) => 0, // the scales of the fp4 form
                _ => t.bytes(),
            };
            all += bytes;
            read += match t.name.as_str() {
                "embed.weight" => bytes / config.vocab_size as u64,
                _ if routed => bytes * top / experts,
                _ => bytes,
            };
        }
        [read, all]
    }

    fn exl3(&self, name: &str, rows: usize, cols: usize, e0: u8) -> Weight {
        let padded = |n: usize| n.next_multiple_of(BLOCK);
        let shape = [padded(cols) / 16, padded(rows) / 16, self.rate.words16()];
        let trellis = cut(&self.trellis, name, shape[0] * shape[1] * self.rate.tile_bytes());
        // The standard deviation that fp4 codes with exponent `e0` have, shared between both sign vectors.
        let size = 2f32.powi(i32::from(e0) - 127) * 2.9;
        let signs = |what: &str, n: usize, size: f32| {
            let stream = Tensor::new(&format!("{name}.{what}"), 1).stream();
            let value = move |i| if stream.word(i) & 1 == 1 { -size } else { size };
            bytes(2 * n, |i| half::f16::from_f32(value(i)).to_le_bytes())
        };
        let (suh, svh) = (signs("suh", padded(cols), size), signs("svh", padded(rows), 1.0));
        let layer = Exl3::new(name, rows, cols, shape, Codebook::Mcg, trellis, suh, svh);
        let layer = layer.expect("sizes follow from the shape");
        Weight::exl3(name, vec![layer]).expect("one layer")
    }

    fn quantised(&self, name: &str, form: Form, rows: usize, cols: usize, e0: u8) -> Weight {
        let scales = form.scale_shape(rows, cols).map_or(0, |[r, c]| r * c);
        let scale = Tensor::new(&format!("{name}.scale"), 1);
        let pattern = bytes(scales.clamp(16, 1 << 20).next_multiple_of(16), |i| [scale.e8m0(i, e0)]);
        let (data, scale) = (cut(&self.e4m3, name, rows * cols), Bytes::repeated(&pattern, scales));
        Weight::new(name, form, rows, cols, data, scale).expect("sizes follow from the form")
    }
}

/// A part of the pool that the name chooses; a longer tensor repeats the whole pool.
fn cut(pool: &Bytes, name: &str, len: usize) -> Bytes {
    match pool.len().checked_sub(len) {
        None => Bytes::repeated(pool, len),
        Some(room) => {
            let start = (fnv1a64(name.as_bytes()) % (room as u64 / 16 + 1)) as usize * 16;
            pool.slice(start, len).expect("a range inside the pool")
        }
    }
}

impl Weights for Synthetic {
    fn weight(&self, module: &str) -> checkpoint::Result<Weight> {
        let missing = || checkpoint::Error::Tensor {
            file: "the synthetic model".into(),
            tensor: module.into(),
            what: "is not defined".into(),
        };
        let full = format!("{module}.weight");
        let want = self.tensors.get(&full).or_else(|| self.tensors.get(module)).ok_or_else(missing)?;
        let (rows, cols) = match want.shape.as_slice() {
            [n] => (1, *n),
            [rows, rest @ ..] => (*rows, rest.iter().product()),
            [] => (1, 1),
        };
        let family = family(&want.name);
        let e0 = || {
            let base = family.trim_end_matches(".weight");
            E0.into_iter().find(|e| e.0 == base).map(|e| e.2).ok_or_else(missing)
        };
        Ok(match want.dtype {
            Dtype::I8 => self.exl3(module, rows, cols * 2, e0()?),
            Dtype::E4m3 if family == "engram.embed.weight" => {
                self.quantised(module, Form::Fp8Row32, rows, cols, e0()?)
            }
            Dtype::E4m3 => self.quantised(module, Form::Fp8Block32, rows, cols, e0()?),
            // Text alone never reads this bias.
            Dtype::F32 if family == "ffn.gate.bias_vl" => {
                Weight::from_f32(&want.name, rows, cols, &vec![0.0; rows * cols]).expect("sizes fit")
            }
            dtype => {
                let (_, std, offset) = DENSE.into_iter().find(|d| d.0 == family).ok_or_else(missing)?;
                let form = if dtype == Dtype::Bf16 { Form::Bf16 } else { Form::F32 };
                plain(&want.name, form, rows, cols, std, offset)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_the_released_one_but_for_the_engram_rows() {
        let c = config(1000).unwrap();
        assert_eq!((c.num_hidden_layers, c.n_routed_experts, c.vocab_size), (40, 384, 129_280));
        assert_eq!(c.engram.num_embeddings, [25_874, 30_058]);
        assert_eq!(config(16_000_000).unwrap().engram.num_embeddings, [384_006_168, 384_016_682]);
        assert!(config(0).is_err());
        let map = token_map(&c);
        assert_eq!((map.len(), map.iter().max()), (129_280, Some(&99_091)));
    }

    #[test]
    fn bytes_at_two_bits_are_those_of_the_plan() {
        let c = config(1000).unwrap();
        let [read, all] = Synthetic::with_pool(&c, Rate::from_bits(2.0).unwrap(), 1 << 20).bytes(&c);
        // 146.43 GB with dense weights as released, without Engram tables, draft stages and vision.
        assert_eq!((all as f64 / 1e7).round() / 1e2, 146.43);
        assert!((8.0e9..16.0e9).contains(&(read as f64)), "{read}");
    }

    #[test]
    fn every_weight_of_the_first_engram_layer_is_defined_and_experts_have_the_rate_asked_for() {
        let c = config(1000).unwrap();
        let s = Synthetic::with_pool(&c, Rate::from_bits(2.0).unwrap(), 1 << 20);
        for t in c.inventory().filter(|t| t.name.starts_with("layers.14.") && !t.name.contains("experts.1")) {
            let name = t.name.trim_end_matches(".weight").trim_end_matches(".scale").to_owned();
            let w = s.weight(&name).unwrap();
            assert!(!name.contains(".experts.") || w.layers()[0].rate().bits() == 2.0, "{name}");
        }
        let [a, b] = [1, 2].map(|e| s.weight(&format!("layers.14.ffn.experts.{e}.w2")).unwrap());
        let mut row = [vec![0.0; 2304], vec![0.0; 2304]];
        a.decode_row(7, &mut row[0]);
        b.decode_row(7, &mut row[1]);
        assert_ne!(row[0], row[1]);
        let rms = |v: &[f32]| (v.iter().map(|x| x * x).sum::<f32>() / v.len() as f32).sqrt();
        let fp4 = crate::release::generated::quantised(["w", "s"], Form::Fp4Row32, 1, 2304, 116);
        let mut other = vec![0.0; 2304];
        fp4.decode_row(0, &mut other);
        let ratio = rms(&row[0]) / rms(&other);
        assert!((0.7..1.4).contains(&ratio), "as large as the fp4 weights of the fixtures: {ratio}");
    }
}
