//! Kernels written once, as loops that every instruction set compiles to its own vectors.
//!
//! All are inlined into functions of one instruction set by [`kernels!`](crate::body::kernels). Every sum has a written
//! order and every product-and-sum is a fused multiply-add or two rounded operations as written, so that the compiler may
//! not change a bit.

use checkpoint::Form;
use numerics::{bf16, e4m3, e8m0, quantise};

use crate::{
    exp::exp,
    kernels::{Online, SLOTS, Values},
    order::{self, GROUP, LANES, View},
};

/// The value of an E4M3 code.
#[inline(always)]
fn fp8(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    // Below 8 the exponent is zero: multiples of 2^-9.
    let subnormal = magnitude as f32 * (1.0 / 512.0);
    let normal = f32::from_bits((magnitude << 20) + (120 << 23));
    let v = if magnitude < 8 { subnormal } else { normal };
    let v = f32::from_bits(v.to_bits() | u32::from(code & 0x80) << 24);
    if magnitude == 0x7f { f32::NAN } else { v }
}

/// The value of the low four bits as E2M1.
#[inline(always)]
fn fp4(code: u8) -> f32 {
    let magnitude = u32::from(code & 7);
    let small = magnitude as f32 * 0.5;
    let normal = f32::from_bits((magnitude << 22) + (126 << 23));
    let v = if magnitude < 2 { small } else { normal };
    f32::from_bits(v.to_bits() | u32::from(code & 8) << 28)
}

/// `View::decode` for `kn` columns of each row from `r`: whole groups in loops without branches, the last one by the plain
/// decoder.
#[inline(always)]
pub(crate) fn decode(v: &View, r: usize, k0: usize, kn: usize, out: &mut [f32]) {
    let whole = (v.cols.saturating_sub(k0) / GROUP).min(kn / GROUP);
    for (i, out) in out.chunks_exact_mut(kn).enumerate() {
        let (row, scales) = (&v.row(r + i)[k0 * v.row_bytes / v.cols..], v.scales(r + i));
        let (head, tail) = out.split_at_mut(whole * GROUP);
        for (g, o) in head.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
            let scale = scales.get(k0 / GROUP + g).map_or(1.0, |s| e8m0::decode(*s));
            let bytes = GROUP * v.row_bytes / v.cols;
            let codes = &row[g * bytes..][..bytes];
            match v.form {
                Form::F32 => {
                    for (o, c) in o.iter_mut().zip(codes.as_chunks::<4>().0) {
                        *o = f32::from_le_bytes(*c);
                    }
                }
                Form::Bf16 => {
                    split(o, |k| bf16::from_bits(u16::from_le_bytes([codes[2 * k], codes[2 * k + 1]])))
                }
                Form::Fp8Block32 | Form::Fp8Row32 => split(o, |k| fp8(codes[k]) * scale),
                Form::Exl3 => unreachable!("no View is made of EXL3"),
                Form::Fp4Row32 => {
                    let (even, odd) = o.split_at_mut(LANES);
                    for l in 0..LANES {
                        even[l] = fp4(codes[l]) * scale;
                        odd[l] = fp4(codes[l] >> 4) * scale;
                    }
                }
            }
        }
        if !tail.is_empty() {
            v.decode(r + i, k0 + whole * GROUP, tail);
        }
    }
}

/// A group's even columns, then its odd ones.
#[inline(always)]
fn split(out: &mut [f32; GROUP], value: impl Fn(usize) -> f32) {
    for l in 0..LANES {
        out[l] = value(2 * l);
        out[LANES + l] = value(2 * l + 1);
    }
}

/// `quantise::load_fp8`.
#[inline(always)]
pub(crate) fn load_fp8(row: &[u8], out: &mut [f32]) {
    let n = out.len();
    assert_eq!(row.len(), quantise::fp8_row_bytes(n), "fp8 row of {n} values");
    let (codes, scales) = row.split_at(n);
    for ((o, c), s) in out.chunks_mut(quantise::BLOCK).zip(codes.chunks(quantise::BLOCK)).zip(scales) {
        let s = e8m0::decode(*s);
        for (o, c) in o.iter_mut().zip(c) {
            *o = fp8(*c) * s;
        }
    }
}

