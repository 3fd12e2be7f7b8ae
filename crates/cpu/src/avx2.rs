//! AVX2 kernels: a lane set of `order` is two registers, lanes 0 to 7 and 8 to 15.

use std::arch::x86_64::*;

use checkpoint::Form;

use crate::{
    body,
    kernels::{Buffer, Kernels, Line, SLOTS, Tile, Values},
    order::{self, GROUP, LANES, STEP, View},
    tables,
};

pub(crate) const KERNELS: Kernels = Kernels {
    tile_rows: [3, 4],
    pack,
    decode,
    tile,
    reduce,
    gemv: Some(gemv),
    value_rows: [3, 2],
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
    spin_fma: 8 * SPIN,
};

/// Weight rows that one pass of `gemv` takes together.
const ROWS: usize = 4;

body::kernels!(target_feature(enable = "avx2,fma,f16c"));

/// Four lane sets: two groups, even then odd columns; each as lanes 0 to 7 and 8 to 15.
type Sets = [[__m256; 2]; 4];

/// Decoder of [`STEP`] codes of one row.
trait Step {
    /// Bytes of codes of a step.
    const BYTES: usize;

    /// `low` is the smallest scale byte that will come.
    unsafe fn new(low: u8) -> Self;

    /// Decodes `BYTES` bytes at `p`; `s` points to the scale bytes of the two groups, all in the window of `order`, where
    /// the decoder applies any; `spill` to two lines for the decoder's use.
    unsafe fn step(&mut self, p: *const u8, s: *const u8, spill: *mut Line) -> Sets;

    /// Adds the products of a step with the STEP floats at `x` to the lanes of `sum`, all divided by `factor`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add(
        &mut self,
        p: *const u8,
        s: *const u8,
        spill: *mut Line,
        x: *const f32,
        sum: &mut [__m256; 2],
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let w = self.step(p, s, spill);
            for c in 0..4 {
                for h in 0..2 {
                    sum[h] = _mm256_fmadd_ps(w[c][h], _mm256_load_ps(x.add(16 * c + 8 * h)), sum[h]);
                }
            }
        }
    }

    /// What `add` left out: a power of two.
    unsafe fn factor(&self) -> f32 {
        1.0
    }

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
    unsafe fn new(_: u8) -> Self {
        F32
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, _: *const u8, _: *mut Line) -> Sets {
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
    unsafe fn new(_: u8) -> Self {
        Bf16
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, _: *const u8, _: *mut Line) -> Sets {
        let high = _mm256_set1_epi32(0xffff_0000u32 as i32);
        // SAFETY: the caller gives BYTES readable bytes.
        let v: [__m256i; 4] = std::array::from_fn(|i| unsafe { _mm256_loadu_si256(p.add(32 * i).cast()) });
        let even = |v| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v));
        let odd = |v| _mm256_castsi256_ps(_mm256_and_si256(v, high));
        [[even(v[0]), even(v[1])], [odd(v[0]), odd(v[1])], [even(v[2]), even(v[3])], [odd(v[2]), odd(v[3])]]
    }
}

/// Converts the 8 halves `H` bytes from `b` and adds their products with the floats `X` bytes from `x`. From memory the
/// conversion needs no shuffle port. One block, so that it stays beside its use: left to itself the compiler forwards the
/// halves into registers, converts all first and runs out of them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_halves<const H: usize, const X: usize>(sum: &mut __m256, b: *const u8, x: *const f32) {
    // SAFETY: the caller gives readable bytes at both places; the block only reads them.
    unsafe {
        std::arch::asm!("vcvtph2ps {t}, xmmword ptr [{b} + {h}]", "vfmadd231ps {s}, {t}, ymmword ptr [{x} + {o}]",
            t = out(ymm_reg) _, s = inout(ymm_reg) *sum, b = in(reg) b, x = in(reg) x, h = const H, o = const X,
            options(readonly, nostack, preserves_flags));
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn halves(p: *const u8) -> __m256 {
    // SAFETY: the caller gives 16 readable bytes.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scaled(w: Sets, f: [f32; 2]) -> Sets {
    let f = [_mm256_set1_ps(f[0]), _mm256_set1_ps(f[1])];
    std::array::from_fn(|i| [_mm256_mul_ps(w[i][0], f[i / 2]), _mm256_mul_ps(w[i][1], f[i / 2])])
}

/// E4M3 through half precision: sign, a zero bit, exponent and mantissa moved into place give the value times 2^-8,
/// subnormals included. `SCALED` applies the scale and the 2^8; without it both are in the activations.
struct Fp8<const SCALED: bool> {
    largest: __m256i,
}

impl<const SCALED: bool> Fp8<SCALED> {
    /// Writes the halves of a step: first group even, odd, second group even, odd.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn spill(&mut self, p: *const u8, spill: *mut Line) {
        let keep = _mm256_set1_epi16(0xbf80u16 as i16);
        for g in 0..2 {
            // SAFETY: the caller gives STEP readable bytes and two lines at `spill`.
            unsafe {
                let b = spill.add(g).cast::<__m256i>();
                let v = _mm256_loadu_si256(p.add(32 * g).cast());
                self.largest = _mm256_max_epu8(self.largest, _mm256_and_si256(v, _mm256_set1_epi8(0x7f)));
                let even = _mm256_and_si256(_mm256_srai_epi16::<1>(_mm256_slli_epi16::<8>(v)), keep);
                _mm256_store_si256(b, even);
                _mm256_store_si256(b.add(1), _mm256_and_si256(_mm256_srai_epi16::<1>(v), keep));
            }
        }
    }
}

