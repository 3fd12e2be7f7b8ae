//! The reference backend: the scalar operators on host tensors.

use checkpoint::Weight;
use numerics::quantise;

use crate::{
    Backend, Compressed, DeviceError, ExpertWeights, Host, Io, Mix, Mode, RopeTable, Routing, Window,
    attention, cache, dspark, engram, hyper, hyper::MixConstants, indexer, linear, moe, norm, pool, rope,
};

/// Plain scalar operators in `exact` or `source`; the oracle of the other backends.
#[derive(Clone, Copy, Debug)]
pub struct Reference {
    mode: Mode,
}

impl Reference {
    /// A reference in `mode`; `native` has no reference of its own.
    pub fn new(mode: Mode) -> Self {
        assert_ne!(mode, Mode::Native, "the reference computes exact or source");
        Self { mode }
    }
}

/// Applies `f(row, out)` to every row of `x`.
fn map_rows(x: &Host, out_width: usize, f: impl Fn(usize, &[f32], &mut [f32])) -> Host {
    let mut out = vec![0.0; x.rows() * out_width];
    for (t, o) in out.chunks_mut(out_width).enumerate() {
        f(t, x.row(t), o);
    }
    Host::f32(&[x.rows(), out_width], out)
}

/// Decodes the first `n` index keys of `d` values.
fn keys(cache: &Host, n: usize, d: usize) -> Vec<f32> {
    let mut out = vec![0.0; n * d];
    for (j, k) in out.chunks_mut(d).enumerate() {
        quantise::load_fp4(cache.code_row(j), k);
    }
    out
}

impl Backend for Reference {
    type Buf = Host;
    type Mat = Weight;
    type Experts = Vec<ExpertWeights>;

