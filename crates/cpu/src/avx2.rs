//! AVX2 kernels: a lane set of `order` is two registers, lanes 0 to 7 and 8 to 15.

use std::arch::x86_64::*;

use checkpoint::Form;

use crate::{
    kernels::{Buffer, Kernels, Line, Tile},
    order::{self, GROUP, LANES, Layout, STEP, View},
};

pub(crate) const KERNELS: Kernels =
    Kernels { tile_rows: [3, 4], pack, decode, tile, reduce, gemv: Some(gemv) };

/// Weight rows that one pass of `gemv` takes together.
const ROWS: usize = 4;

#[target_feature(enable = "avx2,fma,f16c")]
fn pack(x: &[f32], layout: Layout, out: &mut [f32]) -> bool {
    order::pack_row(x, layout, out)
}

/// Four lane sets: two groups, even then odd columns; each as lanes 0 to 7 and 8 to 15.
type Sets = [[__m256; 2]; 4];

/// Decoder of [`STEP`] codes of one row.
trait Step {
    /// Bytes of codes of a step.
    const BYTES: usize;

    /// Nothing seen yet.
    unsafe fn new() -> Self;

    /// Decodes `BYTES` bytes at `p`; `s` points to the two groups' scale factors where the form has any, `spill` to two
    /// lines for the decoder's use.
    unsafe fn step(&mut self, p: *const u8, s: *const f32, spill: *mut Line) -> Sets;

    /// Whether a code was a NaN, which `step` does not decode.
    unsafe fn saw_nan(&self) -> bool {
        false
    }
}

struct F32;

impl Step for F32 {
    const BYTES: usize = 4 * STEP;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn new() -> Self {
        F32
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, _: *const f32, _: *mut Line) -> Sets {
        let p = p.cast::<f32>();
        // SAFETY: the caller gives BYTES readable bytes.
        std::array::from_fn(|i| unsafe {
            [_mm256_loadu_ps(p.add(16 * i)), _mm256_loadu_ps(p.add(16 * i + 8))]
        })
    }
}

struct Bf16;

impl Step for Bf16 {
    const BYTES: usize = 2 * STEP;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn new() -> Self {
        Bf16
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, _: *const f32, _: *mut Line) -> Sets {
        let high = _mm256_set1_epi32(0xffff_0000u32 as i32);
        // SAFETY: the caller gives BYTES readable bytes.
        let v: [__m256i; 4] = std::array::from_fn(|i| unsafe { _mm256_loadu_si256(p.add(32 * i).cast()) });
        let even = |v| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v));
        let odd = |v| _mm256_castsi256_ps(_mm256_and_si256(v, high));
        [[even(v[0]), even(v[1])], [odd(v[0]), odd(v[1])], [even(v[2]), even(v[3])], [odd(v[2]), odd(v[3])]]
    }
}

/// Converts 8 halves in memory: from memory it needs no shuffle port, and a plain load would be forwarded into a
/// register by the compiler.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn halves(p: *const u8) -> __m256 {
    let out: __m256;
    // SAFETY: the caller gives 16 readable bytes; the instruction only reads them.
    unsafe {
        std::arch::asm!("vcvtph2ps {o}, xmmword ptr [{p}]", o = lateout(ymm_reg) out, p = in(reg) p,
            options(pure, readonly, nostack, preserves_flags));
    }
    out
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scaled(w: Sets, s: *const f32) -> Sets {
    // SAFETY: the caller gives two factors.
    let s = unsafe { [_mm256_set1_ps(*s), _mm256_set1_ps(*s.add(1))] };
    std::array::from_fn(|i| [_mm256_mul_ps(w[i][0], s[i / 2]), _mm256_mul_ps(w[i][1], s[i / 2])])
}

/// E4M3 through half precision: sign, a zero bit, exponent and mantissa moved into place give the value times 2^-8,
/// subnormals included. `SCALED` multiplies by the scale factors, which then carry the 2^8.
struct Fp8<const SCALED: bool> {
    largest: __m256i,
}

