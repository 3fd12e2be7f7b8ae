//! The blocks: sequences of operators that a backend may replace by fused kernels, and the weights they take.

use checkpoint::Weight;

use crate::{Backend, Io, Mix, RopeTable, Taps, hyper::MixConstants};

/// Weights before a sublayer: hyper-connection mix and norm.
pub struct SublayerWeights<B: Backend> {
    /// `fn [24, 4d]`.
    pub fun: B::Mat,
    /// `[3]`.
    pub scale: B::Buf,
    /// `[24]`.
    pub base: B::Buf,
    /// Constants of the mix.
    pub constants: MixConstants,
    /// `[d]`.
    pub norm: B::Buf,
    /// Name of the coefficients in traces.
    pub tap: &'static str,
}

/// Weights of attention that every layer has.
pub struct AttentionWeights<B: Backend> {
    /// `wq_a [q_rank, d]`.
    pub wq_a: B::Mat,
    /// `[q_rank]`.
    pub q_norm: B::Buf,
    /// `wq_b [heads·head_dim, q_rank]`.
    pub wq_b: B::Mat,
    /// `wkv [head_dim, d]`.
    pub wkv: B::Mat,
    /// `[head_dim]`.
    pub kv_norm: B::Buf,
    /// `[heads]`.
    pub sinks: B::Buf,
    /// `wo_a [groups·o_rank, heads·head_dim/groups]`.
    pub wo_a: B::Mat,
    /// `wo_b [d, groups·o_rank]`.
    pub wo_b: B::Mat,
    /// Values of one head.
    pub head_dim: usize,
    /// Groups of the output projection.
    pub groups: usize,
    /// Added to mean squares.
    pub eps: f32,
}

/// What attention needs of its own rows.
pub struct AttentionInput<T> {
    /// Query latent after its norm, `[T, q_rank]`.
    pub latent: T,
    /// Rotated queries, `[T, heads·head_dim]`.
    pub q: T,
    /// Window rows as stored.
    pub codes: T,
}

/// Weights of a compressor.
pub struct CompressorWeights<B: Backend> {
    /// `[head_dim, d]`.
    pub wkv: B::Mat,
    /// `[head_dim, d]`; ratio 2 only.
    pub wgate: Option<B::Mat>,
    /// `[head_dim]`.
    pub norm: B::Buf,
    /// Added to the mean square.
    pub eps: f32,
}

/// Projections of a ratio-2 token whose group is not complete: `[1, head_dim]` each.
#[derive(Clone)]
pub struct OpenGroup<T> {
    /// Value projection.
    pub kv: T,
    /// Gate projection.
    pub score: T,
}

/// Weights of the index keys.
pub struct KeyWeights<B: Backend> {
    /// `[index_dim, head_dim]`.
    pub wk: B::Mat,
    /// `[index_dim]`.
    pub k_norm: B::Buf,
    /// Added to the mean square.
    pub eps: f32,
}

/// Weights of the index queries.
pub struct IndexerWeights<B: Backend> {
    /// `[index_heads·index_dim, q_rank]`.
    pub wq_b: B::Mat,
    /// `[index_heads, d]`.
    pub weights_proj: B::Mat,
    /// Values of one index head.
    pub dim: usize,
}

/// The index keys that queries score.
pub struct Entries<'a, T> {
    /// Stored keys.
    pub keys: &'a T,
    /// Entries in use.
    pub n: usize,
    /// Entries that each query may see.
    pub visible: &'a [u32],
}

/// How a choice of entries deals with blocks of them.
#[derive(Debug)]
pub enum Candidates<'a, T> {
    /// Not at all.
    All,
    /// So many blocks are kept for later choices; this one takes from all.
    Choose(usize),
    /// Takes from kept blocks alone.
    Kept(&'a T),
}

impl<T> Clone for Candidates<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Candidates<'_, T> {}

/// Weights of the mixture of experts.
pub struct MoeWeights<B: Backend> {
    /// `[E, d]`.
    pub gate: B::Mat,
    /// `[E]`.
    pub bias: B::Buf,
    /// `[E]`, for tokens of an image span.
    pub bias_vl: B::Buf,
    /// Routed experts.
    pub experts: B::Experts,
    /// w1, w3, w2 of the shared expert.
    pub shared: [B::Mat; 3],
    /// Experts a token takes.
    pub top: usize,
    /// Scale of the routing weights.
    pub scale: f32,
    /// Clamp of the activation.
    pub limit: f32,
}

