//! AVX-512 kernels: a lane set of `order` is one register.

use std::arch::x86_64::*;

use checkpoint::Form;

use crate::{
    avx2, body,
    kernels::{Buffer, Kernels, Line, SLOTS, Tile, Values},
    order::{self, GROUP, LANES, STEP, View},
    tables,
};

pub(crate) const KERNELS: Kernels = Kernels {
    tile_rows: [6, 4],
    pack,
    decode,
    tile,
    reduce: avx2::reduce,
    gemv: Some(gemv),
    value_rows: [6, 4],
    values,
    load_fp8,
    load_kv,
    load_fp4,
    softmax,
    combine,
    dot,
    axpy,
    read,
    spin,
    spin_fma: 16 * SPIN,
};

/// Weight rows that one pass of `gemv` takes together.
const ROWS: usize = 4;

body::kernels!(target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"));

/// Decoder of [`STEP`] codes of one row: two groups, even then odd columns.
trait Step {
    /// Bytes of codes of a step.
    const BYTES: usize;

    unsafe fn new() -> Self;

    /// Decodes `BYTES` bytes at `p`; `s` points to the scale bytes of the two groups, all in the window of `order`, where
    /// the decoder applies any.
    unsafe fn step(&mut self, p: *const u8, s: *const u8) -> [__m512; 4];

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
    unsafe fn step(&mut self, p: *const u8, _: *const u8) -> [__m512; 4] {
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
    unsafe fn step(&mut self, p: *const u8, _: *const u8) -> [__m512; 4] {
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
/// subnormals included. `SCALED` applies the scale and the 2^8; without it both are in the activations.
struct Fp8<const SCALED: bool> {
    largest: __m512i,
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
    unsafe fn step(&mut self, p: *const u8, s: *const u8) -> [__m512; 4] {
        // SAFETY: the caller gives BYTES readable bytes.
        let v = unsafe { _mm512_loadu_si512(p.cast()) };
        self.largest = _mm512_max_epu8(self.largest, _mm512_and_si512(v, _mm512_set1_epi8(0x7f)));
        let keep = _mm512_set1_epi16(0xbf80u16 as i16);
        let odd = _mm512_and_si512(_mm512_srai_epi16::<1>(v), keep);
        let even = _mm512_and_si512(_mm512_srai_epi16::<1>(_mm512_slli_epi16::<8>(v)), keep);
        let low = |v| _mm512_cvtph_ps(_mm512_castsi512_si256(v));
        let high = |v| _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(v));
        let w = [low(even), low(odd), high(even), high(odd)];
        if !SCALED {
            return w;
        }
        // SAFETY: the caller gives two scale bytes.
        let f = unsafe { [tables::factor_256(*s), tables::factor_256(*s.add(1))] };
        std::array::from_fn(|i| _mm512_mul_ps(w[i], _mm512_set1_ps(f[i / 2])))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn saw_nan(&self) -> bool {
        _mm512_cmpeq_epi8_mask(self.largest, _mm512_set1_epi8(0x7f)) != 0
    }
}

/// E2M1 through the table of its scale.
struct Fp4;

impl Step for Fp4 {
    const BYTES: usize = STEP / 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn new() -> Self {
        Fp4
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, s: *const u8) -> [__m512; 4] {
        // SAFETY: the caller gives BYTES readable bytes and two scale bytes of the window.
        unsafe {
            let a = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let b = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.add(16).cast()));
            let (ta, tb) = (tables::scaled_e2m1(*s), tables::scaled_e2m1(*s.add(1)));
            let (ta, tb) = (_mm512_load_ps(ta.cast()), _mm512_load_ps(tb.cast()));
            [
                _mm512_permutexvar_ps(a, ta),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(a), ta),
                _mm512_permutexvar_ps(b, tb),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(b), tb),
            ]
        }
    }
}

