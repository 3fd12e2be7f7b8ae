//! The figures of two tensors: `a` is judged, `b` is the reference. All sums are in double precision.

use std::collections::BTreeSet;

/// Error of values.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct ValueError {
    /// ‖a-b‖/‖b‖; 0 for equal tensors, infinite where a value is NaN or infinite in one alone.
    pub nrms: f64,
    /// Largest |a-b|.
    pub max_abs: f64,
    /// Cosine of the angle between the tensors; 1 for equal ones.
    pub cosine: f64,
}

/// Error of `a` against `b`; elements that are equal (infinities included) count as no error.
pub fn values(a: &[f32], b: &[f32]) -> ValueError {
    let (mut error, mut bb, mut aa, mut ab, mut max) = (0.0, 0.0, 0.0, 0.0, 0.0f64);
    for (x, y) in a.iter().zip(b) {
        let (x, y) = (f64::from(*x), f64::from(*y));
        if x == y && !y.is_finite() {
            continue;
        }
        let d = x - y;
        if !d.is_finite() {
            return ValueError { nrms: f64::INFINITY, max_abs: f64::INFINITY, cosine: f64::NAN };
        }
        max = max.max(d.abs());
        error += d * d;
        aa += x * x;
        bb += y * y;
        ab += x * y;
    }
    if error == 0.0 {
        return ValueError { nrms: 0.0, max_abs: 0.0, cosine: 1.0 };
    }
    ValueError { nrms: (error / bb).sqrt(), max_abs: max, cosine: ab / (aa * bb).sqrt() }
}

/// Figures of logits: means over rows.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct LogitError {
    /// KL(b ‖ a) in nats: what the reference loses when `a` stands for it.
    pub kl: f64,
    /// KL(a ‖ b) in nats.
    pub kl_back: f64,
    /// Share of rows with the same best token (the lowest id on ties).
    pub top1: f64,
    /// Mean share of the five best tokens that are the same.
    pub top5: f64,
}

/// Figures of rows of `vocab` logits.
pub fn logits(a: &[f32], b: &[f32], vocab: usize) -> LogitError {
    let rows = (b.len() / vocab.max(1)).max(1) as f64;
    let mut sum = LogitError { kl: 0.0, kl_back: 0.0, top1: 0.0, top5: 0.0 };
    for (a, b) in a.chunks_exact(vocab).zip(b.chunks_exact(vocab)) {
        let (la, lb) = (log_softmax(a), log_softmax(b));
        sum.kl += divergence(&lb, &la);
        sum.kl_back += divergence(&la, &lb);
        let (ta, tb) = (ops::indexer::highest(a, 5), ops::indexer::highest(b, 5));
        sum.top1 += f64::from(u8::from(ta.first() == tb.first()));
        sum.top5 += ta.iter().filter(|t| tb.contains(t)).count() as f64 / tb.len().max(1) as f64;
    }
    LogitError {
        kl: sum.kl / rows,
        kl_back: sum.kl_back / rows,
        top1: sum.top1 / rows,
        top5: sum.top5 / rows,
    }
}

fn log_softmax(x: &[f32]) -> Vec<f64> {
    // In double precision from the start: single-precision differences alone would cost a KL of 1e-9.
    let max = f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let log_sum = x.iter().map(|v| (f64::from(*v) - max).exp()).sum::<f64>().ln();
    x.iter().map(|v| f64::from(*v) - max - log_sum).collect()
}

/// Σ p (ln p - ln q), never below 0: rounding of equal rows must not give a negative distance.
fn divergence(p: &[f64], q: &[f64]) -> f64 {
    let sum: f64 = p.iter().zip(q).map(|(p, q)| if p.exp() == 0.0 { 0.0 } else { p.exp() * (p - q) }).sum();
    sum.max(0.0)
}

/// Agreement of choices, row by row.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct ChoiceError {
    /// Rows compared.
    pub rows: usize,
    /// Mean over rows of |A∩B| / max(|A|, |B|); rows that chose nothing in both agree.
    pub overlap: f64,
    /// Rows whose sets differ.
    pub differing: Vec<usize>,
}

/// Compares rows of choices as sets; negative entries are empty places.
pub fn choices(a: &[i64], wa: usize, b: &[i64], wb: usize, rows: usize) -> ChoiceError {
    let set = |v: &[i64], w: usize, r: usize| -> BTreeSet<i64> {
        v[r * w..][..w].iter().copied().filter(|e| *e >= 0).collect()
    };
    let mut out = ChoiceError { rows, ..ChoiceError::default() };
    for r in 0..rows {
        let (x, y) = (set(a, wa, r), set(b, wb, r));
        let most = x.len().max(y.len());
        out.overlap += if most == 0 { 1.0 } else { x.intersection(&y).count() as f64 / most as f64 };
        if x != y {
            out.differing.push(r);
        }
    }
    out.overlap /= rows.max(1) as f64;
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_by_hand() {
        let e = values(&[3.0, 4.0], &[3.0, 5.0]);
        assert!((e.nrms - 1.0 / 34f64.sqrt()).abs() < 1e-15);
        assert_eq!(e.max_abs, 1.0);
        assert!((e.cosine - 29.0 / (25f64 * 34.0).sqrt()).abs() < 1e-15);
        assert_eq!(values(&[f32::NAN], &[1.0]).nrms, f64::INFINITY);
        assert_eq!(values(&[f32::NEG_INFINITY, 1.0], &[f32::NEG_INFINITY, 1.0]).nrms, 0.0);
        assert_eq!(values(&[f32::NEG_INFINITY], &[1.0]).nrms, f64::INFINITY);
        // An error on an all-zero reference has no scale.
        assert_eq!(values(&[1.0], &[0.0]).nrms, f64::INFINITY);
    }

    #[test]
    fn logits_by_hand() {
        // p = (1/2, 1/2) against q = (3/4, 1/4).
        let q = [3f32.ln(), 0.0];
        let e = logits(&q, &[0.0, 0.0], 2);
        let want = 0.5 * (0.5f64 / 0.75).ln() + 0.5 * (0.5f64 / 0.25).ln();
        let back = 0.75 * (0.75f64 / 0.5).ln() + 0.25 * (0.25f64 / 0.5).ln();
        assert!((e.kl - want).abs() < 1e-7 && (e.kl_back - back).abs() < 1e-7, "{e:?}");
        assert_eq!((e.top1, e.top5), (1.0, 1.0));
        let e = logits(&[0.0, 1.0, 9.0, 8.0, 7.0, 6.0, 5.0], &[9.0, 8.0, 7.0, 6.0, 5.0, 0.0, 1.0], 7);
        assert_eq!((e.top1, e.top5), (0.0, 0.6));
    }

    #[test]
    fn choices_are_sets() {
        let e = choices(&[2, 1, -1, 5, 6, 7], 3, &[1, 2, 5, 6], 2, 2);
        assert_eq!(e.differing, [1]);
        assert!((e.overlap - (1.0 + 2.0 / 3.0) / 2.0).abs() < 1e-15);
    }
}
