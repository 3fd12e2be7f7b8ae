//! Two backends in one run: every operator is computed by the reference, by the device on the reference's inputs (its
//! own error), and by the device on the device's inputs (the accumulated error).

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use ops::{
    Backend, Compressed, Data, DeviceError, ExpertWeights, Host, Io, Mix, Mode, RopeTable, Routing, Weight,
    Window, hyper::MixConstants,
};
use serde::Serialize;

use crate::{gates::model::HostBackend, judge::metrics, noise::nudged};

/// A tensor of both sides. [`Pair::force`] replaces it for everybody who holds it.
pub struct Pair<T>(Arc<RwLock<(Host, T)>>);

impl<T> Clone for Pair<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Clone> Pair<T> {
    fn new(reference: Host, device: T) -> Self {
        Self(Arc::new(RwLock::new((reference, device))))
    }

    /// The reference's side.
    pub fn reference(&self) -> Host {
        self.0.read().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// The device's side.
    pub fn device(&self) -> T {
        self.0.read().unwrap_or_else(PoisonError::into_inner).1.clone()
    }

    /// Replaces both sides.
    pub fn force(&self, reference: Host, device: T) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = (reference, device);
    }
}

/// What one call of an operator gave.
#[derive(Clone, Debug, Serialize)]
pub struct CallError {
    /// Layer; the number of layers for the head.
    pub layer: usize,
    /// Number of the call in its step.
    pub call: usize,
    /// Operator.
    pub operator: &'static str,
    /// Error on the reference's inputs: NRMS of the worst output, infinite where a choice or code differs.
    pub own: f64,
    /// Whether the device's bits on the reference's inputs are the reference's.
    pub equal: bool,
    /// Error on the device's own inputs: NRMS of the worst output of values.
    pub accumulated: f64,
    /// Relative change of the result over that of the input, when every input element moves by one unit in the last
    /// place; `None` where the input has no values.
    pub amplification: Option<f64>,
    /// Rows whose choice differs, on the reference's inputs.
    pub own_flips: usize,
    /// Rows whose choice differs, on the device's inputs.
    pub flips: usize,
}

#[derive(Default)]
struct Log {
    calls: Vec<CallError>,
    error: Option<DeviceError>,
}

/// Reference and device as one backend.
pub struct Twin<R, D> {
    reference: R,
    device: D,
    amplify: bool,
    expands: AtomicUsize,
    log: Mutex<Log>,
}

