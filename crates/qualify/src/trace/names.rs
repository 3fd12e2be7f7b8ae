//! The names of a trace: what each tensor is, where in the forward pass it is made and by which operators.

/// How a tensor is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Integers that must be equal.
    Ids,
    /// Values.
    Values,
    /// Values on the grid of a cache quantiser: beside the error, elements that sit in another bin are counted.
    Cached,
    /// Values with -inf where nothing may be chosen.
    Scores,
    /// Entries that a row chose; -1 is an empty place; compared as sets.
    Selection,
    /// 0 or 1 an entry.
    Mask,
    /// Experts that a row chose; compared as sets.
    Experts,
    /// Weights of `router.experts`, in its order; compared expert by expert.
    RoutingWeights,
    /// Logits over the vocabulary: also KL both ways and agreement of the best.
    Logits,
    /// Distance of a choice from its runner-up; says how sure a choice was, and is not compared itself.
    Margin,
}

/// One name.
#[derive(Clone, Copy, Debug)]
pub struct TableRow {
    /// Name; in a layer without its `layers.L.`.
    pub name: &'static str,
    /// Whether every layer may have it.
    pub layered: bool,
    /// Shape. T rows, d hidden, E entries, V vocabulary.
    pub shape: &'static str,
    /// How it is compared.
    pub kind: Kind,
    /// Rounding of the released reference (numerics `source`).
    pub rounding: &'static str,
    /// Operators between the tensors before it and this one, in their order.
    pub operators: &'static [&'static str],
    /// Section of the model specification and what the tensor is.
    pub meaning: &'static str,
}

const fn row(
    name: &'static str,
    shape: &'static str,
    kind: Kind,
    rounding: &'static str,
    operators: &'static [&'static str],
    meaning: &'static str,
) -> TableRow {
    TableRow { name, layered: true, shape, kind, rounding, operators, meaning }
}

const fn whole(
    name: &'static str,
    shape: &'static str,
    kind: Kind,
    rounding: &'static str,
    operators: &'static [&'static str],
    meaning: &'static str,
) -> TableRow {
    TableRow { name, layered: false, shape, kind, rounding, operators, meaning }
}

const MIX: &[&str] = &["hc_mix"];

/// Every name, in the order of the forward pass.
pub const TABLE: &[TableRow] = &[
    whole("tokens", "[T]", Kind::Ids, "-", &[], "token ids; in `decode` those of the prompt come first"),
    row("engram.hash_ids", "[T, columns]", Kind::Ids, "-", &[], "2.9: table rows of each n-gram"),
    row("engram.kv_in", "[T, columns*dim]", Kind::Values, "bf16", &["engram_rows"], "2.9: gathered rows"),
    row(
        "engram.value",
        "[T, d]",
        Kind::Values,
        "bf16",
        &["linear_fp8"],
        "2.9: last d columns of the projection",
    ),
    row("engram.gate", "[T, 4]", Kind::Values, "fp32", &["engram_gate"], "2.9: gate of each stream"),
    row("hc_attn.pre", "[T, 4]", Kind::Values, "fp32", MIX, "2.2: weights of the next sublayer's input"),
    row("hc_attn.post", "[T, 4]", Kind::Values, "fp32", MIX, "2.2: weights of this sublayer's output"),
    row("hc_attn.comb", "[T, 4, 4]", Kind::Values, "fp32", MIX, "2.2: mixing, [input stream][output stream]"),
    row("attn_in", "[T, d]", Kind::Values, "bf16", &["hc_collapse", "rmsnorm"], "2.3: input of attention"),
    row(
        "window_kv",
        "[T, head_dim]",
        Kind::Cached,
        "E4M3, scale 2^n per 32",
        &["linear_fp8", "rmsnorm", "rope", "store_window"],
        "2.3: the row that the window keeps",
    ),
    row(
        "compress_kv",
        "[E, head_dim]",
        Kind::Cached,
        "E2M1, E4M3 scale per 16",
        &["linear_bf16", "linear_f32", "pool_pairs", "rmsnorm", "rope", "publish_kv"],
        "2.4: compressed entries of complete groups (KV sources)",
    ),
    row(
        "index_k",
        "[E, index_dim]",
        Kind::Cached,
        "E2M1, scale 2^n per 32",
        &["linear_bf16", "rmsnorm", "rope", "publish_key"],
        "2.5: index keys (KV sources)",
    ),
    row(
        "index_scores",
        "[T, E]",
        Kind::Scores,
        "bf16",
        &["linear_fp8", "rope", "quantise_index_query", "linear_bf16", "index_scores", "mask_scores"],
        "2.5: scores with -inf where the query may not look (index sources)",
    ),
    row("candidates", "[T, E]", Kind::Mask, "-", &["candidates"], "2.6: 1 in kept blocks (candidate source)"),
    row("candidates.margin", "[T]", Kind::Margin, "-", &[], "2.6: of the block choice"),
    row(
        "topk",
        "[T, k]",
        Kind::Selection,
        "-",
        &["topk"],
        "2.5: entries in use, own or inherited; ascending, then -1",
    ),
    row("topk.margin", "[T]", Kind::Margin, "-", &[], "2.5: of the entry choice"),
    row(
        "attn_out",
        "[T, d]",
        Kind::Values,
        "bf16",
        &[
            "linear_fp8",
            "rmsnorm",
            "rope",
            "ring_write",
            "sparse_attention",
            "rope",
            "grouped_linear",
            "linear_fp8",
        ],
        "2.7: output of attention",
    ),
    row(
        "hc_ffn.pre",
        "[T, 4]",
        Kind::Values,
        "fp32",
        &["hc_expand", "hc_mix"],
        "2.2: as above, of the experts",
    ),
    row("hc_ffn.post", "[T, 4]", Kind::Values, "fp32", &["hc_expand", "hc_mix"], "2.2: as above"),
    row("hc_ffn.comb", "[T, 4, 4]", Kind::Values, "fp32", &["hc_expand", "hc_mix"], "2.2: as above"),
    row(
        "ffn_in",
        "[T, d]",
        Kind::Values,
        "bf16",
        &["hc_expand", "hc_collapse", "rmsnorm"],
        "2.8: input of the experts",
    ),
    row(
        "router.experts",
        "[T, k]",
        Kind::Experts,
        "-",
        &["linear_f32", "router"],
        "2.8: chosen experts, in the order of choice",
    ),
    row("router.weights", "[T, k]", Kind::RoutingWeights, "fp32", &["router"], "2.8: their weights"),
    row("router.margin", "[T]", Kind::Margin, "-", &[], "2.8: of the expert choice"),
    row(
        "ffn_out",
        "[T, d]",
        Kind::Values,
        "bf16",
        &["routed_experts", "shared_expert", "moe_sum"],
        "2.8: output of the experts",
    ),
    row("streams", "[T, 4, d]", Kind::Values, "bf16", &["hc_expand"], "2.2: streams behind the layer"),
    row("pre_mix", "[T, 4]", Kind::Values, "fp32", MIX, "2.2: weights that the next layer collapses with"),
    whole(
        "final_hidden",
        "[T, d]",
        Kind::Values,
        "bf16",
        &["hc_collapse", "rmsnorm"],
        "2.10: hidden state behind the final norm",
    ),
    whole("logits", "[T, V]", Kind::Logits, "fp32", &["linear_f32"], "2.10: logits"),
    whole(
        "dspark.tokens",
        "[n, 1 + block]",
        Kind::Ids,
        "-",
        &["argmax"],
        "4: the next token and the drafted ones",
    ),
    whole(
        "dspark.logits",
        "[n, block, V]",
        Kind::Logits,
        "fp32",
        &["draft_attention", "linear_f32", "markov_bias"],
        "4: draft logits, Markov bias included",
    ),
    whole(
        "dspark.confidence",
        "[n, block]",
        Kind::Values,
        "fp32",
        &["concat_cols", "linear_f32"],
        "4: raw confidence",
    ),
];

