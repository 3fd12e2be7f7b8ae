//! The rotary tables against the published bits [§2.1].

use ops::{RopeTable, rope::Yarn};

fn bits(text: &str) -> Vec<u32> {
    text.split_whitespace().map(|w| u32::from_str_radix(w, 16).unwrap()).collect()
}

#[test]
fn frequencies_have_the_published_bits() {
    let yarn = bits(
        "3f800000 3f300a3a 3ef21c1f 3ea67d01 3e64f92e 3e1d7475 3dd88cb4 3d94e963 3d4ccccd 3d0cd4fb 3cc1b019 \
         3c8530ce 3c372dbf 3bfbed88 3bad3d5e 3b6e4237 3b147ae1 3ab714e0 3a5ebdb6 3a0530ce 399bb3af 39305978 \
         38be904d 383e9b5f 37a3d70c 36b443d0 3677eba6 362a7be8 35ea77ff 35a13bdc 355dbf30 35187c4d",
    );
    let plain = bits(
        "3f800000 3f3ff911 3f0ff59a 3ed7e89b 3ea1e89b 3e72d423 3e361887 3e088d77 3dcccccd 3d99940d 3d6655c2 \
         3d2cba15 3d0186e3 3cc2434f 3c91ad39 3c5a7bf2 3c23d70a 3bf5b9b0 3bb8449c 3b8a2e77 3b4f3e38 3b1b690d \
         3ae91528 3aaec98e 3a83126f 3a44948c 3a136a16 39dd1725 39a5cb60 3978a815 393a7753 390bd472",
    );
    let parameters = Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original: 65_536 };
    let hex = |t: &RopeTable| t.freqs().iter().map(|f| format!("{:08x}", f.to_bits())).collect::<Vec<_>>();
    let want = |b: &[u32]| b.iter().map(|b| format!("{b:08x}")).collect::<Vec<_>>();
    assert_eq!(hex(&RopeTable::plain(10_000.0, 64)), want(&plain));
    assert_eq!(hex(&RopeTable::yarn(160_000.0, 64, parameters)), want(&yarn));
}

#[test]
fn the_angle_is_rounded_before_the_turn() {
    // At a million positions the rounded angle differs from the exact one by up to 0.03 rad, and counts.
    let t = RopeTable::plain(10_000.0, 64);
    let p = 1_000_003u32;
    let exact = f64::from(p) * f64::from(t.freqs()[1]);
    let rounded = f64::from((f64::from(p) * f64::from(t.freqs()[1])) as f32);
    assert!((exact - rounded).abs() > 1e-3);
    assert_eq!(t.turn(1, p), (rounded.cos() as f32, rounded.sin() as f32));
}
