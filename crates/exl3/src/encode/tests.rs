//! The encoder, step by step, against exllamav3's own (fixtures/exl3).

#[path = "../../tests/common/mod.rs"]
mod common;

use super::calibration::{Calibration, Factor};
use super::*;
use crate::rate::TILE;
use crate::{Isa, trellis};
use common::{Golden, codebook, meta, nrms};

const VARIANT: &str = "mul1.k2.128x256";

fn rate(variant: &str) -> Rate {
    let bits = variant.trim_end_matches(".states").split_once(".k").unwrap().1;
    Rate::from_bits(bits.split(".128x").next().unwrap().parse().unwrap()).unwrap()
}

fn tiles() -> (Golden, Vec<[f32; TILE]>, Vec<String>) {
    let golden = Golden::open("tiles.safetensors");
    let tiles = golden.f32("tiles").as_chunks::<TILE>().0.to_vec();
    let mut names: Vec<String> =
        golden.tensors().names().iter().filter(|n| n.ends_with(".states")).map(|n| n.to_string()).collect();
    names.sort();
    assert_eq!((tiles.len(), names.len()), (8, 27));
    (golden, tiles, names)
}

#[test]
fn half_search_is_bit_identical_on_all_tiles() {
    let (golden, tiles, names) = tiles();
    for name in &names {
        let search = Search::new(rate(name), codebook(name), SearchCosts::Half, 128);
        let mut scratch = search.scratch();
        let got: Vec<u16> = tiles
            .as_chunks::<2>()
            .0
            .iter()
            .flat_map(|[a, b]| search.pair([a, b], &mut scratch).into_iter().flatten())
            .collect();
        assert!(got == golden.u16(name), "{name}");
    }
}

#[test]
fn emulated_half_search_is_bit_identical() {
    let (golden, tiles, names) = tiles();
    let isas = Isa::available().into_iter().filter(|i| *i != Isa::best() || *i == Isa::Portable);
    let isa = isas.clone().next().unwrap_or(Isa::Portable);
    // One pair of tiles for every fourth variant: emulation is slow.
    for (i, name) in names.iter().step_by(4).enumerate() {
        let search = Search::with_isa(rate(name), codebook(name), SearchCosts::Half, 128, isa);
        let (a, b) = (2 * i % 8, 2 * i % 8 + 1);
        let got = search.pair([&tiles[a], &tiles[b]], &mut search.scratch());
        let want = golden.u16(name);
        assert!(got[0] == want[a * TILE..][..TILE] && got[1] == want[b * TILE..][..TILE], "{name} {isa:?}");
    }
}

#[test]
fn single_search_is_equal_on_every_instruction_set_and_as_good() {
    let (_, tiles, names) = tiles();
    let meta = meta();
    for name in &names {
        let (rate, codebook) = (rate(name), codebook(name));
        let search = Search::new(rate, codebook, SearchCosts::Single, 128);
        let mut scratch = search.scratch();
        let mut sum = 0.0;
        for (i, pair) in tiles.as_chunks::<2>().0.iter().enumerate() {
            let states = search.pair([&pair[0], &pair[1]], &mut scratch);
            for (tile, states) in pair.iter().zip(&states) {
                assert!(trellis::is_closed(rate, states));
                let square = |(t, s): (&f32, &u16)| {
                    f64::from(t - codebook.table()[usize::from(*s)])
                        * f64::from(t - codebook.table()[usize::from(*s)])
                };
                sum += tile.iter().zip(states).map(square).sum::<f64>();
            }
            if i == 0 {
                for isa in Isa::available() {
                    // The portable search is slow on x86 without FMA in the baseline: one rate of each kind will do.
                    if isa != Isa::Portable || ["mcg.k2.states", "mul1.k1.5.states"].contains(&name.as_str())
                    {
                        let other = Search::with_isa(rate, codebook, SearchCosts::Single, 128, isa);
                        let got = other.pair([&pair[0], &pair[1]], &mut scratch);
                        assert!(got == states, "{name} {isa:?}");
                    }
                }
            }
        }
        let mse = sum / 2048.0;
        let reference = meta["tiles_mse"][name.replace(".states", ".mse")].as_f64().unwrap();
        // The closing of the ring is a heuristic: on eight tiles either search may be ahead by a few tenths of a percent.
        assert!(mse < 1.005 * reference, "{name}: {mse} against {reference}");
    }
}

