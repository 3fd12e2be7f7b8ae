//! The operators of any backend on host tensors: what goes in is uploaded, what comes out is read.

use checkpoint::Weight;
use numerics::quantise;
use ops::{Backend, Compressed, DeviceError, Host, Io, Mix, RopeTable, Routing, Window, hyper::MixConstants};

type Result<T> = std::result::Result<T, DeviceError>;

/// The wrapper.
pub struct Hosted<'a, B>(pub &'a B);

impl<B: Backend> Hosted<'_, B> {
    fn up(&self, x: &Host) -> Result<B::Buf> {
        self.0.upload(x)
    }

    fn down(&self, x: &B::Buf) -> Result<Host> {
        self.0.read(x)
    }

    /// `store_window`.
    pub fn store_window(&self, x: &Host) -> Result<Host> {
        self.down(&self.0.store_window(&self.up(x)?))
    }

    /// Rows that `publish_kv` stores.
    pub fn stored_entries(&self, x: &Host) -> Result<Host> {
        let mut cache = self.0.cache(x.rows(), quantise::kv_row_bytes(x.width()))?;
        self.0.publish_kv(&mut cache, &self.up(x)?, 0);
        self.down(&cache)
    }

    /// Rows that `publish_key` stores.
    pub fn stored_keys(&self, x: &Host) -> Result<Host> {
        let mut cache = self.0.cache(x.rows(), quantise::fp4_row_bytes(x.width()))?;
        self.0.publish_key(&mut cache, &self.up(x)?, 0);
        self.down(&cache)
    }

    /// `linear_fp8`, `linear_bf16`, `linear_f32`.
    pub fn linear(&self, x: &Host, weight: &Weight, io: Io) -> Result<Host> {
        self.down(&self.0.linear(&self.up(x)?, &self.0.load(weight)?, io))
    }

    /// `grouped_linear`.
    pub fn grouped_linear(&self, x: &Host, weight: &Weight, groups: usize) -> Result<Host> {
        self.down(&self.0.grouped_linear(&self.up(x)?, &self.0.load(weight)?, groups))
    }

    /// `rmsnorm`.
    pub fn rmsnorm(&self, x: &Host, weight: &Host, eps: f32) -> Result<Host> {
        self.down(&self.0.rmsnorm(&self.up(x)?, &self.up(weight)?, eps))
    }

    /// `rope`.
    pub fn rope(
        &self,
        x: &Host,
        dim: usize,
        table: &RopeTable,
        positions: &[u32],
        inverse: bool,
    ) -> Result<Host> {
        self.down(&self.0.rope(&self.up(x)?, dim, table, positions, inverse))
    }

    /// `sparse_attention` over rows given as values: `slots [rows, n]` names rows of `keys`, -1 is empty.
    pub fn attention(&self, q: &Host, keys: &Host, slots: &Host, sinks: &Host) -> Result<Host> {
        let none = self.0.cache(1, quantise::fp8_row_bytes(keys.width()))?;
        let window = Window { ring: &none, fresh: &none, base: 0, size: 0 };
        let (cache, topk) = (self.up(keys)?, self.up(slots)?);
        let (q, sinks, listed) = (self.up(q)?, self.up(sinks)?, Compressed { cache: &cache, topk: &topk });
        self.down(&self.0.sparse_attention(&q, &window, Some(&listed), &sinks, &vec![0; slots.rows()]))
    }

    /// `hc_mix`.
    pub fn hc_mix(
        &self,
        streams: &Host,
        fun: &Weight,
        scale: &Host,
        base: &Host,
        constants: MixConstants,
    ) -> Result<Mix<Host>> {
        let (scale, base) = (self.up(scale)?, self.up(base)?);
        let mix = self.0.hc_mix(&self.up(streams)?, &self.0.load(fun)?, &scale, &base, constants);
        Ok(Mix { pre: self.down(&mix.pre)?, post: self.down(&mix.post)?, comb: self.down(&mix.comb)? })
    }

    /// `hc_collapse`.
    pub fn hc_collapse(&self, streams: &Host, pre: &Host) -> Result<Host> {
        self.down(&self.0.hc_collapse(&self.up(streams)?, &self.up(pre)?))
    }

    /// `hc_expand`.
    pub fn hc_expand(&self, streams: &Host, y: &Host, mix: &Mix<Host>) -> Result<Host> {
        let mix = Mix { pre: self.up(&mix.pre)?, post: self.up(&mix.post)?, comb: self.up(&mix.comb)? };
        self.down(&self.0.hc_expand(&self.up(streams)?, &self.up(y)?, &mix))
    }

    /// `router`, without images.
    pub fn router(&self, logits: &Host, bias: &Host, k: usize, scale: f32) -> Result<Routing<Host>> {
        let r = self.0.router(&self.up(logits)?, &self.up(bias)?, None, k, scale);
        Ok(Routing { experts: self.down(&r.experts)?, weights: self.down(&r.weights)? })
    }

    /// `quantise_index_query`, then `index_scores` against all of `keys`.
    pub fn index_scores(&self, q: &Host, w: &Host, keys: &Host) -> Result<Host> {
        let n = keys.rows();
        let mut cache = self.0.cache(n, quantise::fp4_row_bytes(keys.width()))?;
        self.0.publish_key(&mut cache, &self.up(keys)?, 0);
        let (q, visible) = (self.0.quantise_index_query(&self.up(q)?), vec![n as u32; q.rows()]);
        self.down(&self.0.index_scores(&q, &self.up(w)?, &cache, n, &visible))
    }

    /// `topk`.
    pub fn topk(&self, scores: &Host, k: usize) -> Result<Host> {
        self.down(&self.0.topk(&self.up(scores)?, k))
    }

    /// `candidates`.
    pub fn candidates(&self, scores: &Host, visible: &[u32], block: usize, keep: usize) -> Result<Host> {
        self.down(&self.0.candidates(&self.up(scores)?, visible, block, keep))
    }

    /// `engram_rows`.
    pub fn engram_rows(&self, table: &Weight, rows: &[u64], columns: usize) -> Result<Host> {
        self.down(&self.0.engram_rows(table, rows, columns))
    }

    /// The streams of `engram_gate`.
    pub fn engram_gate(&self, streams: &Host, kv: &Host, q: &Host, k: &Host, alive: &[bool]) -> Result<Host> {
        let (q, k) = (self.up(q)?, self.up(k)?);
        self.down(&self.0.engram_gate(&self.up(streams)?, &self.up(kv)?, &q, &k, alive).0)
    }
}