/// `N` weight rows from `r` times the row `x` (laid out, padded): lanes into `acc`. True where a code may be a NaN.
/// `scales`: whether the decoder reads scales.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn rows<D: Step, const N: usize>(
    v: &View,
    r: usize,
    x: &[f32],
    scales: bool,
    acc: &mut [Line; ROWS],
) -> bool {
    let whole = v.row_bytes / D::BYTES;
    let p = v.row(r).as_ptr();
    // A line of the rows that come next for each line of these.
    let ahead = N * v.row_bytes;
    let (s, s_stride) = if scales { (v.scales(r).as_ptr(), v.groups) } else { (p, 0) };
    // SAFETY: every row has `whole * BYTES` bytes of codes and, where `scales`, two scale bytes per whole step; `x` has
    // STEP floats per step.
    unsafe {
        let mut d = D::new();
        let mut sum = [_mm512_setzero_ps(); N];
        for t in 0..whole {
            let xp = x.as_ptr().add(STEP * t);
            let xs: [__m512; 4] = std::array::from_fn(|i| _mm512_load_ps(xp.add(16 * i)));
            for i in 0..N {
                let q = p.add(i * v.row_bytes + t * D::BYTES);
                for line in 0..D::BYTES.div_ceil(64) {
                    _mm_prefetch::<_MM_HINT_T1>(q.wrapping_add(ahead + 64 * line).cast());
                }
                let w = d.step(q, s.wrapping_add(i * s_stride + 2 * t));
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
                let w = d.step(codes.as_ptr(), tables::last_scales(v, r + i, whole).as_ptr());
                for c in 0..4 {
                    let xc = _mm512_load_ps(x.as_ptr().add(STEP * whole + 16 * c));
                    sum[i] = _mm512_fmadd_ps(w[c], xc, sum[i]);
                }
            }
        }
        for i in 0..N {
            _mm512_store_ps(acc[i].0.as_mut_ptr(), sum[i]);
        }
        d.saw_nan()
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn gemv_form<D: Step>(v: &View, r: usize, x: &[f32], scales: bool, out: &mut [f32]) {
    for (g, out) in out.chunks_mut(ROWS).enumerate() {
        let r = r + g * ROWS;
        let mut acc = [Line([0.0; 16]); ROWS];
        // SAFETY: rows r..r + out.len() exist and `x` is padded; `acc` has a line per output.
        let nan = unsafe {
            let nan = match out.len() {
                4 => rows::<D, 4>(v, r, x, scales, &mut acc),
                3 => rows::<D, 3>(v, r, x, scales, &mut acc),
                2 => rows::<D, 2>(v, r, x, scales, &mut acc),
                _ => rows::<D, 1>(v, r, x, scales, &mut acc),
            };
            avx2::reduce(acc.as_ptr().cast(), out);
            nan
        };
        if nan {
            for (i, y) in out.iter_mut().enumerate() {
                if v.has_nan(r + i) {
                    *y = f32::NAN;
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn gemv(v: &View, r: usize, x: &[f32], scratch: &mut Buffer, out: &mut [f32]) -> bool {
    let k = order::padded(v.cols);
    assert!(x.len() >= k && r + out.len() <= v.rows, "{} rows from {r} of {}", out.len(), v.rows);
    if !tables::movable(&v.scale_range(r, out.len())) {
        return false;
    }
    // SAFETY: sizes were checked.
    unsafe {
        match v.form {
            Form::F32 => gemv_form::<F32>(v, r, x, false, out),
            Form::Bf16 => gemv_form::<Bf16>(v, r, x, false, out),
            Form::Fp8Block32 => {
                let folded = scratch.take(k);
                tables::fold(v, r, x, folded);
                gemv_form::<Fp8<false>>(v, r, folded, false, out);
            }
            Form::Fp8Row32 => gemv_form::<Fp8<true>>(v, r, x, true, out),
            Form::Fp4Row32 => gemv_form::<Fp4>(v, r, x, true, out),
            Form::Exl3 => unreachable!("no View is made of EXL3"),
        }
    }
    true
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn decode_form<D: Step>(v: &View, r: usize, k0: usize, kn: usize, out: &mut [f32]) {
    for (i, out) in out.chunks_exact_mut(kn).enumerate() {
        let (row, scales) = (v.row(r + i), v.scales(r + i));
        let slice = &scales[scales.len().min(k0 / GROUP)..scales.len().min((k0 + kn).div_ceil(GROUP))];
        let range = tables::scale_range(slice);
        if !tables::movable(&range) {
            v.decode(r + i, k0, out);
            continue;
        }
        // SAFETY: every step reads its bytes from the row or from the padded copy and writes STEP floats of `out`.
        unsafe {
            let mut d = D::new();
            for (t, o) in out.chunks_exact_mut(STEP).enumerate() {
                let t = k0 / STEP + t;
                let start = t * D::BYTES;
                let w = if start + D::BYTES <= row.len() {
                    d.step(row.as_ptr().add(start), scales.as_ptr().wrapping_add(2 * t))
                } else {
                    let mut codes = [0u8; 4 * STEP];
                    let rest = &row[start.min(row.len())..];
                    codes[..rest.len()].copy_from_slice(rest);
                    d.step(codes.as_ptr(), tables::last_scales(v, r + i, t).as_ptr())
                };
                for c in 0..4 {
                    _mm512_storeu_ps(o.as_mut_ptr().add(16 * c), w[c]);
                }
            }
            if d.saw_nan() {
                v.decode(r + i, k0, out);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn decode(v: &View, r: usize, k0: usize, kn: usize, out: &mut [f32]) {
    assert!(kn > 0 && kn.is_multiple_of(STEP) && k0.is_multiple_of(STEP), "decode {k0} + {kn}");
    // SAFETY: sizes were checked.
    unsafe {
        match v.form {
            Form::F32 => decode_form::<F32>(v, r, k0, kn, out),
            Form::Bf16 => decode_form::<Bf16>(v, r, k0, kn, out),
            Form::Fp8Block32 | Form::Fp8Row32 => decode_form::<Fp8<true>>(v, r, k0, kn, out),
            Form::Fp4Row32 => decode_form::<Fp4>(v, r, k0, kn, out),
            Form::Exl3 => unreachable!("no View is made of EXL3"),
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

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn values_mn<const M: usize, const N: usize>(t: &Values) {
    // SAFETY: the caller gives M heads of probabilities and sums, N lane sets and `slots` keys.
    unsafe {
        let mut sum = [[_mm512_setzero_ps(); N]; M];
        for i in 0..M {
            let shrink = _mm512_set1_ps(*t.shrink.add(i));
            for c in 0..N {
                sum[i][c] = _mm512_mul_ps(_mm512_loadu_ps(t.o.add(i * t.o_stride + c * LANES)), shrink);
            }
        }
        for j in 0..t.slots {
            let k: [__m512; N] =
                std::array::from_fn(|c| _mm512_loadu_ps(t.k.add(j * t.k_stride + c * LANES)));
            for i in 0..M {
                let p = _mm512_set1_ps(*t.p.add(i * SLOTS + j));
                for c in 0..N {
                    sum[i][c] = _mm512_fmadd_ps(p, k[c], sum[i][c]);
                }
            }
        }
        for i in 0..M {
            for c in 0..N {
                _mm512_storeu_ps(t.o.add(i * t.o_stride + c * LANES), sum[i][c]);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn values(t: &Values, m: usize, n: usize) {
    // SAFETY: as for `values_mn`.
    unsafe {
        match (m, n) {
            (6, 4) => values_mn::<6, 4>(t),
            (4, 4) => values_mn::<4, 4>(t),
            (2, 4) => values_mn::<2, 4>(t),
            // Ends: one head and one lane set at a time.
            _ => {
                for i in 0..m {
                    for c in 0..n {
                        values_mn::<1, 1>(&Values {
                            p: t.p.add(i * SLOTS),
                            shrink: t.shrink.add(i),
                            k: t.k.add(c * LANES),
                            o: t.o.add(i * t.o_stride + c * LANES),
                            ..*t
                        });
                    }
                }
            }
        }
    }
}

/// Independent sums of `spin`: enough to cover the latency of a multiply-add.
const SPIN: usize = 16;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn spin(rounds: usize) -> f32 {
    let mut sums = [_mm512_set1_ps(1.0); SPIN];
    let (a, b) = std::hint::black_box((_mm512_set1_ps(0.999), _mm512_set1_ps(0.001)));
    for _ in 0..rounds {
        for s in &mut sums {
            *s = _mm512_fmadd_ps(*s, a, b);
        }
    }
    let mut out = [0.0f32; 16];
    let mut total = 0.0;
    for s in sums {
        // SAFETY: `out` has the size of a register.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), s) };
        total += out.iter().sum::<f32>();
    }
    total
}
