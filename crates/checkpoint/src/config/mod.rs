//! The typed configuration of a model folder [spec 1.1].

mod engram;
mod fields;
mod pcg64;
mod quantization;
mod schedule;

use std::path::Path;

use serde::Serialize;

use crate::error::{Error, Result};
pub use engram::engram_rows;
use fields::Fields;
pub use quantization::{Quantization, ROUTED_SCOPE};
pub use schedule::{LayerPlan, Role};

/// Largest configuration file that is read; the released one has 3,311 bytes.
pub(crate) const MAX_CONFIG_BYTES: usize = 4 << 20;

/// YaRN scaling of the rotary angles of compressed layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Yarn {
    /// Context extension factor.
    pub factor: f64,
    /// Rotations in the original context above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by the factor.
    pub beta_slow: f64,
    /// The context length before the extension, in tokens.
    pub original_max_position_embeddings: usize,
}

/// The hashed n-gram memory [spec 2.9]. Without Engram layers both lists are empty.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Engram {
    /// Layers that read a table, ascending.
    pub layer_ids: Vec<usize>,
    /// Rows of each layer's table.
    pub num_embeddings: Vec<usize>,
    /// Longest n-gram; the shortest is 2.
    pub max_ngram_size: usize,
    /// Where the search for bucket primes starts.
    pub vocab_size: usize,
    /// Hash heads per n-gram length.
    pub n_heads: usize,
    /// Values in a table row.
    pub head_dim: usize,
    /// Token that stands before the start of the text.
    pub pad_token_id: u32,
    /// Number of classes of the token map.
    pub compressed_vocab_size: usize,
}

/// The draft head [spec 4]. Without it `stages` is 0 and the other fields mean nothing.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Dspark {
    /// Draft blocks (`num_nextn_predict_layers`).
    pub stages: usize,
    /// Positions drafted per pass.
    pub block_size: usize,
    /// Token that fills the positions after the first.
    pub noise_token_id: u32,
    /// Backbone layers whose input streams feed the drafter.
    pub target_layer_ids: Vec<usize>,
    /// Width of the Markov head.
    pub markov_rank: usize,
    /// Routed experts of a stage.
    pub n_routed_experts: usize,
    /// Experts chosen per token.
    pub num_experts_per_tok: usize,
}

/// The vision tower [spec 5]. Without it `num_hidden_layers` is 0.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Vision {
    /// Transformer blocks.
    pub num_hidden_layers: usize,
    /// Width.
    pub hidden_size: usize,
    /// Attention heads.
    pub num_attention_heads: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// Patches per side that become one token.
    pub downsample_ratio: usize,
    /// Most tokens of one image.
    pub max_image_tokens: usize,
    /// Pixels below which an image is enlarged.
    pub min_pixels: usize,
    /// Most extreme ratio of the sides, if limited.
    pub max_wh_ratio: Option<f64>,
}

/// A checked configuration: every field is within bounds and every rule between fields holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)] // the names of the released config.json, described in spec 1.1
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub moe_intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub q_lora_rank: usize,
    pub o_lora_rank: usize,
    pub o_groups: usize,
    pub max_position_embeddings: usize,
    pub n_routed_experts: usize,
    pub num_experts_per_tok: usize,
    pub sliding_window: usize,
    pub index_n_heads: usize,
    pub index_head_dim: usize,
    pub index_topk: usize,
    pub candidate_source_layer_id: usize,
    pub candidate_topk_blocks: usize,
    pub candidate_block_size: usize,
    pub hc_mult: usize,
    pub hc_sinkhorn_iters: usize,
    pub swiglu_limit: f32,
    pub rms_norm_eps: f32,
    pub routed_scaling_factor: f32,
    pub hc_eps: f32,
    pub rope_theta: f64,
    pub compress_rope_theta: f64,
    pub yarn: Yarn,
    /// One ratio per backbone layer and draft stage: 0, 1 or 2.
    pub compress_ratios: Vec<usize>,
    pub kv_source_layer_ids: Vec<usize>,
    pub index_source_layer_ids: Vec<usize>,
    pub engram: Engram,
    pub dspark: Dspark,
    pub vision: Vision,
    pub bos_token_id: u32,
    pub eos_token_id: u32,
    pub pad_token_id: u32,
    pub image_token_id: u32,
    pub quantization: Quantization,
}