#[inline(always)]
fn load_packed(row: &[u8], out: &mut [f32], size: usize, scale: impl Fn(u8) -> f32) {
    let (codes, scales) = row.split_at(out.len() / 2);
    for ((o, c), s) in out.chunks_mut(size).zip(codes.chunks(size / 2)).zip(scales) {
        let s = scale(*s);
        for (o, c) in o.chunks_exact_mut(2).zip(c) {
            o[0] = fp4(*c) * s;
            o[1] = fp4(*c >> 4) * s;
        }
    }
}

/// `quantise::load_kv`.
#[inline(always)]
pub(crate) fn load_kv(row: &[u8], out: &mut [f32]) {
    assert_eq!(row.len(), quantise::kv_row_bytes(out.len()), "compressed row of {} values", out.len());
    load_packed(row, out, quantise::KV_BLOCK, e4m3::decode);
}

/// `quantise::load_fp4`.
#[inline(always)]
pub(crate) fn load_fp4(row: &[u8], out: &mut [f32]) {
    assert_eq!(row.len(), quantise::fp4_row_bytes(out.len()), "fp4 row of {} values", out.len());
    load_packed(row, out, quantise::BLOCK, e8m0::decode);
}

/// One block of the online softmax of one head: `s` holds dot products and becomes the probabilities against the running
/// maximum, rounded to bf16 where `round`. Returns by what earlier sums shrink.
#[inline(always)]
pub(crate) fn softmax(
    s: &mut [f32; SLOTS],
    valid: &[bool; SLOTS],
    scale: f32,
    round: bool,
    state: &mut Online,
) -> f32 {
    let mut lanes = [state.max; LANES];
    for (s, ok) in s.chunks_exact_mut(LANES).zip(valid.chunks_exact(LANES)) {
        for l in 0..LANES {
            s[l] = if ok[l] { s[l] * scale } else { f32::NEG_INFINITY };
            lanes[l] = if s[l] > lanes[l] { s[l] } else { lanes[l] };
        }
    }
    let max = lanes.iter().fold(state.max, |a, b| if *b > a { *b } else { a });
    let shrink = exp(state.max - max);
    let mut sums = [0.0; LANES];
    for s in s.chunks_exact_mut(LANES) {
        for l in 0..LANES {
            s[l] = exp(s[l] - max);
            sums[l] += s[l];
        }
    }
    if round {
        for s in s.iter_mut() {
            *s = bf16::round(*s);
        }
    }
    state.sum = state.sum * shrink + order::reduce(&sums);
    state.max = max;
    shrink
}

/// Index scores of up to [`SLOTS`] keys from the dot products `t` `[heads][SLOTS]`: sums over heads in order; `round`:
/// every step to bf16.
#[inline(always)]
pub(crate) fn combine(t: &[f32], w: &[f32], round: bool, out: &mut [f32; SLOTS]) {
    let r = |v: f32| if round { bf16::round(v) } else { v };
    *out = [0.0; SLOTS];
    for (t, w) in t.chunks_exact(SLOTS).zip(w) {
        for (o, t) in out.iter_mut().zip(t) {
            let t = r(*t);
            *o += r(if t > 0.0 { t } else { 0.0 } * w);
        }
    }
    for o in out {
        *o = r(*o);
    }
}

/// Σ a b in the lanes of [`order`].
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (mut a, mut b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (a, b) in a.by_ref().zip(b.by_ref()) {
        for l in 0..LANES {
            sums[l] = a[l].mul_add(b[l], sums[l]);
        }
    }
    for (s, (a, b)) in sums.iter_mut().zip(a.remainder().iter().zip(b.remainder())) {
        *s = a.mul_add(*b, *s);
    }
    order::reduce(&sums)
}

