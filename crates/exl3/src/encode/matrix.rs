//! The dense linear algebra that the encoder needs, blocked and parallel. Every element's sums run in one fixed order, so
//! neither the number of threads nor the instruction set changes a bit.

use crate::Isa;
use rayon::prelude::*;

/// Inner dimension summed in registers before it is added to memory.
const DEPTH: usize = 256;
/// Rows of one parallel task.
const PANEL: usize = 64;
/// Columns of one factorisation step.
const STEP: usize = 128;

/// f32 or f64.
pub(super) trait Real:
    Copy + Default + Send + Sync + PartialOrd + std::ops::AddAssign + std::ops::Mul<Output = Self>
{
    fn fused(self, factor: Self, addend: Self) -> Self;
    fn panel(isa: Isa, work: Panel<'_, Self>);
}

impl Real for f32 {
    #[inline(always)]
    fn fused(self, factor: f32, addend: f32) -> f32 {
        self.mul_add(factor, addend)
    }

    fn panel(isa: Isa, work: Panel<'_, f32>) {
        match isa {
            // SAFETY: callers pass an instruction set that this machine has.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Half | Isa::Avx512 => unsafe { panel_avx512::<f32, 8, 32>(work) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { panel_avx2::<f32, 4, 16>(work) },
            Isa::Portable => panel::<f32, 4, 8>(work),
        }
    }
}

impl Real for f64 {
    #[inline(always)]
    fn fused(self, factor: f64, addend: f64) -> f64 {
        self.mul_add(factor, addend)
    }

    fn panel(isa: Isa, work: Panel<'_, f64>) {
        match isa {
            // SAFETY: callers pass an instruction set that this machine has.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Half | Isa::Avx512 => unsafe { panel_avx512::<f64, 8, 16>(work) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { panel_avx2::<f64, 4, 8>(work) },
            Isa::Portable => panel::<f64, 4, 4>(work),
        }
    }
}

/// `out[.., ..columns] += a b` for some rows; `a` is rows x depth, `b` depth x width, `out` rows x `stride`, row-major.
pub(super) struct Panel<'a, T> {
    a: &'a [T],
    b: &'a [T],
    width: usize,
    columns: usize,
    out: &'a mut [T],
    stride: usize,
}

