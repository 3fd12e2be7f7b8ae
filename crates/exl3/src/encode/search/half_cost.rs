//! fp16 costs in hardware, to the bit as exllamav3's reference kernel: the difference is rounded to fp16, its square and the
//! sum once together; of equal candidates the lowest wins.

use super::{Cost, Lane, Step, nodes, rank, width};
use crate::codebook::{STATES, Table};
use crate::{Codebook, Rate};
use half::f16;
use std::arch::x86_64::*;
use std::sync::LazyLock;

const LANES: usize = 32;
const INFINITY: u16 = 0x7C00;

/// fp16 bits.
impl Cost for u16 {
    const LANES: usize = LANES;
    type Value = u16;
    const ZERO: u16 = 0;
    const FAR: u16 = INFINITY;

    fn from_weight(w: f32) -> u16 {
        f16::from_f32(w).to_bits()
    }

    fn key(self, node: usize) -> u64 {
        u64::from(self) << 16 | rank(node)
    }
}

pub(super) fn table(codebook: Codebook) -> &'static [u16; STATES] {
    static TABLES: LazyLock<[Box<Table<u16>>; 3]> =
        LazyLock::new(|| Codebook::ALL.map(|codebook| Table::build(codebook, f16::to_bits)));
    &TABLES[codebook as usize].0
}

pub(super) fn steps(rate: Rate) -> [Step<u16>; 2] {
    super::steps!(step, rate)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512fp16")]
fn step<const IN: usize, const OUT: usize>(table: &[u16; STATES], lanes: &mut [Lane<'_, u16>; 2]) {
    let per = 8 / width(OUT);
    let groups = nodes(OUT) / (LANES * per);
    for lane in lanes.iter() {
        // A vector of in-node costs is read whole even where fewer count.
        assert!(lane.cost.len() >= nodes(IN) + LANES && lane.next.len() >= nodes(OUT));
        assert!(lane.winners.is_empty() || lane.winners.len() >= groups * LANES);
    }
    let keep = !lanes[0].winners.is_empty() && !lanes[1].winners.is_empty();
    let half = |bits: u16| _mm512_castsi512_ph(_mm512_set1_epi16(bits as i16));
    let w = [half(lanes[0].w), half(lanes[1].w)];
    let cost = [lanes[0].cost.as_ptr(), lanes[1].cost.as_ptr()];
    let next = [lanes[0].next.as_mut_ptr(), lanes[1].next.as_mut_ptr()];
    let mut order = [0u8; 64];
    for (i, byte) in order.iter_mut().enumerate() {
        *byte = (2 * ((i / 2) >> IN) + i % 2) as u8;
    }
    // SAFETY: 64 bytes.
    let spread = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
    for group in 0..groups {
        let mut winners = [_mm512_setzero_si512(); 2];
        for sub in 0..per {
            let node = (group * per + sub) * LANES;
            let mut best = [half(INFINITY); 2];
            let mut number = [_mm512_setzero_si512(); 2];
            for k in 0..1usize << OUT {
                let state = k << (16 - OUT) | node;
                // SAFETY: state + 32 <= 65,536.
                let values = unsafe { _mm512_loadu_si512(table.as_ptr().add(state).cast()) };
                let values = _mm512_castsi512_ph(values);
                for t in 0..2 {
                    // SAFETY: (state >> IN) + 32 <= nodes(IN) + 32, checked above.
                    let before = unsafe {
                        let from = cost[t].add(state >> IN);
                        if IN >= 5 {
                            _mm512_set1_epi16(*from as i16)
                        } else {
                            _mm512_permutexvar_epi8(spread, _mm512_loadu_si512(from.cast()))
                        }
                    };
                    let d = _mm512_sub_ph(values, w[t]);
                    let c = _mm512_fmadd_ph(d, d, _mm512_castsi512_ph(before));
                    let better = _mm512_cmp_ph_mask::<_CMP_LT_OQ>(c, best[t]);
                    best[t] = _mm512_mask_blend_ph(better, best[t], c);
                    number[t] = _mm512_mask_blend_epi16(better, number[t], _mm512_set1_epi16(k as i16));
                }
            }
            for t in 0..2 {
                // SAFETY: node + 32 <= nodes(OUT), checked above.
                unsafe { _mm512_storeu_si512(next[t].add(node).cast(), _mm512_castph_si512(best[t])) };
                let shift = _mm_cvtsi32_si128((sub * width(OUT)) as i32);
                winners[t] = _mm512_or_si512(winners[t], _mm512_sll_epi16(number[t], shift));
            }
        }
        if keep {
            for t in 0..2 {
                // SAFETY: (group + 1) * 32 bytes, checked above.
                unsafe {
                    let to = lanes[t].winners.as_mut_ptr().add(group * LANES);
                    _mm256_storeu_si256(to.cast(), _mm512_cvtepi16_epi8(winners[t]));
                }
            }
        }
    }
}
