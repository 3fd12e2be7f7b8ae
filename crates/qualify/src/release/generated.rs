//! Weights and inputs of `fixtures/source-cuda`: the released geometry with 16 experts and a vocabulary of 1024, every
//! tensor from the generator `smgen/1`. Nothing is read from a file, so a layer costs a second and no disk.

use std::collections::HashMap;

use checkpoint::{Bytes, Config, Dtype, Expected, Form, Weight};
use model::Weights;
use numerics::{bf16, generator::smgen::Tensor};
use ops::Host;
use rayon::prelude::*;
use serde_json::{Value, json};

pub(crate) const RELEASED: &str = include_str!("../../../../fixtures/released/config.json");
/// Seed of the committed fixtures.
pub const SEED: u64 = 1;

/// Exponent bytes of the E8M0 scales by module; the last column is that of the calm variant, whose layers add a quarter
/// as much to the streams.
pub(crate) const E0: [(&str, u8, u8); 14] = [
    ("attn.wq_a", 114, 114),
    ("attn.wq_b", 115, 115),
    ("attn.wkv", 114, 114),
    ("attn.wo_a", 114, 114),
    ("attn.wo_b", 111, 109),
    ("attn.indexer.wq_b", 115, 115),
    ("ffn.shared_experts.w1", 114, 114),
    ("ffn.shared_experts.w3", 114, 114),
    ("ffn.shared_experts.w2", 111, 109),
    ("ffn.experts.w1", 120, 120),
    ("ffn.experts.w3", 120, 120),
    ("ffn.experts.w2", 118, 116),
    ("engram.embed", 120, 120),
    ("engram.wkv", 112, 110),
];
/// Standard deviation and offset of the other tensors.
pub(crate) const DENSE: [(&str, f64, f64); 24] = [
    ("attn_norm.weight", 0.15, 1.0),
    ("ffn_norm.weight", 0.15, 1.0),
    ("attn.q_norm.weight", 0.15, 1.25),
    ("attn.kv_norm.weight", 0.15, 1.0),
    ("attn.compressor.norm.weight", 0.15, 1.0),
    ("attn.indexer.k_norm.weight", 0.15, 1.0),
    ("attn.attn_sink", 1.0, 0.0),
    ("attn.compressor.wkv.weight", 0.014, 0.0),
    ("attn.compressor.wgate.weight", 0.014, 0.0),
    ("attn.indexer.weights_proj.weight", 0.014, 0.0),
    ("attn.indexer.wk.weight", 0.044, 0.0),
    ("ffn.gate.weight", 0.02, 0.0),
    ("ffn.gate.bias", 0.1, 0.0),
    ("hc_attn_fn", 0.007, 0.0),
    ("hc_ffn_fn", 0.007, 0.0),
    ("hc_attn_base", 0.7, 0.0),
    ("hc_ffn_base", 0.7, 0.0),
    ("hc_attn_scale", 0.1, 0.8),
    ("hc_ffn_scale", 0.1, 0.8),
    ("engram.q_weight", 0.15, 1.0),
    ("engram.k_weight", 0.15, 1.0),
    ("embed.weight", 1.0, 0.0),
    ("norm.weight", 0.15, 1.0),
    ("head.weight", 0.03, 0.0),
];

/// The configuration of the fixtures: the released one with fewer experts and tokens, no draft head and no vision.
pub fn config() -> Config {
    let mut tree: Value = serde_json::from_str(RELEASED).expect("the released configuration is JSON");
    if let Some(root) = tree.as_object_mut() {
        root.remove("vision_config");
        root.insert("image_token_id".into(), json!(3));
    }
    let ratios: Vec<Value> =
        tree["text_config"]["compress_ratios"].as_array().into_iter().flatten().take(40).cloned().collect();
    for (name, value) in [
        ("vocab_size", json!(1024)),
        ("n_routed_experts", json!(16)),
        ("num_nextn_predict_layers", json!(0)),
        ("compress_ratios", json!(ratios)),
        ("engram_vocab_size", json!(1000)),
        ("engram_compressed_vocab_size", json!(1024)),
        ("engram_num_embeddings", json!([25_874, 30_058])),
    ] {
        tree["text_config"][name] = value;
    }
    Config::from_json(&tree.to_string(), "the configuration of the fixtures").expect("checked by a test")
}