impl<R: HostBackend, D: Backend> Twin<R, D> {
    /// Runs `device` beside `reference`; `amplify` also runs it on inputs moved by one unit in the last place.
    pub fn new(reference: R, device: D, amplify: bool) -> Self {
        Self { reference, device, amplify, expands: AtomicUsize::new(0), log: Mutex::default() }
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// What was logged, in the order of the calls; the log is empty afterwards.
    ///
    /// # Errors
    /// A device failure on the way.
    pub fn take(&self) -> Result<Vec<CallError>, DeviceError> {
        let log = std::mem::take(&mut *self.lock());
        log.error.map_or(Ok(log.calls), Err)
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, e: DeviceError) {
        self.lock().error.get_or_insert(e);
    }

    /// The reference's tensor on the device; where that fails, the device's own, and the run ends with the failure.
    fn cross(&self, x: &Pair<D::Buf>) -> D::Buf {
        self.send(&x.reference(), x)
    }

    fn send(&self, host: &Host, x: &Pair<D::Buf>) -> D::Buf {
        self.device.upload(host).unwrap_or_else(|e| {
            self.failed(e);
            x.device()
        })
    }

    /// As [`Twin::cross`], every value moved by one unit in the last place, up or down.
    fn cross_nudged(&self, x: &Pair<D::Buf>) -> D::Buf {
        let host = x.reference();
        let Data::F32(values) = host.data() else { return self.cross(x) };
        let mode = if self.reference.mode() == Mode::Source { Mode::Source } else { Mode::Exact };
        self.send(&Host::f32(host.shape(), shaken(values, mode)), x)
    }

    fn read(&self, x: &D::Buf, like: &Host) -> Host {
        self.device.read(x).unwrap_or_else(|e| {
            self.failed(e);
            like.clone()
        })
    }

    /// Compares and logs one call; the outputs as pairs.
    fn finish<const N: usize>(
        &self,
        operator: &'static str,
        first: Option<Host>,
        want: [Host; N],
        forced: [D::Buf; N],
        own: [D::Buf; N],
        moved: Option<[D::Buf; N]>,
    ) -> [Pair<D::Buf>; N] {
        let (mut worst, mut accumulated, mut equal) = (0.0f64, 0.0f64, true);
        let (mut own_flips, mut flips, mut amplification) = (0, 0, None);
        for i in 0..N {
            let (got, drifted) = (self.read(&forced[i], &want[i]), self.read(&own[i], &want[i]));
            equal &= same_bits(&got, &want[i]);
            let (error, flipped) = distance(&got, &want[i]);
            worst = worst.max(error);
            own_flips += flipped;
            let (error, flipped) = distance(&drifted, &want[i]);
            accumulated = accumulated.max(if error.is_finite() { error } else { 0.0 });
            flips += flipped;
            if let (Some(moved), Some(Data::F32(x))) = (&moved, first.as_ref().map(Host::data))
                && let (Data::F32(y), Data::F32(base)) = (self.read(&moved[i], &want[i]).data(), got.data())
            {
                let mode = if self.reference.mode() == Mode::Source { Mode::Source } else { Mode::Exact };
                let step = metrics::values(&shaken(x, mode), x).nrms;
                let change = metrics::values(y, base).nrms;
                if step > 0.0 && step.is_finite() && change.is_finite() {
                    let ratio = change / step;
                    amplification = Some(amplification.map_or(ratio, |a: f64| a.max(ratio)));
                }
            }
        }
        let layer = self.expands.load(Relaxed) / 2;
        let mut log = self.lock();
        let call = log.calls.len();
        log.calls.push(CallError {
            layer,
            call,
            operator,
            own: worst,
            equal,
            accumulated,
            amplification,
            own_flips,
            flips,
        });
        drop(log);
        let mut own = own.into_iter();
        want.map(|w| Pair::new(w, own.next().expect("as many outputs on both sides")))
    }
}

/// Values moved by one unit in the last place, about half of them towards zero.
fn shaken(values: &[f32], mode: Mode) -> Vec<f32> {
    let unit = |v: f32| nudged(v.abs(), mode) - v.abs();
    let sign = |i: usize| if (i.wrapping_mul(0x9E37_79B9) >> 16) & 1 == 0 { 1.0 } else { -1.0 };
    let moved = |(i, v): (usize, &f32)| {
        if *v == 0.0 || !v.is_finite() { *v } else { v + sign(i) * unit(*v) }
    };
    values.iter().enumerate().map(moved).collect()
}

fn same_bits(a: &Host, b: &Host) -> bool {
    match (a.data(), b.data()) {
        (Data::F32(x), Data::F32(y)) => x.iter().zip(y).all(|(x, y)| x.to_bits() == y.to_bits()),
        (x, y) => x == y,
    }
}

/// NRMS of values, infinite for codes and choices that differ; and rows of choices that differ.
fn distance(a: &Host, b: &Host) -> (f64, usize) {
    match (a.data(), b.data()) {
        (Data::F32(x), Data::F32(y)) => {
            // Masked scores are no values: what is masked on one side alone is a flip.
            let masked = x.iter().zip(y).any(|(x, y)| x.is_infinite() != y.is_infinite());
            if masked {
                let finite = |v: &f32, w: &f32| v.is_finite() && w.is_finite();
                let (x, y): (Vec<f32>, Vec<f32>) =
                    x.iter().zip(y).filter(|(x, y)| finite(x, y)).map(|(x, y)| (*x, *y)).unzip();
                return (metrics::values(&x, &y).nrms, 1);
            }
            (metrics::values(x, y).nrms, 0)
        }
        (x, y) if x == y => (0.0, 0),
        (Data::I32(x), Data::I32(y)) if x.len() == y.len() => {
            let w = b.width().max(1);
            let differ = x.chunks(w).zip(y.chunks(w)).filter(|(x, y)| sorted(x) != sorted(y)).count();
            (f64::INFINITY, differ)
        }
        _ => (f64::INFINITY, 0),
    }
}

fn sorted(row: &[i32]) -> Vec<i32> {
    let mut row = row.to_vec();
    row.sort_unstable();
    row
}

/// Runs a call on both sides. The first buffer is the one that is moved for the amplification.
macro_rules! both {
    ($self:ident, $name:expr, [$first:ident $(, $x:ident)*], [$($m:ident),*], |$b:ident| $call:expr) => {{
        let want = {
            let $b = &$self.reference;
            let $first = &$first.reference();
            $(let $x = &$x.reference();)*
            $(let $m = &$m.0;)*
            $call
        };
        let forced = {
            let $b = &$self.device;
            let $first = &$self.cross($first);
            $(let $x = &$self.cross($x);)*
            $(let $m = &$m.1;)*
            $call
        };
        let own = {
            let $b = &$self.device;
            let $first = &$first.device();
            $(let $x = &$x.device();)*
            $(let $m = &$m.1;)*
            $call
        };
        let moved = $self.amplify.then(|| {
            let $b = &$self.device;
            let $first = &$self.cross_nudged($first);
            $(let $x = &$self.cross($x);)*
            $(let $m = &$m.1;)*
            $call
        });
        $self.finish($name, Some($first.reference()), want, forced, own, moved)
    }};
}

/// Runs a write into a cache on both sides.
macro_rules! write {
    ($self:ident, $name:expr, $cache:ident, $x:ident, |$b:ident, $c:ident| $call:expr) => {{
        let want = {
            let ($b, mut target) = (&$self.reference, $cache.reference());
            let ($c, $x) = (&mut target, &$x.reference());
            $call;
            [target]
        };
        let forced = {
            let ($b, mut target) = (&$self.device, $self.cross($cache));
            let ($c, $x) = (&mut target, &$self.cross($x));
            $call;
            [target]
        };
        let own = {
            let ($b, mut target) = (&$self.device, $cache.device());
            let ($c, $x) = (&mut target, &$x.device());
            $call;
            [target]
        };
        let [new] = $self.finish($name, None, want, forced, own, None);
        // A cache that somebody else holds keeps its rows.
        *$cache = new;
    }};
}

impl<R: HostBackend, D: Backend> Backend for Twin<R, D> {
    type Buf = Pair<D::Buf>;
    type Mat = (Weight, D::Mat);
    type Experts = (Vec<ExpertWeights>, D::Experts);