/// Weights of an Engram layer.
pub struct EngramWeights<B: Backend> {
    /// The table, in host memory.
    pub table: Weight,
    /// `[5d, columns·dim]`.
    pub wkv: B::Mat,
    /// `[4, d]`.
    pub q_weight: B::Buf,
    /// `[4, d]`.
    pub k_weight: B::Buf,
    /// Table rows a token gathers.
    pub columns: usize,
}

/// Weights of the head.
pub struct HeadWeights<B: Backend> {
    /// `[d]`.
    pub norm: B::Buf,
    /// `[V, d]`.
    pub head: B::Mat,
    /// Added to the mean square.
    pub eps: f32,
}

pub(crate) fn sublayer_input<B: Backend>(
    b: &B,
    streams: &B::Buf,
    pre: &B::Buf,
    w: &SublayerWeights<B>,
    taps: &mut Taps<'_, B::Buf>,
) -> (Mix<B::Buf>, B::Buf) {
    let mix = b.hc_mix(streams, &w.fun, &w.scale, &w.base, w.constants);
    for (name, value) in [("pre", &mix.pre), ("post", &mix.post), ("comb", &mix.comb)] {
        if taps.enabled() {
            taps.put(&format!("{}.{name}", w.tap), value);
        }
    }
    let x = b.rmsnorm(&b.hc_collapse(streams, pre), &w.norm, w.constants.norm_eps);
    (mix, x)
}

pub(crate) fn attention_input<B: Backend>(
    b: &B,
    x: &B::Buf,
    w: &AttentionWeights<B>,
    table: &RopeTable,
    positions: &[u32],
) -> AttentionInput<B::Buf> {
    let latent = b.rmsnorm(&b.linear(x, &w.wq_a, Io::Fp8), &w.q_norm, w.eps);
    let q = b.rope(&b.linear(&latent, &w.wq_b, Io::Fp8), w.head_dim, table, positions, false);
    let kv = b.rmsnorm(&b.linear(x, &w.wkv, Io::Fp8), &w.kv_norm, w.eps);
    let codes = b.store_window(&b.rope(&kv, w.head_dim, table, positions, false));
    AttentionInput { latent, q, codes }
}

/// [`Backend::compress`] operator by operator.
pub fn compress<B: Backend>(
    b: &B,
    x: &B::Buf,
    w: &CompressorWeights<B>,
    open: &mut Option<OpenGroup<B::Buf>>,
) -> Option<B::Buf> {
    let pooled = match &w.wgate {
        None => b.linear(x, &w.wkv, Io::Bf16),
        Some(wgate) => {
            let [mut kv, mut score] = b.linear_pair(x, [&w.wkv, wgate], Io::F32);
            if let Some(o) = open.take() {
                kv = b.concat_rows(&o.kv, &kv);
                score = b.concat_rows(&o.score, &score);
            }
            let shape = b.shape(&kv);
            let (rows, d) = (shape[0], shape[1]);
            if rows % 2 == 1 {
                let last = |t: &B::Buf| b.slice_rows(t, rows - 1, 1);
                *open = Some(OpenGroup { kv: last(&kv), score: last(&score) });
            }
            if rows < 2 {
                return None;
            }
            let pairs = |t: &B::Buf| b.reshape(&b.slice_rows(t, 0, rows / 2 * 2), &[rows / 2, 2, d]);
            b.pool_pairs(&pairs(&kv), &pairs(&score))
        }
    };
    Some(b.rmsnorm(&pooled, &w.norm, w.eps))
}

pub(crate) fn index_keys<B: Backend>(
    b: &B,
    latent: &B::Buf,
    w: &KeyWeights<B>,
    table: &RopeTable,
    positions: &[u32],
    cache: &mut B::Buf,
    first: usize,
) {
    let k = b.rmsnorm(&b.linear(latent, &w.wk, Io::Bf16), &w.k_norm, w.eps);
    let dim = b.shape(&k)[1];
    b.publish_key(cache, &b.rope(&k, dim, table, positions, false), first);
}

