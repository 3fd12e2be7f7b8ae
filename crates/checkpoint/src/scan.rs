//! Values that no weight may hold.

use rayon::prelude::*;

use crate::Dtype;

/// Bytes that one task scans; a multiple of every element size.
const CHUNK: usize = 1 << 20;

/// Says what is wrong with the first bad element, if there is one.
pub(crate) fn fault(dtype: Dtype, bytes: &[u8]) -> Option<String> {
    let (first, what) = match dtype {
        Dtype::E8m0 => (first(bytes, |c| c.iter().position(|b| *b == 255)), "scale 255 (NaN)"),
        Dtype::E4m3 => (first(bytes, |c| c.iter().position(|b| b & 0x7f == 0x7f)), "a NaN code"),
        Dtype::Bf16 => (first(bytes, |c| word_position(c, 0x7f80)), "a non-finite value"),
        Dtype::F16 => (first(bytes, |c| word_position(c, 0x7c00)), "a non-finite value"),
        Dtype::F32 => (first(bytes, f32_position), "a non-finite value"),
        _ => (None, ""),
    };
    first.map(|i| format!("holds {what} at element {}", i / dtype.size()))
}

/// Byte offset of the first hit; `position` counts bytes within a chunk.
fn first(bytes: &[u8], position: impl Fn(&[u8]) -> Option<usize> + Sync) -> Option<usize> {
    bytes.par_chunks(CHUNK).enumerate().find_map_first(|(i, chunk)| position(chunk).map(|p| i * CHUNK + p))
}

/// Two-byte floats whose exponent bits are all set.
fn word_position(chunk: &[u8], exponent: u16) -> Option<usize> {
    chunk.chunks_exact(2).position(|b| u16::from_le_bytes([b[0], b[1]]) & exponent == exponent).map(|i| 2 * i)
}

fn f32_position(chunk: &[u8]) -> Option<usize> {
    chunk
        .chunks_exact(4)
        .position(|b| !f32::from_le_bytes([b[0], b[1], b[2], b[3]]).is_finite())
        .map(|i| 4 * i)
}