    fn name(&self) -> &'static str {
        self.device.name()
    }

    fn mode(&self) -> Mode {
        self.device.mode()
    }

    fn upload(&self, host: &Host) -> Result<Self::Buf, DeviceError> {
        Ok(Pair::new(host.clone(), self.device.upload(host)?))
    }

    /// The device's side.
    fn read(&self, buf: &Self::Buf) -> Result<Host, DeviceError> {
        self.device.read(&buf.device())
    }

    fn shape(&self, buf: &Self::Buf) -> Vec<usize> {
        buf.reference().shape().to_vec()
    }

    fn cache(&self, rows: usize, width: usize) -> Result<Self::Buf, DeviceError> {
        Ok(Pair::new(self.reference.cache(rows, width)?, self.device.cache(rows, width)?))
    }

    fn load(&self, weight: &Weight) -> Result<Self::Mat, DeviceError> {
        Ok((self.reference.load(weight)?, self.device.load(weight)?))
    }

    fn load_experts(&self, experts: Vec<ExpertWeights>) -> Result<Self::Experts, DeviceError> {
        Ok((self.reference.load_experts(experts.clone())?, self.device.load_experts(experts)?))
    }

    fn concat_rows(&self, a: &Self::Buf, b: &Self::Buf) -> Self::Buf {
        let reference = self.reference.concat_rows(&a.reference(), &b.reference());
        Pair::new(reference, self.device.concat_rows(&a.device(), &b.device()))
    }

