//! The trait that every implementation of the operators fulfils, and the weights of its blocks.

use checkpoint::Weight;

use crate::{
    Compressed, DeviceError, Host, Io, Mix, Mode, RopeTable, Routing, Window, blocks, blocks::*,
    hyper::MixConstants,
};

/// The three matrices of a routed expert.
#[derive(Clone, Debug)]
pub struct ExpertWeights {
    /// `w1 [inter, d]`.
    pub gate: Weight,
    /// `w3 [inter, d]`.
    pub up: Weight,
    /// `w2 [d, inter]`.
    pub down: Weight,
}

impl From<&[Weight; 3]> for ExpertWeights {
    /// From w1, w3, w2.
    fn from([w1, w3, w2]: &[Weight; 3]) -> Self {
        Self { gate: w1.clone(), up: w3.clone(), down: w2.clone() }
    }
}

/// Receives an intermediate under its name.
pub type TapSink<'a, T> = dyn FnMut(&str, &T) + 'a;

/// Receives named intermediates; switched off it costs nothing.
pub struct Taps<'a, T> {
    prefix: String,
    sink: Option<&'a mut TapSink<'a, T>>,
}

impl<'a, T> Taps<'a, T> {
    /// Taps that drop everything.
    pub fn off() -> Self {
        Self { prefix: String::new(), sink: None }
    }

    /// Taps that hand every intermediate to `sink` under its name.
    pub fn new(sink: &'a mut TapSink<'a, T>) -> Self {
        Self { prefix: String::new(), sink: Some(sink) }
    }

    /// Puts `prefix` before the names that follow.
    pub fn set_prefix(&mut self, prefix: String) {
        self.prefix = prefix;
    }

    /// Whether anybody listens.
    pub fn enabled(&self) -> bool {
        self.sink.is_some()
    }

    /// Hands on one intermediate.
    pub fn put(&mut self, name: &str, value: &T) {
        if let Some(sink) = &mut self.sink {
            sink(&format!("{}{name}", self.prefix), value);
        }
    }
}

/// One implementation of all operators. Calls record work; only [`Backend::read`] brings values to the host.
///
/// Contracts stand in the registry ([`crate::registry::SPECS`]). A row's output bits depend on that row's inputs and
/// the state alone, never on the number of rows, their place, threads or load. Sizes that do not fit are programming
/// errors and panic; data from files is checked before it gets here.
pub trait Backend: Sized + Send + Sync {
    /// A tensor where the backend computes. Clones are cheap and independent of later writes.
    type Buf: Clone + Send + Sync;
    /// A weight ready for use.
    type Mat: Send + Sync;
    /// The routed experts of one layer, ready for use.
    type Experts: Send + Sync;

    /// Name in reports and on the command line.
    fn name(&self) -> &'static str;
    /// The numerics that this backend was made with.
    fn mode(&self) -> Mode;

    /// Copies a tensor to the backend.
    fn upload(&self, host: &Host) -> Result<Self::Buf, DeviceError>;
    /// Copies a tensor to the host, after all work that it depends on.
    fn read(&self, buf: &Self::Buf) -> Result<Host, DeviceError>;
    /// Shape of a tensor.
    fn shape(&self, buf: &Self::Buf) -> Vec<usize>;
    /// A zeroed cache of `rows` rows of `width` bytes.
    fn cache(&self, rows: usize, width: usize) -> Result<Self::Buf, DeviceError>;
    /// Prepares a weight.
    fn load(&self, weight: &Weight) -> Result<Self::Mat, DeviceError>;
    /// Prepares the routed experts of a layer.
    fn load_experts(&self, experts: Vec<ExpertWeights>) -> Result<Self::Experts, DeviceError>;
    /// `a` and then `b` along the rows.
    fn concat_rows(&self, a: &Self::Buf, b: &Self::Buf) -> Self::Buf;
    /// Rows `start..start + count`.
    fn slice_rows(&self, x: &Self::Buf, start: usize, count: usize) -> Self::Buf;
    /// The same elements under another shape.
    fn reshape(&self, x: &Self::Buf, shape: &[usize]) -> Self::Buf;

