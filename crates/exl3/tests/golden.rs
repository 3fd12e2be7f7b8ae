//! Decoder and linear against the outputs of exllamav3's own kernels, and its fused MoE.

mod common;

use common::{Golden, codebook, halves, meta, nrms, relative_max, sha256};
use exl3::{Arithmetic, Codebook, Isa, Linear, Rows, Trellis, reference, rotate_input, row_major, trellis};

const FILES: [(&str, &str); 2] = [("linear.safetensors", "x_128"), ("linear_256x384.safetensors", "x_256")];

/// Runs `check` on all 31 stored layers: (file, name, layer, name of the input).
fn each_layer(mut check: impl FnMut(&Golden, &str, Linear<'_>, &str)) {
    let mut count = 0;
    for (file, x) in FILES {
        let golden = Golden::open(file);
        for name in golden.layers() {
            check(&golden, &name, golden.layer(&name), x);
            count += 1;
        }
    }
    assert_eq!(count, 31);
}

#[test]
fn codebooks_are_bit_identical() {
    let meta = meta();
    for codebook in Codebook::ALL {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(|s| codebook.value(s).to_le_bytes()).collect();
        assert_eq!(sha256(&bytes), meta["codebook_sha256_le_fp16"][codebook.name()].as_str().unwrap());
        for (s, bits) in meta["codebook_first16"][codebook.name()].as_array().unwrap().iter().enumerate() {
            assert_eq!(u64::from(codebook.value(s as u16).to_bits()), bits.as_u64().unwrap());
        }
        let table = codebook.table();
        assert!((0..=u16::MAX).all(|s| table[usize::from(s)] == codebook.value(s).to_f32()));
    }
}

#[test]
fn states_and_packing_are_bit_identical() {
    let meta = meta();
    each_layer(|_, name, layer, _| {
        let t = layer.trellis();
        let (mut states, mut packed) = (vec![], vec![0; t.bytes().len()]);
        let mut tiles = packed.chunks_exact_mut(t.rate().tile_bytes());
        for a in 0..t.in_features() / 16 {
            for b in 0..t.out_features() / 16 {
                let tile = t.states(a, b);
                trellis::pack(t.rate(), &tile, tiles.next().unwrap());
                states.extend(tile.iter().flat_map(|s| s.to_le_bytes()));
            }
        }
        assert_eq!(sha256(&states), meta["variants"][name]["states_sha256"].as_str().unwrap(), "{name}");
        assert!(packed == t.bytes(), "{name}: packing");
        assert_eq!(layer.codebook(), codebook(name));
    });
}

#[test]
fn the_worked_example_of_the_specification() {
    let golden = Golden::open("linear.safetensors");
    let layer = golden.layer("mul1.k2.128x256");
    let states = layer.trellis().states(0, 0);
    assert_eq!(states[..9], [0x3c04, 0xf011, 0xc045, 0x0116, 0x0458, 0x1161, 0x4585, 0x1614, 0x5852]);
    let inner = reference::inner(&layer);
    let got: Vec<f32> = [(0, 0), (1, 0), (8, 0), (9, 0), (0, 8), (1, 8), (8, 8), (9, 8), (2, 0)]
        .iter()
        .map(|(r, c)| inner[r * 256 + c])
        .collect();
    let want = [1.3994, 1.0469, -2.0527, 0.01172, 0.0523, -0.8882, -1.1992, -1.3281, -0.5840];
    // printed with five digits there
    assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-4), "{got:?}");
}

#[test]
fn inner_weights_are_bit_identical() {
    let meta = meta();
    each_layer(|golden, name, layer, _| {
        let bytes = halves(&reference::inner(&layer));
        assert_eq!(sha256(&bytes), meta["variants"][name]["inner_sha256"].as_str().unwrap(), "{name}");
        let field = format!("{name}.inner");
        if golden.has(&field) {
            assert!(bytes == golden.bytes(&field), "{name}");
        }
    });
}

#[test]
fn rotated_input_is_bit_identical() {
    each_layer(|golden, name, layer, x| {
        let x = golden.f16(x);
        let mut xh = vec![0.0; x.len()];
        rotate_input(&x, layer.suh(), Arithmetic::Source, &mut xh).unwrap();
        assert!(halves(&xh) == golden.bytes(&format!("{name}.xh")), "{name}");
    });
}

#[test]
fn source_linear_matches_the_fp32_kernel() {
    each_layer(|golden, name, layer, x| {
        let y = reference::linear(&layer, &golden.f16(x), Arithmetic::Source).unwrap();
        let error = relative_max(&y, &golden.f32(&format!("{name}.y_f32")));
        // Both add the same exact products; what is left is the kernel's f32 summation order.
        assert!(error <= 1e-6, "{name}: {error:e}");
    });
}

/// y = x W by the kernels of one instruction set.
fn by_kernel(isa: Isa, layer: &Linear<'_>, x: &[f32], arithmetic: Arithmetic) -> Vec<f32> {
    let mut xh = vec![0.0; x.len()];
    rotate_input(x, layer.suh(), arithmetic, &mut xh).unwrap();
    let rows =
        Rows::with_isa(isa, &xh, layer.in_features(), layer.trellis().rate(), layer.codebook()).unwrap();
    let mut y = vec![0.0; rows.count() * layer.out_features()];
    layer.multiply(&rows, 0..layer.blocks(), &mut y).unwrap();
    row_major(&y, rows.count())
}