/// Values of an input or a plain tensor.
pub fn values(name: &str, n: usize, std: f64, offset: f64) -> Vec<f32> {
    let t = Tensor::new(name, SEED);
    (0..n as u64).into_par_iter().map(|i| t.f32(i, std, offset)).collect()
}

/// The same rounded to bf16.
pub fn values_bf16(name: &str, n: usize, std: f64, offset: f64) -> Vec<f32> {
    let mut v = values(name, n, std, offset);
    bf16::round_slice(&mut v);
    v
}

/// Integers below `below`.
pub fn ints(name: &str, n: usize, below: u64) -> Vec<u32> {
    let t = Tensor::new(name, SEED);
    (0..n as u64).map(|i| t.int(i, below) as u32).collect()
}

/// A tensor of bf16 values.
pub fn host(name: &str, shape: &[usize], std: f64, offset: f64) -> Host {
    Host::f32(shape, values_bf16(name, shape.iter().product(), std, offset))
}

/// Bytes made in pieces of `N` on all threads.
pub(crate) fn bytes<const N: usize>(len: usize, piece: impl Fn(u64) -> [u8; N] + Sync + Send) -> Bytes {
    let mut out = vec![0; len];
    out.par_chunks_mut(N << 10).enumerate().for_each(|(c, out)| {
        for (i, out) in out.chunks_mut(N).enumerate() {
            out.copy_from_slice(&piece(((c << 10) | i) as u64)[..out.len()]);
        }
    });
    Bytes::copied(&out)
}

/// A weight of `form` named `name` (`.weight` and `.scale` are added) with scale exponent `e0`.
pub fn quantised(name: [&str; 2], form: Form, rows: usize, cols: usize, e0: u8) -> Weight {
    let [codes, scale] = name.map(|n| Tensor::new(n, SEED));
    let data = match form {
        Form::Fp4Row32 => bytes(rows * cols / 2, |w| codes.e2m1_word(w)),
        _ => bytes(rows * cols, |w| codes.e4m3_word(w)),
    };
    let scales = form.scale_shape(rows, cols).map_or(0, |[r, c]| r * c);
    let scale = bytes(scales, |i| [scale.e8m0(i, e0)]);
    Weight::new(name[0], form, rows, cols, data, scale).expect("sizes follow from the form")
}

/// A plain weight of bf16 values (`form` bf16) or singles.
pub fn plain(name: &str, form: Form, rows: usize, cols: usize, std: f64, offset: f64) -> Weight {
    let t = Tensor::new(name, SEED);
    let data = match form {
        Form::Bf16 => bytes(2 * rows * cols, |i| t.bf16(i, std, offset).to_le_bytes()),
        _ => bytes(4 * rows * cols, |i| t.f32(i, std, offset).to_le_bytes()),
    };
    Weight::new(name, form, rows, cols, data, Bytes::from_static(&[])).expect("sizes follow from the form")
}

/// The weights of the fixtures' model.
pub struct Generated {
    calm: bool,
    tensors: HashMap<String, Expected>,
}

impl Generated {
    /// The plain or the calm variant.
    pub fn new(config: &Config, calm: bool) -> Self {
        Self { calm, tensors: config.inventory().map(|t| (t.name.clone(), t)).collect() }
    }
}

/// The name without layer and expert number.
pub(crate) fn family(name: &str) -> String {
    let mut parts: Vec<&str> = name.split('.').collect();
    if parts[0] == "layers" {
        parts.drain(..2);
    }
    if let Some(at) = parts.iter().position(|p| *p == "experts") {
        parts.remove(at + 1);
    }
    parts.join(".")
}

