//! Single departures from mode `source`, to tell what each of them does to a layer: other code computes so, ours never does.
//!
//! They lie in a wrapper that only the gates make, so that nothing that serves can take one, or pays for it.

use std::sync::{Mutex, PoisonError};

use checkpoint::Form;
use ops::{
    Backend, Compressed, ExpertWeights, Host, Io, Mix, Mode, RopeTable, Routing, Weight, Window,
    attention::{attend_by, gather_slots, sparse_attention},
    hyper::{self, MIX, MixConstants},
    indexer::{highest, topk_row},
    linear, moe, norm,
};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::gates::model::HostBackend;

/// Fraction bits that Hopper's `wgmma` keeps of a product of fp8 values.
const SHORT_BITS: i32 = 13;
/// Columns of one tensor-core step, and of a scale.
const GROUP: usize = 32;

/// One departure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Knob {
    /// None: the bits of the backend inside.
    #[default]
    Off,
    /// Attention in single precision throughout: the probabilities are not rounded to bf16.
    PlainProbabilities,
    /// fp8 products as `wgmma` sums them; see [`short_sum`].
    ShortSums,
    /// The exponential of `--use_fast_math` in attention and in the mix of the streams; see [`fast_exp`].
    FastExp,
    /// The two frequencies of the plain rotation that CUDA's `pow` gives one unit in the last place higher.
    CudaRotation,
    /// The highest index among equals instead of the lowest, in top-k, in candidate blocks and in the router.
    HighestTies,
}

/// Every departure with what reports call it.
pub const KNOBS: [(Knob, &str); 5] = [
    (Knob::PlainProbabilities, "without rounding the probabilities"),
    (Knob::ShortSums, "with fp8 products summed in 13 bits"),
    (Knob::FastExp, "with the exponential of fast math"),
    (Knob::CudaRotation, "with CUDA's two rotary frequencies"),
    (Knob::HighestTies, "with ties to the highest index"),
];

/// Sum of up to 32 products of fp8 values in `wgmma`'s way: each is cut off towards zero at 13 fraction bits of the largest
/// one's binary exponent, the integers are added exactly, and the sum keeps 13 fraction bits of its own.
///
/// On an H200 such sums err by up to 7.6e-4 of the largest product, have ten zero bits at their end, and change 2.7 % of the
/// bf16 results of `fp8_gemm`, by NRMS 4.1e-4; a test holds this against those figures.
pub fn short_sum(w: &[f32], x: &[f32]) -> f32 {
    let mut p = [0.0f32; GROUP];
    p.iter_mut().zip(w.iter().zip(x)).for_each(|(p, (w, x))| *p = w * x);
    let largest = p.iter().fold(0, |m, p| (p.to_bits() & 0x7fff_ffff).max(m));
    // Products of stored values are far from both ends of single precision; at the lower end nothing is cut off.
    let exponent = ((largest >> 23) as i32 - 127).max(SHORT_BITS - 126);
    let power = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    let up = power(SHORT_BITS - exponent);
    let sum: i32 = p.iter().map(|p| (p * up) as i32).sum();
    let spare = (31 - SHORT_BITS as u32).saturating_sub(sum.unsigned_abs().leading_zeros());
    let kept = (sum.unsigned_abs() >> spare << spare) as f32;
    (if sum < 0 { -kept } else { kept }) * power(exponent - SHORT_BITS)
}

/// e^`x` in the way of `__expf`: 2 to the power of the rounded product of `x` and log2 e, the last bit of the result cleared
/// (`ex2.approx` errs by up to 2 units in the last place), results below the normal range flushed to zero.
pub fn fast_exp(x: f32) -> f32 {
    let y = f64::from(x * std::f32::consts::LOG2_E).exp2() as f32;
    if y < f32::MIN_POSITIVE { 0.0 } else { f32::from_bits(y.to_bits() & !1) }
}

/// The table that CUDA computes: pairs 11 and 25 of the plain rotation of the released model are one unit higher.
pub fn cuda_rotation(table: &RopeTable) -> RopeTable {
    let mut freqs = table.freqs().to_vec();
    for (i, ours) in [(11, 0x3d2c_ba15), (25, 0x3a44_948c)] {
        if let Some(f) = freqs.get_mut(i).filter(|f| f.to_bits() == ours) {
            *f = f.next_up();
        }
    }
    RopeTable::of(freqs)
}

