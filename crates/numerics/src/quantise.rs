//! The block quantisers [§3.1]: fp8 with power-of-two scales, fp4 with power-of-two scales, fp4 with E4M3 scales.
//!
//! Inputs of the reference are bf16. With wider inputs (mode `exact`) the same formulas apply.

use crate::{e2m1, e4m3, e8m0};

/// Elements that share one scale of [`fp8_block`] and [`fp4_block`].
pub const BLOCK: usize = 32;
/// Elements that share one scale of [`fp4_e4m3_block`].
pub const KV_BLOCK: usize = 16;

fn amax(x: &[f32]) -> f32 {
    // f32::max ignores NaN operands; a NaN element still shows up in its own code.
    x.iter().fold(0.0f32, |m, v| m.max(v.abs()))
}

/// Exponent e of the smallest power of two that is >= `v`, read from the IEEE bits of a positive normal `v`.
fn ceil_log2(v: f32) -> i32 {
    let bits = v.to_bits();
    let exponent = (bits >> 23) as i32 - 127;
    exponent + i32::from(bits & 0x7f_ffff != 0)
}

/// Scale exponent of the fp8 quantiser for a block whose largest magnitude is `amax`.
pub fn fp8_exponent(amax: f32) -> i32 {
    ceil_log2(amax.max(1e-4) * (1.0 / 448.0))
}

/// Scale exponent of the fp4 power-of-two quantiser for a block whose largest magnitude is `amax`.
pub fn fp4_exponent(amax: f32) -> i32 {
    ceil_log2(amax.max(6.0 * f32::MIN_POSITIVE) * (1.0 / 6.0))
}

/// Quantises one block of at most [`BLOCK`] values to E4M3 codes; returns the E8M0 scale byte. An infinite or NaN
/// block takes the largest scale.
pub fn fp8_block(x: &[f32], codes: &mut [u8]) -> u8 {
    assert!(x.len() <= BLOCK && codes.len() == x.len(), "fp8 block of {} values", x.len());
    let e = fp8_exponent(amax(x)).min(127);
    let inverse = pow2(-e);
    for (c, v) in codes.iter_mut().zip(x) {
        // Division by a power of two is exact, so multiplying by its inverse gives the same code.
        *c = e4m3::encode((v * inverse).clamp(-e4m3::MAX, e4m3::MAX));
    }
    e8m0::encode(e)
}

/// Quantises one block of at most [`BLOCK`] values to E2M1 codes, one per byte; returns the E8M0 scale byte.
pub fn fp4_block(x: &[f32], codes: &mut [u8]) -> u8 {
    assert!(x.len() <= BLOCK && codes.len() == x.len(), "fp4 block of {} values", x.len());
    let e = fp4_exponent(amax(x)).min(127);
    let scale = pow2(e);
    for (c, v) in codes.iter_mut().zip(x) {
        *c = e2m1::encode((v / scale).clamp(-e2m1::MAX, e2m1::MAX));
    }
    e8m0::encode(e)
}

/// Quantises one block of at most [`KV_BLOCK`] values to E2M1 codes, one per byte; returns the E4M3 scale code.
pub fn fp4_e4m3_block(x: &[f32], codes: &mut [u8]) -> u8 {
    assert!(x.len() <= KV_BLOCK && codes.len() == x.len(), "KV fp4 block of {} values", x.len());
    let scale_code = e4m3::encode(amax(x).max(6.0 / 512.0) / 6.0);
    let scale = e4m3::decode(scale_code);
    for (c, v) in codes.iter_mut().zip(x) {
        *c = e2m1::encode((v / scale).clamp(-e2m1::MAX, e2m1::MAX));
    }
    scale_code
}

/// 2^`e` for -149 <= e <= 127, exact.
#[inline]
pub fn pow2(e: i32) -> f32 {
    if e >= -126 { f32::from_bits(((e + 127) as u32) << 23) } else { f32::from_bits(1 << (e + 149)) }
}

/// Quantises and dequantises a row in place with the fp8 quantiser, blocks of [`BLOCK`].
pub fn qdq_fp8(x: &mut [f32]) {
    let mut codes = [0; BLOCK];
    for block in x.chunks_mut(BLOCK) {
        let codes = &mut codes[..block.len()];
        let scale = e8m0::decode(fp8_block(block, codes));
        for (v, c) in block.iter_mut().zip(codes.iter()) {
            *v = e4m3::decode(*c) * scale;
        }
    }
}

/// Quantises and dequantises a row in place with the power-of-two fp4 quantiser, blocks of [`BLOCK`].
pub fn qdq_fp4(x: &mut [f32]) {
    let mut codes = [0; BLOCK];
    for block in x.chunks_mut(BLOCK) {
        let codes = &mut codes[..block.len()];
        let scale = e8m0::decode(fp4_block(block, codes));
        for (v, c) in block.iter_mut().zip(codes.iter()) {
            *v = e2m1::decode(*c) * scale;
        }
    }
}