    /// `embed`.
    fn embed(&self, table: &Self::Mat, ids: &[u32]) -> Self::Buf;
    /// `replicate`.
    fn replicate(&self, x: &Self::Buf, streams: usize) -> Self::Buf;
    /// `rmsnorm`.
    fn rmsnorm(&self, x: &Self::Buf, weight: &Self::Buf, eps: f32) -> Self::Buf;
    /// `linear_fp8`, `linear_bf16`, `linear_f32`.
    fn linear(&self, x: &Self::Buf, weight: &Self::Mat, io: Io) -> Self::Buf;
    /// `linear` of two weights on the same rows, with the bits that each has alone.
    fn linear_pair(&self, x: &Self::Buf, weights: [&Self::Mat; 2], io: Io) -> [Self::Buf; 2] {
        weights.map(|w| self.linear(x, w, io))
    }
    /// `grouped_linear`.
    fn grouped_linear(&self, x: &Self::Buf, weight: &Self::Mat, groups: usize) -> Self::Buf;
    /// `argmax`.
    fn argmax(&self, logits: &Self::Buf) -> Self::Buf;
    /// `rope`; the last `table.dim()` of every `head_dim` values.
    fn rope(
        &self,
        x: &Self::Buf,
        head_dim: usize,
        table: &RopeTable,
        positions: &[u32],
        inverse: bool,
    ) -> Self::Buf;
    /// `store_window`.
    fn store_window(&self, kv: &Self::Buf) -> Self::Buf;
    /// `ring_write`.
    fn ring_write(&self, ring: &mut Self::Buf, codes: &Self::Buf, positions: &[u32]);
    /// `publish_kv`.
    fn publish_kv(&self, cache: &mut Self::Buf, latent: &Self::Buf, first: usize);
    /// `publish_key`.
    fn publish_key(&self, cache: &mut Self::Buf, key: &Self::Buf, first: usize);
    /// `quantise_index_query`.
    fn quantise_index_query(&self, q: &Self::Buf) -> Self::Buf;
    /// `pool_pairs`.
    fn pool_pairs(&self, kv: &Self::Buf, score: &Self::Buf) -> Self::Buf;
    /// `index_scores` over the first `n` entries.
    fn index_scores(
        &self,
        q: &Self::Buf,
        w: &Self::Buf,
        keys: &Self::Buf,
        n: usize,
        visible: &[u32],
    ) -> Self::Buf;
    /// `candidates`.
    fn candidates(&self, scores: &Self::Buf, visible: &[u32], block: usize, keep: usize) -> Self::Buf;
    /// `mask_scores`.
    fn mask_scores(&self, scores: &Self::Buf, mask: &Self::Buf, block: usize) -> Self::Buf;
    /// `topk`.
    fn topk(&self, scores: &Self::Buf, k: usize) -> Self::Buf;
    /// `sparse_attention`.
    fn sparse_attention(
        &self,
        q: &Self::Buf,
        window: &Window<'_, Self::Buf>,
        compressed: Option<&Compressed<'_, Self::Buf>>,
        sinks: &Self::Buf,
        positions: &[u32],
    ) -> Self::Buf;
    /// `router`; `image` gives the other bias and the rows that take it.
    fn router(
        &self,
        logits: &Self::Buf,
        bias: &Self::Buf,
        image: Option<(&Self::Buf, &[bool])>,
        k: usize,
        scale: f32,
    ) -> Routing<Self::Buf>;
    /// `routed_experts`.
    fn routed_experts(
        &self,
        x: &Self::Buf,
        routing: &Routing<Self::Buf>,
        experts: &Self::Experts,
        limit: f32,
    ) -> Self::Buf;
    /// `shared_expert`; w1, w3, w2.
    fn shared_expert(&self, x: &Self::Buf, weights: [&Self::Mat; 3], limit: f32) -> Self::Buf;
    /// `moe_sum`.
    fn moe_sum(&self, routed: &Self::Buf, shared: &Self::Buf) -> Self::Buf;
    /// `hc_mix`.
    fn hc_mix(
        &self,
        streams: &Self::Buf,
        fun: &Self::Mat,
        scale: &Self::Buf,
        base: &Self::Buf,
        constants: MixConstants,
    ) -> Mix<Self::Buf>;
    /// `hc_collapse`.
    fn hc_collapse(&self, streams: &Self::Buf, pre: &Self::Buf) -> Self::Buf;
    /// `hc_expand`.
    fn hc_expand(&self, streams: &Self::Buf, y: &Self::Buf, mix: &Mix<Self::Buf>) -> Self::Buf;
    /// `engram_rows`; the table stays on the host.
    fn engram_rows(&self, table: &Weight, rows: &[u64], columns: usize) -> Self::Buf;
    /// `engram_gate`: the new streams and the gates.
    fn engram_gate(
        &self,
        streams: &Self::Buf,
        kv: &Self::Buf,
        q_weight: &Self::Buf,
        k_weight: &Self::Buf,
        alive: &[bool],
    ) -> (Self::Buf, Self::Buf);
    /// `stream_mean`.
    fn stream_mean(&self, streams: &Self::Buf) -> Self::Buf;
    /// `draft_attention`.
    fn draft_attention(
        &self,
        q: &Self::Buf,
        ring: &Self::Buf,
        window: usize,
        block: &Self::Buf,
        sinks: &Self::Buf,
        position: u32,
    ) -> Self::Buf;
    /// `markov_bias`.
    fn markov_bias(&self, base: &Self::Buf, bias: &Self::Buf) -> Self::Buf;
    /// `concat_cols`.
    fn concat_cols(&self, parts: &[&Self::Buf]) -> Self::Buf;