/// A linear layer with [`short_sum`]s.
fn short_linear(weight: &Weight, x: &[f32]) -> Vec<f32> {
    let (out, cols) = (weight.rows(), weight.cols());
    let a = linear::activations(Mode::Source, Io::Fp8, x, cols);
    let rows = a.len() / cols;
    let mut columns = vec![0.0; rows * out];
    columns.par_chunks_mut(rows.max(1)).enumerate().for_each_init(
        || vec![0.0; cols],
        |w, (o, y)| {
            weight.decode_row(o, w);
            for (y, a) in y.iter_mut().zip(a.chunks(cols)) {
                *y = w.chunks(GROUP).zip(a.chunks(GROUP)).fold(0.0, |sum, (w, a)| sum + short_sum(w, a));
            }
        },
    );
    let mut y = vec![0.0; rows * out];
    y.iter_mut().enumerate().for_each(|(i, y)| *y = columns[i % out * rows + i / out]);
    linear::round_outputs(Mode::Source, Io::Fp8, &mut y);
    y
}

/// The wrapper.
pub struct Knobbed<B> {
    inner: B,
    knob: Mutex<Knob>,
}

impl<B: HostBackend> Knobbed<B> {
    /// Around `inner`, which computes in mode `source`; no departure yet.
    pub fn new(inner: B) -> Self {
        Self { inner, knob: Mutex::default() }
    }

    /// Which departure holds from now on.
    pub fn set(&self, knob: Knob) {
        *self.knob.lock().unwrap_or_else(PoisonError::into_inner) = knob;
    }

    fn is(&self, knob: Knob) -> bool {
        *self.knob.lock().unwrap_or_else(PoisonError::into_inner) == knob
    }

    fn shortens(&self, weight: &Weight) -> bool {
        self.is(Knob::ShortSums) && matches!(weight.form(), Form::Fp8Block32 | Form::Fp8Row32)
    }
}

impl<B: HostBackend> Backend for Knobbed<B> {
    type Buf = Host;
    type Mat = Weight;
    type Experts = Vec<ExpertWeights>;

    ops::delegate_backend!(inner: plumbing embed replicate rmsnorm grouped_linear argmax store_window ring_write
        publish_kv publish_key quantise_index_query pool_pairs index_scores mask_scores routed_experts moe_sum
        hc_collapse hc_expand engram_rows engram_gate stream_mean draft_attention markov_bias concat_cols);

    fn linear(&self, x: &Host, weight: &Weight, io: Io) -> Host {
        if io == Io::Fp8 && self.shortens(weight) {
            return Host::f32(&[x.rows(), weight.rows()], short_linear(weight, x.as_f32()));
        }
        self.inner.linear(x, weight, io)
    }

    fn shared_expert(&self, x: &Host, weights: [&Weight; 3], limit: f32) -> Host {
        if !weights.iter().all(|w| self.shortens(w)) {
            return self.inner.shared_expert(x, weights, limit);
        }
        let [w1, w3, w2] = weights;
        let (gate, up) = (short_linear(w1, x.as_f32()), short_linear(w3, x.as_f32()));
        let mut h = vec![0.0; gate.len()];
        moe::swiglu(Mode::Source, &gate, &up, limit, 1.0, &mut h);
        Host::f32(&[x.rows(), w2.rows()], short_linear(w2, &h))
    }

    fn rope(&self, x: &Host, dim: usize, table: &RopeTable, positions: &[u32], inverse: bool) -> Host {
        if self.is(Knob::CudaRotation) {
            return self.inner.rope(x, dim, &cuda_rotation(table), positions, inverse);
        }
        self.inner.rope(x, dim, table, positions, inverse)
    }

