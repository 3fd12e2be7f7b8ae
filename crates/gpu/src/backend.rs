//! The operators, each by its launcher.

use checkpoint::Weight;
use ops::{
    Backend, Compressed, DeviceError, ExpertWeights, Host, Io, Mix, Mode, RopeTable, Routing, Taps, Window,
    blocks::{
        self, AttentionInput, AttentionWeights, Candidates, CompressorWeights, Entries, IndexerWeights,
        KeyWeights, MoeWeights, OpenGroup, SublayerWeights,
    },
    hyper::MixConstants,
};

use crate::{Binding, Buf, Constant, Device, Experts, Gpu, Mat, launch::Choice};

impl<D: Device> Gpu<D> {
    /// Function constant 0 of most files: whether values are rounded as the released reference rounds.
    pub(crate) fn rounding(&self) -> (u32, Constant) {
        (0, Constant::Bool(self.source()))
    }
}

impl<D: Device> Mat<D> {
    /// The stored values of a plain weight.
    pub(crate) fn data(&self) -> Binding<D::Buffer> {
        Binding::Buffer(self.slab.buffer.clone(), self.slab.offsets[0])
    }
}

impl<D: Device> Backend for Gpu<D> {
    type Buf = Buf<D>;
    type Mat = Mat<D>;
    type Experts = Experts<D>;

