//! A backend that records what the cache quantisers get and can nudge one value across a rounding boundary. With it a
//! departing row is traced to the quantisation bin that fell the other way.

use std::sync::{Mutex, MutexGuard};

use checkpoint::{Config, Weight};
use model::Model;
use numerics::quantise;
use ops::{
    Backend, Compressed, DeviceError, ExpertWeights, Host, Io, Mix, Mode, RopeTable, Routing, Window,
    hyper::MixConstants,
};

/// How far from a rounding boundary a value may lie, in units of its row's RMS, to count as one that another order of
/// sums can push across: the intermediates of two implementations differ by 4e-7 of their RMS on average.
const REACH: f32 = 1e-6;

/// The four quantisers of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    Window,
    Kv,
    Key,
    Query,
}

impl Cache {
    /// Name in traces; index queries have no tap.
    pub fn tap(self) -> &'static str {
        match self {
            Cache::Window => "window_kv",
            Cache::Kv => "compress_kv",
            Cache::Key => "index_k",
            Cache::Query => "index_query",
        }
    }

    fn block(self) -> usize {
        if self == Cache::Kv { quantise::KV_BLOCK } else { quantise::BLOCK }
    }

    fn codes(self, block: &[f32]) -> Vec<u8> {
        let n = block.len();
        let stored = |bytes: usize, store: fn(&[f32], &mut [u8])| {
            let mut out = vec![0; bytes];
            store(block, &mut out);
            out
        };
        match self {
            Cache::Window => stored(quantise::fp8_row_bytes(n), quantise::store_fp8),
            Cache::Kv => stored(quantise::kv_row_bytes(n), quantise::store_kv),
            Cache::Key | Cache::Query => stored(quantise::fp4_row_bytes(n), quantise::store_fp4),
        }
    }
}

/// One value at a rounding boundary: the `call`-th use of a quantiser in a step, row and element of its input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bin {
    pub cache: Cache,
    pub call: usize,
    pub row: usize,
    pub element: usize,
    pub up: bool,
    /// Distance of the boundary in units of the row's RMS.
    pub distance: f32,
}

impl Bin {
    /// Whether both are the same value.
    pub fn is(&self, other: &Bin) -> bool {
        let place = |b: &Bin| (b.cache, b.call, b.row, b.element);
        place(self) == place(other)
    }

    pub fn layer(&self, c: &Config) -> usize {
        match self.cache {
            Cache::Window => self.call,
            Cache::Kv | Cache::Key => c.kv_source_layer_ids[self.call],
            Cache::Query => c.index_source_layer_ids[self.call],
        }
    }

    /// Position of the token that completes the row.
    pub fn position(&self, c: &Config) -> usize {
        match self.cache {
            Cache::Window | Cache::Query => self.row,
            Cache::Kv | Cache::Key => {
                let ratio = c.layer(self.layer(c)).ratio;
                self.row * ratio + ratio - 1
            }
        }
    }

    pub fn name(&self, c: &Config) -> String {
        let Bin { cache, call, row, element, .. } = self;
        let (layers, stages) = (c.num_hidden_layers, c.dspark.stages);
        let owner = match call.checked_sub(layers) {
            Some(s) if *cache == Cache::Window => format!("mtp.{}", s % stages),
            _ => format!("layers.{}", self.layer(c)),
        };
        format!("{owner}.{} row {row} element {element}", cache.tap())
    }
}

/// The bins that fell another way in a run, the first row's first: with each of these values nudged across its
/// boundary, all rows are within `limit`. `run` gives the distance of each row; the first is that of position `first`.
///
/// # Errors
/// The first row that no value at a boundary explains.
pub fn departed_bins<B: Backend>(
    probe: &Model<Probe<B>>,
    first: usize,
    limit: f64,
    run: impl Fn() -> Vec<f64>,
) -> Result<Vec<Bin>, String> {
    let config = probe.config();
    let run = |bins: &[Bin]| {
        probe.backend().start(bins);
        run()
    };
    let mut bins: Vec<Bin> = Vec::new();
    loop {
        let rows = run(&bins);
        let Some(bad) = rows.iter().position(|d| *d >= limit) else { return Ok(bins) };
        let mut near = probe.backend().near();
        near.retain(|b| b.position(config) <= first + bad && !bins.iter().any(|n| n.is(b)));
        near.sort_by_key(|b| std::cmp::Reverse(b.position(config)));
        let tried = near.len();
        let found = near.into_iter().find(|b| {
            let rows = run(&[bins.as_slice(), &[*b]].concat());
            rows[..=bad].iter().all(|d| *d < limit)
        });
        bins.push(found.ok_or_else(|| {
            format!(
                "row {bad} departs by {:.2e}; none of {tried} values at a boundary explains it",
                rows[bad]
            )
        })?);
    }
}