/// Where a name belongs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Layer, for names that have one.
    pub layer: Option<usize>,
    /// Name without the layer.
    pub stage: String,
    /// Sort key: the order of the forward pass.
    pub order: (usize, usize, usize),
    /// How it is compared; [`Kind::Values`] for an unknown name.
    pub kind: Kind,
}

impl Place {
    /// The name's row of the table; `None` for an unknown name.
    pub fn row(&self) -> Option<&'static TableRow> {
        TABLE.iter().find(|r| r.name == base(&self.stage))
    }
}

/// Name without the marks of a part: `.tail` (last rows) and `.rms` (root mean square of every row).
fn base(stage: &str) -> &str {
    stage.strip_suffix(".tail").or_else(|| stage.strip_suffix(".rms")).unwrap_or(stage)
}

/// Where `name` (without its pass) belongs.
pub fn place(name: &str) -> Place {
    let (layer, stage) = match name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
        Some((l, stage)) if l.parse::<usize>().is_ok() => (l.parse().ok(), stage),
        _ => (None, name),
    };
    let at = TABLE.iter().position(|r| r.name == base(stage) && r.layered == layer.is_some());
    let kind = match at {
        Some(_) if stage.ends_with(".rms") => Kind::Values,
        Some(at) => TABLE[at].kind,
        None => Kind::Values,
    };
    let index = at.unwrap_or(TABLE.len());
    let order = match layer {
        Some(l) => (1, l, index),
        None if index == 0 => (0, 0, 0),
        None => (2, 0, index),
    };
    Place { layer, stage: stage.to_owned(), order, kind }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_placed_in_the_order_of_the_forward_pass() {
        let mut names = ["logits", "layers.10.streams", "layers.2.attn_in", "tokens", "layers.2.ffn_out.rms"];
        names.sort_by_key(|n| place(n).order);
        assert_eq!(
            names,
            ["tokens", "layers.2.attn_in", "layers.2.ffn_out.rms", "layers.10.streams", "logits"]
        );
        assert_eq!(place("layers.3.topk").kind, Kind::Selection);
        assert_eq!(place("layers.3.topk.tail").kind, Kind::Selection);
        assert_eq!(place("layers.3.router.experts").layer, Some(3));
        assert_eq!(place("layers.x.attn_in").layer, None);
    }

    #[test]
    fn every_operator_of_the_table_is_registered() {
        for r in TABLE {
            for op in r.operators {
                assert!(ops::registry::SPECS.iter().any(|s| s.name == *op), "{}: {op}", r.name);
            }
        }
    }

    #[test]
    fn names_are_unique() {
        for (i, r) in TABLE.iter().enumerate() {
            assert!(TABLE[..i].iter().all(|o| o.name != r.name), "{}", r.name);
        }
    }
}
