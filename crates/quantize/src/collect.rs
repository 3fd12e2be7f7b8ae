//! The forward that is calibrated with: the CPU backend, which also sums x^T x of every linear layer's inputs.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Mutex,
};

use checkpoint::Weight;
use cpu::Cpu;
use ops::{Backend, ExpertWeights, Host, Io, Routing, moe};
use rayon::prelude::*;

/// Sum of x^T x over `rows` inputs of `features` values.
pub(crate) struct Sum {
    pub features: usize,
    pub rows: u64,
    /// The lower triangle; above it nothing is meant.
    products: Vec<f32>,
}

impl Sum {
    fn new(features: usize) -> Self {
        Self { features, rows: 0, products: vec![0.0; features * features] }
    }

    /// Adds rows of inputs, always in their order.
    fn add(&mut self, x: &[f32]) {
        let n = self.features;
        self.rows += (x.len() / n) as u64;
        self.products.par_chunks_mut(n).enumerate().for_each(|(i, products)| {
            let products = &mut products[..=i];
            for x in x.chunks_exact(n) {
                let factor = x[i];
                products.iter_mut().zip(x).for_each(|(p, x)| *p += factor * x);
            }
        });
    }

    /// The mean, symmetric, padded with zeros to `padded` features.
    pub fn mean(&self, padded: usize) -> Vec<f32> {
        let (n, count) = (self.features, self.rows.max(1) as f32);
        let mut out = vec![0.0; padded * padded];
        out.par_chunks_mut(padded).take(n).enumerate().for_each(|(i, out)| {
            for (j, v) in out[..n].iter_mut().enumerate() {
                *v = self.products[i.max(j) * n + i.min(j)] / count;
            }
        });
        out
    }
}

/// The CPU backend with sums.
pub(crate) struct Collector {
    inner: Cpu,
    /// Names of the inputs that are summed.
    wanted: HashSet<String>,
    sums: Mutex<BTreeMap<String, Sum>>,
}

impl Collector {
    pub fn new(inner: Cpu, wanted: HashSet<String>) -> Self {
        Self { inner, wanted, sums: Mutex::default() }
    }

    /// What was summed since the last call.
    pub fn take(&self) -> BTreeMap<String, Sum> {
        std::mem::take(&mut *self.sums.lock().expect("no call panicked"))
    }

    fn add(&self, layer: &str, features: usize, x: &[f32]) {
        if !self.wanted.contains(layer) || x.is_empty() {
            return;
        }
        let mut sums = self.sums.lock().expect("no call panicked");
        sums.entry(layer.to_owned()).or_insert_with(|| Sum::new(features)).add(x);
    }

    /// Adds what the down matrix reads where `rows` of x pass gate and up with `weights`.
    fn add_hidden(&self, x: &Host, rows: &[usize], weights: &[f32], parts: [&Weight; 3], limit: f32) {
        let [gate, up, down] = parts;
        if rows.is_empty() || !self.wanted.contains(down.name()) {
            return;
        }
        let input =
            Host::f32(&[rows.len(), x.width()], rows.iter().flat_map(|r| x.row(*r)).copied().collect());
        let (g, u) = (self.inner.linear(&input, gate, Io::Fp8), self.inner.linear(&input, up, Io::Fp8));
        let inter = down.cols();
        let mut hidden = vec![0.0; rows.len() * inter];
        for (i, h) in hidden.chunks_mut(inter).enumerate() {
            moe::swiglu(self.inner.mode(), g.row(i), u.row(i), limit, weights[i], h);
        }
        self.add(down.name(), inter, &hidden);
    }
}

impl Backend for Collector {
    type Buf = Host;
    type Mat = Weight;
    type Experts = Vec<ExpertWeights>;

    ops::delegate_backend!(inner: plumbing embed replicate rmsnorm argmax rope store_window ring_write publish_kv
        publish_key quantise_index_query pool_pairs index_scores candidates mask_scores topk sparse_attention router
        moe_sum hc_mix hc_collapse hc_expand engram_rows engram_gate stream_mean draft_attention markov_bias concat_cols);

