//! The faults: what is done wrong, in which operator, and in which sizes.

use crate::fault::Size::{self, All, One, Part};

/// One fault.
#[derive(Clone, Copy, Debug)]
pub struct FaultSpec {
    /// Name.
    pub name: &'static str,
    /// The registered operator that is wrong.
    pub operator: &'static str,
    /// What is done wrong.
    pub what: &'static str,
    /// Sizes that it has.
    pub sizes: &'static [Size],
    /// Sizes that no gate sees on the models of the suite, and why.
    pub missed: &'static [(Size, &'static str)],
}

impl FaultSpec {
    const fn missed(self, missed: &'static [(Size, &'static str)]) -> Self {
        Self { missed, ..self }
    }
}

const fn fault(
    name: &'static str,
    operator: &'static str,
    what: &'static str,
    sizes: &'static [Size],
) -> FaultSpec {
    FaultSpec { name, operator, what, sizes, missed: &[] }
}

const THREE: &[Size] = &[All, Part, One];
const TWO: &[Size] = &[All, One];
const WHOLE: &[Size] = &[All];

/// Every fault, in the order of the forward pass.
pub const FAULTS: &[FaultSpec] = &[
    fault(
        "embedding-of-next-id",
        "embed",
        "the row of the next id; part: of the last token alone",
        &[All, Part],
    ),
    fault("stream-left-zero", "replicate", "the last stream starts at zero", WHOLE),
    fault(
        "engram-wrong-head",
        "engram_rows",
        "hash heads in reverse order; part: two columns swapped",
        THREE,
    ),
    fault("engram-gate-without-root", "engram_gate", "the gate's dot product enters without its root", TWO),
    fault("sinkhorn-one-short", "hc_mix", "19 of 20 Sinkhorn iterations", TWO).missed(&[(
        One,
        "the coefficients differ in their last bits alone, and no rounding of the streams turns on them",
    )]),
    fault("sinkhorn-once", "hc_mix", "one Sinkhorn iteration", TWO),
    fault("collapse-by-mean", "hc_collapse", "plain mean of the streams instead of the carried weights", TWO),
    fault("norm-epsilon", "rmsnorm", "1e-6 instead of 1e-20", TWO)
        .missed(&[(One, "1e-6 lies under the rounding of this model's mean squares in source numerics")]),
    fault("norm-weight-plus-one", "rmsnorm", "1 + weight; part: of 32 channels", THREE),
    fault(
        "fp8-activation-scale-x2",
        "linear_fp8",
        "activation scales doubled; part: of one block of 32",
        THREE,
    ),
    fault("activations-unquantised", "linear_fp8", "no fp8 activation quantisation", TWO),
    fault("output-truncated", "linear_fp8", "result cut to bf16 instead of rounded", TWO),
    fault("last-block-dropped", "linear_fp8", "the last 32 inputs are left out", TWO),
    fault(
        "batch-dependent",
        "linear_fp8",
        "last bit of the result depends on whether other rows are there",
        TWO,
    ),
    fault("tail-unwritten", "rmsnorm", "the last element is left as the recycled buffer had it", WHOLE),
    fault("rope-position-plus-one", "rope", "positions off by one; part: head 0", THREE),
    fault("rope-halves", "rope", "pairs (i, i + 32) instead of neighbours; part: head 0", THREE),
    fault("inverse-rope-sign", "rope", "the output is rotated forwards instead of back; part: head 0", THREE),
    fault("window-code-low-bit", "store_window", "lowest bit of every code set; part: of the first", THREE),
    fault("ring-slot-plus-one", "ring_write", "rows land one slot late", TWO),
    fault(
        "kv-scale-power-of-two",
        "publish_kv",
        "entry scales rounded up to powers of two; part: first block",
        THREE,
    ),
    fault("stale-index-keys", "publish_key", "keys not written; part: only the newest is missing", THREE),
    fault("index-query-unquantised", "quantise_index_query", "index queries keep their values", TWO),
    fault(
        "pool-gate-swapped",
        "pool_pairs",
        "the pair's gate scores change places; part: of 32 channels",
        THREE,
    ),
    fault("pool-by-mean", "pool_pairs", "plain mean of the pair", TWO),
    fault("index-without-relu", "index_scores", "negative products are kept", TWO),
    fault("index-of-previous-query", "index_scores", "scores of the query before", TWO),
    fault("newest-block-not-forced", "candidates", "the newest block must earn its place", WHOLE),
    fault("candidates-ignored", "mask_scores", "the candidate filter is left out", WHOLE),
    fault("topk-one-less", "topk", "the last choice is dropped", TWO),
    fault("topk-high-index-on-ties", "topk", "the higher index wins a tie", TWO)
        .missed(&[(One, "no scores tie at the cut in these texts; the operator's own case ties on purpose")]),
    fault("missing-sink", "sparse_attention", "no sink in the denominator; part: head 0", THREE),
    fault("window-one-short", "sparse_attention", "the window is one token shorter; part: head 0", THREE),
    fault("probabilities-unrounded", "sparse_attention", "P keeps single precision; part: head 0", THREE),
    fault("softmax-scale-1-percent", "sparse_attention", "scores 1 % larger; part: head 0", THREE),
    fault("group-inputs-swapped", "grouped_linear", "the first two groups take each other's input", TWO),
    fault("router-weights-with-bias", "router", "weights from the biased scores", TWO),
    fault("router-not-normalised", "router", "weights are not divided by their sum", TWO),
    fault("router-bias-ignored", "router", "the choice ignores the bias", TWO),
    fault("expert-order", "routed_experts", "experts add up in descending order", TWO)
        .missed(&[(One, "this model adds two experts a token, which gives the same bits in either order")]),
    fault("expert-gate-and-up-swapped", "routed_experts", "w1 and w3 change places", TWO),
    fault("routing-weight-after-w2", "routed_experts", "the weight multiplies the expert's output", TWO),
    fault(
        "lightest-expert-dropped",
        "routed_experts",
        "the expert with the smallest weight is left out",
        TWO,
    ),
    fault("swiglu-limit-missing", "routed_experts", "no clamp of gate and up", TWO),
    fault("shared-expert-dropped", "shared_expert", "the shared expert gives zero; part: one channel", THREE),
    fault(
        "routed-sum-rounded-first",
        "moe_sum",
        "the routed sum is rounded before the shared expert is added",
        TWO,
    ),
    fault("comb-transposed", "hc_expand", "comb is read [output][input]; part: streams 0 and 1", THREE),
    fault("streams-unrounded", "hc_expand", "streams keep single precision", TWO),
    fault("argmax-last-on-ties", "argmax", "the last of equal logits wins", WHOLE),
];