#[test]
fn a_short_context_costs_what_the_specification_says() {
    let (_, tiles, _) = tiles();
    let mse = |context| {
        let search = Search::new(Rate::from_bits(2.0).unwrap(), Codebook::Mul1, SearchCosts::Single, context);
        let mut scratch = search.scratch();
        let mut sum = 0.0;
        for [a, b] in tiles.as_chunks::<2>().0 {
            for (tile, states) in [a, b].iter().zip(search.pair([a, b], &mut scratch)) {
                for (t, s) in tile.iter().zip(states) {
                    sum += f64::from(t - Codebook::Mul1.table()[usize::from(s)]).powi(2);
                }
            }
        }
        sum
    };
    let (full, short) = (mse(128), mse(32));
    // 1.5 % on 48 tiles; eight tiles scatter more.
    assert!((0.99..1.06).contains(&(short / full)), "{}", short / full);
}

fn half(mut encoder: Encoder) -> Encoder {
    encoder.costs = SearchCosts::Half;
    encoder
}

fn calibration(golden: &Golden) -> Calibration {
    Calibration::with_signs(Some(&golden.f32("h_128x256")), golden.f32("su_signs")).unwrap()
}

#[test]
fn ldl_factor_matches() {
    let golden = Golden::open("encoder.safetensors");
    let calibration = calibration(&golden);
    let want = golden.f32("L");
    let factor = &calibration.hessian.as_ref().unwrap().factor;
    let mut got = vec![0f32; 128 * 128];
    for column in 0..8 {
        for (j, block) in factor.column(column).iter().enumerate() {
            for (i, v) in block.iter().enumerate() {
                got[(16 * (column + 1 + j) + i / 16) * 128 + 16 * column + i % 16] = *v;
            }
        }
    }
    // f64 here, f32 there; the condition number of the damped Hessian is a few hundred
    let error = common::relative_max(&got, &want);
    assert!(error < 3e-5, "{error:e}");
}

#[test]
fn regularisation_matches() {
    let golden = Golden::open("encoder.safetensors");
    let encoder = half(Encoder::new(Rate::from_bits(2.0).unwrap(), Codebook::Mul1));
    let (w, signs) = (golden.f32("w_128x256"), golden.f32("sv_signs"));
    let regular = regularize::regularize(&encoder, &w, &calibration(&golden), &signs);
    let g = f64::from(golden.f32("g_scale")[0]);
    // The scale is the vertex of a parabola through mean errors that differ by 1 %; theirs are f32 sums.
    assert!((regular.global_scale / g - 1.0).abs() < 2e-5, "{} against {g}", regular.global_scale);
    // The rest is f32 arithmetic of a few steps.
    let scale = (regular.global_scale / g) as f32;
    let su: Vec<f32> = regular.su.iter().map(|v| v * scale).collect();
    let weight: Vec<f32> = regular.weight.iter().map(|v| v / scale).collect();
    assert!(nrms(&su, &golden.f32("su_reg")) < 3e-7);
    assert!(nrms(&regular.sv, &golden.f32("sv_reg")) < 3e-7);
    assert!(nrms(&weight, &golden.f32("weight_r")) < 1e-6);
}

#[test]
fn ldlq_reproduces_the_trellis() {
    let golden = Golden::open("encoder.safetensors");
    let encoder = half(Encoder::new(Rate::from_bits(2.0).unwrap(), Codebook::Mul1));
    let l = golden.f32("L");
    let factor = Factor::pack(|i, j| l[128 * i + j], 128);
    let got = ldlq::quantize(&encoder, &golden.f32("weight_r"), 256, Some(&factor));
    assert!(got == Golden::open("linear.safetensors").bytes(&format!("{VARIANT}.trellis")));
}

