//! Inputs in the order of a kernel's lanes: a permutation of sixteen at a time.

use super::layout::Layout;
use crate::Isa;

/// Spreads sixteen inputs of one row over `to`: one vector of the layout's lanes every `stride` floats.
pub(super) fn arrange(isa: Isa, layout: &Layout, x: &[f32; 16], to: &mut [f32], stride: usize) {
    let lanes = if layout.plain { 1 } else { layout.lanes };
    let vectors = layout.rows.len() / lanes;
    assert!(layout.rows.len() == vectors * lanes && to.len() >= (vectors - 1) * stride + lanes);
    match (isa, lanes) {
        // SAFETY: the machine has the instruction set; `rows` holds and `to` takes that many vectors of 16 or 8.
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Half | Isa::Avx512, 16) => unsafe { avx512(&layout.rows, x, to.as_mut_ptr(), stride) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, 8) => unsafe { avx2(&layout.rows, x, to.as_mut_ptr(), stride) },
        _ => {
            for (rows, to) in layout.rows.chunks_exact(lanes).zip(to.chunks_mut(stride)) {
                to.iter_mut().zip(rows).for_each(|(to, row)| *to = x[usize::from(*row) % 16]);
            }
        }
    }
}

/// # Safety
/// `to` must take a vector of sixteen every `stride` floats for each sixteen of `rows`; the machine must have AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2")]
unsafe fn avx512(rows: &[u8], x: &[f32; 16], to: *mut f32, stride: usize) {
    use std::arch::x86_64::*;
    // SAFETY: by the contract.
    unsafe {
        let x = _mm512_loadu_ps(x.as_ptr());
        for (v, rows) in rows.as_chunks::<16>().0.iter().enumerate() {
            let index = _mm512_cvtepu8_epi32(_mm_loadu_si128(rows.as_ptr().cast()));
            _mm512_storeu_ps(to.add(v * stride), _mm512_permutexvar_ps(index, x));
        }
    }
}

/// # Safety
/// `to` must take a vector of eight every `stride` floats for each eight of `rows`; the machine must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(rows: &[u8], x: &[f32; 16], to: *mut f32, stride: usize) {
    use std::arch::x86_64::*;
    // SAFETY: by the contract.
    unsafe {
        let (low, high) = (_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8)));
        for (v, rows) in rows.as_chunks::<8>().0.iter().enumerate() {
            let index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(rows.as_ptr().cast()));
            let (low, high) = (_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index));
            let is_high = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index));
            _mm256_storeu_ps(to.add(v * stride), _mm256_blendv_ps(low, high, is_high));
        }
    }
}
