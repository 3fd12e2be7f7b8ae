//! bfloat16: the upper half of an IEEE single.

/// Bits of `x` rounded to bf16, nearest even; NaN stays NaN (quiet).
#[inline]
pub fn to_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return ((bits >> 16) | 0x0040) as u16;
    }
    // Adding half a unit, less one where the kept bit is even, carries exactly when nearest-even rounds up.
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// The value of bf16 `bits`.
#[inline]
pub fn from_bits(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// `x` rounded to bf16, nearest even, as `f32`.
#[inline]
pub fn round(x: f32) -> f32 {
    from_bits(to_bits(x))
}

/// Rounds every element in place.
pub fn round_slice(x: &mut [f32]) {
    for v in x {
        *v = round(*v);
    }
}
