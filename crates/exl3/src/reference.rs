//! The oracle: plain scalar decoding and multiplication, readable next to the specification (sections 4 to 6).

use crate::hadamard::{BLOCK, FACTOR, butterflies, hadamard_f64};
use crate::rate::TILE;
use crate::trellis::row_column;
use crate::{Arithmetic, Error, Linear, rotate_input};
use half::f16;
use std::ops::Range;

/// What: the decoded trellis in the rotated basis, (in, out) row-major, every value an fp16.
pub fn inner(linear: &Linear<'_>) -> Vec<f32> {
    inner_columns(linear, 0..linear.out_features() / 16)
}

/// As [`inner`], of the tile columns `tiles` alone.
fn inner_columns(linear: &Linear<'_>, tiles: Range<usize>) -> Vec<f32> {
    let (rows, columns) = (linear.in_features(), 16 * tiles.len());
    let table = linear.codebook().table();
    let mut inner = vec![0.0; rows * columns];
    for a in 0..rows / 16 {
        for (b, tile) in tiles.clone().enumerate() {
            let states = linear.trellis().states(a, tile);
            for i in 0..TILE {
                let (row, column) = row_column(i);
                inner[(16 * a + row) * columns + 16 * b + column] = table[usize::from(states[i])];
            }
        }
    }
    inner
}

/// The whole W (in, out), row-major: computed in f64 and rounded once to f32.
pub fn weight(linear: &Linear<'_>) -> Vec<f32> {
    columns(linear, 0..linear.out_features())
}

/// The output columns 128 `band` to 128 `band` + 127 of W, (in, 128) row-major, equal to those of [`weight`].
///
/// # Panics
/// If there is no such band.
pub fn weight_band(linear: &Linear<'_>, band: usize) -> Vec<f32> {
    columns(linear, BLOCK * band..BLOCK * (band + 1))
}

fn columns(linear: &Linear<'_>, wanted: Range<usize>) -> Vec<f32> {
    let (rows, columns) = (linear.in_features(), wanted.len());
    let tiles = wanted.start / 16..wanted.end / 16;
    let mut w: Vec<f64> = inner_columns(linear, tiles).into_iter().map(f64::from).collect();
    rotate_rows(&mut w, columns, hadamard_f64);
    let (suh, svh) = (linear.suh_f32(), &linear.svh_f32()[wanted]);
    for row in 0..rows {
        for block in w[row * columns..][..columns].as_chunks_mut::<BLOCK>().0 {
            hadamard_f64(block);
        }
        for column in 0..columns {
            w[row * columns + column] *= f64::from(suh[row]) * f64::from(svh[column]);
        }
    }
    w.into_iter().map(|v| v as f32).collect()
}

/// The whole W (in, out) in the op order of exllamav3's `get_weight_tensor` (section 6.4), rounded to fp16 at each step.
pub fn weight_source(linear: &Linear<'_>) -> Vec<f16> {
    let (rows, columns) = (linear.in_features(), linear.out_features());
    let round = |v: f32| f16::from_f32(v).to_f32();
    let rounded = |block: &mut [f32; BLOCK]| {
        butterflies(block);
        for v in block {
            *v = round(*v * FACTOR);
        }
    };
    let mut w = inner(linear);
    rotate_rows(&mut w, columns, rounded);
    let (suh, svh) = (linear.suh_f32(), linear.svh_f32());
    let mut out = Vec::with_capacity(w.len());
    for row in 0..rows {
        for (block, svh) in
            w[row * columns..][..columns].as_chunks_mut::<BLOCK>().0.iter_mut().zip(svh.chunks(BLOCK))
        {
            for v in block.iter_mut() {
                *v = round(*v * suh[row]);
            }
            rounded(block);
            out.extend(block.iter().zip(svh).map(|(v, s)| f16::from_f32(v * s)));
        }
    }
    out
}

/// Applies `transform` to each aligned run of 128 rows of every column.
fn rotate_rows<T: Copy + Default>(w: &mut [T], columns: usize, transform: impl Fn(&mut [T; BLOCK])) {
    let mut block = [T::default(); BLOCK];
    for band in w.chunks_exact_mut(BLOCK * columns) {
        for column in 0..columns {
            for i in 0..BLOCK {
                block[i] = band[i * columns + column];
            }
            transform(&mut block);
            for i in 0..BLOCK {
                band[i * columns + column] = block[i];
            }
        }
    }
}

/// y = x W for `x` (rows, in), row-major. `Exact` is f64 rounded once to f32. `Source` rounds x and the rotated input
/// to fp16 as exllamav3 does and carries the sums in f64: the centre of every f32 summation order.
pub fn linear(linear: &Linear<'_>, x: &[f32], arithmetic: Arithmetic) -> Result<Vec<f32>, Error> {
    let (features, columns) = (linear.in_features(), linear.out_features());
    let mut xh = vec![0f32; x.len()];
    rotate_input(x, linear.suh(), arithmetic, &mut xh)?;
    let mut xh: Vec<f64> = xh.into_iter().map(f64::from).collect();
    if arithmetic == Arithmetic::Exact {
        let suh = linear.suh_f32();
        for (i, v) in xh.iter_mut().enumerate() {
            *v = f64::from(x[i]) * f64::from(suh[i % features]);
        }
        xh.as_chunks_mut::<BLOCK>().0.iter_mut().for_each(hadamard_f64);
    }
    let inner = inner(linear);
    let svh = linear.svh_f32();
    let mut y = Vec::with_capacity(x.len() / features * columns);
    for xh in xh.chunks_exact(features) {
        let mut z = vec![0f64; columns];
        for (x, w) in xh.iter().zip(inner.chunks_exact(columns)) {
            for (z, w) in z.iter_mut().zip(w) {
                *z += x * f64::from(*w);
            }
        }
        z.as_chunks_mut::<BLOCK>().0.iter_mut().for_each(hadamard_f64);
        y.extend(z.iter().zip(&svh).map(|(z, s)| (z * f64::from(*s)) as f32));
    }
    Ok(y)
}
