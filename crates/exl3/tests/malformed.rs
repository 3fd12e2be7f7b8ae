//! Truncated, mis-shaped, bit-flipped and contradictory layers: refused with the tensor's name, never a panic.

mod common;

use common::Golden;
use exl3::{Arithmetic, Codebook, Error, Linear, Parts, Tensor, Trellis, reference};
use proptest::prelude::*;

fn zeros(bytes: &[u8]) -> Parts<'_, '_> {
    Parts {
        trellis: Some(Tensor { dtype: "I16", shape: &[8, 8, 32], bytes: &bytes[..4096] }),
        suh: Some(Tensor { dtype: "F16", shape: &[128], bytes: &bytes[..256] }),
        svh: Some(Tensor { dtype: "F16", shape: &[128], bytes: &bytes[..256] }),
        ..Parts::default()
    }
}

fn refusal(parts: &Parts<'_, '_>) -> Error {
    Linear::from_parts("layers.3.w1", parts).expect_err("must be refused")
}

#[test]
fn contradictions_are_refused_by_name() {
    let bytes = vec![0u8; 8192];
    let good = zeros(&bytes);
    assert_eq!(Linear::from_parts("w", &good).unwrap().codebook(), Codebook::ThreeInst);
    let (mcg, mul1) = (0xCBAC_1FEDu32.to_le_bytes(), 0x83DC_D12Du32.to_le_bytes());
    let scalar = |bytes| Some(Tensor { dtype: "I32", shape: &[], bytes });
    let signs = Some(Tensor { dtype: "I16", shape: &[8], bytes: &bytes[..16] });

    let mut p = good;
    (p.mcg, p.mul1) = (scalar(&mcg), scalar(&mul1));
    assert_eq!(refusal(&p), Error::BothMarkers { tensor: "layers.3.w1".into() });
    p = good;
    p.mcg = scalar(&mul1);
    assert!(matches!(refusal(&p), Error::Marker { tensor, .. } if tensor == "layers.3.w1.mcg"));
    p.mcg = Some(Tensor { dtype: "I64", shape: &[], bytes: &mcg });
    assert!(matches!(refusal(&p), Error::ElementType { .. }));
    p.mcg = Some(Tensor { dtype: "I32", shape: &[2], bytes: &bytes[..8] });
    assert!(matches!(refusal(&p), Error::Shape { .. }));
    p.mcg = Some(Tensor { dtype: "I32", shape: &[1], bytes: &mcg[..3] });
    assert!(matches!(refusal(&p), Error::Bytes { .. }));

    p = good;
    p.su = signs;
    assert_eq!(refusal(&p), Error::Legacy { tensor: "layers.3.w1.su".into() });
    (p.su, p.sv) = (None, signs);
    assert_eq!(refusal(&p), Error::Legacy { tensor: "layers.3.w1.sv".into() });
    p = good;
    p.svh = None;
    assert_eq!(refusal(&p), Error::Missing { tensor: "layers.3.w1.svh".into() });

    for (shape, bytes) in [
        (&[8usize, 8, 24][..], &bytes[..3072]), // half rate without MUL1
        (&[8, 8, 18], &bytes[..2304]),
        (&[8, 8, 0], &bytes[..0]),
        (&[8, 8], &bytes[..128]),
        (&[8, 9, 32], &bytes[..4608]),
        (&[0, 8, 32], &bytes[..0]),
        (&[8, 8, 32], &bytes[..4094]),
        (&[8, 8, 32], &bytes[..4098]),
        (&[usize::MAX / 8 * 8, usize::MAX / 8 * 8, 32], &bytes[..0]),
        (&[1 << 61, 8, 16], &bytes[..0]), // the product wraps to zero
        (&[16, 8, 32], &bytes[..8192]),   // disagrees with suh
        (&[8, 16, 32], &bytes[..8192]),   // disagrees with svh
    ] {
        p = good;
        p.trellis = Some(Tensor { dtype: "I16", shape, bytes });
        let message = refusal(&p).to_string();
        assert!(message.contains("layers.3.w1"), "{message}");
    }
}

#[test]
fn infinite_scales_are_found() {
    let mut scales = vec![0u8; 256];
    scales[2 * 77 + 1] = 0x7C;
    let bytes = vec![0u8; 4096];
    let trellis = Trellis::new("t", &[8, 8, 32], &bytes).unwrap();
    let layer = Linear::new("w", trellis, &bytes[..256], &scales, Codebook::Mcg).unwrap();
    assert_eq!(layer.check_scales("w"), Err(Error::NotFinite { tensor: "w.svh".into(), index: 77 }));
    assert_eq!(
        Linear::new("w", trellis, &bytes[..256], &bytes[..256], Codebook::Mcg).unwrap().check_scales("w"),
        Ok(())
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_shape_and_size_is_decided_without_panic(
        shape in prop::collection::vec(prop_oneof![0usize..70, Just(usize::MAX), Just(1 << 62)], 0..5),
        length in 0usize..20_000,
        scale_length in 0usize..600,
        which in 0usize..8,
    ) {
        let bytes = vec![0xA5u8; 20_000];
        let dtype = ["I16", "F16", "I32", "BF16"][which % 4];
        let tensor = |dtype, shape, length: usize| Some(Tensor { dtype, shape, bytes: &bytes[..length] });
        let scale_shape = [scale_length / 2];
        let mut parts = zeros(&bytes);
        parts.trellis = tensor("I16", &shape, length);
        if which < 4 {
            parts.suh = tensor(dtype, &scale_shape, scale_length);
        } else {
            parts.mul1 = tensor(dtype, &shape, length.min(4));
        }
        match Linear::from_parts("name", &parts) {
            Err(e) => prop_assert!(e.to_string().contains("name"), "{e}"),
            Ok(layer) => prop_assert_eq!(layer.trellis().bytes().len(), length),
        }
    }

    #[test]
    fn flipped_bits_decode_to_something(flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 1..40)) {
        let golden = Golden::open("linear.safetensors");
        for name in ["mul1.k2.5.128x256", "mcg.k3.128x256", "3inst.k8.128x128"] {
            let good = golden.layer(name);
            let mut trellis = good.trellis().bytes().to_vec();
            let (mut suh, mut svh) = (good.suh().to_vec(), good.svh().to_vec());
            for (at, bit) in &flips {
                for part in [&mut trellis, &mut suh, &mut svh] {
                    let at = at.index(part.len());
                    part[at] ^= 1 << bit;
                }
            }
            let shape = golden.shape(&format!("{name}.trellis"));
            let t = Trellis::new(name, &shape, &trellis).unwrap();
            let layer = Linear::new(name, t, &suh, &svh, good.codebook()).unwrap();
            let y = reference::linear(&layer, &golden.f16("x_128"), Arithmetic::Source).unwrap();
            prop_assert_eq!(y.len(), 4 * good.out_features());
            let changed = reference::inner(&layer) != reference::inner(&good);
            prop_assert!(changed || trellis == good.trellis().bytes());
            let _ = layer.check_scales(name);
        }
    }
}