    fn name(&self) -> &'static str {
        "reference"
    }

    fn mode(&self) -> Mode {
        self.mode
    }

    fn upload(&self, host: &Host) -> Result<Host, DeviceError> {
        Ok(host.clone())
    }

    fn read(&self, buf: &Host) -> Result<Host, DeviceError> {
        Ok(buf.clone())
    }

    fn shape(&self, buf: &Host) -> Vec<usize> {
        buf.shape().to_vec()
    }

    fn cache(&self, rows: usize, width: usize) -> Result<Host, DeviceError> {
        Ok(Host::u8(&[rows, width], vec![0; rows * width]))
    }

    fn load(&self, weight: &Weight) -> Result<Weight, DeviceError> {
        Ok(weight.clone())
    }

    fn load_experts(&self, experts: Vec<ExpertWeights>) -> Result<Vec<ExpertWeights>, DeviceError> {
        Ok(experts)
    }

    fn concat_rows(&self, a: &Host, b: &Host) -> Host {
        a.concat_rows(b)
    }

    fn slice_rows(&self, x: &Host, start: usize, count: usize) -> Host {
        x.slice_rows(start, count)
    }

    fn reshape(&self, x: &Host, shape: &[usize]) -> Host {
        x.reshaped(shape)
    }

    fn embed(&self, table: &Weight, ids: &[u32]) -> Host {
        let mut x = vec![0.0; ids.len() * table.cols()];
        for (id, row) in ids.iter().zip(x.chunks_mut(table.cols())) {
            table.decode_row(*id as usize, row);
        }
        Host::f32(&[ids.len(), table.cols()], x)
    }

    fn replicate(&self, x: &Host, streams: usize) -> Host {
        let rows = x.as_f32().chunks(x.width()).flat_map(|row| row.repeat(streams)).collect();
        Host::f32(&[x.rows(), streams, x.width()], rows)
    }

    fn rmsnorm(&self, x: &Host, weight: &Host, eps: f32) -> Host {
        map_rows(x, x.width(), |_, x, y| norm::rmsnorm_row(self.mode, x, weight.as_f32(), eps, y))
    }

    fn linear(&self, x: &Host, weight: &Weight, io: Io) -> Host {
        Host::f32(&[x.rows(), weight.rows()], linear::linear(self.mode, io, weight, x.as_f32()))
    }

    fn grouped_linear(&self, x: &Host, weight: &Weight, groups: usize) -> Host {
        Host::f32(&[x.rows(), weight.rows()], linear::grouped_linear(self.mode, weight, groups, x.as_f32()))
    }

    fn argmax(&self, logits: &Host) -> Host {
        let ids = (0..logits.rows()).map(|t| linear::argmax(logits.row(t)) as i32).collect();
        Host::i32(&[logits.rows()], ids)
    }

    fn rope(&self, x: &Host, head_dim: usize, table: &RopeTable, positions: &[u32], inverse: bool) -> Host {
        let mut y = x.as_f32().to_vec();
        for (row, p) in y.chunks_mut(x.width()).zip(positions) {
            rope::rope_row(self.mode, row, head_dim, table, *p, inverse);
        }
        Host::f32(x.shape(), y)
    }

    fn store_window(&self, kv: &Host) -> Host {
        cache::store_window(kv)
    }

    fn ring_write(&self, ring: &mut Host, codes: &Host, positions: &[u32]) {
        cache::ring_write(ring, codes, positions);
    }

    fn publish_kv(&self, cache: &mut Host, latent: &Host, first: usize) {
        cache::publish(cache, latent, first, quantise::store_kv);
    }

    fn publish_key(&self, cache: &mut Host, key: &Host, first: usize) {
        cache::publish(cache, key, first, quantise::store_fp4);
    }

    fn quantise_index_query(&self, q: &Host) -> Host {
        cache::quantise_index_query(q)
    }

    fn pool_pairs(&self, kv: &Host, score: &Host) -> Host {
        map_rows(kv, kv.shape()[2], |t, kv, out| pool::pool_pair(self.mode, kv, score.row(t), out))
    }

    fn index_scores(&self, q: &Host, w: &Host, cache: &Host, n: usize, visible: &[u32]) -> Host {
        let (heads, d) = (w.width(), q.width() / w.width());
        let keys = keys(cache, n, d);
        let factor = ((heads * d) as f64).powf(-0.5) as f32;
        map_rows(q, n, |t, q, out| {
            indexer::index_scores_row(self.mode, q, w.row(t), factor, &keys, visible[t] as usize, out);
        })
    }

    fn candidates(&self, scores: &Host, visible: &[u32], block: usize, keep: usize) -> Host {
        let blocks = scores.width().div_ceil(block);
        let mut mask = vec![0; scores.rows() * blocks];
        for (t, m) in mask.chunks_mut(blocks).enumerate() {
            indexer::candidates_row(scores.row(t), visible[t] as usize, block, keep, m);
        }
        Host::u8(&[scores.rows(), blocks], mask)
    }

    fn mask_scores(&self, scores: &Host, mask: &Host, block: usize) -> Host {
        map_rows(scores, scores.width(), |t, s, out| {
            for (j, (o, s)) in out.iter_mut().zip(s).enumerate() {
                *o = if mask.code_row(t)[j / block] == 1 { *s } else { f32::NEG_INFINITY };
            }
        })
    }

    fn topk(&self, scores: &Host, k: usize) -> Host {
        let k = k.min(scores.width());
        let mut index = vec![-1; scores.rows() * k];
        for (t, out) in index.chunks_mut(k).enumerate() {
            indexer::topk_row(scores.row(t), out);
        }
        Host::i32(&[scores.rows(), k], index)
    }

    fn sparse_attention(
        &self,
        q: &Host,
        window: &Window<'_, Host>,
        compressed: Option<&Compressed<'_, Host>>,
        sinks: &Host,
        positions: &[u32],
    ) -> Host {
        attention::sparse_attention(self.mode, q, window, compressed, sinks.as_f32(), positions)
    }

    fn router(
        &self,
        logits: &Host,
        bias: &Host,
        image: Option<(&Host, &[bool])>,
        k: usize,
        scale: f32,
    ) -> Routing<Host> {
        let rows = logits.rows();
        let (mut ids, mut weights) = (vec![0; rows * k], vec![0.0; rows * k]);
        for t in 0..rows {
            let bias = match image {
                Some((vl, flags)) if flags[t] => vl,
                _ => bias,
            };
            let range = t * k..(t + 1) * k;
            let (ids, weights) = (&mut ids[range.clone()], &mut weights[range]);
            moe::router_row(logits.row(t), bias.as_f32(), scale, ids, weights);
        }
        Routing { experts: Host::i32(&[rows, k], ids), weights: Host::f32(&[rows, k], weights) }
    }

    fn routed_experts(
        &self,
        x: &Host,
        routing: &Routing<Host>,
        experts: &Vec<ExpertWeights>,
        limit: f32,
    ) -> Host {
        moe::routed_experts(self.mode, x, routing, experts, limit)
    }

    fn shared_expert(&self, x: &Host, weights: [&Weight; 3], limit: f32) -> Host {
        Host::f32(x.shape(), moe::expert(self.mode, weights, x.as_f32(), &vec![1.0; x.rows()], limit))
    }

    fn moe_sum(&self, routed: &Host, shared: &Host) -> Host {
        Host::f32(routed.shape(), moe::moe_sum(self.mode, routed.as_f32(), shared.as_f32()))
    }

    fn hc_mix(
        &self,
        streams: &Host,
        fun: &Weight,
        scale: &Host,
        base: &Host,
        constants: MixConstants,
    ) -> Mix<Host> {
        hyper::hc_mix(streams, fun, scale.as_f32(), base.as_f32(), constants)
    }

    fn hc_collapse(&self, streams: &Host, pre: &Host) -> Host {
        let d = streams.shape()[2];
        map_rows(streams, d, |t, x, out| hyper::collapse_row(self.mode, x, pre.row(t), out))
    }

    fn hc_expand(&self, streams: &Host, y: &Host, mix: &Mix<Host>) -> Host {
        map_rows(streams, streams.width(), |t, x, out| {
            hyper::expand_row(self.mode, x, y.row(t), mix.post.row(t), mix.comb.row(t), out);
        })
        .reshaped(streams.shape())
    }

    fn engram_rows(&self, table: &Weight, rows: &[u64], columns: usize) -> Host {
        engram::engram_rows(table, rows, columns)
    }

    fn engram_gate(
        &self,
        streams: &Host,
        kv: &Host,
        q_weight: &Host,
        k_weight: &Host,
        alive: &[bool],
    ) -> (Host, Host) {
        let (q, k) = (q_weight.as_f32(), k_weight.as_f32());
        let gate = map_rows(streams, streams.shape()[1], |t, x, gate| {
            engram::gates_row(x, kv.row(t), q, k, alive[t], gate);
        });
        let out = map_rows(streams, streams.width(), |t, x, out| {
            engram::add_row(self.mode, x, kv.row(t), gate.row(t), out);
        });
        (out.reshaped(streams.shape()), gate)
    }

    fn stream_mean(&self, streams: &Host) -> Host {
        map_rows(streams, streams.shape()[2], |_, x, out| dspark::stream_mean_row(self.mode, x, out))
    }

    fn draft_attention(
        &self,
        q: &Host,
        ring: &Host,
        window: usize,
        block: &Host,
        sinks: &Host,
        position: u32,
    ) -> Host {
        dspark::draft_attention(self.mode, q, ring, window, block, sinks.as_f32(), position)
    }

    fn markov_bias(&self, base: &Host, bias: &Host) -> Host {
        let sum = base.as_f32().iter().zip(bias.as_f32()).map(|(a, b)| a + b).collect();
        Host::f32(base.shape(), sum)
    }

    fn concat_cols(&self, parts: &[&Host]) -> Host {
        dspark::concat_cols(parts)
    }
}
