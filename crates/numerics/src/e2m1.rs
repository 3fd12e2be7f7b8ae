//! E2M1: sign and the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.

/// Largest magnitude.
pub const MAX: f32 = 6.0;

/// Values of all 16 codes (bit 3 is the sign).
pub const TABLE: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The value of the low four bits of `code`.
#[inline]
pub fn decode(code: u8) -> f32 {
    TABLE[(code & 15) as usize]
}

/// `x` rounded to E2M1, nearest with ties to the even code, saturating at ±6. The sign of zero is kept; NaN gives
/// the largest magnitude, as the hardware conversion does.
#[inline]
pub fn encode(x: f32) -> u8 {
    let sign = ((x.to_bits() >> 28) & 8) as u8;
    let a = x.abs();
    // Midpoints between neighbours; a tie goes to the even code, so the comparison alternates between > and >=.
    let code = (a > 0.25) as u8
        + (a >= 0.75) as u8
        + (a > 1.25) as u8
        + (a >= 1.75) as u8
        + (a > 2.5) as u8
        + (a >= 3.5) as u8
        + (a > 5.0) as u8;
    if x.is_nan() { sign | 7 } else { sign | code }
}

/// The two codes of a packed byte, low nibble first.
#[inline]
pub fn unpack(byte: u8) -> [f32; 2] {
    [decode(byte), decode(byte >> 4)]
}

/// Packs two codes, `low` into the low nibble.
#[inline]
pub fn pack(low: u8, high: u8) -> u8 {
    (low & 15) | (high << 4)
}