#[test]
fn half_search_gives_the_golden_layer() {
    let (golden, linear) = (Golden::open("encoder.safetensors"), Golden::open("linear.safetensors"));
    let encoder = half(Encoder::new(Rate::from_bits(2.0).unwrap(), Codebook::Mul1));
    let (w, signs) = (golden.f32("w_128x256"), golden.f32("sv_signs"));
    let encoded = encoder.encode(&w, &calibration(&golden), &signs).unwrap();
    assert!(encoded.trellis == linear.bytes(&format!("{VARIANT}.trellis")));
    let layer = linear.layer(VARIANT);
    let own = encoded.linear().unwrap();
    // Both are fp16 roundings (2^-11 at most) of scales that agree to the accuracy of their f32 solves.
    assert!(nrms(&own.suh_f32(), &layer.suh_f32()) < 5e-4);
    assert!(nrms(&own.svh_f32(), &layer.svh_f32()) < 5e-4);
    let want = f64::from(golden.f32("proxy_err")[0]);
    // 1 % is what is asked; with equal states only the scales' rounding to fp16 is left.
    assert!((encoded.proxy_error / want - 1.0).abs() < 1e-4, "{} against {want}", encoded.proxy_error);
}

/// Sign vectors are not reproducible elsewhere, but the golden layers' scales carry them.
fn golden_signs(layer: &Linear<'_>) -> (Vec<f32>, Vec<f32>) {
    let sign = |v: Vec<f32>, s: f32| v.iter().map(|v| s * v.signum()).collect();
    (sign(layer.suh_f32(), -1.0), sign(layer.svh_f32(), 1.0))
}

#[test]
fn single_search_is_as_good_over_all_variants() {
    let (golden, linear, meta) =
        (Golden::open("encoder.safetensors"), Golden::open("linear.safetensors"), meta());
    let mut mean = 0.0;
    for name in linear.layers() {
        let shape = name.rsplit('.').next().unwrap();
        let layer = linear.layer(&name);
        let (su, sv) = golden_signs(&layer);
        let calibration = Calibration::with_signs(Some(&golden.f32(&format!("h_{shape}"))), su).unwrap();
        let mut encoder = Encoder::new(layer.trellis().rate(), layer.codebook());
        encoder.global_scale = meta["variants"][&name]["g_scale"].as_f64();
        let encoded = encoder.encode(&golden.f32(&format!("w_{shape}")), &calibration, &sv).unwrap();
        let ratio = encoded.proxy_error / meta["variants"][&name]["proxy_err"].as_f64().unwrap();
        // One matrix of 64 or 128 tiles scatters by 2.3 % when ties fall differently (measured).
        assert!((0.9..1.1).contains(&ratio), "{name}: {ratio}");
        mean += ratio.ln() / 27.0;
    }
    // 2.3 % over the root of 27
    assert!(mean.abs() < 0.01, "{mean}");
}

fn noise(count: usize, scale: f32) -> Vec<f32> {
    let mut state = 9u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count).map(|_| scale * (next() + next() + next())).collect()
}

fn quick(bits: f64) -> Encoder {
    let mut encoder = Encoder::new(Rate::from_bits(bits).unwrap(), Codebook::Mul1);
    (encoder.context, encoder.global_scale) = (8, Some(0.8));
    encoder
}

#[test]
fn bytes_do_not_depend_on_threads() {
    let golden = Golden::open("encoder.safetensors");
    let (w, signs) = (golden.f32("w_128x128"), signs(5, 128));
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let calibration = Calibration::new(&golden.f32("h_128x128"), 128, 3).unwrap();
            let mut encoder = quick(2.0);
            encoder.global_scale = None;
            encoder.encode(&w, &calibration, &signs).unwrap()
        })
    };
    let one = run(1);
    assert!(one == run(3));
    assert!((0.02..0.08).contains(&one.proxy_error), "{}", one.proxy_error);
    let seeds = Calibration::new(&golden.f32("h_128x128"), 128, 4).unwrap();
    assert!(quick(2.0).encode(&w, &seeds, &signs).unwrap().suh != one.suh);
}

