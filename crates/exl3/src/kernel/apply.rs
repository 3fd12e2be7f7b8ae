//! Decoded tiles times rows of the batch. One sum's additions happen in one order whatever the number of rows: a row's
//! bits do not depend on its company.

use super::layout::Layout;
use crate::Isa;
use crate::rate::TILE;

/// Adds `tiles` (256 decoded weights each, in the layout's order) times the inputs of a group of 1, 2, 4 or 8 rows to the
/// group's sums. `x` is tiles x input vectors x rows x lanes, `sums` is rows x sums.
pub(super) fn apply(isa: Isa, layout: &Layout, tiles: &[f32], x: &[f32], rows: usize, sums: &mut [f32]) {
    let count = tiles.len() / TILE;
    assert!(sums.len() == rows * layout.sums_width() && x.len() >= count * rows * layout.input_width());
    /// One instance per number of rows, with as many sums at a time as registers hold.
    macro_rules! by_rows {
        ($f:ident, $lanes:literal, $per:literal, $slots:literal, $($rows:literal x $at_once:literal),*) => {
            match rows {
                // SAFETY: the machine has the instruction set; lengths were checked above.
                $($rows => unsafe { $f::<$lanes, $rows, $at_once, $per, $slots>(layout, tiles, x, sums) },)*
                _ => unreachable!("1, 2, 4 or 8 rows"),
            }
        };
    }
    macro_rules! by_shape {
        ($f:ident, $lanes:literal, $(($per:literal, $slots:literal): ($($rows:literal x $at_once:literal),*)),*) => {
            match (layout.per, layout.slots) {
                $(($per, $slots) => by_rows!($f, $lanes, $per, $slots, $($rows x $at_once),*),)*
                other => unreachable!("layout {other:?}"),
            }
        };
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Half | Isa::Avx512 => by_shape!(
            avx512, 16,
            (2, 2): (1 x 8, 2 x 8, 4 x 4, 8 x 2),
            (1, 4): (1 x 4, 2 x 4, 4 x 4),
            (1, 1): (1 x 8, 2 x 8, 4 x 4, 8 x 2)
        ),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => by_shape!(
            avx2, 8,
            (2, 2): (1 x 4, 2 x 4, 4 x 2, 8 x 1),
            (4, 4): (1 x 4, 2 x 4, 4 x 2, 8 x 1),
            (8, 8): (1 x 4, 2 x 4, 4 x 2)
        ),
        Isa::Portable => by_rows!(portable, 16, 1, 1, 1 x 1, 2 x 1, 4 x 1, 8 x 1),
    }
}

/// The loops for one vector type. Written with intrinsics: left to itself the compiler makes scalars of some shapes.
#[cfg(target_arch = "x86_64")]
macro_rules! multiply {
    ($name:ident, $features:literal, $lanes:literal, $load:ident, $store:ident, $fma:ident, $zero:ident) => {
        /// # Safety
        /// Lengths as [`apply`] checks them; the layout must have these lanes, vectors per sum and input vectors; the
        /// machine must have the features.
        #[target_feature(enable = $features)]
        unsafe fn $name<
            const LANES: usize,
            const ROWS: usize,
            const AT_ONCE: usize,
            const PER: usize,
            const SLOTS: usize,
        >(
            layout: &Layout,
            tiles: &[f32],
            x: &[f32],
            sums: &mut [f32],
        ) {
            use std::arch::x86_64::*;
            // Sums that are handled together use the same input vectors: neighbours where each sum uses all of them, else
            // every SLOTS-th.
            let apart = if PER == SLOTS { 1 } else { SLOTS };
            assert!(LANES == $lanes && layout.lanes == LANES && layout.sums % (AT_ONCE * apart) == 0);
            assert!(layout.per == PER && layout.slots == SLOTS);
            let width = layout.sums_width();
            let sums = sums.as_mut_ptr();
            for first in 0..layout.sums / AT_ONCE {
                let (first, other) = (first / apart * apart * AT_ONCE, first % apart);
                let at = |s: usize| first + other + s * apart;
                // SAFETY: within rows x sums, tiles x 256 and tiles x inputs floats, by the caller's contract.
                unsafe {
                    let mut sum = [[$zero(); AT_ONCE]; ROWS];
                    for r in 0..ROWS {
                        for s in 0..AT_ONCE {
                            sum[r][s] = $load(sums.add(r * width + at(s) * LANES));
                        }
                    }
                    let mut tile = tiles.as_ptr().add(at(0) * PER * LANES);
                    let mut x = x.as_ptr().add(other * ROWS * LANES);
                    for _ in 0..tiles.len() / TILE {
                        for k in 0..PER {
                            for s in 0..AT_ONCE {
                                let v = $load(tile.add((s * apart * PER + k) * LANES));
                                for r in 0..ROWS {
                                    let x = $load(x.add((k * ROWS + r) * LANES));
                                    sum[r][s] = $fma(v, x, sum[r][s]);
                                }
                            }
                        }
                        tile = tile.add(TILE);
                        x = x.add(SLOTS * ROWS * LANES);
                    }
                    for r in 0..ROWS {
                        for s in 0..AT_ONCE {
                            $store(sums.add(r * width + at(s) * LANES), sum[r][s]);
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

/// Row-major tiles: sixteen sums, one per column. Here `x` is tiles x 16 inputs x rows: it is not spread over lanes.
unsafe fn portable<
    const LANES: usize,
    const ROWS: usize,
    const AT_ONCE: usize,
    const PER: usize,
    const SLOTS: usize,
>(
    _: &Layout,
    tiles: &[f32],
    x: &[f32],
    sums: &mut [f32],
) {
    let mut sum = [[0f32; LANES]; ROWS];
    sum.as_flattened_mut().copy_from_slice(sums);
    for (w, x) in tiles.as_chunks::<LANES>().0.iter().zip(x.as_chunks::<ROWS>().0) {
        for r in 0..ROWS {
            for l in 0..LANES {
                // One rounding or two, as the target has it: the software fused multiply-add is far too slow.
                sum[r][l] = if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
                    w[l].mul_add(x[r], sum[r][l])
                } else {
                    w[l] * x[r] + sum[r][l]
                };
            }
        }
    }
    sums.copy_from_slice(sum.as_flattened());
}
