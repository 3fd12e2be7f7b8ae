//! Decoded tiles times rows of the batch. Each element of a tile has a sum of its own, to which tiles are added from the
//! first input on: a row's bits depend neither on its company nor on the instruction set.

use super::layout::Layout;
use crate::Isa;
use crate::rate::TILE;

/// Adds `tiles` (256 decoded weights each, in the layout's order) times the inputs of a group of 1, 2, 4 or 8 rows to the
/// group's sums. `x` is tiles x input vectors x rows x lanes, `sums` is rows x sums.
pub(super) fn apply(isa: Isa, layout: &Layout, tiles: &[f32], x: &[f32], rows: usize, sums: &mut [f32]) {
    let count = tiles.len() / TILE;
    assert!(sums.len() == rows * TILE && x.len() >= count * rows * layout.input_width());
    /// One instance per number of rows, with as many vectors at a time as registers hold.
    macro_rules! by_rows {
        ($f:ident, $slots:literal, $($rows:literal x $at_once:literal),*) => {
            match rows {
                // SAFETY: the machine has the instruction set; lengths were checked above.
                $($rows => unsafe { $f::<$rows, $at_once, $slots>(layout, tiles, x, sums) },)*
                _ => unreachable!("1, 2, 4 or 8 rows"),
            }
        };
    }
    #[cfg(target_arch = "x86_64")]
    macro_rules! by_slots {
        ($f:ident, $($slots:literal: ($($rows:literal x $at_once:literal),*)),*) => {
            match layout.slots {
                $($slots => by_rows!($f, $slots, $($rows x $at_once),*),)*
                other => unreachable!("{other} input vectors"),
            }
        };
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Half | Isa::Avx512 => by_slots!(
            avx512,
            1: (1 x 8, 2 x 8, 4 x 4, 8 x 2),
            2: (1 x 8, 2 x 8, 4 x 4, 8 x 2),
            4: (1 x 4, 2 x 4, 4 x 4)
        ),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => by_slots!(
            avx2,
            2: (1 x 4, 2 x 4, 4 x 2, 8 x 1),
            4: (1 x 4, 2 x 4, 4 x 2, 8 x 1),
            8: (1 x 4, 2 x 4, 4 x 2)
        ),
        Isa::Portable => by_rows!(portable, 16, 1 x 1, 2 x 1, 4 x 1, 8 x 1),
    }
}

/// The loops for one vector type. Written with intrinsics: left to itself the compiler makes scalars of some shapes.
#[cfg(target_arch = "x86_64")]
macro_rules! multiply {
    ($name:ident, $features:literal, $lanes:literal, $load:ident, $store:ident, $fma:ident, $zero:ident) => {
        /// # Safety
        /// Lengths as [`apply`] checks them; the layout must have these lanes and input vectors; the machine must have the
        /// features.
        #[target_feature(enable = $features)]
        unsafe fn $name<const ROWS: usize, const AT_ONCE: usize, const SLOTS: usize>(
            layout: &Layout,
            tiles: &[f32],
            x: &[f32],
            sums: &mut [f32],
        ) {
            use std::arch::x86_64::*;
            const LANES: usize = $lanes;
            assert!(layout.lanes == LANES && layout.slots == SLOTS);
            const { assert!((TILE / LANES).is_multiple_of(AT_ONCE * SLOTS)) };
            let sums = sums.as_mut_ptr();
            for first in 0..TILE / LANES / AT_ONCE {
                // Vectors that are handled together use the same input vector: every SLOTS-th.
                let (first, slot) = (first / SLOTS * SLOTS * AT_ONCE, first % SLOTS);
                let at = |s: usize| (first + slot + s * SLOTS) * LANES;
                // SAFETY: within rows x 256 sums, tiles x 256 and tiles x inputs floats, by the caller's contract.
                unsafe {
                    let mut sum = [[$zero(); AT_ONCE]; ROWS];
                    for r in 0..ROWS {
                        for s in 0..AT_ONCE {
                            sum[r][s] = $load(sums.add(r * TILE + at(s)));
                        }
                    }
                    let mut tile = tiles.as_ptr();
                    let mut x = x.as_ptr().add(slot * ROWS * LANES);
                    for _ in 0..tiles.len() / TILE {
                        for s in 0..AT_ONCE {
                            let v = $load(tile.add(at(s)));
                            for r in 0..ROWS {
                                sum[r][s] = $fma(v, $load(x.add(r * LANES)), sum[r][s]);
                            }
                        }
                        tile = tile.add(TILE);
                        x = x.add(SLOTS * ROWS * LANES);
                    }
                    for r in 0..ROWS {
                        for s in 0..AT_ONCE {
                            $store(sums.add(r * TILE + at(s)), sum[r][s]);
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
multiply!(avx512, "avx512f,fma", 16, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_setzero_ps);
#[cfg(target_arch = "x86_64")]
multiply!(avx2, "avx2,fma", 8, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, _mm256_setzero_ps);

/// Row-major tiles. Here `x` is tiles x 16 inputs x rows: it is not spread over lanes.
unsafe fn portable<const ROWS: usize, const AT_ONCE: usize, const SLOTS: usize>(
    _: &Layout,
    tiles: &[f32],
    x: &[f32],
    sums: &mut [f32],
) {
    for (tile, x) in tiles.as_chunks::<TILE>().0.iter().zip(x.chunks_exact(16 * ROWS)) {
        for (r, sums) in sums.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
            for i in 0..16 {
                for c in 0..16 {
                    let sum = &mut sums[16 * i + c];
                    *sum = tile[16 * i + c].mul_add(x[i * ROWS + r], *sum);
                }
            }
        }
    }
}
