//! What is known about a layer's inputs, factored once for all matrices with the same input (EXL3 specification,
//! sections 8.1, 8.2 and 9.1, 9.2).

use super::matrix;
use crate::hadamard::{BLOCK, FACTOR, butterflies};
use crate::{Error, hadamard_f64};
use rayon::prelude::*;

/// Share of the mean diagonal that is added to the Hessian.
const DAMPING: f64 = 0.025;
/// A Hessian with a smaller mean diagonal carries no information.
const EMPTY: f64 = 1e-20;
/// Attempts to factor, each after the first with more damping.
const ATTEMPTS: usize = 11;

/// Input signs, and the damped Hessian with its block-16 LDL factor if calibration data gave one.
pub struct Calibration {
    pub(super) signs: Vec<f32>,
    pub(super) hessian: Option<Hessian>,
}

pub(super) struct Hessian {
    /// H + damping, in the original basis, (in, in).
    pub(super) damped: Vec<f32>,
    /// What was added to the diagonal.
    pub(super) added: f32,
    /// The factor in the rotated basis.
    pub(super) factor: Factor,
}

/// L of a block-16 LDL factorisation without its identity diagonal: strictly block-lower.
pub(super) struct Factor {
    blocks: usize,
    /// For each block column, from the block below the diagonal downwards: 16x16, row-major.
    packed: Vec<[f32; 256]>,
}

impl Factor {
    /// The blocks L[J, column] for J = column + 1, column + 2, ...
    pub(super) fn column(&self, column: usize) -> &[[f32; 256]] {
        let start = column * (2 * self.blocks - column - 1) / 2;
        &self.packed[start..start + self.blocks - column - 1]
    }

    /// From a dense, strictly block-lower L (n x n).
    pub(super) fn pack(l: impl Fn(usize, usize) -> f32, n: usize) -> Factor {
        let blocks = n / 16;
        let mut packed = Vec::with_capacity(blocks * (blocks - 1) / 2);
        for column in 0..blocks {
            for row in column + 1..blocks {
                packed.push(std::array::from_fn(|i| l(16 * row + i / 16, 16 * column + i % 16)));
            }
        }
        Factor { blocks, packed }
    }
}

impl Calibration {
    /// No calibration data: every row block is quantised plainly. `in_features` must be a multiple of 128.
    pub fn none(in_features: usize, seed: u64) -> Result<Calibration, Error> {
        Self::with_signs(None, signs(seed, in_features))
    }

    /// `hessian`: mean of x^T x over the calibration rows, (in, in), undamped, symmetric. An empty or non-finite one
    /// counts as none (see [`Calibration::has_hessian`]).
    pub fn new(hessian: &[f32], in_features: usize, seed: u64) -> Result<Calibration, Error> {
        Self::with_signs(Some(hessian), signs(seed, in_features))
    }

    /// As [`Calibration::new`] with given signs (+1 or -1 for each input feature).
    pub fn with_signs(hessian: Option<&[f32]>, signs: Vec<f32>) -> Result<Calibration, Error> {
        let n = signs.len();
        if n == 0 || !n.is_multiple_of(BLOCK) {
            return Err(Error::NotPadded { what: "input features", found: n });
        }
        let hessian = match hessian {
            Some(h) if Some(h.len()) != n.checked_mul(n) => {
                return Err(Error::Length { what: "Hessian", found: h.len(), expected: n.saturating_mul(n) });
            }
            Some(h) => factor(h, &signs)?,
            None => None,
        };
        Ok(Calibration { signs, hessian })
    }

    /// Whether a Hessian guides the quantisation.
    pub fn has_hessian(&self) -> bool {
        self.hessian.is_some()
    }

    /// Input features.
    pub fn in_features(&self) -> usize {
        self.signs.len()
    }
}