/// Quantises and dequantises a row in place with the E4M3-scaled fp4 quantiser, blocks of [`KV_BLOCK`].
pub fn qdq_fp4_e4m3(x: &mut [f32]) {
    let mut codes = [0; KV_BLOCK];
    for block in x.chunks_mut(KV_BLOCK) {
        let codes = &mut codes[..block.len()];
        let scale = e4m3::decode(fp4_e4m3_block(block, codes));
        for (v, c) in block.iter_mut().zip(codes.iter()) {
            *v = e2m1::decode(*c) * scale;
        }
    }
}

/// Bytes of a row of `dim` values as fp8 codes followed by E8M0 scales (528 for 512).
pub const fn fp8_row_bytes(dim: usize) -> usize {
    dim + dim.div_ceil(BLOCK)
}

/// Bytes of a row of `dim` values as packed E2M1 followed by E8M0 scales (68 for 128). `dim` is even.
pub const fn fp4_row_bytes(dim: usize) -> usize {
    dim / 2 + dim.div_ceil(BLOCK)
}

/// Bytes of a row of `dim` values as packed E2M1 followed by E4M3 scales (288 for 512). `dim` is even.
pub const fn kv_row_bytes(dim: usize) -> usize {
    dim / 2 + dim.div_ceil(KV_BLOCK)
}

/// Stores a row in the window format: E4M3 codes, then E8M0 scales.
pub fn store_fp8(x: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), fp8_row_bytes(x.len()), "fp8 row bytes");
    let (codes, scales) = out.split_at_mut(x.len());
    for ((block, codes), scale) in x.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales) {
        *scale = fp8_block(block, codes);
    }
}

/// Reads a row stored by [`store_fp8`].
pub fn load_fp8(row: &[u8], out: &mut [f32]) {
    assert_eq!(row.len(), fp8_row_bytes(out.len()), "fp8 row bytes");
    let (codes, scales) = row.split_at(out.len());
    for ((block, codes), scale) in out.chunks_mut(BLOCK).zip(codes.chunks(BLOCK)).zip(scales) {
        let s = e8m0::decode(*scale);
        for (v, c) in block.iter_mut().zip(codes) {
            *v = e4m3::decode(*c) * s;
        }
    }
}

fn store_fp4_with(x: &[f32], out: &mut [u8], size: usize, block: fn(&[f32], &mut [u8]) -> u8) {
    assert!(x.len().is_multiple_of(2), "fp4 row of odd length {}", x.len());
    assert_eq!(out.len(), x.len() / 2 + x.len().div_ceil(size), "fp4 row bytes");
    let (packed, scales) = out.split_at_mut(x.len() / 2);
    let mut codes = [0; BLOCK];
    for ((values, bytes), scale) in x.chunks(size).zip(packed.chunks_mut(size / 2)).zip(scales) {
        let codes = &mut codes[..values.len()];
        *scale = block(values, codes);
        for (byte, pair) in bytes.iter_mut().zip(codes.chunks(2)) {
            *byte = e2m1::pack(pair[0], pair[1]);
        }
    }
}

fn load_fp4_with(row: &[u8], out: &mut [f32], size: usize, scale_of: fn(u8) -> f32) {
    assert_eq!(row.len(), out.len() / 2 + out.len().div_ceil(size), "fp4 row bytes");
    let (packed, scales) = row.split_at(out.len() / 2);
    for ((values, bytes), scale) in out.chunks_mut(size).zip(packed.chunks(size / 2)).zip(scales) {
        let s = scale_of(*scale);
        for (pair, byte) in values.chunks_mut(2).zip(bytes) {
            let v = e2m1::unpack(*byte);
            pair[0] = v[0] * s;
            pair[1] = v[1] * s;
        }
    }
}

/// Stores a row in the index-key format: packed E2M1, then E8M0 scales.
pub fn store_fp4(x: &[f32], out: &mut [u8]) {
    store_fp4_with(x, out, BLOCK, fp4_block);
}

/// Reads a row stored by [`store_fp4`].
pub fn load_fp4(row: &[u8], out: &mut [f32]) {
    load_fp4_with(row, out, BLOCK, e8m0::decode);
}

/// Stores a row in the compressed-KV format: packed E2M1, then E4M3 scales.
pub fn store_kv(x: &[f32], out: &mut [u8]) {
    store_fp4_with(x, out, KV_BLOCK, fp4_e4m3_block);
}

/// Reads a row stored by [`store_kv`].
pub fn load_kv(row: &[u8], out: &mut [f32]) {
    load_fp4_with(row, out, KV_BLOCK, e4m3::decode);
}