    fn sparse_attention(
        &self,
        q: &Host,
        window: &Window<'_, Host>,
        compressed: Option<&Compressed<'_, Host>>,
        sinks: &Host,
        positions: &[u32],
    ) -> Host {
        let sink = sinks.as_f32();
        if self.is(Knob::PlainProbabilities) {
            let o = sparse_attention(Mode::Exact, q, window, compressed, sink, positions);
            return Host::f32(o.shape(), o.as_f32().iter().map(|v| self.mode().bf16(*v)).collect());
        }
        if self.is(Knob::FastExp) {
            let dim = q.width() / sink.len();
            let mut out = vec![0.0; q.rows() * q.width()];
            out.par_chunks_mut(q.width()).enumerate().for_each(|(t, out)| {
                let (panel, valid) = gather_slots(window, compressed, t, positions[t], dim);
                attend_by(fast_exp, Mode::Source, q.row(t), dim, &panel, &valid, sink, out);
            });
            return Host::f32(q.shape(), out);
        }
        self.inner.sparse_attention(q, window, compressed, sinks, positions)
    }

    fn hc_mix(
        &self,
        streams: &Host,
        fun: &Weight,
        scale: &Host,
        base: &Host,
        constants: MixConstants,
    ) -> Mix<Host> {
        if !self.is(Knob::FastExp) {
            return self.inner.hc_mix(streams, fun, scale, base, constants);
        }
        let (rows, projections) = (streams.rows(), self.inner.linear(streams, fun, Io::F32));
        let (mut pre, mut post, mut comb) = (vec![0.0; rows * 4], vec![0.0; rows * 4], vec![0.0; rows * 16]);
        let outputs = pre.chunks_mut(4).zip(post.chunks_mut(4)).zip(comb.chunks_mut(16));
        for (t, ((pre, post), comb)) in outputs.enumerate() {
            let mean = norm::mean_square(streams.row(t));
            let m = &projections.as_f32()[t * MIX..][..MIX];
            hyper::mix_row_by(fast_exp, m, mean, scale.as_f32(), base.as_f32(), constants, pre, post, comb);
        }
        Mix {
            pre: Host::f32(&[rows, 4], pre),
            post: Host::f32(&[rows, 4], post),
            comb: Host::f32(&[rows, 4, 4], comb),
        }
    }

    fn topk(&self, scores: &Host, k: usize) -> Host {
        if !self.is(Knob::HighestTies) {
            return self.inner.topk(scores, k);
        }
        let (n, k) = (scores.width() as i32, k.min(scores.width()));
        let mut index = vec![-1; scores.rows() * k];
        for (t, out) in index.chunks_mut(k.max(1)).enumerate() {
            let backwards: Vec<f32> = scores.row(t).iter().rev().copied().collect();
            topk_row(&backwards, out);
            let kept = out.iter().take_while(|j| **j >= 0).count();
            out[..kept].reverse();
            out[..kept].iter_mut().for_each(|j| *j = n - 1 - *j);
        }
        Host::i32(&[scores.rows(), k], index)
    }

    fn candidates(&self, scores: &Host, visible: &[u32], block: usize, keep: usize) -> Host {
        if !self.is(Knob::HighestTies) {
            return self.inner.candidates(scores, visible, block, keep);
        }
        let blocks = scores.width().div_ceil(block);
        let mut mask = vec![0; scores.rows() * blocks];
        for (t, mask) in mask.chunks_mut(blocks.max(1)).enumerate().filter(|(t, _)| visible[*t] > 0) {
            let best = |b: &[f32]| b.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut best: Vec<f32> = scores.row(t).chunks(block).map(best).collect();
            best[(visible[t] as usize - 1) / block] = f32::INFINITY;
            best.reverse();
            highest(&best, keep).into_iter().for_each(|b| mask[blocks - 1 - b] = 1);
        }
        Host::u8(&[scores.rows(), blocks], mask)
    }

    fn router(
        &self,
        logits: &Host,
        bias: &Host,
        image: Option<(&Host, &[bool])>,
        k: usize,
        scale: f32,
    ) -> Routing<Host> {
        if !self.is(Knob::HighestTies) {
            return self.inner.router(logits, bias, image, k, scale);
        }
        let backwards = |x: &Host| {
            let rows = x.as_f32().chunks(logits.width()).flat_map(|row| row.iter().rev().copied());
            Host::f32(x.shape(), rows.collect())
        };
        let image_bias = image.map(|(b, flags)| (backwards(b), flags));
        let image = image_bias.as_ref().map(|(b, flags)| (b, *flags));
        let r = self.inner.router(&backwards(logits), &backwards(bias), image, k, scale);
        let last = logits.width() as i32 - 1;
        let experts = r.experts.as_i32().iter().map(|e| last - e).collect();
        Routing { experts: Host::i32(r.experts.shape(), experts), ..r }
    }
}