/// y += `alpha` x, fused.
#[inline(always)]
pub(crate) fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = alpha.mul_add(*x, *y);
    }
}

/// `N` lane sets of one head: earlier sums shrunk, then each slot's probability times its value, slots ascending.
#[inline(always)]
pub(crate) unsafe fn values(t: &Values, m: usize, n: usize) {
    for i in 0..m {
        for c in 0..n {
            // SAFETY: the caller gives `m` rows of probabilities and sums, `n` lane sets, and `slots` keys.
            unsafe {
                let o = &mut *t.o.add(i * t.o_stride + c * LANES).cast::<[f32; LANES]>();
                let shrink = *t.shrink.add(i);
                let mut sums = o.map(|v| v * shrink);
                for j in 0..t.slots {
                    let p = *t.p.add(i * SLOTS + j);
                    let k = &*t.k.add(j * t.k_stride + c * LANES).cast::<[f32; LANES]>();
                    for l in 0..LANES {
                        sums[l] = p.mul_add(k[l], sums[l]);
                    }
                }
                *o = sums;
            }
        }
    }
}

/// Sum of all words: four streams of a page each, the next four fetched ahead, which is what reads fastest.
#[inline(always)]
pub(crate) fn read(data: &[u64]) -> u64 {
    const PAGE: usize = 512;
    let mut sums = [[0u64; 8]; 4];
    for block in data.chunks_exact(4 * PAGE) {
        for line in (0..PAGE).step_by(8) {
            for (stream, sums) in sums.iter_mut().enumerate() {
                let line = &block[stream * PAGE + line..][..8];
                fetch(line.as_ptr().wrapping_add(4 * PAGE));
                for (s, v) in sums.iter_mut().zip(line) {
                    *s = s.wrapping_add(*v);
                }
            }
        }
    }
    sums.iter().flatten().fold(0, |a, b| a.wrapping_add(*b))
}

/// Asks for a line of memory ahead of its use.
#[inline(always)]
fn fetch(p: *const u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint may name any address, and every x86-64 has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(p.cast());
    }
    let _ = p;
}

/// The kernels of this page for the instruction set of `$attr`.
macro_rules! kernels {
    ($($attr:meta)?) => {
        $(#[$attr])?
        fn pack(x: &[f32], layout: crate::order::Layout, out: &mut [f32]) -> bool {
            crate::order::pack_row(x, layout, out)
        }

        $(#[$attr])?
        fn load_fp8(row: &[u8], out: &mut [f32]) {
            crate::body::load_fp8(row, out);
        }

        $(#[$attr])?
        fn load_kv(row: &[u8], out: &mut [f32]) {
            crate::body::load_kv(row, out);
        }

        $(#[$attr])?
        fn load_fp4(row: &[u8], out: &mut [f32]) {
            crate::body::load_fp4(row, out);
        }

        $(#[$attr])?
        fn softmax(
            s: &mut [f32; crate::kernels::SLOTS],
            valid: &[bool; crate::kernels::SLOTS],
            scale: f32,
            round: bool,
            state: &mut crate::kernels::Online,
        ) -> f32 {
            if round {
                crate::body::softmax(s, valid, scale, true, state)
            } else {
                crate::body::softmax(s, valid, scale, false, state)
            }
        }

        $(#[$attr])?
        fn combine(t: &[f32], w: &[f32], round: bool, out: &mut [f32; crate::kernels::SLOTS]) {
            if round {
                crate::body::combine(t, w, true, out);
            } else {
                crate::body::combine(t, w, false, out);
            }
        }

        $(#[$attr])?
        fn dot(a: &[f32], b: &[f32]) -> f32 {
            crate::body::dot(a, b)
        }

        $(#[$attr])?
        fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
            crate::body::axpy(alpha, x, y);
        }

        $(#[$attr])?
        fn read(data: &[u64]) -> u64 {
            crate::body::read(data)
        }
    };
}
pub(crate) use kernels;
