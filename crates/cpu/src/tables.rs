//! What the x86 decoders look up, and when they may move a scale (see `order`).

use std::ops::RangeInclusive;

use checkpoint::Form;

use crate::{
    kernels::Line,
    order::{GROUP, View},
};

/// Scale bytes of the window: 2^-40 to 2^40.
const SCALES: RangeInclusive<u8> = 87..=167;

/// Smallest and largest of some scale bytes.
#[inline(always)]
pub(crate) fn scale_range(scale: &[u8]) -> RangeInclusive<u8> {
    let (low, high) = scale.iter().fold((255, 0), |(l, h), s| (*s.min(&l), *s.max(&h)));
    low..=high
}

/// Whether scales of such a range may be moved.
#[inline(always)]
pub(crate) fn movable(range: &RangeInclusive<u8>) -> bool {
    range.is_empty() || (SCALES.contains(range.start()) && SCALES.contains(range.end()))
}

impl View<'_> {
    /// The range of the scales of rows `r..r + n`; empty for plain forms.
    #[inline(always)]
    pub(crate) fn scale_range(&self, r: usize, n: usize) -> RangeInclusive<u8> {
        scale_range(match self.form {
            Form::F32 | Form::Bf16 => &[],
            Form::Fp8Block32 => &self.scale[r / GROUP * self.groups..(r + n).div_ceil(GROUP) * self.groups],
            Form::Fp8Row32 | Form::Fp4Row32 => &self.scale[r * self.groups..(r + n) * self.groups],
            Form::Exl3 => unreachable!("no View is made of EXL3"),
        })
    }

    /// Whether a code of row `r` is a NaN of E4M3.
    pub(crate) fn has_nan(&self, r: usize) -> bool {
        self.row(r).iter().any(|c| c & 0x7f == 0x7f)
    }
}

/// 2^(byte - 127), for bytes of the window.
#[inline(always)]
pub(crate) fn factor(byte: u8) -> f32 {
    f32::from_bits(u32::from(byte) << 23)
}

/// 2^(byte - 127) 2^8, for bytes of the window.
#[inline(always)]
pub(crate) fn factor_256(byte: u8) -> f32 {
    f32::from_bits((u32::from(byte) + 8) << 23)
}

const FIRST: u8 = *SCALES.start();
const COUNT: usize = (*SCALES.end() - FIRST) as usize + 1;

/// The values of E2M1 times each scale of the window.
static SCALED_E2M1: [Line; COUNT] = {
    let mut t = [Line([0.0; 16]); COUNT];
    let mut i = 0;
    while i < COUNT {
        let mut c = 0;
        while c < 16 {
            t[i].0[c] = numerics::e2m1::TABLE[c] * f32::from_bits((FIRST as u32 + i as u32) << 23);
            c += 1;
        }
        i += 1;
    }
    t
};

/// The 16 values of E2M1 times the scale `byte` of the window.
///
/// # Safety
/// `byte` lies in the window.
#[inline(always)]
pub(crate) unsafe fn scaled_e2m1(byte: u8) -> *const Line {
    // SAFETY: the table has an entry for each byte of the window.
    unsafe { SCALED_E2M1.as_ptr().add(usize::from(byte - FIRST)) }
}

/// Largest index of the table of [`half_e2m1`].
pub(crate) const HALF_RANGE: u8 = 26;
/// Index at which the values stand unscaled.
pub(crate) const HALF_MIDDLE: u8 = 13;

#[repr(align(16))]
struct Half([u8; 16]);

/// Upper bytes of the half-precision values of E2M1 times 2^(index - 13); all are normal or zero, and their lower bytes
/// are zero.
static HALF_E2M1: [Half; HALF_RANGE as usize + 1] = {
    let mut t = [const { Half([0; 16]) }; HALF_RANGE as usize + 1];
    let mut d = 0;
    while d < t.len() {
        let mut c = 0;
        while c < 16 {
            // Magnitudes 0.5, 1, 1.5, 2, 3, 4, 6: exponent (code / 2 - 1), and a mantissa bit for the odd codes from 3.
            let magnitude = c as u8 & 7;
            let exponent = magnitude / 2 + 1 + d as u8;
            let mantissa = if magnitude > 1 { (magnitude & 1) * 2 } else { 0 };
            t[d].0[c] = (c as u8 & 8) << 4 | if magnitude > 0 { exponent << 2 | mantissa } else { 0 };
            c += 1;
        }
        d += 1;
    }
    t
};

/// Upper bytes of the 16 half-precision values of E2M1 times 2^(`index` - 13); the next index follows.
#[inline(always)]
pub(crate) fn half_e2m1(index: u8) -> *const u8 {
    HALF_E2M1[usize::from(index)].0.as_ptr()
}

/// The scale bytes of the groups of step `t` of row `r`, where the row ends within that step. Groups beyond the row hold
/// zero codes, to which any scale of the row will do.
#[inline(always)]
pub(crate) fn last_scales(v: &View, r: usize, t: usize) -> [u8; 2] {
    let scales = v.scales(r);
    [2 * t, 2 * t + 1].map(|g| scales.get(g).or(scales.last()).copied().unwrap_or_default())
}

/// Activations `x` times the scales of the block of 32 rows that holds row `r`, times 2^8: one scale stands for 32 rows
/// and 32 columns, so this is done once instead of for every weight.
#[inline(always)]
pub(crate) fn fold(v: &View, r: usize, x: &[f32], out: &mut [f32]) {
    let scales = v.scales(r);
    for ((o, x), s) in out.chunks_exact_mut(GROUP).zip(x.chunks_exact(GROUP)).zip(scales) {
        let s = factor_256(*s);
        for (o, x) in o.iter_mut().zip(x) {
            *o = x * s;
        }
    }
    out[scales.len() * GROUP..].fill(0.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_table_holds_the_values() {
        for d in 0..=HALF_RANGE {
            for c in 0..16 {
                let high = HALF_E2M1[usize::from(d)].0[c];
                let exponent = i32::from(high >> 2 & 31);
                let magnitude = if high & 0x7f == 0 {
                    0.0
                } else {
                    assert!((1..31).contains(&exponent), "normal");
                    (1.0 + f32::from(high & 3) / 4.0) * 2f32.powi(exponent - 15)
                };
                let value = if high & 0x80 != 0 { -magnitude } else { magnitude };
                let want = numerics::e2m1::TABLE[c] * 2f32.powi(i32::from(d) - i32::from(HALF_MIDDLE));
                assert_eq!(value.to_bits(), want.to_bits(), "{d} {c}");
            }
        }
    }
}