impl Config {
    /// Reads `DIR/config.json`.
    pub fn load(dir: &Path) -> Result<Self> {
        Self::load_file(&dir.join("config.json"))
    }

    /// Reads one configuration file.
    pub fn load_file(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let bytes = crate::files::read(path, MAX_CONFIG_BYTES as u64)?;
        let text =
            std::str::from_utf8(&bytes).map_err(|e| Error::invalid(&name, format!("is not UTF-8: {e}")))?;
        Self::from_json(text, &name)
    }

    /// Parses and checks a nested Hugging Face configuration; `file` is the name that errors carry.
    pub fn from_json(text: &str, file: &str) -> Result<Self> {
        if text.len() > MAX_CONFIG_BYTES {
            return Err(Error::invalid(file, format!("has more than {MAX_CONFIG_BYTES} bytes")));
        }
        let tree = crate::json::parse(text).map_err(|what| Error::invalid(file, what))?;
        let root = Fields::root(file, &tree)?;
        refuse_other_models(&root)?;
        let config = Self::from_fields(&root)?;
        config.check().map_err(|what| Error::invalid(file, what))?;
        Ok(config)
    }

    fn from_fields(root: &Fields) -> Result<Self> {
        let t = root.section("text_config")?;
        let rope = t.section("rope_scaling")?;
        rope.must_be("rope_type", "yarn")?;
        let v = root.optional_section("vision_config")?;
        Ok(Self {
            vocab_size: t.size("vocab_size", 1, 1 << 24)?,
            hidden_size: t.multiple("hidden_size", 32, 1 << 16)?,
            moe_intermediate_size: t.multiple("moe_intermediate_size", 32, 1 << 16)?,
            num_hidden_layers: t.size("num_hidden_layers", 1, 1024)?,
            num_attention_heads: t.size("num_attention_heads", 1, 1024)?,
            head_dim: t.multiple("head_dim", 32, 1 << 13)?,
            qk_rope_head_dim: t.multiple("qk_rope_head_dim", 2, 1 << 13)?,
            q_lora_rank: t.multiple("q_lora_rank", 32, 1 << 16)?,
            o_lora_rank: t.multiple("o_lora_rank", 32, 1 << 16)?,
            o_groups: t.size("o_groups", 1, 1024)?,
            max_position_embeddings: t.size("max_position_embeddings", 1, 1 << 31)?,
            n_routed_experts: t.size("n_routed_experts", 1, 4096)?,
            num_experts_per_tok: t.size("num_experts_per_tok", 1, 4096)?,
            sliding_window: t.size("sliding_window", 1, 1 << 20)?,
            index_n_heads: t.size("index_n_heads", 1, 1024)?,
            index_head_dim: t.multiple("index_head_dim", 32, 1 << 13)?,
            index_topk: t.size("index_topk", 1, 1 << 20)?,
            candidate_source_layer_id: t.size("candidate_source_layer_id", 0, 1023)?,
            candidate_topk_blocks: t.size("candidate_topk_blocks", 1, 1 << 24)?,
            candidate_block_size: t.size("candidate_block_size", 1, 1 << 16)?,
            hc_mult: t.size("hc_mult", 4, 4)?,
            hc_sinkhorn_iters: t.size("hc_sinkhorn_iters", 1, 1024)?,
            swiglu_limit: t.positive("swiglu_limit")? as f32,
            rms_norm_eps: t.positive("rms_norm_eps")? as f32,
            routed_scaling_factor: t.positive("routed_scaling_factor")? as f32,
            hc_eps: t.positive("hc_eps")? as f32,
            rope_theta: t.positive("rope_theta")?,
            compress_rope_theta: t.positive("compress_rope_theta")?,
            yarn: Yarn {
                factor: rope.positive("factor")?,
                beta_fast: rope.positive("beta_fast")?,
                beta_slow: rope.positive("beta_slow")?,
                original_max_position_embeddings: rope.size(
                    "original_max_position_embeddings",
                    1,
                    1 << 31,
                )?,
            },
            compress_ratios: t.sizes("compress_ratios", 2)?,
            kv_source_layer_ids: t.sizes("kv_source_layer_ids", 1023)?,
            index_source_layer_ids: t.sizes("index_source_layer_ids", 1023)?,
            engram: Engram {
                layer_ids: t.sizes("engram_layer_ids", 1023)?,
                num_embeddings: t.sizes("engram_num_embeddings", 1 << 36)?,
                max_ngram_size: t.size("engram_max_ngram_size", 2, 8)?,
                vocab_size: t.size("engram_vocab_size", 2, 1 << 30)?,
                n_heads: t.size("engram_n_heads", 1, 32)?,
                head_dim: t.multiple("engram_head_dim", 32, 1 << 13)?,
                pad_token_id: t.token("engram_pad_token_id")?,
                compressed_vocab_size: t.size("engram_compressed_vocab_size", 1, 1 << 24)?,
            },
            dspark: Dspark {
                stages: t.size("num_nextn_predict_layers", 0, 64)?,
                block_size: t.size("dspark_block_size", 0, 1024)?,
                noise_token_id: t.token("dspark_noise_token_id")?,
                target_layer_ids: t.sizes("dspark_target_layer_ids", 1023)?,
                markov_rank: t.size("dspark_markov_rank", 0, 1 << 16)?,
                n_routed_experts: t.size("dspark_n_routed_experts", 0, 4096)?,
                num_experts_per_tok: t.size("dspark_num_experts_per_tok", 0, 4096)?,
            },
            vision: match v {
                None => Vision::absent(),
                Some(v) => Vision {
                    num_hidden_layers: v.size("num_hidden_layers", 0, 1024)?,
                    hidden_size: v.size("hidden_size", 1, 1 << 16)?,
                    num_attention_heads: v.size("num_attention_heads", 1, 1024)?,
                    intermediate_size: v.size("intermediate_size", 1, 1 << 16)?,
                    patch_size: v.size("patch_size", 1, 1024)?,
                    rope_theta: v.positive("rope_theta")?,
                    downsample_ratio: v.size("downsample_ratio", 1, 64)?,
                    max_image_tokens: v.size("max_image_tokens", 1, 1 << 20)?,
                    min_pixels: v.size("min_pixels", 1, 1 << 31)?,
                    max_wh_ratio: v.optional_positive("max_wh_ratio")?,
                },
            },
            bos_token_id: root.token("bos_token_id")?,
            eos_token_id: root.token("eos_token_id")?,
            pad_token_id: root.token("pad_token_id")?,
            image_token_id: root.token("image_token_id")?,
            quantization: Quantization::parse(root)?,
        })
    }
}

