//! float32 costs. The lowest bits of a cost carry the number of the candidate that won it, so one minimum decides both.
//! Only subtractions, fused multiply-adds and minima are used: every instruction set gives the same states.

use super::{Cost, Lane, Step, nodes, width};
use crate::codebook::STATES;
use crate::{Codebook, Isa, Rate};

const LANES: usize = 16;

impl Cost for f32 {
    const LANES: usize = LANES;
    type Value = f32;
    const ZERO: f32 = 0.0;
    /// Finite, because its low bits are overwritten too.
    const FAR: f32 = 1e30;

    fn from_weight(w: f32) -> f32 {
        w
    }

    fn key(self, node: usize) -> u64 {
        u64::from(self.to_bits()) << 32 | node as u64
    }
}

pub(super) fn table(codebook: Codebook) -> &'static [f32; STATES] {
    codebook.table()
}

pub(super) fn steps(rate: Rate, isa: Isa) -> [Step<f32>; 2] {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Half | Isa::Avx512 => super::steps!(step_avx512, rate),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => super::steps!(step_avx2, rate),
        Isa::Portable => super::steps!(step, rate),
    }
}

#[inline(always)]
fn step<const IN: usize, const OUT: usize>(table: &[f32; STATES], lanes: &mut [Lane<'_, f32>; 2]) {
    let mask = (1u32 << OUT) - 1;
    let per = 8 / width(OUT);
    for lane in lanes {
        for group in 0..nodes(OUT) / (LANES * per) {
            let mut winners = [0u8; LANES];
            for sub in 0..per {
                let node = (group * per + sub) * LANES;
                let mut best = [f32::INFINITY; LANES];
                for k in 0..1usize << OUT {
                    let state = k << (16 - OUT) | node;
                    let values = &table[state..state + LANES];
                    let before = &lane.cost[state >> IN..][..(LANES >> IN).max(1)];
                    for l in 0..LANES {
                        let d = values[l] - lane.w;
                        let c = d.mul_add(d, before[l >> IN]);
                        let c = f32::from_bits(c.to_bits() & !mask | k as u32);
                        best[l] = if c < best[l] { c } else { best[l] };
                    }
                }
                lane.next[node..node + LANES].copy_from_slice(&best);
                for l in 0..LANES {
                    winners[l] |= ((best[l].to_bits() & mask) as u8) << (sub * width(OUT));
                }
            }
            if let Some(out) = lane.winners.get_mut(group * LANES..(group + 1) * LANES) {
                out.copy_from_slice(&winners);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn step_avx2<const IN: usize, const OUT: usize>(table: &[f32; STATES], lanes: &mut [Lane<'_, f32>; 2]) {
    step::<IN, OUT>(table, lanes);
}

/// The same arithmetic with the costs of a vector's in-nodes spread by one permutation.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
fn step_avx512<const IN: usize, const OUT: usize>(table: &[f32; STATES], lanes: &mut [Lane<'_, f32>; 2]) {
    use std::arch::x86_64::*;
    let per = 8 / width(OUT);
    let groups = nodes(OUT) / (LANES * per);
    for lane in lanes.iter() {
        // A vector of in-node costs is read whole even where fewer count.
        assert!(lane.cost.len() >= nodes(IN) + LANES && lane.next.len() >= nodes(OUT));
        assert!(lane.winners.is_empty() || lane.winners.len() >= groups * LANES);
    }
    let keep = !lanes[0].winners.is_empty() && !lanes[1].winners.is_empty();
    let mask = _mm512_set1_epi32((1 << OUT) - 1);
    let w = [_mm512_set1_ps(lanes[0].w), _mm512_set1_ps(lanes[1].w)];
    let cost = [lanes[0].cost.as_ptr(), lanes[1].cost.as_ptr()];
    let next = [lanes[0].next.as_mut_ptr(), lanes[1].next.as_mut_ptr()];
    let order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let spread = _mm512_srl_epi32(order, _mm_cvtsi32_si128(IN as i32));
    for group in 0..groups {
        let mut winners = [_mm512_setzero_si512(); 2];
        for sub in 0..per {
            let node = (group * per + sub) * LANES;
            let mut best = [_mm512_set1_ps(f32::INFINITY); 2];
            for k in 0..1usize << OUT {
                let state = k << (16 - OUT) | node;
                // SAFETY: state + 16 <= 65,536.
                let values = unsafe { _mm512_loadu_ps(table.as_ptr().add(state)) };
                for t in 0..2 {
                    // SAFETY: (state >> IN) + 16 <= nodes(IN) + 16, checked above.
                    let before = unsafe {
                        let from = cost[t].add(state >> IN);
                        if IN >= 4 {
                            _mm512_set1_ps(*from)
                        } else {
                            _mm512_permutexvar_ps(spread, _mm512_loadu_ps(from))
                        }
                    };
                    let d = _mm512_sub_ps(values, w[t]);
                    let c = _mm512_castps_si512(_mm512_fmadd_ps(d, d, before));
                    // k or (c and not mask)
                    let c = _mm512_ternarylogic_epi32::<0xF2>(_mm512_set1_epi32(k as i32), mask, c);
                    best[t] = _mm512_min_ps(_mm512_castsi512_ps(c), best[t]);
                }
            }
            for t in 0..2 {
                // SAFETY: node + 16 <= nodes(OUT), checked above.
                unsafe { _mm512_storeu_ps(next[t].add(node), best[t]) };
                let won = _mm512_and_si512(_mm512_castps_si512(best[t]), mask);
                let shift = _mm_cvtsi32_si128((sub * width(OUT)) as i32);
                winners[t] = _mm512_or_si512(winners[t], _mm512_sll_epi32(won, shift));
            }
        }
        if keep {
            for t in 0..2 {
                // SAFETY: (group + 1) * 16 bytes, checked above.
                unsafe {
                    let to = lanes[t].winners.as_mut_ptr().add(group * LANES);
                    _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(winners[t]));
                }
            }
        }
    }
}