impl Weights for Generated {
    fn weight(&self, module: &str) -> checkpoint::Result<Weight> {
        let missing = || checkpoint::Error::Tensor {
            file: "the generator smgen/1".into(),
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
        match want.dtype {
            Dtype::E4m3 | Dtype::I8 => {
                let base = family.trim_end_matches(".weight");
                let (_, e0, calm) = E0.into_iter().find(|e| e.0 == base).ok_or_else(missing)?;
                let (form, cols) = match (want.dtype, base) {
                    (Dtype::I8, _) => (Form::Fp4Row32, cols * 2),
                    (_, "engram.embed") => (Form::Fp8Row32, cols),
                    _ => (Form::Fp8Block32, cols),
                };
                let scale = format!("{module}.scale");
                let e0 = if self.calm { calm } else { e0 };
                Ok(quantised([&full, &scale], form, rows, cols, e0))
            }
            // The generated model takes text alone, which never reads this bias.
            Dtype::F32 if family == "ffn.gate.bias_vl" => {
                Ok(Weight::from_f32(&want.name, rows, cols, &vec![0.0; rows * cols])
                    .expect("sizes follow from the form"))
            }
            dtype => {
                let (_, std, offset) = DENSE.into_iter().find(|d| d.0 == family).ok_or_else(missing)?;
                let form = if dtype == Dtype::Bf16 { Form::Bf16 } else { Form::F32 };
                Ok(plain(&want.name, form, rows, cols, std, offset))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the fixtures' `generator.json` says of the Engram tables and the prompts.
    #[test]
    fn the_geometry_is_the_fixtures() {
        let c = config();
        assert_eq!((c.num_hidden_layers, c.hidden_size, c.num_attention_heads), (40, 5120, 64));
        assert_eq!((c.vocab_size, c.n_routed_experts, c.dspark.stages), (1024, 16, 0));
        assert_eq!(c.engram_primes(1)[..3], [1171, 1181, 1187]);
        assert_eq!(c.engram_multipliers(0)[..2], [7_415_652_013_100_227, 468_352_540_858_031]);
        assert_eq!(ints("whole.prompt.8", 8, 1024), [365, 426, 893, 758, 1020, 77, 514, 645]);
        assert_eq!(ints("block.ids", 8, 1024), [14, 686, 16, 169, 683, 540, 93, 263]);
    }

    #[test]
    fn every_weight_of_a_layer_is_defined_and_stands_under_its_checkpoint_name() {
        let c = config();
        let g = Generated::new(&c, false);
        let t = |name: &str| Tensor::new(name, SEED);
        let w = g.weight("layers.20.attn.wkv").unwrap();
        let (mut row, scale) = (vec![0.0; 5120], t("layers.20.attn.wkv.scale"));
        w.decode_row(33, &mut row);
        let code = t("layers.20.attn.wkv.weight").e4m3(33 * 5120 + 70);
        let want = numerics::e4m3::decode(code) * numerics::e8m0::decode(scale.e8m0(160 + 2, 114));
        assert_eq!(row[70], want);

        let name = "layers.3.ffn.experts.7.w2";
        let calm = Generated::new(&c, true).weight(name).unwrap();
        let mut calm_row = vec![0.0; 2304];
        let mut row = vec![0.0; 2304];
        g.weight(name).unwrap().decode_row(5, &mut row);
        calm.decode_row(5, &mut calm_row);
        assert!(row.iter().zip(&calm_row).all(|(a, b)| *a == 4.0 * b) && row.iter().any(|v| *v != 0.0));

        for module in
            c.inventory().filter(|t| t.name.starts_with("layers.14.") && !t.name.contains("experts"))
        {
            let name = module.name.trim_end_matches(".weight").trim_end_matches(".scale").to_owned();
            g.weight(&name).unwrap();
        }
        assert!(g.weight("layers.0.attn.compressor.wkv").is_err());
    }
}