impl Vision {
    /// No vision tower.
    fn absent() -> Self {
        Self {
            num_hidden_layers: 0,
            hidden_size: 0,
            num_attention_heads: 0,
            intermediate_size: 0,
            patch_size: 0,
            rope_theta: 10_000.0,
            downsample_ratio: 0,
            max_image_tokens: 0,
            min_pixels: 0,
            max_wh_ratio: None,
        }
    }
}

/// Names what the file is when it is not the released architecture in a known format.
fn refuse_other_models(root: &Fields) -> Result<()> {
    if let Some(names) = root.strings("architectures")?.filter(|n| !n.contains(&"DeepseekV41ForCausalLM")) {
        let names = names.join(", ");
        return Err(root.unsupported(format!(
            "architecture {names} is not supported; hallmark runs DeepseekV41ForCausalLM only"
        )));
    }
    root.must_be("model_type", "deepseek_v41")?;
    if root.has("quantization") {
        return Err(root.unsupported(
            "field quantization marks an MLX conversion, which is not supported; use the released safetensors checkpoint",
        ));
    }
    Quantization::parse(root)?;
    let t = root.section("text_config")?;
    t.must_be("hidden_act", "silu")?;
    t.must_be("scoring_func", "sqrtsoftplus")?;
    t.must_be("topk_method", "noaux_tc")?;
    t.must_equal("norm_topk_prob", &true.into())?;
    t.must_equal("attention_bias", &false.into())?;
    t.must_equal("tie_word_embeddings", &false.into())?;
    t.must_equal("num_key_value_heads", &1.into())?;
    t.must_equal("n_shared_experts", &1.into())
}
