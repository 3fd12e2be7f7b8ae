//! The functions of `math.h` and `numerics.h` on the emulator, against double precision and against the `numerics` crate.
#![cfg(emulator)]

use gpu::{Binding, Constant, Device, Dispatch, emu::Emu, kernels::kernel};
use numerics::{bf16, e2m1, e4m3, e8m0};

/// Bits of function `number` at `count` singles whose bits are `first`, `first + step`, ….
fn bits(number: u32, first: u32, step: u32, count: u32) -> Vec<u32> {
    let device = Emu::open().expect("the emulator");
    let y = device.allocate(4 * count as usize).unwrap();
    let params: Vec<u8> = [count, first, step].iter().flat_map(|w| w.to_le_bytes()).collect();
    let dispatch = Dispatch {
        pipeline: device.pipeline(kernel("functions"), &[(0, Constant::U32(number))]).unwrap(),
        bindings: vec![Binding::Buffer(y.clone(), 0), Binding::Inline(params.into())],
        threadgroup: vec![],
        groups: [count.div_ceil(256), 1, 1],
        threads: [256, 1, 1],
        barrier: true,
    };
    device.submit(vec![dispatch]).unwrap();
    let mut data = vec![0; 4 * count as usize];
    device.read(&y, 0, &mut data).unwrap();
    data.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Every bf16, and singles at a distance that is prime to all powers of two.
const GRIDS: [(u32, u32); 2] = [(1 << 16, 1 << 16), (65_521 * 7, (u32::MAX / (65_521 * 7)))];

/// A function in double precision, the inputs that count, and its largest error in units of the last place.
struct Function {
    name: &'static str,
    exact: fn(f64) -> f64,
    domain: fn(f32) -> bool,
    units: f64,
}

const FUNCTIONS: [Function; 6] = [
    // Results from the smallest normal single on; below it is zero.
    Function { name: "exp", exact: f64::exp, domain: |x| (-87.33..=88.72).contains(&x), units: 0.6 },
    Function { name: "log1p", exact: f64::ln_1p, domain: |x| x >= 0.0 && x.is_finite(), units: 0.75 },
    // Two functions, each with its error.
    Function { name: "softplus", exact: softplus, domain: |x| x.is_finite() && x > -87.0, units: 2.0 },
    // An exponential, a sum and a quotient.
    Function {
        name: "sigmoid",
        exact: |x| 1.0 / (1.0 + (-x).exp()),
        domain: |x| (-80.0..=1e30).contains(&x),
        units: 2.1,
    },
    Function {
        name: "silu",
        exact: |x| x / (1.0 + (-x).exp()),
        domain: |x| (-80.0..=1e30).contains(&x),
        units: 2.1,
    },
    Function {
        name: "rsqrt",
        exact: |x| 1.0 / x.sqrt(),
        domain: |x| (1e-30..=1e30).contains(&x),
        units: 0.51,
    },
];

fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

#[test]
fn functions_round_to_the_bf16_of_the_exact_result() {
    for (number, f) in FUNCTIONS.iter().enumerate() {
        let (mut worst, mut at, mut other) = (0.0f64, 0.0f32, 0);
        for (step, count) in GRIDS {
            for (i, got) in bits(number as u32, 0, step, count).into_iter().enumerate() {
                let (x, got) = (f32::from_bits((i as u32).wrapping_mul(step)), f32::from_bits(got));
                if !(f.domain)(x) || x != 0.0 && x.abs() < 1e-30 {
                    continue;
                }
                let want = (f.exact)(f64::from(x));
                let rounded = want as f32;
                if rounded != 0.0 && !rounded.is_normal() {
                    continue;
                }
                let unit = f64::from(f32::from_bits(rounded.abs().to_bits() + 1)) - f64::from(rounded.abs());
                let units = (f64::from(got) - want).abs() / unit;
                if units > worst {
                    (worst, at) = (units, x);
                }
                if step == 1 << 16 && bf16::to_bits(got) != bf16::to_bits(rounded) {
                    other += 1;
                    eprintln!("  {} of {x:e}: {got:e}, exactly {want:e}", f.name);
                }
            }
        }
        eprintln!("{:10} {worst:.3} units at {at:e}, {other} other bf16", f.name);
        assert!(worst <= f.units, "{}: {worst} units at {at:e}", f.name);
        assert_eq!(other, 0, "{}: results of bf16 inputs with another bf16", f.name);
    }
}

#[test]
fn exp_ends_as_it_should() {
    let at = |x: f32| f32::from_bits(bits(0, x.to_bits(), 1, 1)[0]);
    assert_eq!((at(0.0), at(f32::NEG_INFINITY), at(-1e30)), (1.0, 0.0, 0.0));
    assert_eq!((at(f32::INFINITY), at(100.0), at(-88.0)), (f32::INFINITY, f32::INFINITY, 0.0));
    assert!(at(f32::NAN).is_nan());
}

type Encoder = fn(f32) -> u32;
type Decoder = fn(u8) -> f32;

#[test]
fn number_formats_have_the_bits_of_the_numerics_crate() {
    let encoders: [(u32, Encoder); 3] =
        [(6, |x| bf16::round(x).to_bits()), (7, |x| e4m3::encode(x).into()), (8, |x| e2m1::encode(x).into())];
    for (number, want) in encoders {
        for (step, count) in GRIDS {
            for (i, got) in bits(number, 0, step, count).into_iter().enumerate() {
                let x = f32::from_bits((i as u32).wrapping_mul(step));
                assert_eq!(got, want(x), "function {number} of {x:e} ({:#x})", x.to_bits());
            }
        }
    }
    let decoders: [(u32, u32, Decoder); 3] =
        [(9, 256, e4m3::decode), (10, 16, e2m1::decode), (11, 256, e8m0::decode)];
    for (number, count, want) in decoders {
        for (code, got) in bits(number, 0, 1, count).into_iter().enumerate() {
            let (got, want) = (f32::from_bits(got), want(code as u8));
            assert!(
                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                "{number} of {code:#x}"
            );
        }
    }
}
