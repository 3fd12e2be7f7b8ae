//! A backend that records what the cache quantisers get and can nudge one value across a rounding boundary. With it a
//! departing row is traced to the quantisation bin that fell the other way.

use std::sync::{Mutex, MutexGuard};

use checkpoint::Config;
use model::Model;
use numerics::quantise;
use ops::{Backend, Host};

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

    ops::delegate_backend!(inner: plumbing embed replicate rmsnorm linear grouped_linear argmax rope ring_write
        pool_pairs index_scores candidates mask_scores topk sparse_attention router routed_experts shared_expert
        moe_sum hc_mix hc_collapse hc_expand engram_rows engram_gate stream_mean draft_attention markov_bias
        concat_cols);
}
