//! The quantisers against the formulas of the specification [§3.1], over every bf16 amax.

use numerics::{bf16, e2m1, e4m3, e8m0, quantise::*};

/// The smallest e with amax <= max·2^e, in double precision.
fn exact_exponent(amax: f64, max: f64) -> i32 {
    let mut e = (amax / max).log2().ceil() as i32 - 1;
    while amax > max * 2f64.powi(e) {
        e += 1;
    }
    e
}

#[test]
fn fp8_scale_is_the_smallest_power_of_two_for_every_bf16_amax() {
    for bits in 0..0x7f80u16 {
        let amax = bf16::from_bits(bits);
        let floored = f64::from(amax.max(1e-4));
        assert_eq!(fp8_exponent(amax), exact_exponent(floored, 448.0), "amax {amax}");
    }
    assert_eq!(fp8_exponent(0.0), -22, "the floor of 1e-4 gives the smallest scale 2^-22");
}

#[test]
fn fp4_scale_is_the_smallest_power_of_two_for_every_bf16_amax() {
    for bits in 0..0x7f80u16 {
        let amax = bf16::from_bits(bits);
        let floored = f64::from(amax).max(6.0 * 2f64.powi(-126));
        assert_eq!(fp4_exponent(amax), exact_exponent(floored, 6.0), "amax {amax}");
    }
}

#[test]
fn kv_scale_is_the_rounded_sixth_for_every_bf16_amax() {
    for bits in 0..0x7f80u16 {
        let amax = bf16::from_bits(bits);
        let mut codes = [0; 1];
        let scale = fp4_e4m3_block(&[amax], &mut codes);
        let sixth = f64::from(amax).max(6.0 / 512.0) / 6.0;
        assert_eq!(scale, e4m3::encode(sixth as f32), "amax {amax}");
        assert!(e4m3::decode(scale) >= 1.0 / 512.0);
    }
}

fn rows() -> Vec<Vec<f32>> {
    let mut seed = 1u64;
    let mut next = move || {
        seed = numerics::generator::mix(seed.wrapping_add(0x9E37_79B9_7F4A_7C15));
        seed
    };
    (0..200)
        .map(|k| {
            let scale = 2f32.powi(k - 100);
            (0..64).map(|_| bf16::round(((next() >> 40) as f32 / 8_388_608.0 - 1.0) * scale)).collect()
        })
        .collect()
}

#[test]
fn dequantised_values_are_the_nearest_of_their_grid_and_exact_in_bf16() {
    for row in rows() {
        let mut x = row.clone();
        qdq_fp8(&mut x);
        for (block, got) in row.chunks(32).zip(x.chunks(32)) {
            let e = fp8_exponent(block.iter().fold(0.0, |m: f32, v| m.max(v.abs())));
            for (v, g) in block.iter().zip(got) {
                let want = e4m3::decode(e4m3::encode((f64::from(*v) / 2f64.powi(e)) as f32)) * 2f32.powi(e);
                assert_eq!(*g, want);
                assert_eq!(bf16::round(*g), *g, "fp8 value {g} is not exact in bf16");
            }
        }
        let mut x = row.clone();
        qdq_fp4_e4m3(&mut x);
        assert!(x.iter().all(|g| bf16::round(*g) == *g), "KV values are exact in bf16");
    }
}

#[test]
fn stored_rows_read_back_as_the_fake_quantised_values() {
    for row in rows() {
        let mut out = vec![0.0; 64];
        let mut bytes = vec![0; fp8_row_bytes(64)];
        store_fp8(&row, &mut bytes);
        load_fp8(&bytes, &mut out);
        let mut want = row.clone();
        qdq_fp8(&mut want);
        assert_eq!(out, want);

        let mut bytes = vec![0; fp4_row_bytes(64)];
        store_fp4(&row, &mut bytes);
        load_fp4(&bytes, &mut out);
        let mut want = row.clone();
        qdq_fp4(&mut want);
        assert_eq!(out, want);

        let mut bytes = vec![0; kv_row_bytes(64)];
        store_kv(&row, &mut bytes);
        load_kv(&bytes, &mut out);
        let mut want = row.clone();
        qdq_fp4_e4m3(&mut want);
        assert_eq!(out, want);
    }
    assert_eq!((fp8_row_bytes(512), kv_row_bytes(512), fp4_row_bytes(128)), (528, 288, 68));
}

#[test]
fn quantising_twice_changes_nothing() {
    for row in rows() {
        for qdq in [qdq_fp8, qdq_fp4] {
            let mut once = row.clone();
            qdq(&mut once);
            let mut twice = once.clone();
            qdq(&mut twice);
            assert_eq!(once, twice);
        }
    }
}

#[test]
fn signs_of_zero_survive() {
    let mut x = [-0.0f32; 32];
    qdq_fp8(&mut x);
    assert!(x.iter().all(|v| v.is_sign_negative()));
    let mut x = [-0.0f32; 32];
    qdq_fp4(&mut x);
    assert!(x.iter().all(|v| v.is_sign_negative()));
    assert_eq!(e2m1::encode(-0.1), 8);
    assert_eq!(e8m0::decode(127), 1.0);
}

#[test]
fn pow2_is_exact_over_its_range() {
    for e in -149..=127 {
        assert_eq!(f64::from(pow2(e)), 2f64.powi(e), "2^{e}");
    }
}
