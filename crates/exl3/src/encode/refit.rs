//! Least-squares refit of the scales after quantisation, and the error that remains (EXL3 specification, section 10).

use super::calibration::{Calibration, rotate_columns, rotate_rows};
use super::matrix;
use crate::FACTOR;
use half::f16;
use rayon::prelude::*;

/// Share of the mean diagonal added to the system of the input scales.
const RIDGE: f64 = 1e-6;

/// What is being refitted: the original W, and What with both rotations but without scales.
pub(super) struct Refit<'a> {
    w: &'a [f32],
    columns: usize,
    calibration: &'a Calibration,
    /// H W (W itself without a Hessian).
    hw: Vec<f32>,
    /// P What P.
    rotated: Vec<f32>,
}

impl<'a> Refit<'a> {
    /// `inner` is What, decoded.
    pub(super) fn new(
        w: &'a [f32],
        columns: usize,
        calibration: &'a Calibration,
        inner: Vec<f32>,
    ) -> Refit<'a> {
        let mut rotated = inner;
        rotate_columns(&mut rotated);
        rotate_rows(&mut rotated, columns, FACTOR);
        Refit { w, columns, calibration, hw: weigh(calibration, w), rotated }
    }

    fn scaled(&self, su: &[f32], sv: &[f32]) -> Vec<f32> {
        let mut q = self.rotated.clone();
        q.par_chunks_mut(self.columns).zip(su).for_each(|(row, su)| {
            row.iter_mut().zip(sv).for_each(|(q, sv)| *q *= su * sv);
        });
        q
    }

    /// One round: the output scales, then the input scales.
    pub(super) fn round(&self, su: &mut [f32], sv: &mut [f32]) {
        let mut q = self.scaled(su, sv);
        let hq = weigh(self.calibration, &q);
        let (cross, own) = (self.column_dots(&q, &self.hw), self.column_dots(&q, &hq));
        let factors: Vec<f32> = cross.iter().zip(&own).map(|(c, o)| usable(c / o)).collect();
        sv.iter_mut().zip(&factors).for_each(|(s, f)| *s *= f);
        q.par_chunks_mut(self.columns)
            .for_each(|row| row.iter_mut().zip(&factors).for_each(|(q, f)| *q *= f));
        let right: Vec<f64> = q
            .par_chunks(self.columns)
            .zip(self.hw.par_chunks(self.columns))
            .map(|(q, hw)| dot(q, hw))
            .collect();
        let factors = match &self.calibration.hessian {
            Some(hessian) => solve_rows(&q, self.columns, &hessian.damped, right),
            None => {
                let own = q.par_chunks(self.columns).map(|q| dot(q, q)).collect::<Vec<_>>();
                right.iter().zip(own).map(|(r, o)| usable(r / o)).collect()
            }
        };
        su.iter_mut().zip(factors).for_each(|(s, f)| *s *= f);
    }

    fn column_dots(&self, a: &[f32], b: &[f32]) -> Vec<f64> {
        let mut sums = vec![0f64; self.columns];
        for (a, b) in a.chunks_exact(self.columns).zip(b.chunks_exact(self.columns)) {
            for (s, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
                *s += f64::from(*a) * f64::from(*b);
            }
        }
        sums
    }

    /// tr((W - Q)^T H (W - Q)) / tr(W^T H W) with the undamped H and the scales as stored; 0 for W = 0.
    pub(super) fn proxy_error(&self, su: &[f16], sv: &[f16]) -> f64 {
        let wide = |s: &[f16]| s.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
        let q = self.scaled(&wide(su), &wide(sv));
        let difference: Vec<f32> = self.w.par_iter().zip(&q).map(|(w, q)| w - q).collect();
        let weighed = weigh(self.calibration, &difference);
        let added = self.calibration.hessian.as_ref().map_or(0.0, |h| f64::from(h.added));
        let form = |v: &[f32], hv: &[f32]| dot_all(v, hv, self.columns) - added * dot_all(v, v, self.columns);
        let (error, whole) = (form(&difference, &weighed), form(self.w, &self.hw));
        if whole > 0.0 { error / whole } else { 0.0 }
    }
}

/// H v with the damped Hessian, or v.
fn weigh(calibration: &Calibration, v: &[f32]) -> Vec<f32> {
    match &calibration.hessian {
        Some(hessian) => matrix::multiply(&hessian.damped, v, calibration.signs.len()),
        None => v.to_vec(),
    }
}

/// r of ((Q Q^T) o H + ridge) r = right.
fn solve_rows(q: &[f32], columns: usize, damped: &[f32], mut right: Vec<f64>) -> Vec<f32> {
    let n = right.len();
    let gram = matrix::gram(q, columns);
    let mut system: Vec<f64> =
        gram.par_iter().zip(damped).map(|(g, h)| f64::from(*g) * f64::from(*h)).collect();
    drop(gram);
    let ridge = RIDGE * (0..n).map(|i| system[i * n + i]).sum::<f64>() / n as f64;
    (0..n).for_each(|i| system[i * n + i] += ridge);
    if !matrix::cholesky(&mut system, n) {
        return vec![1.0; n];
    }
    matrix::solve(&system, &mut right);
    right.into_iter().map(usable).collect()
}

/// A factor for a scale: 1 where the fit says nothing sensible.
fn usable(factor: f64) -> f32 {
    if factor.is_finite() && factor > 0.0 { factor as f32 } else { 1.0 }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// As [`dot`], row by row in a fixed order.
fn dot_all(a: &[f32], b: &[f32], width: usize) -> f64 {
    let rows: Vec<f64> = a.par_chunks(width).zip(b.par_chunks(width)).map(|(a, b)| dot(a, b)).collect();
    rows.iter().sum()
}