    fn slice_rows(&self, x: &Self::Buf, start: usize, count: usize) -> Self::Buf {
        let reference = self.reference.slice_rows(&x.reference(), start, count);
        Pair::new(reference, self.device.slice_rows(&x.device(), start, count))
    }

    fn reshape(&self, x: &Self::Buf, shape: &[usize]) -> Self::Buf {
        Pair::new(self.reference.reshape(&x.reference(), shape), self.device.reshape(&x.device(), shape))
    }

    fn embed(&self, table: &Self::Mat, ids: &[u32]) -> Self::Buf {
        self.expands.store(0, Relaxed);
        let (want, got) = (self.reference.embed(&table.0, ids), self.device.embed(&table.1, ids));
        let [x] = self.finish("embed", None, [want], [got.clone()], [got], None);
        x
    }

    fn replicate(&self, x: &Self::Buf, streams: usize) -> Self::Buf {
        let [y] = both!(self, "replicate", [x], [], |b| [b.replicate(x, streams)]);
        y
    }

    fn rmsnorm(&self, x: &Self::Buf, weight: &Self::Buf, eps: f32) -> Self::Buf {
        let [y] = both!(self, "rmsnorm", [x, weight], [], |b| [b.rmsnorm(x, weight, eps)]);
        y
    }

    fn linear(&self, x: &Self::Buf, weight: &Self::Mat, io: Io) -> Self::Buf {
        let name = match io {
            Io::Fp8 => "linear_fp8",
            Io::Bf16 => "linear_bf16",
            Io::F32 => "linear_f32",
        };
        let [y] = both!(self, name, [x], [weight], |b| [b.linear(x, weight, io)]);
        y
    }

    fn grouped_linear(&self, x: &Self::Buf, weight: &Self::Mat, groups: usize) -> Self::Buf {
        let [y] = both!(self, "grouped_linear", [x], [weight], |b| [b.grouped_linear(x, weight, groups)]);
        y
    }

    fn argmax(&self, logits: &Self::Buf) -> Self::Buf {
        let [y] = both!(self, "argmax", [logits], [], |b| [b.argmax(logits)]);
        y
    }

    fn rope(
        &self,
        x: &Self::Buf,
        head_dim: usize,
        table: &RopeTable,
        positions: &[u32],
        inverse: bool,
    ) -> Self::Buf {
        let [y] = both!(self, "rope", [x], [], |b| [b.rope(x, head_dim, table, positions, inverse)]);
        y
    }

    fn store_window(&self, kv: &Self::Buf) -> Self::Buf {
        let [y] = both!(self, "store_window", [kv], [], |b| [b.store_window(kv)]);
        y
    }

    fn ring_write(&self, ring: &mut Self::Buf, codes: &Self::Buf, positions: &[u32]) {
        write!(self, "ring_write", ring, codes, |b, c| b.ring_write(c, codes, positions));
    }

    fn publish_kv(&self, cache: &mut Self::Buf, latent: &Self::Buf, first: usize) {
        write!(self, "publish_kv", cache, latent, |b, c| b.publish_kv(c, latent, first));
    }

    fn publish_key(&self, cache: &mut Self::Buf, key: &Self::Buf, first: usize) {
        write!(self, "publish_key", cache, key, |b, c| b.publish_key(c, key, first));
    }

    fn quantise_index_query(&self, q: &Self::Buf) -> Self::Buf {
        let [y] = both!(self, "quantise_index_query", [q], [], |b| [b.quantise_index_query(q)]);
        y
    }