#[test]
fn without_a_hessian_the_error_is_that_of_the_search() {
    let calibration = Calibration::none(128, 1).unwrap();
    assert!(!calibration.has_hessian());
    let w = noise(128 * 256, 0.05);
    let encoded = quick(4.0).encode(&w, &calibration, &signs(2, 256)).unwrap();
    // Gaussian table of the specification: 4.47e-3 with the best scale and full context.
    assert!((4.2e-3..5.5e-3).contains(&encoded.proxy_error), "{}", encoded.proxy_error);
    let whole = crate::reference::weight(&encoded.linear().unwrap());
    let error = nrms(&whole, &w);
    assert!(
        (error * error / encoded.proxy_error - 1.0).abs() < 1e-3,
        "the reported error is the decoded one"
    );
}

#[test]
fn zero_rows_columns_and_matrices_stay_zero() {
    let mut w = noise(128 * 128, 1.0);
    for i in 0..128 {
        w[128 * i + 5] = 0.0;
        w[128 * 77 + i] = 0.0;
    }
    let calibration = Calibration::none(128, 1).unwrap();
    let encoded = quick(3.0).encode(&w, &calibration, &signs(2, 128)).unwrap();
    assert_eq!(&encoded.svh[10..12], &[0, 0]);
    assert!(encoded.proxy_error < 0.03, "{}", encoded.proxy_error);
    encoded.linear().unwrap().check_scales("w").unwrap();
    let encoded = quick(3.0).encode(&[0.0; 128 * 128], &calibration, &signs(2, 128)).unwrap();
    assert!(encoded.proxy_error == 0.0 && encoded.svh.iter().all(|b| *b == 0));
}

#[test]
fn odd_hessians_are_decided() {
    let (n, w) = (128, noise(128 * 128, 1.0));
    for bad in [f32::NAN, f32::INFINITY, 0.0] {
        assert!(!Calibration::new(&vec![bad; n * n], n, 1).unwrap().has_hessian(), "{bad}");
    }
    // Rank one: damping makes it definite.
    let v = noise(n, 1.0);
    let rank_one: Vec<f32> = (0..n * n).map(|i| v[i / n] * v[i % n]).collect();
    let calibration = Calibration::new(&rank_one, n, 1).unwrap();
    assert!(calibration.has_hessian());
    let encoded = quick(2.0).encode(&w, &calibration, &signs(2, n)).unwrap();
    assert!((0.0..0.1).contains(&encoded.proxy_error), "{}", encoded.proxy_error);
    let negative: Vec<f32> = (0..n * n).map(|i| if i % (n + 1) == 0 { 1.0 } else { -50.0 }).collect();
    assert_eq!(Calibration::new(&negative, n, 1).err(), Some(Error::Indefinite { features: n }));
}

#[test]
fn wrong_arguments_are_refused() {
    assert!(Calibration::none(100, 1).is_err());
    assert!(Calibration::new(&[1.0; 128], 128, 1).is_err());
    let calibration = Calibration::none(128, 1).unwrap();
    let encoder = quick(2.0);
    assert!(encoder.encode(&[0.0; 128 * 100], &calibration, &signs(1, 100)).is_err());
    assert!(encoder.encode(&[0.0; 128 * 127], &calibration, &signs(1, 128)).is_err());
    let mut w = vec![1.0; 128 * 128];
    w[7] = f32::NAN;
    assert!(matches!(
        encoder.encode(&w, &calibration, &signs(1, 128)),
        Err(Error::NotFinite { index: 7, .. })
    ));
    let huge = noise(128 * 128, 1e30);
    assert!(matches!(encoder.encode(&huge, &calibration, &signs(1, 128)), Err(Error::ScaleRange { .. })));
    let half_rate = Encoder::new(Rate::from_bits(2.5).unwrap(), Codebook::Mcg);
    assert!(half_rate.encode(&[0.0; 128 * 128], &calibration, &signs(1, 128)).is_err());
}