impl<const SCALED: bool> Step for Fp8<SCALED> {
    const BYTES: usize = STEP;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn new() -> Self {
        Self { largest: _mm256_setzero_si256() }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, s: *const f32, spill: *mut Line) -> Sets {
        // SAFETY: the caller gives BYTES readable bytes, two lines at `spill` and, where SCALED, two factors at `s`.
        unsafe {
            let b = spill.cast::<u8>();
            let keep = _mm256_set1_epi16(0xbf80u16 as i16);
            for g in 0..2 {
                let v = _mm256_loadu_si256(p.add(32 * g).cast());
                self.largest = _mm256_max_epu8(self.largest, _mm256_and_si256(v, _mm256_set1_epi8(0x7f)));
                let odd = _mm256_and_si256(_mm256_srai_epi16::<1>(v), keep);
                let even = _mm256_and_si256(_mm256_srai_epi16::<1>(_mm256_slli_epi16::<8>(v)), keep);
                _mm256_store_si256(b.add(64 * g).cast(), even);
                _mm256_store_si256(b.add(64 * g + 32).cast(), odd);
            }
            let mut w = [[_mm256_setzero_ps(); 2]; 4];
            for i in 0..4 {
                w[i] = [halves(b.add(32 * i)), halves(b.add(32 * i + 16))];
            }
            if SCALED { scaled(w, s) } else { w }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn saw_nan(&self) -> bool {
        _mm256_movemask_epi8(_mm256_cmpeq_epi8(self.largest, _mm256_set1_epi8(0x7f))) != 0
    }
}

/// E2M1 through the upper bytes of half-precision values; the lower bytes are zero.
struct Fp4;

const HALF_HIGH: [u8; 16] =
    [0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, 0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6];

impl Step for Fp4 {
    const BYTES: usize = STEP / 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn new() -> Self {
        Fp4
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, s: *const f32, spill: *mut Line) -> Sets {
        // SAFETY: the caller gives BYTES readable bytes, two lines and two factors.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(HALF_HIGH.as_ptr().cast()));
            let v = _mm256_loadu_si256(p.cast());
            let low = _mm256_set1_epi8(0x0f);
            let even = _mm256_shuffle_epi8(table, _mm256_and_si256(v, low));
            let odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(v), low));
            // Each half of a register is a group; unpacking within halves keeps lanes 0 to 7 of both in one register.
            let zero = _mm256_setzero_si256();
            let b = spill.cast::<u8>();
            _mm256_store_si256(b.cast(), _mm256_unpacklo_epi8(zero, even));
            _mm256_store_si256(b.add(32).cast(), _mm256_unpackhi_epi8(zero, even));
            _mm256_store_si256(b.add(64).cast(), _mm256_unpacklo_epi8(zero, odd));
            _mm256_store_si256(b.add(96).cast(), _mm256_unpackhi_epi8(zero, odd));
            let mut w = [[_mm256_setzero_ps(); 2]; 4];
            for i in 0..4 {
                let at = b.add(64 * (i & 1) + 16 * (i >> 1));
                w[i] = [halves(at), halves(at.add(32))];
            }
            scaled(w, s)
        }
    }
}

