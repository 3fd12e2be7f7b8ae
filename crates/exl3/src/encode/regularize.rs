//! From a weight matrix to the one that the trellis quantises (EXL3 specification, section 8).

use super::Encoder;
use super::calibration::{Calibration, rotate_columns, rotate_rows};
use super::search::Search;
use crate::FACTOR;
use crate::rate::TILE;
use crate::trellis::row_column;
use rayon::prelude::*;

/// rms of the 3INST codebook; the format's encoder uses it for all codebooks, the global scale absorbs the rest.
const CODEBOOK_RMS: f32 = 1.243_710_9;
/// Stands in for the scale of an all-zero row or column.
const NO_SCALE: f32 = 0.1;
/// Keeps scales from being exactly zero.
const TINY: f32 = 1e-10;

pub(super) struct Regularized {
    /// (in, out), row-major, in the rotated basis and times the global scale.
    pub(super) weight: Vec<f32>,
    pub(super) su: Vec<f32>,
    pub(super) sv: Vec<f32>,
    /// Output channels that are all zero; their stored scale is 0.
    pub(super) zero: Vec<bool>,
    pub(super) global_scale: f64,
}

pub(super) fn regularize(
    encoder: &Encoder,
    w: &[f32],
    calibration: &Calibration,
    out_signs: &[f32],
) -> Regularized {
    let columns = out_signs.len();
    let mut weight = w.to_vec();
    let rms = column_rms(w, columns);
    let mean = rms.iter().sum::<f64>() / columns as f64;
    let zero: Vec<bool> = rms.iter().map(|r| *r < 1e-30).collect();
    let sv: Vec<f32> = out_signs
        .iter()
        .zip(&rms)
        .map(|(sign, rms)| {
            let scale = match encoder.output_scales {
                _ if *rms < 1e-30 => NO_SCALE,
                true => (rms / mean) as f32,
                false => 1.0,
            };
            sign * scale + TINY
        })
        .collect();
    weight.par_chunks_mut(columns).for_each(|row| row.iter_mut().zip(&sv).for_each(|(w, s)| *w /= s));
    rotate_columns(&mut weight);
    let mut su: Vec<f32> = weight
        .par_chunks_mut(columns)
        .zip(&calibration.signs)
        .map(|(row, sign)| {
            let sum: f64 = row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
            let rms = (sum / columns as f64).sqrt() as f32;
            let scale = sign * if rms == 0.0 { NO_SCALE } else { rms } / -CODEBOOK_RMS + TINY;
            row.iter_mut().for_each(|v| *v /= scale);
            scale
        })
        .collect();
    rotate_rows(&mut weight, columns, FACTOR);
    let global_scale = encoder.global_scale.unwrap_or_else(|| search_scale(encoder, &weight, columns));
    let g = global_scale as f32;
    weight.par_iter_mut().for_each(|v| *v *= g);
    su.iter_mut().for_each(|s| *s /= g);
    Regularized { weight, su, sv, zero, global_scale }
}

fn column_rms(w: &[f32], columns: usize) -> Vec<f64> {
    let mut sums = vec![0f64; columns];
    for row in w.chunks_exact(columns) {
        for (s, v) in sums.iter_mut().zip(row) {
            *s += f64::from(*v) * f64::from(*v);
        }
    }
    let rows = w.len() / columns;
    sums.into_iter().map(|s| (s / rows as f64).sqrt()).collect()
}

/// The tile of rows from 16a and columns from 16b, in ring order.
fn ring(w: &[f32], columns: usize, a: usize, b: usize) -> [f32; TILE] {
    std::array::from_fn(|i| {
        let (row, column) = row_column(i);
        w[(16 * a + row) * columns + 16 * b + column]
    })
}

/// The scale g that minimises the mean of (Q(g t) / g - t)^2 over sample tiles t.
fn search_scale(encoder: &Encoder, w: &[f32], columns: usize) -> f64 {
    let samples = samples(encoder, w, columns);
    let search = encoder.search();
    let error = |g: f64, step: usize| {
        let tiles: Vec<&[f32; TILE]> = samples.iter().step_by(step).collect();
        let squares: Vec<f64> = tiles
            .par_chunks(2)
            .map_init(|| search.scratch(), |scratch, pair| squared_error(&search, pair, g as f32, scratch))
            .collect();
        squares.iter().sum::<f64>() / tiles.len() as f64
    };
    let centre = coarse_minimum(|g| error(g, 3));
    let fine: Vec<(f64, f64)> = (-2..=2)
        .map(|i| centre + 0.075 * f64::from(i))
        .filter(|g| *g > 0.0)
        .map(|g| (error(g, 1), g))
        .collect();
    let at = fine.iter().position(|p| p.1 == best(&fine).1).unwrap_or(0);
    let from = at.saturating_sub(1).min(fine.len().saturating_sub(3));
    parabola(&fine[from..]).max(0.01)
}