/// [`Backend::publish`] operator by operator.
pub fn publish<B: Backend>(
    b: &B,
    latent: &B::Buf,
    w: &KeyWeights<B>,
    table: &RopeTable,
    positions: &[u32],
    [keys, entries]: [&mut B::Buf; 2],
    first: usize,
) {
    b.index_keys(latent, w, table, positions, keys, first);
    let width = b.shape(latent)[1];
    b.publish_kv(entries, &b.rope(latent, width, table, positions, false), first);
}

/// [`Backend::choose`] operator by operator.
pub fn choose<B: Backend>(
    b: &B,
    scores: &B::Buf,
    visible: &[u32],
    block: usize,
    candidates: Candidates<'_, B::Buf>,
    k: usize,
    taps: &mut Taps<'_, B::Buf>,
) -> (Option<B::Buf>, B::Buf) {
    let (mut mask, mut masked) = (None, None);
    match candidates {
        Candidates::All => {}
        Candidates::Choose(keep) => {
            let kept = b.candidates(scores, visible, block, keep);
            taps.put("candidates", &kept);
            mask = Some(kept);
        }
        Candidates::Kept(kept) => masked = Some(b.mask_scores(scores, kept, block)),
    }
    let scores = masked.as_ref().unwrap_or(scores);
    taps.put("index_scores", scores);
    (mask, b.topk(scores, k))
}

pub(crate) fn index_query<B: Backend>(
    b: &B,
    x: &B::Buf,
    latent: &B::Buf,
    w: &IndexerWeights<B>,
    table: &RopeTable,
    positions: &[u32],
    entries: Entries<'_, B::Buf>,
) -> B::Buf {
    let q = b.rope(&b.linear(latent, &w.wq_b, Io::Fp8), w.dim, table, positions, false);
    let weights = b.linear(x, &w.weights_proj, Io::Bf16);
    b.index_scores(&b.quantise_index_query(&q), &weights, entries.keys, entries.n, entries.visible)
}

pub(crate) fn attention_output<B: Backend>(
    b: &B,
    o: &B::Buf,
    w: &AttentionWeights<B>,
    table: &RopeTable,
    positions: &[u32],
) -> B::Buf {
    let o = b.rope(o, w.head_dim, table, positions, true);
    b.linear(&b.grouped_linear(&o, &w.wo_a, w.groups), &w.wo_b, Io::Fp8)
}

pub(crate) fn moe<B: Backend>(
    b: &B,
    x: &B::Buf,
    w: &MoeWeights<B>,
    image: &[bool],
    taps: &mut Taps<'_, B::Buf>,
) -> B::Buf {
    let logits = b.linear(x, &w.gate, Io::F32);
    let image = image.contains(&true).then_some((&w.bias_vl, image));
    let routing = b.router(&logits, &w.bias, image, w.top, w.scale);
    taps.put("router.experts", &routing.experts);
    taps.put("router.weights", &routing.weights);
    let routed = b.routed_experts(x, &routing, &w.experts, w.limit);
    let [w1, w3, w2] = &w.shared;
    b.moe_sum(&routed, &b.shared_expert(x, [w1, w3, w2], w.limit))
}

/// [`Backend::engram`] operator by operator, with the rows of `table` instead of the weights' own.
pub fn engram<B: Backend>(
    b: &B,
    streams: &B::Buf,
    w: &EngramWeights<B>,
    table: &Weight,
    rows: &[u64],
    alive: &[bool],
    taps: &mut Taps<'_, B::Buf>,
) -> B::Buf {
    let e = b.engram_rows(table, rows, w.columns);
    taps.put("engram.kv_in", &e);
    let kv = b.linear(&e, &w.wkv, Io::Fp8);
    let (streams, gate) = b.engram_gate(streams, &kv, &w.q_weight, &w.k_weight, alive);
    taps.put("engram.kv", &kv);
    taps.put("engram.gate", &gate);
    streams
}

pub(crate) fn head<B: Backend>(
    b: &B,
    streams: &B::Buf,
    pre: &B::Buf,
    w: &HeadWeights<B>,
) -> (B::Buf, B::Buf) {
    let hidden = b.rmsnorm(&b.hc_collapse(streams, pre), &w.norm, w.eps);
    let logits = b.linear(&hidden, &w.head, Io::F32);
    (hidden, logits)
}
