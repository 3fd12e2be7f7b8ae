//! Named bin flips: cached elements so near a rounding boundary that single precision can't tell the side.
//!
//! In `exact` numerics only the cache quantisers round. Two correct implementations differ there by 1e-7 until an
//! element falls on the other side of a boundary, and then by a quantisation step. [`Bins`] sees the values before they
//! are quantised, lists those at a boundary, and can push chosen ones across, which proves what a difference came from.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use numerics::quantise;
use ops::{Backend, Host};
use serde::{Deserialize, Serialize};

/// A cached element at a rounding boundary.
#[derive(Clone, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct Element {
    /// `store_window`, `publish_kv`, `publish_key` or `quantise_index_query`.
    pub operator: String,
    /// Which call of that operator since the last reset, from 0.
    pub call: usize,
    /// Row of the call.
    pub row: usize,
    /// Element of the row.
    pub column: usize,
    /// Relative distance to the boundary.
    pub gap: f64,
}

#[derive(Default)]
struct Log {
    calls: BTreeMap<&'static str, usize>,
    near: Vec<Element>,
    crossed: Vec<Element>,
}

/// A backend that watches the quantisers of another.
pub struct Bins<B> {
    inner: B,
    /// Distance to a boundary, as a share of the largest element of the block, under which an element is listed.
    reach: f64,
    log: Mutex<Log>,
}

impl<B: Backend> Bins<B> {
    /// Watches `inner` for elements within `reach` of a boundary, as a share of the largest element of their block.
    pub fn new(inner: B, reach: f64) -> Self {
        Self { inner, reach, log: Mutex::default() }
    }

    /// Forgets the calls and sets the elements to push across in the next run.
    pub fn reset(&self, crossed: Vec<Element>) {
        *self.lock() = Log { crossed, ..Log::default() };
    }

    /// Elements at a boundary since the last reset.
    pub fn near(&self) -> Vec<Element> {
        self.lock().near.clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists what is near a boundary in `x` and pushes the chosen elements across.
    fn watch(&self, operator: &'static str, x: &B::Buf, grid: Grid) -> B::Buf {
        // A device that can't read its own tensor fails in the step that follows.
        let Ok(host) = self.inner.read(x) else { return x.clone() };
        let mut log = self.lock();
        let counter = log.calls.entry(operator).or_default();
        let call = *counter;
        *counter += 1;
        for r in 0..host.rows() {
            for (column, (gap, share)) in gaps(host.row(r), grid).into_iter().enumerate() {
                // A sum's error is a share of what was summed, not of what is left of it.
                if gap.abs() * share > self.reach {
                    continue;
                }
                // A tie lies on both sides: which one it was rounded to is not asked, both are listed.
                let sides: &[f64] = if gap == 0.0 { &[0.0, -0.0] } else { &[gap] };
                for gap in sides {
                    let operator = operator.to_owned();
                    log.near.push(Element { operator, call, row: r, column, gap: *gap });
                }
            }
        }
        let moved: Vec<&Element> =
            log.crossed.iter().filter(|e| e.operator == operator && e.call == call).collect();
        if moved.is_empty() {
            return x.clone();
        }
        let (mut values, width) = (host.as_f32().to_vec(), host.width());
        for e in moved {
            // Just past the boundary: the gap's sign says on which side it lies.
            let v = &mut values[e.row * width + e.column];
            *v *= 1.0 + (e.gap + e.gap.signum() * 3e-7) as f32;
        }
        self.inner.upload(&Host::f32(host.shape(), values)).unwrap_or_else(|_| x.clone())
    }
}

/// A cache's rounding grid.
#[derive(Clone, Copy)]
enum Grid {
    /// E4M3 with a power-of-two scale per 32.
    Fp8,
    /// E2M1 with a power-of-two scale per 32.
    Fp4,
    /// E2M1 with an E4M3 scale per 16.
    Kv,
}

/// Relative signed distance of every element to the nearest boundary of its grid, (boundary - |x|) / |x|, and the
/// element's share of the largest in its block.
fn gaps(row: &[f32], grid: Grid) -> Vec<(f64, f64)> {
    let block = if matches!(grid, Grid::Kv) { 16 } else { 32 };
    row.chunks(block)
        .flat_map(|chunk| {
            let amax = chunk.iter().fold(0.0f32, |a, v| a.max(v.abs()));
            let scale = match grid {
                Grid::Fp8 => f64::from(quantise::pow2(quantise::fp8_exponent(amax))),
                Grid::Fp4 => f64::from(quantise::pow2(quantise::fp4_exponent(amax))),
                Grid::Kv => {
                    let mut codes = [0; 16];
                    let scale = quantise::fp4_e4m3_block(chunk, &mut codes[..chunk.len()]);
                    f64::from(numerics::e4m3::decode(scale))
                }
            };
            chunk.iter().map(move |v| {
                let m = f64::from(v.abs()) / scale;
                if m == 0.0 {
                    return (f64::INFINITY, 1.0);
                }
                let share = f64::from(v.abs()) / f64::from(amax);
                let gap = match grid {
                    Grid::Fp8 => (fp8_boundary(m) - m) / m,
                    _ => (fp4_boundary(m) - m) / m,
                };
                // The largest element of a KV block also decides the block's E4M3 scale.
                let s = f64::from(amax) / 6.0;
                let scale_gap = (fp8_boundary(s) - s) / s;
                let decides = matches!(grid, Grid::Kv) && v.abs() == amax && s >= 2f64.powi(-9);
                (if decides && scale_gap.abs() < gap.abs() { scale_gap } else { gap }, share)
            })
        })
        .collect()
}

/// The point between two E4M3 values that is nearest to m.
fn fp8_boundary(m: f64) -> f64 {
    let step = (m.max(2f64.powi(-6)).log2().floor() - 3.0).exp2();
    ((m / step).floor() + 0.5) * step
}

/// The point between two E2M1 values that is nearest to m.
fn fp4_boundary(m: f64) -> f64 {
    let nearest = |a: &f64, b: &f64| (a - m).abs().total_cmp(&(b - m).abs());
    [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0].into_iter().min_by(nearest).unwrap_or(0.25)
}

impl<B: Backend> Backend for Bins<B> {
    type Buf = B::Buf;
    type Mat = B::Mat;
    type Experts = B::Experts;

