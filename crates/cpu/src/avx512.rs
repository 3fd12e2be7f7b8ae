//! AVX-512 kernels: a lane set of `order` is one register.

use std::arch::x86_64::*;

use checkpoint::Form;

use crate::{
    avx2,
    kernels::{Buffer, Kernels, Line, Tile},
    order::{self, GROUP, LANES, Layout, STEP, View},
};

pub(crate) const KERNELS: Kernels =
    Kernels { tile_rows: [6, 4], pack, decode, tile, reduce: avx2::reduce, gemv: Some(gemv) };

/// Weight rows that one pass of `gemv` takes together.
const ROWS: usize = 4;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn pack(x: &[f32], layout: Layout, out: &mut [f32]) -> bool {
    order::pack_row(x, layout, out)
}

/// Decoder of [`STEP`] codes of one row: two groups, even then odd columns.
trait Step {
    /// Bytes of codes of a step.
    const BYTES: usize;

    /// Nothing seen yet.
    unsafe fn new() -> Self;

    /// Decodes `BYTES` bytes at `p`; `s` points to the two groups' scale factors where the form has any, `spill` to two
    /// lines for the decoder's use.
    unsafe fn step(&mut self, p: *const u8, s: *const f32, spill: *mut Line) -> [__m512; 4];

    /// Whether a code was a NaN, which `step` does not decode.
    unsafe fn saw_nan(&self) -> bool {
        false
    }
}

struct F32;

impl Step for F32 {
    const BYTES: usize = 4 * STEP;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn new() -> Self {
        F32
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, _: *const f32, _: *mut Line) -> [__m512; 4] {
        // SAFETY: the caller gives BYTES readable bytes.
        std::array::from_fn(|i| unsafe { _mm512_loadu_ps(p.cast::<f32>().add(16 * i)) })
    }
}

struct Bf16;

impl Step for Bf16 {
    const BYTES: usize = 2 * STEP;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn new() -> Self {
        Bf16
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, _: *const f32, _: *mut Line) -> [__m512; 4] {
        // SAFETY: the caller gives BYTES readable bytes.
        let (a, b) = unsafe { (_mm512_loadu_si512(p.cast()), _mm512_loadu_si512(p.add(64).cast())) };
        let odd = _mm512_set1_epi32(0xffff_0000u32 as i32);
        [
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(a)),
            _mm512_castsi512_ps(_mm512_and_si512(a, odd)),
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(b)),
            _mm512_castsi512_ps(_mm512_and_si512(b, odd)),
        ]
    }
}

/// E4M3 through half precision: sign, a zero bit, exponent and mantissa moved into place give the value times 2^-8,
/// subnormals included. `SCALED` multiplies by the scale factors, which then carry the 2^8.
struct Fp8<const SCALED: bool> {
    largest: __m512i,
}

/// Converts 16 halves in memory: from memory it needs no shuffle port, and a plain load would be forwarded into a
/// register by the compiler.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn halves(p: *const u8) -> __m512 {
    let out: __m512;
    // SAFETY: the caller gives 32 readable bytes; the instruction only reads them.
    unsafe {
        std::arch::asm!("vcvtph2ps {o}, ymmword ptr [{p}]", o = lateout(zmm_reg) out, p = in(reg) p,
            options(pure, readonly, nostack, preserves_flags));
    }
    out
}