    fn name(&self) -> &'static str {
        self.device.name()
    }

    fn mode(&self) -> Mode {
        self.mode
    }

    fn upload(&self, host: &Host) -> Result<Buf<D>, DeviceError> {
        self.upload_host(host)
    }

    fn read(&self, buf: &Buf<D>) -> Result<Host, DeviceError> {
        self.fetch(buf)
    }

    fn shape(&self, buf: &Buf<D>) -> Vec<usize> {
        buf.shape().to_vec()
    }

    fn cache(&self, rows: usize, width: usize) -> Result<Buf<D>, DeviceError> {
        self.zeroed(rows, width)
    }

    fn load(&self, weight: &Weight) -> Result<Mat<D>, DeviceError> {
        Mat::new(&self.device, weight)
    }

    fn load_experts(&self, experts: Vec<ExpertWeights>) -> Result<Experts<D>, DeviceError> {
        Experts::new(&self.device, &experts)
    }

    fn concat_rows(&self, a: &Buf<D>, b: &Buf<D>) -> Buf<D> {
        self.joined_rows(a, b)
    }

    fn slice_rows(&self, x: &Buf<D>, start: usize, count: usize) -> Buf<D> {
        self.sliced(x, start, count)
    }

    fn reshape(&self, x: &Buf<D>, shape: &[usize]) -> Buf<D> {
        x.reshaped(shape)
    }

    fn embed(&self, table: &Mat<D>, ids: &[u32]) -> Buf<D> {
        self.embedded(table, ids)
    }

    fn replicate(&self, x: &Buf<D>, streams: usize) -> Buf<D> {
        self.replicated(x, streams)
    }

    fn rmsnorm(&self, x: &Buf<D>, weight: &Buf<D>, eps: f32) -> Buf<D> {
        self.rmsnorm_rows(x, weight, eps)
    }

    fn linear(&self, x: &Buf<D>, weight: &Mat<D>, io: Io) -> Buf<D> {
        self.linear_any(x, weight, io)
    }

    fn linear_pair(&self, x: &Buf<D>, weights: [&Mat<D>; 2], io: Io) -> [Buf<D>; 2] {
        self.linear_both(x, weights, io)
    }

    fn grouped_linear(&self, x: &Buf<D>, weight: &Mat<D>, groups: usize) -> Buf<D> {
        self.grouped_any(x, weight, groups)
    }

    fn argmax(&self, logits: &Buf<D>) -> Buf<D> {
        self.argmax_rows(logits)
    }

    fn rope(
        &self,
        x: &Buf<D>,
        head_dim: usize,
        table: &RopeTable,
        positions: &[u32],
        inverse: bool,
    ) -> Buf<D> {
        self.rope_rows(x, head_dim, table, positions, inverse)
    }

    fn store_window(&self, kv: &Buf<D>) -> Buf<D> {
        self.window_codes(kv)
    }

    fn ring_write(&self, ring: &mut Buf<D>, codes: &Buf<D>, positions: &[u32]) {
        self.write_ring(ring, codes, positions);
    }

    fn publish_kv(&self, cache: &mut Buf<D>, latent: &Buf<D>, first: usize) {
        self.publish_entries(cache, latent, first);
    }

    fn publish_key(&self, cache: &mut Buf<D>, key: &Buf<D>, first: usize) {
        self.publish_keys(cache, key, first);
    }

    fn quantise_index_query(&self, q: &Buf<D>) -> Buf<D> {
        self.quantised_query(q)
    }

    fn pool_pairs(&self, kv: &Buf<D>, score: &Buf<D>) -> Buf<D> {
        self.pooled(kv, score)
    }

    fn index_scores(&self, q: &Buf<D>, w: &Buf<D>, keys: &Buf<D>, n: usize, visible: &[u32]) -> Buf<D> {
        self.scored(q, false, w, keys, n, visible)
    }

    fn candidates(&self, scores: &Buf<D>, visible: &[u32], block: usize, keep: usize) -> Buf<D> {
        self.candidate_blocks(scores, visible, block, keep)
    }

    fn mask_scores(&self, scores: &Buf<D>, mask: &Buf<D>, block: usize) -> Buf<D> {
        self.masked(scores, mask, block)
    }

    fn topk(&self, scores: &Buf<D>, k: usize) -> Buf<D> {
        self.highest(scores, k)
    }

    fn sparse_attention(
        &self,
        q: &Buf<D>,
        window: &Window<'_, Buf<D>>,
        compressed: Option<&Compressed<'_, Buf<D>>>,
        sinks: &Buf<D>,
        positions: &[u32],
    ) -> Buf<D> {
        self.attended(q, window, compressed, sinks, positions)
    }

    fn router(
        &self,
        logits: &Buf<D>,
        bias: &Buf<D>,
        image: Option<(&Buf<D>, &[bool])>,
        k: usize,
        scale: f32,
    ) -> Routing<Buf<D>> {
        self.routed(logits, bias, image, k, scale)
    }

    fn routed_experts(
        &self,
        x: &Buf<D>,
        routing: &Routing<Buf<D>>,
        experts: &Experts<D>,
        limit: f32,
    ) -> Buf<D> {
        self.experts(x, routing, experts, limit)
    }

    fn shared_expert(&self, x: &Buf<D>, weights: [&Mat<D>; 3], limit: f32) -> Buf<D> {
        self.shared(x, weights, limit)
    }

    fn moe_sum(&self, routed: &Buf<D>, shared: &Buf<D>) -> Buf<D> {
        self.added(routed, shared, true)
    }

    fn hc_mix(
        &self,
        streams: &Buf<D>,
        fun: &Mat<D>,
        scale: &Buf<D>,
        base: &Buf<D>,
        constants: MixConstants,
    ) -> Mix<Buf<D>> {
        self.mixed(streams, fun, [scale, base], constants)
    }

    fn hc_collapse(&self, streams: &Buf<D>, pre: &Buf<D>) -> Buf<D> {
        self.collapsed(streams, pre)
    }

    fn hc_expand(&self, streams: &Buf<D>, y: &Buf<D>, mix: &Mix<Buf<D>>) -> Buf<D> {
        self.expanded(streams, y, mix)
    }

    fn engram_rows(&self, table: &Weight, rows: &[u64], columns: usize) -> Buf<D> {
        self.gathered(table, rows, columns)
    }

    fn engram_gate(
        &self,
        streams: &Buf<D>,
        kv: &Buf<D>,
        q_weight: &Buf<D>,
        k_weight: &Buf<D>,
        alive: &[bool],
    ) -> (Buf<D>, Buf<D>) {
        self.engram_gated(streams, kv, [q_weight, k_weight], alive)
    }

    fn stream_mean(&self, streams: &Buf<D>) -> Buf<D> {
        self.stream_means(streams)
    }

    fn draft_attention(
        &self,
        q: &Buf<D>,
        ring: &Buf<D>,
        window: usize,
        block: &Buf<D>,
        sinks: &Buf<D>,
        position: u32,
    ) -> Buf<D> {
        self.draft_attended(q, ring, window, block, sinks, position)
    }

    fn markov_bias(&self, base: &Buf<D>, bias: &Buf<D>) -> Buf<D> {
        self.added(base, bias, false)
    }

    fn concat_cols(&self, parts: &[&Buf<D>]) -> Buf<D> {
        self.joined_columns(parts)
    }

    fn attention_input(
        &self,
        x: &Buf<D>,
        weights: &AttentionWeights<Self>,
        table: &RopeTable,
        positions: &[u32],
    ) -> AttentionInput<Buf<D>> {
        self.attention_entered(x, weights, table, positions)
    }

    fn sublayer_input(
        &self,
        streams: &Buf<D>,
        pre: &Buf<D>,
        weights: &SublayerWeights<Self>,
        taps: &mut Taps<'_, Buf<D>>,
    ) -> (Mix<Buf<D>>, Buf<D>) {
        self.sublayer_entered(streams, pre, weights, taps)
    }

    fn attention_output(
        &self,
        o: &Buf<D>,
        weights: &AttentionWeights<Self>,
        table: &RopeTable,
        positions: &[u32],
    ) -> Buf<D> {
        let o = self.turned_back(o, weights.head_dim, table, positions);
        self.linear(&self.grouped_linear(&o, &weights.wo_a, weights.groups), &weights.wo_b, Io::Fp8)
    }

    fn index_query(
        &self,
        x: &Buf<D>,
        latent: &Buf<D>,
        weights: &IndexerWeights<Self>,
        table: &RopeTable,
        positions: &[u32],
        entries: Entries<'_, Buf<D>>,
    ) -> Buf<D> {
        let q = self.linear_turned(latent, &weights.wq_b, Io::Fp8, weights.dim, table, positions);
        let w = self.linear(x, &weights.weights_proj, Io::Bf16);
        self.scored(&q, true, &w, entries.keys, entries.n, entries.visible)
    }

    fn choose(
        &self,
        scores: &Buf<D>,
        visible: &[u32],
        block: usize,
        candidates: Candidates<'_, Buf<D>>,
        k: usize,
        taps: &mut Taps<'_, Buf<D>>,
    ) -> (Option<Buf<D>>, Buf<D>) {
        if taps.enabled() {
            return blocks::choose(self, scores, visible, block, candidates, k, taps);
        }
        self.chosen(scores, visible, block, candidates, k)
    }

    fn compress(
        &self,
        x: &Buf<D>,
        weights: &CompressorWeights<Self>,
        open: &mut Option<OpenGroup<Buf<D>>>,
    ) -> Option<Buf<D>> {
        self.compressed(x, weights, open)
    }

    fn publish(
        &self,
        latent: &Buf<D>,
        weights: &KeyWeights<Self>,
        table: &RopeTable,
        positions: &[u32],
        caches: [&mut Buf<D>; 2],
        first: usize,
    ) {
        self.published(latent, weights, table, positions, caches, first);
    }

    fn moe(
        &self,
        x: &Buf<D>,
        weights: &MoeWeights<Self>,
        image: &[bool],
        taps: &mut Taps<'_, Buf<D>>,
    ) -> Buf<D> {
        let image = image.contains(&true).then_some((&weights.bias_vl, image));
        let [w1, w3, w2] = &weights.shared;
        let choice = Choice { bias: &weights.bias, image, top: weights.top, scale: weights.scale };
        if weights.experts.has_exl3()
            && let Some((routing, shared)) =
                self.routed_and_shared(x, &weights.gate, &choice, [w1, w3, w2], weights.limit)
        {
            taps.put("router.experts", &routing.experts);
            taps.put("router.weights", &routing.weights);
            return self.experts_with(x, &routing, &weights.experts, Some(&shared), weights.limit);
        }
        let logits = self.linear(x, &weights.gate, Io::F32);
        let routing = self.router(&logits, &weights.bias, image, weights.top, weights.scale);
        taps.put("router.experts", &routing.experts);
        taps.put("router.weights", &routing.weights);
        self.experts_and_shared(x, &routing, &weights.experts, [w1, w3, w2], weights.limit)
    }
}