    ops::delegate_backend!(inner: plumbing embed replicate rmsnorm linear grouped_linear argmax rope ring_write
        pool_pairs index_scores candidates mask_scores topk sparse_attention router routed_experts shared_expert
        moe_sum hc_mix hc_collapse hc_expand engram_rows engram_gate stream_mean draft_attention markov_bias
        concat_cols);

    fn store_window(&self, kv: &B::Buf) -> B::Buf {
        self.inner.store_window(&self.watch("store_window", kv, Grid::Fp8))
    }

    fn publish_kv(&self, cache: &mut B::Buf, latent: &B::Buf, first: usize) {
        self.inner.publish_kv(cache, &self.watch("publish_kv", latent, Grid::Kv), first);
    }

    fn publish_key(&self, cache: &mut B::Buf, key: &B::Buf, first: usize) {
        self.inner.publish_key(cache, &self.watch("publish_key", key, Grid::Fp4), first);
    }

    fn quantise_index_query(&self, q: &B::Buf) -> B::Buf {
        self.inner.quantise_index_query(&self.watch("quantise_index_query", q, Grid::Fp4))
    }
}

#[cfg(test)]
mod tests {
    use numerics::{e4m3, quantise};
    use ops::{Mode, Reference};

    use super::*;

    /// What a row is stored as when the `at`-th listed element is pushed across.
    fn stored(row: &[f32], at: Option<usize>) -> Vec<u8> {
        let bins = Bins::new(Reference::new(Mode::Exact), 1e-6);
        let x = Host::f32(&[1, row.len()], row.to_vec());
        let plain = bins.store_window(&x);
        let near = bins.near();
        let Some(at) = at else { return plain.as_u8().to_vec() };
        bins.reset(vec![near[at].clone()]);
        bins.store_window(&x).as_u8().to_vec()
    }

    /// The trained demo model has a window element that is a tie to the last bit; pushed up only, it never crossed.
    #[test]
    fn a_tie_is_pushed_to_either_side() {
        // The largest element makes the scale 2^-8, and 152 lies between the codes of 144 and 160.
        let mut row = vec![0.25f32; 32];
        (row[3], row[7]) = (1.125, 152.0 / 256.0);
        assert_eq!(quantise::pow2(quantise::fp8_exponent(1.125)), 2f32.powi(-8));
        let code = |bytes: &[u8]| e4m3::decode(bytes[7]);
        assert_eq!(code(&stored(&row, None)), 160.0, "to the even code");
        assert_eq!(code(&stored(&row, Some(0))), 160.0);
        assert_eq!(code(&stored(&row, Some(1))), 144.0);
        // One unit below the tie there is one side to go to.
        row[7] = f32::from_bits(row[7].to_bits() - 1);
        assert_eq!(code(&stored(&row, None)), 144.0);
        assert_eq!(code(&stored(&row, Some(0))), 160.0);
    }
}