impl<const SCALED: bool> Step for Fp8<SCALED> {
    const BYTES: usize = STEP;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn new() -> Self {
        Self { largest: _mm512_setzero_si512() }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, s: *const f32, spill: *mut Line) -> [__m512; 4] {
        // SAFETY: the caller gives BYTES readable bytes, two lines at `spill` and, where SCALED, two factors at `s`.
        unsafe {
            let v = _mm512_loadu_si512(p.cast());
            self.largest = _mm512_max_epu8(self.largest, _mm512_and_si512(v, _mm512_set1_epi8(0x7f)));
            let keep = _mm512_set1_epi16(0xbf80u16 as i16);
            let odd = _mm512_and_si512(_mm512_srai_epi16::<1>(v), keep);
            let even = _mm512_and_si512(_mm512_srai_epi16::<1>(_mm512_slli_epi16::<8>(v)), keep);
            _mm512_store_si512(spill.cast(), even);
            _mm512_store_si512(spill.add(1).cast(), odd);
            let b = spill.cast::<u8>();
            let w = [halves(b), halves(b.add(64)), halves(b.add(32)), halves(b.add(96))];
            if !SCALED {
                return w;
            }
            let (s0, s1) = (_mm512_set1_ps(*s), _mm512_set1_ps(*s.add(1)));
            [
                _mm512_mul_ps(w[0], s0),
                _mm512_mul_ps(w[1], s0),
                _mm512_mul_ps(w[2], s1),
                _mm512_mul_ps(w[3], s1),
            ]
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn saw_nan(&self) -> bool {
        _mm512_cmpeq_epi8_mask(self.largest, _mm512_set1_epi8(0x7f)) != 0
    }
}

/// E2M1 through a table of the 16 values times the scale.
struct Fp4 {
    values: __m512,
}

impl Step for Fp4 {
    const BYTES: usize = STEP / 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn new() -> Self {
        // SAFETY: the table has 16 floats.
        Self { values: unsafe { _mm512_loadu_ps(numerics::e2m1::TABLE.as_ptr()) } }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, s: *const f32, _: *mut Line) -> [__m512; 4] {
        // SAFETY: the caller gives BYTES readable bytes and two factors.
        unsafe {
            let a = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let b = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.add(16).cast()));
            let ta = _mm512_mul_ps(self.values, _mm512_set1_ps(*s));
            let tb = _mm512_mul_ps(self.values, _mm512_set1_ps(*s.add(1)));
            [
                _mm512_permutexvar_ps(a, ta),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(a), ta),
                _mm512_permutexvar_ps(b, tb),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(b), tb),
            ]
        }
    }
}

/// Scale factors of a row in `out` (two per step, zeros beyond the last group): 2^(byte - 127) times 2^`shift`, for
/// bytes of the folding window.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn factors(scales: &[u8], shift: u32, out: &mut [f32]) {
    let (head, rest) = out.split_at_mut(scales.len());
    for (o, s) in head.iter_mut().zip(scales) {
        *o = f32::from_bits((u32::from(*s) + shift) << 23);
    }
    rest.fill(0.0);
}

