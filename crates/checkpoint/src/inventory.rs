//! Exactly the tensors that a configuration implies [spec 1.3].

use serde::Serialize;

use crate::{Config, Dtype};

/// What a tensor belongs to, as reports and memory plans sum it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// Token embedding and output head.
    Embedding,
    /// Norms of the streams: before attention, before the experts, final.
    Norm,
    /// Hyper-connection mixes.
    Hyper,
    /// Attention projections, their norms and the sinks.
    Attention,
    /// Compressors and indexers.
    KvIndex,
    /// Routers and their biases.
    Router,
    /// Routed experts.
    RoutedExperts,
    /// Shared experts.
    SharedExperts,
    /// Engram projections.
    Engram,
    /// Engram tables.
    EngramTable,
    /// The draft head (`mtp.*`).
    Dspark,
    /// Vision tower and aligner.
    Vision,
    /// Embeddings of the image marks (`image_*`).
    ImageMarks,
}

impl Group {
    /// All groups in report order.
    pub const ALL: [Group; 13] = [
        Group::Embedding,
        Group::Norm,
        Group::Hyper,
        Group::Attention,
        Group::KvIndex,
        Group::Router,
        Group::RoutedExperts,
        Group::SharedExperts,
        Group::Engram,
        Group::EngramTable,
        Group::Dspark,
        Group::Vision,
        Group::ImageMarks,
    ];

    /// The name that reports use.
    pub fn name(self) -> &'static str {
        match self {
            Group::Embedding => "embedding",
            Group::Norm => "norm",
            Group::Hyper => "hyper",
            Group::Attention => "attention",
            Group::KvIndex => "kv-index",
            Group::Router => "router",
            Group::RoutedExperts => "routed-experts",
            Group::SharedExperts => "shared-experts",
            Group::Engram => "engram",
            Group::EngramTable => "engram-table",
            Group::Dspark => "dspark",
            Group::Vision => "vision",
            Group::ImageMarks => "image-marks",
        }
    }
}

/// One tensor that the checkpoint must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Full name in the file.
    pub name: String,
    /// Stored type.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: Vec<usize>,
    /// What it belongs to.
    pub group: Group,
    /// For the `.weight` of a linear layer its output and input features: a pack may hold the layer as EXL3 instead.
    pub linear: Option<[usize; 2]>,
}

impl Expected {
    /// Stored bytes; the configuration's bounds keep this and all sums below 2^64.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().map(|d| *d as u64).product::<u64>() * self.dtype.size() as u64
    }
}

/// The tensors of one part of the model, in the making.
#[derive(Default)]
struct Part(Vec<Expected>);

impl Part {
    fn add(&mut self, group: Group, dtype: Dtype, name: String, shape: &[usize]) {
        self.0.push(Expected { name, dtype, shape: shape.to_vec(), group, linear: None });
    }

    fn linear(&mut self, group: Group, dtype: Dtype, module: &str, rows: usize, cols: usize) {
        let packed = if dtype == Dtype::I8 { cols / 2 } else { cols };
        self.add(group, dtype, format!("{module}.weight"), &[rows, packed]);
        self.0.last_mut().expect("just added").linear = Some([rows, cols]);
    }

    fn bf16(&mut self, group: Group, name: String, shape: &[usize]) {
        self.add(group, Dtype::Bf16, name, shape);
    }

    fn f32(&mut self, group: Group, name: String, shape: &[usize]) {
        self.add(group, Dtype::F32, name, shape);
    }

    /// E4M3 with a scale per 32x32 block.
    fn fp8(&mut self, group: Group, module: String, rows: usize, cols: usize) {
        self.linear(group, Dtype::E4m3, &module, rows, cols);
        self.add(group, Dtype::E8m0, format!("{module}.scale"), &[rows.div_ceil(32), cols.div_ceil(32)]);
    }

    /// Packed E2M1 with a scale per row and 32 columns.
    fn fp4(&mut self, group: Group, module: String, rows: usize, cols: usize) {
        self.linear(group, Dtype::I8, &module, rows, cols);
        self.add(group, Dtype::E8m0, format!("{module}.scale"), &[rows, cols / 32]);
    }
}