impl<const SCALED: bool> Step for Fp8<SCALED> {
    const BYTES: usize = STEP;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn new(_: u8) -> Self {
        Self { largest: _mm256_setzero_si256() }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, s: *const u8, spill: *mut Line) -> Sets {
        // SAFETY: the caller gives BYTES readable bytes, two lines at `spill` and, where SCALED, two scale bytes.
        unsafe {
            self.spill(p, spill);
            let b = spill.cast::<u8>();
            let w = std::array::from_fn(|i| [halves(b.add(32 * i)), halves(b.add(32 * i + 16))]);
            if SCALED { scaled(w, [tables::factor_256(*s), tables::factor_256(*s.add(1))]) } else { w }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add(
        &mut self,
        p: *const u8,
        s: *const u8,
        spill: *mut Line,
        x: *const f32,
        sum: &mut [__m256; 2],
    ) {
        let [low, high] = sum;
        // SAFETY: as for `step`; the caller gives STEP floats at `x`.
        unsafe {
            if SCALED {
                let w = self.step(p, s, spill);
                for c in 0..4 {
                    *low = _mm256_fmadd_ps(w[c][0], _mm256_load_ps(x.add(16 * c)), *low);
                    *high = _mm256_fmadd_ps(w[c][1], _mm256_load_ps(x.add(16 * c + 8)), *high);
                }
                return;
            }
            self.spill(p, spill);
            let b = spill.cast::<u8>();
            add_halves::<0, 0>(low, b, x);
            add_halves::<16, 32>(high, b, x);
            add_halves::<32, 64>(low, b, x);
            add_halves::<48, 96>(high, b, x);
            add_halves::<64, 128>(low, b, x);
            add_halves::<80, 160>(high, b, x);
            add_halves::<96, 192>(low, b, x);
            add_halves::<112, 224>(high, b, x);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn saw_nan(&self) -> bool {
        _mm256_movemask_epi8(_mm256_cmpeq_epi8(self.largest, _mm256_set1_epi8(0x7f))) != 0
    }
}

/// E2M1 through the upper bytes of half-precision values; the lower bytes are zero. `add` takes the scales relative to
/// the smallest: as exponents of the halves they cost nothing.
struct Fp4 {
    /// The table of scale byte 0, if there were one: those from `low` on exist.
    tables: *const u8,
    low: u8,
}

impl Fp4 {
    /// Writes the halves of a step by the table `t` of either group: even columns lanes 0 to 7, even 8 to 15, odd 0 to 7,
    /// odd 8 to 15; each of both groups.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn spill(p: *const u8, t: [*const u8; 2], spill: *mut Line) {
        // SAFETY: the caller gives STEP / 2 readable bytes, two tables and two lines.
        unsafe {
            let t = [_mm_load_si128(t[0].cast()), _mm_load_si128(t[1].cast())];
            let t = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(t[0]), t[1]);
            let v = _mm256_loadu_si256(p.cast());
            let code = _mm256_set1_epi8(0x0f);
            let even = _mm256_shuffle_epi8(t, _mm256_and_si256(v, code));
            let odd = _mm256_shuffle_epi8(t, _mm256_and_si256(_mm256_srli_epi16::<4>(v), code));
            // Each half of a register is a group; unpacking within halves keeps lanes 0 to 7 of both in one register.
            let zero = _mm256_setzero_si256();
            let b = spill.cast::<__m256i>();
            _mm256_store_si256(b, _mm256_unpacklo_epi8(zero, even));
            _mm256_store_si256(b.add(1), _mm256_unpackhi_epi8(zero, even));
            _mm256_store_si256(b.add(2), _mm256_unpacklo_epi8(zero, odd));
            _mm256_store_si256(b.add(3), _mm256_unpackhi_epi8(zero, odd));
        }
    }
}

impl Step for Fp4 {
    const BYTES: usize = STEP / 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn new(low: u8) -> Self {
        Self { tables: tables::half_e2m1(0).wrapping_sub(16 * usize::from(low)), low }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn step(&mut self, p: *const u8, s: *const u8, spill: *mut Line) -> Sets {
        // SAFETY: the caller gives BYTES readable bytes, two lines and two scale bytes.
        unsafe {
            Self::spill(p, [tables::half_e2m1(tables::HALF_MIDDLE); 2], spill);
            let b = spill.cast::<u8>();
            let w = std::array::from_fn(|i| {
                let at = b.add(64 * (i & 1) + 16 * (i >> 1));
                [halves(at), halves(at.add(32))]
            });
            scaled(w, [tables::factor(*s), tables::factor(*s.add(1))])
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add(
        &mut self,
        p: *const u8,
        s: *const u8,
        spill: *mut Line,
        x: *const f32,
        sum: &mut [__m256; 2],
    ) {
        let [low, high] = sum;
        // SAFETY: as for `step`; the caller gives STEP floats at `x`.
        unsafe {
            let t = [0, 1].map(|g| self.tables.wrapping_add(16 * usize::from(*s.add(g))));
            Self::spill(p, t, spill);
            let b = spill.cast::<u8>();
            add_halves::<0, 0>(low, b, x);
            add_halves::<32, 32>(high, b, x);
            add_halves::<64, 64>(low, b, x);
            add_halves::<96, 96>(high, b, x);
            add_halves::<16, 128>(low, b, x);
            add_halves::<48, 160>(high, b, x);
            add_halves::<80, 192>(low, b, x);
            add_halves::<112, 224>(high, b, x);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factor(&self) -> f32 {
        tables::factor(self.low + tables::HALF_MIDDLE)
    }
}

/// `N` weight rows from `r` times the row `x` (laid out, padded): lanes into `acc`. `scales`: whether the decoder reads
/// scales.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows<D: Step, const N: usize>(
    d: &mut D,
    v: &View,
    r: usize,
    x: &[f32],
    scales: bool,
    acc: &mut [Line; ROWS],
) {
    let mut spill = [Line([0.0; 16]); 2];
    let spill = spill.as_mut_ptr();
    let whole = v.row_bytes / D::BYTES;
    let p = v.row(r).as_ptr();
    // A line of the rows that come next for each line of these.
    let ahead = N * v.row_bytes;
    let (s, s_stride) = if scales { (v.scales(r).as_ptr(), v.groups) } else { (p, 0) };
    // SAFETY: every row has `whole * BYTES` bytes of codes and, where `scales`, two scale bytes per whole step; `x` has
    // STEP floats per step.
    unsafe {
        let mut sum = [[_mm256_setzero_ps(); 2]; N];
        for t in 0..whole {
            let xp = x.as_ptr().add(STEP * t);
            for i in 0..N {
                let q = p.add(i * v.row_bytes + t * D::BYTES);
                for line in 0..D::BYTES.div_ceil(64) {
                    _mm_prefetch::<_MM_HINT_T1>(q.wrapping_add(ahead + 64 * line).cast());
                }
                d.add(q, s.wrapping_add(i * s_stride + 2 * t), spill, xp, &mut sum[i]);
            }
        }
        let rest = v.row_bytes - whole * D::BYTES;
        if rest > 0 {
            for i in 0..N {
                let mut codes = [0u8; 4 * STEP];
                codes[..rest].copy_from_slice(&v.row(r + i)[whole * D::BYTES..]);
                let s = tables::last_scales(v, r + i, whole);
                d.add(codes.as_ptr(), s.as_ptr(), spill, x.as_ptr().add(STEP * whole), &mut sum[i]);
            }
        }
        for i in 0..N {
            _mm256_store_ps(acc[i].0.as_mut_ptr(), sum[i][0]);
            _mm256_store_ps(acc[i].0.as_mut_ptr().add(8), sum[i][1]);
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn gemv_form<D: Step>(v: &View, r: usize, x: &[f32], low: Option<u8>, out: &mut [f32]) {
    for (g, out) in out.chunks_mut(ROWS).enumerate() {
        let r = r + g * ROWS;
        let mut acc = [Line([0.0; 16]); ROWS];
        // SAFETY: rows r..r + out.len() exist and `x` is padded; `acc` has a line per output.
        let (factor, nan) = unsafe {
            let mut d = D::new(low.unwrap_or_default());
            match out.len() {
                4 => rows::<D, 4>(&mut d, v, r, x, low.is_some(), &mut acc),
                3 => rows::<D, 3>(&mut d, v, r, x, low.is_some(), &mut acc),
                2 => rows::<D, 2>(&mut d, v, r, x, low.is_some(), &mut acc),
                _ => rows::<D, 1>(&mut d, v, r, x, low.is_some(), &mut acc),
            }
            reduce(acc.as_ptr().cast(), out);
            (d.factor(), d.saw_nan())
        };
        for (i, y) in out.iter_mut().enumerate() {
            *y = if nan && v.has_nan(r + i) { f32::NAN } else { *y * factor };
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn gemv(v: &View, r: usize, x: &[f32], scratch: &mut Buffer, out: &mut [f32]) -> bool {
    let k = order::padded(v.cols);
    assert!(x.len() >= k && r + out.len() <= v.rows, "{} rows from {r} of {}", out.len(), v.rows);
    let range = v.scale_range(r, out.len());
    if !tables::movable(&range) {
        return false;
    }
    let (low, high) = range.into_inner();
    // SAFETY: sizes were checked.
    unsafe {
        match v.form {
            Form::F32 => gemv_form::<F32>(v, r, x, None, out),
            Form::Bf16 => gemv_form::<Bf16>(v, r, x, None, out),
            Form::Fp8Block32 => {
                let folded = scratch.take(k);
                tables::fold(v, r, x, folded);
                gemv_form::<Fp8<false>>(v, r, folded, None, out);
            }
            Form::Fp8Row32 => gemv_form::<Fp8<true>>(v, r, x, Some(low), out),
            Form::Fp4Row32 if high.saturating_sub(low) > tables::HALF_RANGE => return false,
            Form::Fp4Row32 => gemv_form::<Fp4>(v, r, x, Some(low), out),
            Form::Exl3 => unreachable!("no View is made of EXL3"),
        }
    }
    true
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn decode_form<D: Step>(v: &View, r: usize, k0: usize, kn: usize, out: &mut [f32]) {
    let mut spill = [Line([0.0; 16]); 2];
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
            let mut d = D::new(*range.start());
            for (t, o) in out.chunks_exact_mut(STEP).enumerate() {
                let t = k0 / STEP + t;
                let start = t * D::BYTES;
                let w = if start + D::BYTES <= row.len() {
                    d.step(row.as_ptr().add(start), scales.as_ptr().wrapping_add(2 * t), spill.as_mut_ptr())
                } else {
                    let mut codes = [0u8; 4 * STEP];
                    let rest = &row[start.min(row.len())..];
                    codes[..rest.len()].copy_from_slice(rest);
                    d.step(codes.as_ptr(), tables::last_scales(v, r + i, t).as_ptr(), spill.as_mut_ptr())
                };
                for c in 0..4 {
                    for h in 0..2 {
                        _mm256_storeu_ps(o.as_mut_ptr().add(16 * c + 8 * h), w[c][h]);
                    }
                }
            }
            if d.saw_nan() {
                v.decode(r + i, k0, out);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
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

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn values_mn<const M: usize, const N: usize>(t: &Values) {
    // SAFETY: the caller gives M heads of probabilities and sums, N lane sets and `slots` keys.
    unsafe {
        let mut sum = [[[_mm256_setzero_ps(); 2]; N]; M];
        for i in 0..M {
            let shrink = _mm256_set1_ps(*t.shrink.add(i));
            for c in 0..N {
                for h in 0..2 {
                    let o = _mm256_loadu_ps(t.o.add(i * t.o_stride + c * LANES + 8 * h));
                    sum[i][c][h] = _mm256_mul_ps(o, shrink);
                }
            }
        }
        for j in 0..t.slots {
            let p: [__m256; M] = std::array::from_fn(|i| _mm256_set1_ps(*t.p.add(i * SLOTS + j)));
            for c in 0..N {
                for h in 0..2 {
                    let k = _mm256_loadu_ps(t.k.add(j * t.k_stride + c * LANES + 8 * h));
                    for i in 0..M {
                        sum[i][c][h] = _mm256_fmadd_ps(p[i], k, sum[i][c][h]);
                    }
                }
            }
        }
        for i in 0..M {
            for c in 0..N {
                for h in 0..2 {
                    _mm256_storeu_ps(t.o.add(i * t.o_stride + c * LANES + 8 * h), sum[i][c][h]);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn values(t: &Values, m: usize, n: usize) {
    // SAFETY: as for `values_mn`.
    unsafe {
        match (m, n) {
            (3, 2) => values_mn::<3, 2>(t),
            (1, 2) => values_mn::<1, 2>(t),
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
const SPIN: usize = 12;

#[target_feature(enable = "avx2,fma,f16c")]
fn spin(rounds: usize) -> f32 {
    let mut sums = [_mm256_set1_ps(1.0); SPIN];
    let (a, b) = std::hint::black_box((_mm256_set1_ps(0.999), _mm256_set1_ps(0.001)));
    for _ in 0..rounds {
        for s in &mut sums {
            *s = _mm256_fmadd_ps(*s, a, b);
        }
    }
    let mut out = [0.0f32; 8];
    let mut total = 0.0;
    for s in sums {
        // SAFETY: `out` has the size of a register.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), s) };
        total += out.iter().sum::<f32>();
    }
    total
}
