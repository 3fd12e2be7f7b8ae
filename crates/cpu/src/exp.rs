//! The exponential of the softmax, the same bits on every machine.

/// e^`x`, at most one unit in the last place off; branch-free, so that loops over it become vector code.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Below, the result rounds to zero; above, it is infinite.
    let clamped = x.clamp(-104.0, 89.0);
    // Adding 1.5 * 2^23 rounds to the nearest integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // ln 2 in two parts, the first with few bits, so that n times it is exact.
    let r = n.mul_add(-0.693_359_4, clamped);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = (1.0f32 / 5040.0).mul_add(r, 1.0 / 720.0);
    let p = p.mul_add(r, 1.0 / 120.0);
    let p = p.mul_add(r, 1.0 / 24.0);
    let p = p.mul_add(r, 1.0 / 6.0);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r, 1.0);
    let p = p.mul_add(r, 1.0);
    // In two factors: 2^n itself may be subnormal or infinite where the result is neither.
    let n = shifted.to_bits() as i32 - ROUND.to_bits() as i32;
    let half = n >> 1;
    let power = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    let y = p * power(half) * power(n - half);
    if x.is_nan() { f32::NAN } else { y }
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn exp_is_within_one_unit_in_the_last_place() {
        // Every 37th single from the smallest to the largest argument with a finite result, both signs.
        for bits in (0..0x42d2_0000u32).step_by(37) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let want = f64::from(x).exp();
                let got = exp(x);
                if want > f64::from(f32::MAX) {
                    assert!(got == f32::INFINITY || got == f32::MAX, "exp({x}) = {got}");
                    continue;
                }
                let near = want as f32;
                let unit = f64::from(near.next_up()) - f64::from(near);
                assert!((f64::from(got) - want).abs() <= unit, "exp({x}) = {got}, not {want}");
            }
        }
    }

    #[test]
    fn exp_of_the_ends() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(0.0).to_bits(), 1.0f32.to_bits());
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(1e30), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}
