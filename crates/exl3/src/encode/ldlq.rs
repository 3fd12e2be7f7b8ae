//! LDLQ: row blocks from last to first, each corrected by the errors of those already done (EXL3 specification, section 9).

use super::Encoder;
use super::calibration::Factor;
use crate::Isa;
use crate::rate::TILE;
use crate::trellis::{pack, row_column};
use rayon::prelude::*;

/// Columns that one task takes: two tiles, which the search runs side by side.
const WIDE: usize = 32;

/// Quantises `w` (in, out), row-major, in the rotated basis; the packed trellis. Columns do not depend on each other.
pub(super) fn quantize(encoder: &Encoder, w: &[f32], columns: usize, factor: Option<&Factor>) -> Vec<u8> {
    let size = encoder.rate.tile_bytes();
    let search = encoder.search();
    let strips: Vec<Vec<u8>> = (0..columns / WIDE)
        .into_par_iter()
        .map_init(
            || search.scratch(),
            |scratch, strip| {
                let rows: Vec<[f32; WIDE]> = w
                    .chunks_exact(columns)
                    .map(|row| std::array::from_fn(|c| row[strip * WIDE + c]))
                    .collect();
                quantize_strip(encoder, &search, rows, factor, scratch)
            },
        )
        .collect();
    let mut trellis = vec![0; w.len() / TILE * size];
    for (strip, tiles) in strips.iter().enumerate() {
        for (a, pair) in tiles.chunks_exact(2 * size).enumerate() {
            trellis[(a * columns / 16 + 2 * strip) * size..][..2 * size].copy_from_slice(pair);
        }
    }
    trellis
}

/// One strip: pairs of packed tiles, row block after row block.
fn quantize_strip(
    encoder: &Encoder,
    search: &super::Search,
    w: Vec<[f32; WIDE]>,
    factor: Option<&Factor>,
    scratch: &mut super::Scratch,
) -> Vec<u8> {
    let size = encoder.rate.tile_bytes();
    let table = encoder.codebook.table();
    let blocks = w.len() / 16;
    let mut packed = vec![0; blocks * 2 * size];
    let mut error = w; // rows below the present block hold W - Q already
    for block in (0..blocks).rev() {
        let mut target = [[0f32; WIDE]; 16];
        target.copy_from_slice(&error[16 * block..16 * block + 16]);
        if let Some(factor) = factor {
            feed_back(Isa::best(), &mut target, factor.column(block), &error[16 * block + 16..]);
        }
        let tiles: [[f32; TILE]; 2] = std::array::from_fn(|half| {
            std::array::from_fn(|i| {
                let (row, column) = row_column(i);
                target[row][16 * half + column]
            })
        });
        let states = search.pair([&tiles[0], &tiles[1]], scratch);
        for (half, states) in states.iter().enumerate() {
            for (i, state) in states.iter().enumerate() {
                let (row, column) = row_column(i);
                error[16 * block + row][16 * half + column] -= table[usize::from(*state)];
            }
            pack(encoder.rate, states, &mut packed[(2 * block + half) * size..][..size]);
        }
    }
    packed
}

/// target += sum over later blocks J of L[J, block]^T error[J].
fn feed_back(isa: Isa, target: &mut [[f32; WIDE]; 16], l: &[[f32; 256]], error: &[[f32; WIDE]]) {
    match isa {
        // SAFETY: the machine has it.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Half | Isa::Avx512 => unsafe { feed_back_avx512(target, l, error) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { feed_back_avx2(target, l, error) },
        Isa::Portable => feed_back_any(target, l, error),
    }
}

#[inline(always)]
fn feed_back_any(target: &mut [[f32; WIDE]; 16], l: &[[f32; 256]], error: &[[f32; WIDE]]) {
    // Eight rows at a time, so that their sums stay in registers.
    for (half, target) in target.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let mut sum = *target;
        for (l, error) in l.iter().zip(error.as_chunks::<16>().0) {
            for (l, error) in l.as_chunks::<16>().0.iter().zip(error) {
                for c in 0..8 {
                    for o in 0..WIDE {
                        sum[c][o] = l[8 * half + c].mul_add(error[o], sum[c][o]);
                    }
                }
            }
        }
        *target = sum;
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
fn feed_back_avx512(target: &mut [[f32; WIDE]; 16], l: &[[f32; 256]], error: &[[f32; WIDE]]) {
    feed_back_any(target, l, error);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn feed_back_avx2(target: &mut [[f32; WIDE]; 16], l: &[[f32; 256]], error: &[[f32; WIDE]]) {
    feed_back_any(target, l, error);
}
