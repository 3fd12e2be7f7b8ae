//! Decoding without intrinsics, in loops that the compiler vectorises.

use crate::codebook::{MUL1_OFFSET, MUL1_SLOPE};
use crate::rate::TILE;
use crate::trellis::{ring_position, unpack};
use crate::{Codebook, Rate};

/// Decodes one tile, row-major.
pub(super) fn decode(rate: Rate, codebook: Codebook, tile: &[u8], out: &mut [f32; TILE]) {
    let states = unpack(rate, tile);
    let mut ring = [0f32; TILE];
    values(codebook, &states, &mut ring);
    for (at, out) in out.iter_mut().enumerate() {
        *out = ring[ring_position(at / 16, at % 16)];
    }
}

/// Codebook values of `states`.
fn values(codebook: Codebook, states: &[u16; TILE], out: &mut [f32; TILE]) {
    let (multiplier, increment) = (codebook.multiplier(), codebook.increment());
    for (out, state) in out.iter_mut().zip(states) {
        let x = u32::from(*state).wrapping_mul(multiplier).wrapping_add(increment);
        *out = round(if codebook == Codebook::Mul1 {
            let pairs = (x & 0x00FF_00FF) + (x >> 8 & 0x00FF_00FF);
            MUL1_SLOPE * ((pairs & 0xFFFF) + (pairs >> 16)) as f32 + MUL1_OFFSET
        } else {
            // fp16 to f32: the exponent fields are 12 to 15, so the constant bits carry the new bias too.
            let half = |h: u32| f32::from_bits((h & 0x8000) << 16 | ((h & 0x0FFF) << 13 ^ 0x3F6C_0000));
            half(x & 0xFFFF) + half(x >> 16)
        });
    }
}

/// To fp16, nearest even, by Veltkamp's split; right for every value of every codebook (see the test).
fn round(v: f32) -> f32 {
    let c = v * 8193.0;
    c - (c - v)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_equals_the_tables() {
        for codebook in Codebook::ALL {
            for first in (0..=u16::MAX).step_by(TILE) {
                let states = std::array::from_fn(|i| first + i as u16);
                let mut got = [0.0; TILE];
                values(codebook, &states, &mut got);
                assert!(got == codebook.table()[usize::from(first)..][..TILE], "{codebook:?} {first}");
            }
        }
    }
}