#[derive(Default)]
struct Record {
    calls: Vec<(Cache, Host)>,
    nudges: Vec<Bin>,
}

/// Backend `B` with the record.
pub struct Probe<B> {
    inner: B,
    record: Mutex<Record>,
}

impl<B: Backend> Probe<B> {
    pub fn new(inner: B) -> Self {
        Self { inner, record: Mutex::default() }
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap()
    }

    /// Starts a step with these values nudged.
    pub fn start(&self, nudges: &[Bin]) {
        *self.record() = Record { calls: Vec::new(), nudges: nudges.to_vec() };
    }

    /// Values of the last step whose codes change within [`REACH`].
    pub fn near(&self) -> Vec<Bin> {
        let record = self.record();
        let mut bins = Vec::new();
        for (i, (cache, x)) in record.calls.iter().enumerate() {
            let call = record.calls[..i].iter().filter(|(c, _)| c == cache).count();
            for row in 0..x.rows() {
                let (values, size) = (x.row(row), cache.block());
                let rms = rms(values);
                for (b, block) in values.chunks(size).enumerate() {
                    let codes = cache.codes(block);
                    for (e, up) in (0..block.len()).flat_map(|e| [(e, false), (e, true)]) {
                        let crosses = |reach: f32| {
                            let mut other = block.to_vec();
                            nudge(&mut other[e], reach * rms, up);
                            cache.codes(&other) != codes
                        };
                        if crosses(REACH) {
                            let distance = bisect(REACH, crosses);
                            bins.push(Bin { cache: *cache, call, row, element: b * size + e, up, distance });
                        }
                    }
                }
            }
        }
        bins
    }

    fn pass(&self, cache: Cache, x: &B::Buf) -> B::Buf {
        let host = self.inner.read(x).unwrap();
        let mut record = self.record();
        let call = record.calls.iter().filter(|(c, _)| *c == cache).count();
        let mut values = host.as_f32().to_vec();
        for bin in record.nudges.iter().filter(|b| b.cache == cache && b.call == call) {
            nudge(&mut values[bin.row * host.width() + bin.element], REACH * rms(host.row(bin.row)), bin.up);
        }
        let nudged = self.inner.upload(&Host::f32(host.shape(), values)).unwrap();
        record.calls.push((cache, host));
        nudged
    }
}

fn rms(row: &[f32]) -> f32 {
    let square: f32 = row.iter().map(|v| v * v).sum();
    (square / row.len() as f32).sqrt()
}

fn nudge(v: &mut f32, by: f32, up: bool) {
    // At least one step of a large value.
    let by = by.max(v.abs() * 1.2e-7);
    *v += if up { by } else { -by };
}

/// The smallest reach that crosses, to a percent of `most`.
fn bisect(most: f32, crosses: impl Fn(f32) -> bool) -> f32 {
    let (mut low, mut high) = (0.0, most);
    for _ in 0..7 {
        let middle = (low + high) / 2.0;
        if crosses(middle) { high = middle } else { low = middle }
    }
    high
}

macro_rules! delegate {
    ($(fn $name:ident(&self $(, $arg:ident: $ty:ty)*) $(-> $ret:ty)?;)*) => {
        $(fn $name(&self $(, $arg: $ty)*) $(-> $ret)? {
            self.inner.$name($($arg),*)
        })*
    };
}

impl<B: Backend> Backend for Probe<B> {
    type Buf = B::Buf;
    type Mat = B::Mat;
    type Experts = B::Experts;

    fn store_window(&self, kv: &B::Buf) -> B::Buf {
        self.inner.store_window(&self.pass(Cache::Window, kv))
    }

    fn publish_kv(&self, cache: &mut B::Buf, latent: &B::Buf, first: usize) {
        self.inner.publish_kv(cache, &self.pass(Cache::Kv, latent), first);
    }

    fn publish_key(&self, cache: &mut B::Buf, key: &B::Buf, first: usize) {
        self.inner.publish_key(cache, &self.pass(Cache::Key, key), first);
    }

    fn quantise_index_query(&self, q: &B::Buf) -> B::Buf {
        self.inner.quantise_index_query(&self.pass(Cache::Query, q))
    }

