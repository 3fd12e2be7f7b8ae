//! `cargo xtask trim-fixtures`: the part of the golden files that is committed, from the whole ones.

use std::path::Path;

use anyhow::{Context, Result, bail};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use crate::process::{read, sha256, write};

/// Tensors that are kept, by file. A pattern is GROUP/NAME; `*` stands for any text.
const KEEP: &[(&str, &[&str])] = &[
    ("nano/golden/float32.safetensors", &["*"]),
    ("nano/golden/official.safetensors", &["*"]),
    ("nano/golden/official_float32.safetensors", &["decode/*", "prompt33/*", "image/*"]),
    ("nano/golden/bf16.safetensors", LOGITS_ONLY),
    (
        "micro/golden/float32.safetensors",
        &[
            "prompt33/*",
            "decode/*",
            "decode_full/*",
            "image/*",
            "prompt*/tokens",
            "prompt*/logits",
            "prompt*.margin",
            "prompt*.topk",
            "prompt*.router.experts",
            "dense33/tokens",
            "dense33/logits",
        ],
    ),
    (
        "micro/golden/official.safetensors",
        &[
            "prompt33/*",
            "decode/*",
            "image/*",
            "prompt*/tokens",
            "prompt*/logits",
            "dense33/tokens",
            "dense33/logits",
        ],
    ),
    ("micro/golden/official_float32.safetensors", &["decode/*"]),
    ("micro/golden/bf16.safetensors", LOGITS_ONLY),
];

const LOGITS_ONLY: &[&str] = &[
    "prompt1/tokens",
    "prompt1/logits",
    "prompt33/tokens",
    "prompt33/logits",
    "decode/*",
    "image/tokens",
    "image/logits",
];

/// The same for the folder of the source-CUDA fixtures. Tensors that must be equal to the bit are held against the SHA-256
/// of the whole tensor, so most of them are not kept.
const KEEP_CUDA: &[(&str, &[&str])] = &[
    (
        "ops.safetensors",
        &[
            "act_quant.a.*",
            "candidates.*",
            "engram.out",
            "fp4_act_quant.*.codes",
            "fp4_act_quant.*.scales",
            "fp4_gemm.*",
            "fp8_gemm.1280x5120",
            "fp8_gemm.32768x1280",
            "fp8_gemm.5120x8192",
            "hc.*",
            "index.*",
            "linear.*",
            "norm.5120",
            "rope.*",
            "router.*",
            "sinkhorn",
            "sparse_attn.m17",
            "sparse_attn.topk8",
            "sparse_attn.topk129",
            "swiglu.weighted",
        ],
    ),
    ("blocks.safetensors", &["*.streams", "*.pre", "*.router_indices", "*.router_weights"]),
    ("streams8.safetensors", &["*"]),
    (
        "whole.safetensors",
        &[
            "whole.8.logits",
            "whole.8.samples",
            "whole.8.pre",
            "whole.160.logits",
            "whole.160.samples",
            "calm.8.logits",
            "calm.8.samples",
        ],
    ),
];

/// Writes the kept tensors of every file of the table under `src` to the same name under `dst`.
pub fn run(src: &Path, dst: &Path) -> Result<()> {
    let table = if src.join(KEEP_CUDA[0].0).is_file() { KEEP_CUDA } else { KEEP };
    for (file, keep) in table {
        let bytes = read(&src.join(file))?;
        let (kept, of, out) = trim(&bytes, keep).with_context(|| src.join(file).display().to_string())?;
        write(&dst.join(file), &out)?;
        println!(
            "{file}: {kept} of {of} tensors, {} of {} bytes, sha256 {}",
            out.len(),
            bytes.len(),
            sha256(&out)
        );
    }
    Ok(())
}

/// The tensors that match one of the patterns, as a safetensors file, with their number and the number of all.
fn trim(bytes: &[u8], keep: &[&str]) -> Result<(usize, usize, Vec<u8>)> {
    let all = SafeTensors::deserialize(bytes)?.tensors();
    let of = all.len();
    if let Some(pattern) = keep.iter().find(|pattern| !all.iter().any(|(name, _)| matches(pattern, name))) {
        bail!("no tensor matches {pattern}");
    }
    let kept: Vec<(String, TensorView)> =
        all.into_iter().filter(|(name, _)| keep.iter().any(|pattern| matches(pattern, name))).collect();
    if kept.len() == of {
        return Ok((of, of, bytes.to_vec()));
    }
    Ok((kept.len(), of, safetensors::serialize(kept, None)?))
}

/// Whether the name is the pattern, with `*` standing for any text.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, rest)) => name.strip_prefix(head).is_some_and(|tail| {
            (0..=tail.len()).any(|at| tail.is_char_boundary(at) && matches(rest, &tail[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::Dtype;

    #[test]
    fn patterns() {
        assert!(matches("*", "prompt33/logits"));
        assert!(matches("prompt*.router.experts", "prompt3/layers.0.router.experts"));
        assert!(!matches("prompt*.router.experts", "prompt3/layers.0.router.experts.margin"));
        assert!(!matches("decode/*", "decode_full/logits"));
        assert!(!matches("prompt1/*", "prompt17/logits"));
    }

    #[test]
    fn keeps_bytes_of_the_chosen_tensors_and_refuses_a_pattern_without_any() {
        let data = [1u8, 0, 0, 0, 2, 0, 0, 0];
        let tensors =
            ["a/logits", "b/logits"].map(|name| (name, TensorView::new(Dtype::I32, vec![2], &data).unwrap()));
        let whole = safetensors::serialize(tensors, None).unwrap();
        let (kept, of, out) = trim(&whole, &["a/*"]).unwrap();
        assert_eq!((kept, of), (1, 2));
        let out = SafeTensors::deserialize(&out).unwrap();
        assert_eq!(out.names(), ["a/logits"]);
        assert_eq!(out.tensor("a/logits").unwrap().data(), data);
        assert!(trim(&whole, &["c/*"]).unwrap_err().to_string().contains("c/*"));
        assert_eq!(trim(&whole, &["*"]).unwrap().2, whole);
    }
}
