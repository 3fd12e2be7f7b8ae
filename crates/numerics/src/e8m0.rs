//! E8M0: a power of two as one biased exponent byte.

/// The byte that means NaN and never stands in a valid checkpoint.
pub const NAN: u8 = 255;

/// 2^(byte - 127); byte 0 is 2^-127 (a subnormal single) and byte 255 is NaN.
#[inline]
pub fn decode(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        NAN => f32::NAN,
        e => f32::from_bits(u32::from(e) << 23),
    }
}

/// The byte of the power of two 2^`exponent`; `exponent` must lie in -127..=127.
#[inline]
pub fn encode(exponent: i32) -> u8 {
    assert!((-127..=127).contains(&exponent), "E8M0 exponent {exponent} is out of range");
    (exponent + 127) as u8
}
