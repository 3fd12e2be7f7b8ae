//! How sure a choice was: scores, margins, and the distance of scores from those of a reference.

use checkpoint::{Checkpoint, Weight};

use crate::Result;

/// The router of one layer, in double precision on the host: for margins and score errors, not for routing.
pub struct RouterScores {
    gate: Weight,
    bias: Vec<f32>,
    bias_image: Vec<f32>,
}

impl RouterScores {
    /// The router of backbone layer `l`.
    ///
    /// # Errors
    /// A tensor that is missing.
    pub fn load(checkpoint: &Checkpoint, l: usize) -> Result<Self> {
        let at = |name: &str| checkpoint.weight(&format!("layers.{l}.ffn.gate{name}"));
        Ok(Self { gate: at("")?, bias: at(".bias")?.to_f32(), bias_image: at(".bias_vl")?.to_f32() })
    }

    /// Scores that decide the choice of one row `x [d]`: sqrt(softplus(gate·x)) + bias.
    pub fn biased(&self, x: &[f32], image: bool) -> Vec<f64> {
        let bias = if image { &self.bias_image } else { &self.bias };
        let mut row = vec![0.0; self.gate.cols()];
        (0..self.gate.rows())
            .map(|e| {
                self.gate.decode_row(e, &mut row);
                let logit: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                let score = if logit > 20.0 { logit } else { logit.exp().ln_1p() };
                score.sqrt() + f64::from(bias[e])
            })
            .collect()
    }
}

/// (last kept - first dropped) / standard deviation of the finite scores; +inf where nothing is dropped.
pub fn choice_margin(scores: &[f64], keep: usize) -> f64 {
    let mut order: Vec<f64> = scores.iter().copied().filter(|s| *s > f64::NEG_INFINITY).collect();
    if order.len() <= keep || keep == 0 {
        return f64::INFINITY;
    }
    order.sort_by(|a, b| b.total_cmp(a));
    let gap = order[keep - 1] - order[keep];
    if gap.is_finite() { gap / deviation(scores) } else { f64::INFINITY }
}

/// Root mean square of the difference over the entries that are finite in both, in units of `reference`'s standard
/// deviation; 0 where nothing can be compared.
pub fn score_error(own: &[f64], reference: &[f64]) -> f64 {
    let pairs: Vec<f64> = own
        .iter()
        .zip(reference)
        .filter(|(a, b)| a.is_finite() && b.is_finite())
        .map(|(a, b)| (a - b) * (a - b))
        .collect();
    if pairs.is_empty() {
        return 0.0;
    }
    (pairs.iter().sum::<f64>() / pairs.len() as f64).sqrt() / deviation(reference)
}

/// Population standard deviation of the finite scores, never 0.
pub fn deviation(scores: &[f64]) -> f64 {
    let finite: Vec<f64> = scores.iter().copied().filter(|s| s.is_finite()).collect();
    let n = finite.len().max(1) as f64;
    let mean = finite.iter().sum::<f64>() / n;
    (finite.iter().map(|s| (s - mean) * (s - mean)).sum::<f64>() / n).sqrt().max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn margins_are_in_units_of_the_spread() {
        // Population deviation of {4, 2, 0, -2} is sqrt(5).
        let scores = [4.0, f64::NEG_INFINITY, 2.0, 0.0, -2.0];
        assert_eq!(choice_margin(&scores, 2), 2.0 / 5f64.sqrt());
        assert_eq!(choice_margin(&scores, 4), f64::INFINITY);
        assert_eq!(choice_margin(&[1.0, 1.0, 0.0], 1), 0.0);
        // A block that is always kept has +inf; nothing can push it out.
        assert_eq!(choice_margin(&[f64::INFINITY, 1.0, 0.0], 1), f64::INFINITY);
    }

    #[test]
    fn score_errors_skip_what_is_masked_in_one() {
        let own = [1.0, f64::NEG_INFINITY, 3.0];
        let reference = [1.0, 2.0, 3.5];
        let want = (0.25f64 / 2.0).sqrt() / deviation(&reference);
        assert!((score_error(&own, &reference) - want).abs() < 1e-12);
    }
}