#[test]
fn kernels_match_the_fp32_kernel_and_the_expanded_weights() {
    each_layer(|golden, name, layer, x| {
        let (x, want) = (golden.f16(x), golden.f32(&format!("{name}.y_f32")));
        let (w, columns) = (reference::weight(&layer), layer.out_features());
        let mut expanded = Vec::with_capacity(want.len());
        for x in x.chunks_exact(layer.in_features()) {
            let column =
                |c: usize| x.iter().zip(w[c..].iter().step_by(columns)).map(|(x, w)| f64::from(x * w));
            expanded.extend((0..columns).map(|c| column(c).sum::<f64>() as f32));
        }
        for isa in Isa::available() {
            let error = relative_max(&by_kernel(isa, &layer, &x, Arithmetic::Source), &want);
            // Two f32 summation orders of the same exact products.
            assert!(error <= 1e-6, "{isa:?} {name}: {error:e}");
            let error = nrms(&by_kernel(isa, &layer, &x, Arithmetic::Exact), &expanded);
            // f32 roundings of the rotations and of the sums on one side, of W's elements on the other.
            assert!(error < 1e-6, "{isa:?} {name}: {error:e} of W in float32");
        }
    });
}

#[test]
fn exact_linear_differs_by_the_rounding_of_the_rotated_input() {
    each_layer(|golden, name, layer, x| {
        let y = reference::linear(&layer, &golden.f16(x), Arithmetic::Exact).unwrap();
        let error = relative_max(&y, &golden.f32(&format!("{name}.y_f32")));
        // README of the fixtures: 2e-4 to 7e-4 of the maximum, the fp16 rounding of xh.
        assert!((1e-5..1e-3).contains(&error), "{name}: {error:e}");
    });
}

#[test]
fn whole_weight_matches() {
    each_layer(|golden, name, layer, _| {
        let columns = layer.out_features();
        let (field, width) = match columns {
            128 => (format!("{name}.weight"), 128),
            256 => (format!("{name}.weight_n0_128"), 128),
            _ => return, // the 256x384 layers store only a hash of the fp16 matrix
        };
        let want = golden.f16(&field);
        let left =
            |w: Vec<f32>| -> Vec<f32> { w.chunks(columns).flat_map(|r| r[..width].to_vec()).collect() };
        let source = left(reference::weight_source(&layer).iter().map(|v| v.to_f32()).collect());
        let same = source.iter().zip(&want).filter(|(s, w)| s == w).count() as f64 / want.len() as f64;
        // Same op order; the kernel's butterflies add in another order than ours.
        assert!(same > 0.98, "{name}: {same} of the elements bit-identical");
        assert!(relative_max(&source, &want) <= 5e-4, "{name}: source");
        // Four roundings to fp16 on the other side, each up to 2.4e-4 of the value at that step (worst case here: 5.05e-4).
        let error = relative_max(&left(reference::weight(&layer)), &want);
        assert!(error <= 6e-4, "{name}: {error:e}");
    });
}

#[test]
fn fused_moe_matches() {
    let golden = Golden::open("moe.safetensors");
    let by: Vec<Option<Isa>> = Isa::available().into_iter().map(Some).chain([None]).collect();
    let cases = ["moe.mul1.gu2.d3", "moe.mcg.gu3.d2"];
    for (case, isa) in cases.iter().flat_map(|c| by.iter().map(move |i| (c, *i))) {
        let of = |field: &str| format!("{case}.{field}");
        let (x, select, route) = (golden.f16(&of("x")), golden.i64(&of("sel")), golden.f16(&of("rw")));
        let linear = |part: &str, expert: usize, x: &[f32]| {
            let shape = golden.shape(&of(&format!("{part}.trellis")));
            let field = |f: &str| {
                let bytes = golden.bytes(&of(&format!("{part}.{f}")));
                &bytes[expert * bytes.len() / shape[0]..][..bytes.len() / shape[0]]
            };
            let trellis = Trellis::new(part, &shape[1..], field("trellis")).unwrap();
            let codebook = if case.contains("mul1") { Codebook::Mul1 } else { Codebook::Mcg };
            let layer = Linear::new(part, trellis, field("suh"), field("svh"), codebook).unwrap();
            match isa {
                None => reference::linear(&layer, x, Arithmetic::Exact).unwrap(),
                Some(isa) => by_kernel(isa, &layer, x, Arithmetic::Exact),
            }
        };
        let mut out = vec![0f32; x.len()];
        for token in 0..3 {
            let x = &x[token * 256..][..256];
            for slot in 2 * token..2 * token + 2 {
                let expert = select[slot] as usize;
                let (gate, up) = (linear("gate", expert, x), linear("up", expert, x));
                let hidden: Vec<f32> = gate
                    .iter()
                    .zip(&up)
                    .map(|(g, u)| (g / (1.0 + (-g).exp())).min(10.0) * u.clamp(-10.0, 10.0))
                    .collect();
                for (out, y) in out[token * 256..].iter_mut().zip(linear("down", expert, &hidden)) {
                    *out += route[slot] * y;
                }
            }
        }
        // The fused kernel rounds to fp16 before each product: 7.5e-4 rms was measured for that.
        let error = nrms(&out, &golden.f32(&of("out_bsz3")));
        assert!(error < 1e-3, "{isa:?} {case}: {error:e}");
        let error = nrms(&out[..256], &golden.f32(&of("out_bsz1")));
        assert!(error < 1e-3, "{isa:?} {case}, one token: {error:e}");
    }
}