    delegate! {
        fn name(&self) -> &'static str;
        fn mode(&self) -> Mode;
        fn upload(&self, host: &Host) -> Result<B::Buf, DeviceError>;
        fn read(&self, buf: &B::Buf) -> Result<Host, DeviceError>;
        fn shape(&self, buf: &B::Buf) -> Vec<usize>;
        fn cache(&self, rows: usize, width: usize) -> Result<B::Buf, DeviceError>;
        fn load(&self, weight: &Weight) -> Result<B::Mat, DeviceError>;
        fn load_experts(&self, experts: Vec<ExpertWeights>) -> Result<B::Experts, DeviceError>;
        fn concat_rows(&self, a: &B::Buf, b: &B::Buf) -> B::Buf;
        fn slice_rows(&self, x: &B::Buf, start: usize, count: usize) -> B::Buf;
        fn reshape(&self, x: &B::Buf, shape: &[usize]) -> B::Buf;
        fn embed(&self, table: &B::Mat, ids: &[u32]) -> B::Buf;
        fn replicate(&self, x: &B::Buf, streams: usize) -> B::Buf;
        fn rmsnorm(&self, x: &B::Buf, weight: &B::Buf, eps: f32) -> B::Buf;
        fn linear(&self, x: &B::Buf, weight: &B::Mat, io: Io) -> B::Buf;
        fn grouped_linear(&self, x: &B::Buf, weight: &B::Mat, groups: usize) -> B::Buf;
        fn argmax(&self, logits: &B::Buf) -> B::Buf;
        fn rope(&self, x: &B::Buf, dim: usize, table: &RopeTable, positions: &[u32], inverse: bool) -> B::Buf;
        fn ring_write(&self, ring: &mut B::Buf, codes: &B::Buf, positions: &[u32]);
        fn pool_pairs(&self, kv: &B::Buf, score: &B::Buf) -> B::Buf;
        fn index_scores(&self, q: &B::Buf, w: &B::Buf, keys: &B::Buf, n: usize, visible: &[u32]) -> B::Buf;
        fn candidates(&self, scores: &B::Buf, visible: &[u32], block: usize, keep: usize) -> B::Buf;
        fn mask_scores(&self, scores: &B::Buf, mask: &B::Buf, block: usize) -> B::Buf;
        fn topk(&self, scores: &B::Buf, k: usize) -> B::Buf;
        fn sparse_attention(
            &self,
            q: &B::Buf,
            window: &Window<'_, B::Buf>,
            compressed: Option<&Compressed<'_, B::Buf>>,
            sinks: &B::Buf,
            positions: &[u32]
        ) -> B::Buf;
        fn router(
            &self,
            logits: &B::Buf,
            bias: &B::Buf,
            image: Option<(&B::Buf, &[bool])>,
            k: usize,
            scale: f32
        ) -> Routing<B::Buf>;
        fn routed_experts(
            &self,
            x: &B::Buf,
            routing: &Routing<B::Buf>,
            experts: &B::Experts,
            limit: f32
        ) -> B::Buf;
        fn shared_expert(&self, x: &B::Buf, weights: [&B::Mat; 3], limit: f32) -> B::Buf;
        fn moe_sum(&self, routed: &B::Buf, shared: &B::Buf) -> B::Buf;
        fn hc_mix(
            &self,
            streams: &B::Buf,
            fun: &B::Mat,
            scale: &B::Buf,
            base: &B::Buf,
            constants: MixConstants
        ) -> Mix<B::Buf>;
        fn hc_collapse(&self, streams: &B::Buf, pre: &B::Buf) -> B::Buf;
        fn hc_expand(&self, streams: &B::Buf, y: &B::Buf, mix: &Mix<B::Buf>) -> B::Buf;
        fn engram_rows(&self, table: &Weight, rows: &[u64], columns: usize) -> B::Buf;
        fn engram_gate(
            &self,
            streams: &B::Buf,
            kv: &B::Buf,
            q_weight: &B::Buf,
            k_weight: &B::Buf,
            alive: &[bool]
        ) -> (B::Buf, B::Buf);
        fn stream_mean(&self, streams: &B::Buf) -> B::Buf;
        fn draft_attention(
            &self,
            q: &B::Buf,
            ring: &B::Buf,
            window: usize,
            block: &B::Buf,
            sinks: &B::Buf,
            position: u32
        ) -> B::Buf;
        fn markov_bias(&self, base: &B::Buf, bias: &B::Buf) -> B::Buf;
        fn concat_cols(&self, parts: &[&B::Buf]) -> B::Buf;
    }
}
