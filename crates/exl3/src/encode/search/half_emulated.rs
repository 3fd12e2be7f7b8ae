//! The arithmetic of `half_cost` in float32, for machines without fp16 arithmetic: every cost is an fp16 number.

use super::{Cost, Lane, Step, nodes, width};
use crate::codebook::STATES;
use crate::{Codebook, Isa, Rate};
use bytemuck::{Pod, Zeroable};
use half::f16;

const LANES: usize = 16;

/// A float32 that holds an fp16 number.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Emulated(f32);

// SAFETY: a transparent wrapper of f32.
unsafe impl Zeroable for Emulated {}
// SAFETY: as above; Copy and 'static.
unsafe impl Pod for Emulated {}

impl Cost for Emulated {
    const LANES: usize = LANES;
    type Value = f32;
    const ZERO: Emulated = Emulated(0.0);
    const FAR: Emulated = Emulated(f32::INFINITY);

    fn from_weight(w: f32) -> Emulated {
        Emulated(f16::from_f32(w).to_f32())
    }

    fn key(self, node: usize) -> u64 {
        u64::from(self.0.to_bits()) << 16 | super::rank(node)
    }
}

pub(super) fn table(codebook: Codebook) -> &'static [f32; STATES] {
    codebook.table()
}

pub(super) fn steps(rate: Rate, isa: Isa) -> [Step<Emulated>; 2] {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Half | Isa::Avx512 => super::steps!(step_avx512, rate),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => super::steps!(step_avx2, rate),
        Isa::Portable => super::steps!(step, rate),
    }
}

/// A nonnegative `v` rounded to nearest even fp16.
#[inline(always)]
fn round(v: f32) -> f32 {
    let bits = v.to_bits();
    let normal = f32::from_bits((bits + 0xFFF + (bits >> 13 & 1)) & !0x1FFF);
    let small = (v + 0.5) - 0.5; // the ulp of 0.5 is the smallest fp16, 2^-24
    let v = if v < 6.103_515_6e-5 { small } else { normal };
    if v > 65_504.0 { f32::INFINITY } else { v }
}

/// |value - w| rounded to fp16. Where the float32 difference is inexact, one of the two is below 2^-12 of the other, so that
/// no tie of fp16 is near and rounding twice does no harm.
#[inline(always)]
fn difference(value: f32, w: f32) -> f32 {
    round((value - w).abs())
}

/// d d + cost rounded once to fp16: the exact product, then a sum rounded to odd, which survives the second rounding.
#[inline(always)]
fn square_sum(d: f32, cost: f32) -> f32 {
    let square = d * d;
    let sum = square + cost;
    let part = sum - square;
    let lost = (square - (sum - part)) + (cost - part);
    let down = u32::from(lost < 0.0);
    let odd = u32::from(lost != 0.0 && sum < f32::INFINITY);
    round(f32::from_bits((sum.to_bits() - (down & odd)) | odd))
}

#[inline(always)]
fn step<const IN: usize, const OUT: usize>(table: &[f32; STATES], lanes: &mut [Lane<'_, Emulated>; 2]) {
    let per = 8 / width(OUT);
    for lane in lanes {
        let w = lane.w.0;
        for group in 0..nodes(OUT) / (LANES * per) {
            let mut winners = [0u8; LANES];
            for sub in 0..per {
                let node = (group * per + sub) * LANES;
                let mut best = [f32::INFINITY; LANES];
                let mut number = [0u32; LANES];
                for k in 0..1usize << OUT {
                    let state = k << (16 - OUT) | node;
                    let values = &table[state..state + LANES];
                    let before = &lane.cost[state >> IN..][..(LANES >> IN).max(1)];
                    for l in 0..LANES {
                        let c = square_sum(difference(values[l], w), before[l >> IN].0);
                        let better = c < best[l];
                        best[l] = if better { c } else { best[l] };
                        number[l] = if better { k as u32 } else { number[l] };
                    }
                }
                for l in 0..LANES {
                    lane.next[node + l] = Emulated(best[l]);
                    winners[l] |= (number[l] as u8) << (sub * width(OUT));
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
fn step_avx2<const IN: usize, const OUT: usize>(table: &[f32; STATES], lanes: &mut [Lane<'_, Emulated>; 2]) {
    step::<IN, OUT>(table, lanes);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
fn step_avx512<const IN: usize, const OUT: usize>(
    table: &[f32; STATES],
    lanes: &mut [Lane<'_, Emulated>; 2],
) {
    step::<IN, OUT>(table, lanes);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nonnegative finite fp16 numbers, every exponent, crowded at the ends of the mantissa.
    fn halves() -> Vec<f32> {
        let mantissas = (0..1024).filter(|m| m % 37 < 2 || *m > 1021);
        mantissas.flat_map(|m| (0..31).map(move |e| f16::from_bits((e << 10 | m) as u16).to_f32())).collect()
    }

    /// Nearest even fp16 of a nonnegative `v`. (half's own conversions from f64 round twice or drop low bits.)
    fn nearest(v: f64) -> f32 {
        let about = f16::from_f32(v as f32).to_bits();
        let candidates = about.saturating_sub(1)..=(about + 1).min(0x7C00);
        // Infinity stands for 65,536 when it comes to what is near.
        let value = |b: u16| if b == 0x7C00 { 65_536.0 } else { f64::from(f16::from_bits(b).to_f32()) };
        let key = |b: &u16| ((value(*b) - v).abs(), b & 1);
        let best = candidates.min_by(|a, b| key(a).partial_cmp(&key(b)).unwrap()).unwrap();
        f16::from_bits(best).to_f32()
    }

    #[test]
    fn rounds_once() {
        let numbers = halves();
        for d in &numbers {
            for c in &numbers {
                // Exact in f64, except where the smaller cannot matter to fp16.
                let want = nearest(f64::from(*d) * f64::from(*d) + f64::from(*c));
                assert_eq!(square_sum(*d, *c), want, "{d:e} {c:e}");
                for w in [*c, -c] {
                    let want = nearest((f64::from(*d) - f64::from(w)).abs());
                    assert_eq!(difference(*d, w), want, "{d:e} {w:e}");
                }
            }
        }
        // A float32 tie that is none: 1.0732422^2 + 6.6161156e-6 lies just below one.
        let (d, c) = (f16::from_bits(0x3C4B).to_f32(), f16::from_bits(0x006F).to_f32());
        assert_eq!(square_sum(d, c), 1.151_367_2);
        assert_eq!(square_sum(300.0, 0.0), f32::INFINITY);
        assert_eq!(square_sum(1.0, f32::INFINITY), f32::INFINITY);
    }
}