#[cfg(test)]
mod tests {
    use ops::{Reference, registry};

    use super::*;
    use crate::{
        judge::metrics,
        release::{
            fixtures::Fixtures,
            generated::{host, ints, quantised, values},
            hosted::Hosted,
        },
    };

    fn both(knob: Knob) -> (Knobbed<Reference>, Reference) {
        let (b, plain) = (Knobbed::new(Reference::new(Mode::Source)), Reference::new(Mode::Source));
        b.set(knob);
        (b, plain)
    }

    /// Names of the operators whose bits a knob changes, on tiny cases.
    fn changed(knob: Knob) -> Vec<&'static str> {
        let (b, plain) = both(knob);
        let differs = |s: &&registry::Spec| {
            let c = registry::case(s.name, &registry::Geometry::TINY, 5, 5).unwrap();
            let got = registry::run(s.name, &b, &c).unwrap().unwrap();
            let want = registry::run(s.name, &plain, &c).unwrap().unwrap();
            registry::compare(&got, &want).iter().any(|c| !c.equal)
        };
        registry::SPECS.iter().filter(differs).map(|s| s.name).collect()
    }

    #[test]
    fn without_a_knob_every_operator_has_its_bits_and_each_knob_changes_its_own() {
        assert_eq!(changed(Knob::Off), [""; 0]);
        assert_eq!(changed(Knob::PlainProbabilities), ["sparse_attention"]);
        assert_eq!(changed(Knob::ShortSums), ["linear_fp8", "shared_expert"]);
        // Rounding to bf16 hides it in attention over few slots; another test has many.
        assert_eq!(changed(Knob::FastExp), ["hc_mix"]);
        // The tables of the cases are not the released model's, and random scores do not tie.
        assert_eq!(changed(Knob::CudaRotation), [""; 0]);
    }

    /// The figures that wgmma gave on an H200: 2.7 % of the bf16 results of fp8_gemm differ from those of exact sums, by NRMS
    /// 4.1e-4; a sum errs by at most 7.6e-4 of its largest product and ends in ten zero bits.
    #[test]
    fn short_sums_err_as_much_as_wgmma_does() {
        let (b, plain) = both(Knob::ShortSums);
        let names = ["op.fp8_gemm.1280x5120.w", "op.fp8_gemm.1280x5120.w_scale"];
        let w = quantised(names, Form::Fp8Block32, 1280, 5120, 114);
        let x = host("op.fp8_gemm.1280x5120.x", &[4, 5120], 1.0, 0.0);
        let (got, want) = (b.linear(&x, &w, Io::Fp8), plain.linear(&x, &w, Io::Fp8));
        let e = metrics::values(got.as_f32(), want.as_f32()).nrms;
        let differ = got.as_f32().iter().zip(want.as_f32()).filter(|(a, b)| a != b).count();
        let share = differ as f64 / want.as_f32().len() as f64;
        println!("share {share:.4}, NRMS {e:.2e}");
        assert!((0.02..0.04).contains(&share) && (3e-4..6e-4).contains(&e), "{share} {e:e}");

        let a = linear::activations(Mode::Source, Io::Fp8, x.row(0), 5120);
        let (mut row, mut most) = (vec![0.0; 5120], 0.0f64);
        for o in 0..64 {
            w.decode_row(o, &mut row);
            for (w, a) in row.chunks(GROUP).zip(a.chunks(GROUP)) {
                let products = || w.iter().zip(a).map(|(w, a)| f64::from(*w) * f64::from(*a));
                let sum = short_sum(w, a);
                assert_eq!(sum.to_bits() & 0x3ff, 0, "{sum}");
                let largest = products().map(f64::abs).fold(0.0, f64::max);
                most = most.max((f64::from(sum) - products().sum::<f64>()).abs() / largest);
            }
        }
        println!("a sum errs by up to {most:.1e} of its largest product");
        // Cutting 32 products and the sum costs at most 33 units of 2^-13; the random signs of these cancel most of it.
        assert!((2e-4..2e-3).contains(&most), "{most}");
    }

    /// `__expf` on an H200 is up to 28 units off on [-32, 0], from rounding x log2 e.
    #[test]
    fn fast_exp_errs_as_much_as_cuda() {
        let mut most = 0.0f64;
        for i in 0..=65_536 {
            let x = -(i as f32) / 2048.0;
            let (want, got) = (f64::from(x).exp(), fast_exp(x));
            let near = want as f32;
            let unit = f64::from(near.next_up()) - f64::from(near);
            most = most.max((f64::from(got) - want).abs() / unit);
        }
        println!("{most:.1} units");
        assert!((15.0..32.0).contains(&most), "{most}");
        assert_eq!((fast_exp(0.0), fast_exp(-88.0), fast_exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
    }

    /// On an H200 fast math changes 95 of 557,056 results of attention over 64 heads and 640 slots: 11 of 64 Ki.
    #[test]
    fn fast_exp_changes_few_results_of_attention() {
        let (b, plain) = both(Knob::FastExp);
        let (q, keys) =
            (host("op.attn.q", &[2, 64 * 512], 1.7, 0.0), host("op.attn.kv", &[700, 512], 1.0, 0.0));
        let sinks = Host::f32(&[64], values("op.attn.sink", 64, 1.0, 0.0));
        let slots: Vec<i32> = ints("op.attn.idx", 2 * 640, 700).into_iter().map(|i| i as i32).collect();
        let slots = Host::i32(&[2, 640], slots);
        let got = Hosted(&b).attention(&q, &keys, &slots, &sinks).unwrap();
        let want = Hosted(&plain).attention(&q, &keys, &slots, &sinks).unwrap();
        let differ = got.as_f32().iter().zip(want.as_f32()).filter(|(a, b)| a != b).count();
        println!("{differ} of {}", want.as_f32().len());
        assert!((1..60).contains(&differ), "{differ}");
    }

    /// What the knob is for: with it three of the 768 plain rotations of the fixtures, which differ without, are equal.
    #[test]
    fn with_the_two_frequencies_the_plain_rotation_is_cudas_bit_for_bit() {
        let (b, f) = (both(Knob::CudaRotation).0, Fixtures::open().unwrap());
        let x = host("op.rope.x", &[6, 128], 1.0, 0.0);
        let positions = [0, 1, 127, 4095, 65_537, 1_000_003];
        for (way, inverse) in [("forward", false), ("inverse", true)] {
            let want = f.ops.values(&format!("rope.plain.{way}")).unwrap();
            let differ = |knob: Knob| {
                b.set(knob);
                let y = b.rope(&x, 64, &RopeTable::plain(1e4, 64), &positions, inverse);
                y.as_f32().iter().zip(&want).filter(|(a, b)| a != b).count()
            };
            assert!(differ(Knob::Off) > 0);
            assert_eq!(differ(Knob::CudaRotation), 0, "{way}");
        }
    }

    #[test]
    fn ties_go_to_the_highest_index() {
        let (b, plain) = both(Knob::HighestTies);
        let scores = Host::f32(&[1, 6], vec![1.0, 2.0, 1.0, f32::NEG_INFINITY, 1.0, 0.5]);
        assert_eq!(plain.topk(&scores, 2).as_i32(), [0, 1]);
        assert_eq!(b.topk(&scores, 2).as_i32(), [1, 4]);
        assert_eq!(b.topk(&scores, 6).as_i32(), [0, 1, 2, 4, 5, -1]);
        let scores = Host::f32(&[1, 6], vec![1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
        assert_eq!(plain.candidates(&scores, &[6], 2, 2).as_u8(), [1, 0, 1]);
        assert_eq!(b.candidates(&scores, &[6], 2, 2).as_u8(), [0, 1, 1]);
        let (logits, bias) = (Host::f32(&[1, 4], vec![0.5; 4]), Host::f32(&[4], vec![0.0; 4]));
        let experts = |r: Routing<Host>| {
            let mut e = r.experts.as_i32().to_vec();
            e.sort_unstable();
            e
        };
        assert_eq!(experts(plain.router(&logits, &bias, None, 2, 1.0)), [0, 1]);
        assert_eq!(experts(b.router(&logits, &bias, None, 2, 1.0)), [2, 3]);
    }
}
