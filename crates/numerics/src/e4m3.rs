//! E4M3FN: 1 sign, 4 exponent, 3 mantissa bits, bias 7, no infinity, largest finite value 448.

/// Largest finite magnitude.
pub const MAX: f32 = 448.0;

/// Values of all 256 codes; 0x7f and 0xff are NaN.
pub const TABLE: [f32; 256] = table();

const fn table() -> [f32; 256] {
    let mut t = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        t[code] = value(code as u8);
        code += 1;
    }
    t
}

const fn value(code: u8) -> f32 {
    let sign = (code as u32 & 0x80) << 24;
    let exponent = (code as u32 >> 3) & 15;
    let mantissa = code as u32 & 7;
    if exponent == 15 && mantissa == 7 {
        return f32::NAN;
    }
    if exponent == 0 {
        // Subnormals are multiples of 2^-9.
        let magnitude = mantissa as f32 * (1.0 / 512.0);
        return f32::from_bits(magnitude.to_bits() | sign);
    }
    f32::from_bits(sign | ((exponent + 120) << 23) | (mantissa << 20))
}

/// The value of `code`.
#[inline]
pub fn decode(code: u8) -> f32 {
    TABLE[code as usize]
}

/// `x` rounded to E4M3FN, nearest even, saturating at ±448; NaN gives 0x7f. The sign of zero is kept.
#[inline]
pub fn encode(x: f32) -> u8 {
    let sign = ((x.to_bits() >> 24) & 0x80) as u8;
    if x.is_nan() {
        return 0x7f | sign;
    }
    let a = x.abs();
    if a >= MAX {
        return sign | 0x7e;
    }
    if a < 1.0 / 64.0 {
        // Subnormal range: adding 1.5·2^(23-9) leaves a/2^-9 rounded to nearest even in the low bits.
        let shifted = a + 24576.0;
        return sign | (shifted.to_bits() - 24576.0f32.to_bits()) as u8;
    }
    let bits = a.to_bits();
    let rounded = bits + 0x7_ffff + ((bits >> 20) & 1);
    let code = (rounded >> 20) - (120 << 3);
    sign | code.min(0x7e) as u8
}