/// The point of the grid 0.1, 0.3 .. 1.9 with the least error: downhill from the usual place, as the error has one
/// minimum.
fn coarse_minimum(error: impl Fn(f64) -> f64) -> f64 {
    let grid = |i: usize| 0.1 + 0.2 * i as f64;
    let (mut at, mut least) = (4usize, error(grid(4)));
    for step in [-1isize, 1] {
        while let Some(next) = at.checked_add_signed(step).filter(|i| *i < 10) {
            let e = error(grid(next));
            if e >= least {
                break;
            }
            (at, least) = (next, e);
        }
        if at < 4 {
            break;
        }
    }
    grid(at)
}

fn best(points: &[(f64, f64)]) -> (f64, f64) {
    points.iter().copied().fold((f64::INFINITY, 1.0), |best, p| if p.0 < best.0 { p } else { best })
}

/// Abscissa of the minimum of the parabola through the first three (ordinate, abscissa) points, kept between them.
fn parabola(points: &[(f64, f64)]) -> f64 {
    let &[(y0, x0), (y1, x1), (y2, x2), ..] = points else {
        return best(points).1;
    };
    let (d0, d2) = ((x1 - x0) * (y1 - y2), (x1 - x2) * (y1 - y0));
    let vertex = x1 - 0.5 * ((x1 - x0) * d0 - (x1 - x2) * d2) / (d0 - d2);
    if vertex.is_finite() && d0 != d2 { vertex.clamp(x0, x2) } else { best(points).1 }
}

fn squared_error(search: &Search, pair: &[&[f32; TILE]], g: f32, scratch: &mut super::Scratch) -> f64 {
    let table = search.codebook().table();
    let scaled = [pair[0], pair[pair.len() - 1]].map(|t| t.map(|v| v * g));
    let states = search.pair([&scaled[0], &scaled[1]], scratch);
    let mut sum = 0.0;
    for (tile, states) in pair.iter().zip(&states) {
        for (t, s) in tile.iter().zip(states) {
            let d = f64::from(table[usize::from(*s)] / g - t);
            sum += d * d;
        }
    }
    sum / TILE as f64
}

/// A diagonal band of tiles three wide, and the tiles of highest and lowest rms; scaled for what LDLQ's feedback adds.
fn samples(encoder: &Encoder, w: &[f32], columns: usize) -> Vec<[f32; TILE]> {
    let (high, wide) = (w.len() / columns / 16, columns / 16);
    let mut chosen: Vec<(usize, usize)> =
        (0..high.max(wide)).flat_map(|i| (0..3).map(move |d| (i % high, (i + d) % wide))).collect();
    let extremes = (chosen.len() / 16).max(8).min(high * wide / 4);
    let mut energy: Vec<(f64, usize)> = (0..high * wide)
        .into_par_iter()
        .map(|t| {
            let tile = ring(w, columns, t / wide, t % wide);
            (tile.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>(), t)
        })
        .collect();
    energy.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let (low, top) = (energy.iter().take(extremes), energy.iter().rev().take(extremes));
    chosen.extend(top.chain(low).map(|(_, t)| (t / wide, t % wide)));
    let drift = match encoder.rate.half_bits() {
        2 => 1.08,
        3 => 1.035,
        4 => 1.018,
        5 => 1.009,
        6 => 1.004,
        _ => 1.0,
    };
    chosen.into_iter().map(|(a, b)| ring(w, columns, a, b).map(|v| v * drift)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coarse_minimum_is_that_of_the_whole_grid() {
        for lowest in 0..10 {
            let at = 0.1 + 0.2 * f64::from(lowest);
            for off in [-0.09, 0.0, 0.09] {
                let found = coarse_minimum(|g| (g - at - off) * (g - at - off));
                assert!((found - at).abs() < 1e-12, "{found} is not {at}");
            }
        }
    }

    #[test]
    fn parabola_finds_the_vertex() {
        let f = |x: f64| 3.0 * (x - 0.83) * (x - 0.83) + 0.2;
        let points = [0.7, 0.775, 0.85].map(|x| (f(x), x));
        assert!((parabola(&points) - 0.83).abs() < 1e-12);
        assert_eq!(parabola(&[(1.0, 0.5), (1.0, 0.6), (1.0, 0.7)]), 0.5);
        assert_eq!(parabola(&[(2.0, 0.5), (1.0, 0.6)]), 0.6);
    }
}