fn factor(h: &[f32], signs: &[f32]) -> Result<Option<Hessian>, Error> {
    let n = signs.len();
    let mean = (0..n).map(|i| f64::from(h[i * n + i])).sum::<f64>() / n as f64;
    if mean.is_nan() || mean < EMPTY || !h.par_iter().all(|v| v.is_finite()) {
        return Ok(None);
    }
    let added = (DAMPING * mean) as f32;
    let mut damped = h.to_vec();
    (0..n).for_each(|i| damped[i * n + i] += added);
    for attempt in 0..ATTEMPTS {
        let mut rotated = rotate(&damped, signs);
        let more = attempt as f64 * 2.0 * DAMPING * mean;
        (0..n).for_each(|i| rotated[i * n + i] += more);
        if matrix::cholesky(&mut rotated, n) {
            return Ok(Some(Hessian { damped, added, factor: block_ldl(&mut rotated, n) }));
        }
    }
    Err(Error::Indefinite { features: n })
}

/// P S H S P in f64.
fn rotate(h: &[f32], signs: &[f32]) -> Vec<f64> {
    let n = signs.len();
    let mut out = vec![0f64; n * n];
    out.par_chunks_mut(n).zip(h.par_chunks(n)).zip(signs).for_each(|((out, h), sign)| {
        for (out, (h, s)) in out.iter_mut().zip(h.iter().zip(signs)) {
            *out = f64::from(h * s * sign);
        }
        out.as_chunks_mut::<BLOCK>().0.iter_mut().for_each(hadamard_f64);
    });
    rotate_rows(&mut out, n, 128f64.sqrt().recip());
    out
}

/// P w for a row-major w with rows of `width`: each aligned run of 128 rows is transformed, then scaled.
pub(super) fn rotate_rows<T>(w: &mut [T], width: usize, factor: T)
where
    T: Copy
        + Default
        + Send
        + Sync
        + std::ops::Add<Output = T>
        + std::ops::Sub<Output = T>
        + std::ops::MulAssign,
{
    const WIDE: usize = 16;
    w.par_chunks_mut(BLOCK * width).for_each(|band| {
        let mut block = [[T::default(); BLOCK]; WIDE];
        for from in (0..width).step_by(WIDE) {
            for (i, row) in band.chunks_exact(width).enumerate() {
                for c in 0..WIDE {
                    block[c][i] = row[from + c];
                }
            }
            block.iter_mut().for_each(butterflies);
            for (i, row) in band.chunks_exact_mut(width).enumerate() {
                for c in 0..WIDE {
                    row[from + c] = block[c][i];
                    row[from + c] *= factor;
                }
            }
        }
    });
}

/// w P for a row-major w in f32.
pub(super) fn rotate_columns(w: &mut [f32]) {
    w.par_chunks_mut(BLOCK).for_each(|block| {
        if let Some(block) = block.first_chunk_mut::<BLOCK>() {
            butterflies(block);
            block.iter_mut().for_each(|v| *v *= FACTOR);
        }
    });
}

/// L[:, b] = C[:, b] C[b, b]^-1 for every block column b of the Cholesky factor `c`.
fn block_ldl(c: &mut [f64], n: usize) -> Factor {
    let corners: Vec<f64> = (0..n).flat_map(|i| c[i * n + i / 16 * 16..][..16].to_vec()).collect();
    c.par_chunks_mut(n).enumerate().for_each(|(i, row)| {
        for column in 0..i / 16 {
            let x = &mut row[16 * column..][..16];
            let corner = &corners[256 * column..][..256];
            for j in (0..16).rev() {
                x[j] /= corner[16 * j + j];
                for p in 0..j {
                    x[p] -= x[j] * corner[16 * j + p];
                }
            }
        }
    });
    Factor::pack(|i, j| c[i * n + j] as f32, n)
}

/// `count` signs, +1 or -1, from a counter generator: the same on every machine.
pub fn signs(seed: u64, count: usize) -> Vec<f32> {
    let mix = |mut z: u64| {
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    };
    let start = mix(seed.wrapping_add(0x9E37_79B9_7F4A_7C15));
    (1..=count as u64)
        .map(|i| mix(start.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15))))
        .map(|z| if z >> 63 == 1 { -1.0 } else { 1.0 })
        .collect()
}
