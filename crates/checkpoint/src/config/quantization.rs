//! What config.json says about the stored form of the weights. For an EXL3 pack the tensors decide and this is checked
//! against them where it makes a claim [EXL3 specification, section 11].

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

use super::fields::Fields;
use crate::error::Result;

/// The part of `quantization_config` that bears on reading.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Quantization {
    /// Whether linear layers may be EXL3; otherwise all weights are as released.
    pub exl3: bool,
    /// Bits per weight; an average unless it is whole and alone.
    pub bits: Option<f64>,
    /// Bits per weight of the output head.
    pub head_bits: Option<f64>,
    /// Codebook of the routed experts.
    pub codebook: Option<String>,
    /// Whether the routed experts alone are said to be EXL3.
    pub routed_only: bool,
    /// Bits of the gate and up matrices of a layer's experts.
    pub layer_bits: BTreeMap<usize, f64>,
    /// Bits of a layer's experts: gate and up, down.
    pub expert_bits: BTreeMap<usize, [f64; 2]>,
}

/// The scope under which packs say that the routed experts alone are EXL3.
pub const ROUTED_SCOPE: &str = "deepseek_v41_routed_experts";

impl Quantization {
    pub(super) fn parse(root: &Fields) -> Result<Self> {
        let q = root.section("quantization_config")?;
        if q.optional("quant_method") != Some(&json!("exl3")) {
            q.must_be("quant_method", "fp8")?;
            q.must_be("scale_fmt", "ue8m0")?;
            q.must_be("expert_dtype", "fp4")?;
            q.must_be("activation_scheme", "dynamic")?;
            q.must_equal("weight_block_size", &json!([32, 32]))?;
            return Ok(Self::default());
        }
        for source in ["non_routed_quantization", "original_quantization_config"] {
            // Some writers put the source's block in as text; the tensors' shapes say the same.
            if !q.optional(source).is_some_and(Value::is_object) {
                continue;
            }
            let s = q.section(source)?;
            if s.has("weight_block_size") {
                s.must_equal("weight_block_size", &json!([32, 32]))?;
            }
        }
        let codebook = q.optional_name("codebook")?;
        if let Some(name) = codebook.filter(|n| exl3::Codebook::from_name(n).is_none()) {
            return Err(q.unsupported(format!(
                "quantization_config.codebook \"{name}\" is not supported, only mul1, mcg and 3inst are"
            )));
        }
        Ok(Self {
            exl3: true,
            bits: q.optional_positive("bits")?,
            head_bits: q.optional_positive("head_bits")?,
            codebook: codebook.map(str::to_owned),
            routed_only: q.optional_name("scope")? == Some(ROUTED_SCOPE),
            layer_bits: q.numbers_by_layer("layer_bits")?,
            expert_bits: expert_bits(&q)?,
        })
    }

    /// The rate that `matrix` (w1, w3 or w2) of a routed expert of `layer` is said to have, with the field that says so.
    pub(crate) fn expert_rate(&self, layer: usize, matrix: &str) -> Option<(f64, String)> {
        let down = matrix == "w2";
        if let Some(bits) = self.expert_bits.get(&layer) {
            return Some((bits[usize::from(down)], format!("quantization_config.expert_bits.{layer}")));
        }
        if let Some(bits) = self.layer_bits.get(&layer) {
            let field = format!("quantization_config.layer_bits.{layer}");
            return (!down).then_some((*bits, field));
        }
        let alone = self.routed_only && self.layer_bits.is_empty() && self.expert_bits.is_empty();
        let bits = self.bits.filter(|b| alone && b.fract() == 0.0)?;
        Some((bits, "quantization_config.bits".into()))
    }
}

/// `{"7": {"gu": 3, "down": 4}}`.
fn expert_bits(q: &Fields) -> Result<BTreeMap<usize, [f64; 2]>> {
    let Some(all) = q.optional_section("expert_bits")? else { return Ok(BTreeMap::new()) };
    let mut out = BTreeMap::new();
    for (key, layer) in all.layers()? {
        let bits = all.section(key)?;
        let gate_up = if bits.has("gate_up") { "gate_up" } else { "gu" };
        out.insert(layer, [bits.positive(gate_up)?, bits.positive("down")?]);
    }
    Ok(out)
}
