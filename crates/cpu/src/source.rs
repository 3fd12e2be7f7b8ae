//! Products in the order of the released fp8 and fp4 kernels: the sum of 32 columns first, then the sums of the groups,
//! ascending, in single precision.
//!
//! [`Engine::run`] adds in the order that is fastest and differs from this in one result of ten thousand by a rounding. In
//! mode `source` the order counts: each such result is quantised anew by the layer that reads it.
//!
//! 32 outputs go together, one a lane. Within a group every product and sum is one fused multiply-add, columns ascending;
//! products of two fp8 values are exact in single precision, so the sum of a group errs by a few units of 2^-24 of its
//! largest term, less than the tensor core does.

use checkpoint::Form;
use numerics::{e2m1, e4m3, e8m0};

use crate::{
    Engine, Isa, Job,
    linear::INLINE,
    order::{GROUP, View},
};

/// Outputs that go together.
const OUT: usize = 32;
/// One group of columns of the outputs of a unit, column by column.
type Columns = [[f32; OUT]; GROUP];

/// The values of all codes.
struct Codes {
    fp8: [f32; 256],
    fp4: [f32; 16],
}

impl Codes {
    fn new() -> Self {
        Self {
            fp8: std::array::from_fn(|c| e4m3::decode(c as u8)),
            fp4: std::array::from_fn(|c| e2m1::decode(c as u8)),
        }
    }
}

/// Whether a weight's products have this order.
pub(crate) fn has_order(form: Form) -> bool {
    matches!(form, Form::Fp8Block32 | Form::Fp8Row32 | Form::Fp4Row32)
}

/// Decodes group `g` of rows `o0..o0 + n`; zeros beyond the last row and column.
#[inline(always)]
fn decode(codes: &Codes, v: &View, o0: usize, n: usize, g: usize, out: &mut Columns) {
    let columns = GROUP.min(v.cols - g * GROUP);
    if n < OUT || columns < GROUP {
        *out = [[0.0; OUT]; GROUP];
    }
    for r in 0..n {
        let (row, scale) = (v.row(o0 + r), e8m0::decode(v.scales(o0 + r)[g]));
        if v.form == Form::Fp4Row32 {
            for (k, b) in row[g * GROUP / 2..][..columns / 2].iter().enumerate() {
                out[2 * k][r] = codes.fp4[usize::from(b & 15)] * scale;
                out[2 * k + 1][r] = codes.fp4[usize::from(b >> 4)] * scale;
            }
        } else {
            for (k, b) in row[g * GROUP..][..columns].iter().enumerate() {
                out[k][r] = codes.fp8[usize::from(*b)] * scale;
            }
        }
    }
}

/// Adds the group's products of `R` activation rows, `stride` values apart, to their sums.
#[inline(always)]
fn add<const R: usize>(w: &Columns, x: &[f32], stride: usize, sums: &mut [[f32; OUT]]) {
    let x: [&[f32; GROUP]; R] =
        std::array::from_fn(|i| x[i * stride..].first_chunk().expect("rows are padded to groups"));
    let mut part = [[0.0f32; OUT]; R];
    for (k, w) in w.iter().enumerate() {
        for (part, x) in part.iter_mut().zip(x) {
            for (p, w) in part.iter_mut().zip(w) {
                *p = w.mul_add(x[k], *p);
            }
        }
    }
    for (sums, part) in sums.iter_mut().zip(&part) {
        for (s, p) in sums.iter_mut().zip(part) {
            *s += p;
        }
    }
}

/// Outputs `o0..o0 + n` of a weight for all rows of `x`, rows padded to `stride` values: `sums` is `[rows][OUT]`.
#[inline(always)]
fn outputs<const R: usize>(
    codes: &Codes,
    v: &View,
    o0: usize,
    n: usize,
    x: &[f32],
    stride: usize,
    sums: &mut [[f32; OUT]],
) {
    let mut w = [[0.0; OUT]; GROUP];
    sums.fill([0.0; OUT]);
    for g in 0..v.groups {
        decode(codes, v, o0, n, g, &mut w);
        for (i, sums) in sums.chunks_mut(R).enumerate() {
            let x = &x[i * R * stride + g * GROUP..];
            if sums.len() == R {
                add::<R>(&w, x, stride, sums);
            } else {
                sums.iter_mut().enumerate().for_each(|(r, sum)| {
                    add::<1>(&w, &x[r * stride..], stride, std::slice::from_mut(sum));
                });
            }
        }
    }
}

type Outputs = fn(&Codes, &View, usize, usize, &[f32], usize, &mut [[f32; OUT]]);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    fn avx2_inner(
        c: &Codes,
        v: &View,
        o0: usize,
        n: usize,
        x: &[f32],
        stride: usize,
        sums: &mut [[f32; OUT]],
    ) {
        outputs::<2>(c, v, o0, n, x, stride, sums);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    fn avx512_inner(
        c: &Codes,
        v: &View,
        o0: usize,
        n: usize,
        x: &[f32],
        stride: usize,
        sums: &mut [[f32; OUT]],
    ) {
        outputs::<4>(c, v, o0, n, x, stride, sums);
    }

    pub(super) fn avx2(
        c: &Codes,
        v: &View,
        o0: usize,
        n: usize,
        x: &[f32],
        stride: usize,
        sums: &mut [[f32; OUT]],
    ) {
        // SAFETY: an engine has this instruction set only where the machine does.
        unsafe { avx2_inner(c, v, o0, n, x, stride, sums) }
    }

    pub(super) fn avx512(
        c: &Codes,
        v: &View,
        o0: usize,
        n: usize,
        x: &[f32],
        stride: usize,
        sums: &mut [[f32; OUT]],
    ) {
        // SAFETY: an engine has this instruction set only where the machine does.
        unsafe { avx512_inner(c, v, o0, n, x, stride, sums) }
    }
}