    fn pool_pairs(&self, kv: &Self::Buf, score: &Self::Buf) -> Self::Buf {
        let [y] = both!(self, "pool_pairs", [kv, score], [], |b| [b.pool_pairs(kv, score)]);
        y
    }

    fn index_scores(
        &self,
        q: &Self::Buf,
        w: &Self::Buf,
        keys: &Self::Buf,
        n: usize,
        visible: &[u32],
    ) -> Self::Buf {
        let [y] = both!(self, "index_scores", [q, w, keys], [], |b| [b.index_scores(q, w, keys, n, visible)]);
        y
    }

    fn candidates(&self, scores: &Self::Buf, visible: &[u32], block: usize, keep: usize) -> Self::Buf {
        let [y] = both!(self, "candidates", [scores], [], |b| [b.candidates(scores, visible, block, keep)]);
        y
    }

    fn mask_scores(&self, scores: &Self::Buf, mask: &Self::Buf, block: usize) -> Self::Buf {
        let [y] = both!(self, "mask_scores", [scores, mask], [], |b| [b.mask_scores(scores, mask, block)]);
        y
    }

    fn topk(&self, scores: &Self::Buf, k: usize) -> Self::Buf {
        let [y] = both!(self, "topk", [scores], [], |b| [b.topk(scores, k)]);
        y
    }

    fn sparse_attention(
        &self,
        q: &Self::Buf,
        window: &Window<'_, Self::Buf>,
        compressed: Option<&Compressed<'_, Self::Buf>>,
        sinks: &Self::Buf,
        positions: &[u32],
    ) -> Self::Buf {
        let (ring, fresh, base, size) = (window.ring, window.fresh, window.base, window.size);
        let [y] = match compressed {
            None => both!(self, "sparse_attention", [q, ring, fresh, sinks], [], |b| [b.sparse_attention(
                q,
                &Window { ring, fresh, base, size },
                None,
                sinks,
                positions
            )]),
            Some(c) => {
                let (cache, topk) = (c.cache, c.topk);
                both!(self, "sparse_attention", [q, ring, fresh, sinks, cache, topk], [], |b| [b
                    .sparse_attention(
                        q,
                        &Window { ring, fresh, base, size },
                        Some(&Compressed { cache, topk }),
                        sinks,
                        positions
                    )])
            }
        };
        y
    }

    fn router(
        &self,
        logits: &Self::Buf,
        bias: &Self::Buf,
        image: Option<(&Self::Buf, &[bool])>,
        k: usize,
        scale: f32,
    ) -> Routing<Self::Buf> {
        let [experts, weights] = match image {
            None => both!(self, "router", [logits, bias], [], |b| {
                let r = b.router(logits, bias, None, k, scale);
                [r.experts, r.weights]
            }),
            Some((vl, flags)) => both!(self, "router", [logits, bias, vl], [], |b| {
                let r = b.router(logits, bias, Some((vl, flags)), k, scale);
                [r.experts, r.weights]
            }),
        };
        Routing { experts, weights }
    }

    fn routed_experts(
        &self,
        x: &Self::Buf,
        routing: &Routing<Self::Buf>,
        experts: &Self::Experts,
        limit: f32,
    ) -> Self::Buf {
        let (ids, weights) = (&routing.experts, &routing.weights);
        let [y] = both!(self, "routed_experts", [x, ids, weights], [experts], |b| {
            let routing = Routing { experts: ids.clone(), weights: weights.clone() };
            [b.routed_experts(x, &routing, experts, limit)]
        });
        y
    }

    fn shared_expert(&self, x: &Self::Buf, weights: [&Self::Mat; 3], limit: f32) -> Self::Buf {
        let [w1, w3, w2] = weights;
        let [y] =
            both!(self, "shared_expert", [x], [w1, w3, w2], |b| [b.shared_expert(x, [w1, w3, w2], limit)]);
        y
    }