impl Config {
    /// Every tensor the configuration implies, lazily, layer by layer; draft head and vision included where configured.
    pub fn inventory(&self) -> impl Iterator<Item = Expected> + '_ {
        let layers = (0..self.num_hidden_layers).flat_map(|l| self.layer_part(l).0);
        let stages = (0..self.dspark.stages).flat_map(|s| self.stage_part(s).0);
        let blocks = (0..self.vision.num_hidden_layers).flat_map(|b| self.vision_block_part(b).0);
        let ends = self.ends_part().0.into_iter();
        ends.chain(layers).chain(stages).chain(self.vision_ends_part().0).chain(blocks)
    }

    fn ends_part(&self) -> Part {
        let (v, d) = (self.vocab_size, self.hidden_size);
        let mut p = Part::default();
        p.bf16(Group::Embedding, "embed.weight".into(), &[v, d]);
        p.bf16(Group::Norm, "norm.weight".into(), &[d]);
        p.linear(Group::Embedding, Dtype::Bf16, "head", v, d);
        p
    }

    fn layer_part(&self, l: usize) -> Part {
        let (d, hd) = (self.hidden_size, self.head_dim);
        let pre = format!("layers.{l}");
        let plan = self.layer(l);
        let mut p = Part::default();
        self.block(&mut p, &pre, self.n_routed_experts);
        let own_kv = plan.kv_source == Some(l);
        let g = Group::KvIndex;
        if own_kv {
            p.linear(g, Dtype::Bf16, &format!("{pre}.attn.compressor.wkv"), hd, d);
            p.bf16(g, format!("{pre}.attn.compressor.norm.weight"), &[hd]);
            if plan.ratio > 1 {
                p.linear(g, Dtype::Bf16, &format!("{pre}.attn.compressor.wgate"), hd, d);
            }
        }
        if plan.index_source == Some(l) {
            let (n, id) = (self.index_n_heads, self.index_head_dim);
            p.fp8(g, format!("{pre}.attn.indexer.wq_b"), n * id, self.q_lora_rank);
            p.linear(g, Dtype::Bf16, &format!("{pre}.attn.indexer.weights_proj"), n, d);
            if own_kv {
                p.linear(g, Dtype::Bf16, &format!("{pre}.attn.indexer.wk"), id, hd);
                p.bf16(g, format!("{pre}.attn.indexer.k_norm.weight"), &[id]);
            }
        }
        if let Some(k) = plan.engram {
            let (rows, ed, hc) = (self.engram.num_embeddings[k], self.engram.head_dim, self.hc_mult);
            p.add(Group::EngramTable, Dtype::E4m3, format!("{pre}.engram.embed.weight"), &[rows, ed]);
            p.add(Group::EngramTable, Dtype::E8m0, format!("{pre}.engram.embed.scale"), &[rows, ed / 32]);
            p.fp8(Group::Engram, format!("{pre}.engram.wkv"), d * (hc + 1), self.engram_columns() * ed);
            p.bf16(Group::Engram, format!("{pre}.engram.q_weight"), &[hc, d]);
            p.bf16(Group::Engram, format!("{pre}.engram.k_weight"), &[hc, d]);
        }
        p
    }

    /// What every block has: backbone layer or draft stage.
    fn block(&self, p: &mut Part, pre: &str, experts: usize) {
        let (d, hd, heads) = (self.hidden_size, self.head_dim, self.num_attention_heads);
        let (ql, inter, hc) = (self.q_lora_rank, self.moe_intermediate_size, self.hc_mult);
        let wide = self.o_groups * self.o_lora_rank;
        let mix = (2 + hc) * hc;
        for which in ["attn", "ffn"] {
            p.bf16(Group::Norm, format!("{pre}.{which}_norm.weight"), &[d]);
            p.f32(Group::Hyper, format!("{pre}.hc_{which}_fn"), &[mix, hc * d]);
            p.f32(Group::Hyper, format!("{pre}.hc_{which}_base"), &[mix]);
            p.f32(Group::Hyper, format!("{pre}.hc_{which}_scale"), &[3]);
        }
        let g = Group::Attention;
        p.f32(g, format!("{pre}.attn.attn_sink"), &[heads]);
        p.fp8(g, format!("{pre}.attn.wq_a"), ql, d);
        p.bf16(g, format!("{pre}.attn.q_norm.weight"), &[ql]);
        p.fp8(g, format!("{pre}.attn.wq_b"), heads * hd, ql);
        p.fp8(g, format!("{pre}.attn.wkv"), hd, d);
        p.bf16(g, format!("{pre}.attn.kv_norm.weight"), &[hd]);
        p.fp8(g, format!("{pre}.attn.wo_a"), wide, heads * hd / self.o_groups);
        p.fp8(g, format!("{pre}.attn.wo_b"), d, wide);
        p.bf16(Group::Router, format!("{pre}.ffn.gate.weight"), &[experts, d]);
        p.f32(Group::Router, format!("{pre}.ffn.gate.bias"), &[experts]);
        p.f32(Group::Router, format!("{pre}.ffn.gate.bias_vl"), &[experts]);
        for (w, rows, cols) in [("w1", inter, d), ("w2", d, inter), ("w3", inter, d)] {
            for e in 0..experts {
                p.fp4(Group::RoutedExperts, format!("{pre}.ffn.experts.{e}.{w}"), rows, cols);
            }
            p.fp8(Group::SharedExperts, format!("{pre}.ffn.shared_experts.{w}"), rows, cols);
        }
    }

    fn stage_part(&self, s: usize) -> Part {
        let (d, v) = (self.hidden_size, self.vocab_size);
        let pre = format!("mtp.{s}");
        let g = Group::Dspark;
        let mut p = Part::default();
        self.block(&mut p, &pre, self.dspark.n_routed_experts);
        if s == 0 {
            p.fp8(g, format!("{pre}.main_proj"), d, d * self.dspark.target_layer_ids.len());
            p.bf16(g, format!("{pre}.main_norm.weight"), &[d]);
        }
        if s + 1 == self.dspark.stages {
            let rank = self.dspark.markov_rank;
            p.bf16(g, format!("{pre}.norm.weight"), &[d]);
            p.bf16(g, format!("{pre}.markov_head.embed.weight"), &[v, rank]);
            p.linear(g, Dtype::Bf16, &format!("{pre}.markov_head.head"), v, rank);
            p.bf16(g, format!("{pre}.confidence_head.proj.weight"), &[1, d + rank]);
        }
        for t in &mut p.0 {
            t.group = g;
        }
        p
    }

    fn vision_ends_part(&self) -> Part {
        let mut p = Part::default();
        let (v, d, g) = (&self.vision, self.hidden_size, Group::Vision);
        if v.num_hidden_layers == 0 {
            return p;
        }
        let w = v.hidden_size;
        p.bf16(g, "vision.patch_embed.proj.weight".into(), &[w, 3 * v.patch_size * v.patch_size]);
        p.bf16(g, "vision.patch_embed.proj.bias".into(), &[w]);
        p.bf16(g, "vision.norm.weight".into(), &[w]);
        p.bf16(g, "aligner.w1.weight".into(), &[d, w * v.downsample_ratio * v.downsample_ratio]);
        p.bf16(g, "aligner.w1.bias".into(), &[d]);
        p.bf16(g, "aligner.w2.weight".into(), &[d, d]);
        p.bf16(g, "aligner.w2.bias".into(), &[d]);
        for mark in ["image_start", "image_end", "image_newline"] {
            p.bf16(Group::ImageMarks, mark.into(), &[d]);
        }
        p
    }

    fn vision_block_part(&self, b: usize) -> Part {
        let (w, inner, g) = (self.vision.hidden_size, self.vision.intermediate_size, Group::Vision);
        let pre = format!("vision.blocks.{b}");
        let mut p = Part::default();
        p.bf16(g, format!("{pre}.norm1.weight"), &[w]);
        p.bf16(g, format!("{pre}.norm2.weight"), &[w]);
        p.bf16(g, format!("{pre}.attn.wqkv.weight"), &[3 * w, w]);
        p.bf16(g, format!("{pre}.attn.wqkv.bias"), &[3 * w]);
        p.bf16(g, format!("{pre}.attn.wo.weight"), &[w, w]);
        p.bf16(g, format!("{pre}.attn.wo.bias"), &[w]);
        p.bf16(g, format!("{pre}.mlp.w1.weight"), &[2 * inner, w]);
        p.bf16(g, format!("{pre}.mlp.w2.weight"), &[w, inner]);
        p
    }
}