#[inline(always)]
fn panel<T: Real, const ROWS: usize, const COLUMNS: usize>(work: Panel<'_, T>) {
    let Panel { a, b, width, columns, out, stride } = work;
    let depth = b.len() / width;
    let rows = out.len() / stride;
    assert!(rows % ROWS == 0 && columns % COLUMNS == 0 && a.len() == rows * depth);
    let mut left = vec![T::default(); rows * DEPTH];
    let mut right = vec![T::default(); DEPTH * COLUMNS];
    for from in (0..depth).step_by(DEPTH) {
        let deep = DEPTH.min(depth - from);
        for (r, row) in a.chunks_exact(depth).enumerate() {
            for (p, v) in row[from..from + deep].iter().enumerate() {
                left[r / ROWS * ROWS * deep + p * ROWS + r % ROWS] = *v;
            }
        }
        for column in (0..columns).step_by(COLUMNS) {
            for (p, to) in right.chunks_exact_mut(COLUMNS).take(deep).enumerate() {
                to.copy_from_slice(&b[(from + p) * width + column..][..COLUMNS]);
            }
            for (r, left) in left[..rows * deep].chunks_exact(ROWS * deep).enumerate() {
                let mut sum = [[T::default(); COLUMNS]; ROWS];
                let pairs = left.as_chunks::<ROWS>().0.iter().zip(right.as_chunks::<COLUMNS>().0);
                for (l, r) in pairs {
                    for i in 0..ROWS {
                        for j in 0..COLUMNS {
                            sum[i][j] = l[i].fused(r[j], sum[i][j]);
                        }
                    }
                }
                for (i, sum) in sum.iter().enumerate() {
                    let to = &mut out[(r * ROWS + i) * stride + column..][..COLUMNS];
                    for (to, sum) in to.iter_mut().zip(sum) {
                        *to += *sum;
                    }
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
fn panel_avx512<T: Real, const ROWS: usize, const COLUMNS: usize>(work: Panel<'_, T>) {
    panel::<T, ROWS, COLUMNS>(work);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn panel_avx2<T: Real, const ROWS: usize, const COLUMNS: usize>(work: Panel<'_, T>) {
    panel::<T, ROWS, COLUMNS>(work);
}

/// a b for row-major `a` (n x depth) and `b` (depth x m); n and m are multiples of 128.
pub(super) fn multiply<T: Real>(a: &[T], b: &[T], depth: usize) -> Vec<T> {
    let width = b.len() / depth;
    let mut out = vec![T::default(); a.len() / depth * width];
    out.par_chunks_mut(PANEL * width).zip(a.par_chunks(PANEL * depth)).for_each(|(out, a)| {
        T::panel(Isa::best(), Panel { a, b, width, columns: width, out, stride: width });
    });
    out
}

/// The lower triangle, diagonal included, of a a^T for row-major `a` (n x depth); above it some elements may be missing.
pub(super) fn gram(a: &[f32], depth: usize) -> Vec<f32> {
    let n = a.len() / depth;
    let b = transpose(a, depth);
    let mut out = vec![0.0; n * n];
    out.par_chunks_mut(PANEL * n).zip(a.par_chunks(PANEL * depth)).enumerate().for_each(|(i, (out, a))| {
        let columns = ((i + 1) * PANEL).next_multiple_of(128);
        f32::panel(Isa::best(), Panel { a, b: &b, width: n, columns, out, stride: n });
    });
    out
}

/// Columns become rows; `width` is the length of a row of `a`.
pub(super) fn transpose<T: Real>(a: &[T], width: usize) -> Vec<T> {
    let rows = a.len() / width;
    let mut out = vec![T::default(); a.len()];
    out.par_chunks_mut(rows * 16).enumerate().for_each(|(block, out)| {
        for (r, row) in a.chunks_exact(width).enumerate() {
            for (c, column) in out.chunks_exact_mut(rows).enumerate() {
                column[r] = row[block * 16 + c];
            }
        }
    });
    out
}

/// Replaces the lower triangle of the symmetric `a` (n x n, n a multiple of 128) by its Cholesky factor; false if `a` is
/// not positive definite. The upper triangle is neither read nor meaningful afterwards.
pub(super) fn cholesky(a: &mut [f64], n: usize) -> bool {
    let mut corner = vec![0f64; STEP * STEP];
    for from in (0..n).step_by(STEP) {
        let to = from + STEP;
        // The corner, transposed: row p holds column p of the factor.
        for i in 0..STEP {
            for j in 0..=i {
                corner[j * STEP + i] = a[(from + i) * n + from + j];
            }
        }
        for p in 0..STEP {
            let (done, rest) = corner.split_at_mut((p + 1) * STEP);
            let pivot = &mut done[p * STEP..];
            if !(pivot[p] > 0.0 && pivot[p].is_finite()) {
                return false;
            }
            let root = pivot[p].sqrt();
            pivot[p..].iter_mut().for_each(|v| *v /= root);
            for (i, row) in rest.chunks_exact_mut(STEP).enumerate() {
                let i = p + 1 + i;
                let factor = -pivot[i];
                for j in i..STEP {
                    row[j] = factor.mul_add(pivot[j], row[j]);
                }
            }
        }
        for i in 0..STEP {
            for j in 0..=i {
                a[(from + i) * n + from + j] = corner[j * STEP + i];
            }
        }
        if to == n {
            break;
        }
        let below = &mut a[to * n..];
        below.par_chunks_mut(n).for_each(|row| {
            let row = &mut row[from..to];
            for (p, pivot) in corner.chunks_exact(STEP).enumerate() {
                row[p] /= pivot[p];
                let factor = -row[p];
                for j in p + 1..STEP {
                    row[j] = factor.mul_add(pivot[j], row[j]);
                }
            }
        });
        let solved: Vec<f64> = below.chunks_exact(n).flat_map(|row| &row[from..to]).copied().collect();
        let right = transpose(&solved, STEP);
        let width = n - to;
        below.par_chunks_mut(PANEL * n).enumerate().for_each(|(i, rows)| {
            let first = i * PANEL;
            let a: Vec<f64> = solved[first * STEP..][..rows.len() / n * STEP].iter().map(|v| -v).collect();
            let columns = (first + PANEL).next_multiple_of(128);
            let out = &mut rows[to..];
            strided(Panel { a: &a, b: &right, width, columns, out, stride: n });
        });
    }
    true
}

/// A panel whose last row ends before its stride does.
fn strided(work: Panel<'_, f64>) {
    let rows = work.a.len() / STEP;
    let mut part = vec![0.0; rows * work.columns];
    for (part, out) in part.chunks_exact_mut(work.columns).zip(work.out.chunks(work.stride)) {
        part.copy_from_slice(&out[..work.columns]);
    }
    f64::panel(Isa::best(), Panel { out: &mut part, stride: work.columns, ..work });
    for (part, out) in part.chunks_exact(work.columns).zip(work.out.chunks_mut(work.stride)) {
        out[..work.columns].copy_from_slice(part);
    }
}

/// Solves (l l^T) x = b in place, `l` from [`cholesky`].
pub(super) fn solve(l: &[f64], b: &mut [f64]) {
    let n = b.len();
    for i in 0..n {
        let row = &l[i * n..][..i + 1];
        let sum: f64 = row[..i].iter().zip(&b[..i]).map(|(l, y)| l * y).sum();
        b[i] = (b[i] - sum) / row[i];
    }
    for i in (0..n).rev() {
        let row = &l[i * n..][..i + 1];
        b[i] /= row[i];
        let x = b[i];
        for (y, l) in b[..i].iter_mut().zip(row) {
            *y -= l * x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize) -> Vec<f64> {
        let mut s = 1u64;
        let mut next = || {
            s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (s >> 40) as f64 / f64::from(1 << 23) - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    #[test]
    fn product_is_exact_to_rounding_and_equal_on_every_instruction_set() {
        let (n, depth, m) = (128, 384, 256);
        let (a, b) = (numbers(n * depth), numbers(depth * m));
        let (a32, b32): (Vec<f32>, Vec<f32>) =
            (a.iter().map(|v| *v as f32).collect(), b.iter().map(|v| *v as f32).collect());
        let c = multiply(&a32, &b32, depth);
        for i in 0..n {
            for j in 0..m {
                let want: f64 =
                    (0..depth).map(|p| f64::from(a32[i * depth + p]) * f64::from(b32[p * m + j])).sum();
                // 384 roundings of sums below 32, a random walk of half an ulp (1e-6): 2e-5 is one standard deviation
                assert!((f64::from(c[i * m + j]) - want).abs() < 8e-5);
            }
        }
        for isa in Isa::available() {
            let mut out = vec![0.0; n * m];
            f32::panel(isa, Panel { a: &a32, b: &b32, width: m, columns: m, out: &mut out, stride: m });
            assert!(out == c, "{isa:?}");
        }
        let square = gram(&a32, depth);
        let whole = multiply(&a32, &transpose(&a32, depth), depth);
        assert!((0..n).all(|i| square[i * n..=i * n + i] == whole[i * n..=i * n + i]));
    }

    #[test]
    fn cholesky_solves() {
        let n = 384;
        let a = numbers(n * n);
        let mut spd = multiply(&a, &transpose(&a, n), n);
        (0..n).for_each(|i| spd[i * n + i] += 1.0);
        let x = numbers(n);
        let mut b: Vec<f64> =
            spd.chunks_exact(n).map(|row| row.iter().zip(&x).map(|(a, x)| a * x).sum()).collect();
        let mut l = spd.clone();
        assert!(cholesky(&mut l, n));
        solve(&l, &mut b);
        // condition number about 500, f64
        assert!(b.iter().zip(&x).all(|(b, x)| (b - x).abs() < 1e-10));
        spd[200 * n + 200] = -1.0;
        assert!(!cholesky(&mut spd, n));
    }
}