fn kernel(isa: Isa) -> Outputs {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => x86::avx2,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => x86::avx512,
        _ => outputs::<1>,
    }
}

/// The results of a job; units write disjoint parts.
struct Out(*mut f32);
// SAFETY: the units of a run partition the outputs, so no two threads touch one element.
unsafe impl Sync for Out {}

impl Engine {
    /// All products of `jobs` in the order of the released kernels. Panics where a weight has another form than fp8 or fp4,
    /// or a slice not the size that its job names.
    pub fn run_source(&self, jobs: &mut [Job]) {
        if jobs.is_empty() {
            return;
        }
        let codes = Codes::new();
        let kernel = kernel(self.isa());
        // Rows are padded to whole groups; most have them already.
        let padded: Vec<Vec<f32>> = jobs.iter().map(|j| pad(j.x, j.weight.cols())).collect();
        let outs: Vec<Out> = jobs.iter_mut().map(|j| Out(j.y.as_mut_ptr())).collect();
        let mut units = Vec::new();
        for (i, j) in jobs.iter().enumerate() {
            let (out, cols, name) = (j.weight.rows(), j.weight.cols(), j.weight.name());
            assert!(has_order(j.weight.form()), "{name}: {} has no order of its own", j.weight.form().name());
            assert_eq!(j.x.len(), j.rows * cols, "{name}: activations of {} x {cols}", j.rows);
            assert_eq!(j.y.len(), j.rows * out, "{name}: results of {} x {out}", j.rows);
            units.extend((0..out).step_by(OUT).map(|o| (i, o)));
        }
        let one = |u: usize| {
            let (i, o0) = units[u];
            let (j, v) = (&jobs[i], View::new(jobs[i].weight));
            let (n, stride) = (OUT.min(v.rows - o0), v.cols.next_multiple_of(GROUP));
            let x = if padded[i].is_empty() { j.x } else { &padded[i] };
            let mut sums = vec![[0.0; OUT]; j.rows];
            kernel(&codes, &v, o0, n, x, stride, &mut sums);
            for (r, sums) in sums.iter().enumerate() {
                // SAFETY: `y` has `rows * v.rows` elements and these belong to this unit alone.
                let y = unsafe { std::slice::from_raw_parts_mut(outs[i].0.add(r * v.rows + o0), n) };
                // One quiet NaN, whose bits would else depend on the machine.
                y.iter_mut().zip(sums).for_each(|(y, s)| *y = if s.is_nan() { f32::NAN } else { *s });
            }
        };
        let cost: usize = jobs.iter().map(|j| j.weight.rows() * j.weight.cols() * (j.rows + 8) / 50).sum();
        if cost < INLINE {
            (0..units.len()).for_each(one);
        } else {
            self.par_rows(units.len(), one);
        }
    }
}

/// Rows of `cols` values padded with zeros to whole groups; empty where they are whole.
fn pad(x: &[f32], cols: usize) -> Vec<f32> {
    let stride = cols.next_multiple_of(GROUP);
    if stride == cols {
        return Vec::new();
    }
    let mut out = vec![0.0; x.len() / cols * stride];
    out.chunks_mut(stride).zip(x.chunks(cols)).for_each(|(o, x)| o[..cols].copy_from_slice(x));
    out
}

#[cfg(test)]
mod tests {
    use checkpoint::{Bytes, Weight};
    use numerics::generator::{Stream, Tiny};

    use super::*;

    fn weight(form: Form, rows: usize, cols: usize) -> Weight {
        let t = Tiny::new("w", 3, 0.0, 1e-5);
        let s = match form {
            Form::Fp8Block32 => t.fp8_block32(rows, cols),
            Form::Fp8Row32 => t.fp8_row32(rows, cols),
            _ => t.fp4_row32(rows, cols),
        };
        Weight::new("w", form, rows, cols, Bytes::copied(&s.codes), Bytes::copied(&s.scales)).unwrap()
    }

    /// The order itself, written plainly; every instruction set and number of rows gives its bits.
    #[test]
    fn every_instruction_set_sums_groups_of_32_columns_ascending() {
        for form in [Form::Fp8Block32, Form::Fp8Row32, Form::Fp4Row32] {
            for (rows, out, cols) in [(1, 70, 64), (9, 33, 96), (5, 32, 40), (2, 3, 32)] {
                let w = weight(form, out, cols);
                let s = Stream::new("x", 5);
                let x: Vec<f32> = (0..rows * cols)
                    .map(|i| e4m3::decode(e4m3::encode(s.normal(i as u64) * 40.0)) / 64.0)
                    .collect();
                let (mut want, mut row) = (vec![0.0; rows * out], vec![0.0; cols]);
                for o in 0..out {
                    w.decode_row(o, &mut row);
                    for r in 0..rows {
                        want[r * out + o] =
                            row.chunks(32).zip(x[r * cols..][..cols].chunks(32)).fold(0.0, |sum, (w, x)| {
                                sum + w.iter().zip(x).fold(0.0f32, |p, (w, x)| w.mul_add(*x, p))
                            });
                    }
                }
                for isa in Isa::available() {
                    let engine = Engine::new(Some(2), Some(isa)).unwrap();
                    let mut y = vec![f32::NAN; rows * out];
                    engine.run_source(&mut [Job { weight: &w, x: &x, rows, y: &mut y }]);
                    assert_eq!(y, want, "{} {} {rows}x{out}x{cols}", isa.name(), form.name());
                }
            }
        }
    }
}
