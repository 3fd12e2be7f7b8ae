//! Makes packs out of a private copy of the nano model: any bits are a valid trellis.

use exl3::{Codebook, Rate};
use numerics::generator::Stream;
use serde_json::{Value, json};

use super::{Folder, Raw, SHARDS};

/// Shape of a stored layer: outputs, inputs.
pub fn features(t: &Raw) -> [usize; 2] {
    [t.shape[0], if t.dtype == "I8" { 2 * t.shape[1] } else { t.shape[1] }]
}

/// The tensors of one EXL3 layer of `rows` outputs and `cols` inputs.
pub fn layer(name: &str, [rows, cols]: [usize; 2], bits: f64, codebook: Codebook) -> Vec<Raw> {
    let (rate, s) = (Rate::from_bits(bits).unwrap(), Stream::new(name, 7));
    let (i, o) = (cols.next_multiple_of(128), rows.next_multiple_of(128));
    let shape = vec![i / 16, o / 16, rate.words16()];
    let count = shape.iter().product::<usize>() as u64;
    let trellis = (0..count).flat_map(|i| (s.word(i) as u16).to_le_bytes()).collect();
    // 0.0625 and 1 in fp16.
    let scale = |n: usize, bits: u16| vec![bits.to_le_bytes(); n].concat();
    let raw = |part: &str, dtype: &str, shape: Vec<usize>, data: Vec<u8>| Raw {
        name: format!("{name}.{part}"),
        dtype: dtype.into(),
        shape,
        data,
    };
    let mut out = vec![
        raw("trellis", "I16", shape, trellis),
        raw("suh", "F16", vec![i], scale(i, 0x2C00)),
        raw("svh", "F16", vec![o], scale(o, 0x3C00)),
    ];
    if codebook != Codebook::ThreeInst {
        out.push(raw(codebook.name(), "I32", vec![], codebook.multiplier().to_le_bytes().to_vec()));
    }
    out
}

/// Whether `module` is a routed expert's matrix of the backbone.
pub fn is_routed(module: &str) -> bool {
    module.starts_with("layers.") && module.contains(".ffn.experts.")
}

/// Replaces every module for which `choose` gives layers, and takes its scale away.
pub fn replace(folder: &Folder, choose: impl Fn(&str, [usize; 2]) -> Option<Vec<Raw>>) {
    let mut gone = Vec::new();
    for shard in SHARDS {
        folder.edit_tensors(shard, |all| {
            let mut out = Vec::new();
            for t in all.drain(..) {
                let module = t.name.strip_suffix(".weight").filter(|_| t.shape.len() == 2);
                match module.and_then(|m| Some((m, choose(m, features(&t))?))) {
                    Some((module, layers)) => {
                        gone.push(format!("{module}.scale"));
                        out.extend(layers);
                    }
                    None => out.push(t),
                }
            }
            *all = out;
        });
    }
    for shard in SHARDS {
        folder.edit_tensors(shard, |all| all.retain(|t| !gone.contains(&t.name)));
    }
    folder.reindex();
}

/// Writes `q` as the quantization_config.
pub fn configure(folder: &Folder, q: Value) {
    folder.edit_json("config.json", |c| c["quantization_config"] = q);
}

/// The first public layout: routed experts at 2 bits in MCG, all else as released.
pub fn experts_only() -> Folder {
    let folder = Folder::nano();
    replace(&folder, |m, f| is_routed(m).then(|| layer(m, f, 2.0, Codebook::Mcg)));
    configure(
        &folder,
        json!({
            "quant_method": "exl3", "bits": 2, "codebook": "mcg", "scope": checkpoint::ROUTED_SCOPE,
            "non_routed_quantization": {
                "quant_method": "deepseek_v4_fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"
            },
            "mtp_experts": "source"
        }),
    );
    folder
}

/// The second: every linear layer EXL3 in MUL1, rates by tensor, the head at 6 bits.
pub fn everything() -> Folder {
    let folder = Folder::nano();
    replace(&folder, |m, f| {
        if m.ends_with("attn.wo_a") {
            let rows = f[0] / 2;
            return Some(
                (0..2)
                    .flat_map(|g| layer(&format!("{m}.slice.{g}"), [rows, f[1]], 5.0, Codebook::Mul1))
                    .collect(),
            );
        }
        rate(m).map(|bits| layer(m, f, bits, Codebook::Mul1))
    });
    configure(
        &folder,
        json!({
            "quant_method": "exl3", "version": "1.6.5", "bits": 3.1, "head_bits": 6, "codebook": "mul1",
            "out_scales": "auto", "calibration": { "rows": 250, "cols": 2048 },
            "original_quantization_config": "{'quant_method': 'fp8'}"
        }),
    );
    folder
}

/// Rates of the second layout; w1, w3 and w2 of one expert differ.
pub fn rate(module: &str) -> Option<f64> {
    let last = module.rsplit('.').next()?;
    let bits = match last {
        "head" if module == "head" => 6.0,
        "w1" => 3.0,
        "w3" => 2.5,
        "w2" => 4.0,
        "wq_a" | "wq_b" | "wo_b" => 5.0,
        "wkv" | "wgate" | "wk" | "main_proj" => 8.0,
        _ => return None,
    };
    (!module.contains("vision") && !module.contains("aligner")).then_some(bits)
}

/// Takes the Engram tables out.
pub fn without_tables(folder: &Folder) {
    for shard in SHARDS {
        folder.edit_tensors(shard, |all| all.retain(|t| !t.name.contains(".engram.embed.")));
    }
    folder.reindex();
}
