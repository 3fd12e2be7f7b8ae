//! Configuration and metadata of a pack [EXL3 specification, section 11].

use checkpoint::{Checkpoint, ROUTED_SCOPE};
use exl3::Codebook;
use serde_json::{Map, Value, json};

use crate::{Error, Options, Result, TensorReport};

/// The pack's `config.json` and `quantization_config.json`. `tokens` and `documents` were calibrated with.
pub(crate) fn configuration(
    ckpt: &Checkpoint,
    options: &Options,
    reports: &[TensorReport],
    documents: usize,
    tokens: usize,
) -> Result<(Value, Value)> {
    let label = format!("{}: config.json", ckpt.location());
    let mut config: Value = serde_json::from_slice(&ckpt.file("config.json")?)
        .map_err(|e| Error::Input(format!("{label}: is not valid JSON: {e}")))?;
    let source = config["quantization_config"].take();
    let mut q = match options.dense {
        None => json!({
            "quant_method": "exl3",
            "bits": bits(options.rate.bits()),
            "codebook": options.codebook.name(),
            "scope": ROUTED_SCOPE,
            "non_routed_quantization": {
                "quant_method": "deepseek_v4_fp8",
                "weight_block_size": [32, 32],
                "activation_scheme": "dynamic"
            },
            "mtp_experts": "source"
        }),
        Some(_) => json!({
            "quant_method": "exl3",
            "bits": mean_bits(reports.iter().filter(|t| t.name != "head")),
            "out_scales": "always",
            "codebook": options.codebook.name(),
        }),
    };
    q["version"] = json!(concat!("hallmark ", env!("CARGO_PKG_VERSION")));
    if let Some(head) = options.head {
        q["head_bits"] = bits(head.bits());
    }
    q["calibration"] = json!({ "rows": documents, "tokens": tokens });
    q["original_quantization_config"] = source;
    config["quantization_config"] = q.clone();
    let storage: Map<String, Value> =
        reports.iter().map(|t| (t.name.clone(), stored(t, options.codebook))).collect();
    q["tensor_storage"] = storage.into();
    Ok((config, q))
}

/// Whole where it is whole, as readers of the format expect.
fn bits(bits: f64) -> Value {
    if bits.fract() == 0.0 { json!(bits as u64) } else { json!(bits) }
}

/// Mean bits per weight of `layers`, scales not counted; 0 for none.
pub(crate) fn mean_bits<'t>(layers: impl Iterator<Item = &'t TensorReport>) -> f64 {
    let (mut sum, mut weights) = (0.0, 0.0);
    for t in layers {
        let n = (t.rows * t.cols) as f64;
        sum += n * t.bits;
        weights += n;
    }
    if weights > 0.0 { sum / weights } else { 0.0 }
}

fn stored(t: &TensorReport, codebook: Codebook) -> Value {
    let name = |part: &str| format!("{}.{part}", t.name);
    let [a, b, c] = t.trellis;
    let tensor =
        |shape: Value, bytes: usize, dtype: &str| json!({ "shape": shape, "n_bytes": bytes, "dtype": dtype });
    let mut tensors = Map::new();
    tensors.insert(name("trellis"), tensor(json!(t.trellis), 2 * a * b * c, "torch.int16"));
    tensors.insert(name("suh"), tensor(json!([16 * a]), 32 * a, "torch.float16"));
    tensors.insert(name("svh"), tensor(json!([16 * b]), 32 * b, "torch.float16"));
    let mut entry = json!({ "stored_tensors": {}, "quant_format": "exl3", "bits_per_weight": bits(t.bits) });
    if codebook != Codebook::ThreeInst {
        tensors.insert(name(codebook.name()), tensor(json!([]), 4, "torch.int"));
        entry[format!("{}_multiplier", codebook.name())] = json!(codebook.multiplier());
    }
    entry["stored_tensors"] = tensors.into();
    entry
}