/// Scale factors of a row in `out` (two per step, zeros beyond the last group): 2^(byte - 127) times 2^`shift`, for
/// bytes of the folding window.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
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
        let mut sum = [[_mm256_setzero_ps(); 2]; N];
        for t in 0..whole {
            let xp = x.as_ptr().add(STEP * t);
            for i in 0..N {
                let q = p.add(i * v.row_bytes + t * D::BYTES);
                for line in 0..D::BYTES.div_ceil(64) {
                    _mm_prefetch::<_MM_HINT_T0>(q.wrapping_add(ahead + 64 * line).cast());
                }
                let w = d[i].step(q, s.add(i * s_stride + 2 * t), spill.add(2 * i));
                for c in 0..4 {
                    for h in 0..2 {
                        let xc = _mm256_load_ps(xp.add(16 * c + 8 * h));
                        sum[i][h] = _mm256_fmadd_ps(w[c][h], xc, sum[i][h]);
                    }
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
                    for h in 0..2 {
                        let xc = _mm256_load_ps(x.as_ptr().add(STEP * whole + 16 * c + 8 * h));
                        sum[i][h] = _mm256_fmadd_ps(w[c][h], xc, sum[i][h]);
                    }
                }
            }
        }
        let mut nan = [false; ROWS];
        for i in 0..N {
            _mm256_store_ps(acc[i].0.as_mut_ptr(), sum[i][0]);
            _mm256_store_ps(acc[i].0.as_mut_ptr().add(8), sum[i][1]);
            nan[i] = d[i].saw_nan();
        }
        nan
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
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
        // SAFETY: rows r..r + out.len() exist, `x` is padded and `factor` holds their factors; `acc` has a line per
        // output.
        let nan = unsafe {
            let nan = match out.len() {
                4 => rows::<D, 4>(v, r, x, s, stride, &mut acc),
                3 => rows::<D, 3>(v, r, x, s, stride, &mut acc),
                2 => rows::<D, 2>(v, r, x, s, stride, &mut acc),
                _ => rows::<D, 1>(v, r, x, s, stride, &mut acc),
            };
            reduce(acc.as_ptr().cast(), out);
            nan
        };
        for (y, nan) in out.iter_mut().zip(nan) {
            if nan {
                *y = f32::NAN;
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
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
                for h in 0..2 {
                    _mm256_storeu_ps(o.as_mut_ptr().add(16 * c + 8 * h), w[c][h]);
                }
            }
        }
        if d.saw_nan() {
            v.decode(r, k0, out);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
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

/// Lanes 0 to 7, then lanes 8 to 15: 12 outputs fill the registers only half a lane set at a time.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile_mn<const M: usize, const N: usize>(t: &Tile) {
    for half in [0, 8] {
        // SAFETY: the caller gives M and N rows of `steps` lines and 16 lanes per output.
        unsafe {
            let (x, w, lanes) = (t.x.add(half), t.w.add(half), t.acc.add(half));
            let mut acc = [[_mm256_setzero_ps(); N]; M];
            if !t.first {
                for i in 0..M {
                    for j in 0..N {
                        acc[i][j] = _mm256_loadu_ps(lanes.add(i * t.acc_stride + j * LANES));
                    }
                }
            }
            for s in 0..t.steps {
                let xs: [__m256; M] =
                    std::array::from_fn(|i| _mm256_loadu_ps(x.add(i * t.x_stride + s * LANES)));
                for j in 0..N {
                    let wj = _mm256_loadu_ps(w.add(j * t.w_stride + s * LANES));
                    for i in 0..M {
                        acc[i][j] = _mm256_fmadd_ps(wj, xs[i], acc[i][j]);
                    }
                }
            }
            for i in 0..M {
                for j in 0..N {
                    _mm256_storeu_ps(lanes.add(i * t.acc_stride + j * LANES), acc[i][j]);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile(t: &Tile, m: usize, n: usize) {
    // SAFETY: as for `tile_mn`.
    unsafe {
        match (m, n) {
            (3, 4) => tile_mn::<3, 4>(t),
            (2, 4) => tile_mn::<2, 4>(t),
            (1, 4) => tile_mn::<1, 4>(t),
            // Fewer than four weight rows are the end of a matrix: one at a time.
            _ => {
                for j in 0..n {
                    let part = Tile { w: t.w.add(j * t.w_stride), acc: t.acc.add(j * LANES), ..*t };
                    match m {
                        3 => tile_mn::<3, 1>(&part),
                        2 => tile_mn::<2, 1>(&part),
                        _ => tile_mn::<1, 1>(&part),
                    }
                }
            }
        }
    }
}

/// `order::reduce`, four outputs at a time.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn reduce(acc: *const f32, out: &mut [f32]) {
    let n = out.len();
    let whole = n / 4 * 4;
    for j in (0..whole).step_by(4) {
        // SAFETY: the caller gives 16 lanes per output, and `out` has four outputs from `j`.
        unsafe {
            let quarter: [__m128; 4] = std::array::from_fn(|i| {
                let p = acc.add((j + i) * LANES);
                let low = _mm_add_ps(_mm_loadu_ps(p), _mm_loadu_ps(p.add(8)));
                let high = _mm_add_ps(_mm_loadu_ps(p.add(4)), _mm_loadu_ps(p.add(12)));
                _mm_add_ps(low, high)
            });
            let pair = |a, b| _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
            let (ab, cd) = (pair(quarter[0], quarter[1]), pair(quarter[2], quarter[3]));
            let y = _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
            let nan = _mm_cmpunord_ps(y, y);
            _mm_storeu_ps(out.as_mut_ptr().add(j), _mm_blendv_ps(y, _mm_set1_ps(f32::NAN), nan));
        }
    }
    for j in whole..n {
        // SAFETY: as above.
        out[j] = order::reduce(unsafe { &*acc.add(j * LANES).cast::<[f32; LANES]>() });
    }
}
