//! Exhaustive checks of the formats against definitions written independently of the implementation.

use numerics::{bf16, e2m1, e4m3, e8m0};

/// Nearest value of `table` to `x` (ties to the even code), by search in double precision.
fn nearest(table: &[(u8, f64)], x: f64) -> u8 {
    let best = table.iter().map(|(_, v)| (v - x).abs()).fold(f64::INFINITY, f64::min);
    let mut ties: Vec<u8> = table.iter().filter(|(_, v)| (v - x).abs() == best).map(|(c, _)| *c).collect();
    ties.sort_by_key(|c| c & 1);
    ties[0]
}

#[test]
fn e4m3_table_follows_the_definition() {
    for code in 0..=255u8 {
        let (s, e, m) = (code >> 7, (code >> 3) & 15, f64::from(code & 7));
        let magnitude = match (e, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => m / 8.0 * 2f64.powi(-6),
            _ => (1.0 + m / 8.0) * 2f64.powi(i32::from(e) - 7),
        };
        let expected = if s == 1 { -magnitude } else { magnitude };
        let got = e4m3::decode(code);
        if expected.is_nan() {
            assert!(got.is_nan(), "code {code:#x}");
        } else {
            assert_eq!(f64::from(got), expected, "code {code:#x}");
            assert_eq!(got.is_sign_negative(), s == 1, "sign of code {code:#x}");
            assert_eq!(e4m3::encode(got), code, "round trip of {code:#x}");
        }
    }
}

#[test]
fn e4m3_rounds_every_bf16_to_the_nearest() {
    let table: Vec<(u8, f64)> = (0..0x7f).map(|c| (c, f64::from(e4m3::decode(c)))).collect();
    for bits in 0..0x7f80u16 {
        let x = bf16::from_bits(bits);
        let expected = nearest(&table, f64::from(x).min(448.0));
        assert_eq!(e4m3::encode(x), expected, "{x}");
        assert_eq!(e4m3::encode(-x), expected | 0x80, "-{x}");
    }
    // Midpoints and their single-precision neighbours: bf16 does not reach every one of them.
    for c in 0..0x7eu8 {
        let mid = ((f64::from(e4m3::decode(c)) + f64::from(e4m3::decode(c + 1))) / 2.0) as f32;
        for x in [mid.next_down(), mid, mid.next_up()] {
            assert_eq!(e4m3::encode(x), nearest(&table, f64::from(x)), "{x}");
        }
    }
    assert!(e4m3::decode(e4m3::encode(f32::NAN)).is_nan());
    assert_eq!(e4m3::encode(f32::INFINITY), 0x7e);
}

#[test]
fn e2m1_rounds_every_bf16_to_the_nearest() {
    let table: Vec<(u8, f64)> = (0..8).map(|c| (c, f64::from(e2m1::decode(c)))).collect();
    for bits in 0..=0x7f80u16 {
        let x = bf16::from_bits(bits);
        let expected = nearest(&table, f64::from(x).min(6.0));
        assert_eq!(e2m1::encode(x), expected, "{x}");
        assert_eq!(e2m1::encode(-x), expected | 8, "-{x}");
    }
    for (mid, code) in [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)] {
        assert_eq!(e2m1::encode(mid), code, "tie at {mid}");
        assert_eq!(e2m1::encode(mid.next_down()), nearest(&table, f64::from(mid.next_down())));
        assert_eq!(e2m1::encode(mid.next_up()), nearest(&table, f64::from(mid.next_up())));
    }
    assert_eq!(e2m1::unpack(e2m1::pack(3, 12)), [1.5, -2.0]);
}

#[test]
fn e8m0_is_a_power_of_two_for_every_byte() {
    for byte in 0..255u8 {
        assert_eq!(f64::from(e8m0::decode(byte)), 2f64.powi(i32::from(byte) - 127), "byte {byte}");
        assert_eq!(e8m0::encode(i32::from(byte) - 127), byte);
    }
    assert!(e8m0::decode(e8m0::NAN).is_nan());
}

#[test]
fn bf16_rounds_to_nearest_even() {
    // Every pair of neighbouring finite bf16 values: their midpoint goes to the even one, its neighbours to the nearer.
    for bits in 0..0x7f7fu16 {
        let (a, b) = (bf16::from_bits(bits), bf16::from_bits(bits + 1));
        assert_eq!(bf16::to_bits(a), bits);
        let mid = f32::from_bits(u32::from(bits) << 16 | 0x8000);
        assert_eq!(f64::from(mid), (f64::from(a) + f64::from(b)) / 2.0);
        let even = if bits & 1 == 0 { bits } else { bits + 1 };
        assert_eq!(bf16::to_bits(mid), even);
        assert_eq!(bf16::to_bits(mid.next_down()), bits);
        assert_eq!(bf16::to_bits(mid.next_up()), bits + 1);
        assert_eq!(bf16::to_bits(-mid), even | 0x8000);
    }
    assert!(bf16::round(f32::NAN).is_nan());
    assert!(
        bf16::round(f32::from_bits(0x7f80_0001)).is_nan(),
        "a NaN with low payload must not become infinity"
    );
    assert_eq!(bf16::round(f32::MAX), f32::INFINITY);
}