    fn linear(&self, x: &Host, weight: &Weight, io: Io) -> Host {
        self.add(weight.name(), weight.cols(), x.as_f32());
        self.inner.linear(x, weight, io)
    }

    fn grouped_linear(&self, x: &Host, weight: &Weight, groups: usize) -> Host {
        let k = weight.cols();
        for g in 0..groups {
            let part: Vec<f32> = (0..x.rows()).flat_map(|t| &x.row(t)[g * k..][..k]).copied().collect();
            self.add(&format!("{}.slice.{g}", weight.name()), k, &part);
        }
        self.inner.grouped_linear(x, weight, groups)
    }

    fn routed_experts(
        &self,
        x: &Host,
        routing: &Routing<Host>,
        experts: &Vec<ExpertWeights>,
        limit: f32,
    ) -> Host {
        let k = routing.experts.width();
        let (ids, weights) = (routing.experts.as_i32(), routing.weights.as_f32());
        // Experts that are seldom chosen would be calibrated with nothing: every expert also sees as many other rows as
        // even routing would give it, at half the mean weight.
        let stride = (experts.len() / k).max(1);
        let mean = weights.iter().sum::<f32>() / weights.len().max(1) as f32;
        for (e, parts) in experts.iter().enumerate() {
            let (mut rows, mut scale) = (Vec::new(), Vec::new());
            for t in 0..x.rows() {
                let chosen = (0..k).find(|i| ids[t * k + i] as usize == e);
                if let Some(i) = chosen {
                    rows.push(t);
                    scale.push(weights[t * k + i]);
                } else if (t + e).is_multiple_of(stride) {
                    rows.push(t);
                    scale.push(0.5 * mean);
                }
            }
            self.add_hidden(x, &rows, &scale, [&parts.gate, &parts.up, &parts.down], limit);
        }
        self.inner.routed_experts(x, routing, experts, limit)
    }

    fn shared_expert(&self, x: &Host, weights: [&Weight; 3], limit: f32) -> Host {
        let [w1, w3, w2] = weights;
        let rows: Vec<usize> = (0..x.rows()).collect();
        self.add_hidden(x, &rows, &vec![1.0; x.rows()], [w1, w3, w2], limit);
        self.inner.shared_expert(x, weights, limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::inputs_of;

    #[test]
    fn a_sum_is_the_mean_of_products() {
        let mut sum = Sum::new(3);
        sum.add(&[1.0, 2.0, 3.0]);
        sum.add(&[0.0, -1.0, 1.0, 2.0, 0.0, 0.0]);
        let mean = sum.mean(4);
        let want = [5.0, 2.0, 3.0, 0.0, 2.0, 5.0, 5.0, 0.0, 3.0, 5.0, 10.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(mean, want.map(|v: f32| v / 3.0));
    }

    #[test]
    fn layers_that_read_the_same_share_its_name() {
        for (layer, inputs) in [
            ("layers.2.attn.compressor.wgate", "layers.2.attn.wq_a"),
            ("layers.2.attn.indexer.wq_b", "layers.2.attn.wq_b"),
            ("layers.2.attn.wo_a.slice.1", "layers.2.attn.wo_a.slice.1"),
            ("layers.2.attn.indexer.wk", "layers.2.attn.indexer.wk"),
            ("layers.2.ffn.experts.3.w3", "layers.2.ffn.gate"),
            ("layers.2.ffn.shared_experts.w1", "layers.2.ffn.gate"),
            ("layers.2.ffn.experts.3.w2", "layers.2.ffn.experts.3.w2"),
            ("layers.1.engram.wkv", "layers.1.engram.wkv"),
            ("head", "head"),
        ] {
            assert_eq!(inputs_of(layer), inputs);
        }
    }
}