    fn moe_sum(&self, routed: &Self::Buf, shared: &Self::Buf) -> Self::Buf {
        let [y] = both!(self, "moe_sum", [routed, shared], [], |b| [b.moe_sum(routed, shared)]);
        y
    }

    fn hc_mix(
        &self,
        streams: &Self::Buf,
        fun: &Self::Mat,
        scale: &Self::Buf,
        base: &Self::Buf,
        constants: MixConstants,
    ) -> Mix<Self::Buf> {
        let [pre, post, comb] = both!(self, "hc_mix", [streams, scale, base], [fun], |b| {
            let m = b.hc_mix(streams, fun, scale, base, constants);
            [m.pre, m.post, m.comb]
        });
        Mix { pre, post, comb }
    }

    fn hc_collapse(&self, streams: &Self::Buf, pre: &Self::Buf) -> Self::Buf {
        let [y] = both!(self, "hc_collapse", [streams, pre], [], |b| [b.hc_collapse(streams, pre)]);
        y
    }

    fn hc_expand(&self, streams: &Self::Buf, y: &Self::Buf, mix: &Mix<Self::Buf>) -> Self::Buf {
        let (pre, post, comb) = (&mix.pre, &mix.post, &mix.comb);
        let [x] = both!(self, "hc_expand", [streams, y, pre, post, comb], [], |b| {
            let mix = Mix { pre: pre.clone(), post: post.clone(), comb: comb.clone() };
            [b.hc_expand(streams, y, &mix)]
        });
        self.expands.fetch_add(1, Relaxed);
        x
    }

    fn engram_rows(&self, table: &Weight, rows: &[u64], columns: usize) -> Self::Buf {
        let want = self.reference.engram_rows(table, rows, columns);
        let got = self.device.engram_rows(table, rows, columns);
        let [x] = self.finish("engram_rows", None, [want], [got.clone()], [got], None);
        x
    }

    fn engram_gate(
        &self,
        streams: &Self::Buf,
        kv: &Self::Buf,
        q_weight: &Self::Buf,
        k_weight: &Self::Buf,
        alive: &[bool],
    ) -> (Self::Buf, Self::Buf) {
        let [x, gate] = both!(self, "engram_gate", [streams, kv, q_weight, k_weight], [], |b| {
            let (x, gate) = b.engram_gate(streams, kv, q_weight, k_weight, alive);
            [x, gate]
        });
        (x, gate)
    }

    fn stream_mean(&self, streams: &Self::Buf) -> Self::Buf {
        let [y] = both!(self, "stream_mean", [streams], [], |b| [b.stream_mean(streams)]);
        y
    }

    fn draft_attention(
        &self,
        q: &Self::Buf,
        ring: &Self::Buf,
        window: usize,
        block: &Self::Buf,
        sinks: &Self::Buf,
        position: u32,
    ) -> Self::Buf {
        let [y] = both!(self, "draft_attention", [q, ring, block, sinks], [], |b| [
            b.draft_attention(q, ring, window, block, sinks, position)
        ]);
        y
    }

    fn markov_bias(&self, base: &Self::Buf, bias: &Self::Buf) -> Self::Buf {
        let [y] = both!(self, "markov_bias", [base, bias], [], |b| [b.markov_bias(base, bias)]);
        y
    }

    fn concat_cols(&self, parts: &[&Self::Buf]) -> Self::Buf {
        let want: Vec<Host> = parts.iter().map(|p| p.reference()).collect();
        let crossed: Vec<D::Buf> = parts.iter().map(|p| self.cross(p)).collect();
        let own: Vec<D::Buf> = parts.iter().map(|p| p.device()).collect();
        let want = self.reference.concat_cols(&want.iter().collect::<Vec<_>>());
        let crossed = self.device.concat_cols(&crossed.iter().collect::<Vec<_>>());
        let own = self.device.concat_cols(&own.iter().collect::<Vec<_>>());
        let [y] = self.finish("concat_cols", None, [want], [crossed], [own], None);
        y
    }
}
