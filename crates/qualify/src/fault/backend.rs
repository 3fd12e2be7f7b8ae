//! A host backend with one wrong operator.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use numerics::{bf16, e4m3, quantise};
use ops::{
    Backend, Compressed, Data, ExpertWeights, Host, Io, Mix, Mode, RopeTable, Routing, Weight, Window,
    attention, hyper::MixConstants, linear, moe,
};

use crate::fault::Size;

/// A host backend that does one thing wrong.
///
/// The layer of a call is told from the calls themselves: a step begins with `embed`, and every layer ends with its
/// second `hc_expand`.
pub struct Faulty<B> {
    inner: B,
    fault: &'static str,
    size: Size,
    /// Relative error of every attention output.
    gain: f32,
    /// The layer that [`Size::One`] hits.
    layer: usize,
    /// How often each operator is computed for one call: more than once beside a reference.
    repeats: usize,
    expands: AtomicUsize,
    recycled: Mutex<Option<Host>>,
}

impl<B> Faulty<B>
where
    B: Backend<Buf = Host, Mat = Weight, Experts = Vec<ExpertWeights>>,
{
    /// `inner` with `fault`; [`Size::One`] hits `layer`.
    pub fn new(inner: B, fault: &'static str, size: Size, layer: usize) -> Self {
        let (repeats, expands, recycled) = (1, AtomicUsize::new(0), Mutex::new(None));
        Self { inner, fault, size, gain: 0.0, layer, repeats, expands, recycled }
    }

    /// `inner` with every layer's attention output larger by the relative `gain`: a fault of any size.
    pub fn with_gain(inner: B, gain: f32) -> Self {
        Self { gain, ..Self::new(inner, "gain", Size::All, 0) }
    }

    /// The same for a caller that computes every operator `repeats` times a call.
    pub fn repeated(self, repeats: usize) -> Self {
        Self { repeats, ..self }
    }

    /// Whether the present call is to be `fault`.
    fn is(&self, fault: &str) -> bool {
        let layer = self.expands.load(Relaxed) / (2 * self.repeats);
        self.fault == fault && (self.size != Size::One || layer == self.layer)
    }

    fn part(&self) -> bool {
        self.size != Size::All
    }

    /// `f(row, out)` on a copy of every row.
    fn rows(x: &Host, mut f: impl FnMut(usize, &mut [f32])) -> Host {
        let mut y = x.as_f32().to_vec();
        y.chunks_mut(x.width().max(1)).enumerate().for_each(|(r, row)| f(r, row));
        Host::f32(x.shape(), y)
    }

    /// `wrong` in the columns that the size hits, `right` elsewhere.
    fn columns(&self, right: &Host, wrong: &Host, part: std::ops::Range<usize>) -> Host {
        if !self.part() {
            return wrong.clone();
        }
        Self::rows(right, |r, row| row[part.clone()].copy_from_slice(&wrong.row(r)[part.clone()]))
    }

    /// Linear layer without rounding of its result, on activations as given.
    fn exact_product(a: &Host, weight: &Weight) -> Host {
        Host::f32(&[a.rows(), weight.rows()], linear::linear(Mode::Exact, Io::F32, weight, a.as_f32()))
    }

    /// The sum of single experts in the order that `order` gives to a row's choices.
    fn expert_sum(
        &self,
        x: &Host,
        routing: &Routing<Host>,
        experts: &Vec<ExpertWeights>,
        limit: f32,
        order: impl Fn(&mut Vec<(i32, f32)>),
        after: bool,
    ) -> Host {
        let (k, d) = (routing.experts.width(), x.width());
        let mut out = vec![0.0f32; x.rows() * d];
        for (t, acc) in out.chunks_mut(d).enumerate() {
            let at = t * k..(t + 1) * k;
            let ids = routing.experts.as_i32()[at.clone()].iter().copied();
            let mut chosen: Vec<(i32, f32)> = ids.zip(routing.weights.as_f32()[at].iter().copied()).collect();
            order(&mut chosen);
            for (e, w) in chosen {
                let weight = if after { 1.0 } else { w };
                let single = Routing {
                    experts: Host::i32(&[1, 1], vec![e]),
                    weights: Host::f32(&[1, 1], vec![weight]),
                };
                let y = self.inner.routed_experts(&x.slice_rows(t, 1), &single, experts, limit);
                let scale = if after { w } else { 1.0 };
                acc.iter_mut().zip(y.as_f32()).for_each(|(a, y)| *a += scale * y);
            }
        }
        Host::f32(x.shape(), out)
    }

    fn expanded(&self, streams: &Host, y: &Host, mix: &Mix<Host>) -> Host {
        if self.is("comb-transposed") {
            let pairs: &[(usize, usize)] = match self.part() {
                true => &[(0, 1)],
                false => &[(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)],
            };
            let comb =
                Self::rows(&mix.comb, |_, c| pairs.iter().for_each(|(i, j)| c.swap(4 * i + j, 4 * j + i)));
            return self.inner.hc_expand(streams, y, &Mix { comb, ..mix.clone() });
        }
        if self.is("streams-unrounded") {
            return Self::rows(streams, |r, out| {
                let old = streams.row(r);
                ops::hyper::expand_row(Mode::Exact, old, y.row(r), mix.post.row(r), mix.comb.row(r), out);
            });
        }
        self.inner.hc_expand(streams, y, mix)
    }

    fn recycled(&self) -> std::sync::MutexGuard<'_, Option<Host>> {
        self.recycled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B> Backend for Faulty<B>
where
    B: Backend<Buf = Host, Mat = Weight, Experts = Vec<ExpertWeights>>,
{
    type Buf = Host;
    type Mat = Weight;
    type Experts = Vec<ExpertWeights>;

    ops::delegate_backend!(inner: stream_mean draft_attention markov_bias concat_cols);

    fn name(&self) -> &'static str {
        "faulty"
    }

    fn mode(&self) -> Mode {
        self.inner.mode()
    }

    fn upload(&self, host: &Host) -> Result<Host, ops::DeviceError> {
        if let Data::F32(v) = host.data()
            && v.first().is_some_and(|v| v.is_nan())
        {
            *self.recycled() = Some(host.clone());
        }
        self.inner.upload(host)
    }

    fn read(&self, buf: &Host) -> Result<Host, ops::DeviceError> {
        self.inner.read(buf)
    }

    fn shape(&self, buf: &Host) -> Vec<usize> {
        self.inner.shape(buf)
    }

    fn cache(&self, rows: usize, width: usize) -> Result<Host, ops::DeviceError> {
        self.inner.cache(rows, width)
    }

    fn load(&self, weight: &Weight) -> Result<Weight, ops::DeviceError> {
        self.inner.load(weight)
    }

    fn load_experts(&self, experts: Vec<ExpertWeights>) -> Result<Vec<ExpertWeights>, ops::DeviceError> {
        self.inner.load_experts(experts)
    }

    fn concat_rows(&self, a: &Host, b: &Host) -> Host {
        self.inner.concat_rows(a, b)
    }

    fn slice_rows(&self, x: &Host, start: usize, count: usize) -> Host {
        self.inner.slice_rows(x, start, count)
    }

    fn reshape(&self, x: &Host, shape: &[usize]) -> Host {
        self.inner.reshape(x, shape)
    }

    fn embed(&self, table: &Weight, ids: &[u32]) -> Host {
        self.expands.store(0, Relaxed);
        let mut ids = ids.to_vec();
        if self.is("embedding-of-next-id") {
            let first = if self.part() { ids.len() - 1 } else { 0 };
            ids[first..].iter_mut().for_each(|id| *id = (*id + 1) % table.rows() as u32);
        }
        self.inner.embed(table, &ids)
    }

    fn replicate(&self, x: &Host, streams: usize) -> Host {
        let y = self.inner.replicate(x, streams);
        if self.is("stream-left-zero") {
            return Self::rows(&y, |_, row| row[(streams - 1) * x.width()..].fill(0.0));
        }
        y
    }

    fn rmsnorm(&self, x: &Host, weight: &Host, eps: f32) -> Host {
        if self.is("norm-epsilon") {
            return self.inner.rmsnorm(x, weight, 1e-6);
        }
        let y = self.inner.rmsnorm(x, weight, eps);
        if self.is("norm-weight-plus-one") {
            let one = Self::rows(&weight.reshaped(&[1, weight.as_f32().len()]), |_, w| {
                w.iter_mut().for_each(|w| *w += 1.0);
            });
            let wrong = self.inner.rmsnorm(x, &one.reshaped(weight.shape()), eps);
            return self.columns(&y, &wrong, 0..32.min(x.width()));
        }
        if self.is("tail-unwritten")
            && let Some(old) = self.recycled().take()
            && old.shape() == y.shape()
        {
            let last = y.as_f32().len() - 1;
            let mut values = y.as_f32().to_vec();
            values[last] = old.as_f32()[last];
            return Host::f32(y.shape(), values);
        }
        y
    }

    fn linear(&self, x: &Host, weight: &Weight, io: Io) -> Host {
        if io != Io::Fp8 {
            return self.inner.linear(x, weight, io);
        }
        let (source, k) = (self.mode() == Mode::Source, x.width());
        if self.is("fp8-activation-scale-x2") {
            let hit = if self.part() { 32.min(k) } else { k };
            let doubled = Self::rows(x, |_, row| row[..hit].iter_mut().for_each(|v| *v *= 2.0));
            return self.inner.linear(&doubled, weight, io);
        }
        if self.is("last-block-dropped") {
            let cut = Self::rows(x, |_, row| row[k - 32.min(k)..].fill(0.0));
            return self.inner.linear(&cut, weight, io);
        }
        if self.is("activations-unquantised") && source {
            return Self::rows(&Self::exact_product(x, weight), |_, row| bf16::round_slice(row));
        }
        if self.is("output-truncated") && source {
            let a = Host::f32(x.shape(), linear::activations(Mode::Source, io, x.as_f32(), k));
            return Self::rows(&Self::exact_product(&a, weight), |_, row| {
                row.iter_mut().for_each(|v| *v = f32::from_bits(v.to_bits() & 0xffff_0000));
            });
        }
        let y = self.inner.linear(x, weight, io);
        if self.is("batch-dependent") && x.rows() > 1 {
            let ulp = if source { 1 << 16 } else { 1 };
            return Self::rows(&y, |_, row| row[0] = f32::from_bits(row[0].to_bits() ^ ulp));
        }
        y
    }

    fn grouped_linear(&self, x: &Host, weight: &Weight, groups: usize) -> Host {
        if self.is("gain") {
            let y = self.inner.grouped_linear(x, weight, groups);
            return Self::rows(&y, |_, row| {
                row.iter_mut().for_each(|v| *v = self.mode().bf16(*v * (1.0 + self.gain)));
            });
        }
        if !self.is("group-inputs-swapped") {
            return self.inner.grouped_linear(x, weight, groups);
        }
        let k = x.width() / groups;
        let swapped = Self::rows(x, |_, row| {
            let (a, b) = row.split_at_mut(k);
            a.swap_with_slice(&mut b[..k]);
        });
        self.inner.grouped_linear(&swapped, weight, groups)
    }

    fn argmax(&self, logits: &Host) -> Host {
        if self.fault != "argmax-last-on-ties" {
            return self.inner.argmax(logits);
        }
        let last =
            |row: &[f32]| (0..row.len()).fold(0, |best, i| if row[i] >= row[best] { i } else { best }) as i32;
        Host::i32(&[logits.rows()], (0..logits.rows()).map(|r| last(logits.row(r))).collect())
    }

    fn rope(&self, x: &Host, head_dim: usize, table: &RopeTable, positions: &[u32], inverse: bool) -> Host {
        let y = self.inner.rope(x, head_dim, table, positions, inverse);
        let head = 0..head_dim.min(x.width());
        if self.is("rope-position-plus-one") {
            let next: Vec<u32> = positions.iter().map(|p| p + 1).collect();
            return self.columns(&y, &self.inner.rope(x, head_dim, table, &next, inverse), head);
        }
        if self.is("inverse-rope-sign") && inverse {
            return self.columns(&y, &self.inner.rope(x, head_dim, table, positions, false), head);
        }
        if self.is("rope-halves") {
            // Neighbours stand where halves stood, are turned, and go back.
            let (d, half) = (table.dim(), table.dim() / 2);
            let place = |row: &mut [f32], back: bool| {
                for h in row.chunks_mut(head_dim) {
                    let tail = &mut h[head_dim - d..];
                    let old = tail.to_vec();
                    for i in 0..half {
                        let (near, far) = ([2 * i, 2 * i + 1], [i, half + i]);
                        for (a, b) in near.into_iter().zip(far) {
                            if back { tail[b] = old[a] } else { tail[a] = old[b] }
                        }
                    }
                }
            };
            let moved = Self::rows(x, |_, row| place(row, false));
            let turned = self.inner.rope(&moved, head_dim, table, positions, inverse);
            return self.columns(&y, &Self::rows(&turned, |_, row| place(row, true)), head);
        }
        y
    }

    fn store_window(&self, kv: &Host) -> Host {
        let mut codes = self.inner.store_window(kv);
        if self.is("window-code-low-bit") {
            let (width, d) = (codes.width(), kv.width());
            let hit = if self.part() { 1 } else { d };
            for row in codes.as_u8_mut().chunks_mut(width) {
                // 0x7f would be NaN.
                row[..hit].iter_mut().filter(|c| **c & 0x7f != 0x7e).for_each(|c| *c |= 1);
            }
        }
        codes
    }

    fn ring_write(&self, ring: &mut Host, codes: &Host, positions: &[u32]) {
        if self.is("ring-slot-plus-one") {
            let late: Vec<u32> = positions.iter().map(|p| p + 1).collect();
            return self.inner.ring_write(ring, codes, &late);
        }
        self.inner.ring_write(ring, codes, positions);
    }

    fn publish_kv(&self, cache: &mut Host, latent: &Host, first: usize) {
        self.inner.publish_kv(cache, latent, first);
        if !self.is("kv-scale-power-of-two") {
            return;
        }
        let (d, width) = (latent.width(), cache.width());
        for r in 0..latent.rows() {
            let row = &mut cache.as_u8_mut()[(first + r) * width..][..width];
            let blocks = if self.part() { 1 } else { d / 16 };
            for (b, x) in latent.row(r).chunks(16).enumerate().take(blocks) {
                let mut codes = [0u8; 16];
                let scale = e4m3::decode(quantise::fp4_e4m3_block(x, &mut codes));
                let power = quantise::pow2(scale.log2().ceil() as i32);
                let code = |v: f32| numerics::e2m1::encode((v / power).clamp(-6.0, 6.0));
                for (i, pair) in x.chunks(2).enumerate() {
                    row[b * 8 + i] = code(pair[0]) | code(pair[1]) << 4;
                }
                row[d / 2 + b] = e4m3::encode(power);
            }
        }
    }

    fn publish_key(&self, cache: &mut Host, key: &Host, first: usize) {
        let written = match self.is("stale-index-keys") {
            false => key.rows(),
            true if self.part() => key.rows() - 1,
            true => 0,
        };
        if written > 0 {
            self.inner.publish_key(cache, &key.slice_rows(0, written), first);
        }
    }

    fn quantise_index_query(&self, q: &Host) -> Host {
        if self.is("index-query-unquantised") { q.clone() } else { self.inner.quantise_index_query(q) }
    }

    fn pool_pairs(&self, kv: &Host, score: &Host) -> Host {
        let right = self.inner.pool_pairs(kv, score);
        let d = kv.shape()[2];
        if self.is("pool-by-mean") {
            return self.inner.pool_pairs(kv, &Self::rows(score, |_, row| row.fill(0.0)));
        }
        if self.is("pool-gate-swapped") {
            let swapped = Self::rows(score, |_, row| row.rotate_left(d));
            return self.columns(&right, &self.inner.pool_pairs(kv, &swapped), 0..32.min(d));
        }
        right
    }

    fn index_scores(&self, q: &Host, w: &Host, keys: &Host, n: usize, visible: &[u32]) -> Host {
        if self.is("index-of-previous-query") && q.rows() > 1 {
            let before = q.slice_rows(0, 1).concat_rows(&q.slice_rows(0, q.rows() - 1));
            return self.inner.index_scores(&before, w, keys, n, visible);
        }
        let right = self.inner.index_scores(q, w, keys, n, visible);
        if !self.is("index-without-relu") {
            return right;
        }
        let mode = self.mode();
        let (heads, d) = (w.width(), q.width() / w.width());
        let factor = ((heads * d) as f64).powf(-0.5) as f32;
        let mut key = vec![0.0; d];
        let mut out = right.as_f32().to_vec();
        for j in 0..n {
            quantise::load_fp4(keys.code_row(j), &mut key);
            for r in (0..q.rows()).filter(|r| j < visible[*r] as usize) {
                let mut sum = 0.0f32;
                for (q, w) in q.row(r).chunks(d).zip(w.row(r)) {
                    let dot: f64 = q.iter().zip(&key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    sum += mode.bf16(mode.bf16(dot as f32) * mode.bf16(mode.bf16(*w) * factor));
                }
                out[r * n + j] = mode.bf16(sum);
            }
        }
        Host::f32(right.shape(), out)
    }

    fn candidates(&self, scores: &Host, visible: &[u32], block: usize, keep: usize) -> Host {
        let right = self.inner.candidates(scores, visible, block, keep);
        if !self.is("newest-block-not-forced") {
            return right;
        }
        let blocks = right.width();
        let mut mask = vec![0u8; right.rows() * blocks];
        for (r, out) in mask.chunks_mut(blocks).enumerate() {
            let best: Vec<f32> = scores
                .row(r)
                .chunks(block)
                .map(|b| b.iter().copied().fold(f32::NEG_INFINITY, f32::max))
                .collect();
            ops::indexer::highest(&best, keep).into_iter().for_each(|b| out[b] = 1);
        }
        Host::u8(right.shape(), mask)
    }

    fn mask_scores(&self, scores: &Host, mask: &Host, block: usize) -> Host {
        if self.is("candidates-ignored") {
            return scores.clone();
        }
        self.inner.mask_scores(scores, mask, block)
    }

    fn topk(&self, scores: &Host, k: usize) -> Host {
        if self.is("topk-high-index-on-ties") {
            // Reversed, ties fall the other way.
            let n = scores.width();
            let back = self.inner.topk(&Self::rows(scores, |_, row| row.reverse()), k);
            let w = back.width();
            let mut ids = back.as_i32().to_vec();
            for row in ids.chunks_mut(w.max(1)) {
                row.iter_mut().filter(|j| **j >= 0).for_each(|j| *j = n as i32 - 1 - *j);
                row.sort_unstable_by_key(|j| if *j < 0 { i32::MAX } else { *j });
            }
            return Host::i32(back.shape(), ids);
        }
        let right = self.inner.topk(scores, k);
        if self.is("topk-one-less") {
            let w = right.width();
            let mut ids = right.as_i32().to_vec();
            ids.chunks_mut(w.max(1))
                .filter(|row| row.iter().all(|j| *j >= 0))
                .for_each(|row| row[w - 1] = -1);
            return Host::i32(right.shape(), ids);
        }
        right
    }

    fn sparse_attention(
        &self,
        q: &Host,
        window: &Window<'_, Host>,
        compressed: Option<&Compressed<'_, Host>>,
        sinks: &Host,
        positions: &[u32],
    ) -> Host {
        let right = self.inner.sparse_attention(q, window, compressed, sinks, positions);
        let heads = sinks.as_f32().len();
        let dim = q.width() / heads;
        let wrong = if self.is("missing-sink") {
            let none = Host::f32(sinks.shape(), vec![f32::NEG_INFINITY; heads]);
            self.inner.sparse_attention(q, window, compressed, &none, positions)
        } else if self.is("window-one-short") {
            let short = Window { size: window.size.saturating_sub(1), ..*window };
            self.inner.sparse_attention(q, &short, compressed, sinks, positions)
        } else if self.is("softmax-scale-1-percent") {
            let scaled = Self::rows(q, |_, row| row.iter_mut().for_each(|v| *v *= 1.01));
            self.inner.sparse_attention(&scaled, window, compressed, sinks, positions)
        } else if self.is("probabilities-unrounded") {
            let exact =
                attention::sparse_attention(Mode::Exact, q, window, compressed, sinks.as_f32(), positions);
            Self::rows(&exact, |_, row| row.iter_mut().for_each(|v| *v = self.mode().bf16(*v)))
        } else {
            return right;
        };
        self.columns(&right, &wrong, 0..dim)
    }

    fn router(
        &self,
        logits: &Host,
        bias: &Host,
        image: Option<(&Host, &[bool])>,
        k: usize,
        scale: f32,
    ) -> Routing<Host> {
        if self.is("router-bias-ignored") {
            let none = Host::f32(bias.shape(), vec![0.0; bias.as_f32().len()]);
            return self.inner.router(logits, &none, image, k, scale);
        }
        let right = self.inner.router(logits, bias, image, k, scale);
        let biased = self.is("router-weights-with-bias");
        if !biased && !self.is("router-not-normalised") {
            return right;
        }
        let mut weights = Vec::with_capacity(right.weights.as_f32().len());
        for (r, ids) in right.experts.as_i32().chunks(k).enumerate() {
            let score = |e: &i32| {
                let e = *e as usize;
                let s = moe::softplus(logits.row(r)[e]).sqrt();
                if biased { s + bias.as_f32()[e] } else { s }
            };
            let sum: f32 = if biased { ids.iter().map(score).sum() } else { 1.0 };
            weights.extend(ids.iter().map(|e| score(e) / sum * scale));
        }
        Routing { weights: Host::f32(right.weights.shape(), weights), ..right }
    }

    fn routed_experts(
        &self,
        x: &Host,
        routing: &Routing<Host>,
        experts: &Vec<ExpertWeights>,
        limit: f32,
    ) -> Host {
        if self.is("expert-order") {
            let descending = |c: &mut Vec<(i32, f32)>| c.sort_by_key(|c| -c.0);
            return self.expert_sum(x, routing, experts, limit, descending, false);
        }
        if self.is("routing-weight-after-w2") {
            let ascending = |c: &mut Vec<(i32, f32)>| c.sort_by_key(|c| c.0);
            return self.expert_sum(x, routing, experts, limit, ascending, true);
        }
        if self.is("lightest-expert-dropped") {
            let heaviest = |c: &mut Vec<(i32, f32)>| {
                c.sort_by(|a, b| b.1.total_cmp(&a.1));
                c.pop();
                c.sort_by_key(|c| c.0);
            };
            return self.expert_sum(x, routing, experts, limit, heaviest, false);
        }
        if self.is("expert-gate-and-up-swapped") {
            let swapped = experts
                .iter()
                .map(|e| ExpertWeights { gate: e.up.clone(), up: e.gate.clone(), down: e.down.clone() })
                .collect();
            return self.inner.routed_experts(x, routing, &swapped, limit);
        }
        let limit = if self.is("swiglu-limit-missing") { f32::INFINITY } else { limit };
        self.inner.routed_experts(x, routing, experts, limit)
    }

    fn shared_expert(&self, x: &Host, weights: [&Weight; 3], limit: f32) -> Host {
        let y = self.inner.shared_expert(x, weights, limit);
        if self.is("shared-expert-dropped") {
            let hit = if self.part() { 1 } else { x.width() };
            return Self::rows(&y, |_, row| row[..hit].fill(0.0));
        }
        y
    }

    fn moe_sum(&self, routed: &Host, shared: &Host) -> Host {
        if self.is("routed-sum-rounded-first") {
            let rounded = Self::rows(routed, |_, row| bf16::round_slice(row));
            return self.inner.moe_sum(&rounded, shared);
        }
        self.inner.moe_sum(routed, shared)
    }

    fn hc_mix(
        &self,
        streams: &Host,
        fun: &Weight,
        scale: &Host,
        base: &Host,
        constants: MixConstants,
    ) -> Mix<Host> {
        let iterations = if self.is("sinkhorn-one-short") {
            constants.iterations - 1
        } else if self.is("sinkhorn-once") {
            1
        } else {
            constants.iterations
        };
        self.inner.hc_mix(streams, fun, scale, base, MixConstants { iterations, ..constants })
    }

    fn hc_collapse(&self, streams: &Host, pre: &Host) -> Host {
        if self.is("collapse-by-mean") {
            let even = Host::f32(pre.shape(), vec![0.25; pre.as_f32().len()]);
            return self.inner.hc_collapse(streams, &even);
        }
        self.inner.hc_collapse(streams, pre)
    }

    fn hc_expand(&self, streams: &Host, y: &Host, mix: &Mix<Host>) -> Host {
        let new = self.expanded(streams, y, mix);
        self.expands.fetch_add(1, Relaxed);
        new
    }

    fn engram_rows(&self, table: &Weight, rows: &[u64], columns: usize) -> Host {
        let mut rows = rows.to_vec();
        if self.is("engram-wrong-head") {
            for token in rows.chunks_mut(columns) {
                if self.part() { token.swap(0, 1) } else { token.reverse() }
            }
        }
        self.inner.engram_rows(table, &rows, columns)
    }

    fn engram_gate(
        &self,
        streams: &Host,
        kv: &Host,
        q_weight: &Host,
        k_weight: &Host,
        alive: &[bool],
    ) -> (Host, Host) {
        let (right, gate) = self.inner.engram_gate(streams, kv, q_weight, k_weight, alive);
        if !self.is("engram-gate-without-root") {
            return (right, gate);
        }
        let d = streams.shape()[2];
        // The gate is sigmoid(sign(x) sqrt|x|): its logit squared, with the sign, is the dot product.
        let wrong = Self::rows(&gate, |_, row| {
            for g in row.iter_mut().filter(|g| **g > 0.0) {
                let root = (*g / (1.0 - *g)).ln();
                *g = 1.0 / (1.0 + (-(root * root.abs())).exp());
            }
        });
        let streams = Self::rows(streams, |r, row| {
            let value = &kv.row(r)[4 * d..];
            for (x, g) in row.chunks_mut(d).zip(wrong.row(r)) {
                x.iter_mut().zip(value).for_each(|(x, v)| *x = self.mode().bf16(*x + g * v));
            }
        });
        (streams, wrong)
    }
}
