//! What an operator has to move for one row: weights, entries and values once each, whatever the kernels do.

use numerics::quantise::{fp4_row_bytes, fp8_row_bytes, kv_row_bytes};
use ops::registry::Geometry;

/// Bytes of an operator for one row.
#[derive(Clone, Copy, Debug)]
pub struct Bytes {
    /// Name in the registry.
    pub operator: &'static str,
    /// By the sizes in [`SIZES`].
    pub formula: &'static str,
    /// The same for a geometry.
    pub count: fn(&Geometry) -> usize,
}

/// What the formulas' letters mean.
pub const SIZES: &str = "D hidden width, H heads of d, W window, K chosen entries of n,
h index heads of i, E experts, of which A are active with F inner values, C Engram columns of e, V vocabulary, b draft block,
m Markov rank; linear layers have o outputs and k inputs (in the figures those of the query's first projection; grouped ones
those of the attention output's first); EXL3 weights are counted at 3 bits";

const fn bytes(operator: &'static str, formula: &'static str, count: fn(&Geometry) -> usize) -> Bytes {
    Bytes { operator, formula, count }
}

/// Inputs and outputs of a linear layer.
fn ends(g: &Geometry) -> usize {
    4 * (g.hidden + g.q_rank)
}

/// Values and weights of the grouped layer.
fn grouped(g: &Geometry) -> [usize; 2] {
    let (inputs, outputs) = (g.heads * g.head_dim, g.o_groups * g.o_rank);
    [4 * (inputs + outputs), outputs * inputs / g.o_groups]
}

/// Weights of the three matrices of one expert.
fn expert(g: &Geometry) -> usize {
    3 * g.hidden * g.inter
}

/// Stored fp8 weights with a scale for each 32 x 32.
fn fp8(weights: usize) -> usize {
    weights + weights / 1024
}

/// Every operator of the registry.
pub const BYTES: &[Bytes] = &[
    bytes("embed", "2 D + 4 D", |g| 6 * g.hidden),
    bytes("replicate", "4 D + 16 D", |g| 20 * g.hidden),
    bytes("engram_rows", "C e (1 + 1/32) + 4 C e", |g| {
        let n = g.engram_cols * g.engram_dim;
        n + n / 32 + 4 * n
    }),
    bytes("engram_gate", "streams 16 D, keys and value 20 D, weights 32 D; 16 D", |g| 84 * g.hidden),
    bytes("hc_mix", "streams 16 D, weights 384 D; 96", |g| 400 * g.hidden + 96),
    bytes("hc_collapse", "16 D + 4 D", |g| 20 * g.hidden),
    bytes("rmsnorm", "4 D + 4 D; 4 D", |g| 12 * g.hidden),
    bytes("linear_fp8", "o k (1 + 1/1024) + 4 (k + o)", |g| fp8(g.q_rank * g.hidden) + ends(g)),
    bytes("linear_bf16", "2 o k + 4 (k + o)", |g| 2 * g.q_rank * g.hidden + ends(g)),
    bytes("linear_f32", "4 o k + 4 (k + o)", |g| 4 * g.q_rank * g.hidden + ends(g)),
    bytes("grouped_linear", "o k/groups (1 + 1/1024) + 4 (k + o)", |g| {
        let [ends, weights] = grouped(g);
        fp8(weights) + ends
    }),
    bytes("linear_exl3", "o k bits/8 + 2 (k + o) + 4 (k + o)", |g| {
        g.q_rank * g.hidden * 3 / 8 + ends(g) / 2 + ends(g)
    }),
    bytes("grouped_linear_exl3", "o k/groups bits/8 + 2 (k + o) + 4 (k + o)", |g| {
        let [ends, weights] = grouped(g);
        weights * 3 / 8 + ends / 2 + ends
    }),
    bytes("rope", "4 H d + 4 H d", |g| 8 * g.heads * g.head_dim),
    bytes("store_window", "4 d; codes d (1 + 1/32)", |g| 4 * g.head_dim + fp8_row_bytes(g.head_dim)),
    bytes("ring_write", "codes d (1 + 1/32), twice", |g| 2 * fp8_row_bytes(g.head_dim)),
    bytes("publish_kv", "4 d; codes d (1/2 + 1/16)", |g| 4 * g.head_dim + kv_row_bytes(g.head_dim)),
    bytes("publish_key", "4 i; codes i (1/2 + 1/32)", |g| 4 * g.index_dim + fp4_row_bytes(g.index_dim)),
    bytes("quantise_index_query", "4 h i + 4 h i", |g| 8 * g.index_heads * g.index_dim),
    bytes("pool_pairs", "16 d; 4 d", |g| 20 * g.head_dim),
    bytes("index_scores", "keys n i (1/2 + 1/32), query 4 h i, weights 4 h; 4 n", |g| {
        g.entries * (fp4_row_bytes(g.index_dim) + 4) + 4 * g.index_heads * (g.index_dim + 1)
    }),
    bytes("candidates", "4 n; n/block", |g| 4 * g.entries + g.entries.div_ceil(g.block)),
    bytes("mask_scores", "4 n, n/block; 4 n", |g| 8 * g.entries + g.entries.div_ceil(g.block)),
    bytes("topk", "4 n; 4 K", |g| 4 * (g.entries + g.topk)),
    bytes("sparse_attention", "window W d (1 + 1/32), entries K d (1/2 + 1/16), choice 4 K; 8 H d", |g| {
        let (d, k) = (g.head_dim, g.topk);
        g.window * fp8_row_bytes(d) + k * (kv_row_bytes(d) + 4) + 8 * g.heads * d + 4 * g.heads
    }),
    bytes("router", "8 E; 8 A", |g| 8 * (g.experts + g.top)),
    bytes("routed_experts", "A 3 D F (1/2 + 1/32); 8 D", |g| g.top * expert(g) * 17 / 32 + 8 * g.hidden),
    bytes("shared_expert", "3 D F (1 + 1/1024); 8 D", |g| fp8(expert(g)) + 8 * g.hidden),
    bytes("experts_exl3", "A (3 D F bits/8 + 6 (D + F)); 8 D", |g| {
        g.top * (expert(g) * 3 / 8 + 6 * (g.hidden + g.inter)) + 8 * g.hidden
    }),
    bytes("moe_sum", "8 D; 4 D", |g| 12 * g.hidden),
    bytes("hc_expand", "16 D + 4 D; 16 D", |g| 36 * g.hidden),
    bytes("argmax", "4 V; 4", |g| 4 * g.vocab + 4),
    bytes("stream_mean", "16 D; 4 D", |g| 20 * g.hidden),
    bytes("draft_attention", "(W + b) d (1 + 1/32); 8 H d", |g| {
        (g.window + g.draft_block) * fp8_row_bytes(g.head_dim) + 8 * g.heads * g.head_dim + 4 * g.heads
    }),
    bytes("markov_bias", "8 V; 4 V", |g| 12 * g.vocab),
    bytes("concat_cols", "4 (D + m), twice", |g| 8 * (g.hidden + g.markov_rank)),
];

#[cfg(test)]
mod tests {
    use super::*;
    use ops::{
        Host, Mode, Reference,
        registry::{self, SPECS},
    };

    #[test]
    fn every_operator_has_one_entry_in_the_registrys_order() {
        let names: Vec<&str> = BYTES.iter().map(|b| b.operator).collect();
        assert_eq!(names, SPECS.iter().map(|s| s.name).collect::<Vec<_>>());
    }

    /// Where an operator reads all of its inputs, the entry is what the registry's case holds and what comes out. Small
    /// tables of a few numbers (scales, base, block sizes) are left out of the formulas.
    #[test]
    fn entries_are_what_a_case_holds() {
        let g = &Geometry::TINY;
        let len = |h: &Host| match h.data() {
            ops::Data::U8(v) => v.len(),
            ops::Data::F32(v) => 4 * v.len(),
            ops::Data::I32(v) => 4 * v.len(),
        };
        let mut checked = 0;
        for (operator, inputs, weights) in [
            ("replicate", &["x"][..], &[][..]),
            ("engram_gate", &["streams", "kv", "q_weight", "k_weight"], &[]),
            ("hc_mix", &["streams"], &["fn"]),
            ("hc_collapse", &["streams"], &[]),
            ("rmsnorm", &["x", "weight"], &[]),
            ("store_window", &["kv"], &[]),
            ("publish_kv", &["x"], &[]),
            ("publish_key", &["x"], &[]),
            ("quantise_index_query", &["q"], &[]),
            ("pool_pairs", &["kv", "score"], &[]),
            ("index_scores", &["q", "w", "keys"], &[]),
            ("moe_sum", &["routed", "shared"], &[]),
            ("hc_expand", &["streams", "y"], &[]),
            ("stream_mean", &["streams"], &[]),
            ("draft_attention", &["q", "ring", "block", "sinks"], &[]),
            ("markov_bias", &["base", "bias"], &[]),
            ("concat_cols", &["x", "y"], &[]),
        ] {
            let case = registry::case(operator, g, 1, 3).unwrap();
            let outputs = registry::run(operator, &Reference::new(Mode::Exact), &case).unwrap().unwrap();
            // A case's cache has rows that stay as they are, its ring more slots than the window.
            let out: usize = match operator {
                "publish_kv" => kv_row_bytes(g.head_dim),
                "publish_key" => fp4_row_bytes(g.index_dim),
                // A gate for traces; another position.
                "engram_gate" | "draft_attention" => len(&outputs[0].1),
                _ => outputs.iter().map(|(_, h)| len(h)).sum(),
            };
            let extra = if operator == "draft_attention" {
                case.host("ring").width() * (case.host("ring").rows() - g.window)
            } else {
                0
            };
            let held: usize = inputs.iter().map(|name| len(case.host(name))).sum::<usize>()
                + weights.iter().map(|name| case.get_weight(name).data().len()).sum::<usize>()
                + out
                - extra;
            let entry = BYTES.iter().find(|b| b.operator == operator).unwrap();
            assert_eq!((entry.count)(g), held, "{operator}");
            checked += 1;
        }
        assert_eq!(checked, 17);
    }
}