    /// Block: coefficients, collapse with the carried `pre`, norm.
    fn sublayer_input(
        &self,
        streams: &Self::Buf,
        pre: &Self::Buf,
        weights: &SublayerWeights<Self>,
        taps: &mut Taps<'_, Self::Buf>,
    ) -> (Mix<Self::Buf>, Self::Buf) {
        blocks::sublayer_input(self, streams, pre, weights, taps)
    }

    /// Block: query, query latent and stored window rows.
    fn attention_input(
        &self,
        x: &Self::Buf,
        weights: &AttentionWeights<Self>,
        table: &RopeTable,
        positions: &[u32],
    ) -> AttentionInput<Self::Buf> {
        blocks::attention_input(self, x, weights, table, positions)
    }

    /// Block: latents of the groups that `x` completes; the rest stays in `open`.
    fn compress(
        &self,
        x: &Self::Buf,
        weights: &CompressorWeights<Self>,
        open: &mut Option<OpenGroup<Self::Buf>>,
    ) -> Option<Self::Buf> {
        blocks::compress(self, x, weights, open)
    }

    /// Block: index key of every latent, written to `cache`.
    fn index_keys(
        &self,
        latent: &Self::Buf,
        weights: &KeyWeights<Self>,
        table: &RopeTable,
        positions: &[u32],
        cache: &mut Self::Buf,
        first: usize,
    ) {
        blocks::index_keys(self, latent, weights, table, positions, cache, first);
    }

    /// Block: index key and rotated entry of every latent, written to `[keys, entries]`.
    fn publish(
        &self,
        latent: &Self::Buf,
        weights: &KeyWeights<Self>,
        table: &RopeTable,
        positions: &[u32],
        caches: [&mut Self::Buf; 2],
        first: usize,
    ) {
        blocks::publish(self, latent, weights, table, positions, caches, first);
    }

    /// Block: scores of every query over the first `n` entries.
    fn index_query(
        &self,
        x: &Self::Buf,
        latent: &Self::Buf,
        weights: &IndexerWeights<Self>,
        table: &RopeTable,
        positions: &[u32],
        entries: Entries<'_, Self::Buf>,
    ) -> Self::Buf {
        blocks::index_query(self, x, latent, weights, table, positions, entries)
    }

    /// Block: kept blocks of `block` entries, where they are chosen here, and the `k` entries with the highest scores.
    fn choose(
        &self,
        scores: &Self::Buf,
        visible: &[u32],
        block: usize,
        candidates: Candidates<'_, Self::Buf>,
        k: usize,
        taps: &mut Taps<'_, Self::Buf>,
    ) -> (Option<Self::Buf>, Self::Buf) {
        blocks::choose(self, scores, visible, block, candidates, k, taps)
    }

    /// Block: inverse rotation and the two output projections.
    fn attention_output(
        &self,
        o: &Self::Buf,
        weights: &AttentionWeights<Self>,
        table: &RopeTable,
        positions: &[u32],
    ) -> Self::Buf {
        blocks::attention_output(self, o, weights, table, positions)
    }

    /// Block: router, routed and shared experts.
    fn moe(
        &self,
        x: &Self::Buf,
        weights: &MoeWeights<Self>,
        image: &[bool],
        taps: &mut Taps<'_, Self::Buf>,
    ) -> Self::Buf {
        blocks::moe(self, x, weights, image, taps)
    }

    /// Block: Engram rows, their projection and the gated update of the streams.
    fn engram(
        &self,
        streams: &Self::Buf,
        weights: &EngramWeights<Self>,
        rows: &[u64],
        alive: &[bool],
        taps: &mut Taps<'_, Self::Buf>,
    ) -> Self::Buf {
        blocks::engram(self, streams, weights, &weights.table, rows, alive, taps)
    }

    /// Block: collapse, final norm and logits; also returns the normed hidden state.
    fn head(
        &self,
        streams: &Self::Buf,
        pre: &Self::Buf,
        weights: &HeadWeights<Self>,
    ) -> (Self::Buf, Self::Buf) {
        blocks::head(self, streams, pre, weights)
    }
}