/// `N` weight rows from `r` times the row `x` (laid out, padded): lanes into `acc`. `s` holds the rows' factors,
/// `s_stride` apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn rows<D: Step, const N: usize>(
    v: &View,
    r: usize,
    x: &[f32],
    s: *const f32,
    s_stride: usize,
    acc: &mut [Line; ROWS],
) -> [bool; ROWS] {
    let mut spill = [Line([0.0; 16]); 2 * ROWS];
    let spill = spill.as_mut_ptr();
    let whole = v.row_bytes / D::BYTES;
    let p = v.row(r).as_ptr();
    let ahead = N * v.row_bytes;
    // SAFETY: every row has `whole * BYTES` bytes of codes and two factors per step, `x` has STEP floats per step
    // and `spill` two lines per row.
    unsafe {
        let mut d: [D; N] = std::array::from_fn(|_| D::new());
        let mut sum = [_mm512_setzero_ps(); N];
        for t in 0..whole {
            let xp = x.as_ptr().add(STEP * t);
            let xs: [__m512; 4] = std::array::from_fn(|i| _mm512_load_ps(xp.add(16 * i)));
            for i in 0..N {
                let q = p.add(i * v.row_bytes + t * D::BYTES);
                for line in 0..D::BYTES.div_ceil(64) {
                    _mm_prefetch::<_MM_HINT_T0>(q.wrapping_add(ahead + 64 * line).cast());
                }
                let w = d[i].step(q, s.add(i * s_stride + 2 * t), spill.add(2 * i));
                for c in 0..4 {
                    sum[i] = _mm512_fmadd_ps(w[c], xs[c], sum[i]);
                }
            }
        }
        let rest = v.row_bytes - whole * D::BYTES;
        if rest > 0 {
            for i in 0..N {
                let mut codes = [0u8; 4 * STEP];
                codes[..rest].copy_from_slice(&v.row(r + i)[whole * D::BYTES..]);
                let w = d[i].step(codes.as_ptr(), s.add(i * s_stride + 2 * whole), spill.add(2 * i));
                for c in 0..4 {
                    let xc = _mm512_load_ps(x.as_ptr().add(STEP * whole + 16 * c));
                    sum[i] = _mm512_fmadd_ps(w[c], xc, sum[i]);
                }
            }
        }
        let mut nan = [false; ROWS];
        for i in 0..N {
            _mm512_store_ps(acc[i].0.as_mut_ptr(), sum[i]);
            nan[i] = d[i].saw_nan();
        }
        nan
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn gemv_form<D: Step>(
    v: &View,
    r: usize,
    x: &[f32],
    shift: Option<u32>,
    factor: &mut [f32],
    out: &mut [f32],
) {
    let stride = 2 * order::padded(v.cols) / STEP;
    for (g, out) in out.chunks_mut(ROWS).enumerate() {
        let r = r + g * ROWS;
        if let Some(shift) = shift {
            for (i, f) in factor.chunks_mut(stride).take(out.len()).enumerate() {
                factors(v.scales(r + i), shift, f);
            }
        }
        let mut acc = [Line([0.0; 16]); ROWS];
        let s = factor.as_ptr();
        // SAFETY: rows r..r + out.len() exist, `x` is padded and `factor` holds their factors.
        let nan = unsafe {
            match out.len() {
                4 => rows::<D, 4>(v, r, x, s, stride, &mut acc),
                3 => rows::<D, 3>(v, r, x, s, stride, &mut acc),
                2 => rows::<D, 2>(v, r, x, s, stride, &mut acc),
                _ => rows::<D, 1>(v, r, x, s, stride, &mut acc),
            }
        };
        // SAFETY: `acc` has a line per output.
        unsafe { avx2::reduce(acc.as_ptr().cast(), out) };
        for (y, nan) in out.iter_mut().zip(nan) {
            if nan {
                *y = f32::NAN;
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn gemv(v: &View, r: usize, x: &[f32], scratch: &mut Buffer, out: &mut [f32]) {
    let k = order::padded(v.cols);
    assert!(x.len() >= k && r + out.len() <= v.rows, "{} rows from {r} of {}", out.len(), v.rows);
    let scratch = scratch.take(k.max(ROWS * 2 * k / STEP));
    // SAFETY: sizes were checked; the factors fill ROWS * 2 per step.
    unsafe {
        match v.form {
            Form::F32 => gemv_form::<F32>(v, r, x, None, scratch, out),
            Form::Bf16 => gemv_form::<Bf16>(v, r, x, None, scratch, out),
            Form::Fp8Block32 => {
                // One scale for 32 rows and 32 columns: scale the activations once instead of every weight.
                let folded = &mut scratch[..k];
                let scales = v.scales(r);
                for ((o, x), s) in folded.chunks_exact_mut(GROUP).zip(x.chunks_exact(GROUP)).zip(scales) {
                    let s = f32::from_bits((u32::from(*s) + 8) << 23);
                    for (o, x) in o.iter_mut().zip(x) {
                        *o = x * s;
                    }
                }
                folded[scales.len() * GROUP..].fill(0.0);
                gemv_form::<Fp8<false>>(v, r, folded, None, &mut [], out);
            }
            Form::Fp8Row32 => gemv_form::<Fp8<true>>(v, r, x, Some(8), scratch, out),
            Form::Fp4Row32 => gemv_form::<Fp4>(v, r, x, Some(0), scratch, out),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn decode_form<D: Step>(v: &View, r: usize, k0: usize, shift: Option<u32>, out: &mut [f32]) {
    let (row, scales) = (v.row(r), v.scales(r));
    if shift.is_some() && !order::scale_window(scales) {
        return v.decode(r, k0, out);
    }
    let mut spill = [Line([0.0; 16]); 2];
    // SAFETY: every step reads its bytes from the row or from the padded copy and writes STEP floats of `out`.
    unsafe {
        let mut d = D::new();
        for (t, o) in out.chunks_exact_mut(STEP).enumerate() {
            let k = k0 + t * STEP;
            let mut s = [0.0f32; 2];
            if let Some(shift) = shift {
                for (s, b) in s.iter_mut().zip(scales.iter().skip(k / GROUP)) {
                    *s = f32::from_bits((u32::from(*b) + shift) << 23);
                }
            }
            let start = k / STEP * D::BYTES;
            let w = if start + D::BYTES <= row.len() {
                d.step(row.as_ptr().add(start), s.as_ptr(), spill.as_mut_ptr())
            } else {
                let mut codes = [0u8; 4 * STEP];
                let rest = &row[start.min(row.len())..];
                codes[..rest.len()].copy_from_slice(rest);
                d.step(codes.as_ptr(), s.as_ptr(), spill.as_mut_ptr())
            };
            for c in 0..4 {
                _mm512_storeu_ps(o.as_mut_ptr().add(16 * c), w[c]);
            }
        }
        if d.saw_nan() {
            v.decode(r, k0, out);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn decode(v: &View, r: usize, k0: usize, out: &mut [f32]) {
    assert!(out.len().is_multiple_of(STEP) && k0.is_multiple_of(STEP), "decode {k0} + {}", out.len());
    // SAFETY: sizes were checked.
    unsafe {
        match v.form {
            Form::F32 => decode_form::<F32>(v, r, k0, None, out),
            Form::Bf16 => decode_form::<Bf16>(v, r, k0, None, out),
            Form::Fp8Block32 | Form::Fp8Row32 => decode_form::<Fp8<true>>(v, r, k0, Some(8), out),
            Form::Fp4Row32 => decode_form::<Fp4>(v, r, k0, Some(0), out),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn tile_mn<const M: usize, const N: usize>(t: &Tile) {
    // SAFETY: the caller gives M and N rows of `steps` lines and 16 lanes per output.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); N]; M];
        if !t.first {
            for i in 0..M {
                for j in 0..N {
                    acc[i][j] = _mm512_loadu_ps(t.acc.add(i * t.acc_stride + j * LANES));
                }
            }
        }
        for s in 0..t.steps {
            let w: [__m512; N] =
                std::array::from_fn(|j| _mm512_loadu_ps(t.w.add(j * t.w_stride + s * LANES)));
            for i in 0..M {
                let x = _mm512_loadu_ps(t.x.add(i * t.x_stride + s * LANES));
                for j in 0..N {
                    acc[i][j] = _mm512_fmadd_ps(w[j], x, acc[i][j]);
                }
            }
        }
        for i in 0..M {
            for j in 0..N {
                _mm512_storeu_ps(t.acc.add(i * t.acc_stride + j * LANES), acc[i][j]);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn tile(t: &Tile, m: usize, n: usize) {
    // SAFETY: as for `tile_mn`.
    unsafe {
        match (m, n) {
            (6, 4) => tile_mn::<6, 4>(t),
            (5, 4) => tile_mn::<5, 4>(t),
            (4, 4) => tile_mn::<4, 4>(t),
            (3, 4) => tile_mn::<3, 4>(t),
            (2, 4) => tile_mn::<2, 4>(t),
            (1, 4) => tile_mn::<1, 4>(t),
            // Fewer than four weight rows are the end of a matrix: one at a time.
            _ => {
                for j in 0..n {
                    let part = Tile { w: t.w.add(j * t.w_stride), acc: t.acc.add(j * LANES), ..*t };
                    match m {
                        6 => tile_mn::<6, 1>(&part),
                        5 => tile_mn::<5, 1>(&part),
                        4 => tile_mn::<4, 1>(&part),
                        3 => tile_mn::<3, 1>(&part),
                        2 => tile_mn::<2, 1>(&part),
                        _ => tile_mn::<1, 1>(&part),
                    }
                }
            }
        }
    }
}
