//! EXL3 on the CPU backend: exllamav3's own outputs, weights expanded to single precision, mixed forms.

use checkpoint::{Bytes, Exl3, Form, Weight};
use cpu::{Cpu, Isa};
use exl3::Codebook;
use half::f16;
use ops::{
    Backend, ExpertWeights, Host, Io, Mode, Reference, Routing,
    registry::{generated_weight, nrms},
};
use safetensors::SafeTensors;

fn golden(file: &str) -> Vec<u8> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/exl3").join(file);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn halves(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// The layer under `name`, of expert `e` where experts are stacked.
fn layer(file: &SafeTensors<'_>, name: &str, e: Option<usize>, codebook: Codebook) -> Weight {
    let part = |field: &str| {
        let view = file.tensor(&format!("{name}.{field}")).unwrap();
        let (shape, data) = (view.shape().to_vec(), view.data());
        match e {
            None => (shape, Bytes::copied(data)),
            Some(e) => {
                let size = data.len() / shape[0];
                (shape[1..].to_vec(), Bytes::copied(&data[e * size..][..size]))
            }
        }
    };
    let (shape, trellis) = part("trellis");
    let shape = [shape[0], shape[1], shape[2]];
    let (suh, svh) = (part("suh").1, part("svh").1);
    let (rows, cols) = (16 * shape[1], 16 * shape[0]);
    let layer = Exl3::new(name, rows, cols, shape, codebook, trellis, suh, svh).unwrap();
    Weight::exl3(name, vec![layer]).unwrap()
}

fn backends(mode: Mode) -> Vec<Cpu> {
    let all = Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]);
    all.map(|(isa, threads)| Cpu::new(mode, Some(threads), Some(isa)).unwrap()).collect()
}

#[test]
fn linear_layers_match_the_library() {
    let mut count = 0;
    for (file, input) in [("linear.safetensors", "x_128"), ("linear_256x384.safetensors", "x_256")] {
        let bytes = golden(file);
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let x = halves(file.tensor(input).unwrap().data());
        for name in file.names().iter().filter_map(|n| n.strip_suffix(".trellis")) {
            let codebook = Codebook::from_name(name.split('.').next().unwrap()).unwrap();
            let weight = layer(&file, name, None, codebook);
            let want = floats(file.tensor(&format!("{name}.y_f32")).unwrap().data());
            let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
            let x = Host::f32(&[x.len() / weight.cols(), weight.cols()], x.clone());
            for b in backends(Mode::Source) {
                // A result in single precision: two f32 summation orders of the same exact products.
                let got = b.linear(&x, &weight, Io::F32);
                let worst = got.as_f32().iter().zip(&want).fold(0f32, |m, (g, w)| m.max((g - w).abs()));
                assert!(worst <= 1e-6 * largest, "{name}: {worst:e} of {largest}");
                let rounded = b.linear(&x, &weight, Io::Fp8);
                let bf16 = |v: &f32| numerics::bf16::round(*v);
                assert!(
                    rounded.as_f32().iter().eq(&got.as_f32().iter().map(bf16).collect::<Vec<_>>()),
                    "{name}"
                );
            }
            count += 1;
        }
    }
    assert_eq!(count, 31);
}

#[test]
fn experts_match_the_library() {
    let bytes = golden("moe.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (case, codebook) in [("moe.mul1.gu2.d3", Codebook::Mul1), ("moe.mcg.gu3.d2", Codebook::Mcg)] {
        let data = |field: &str| file.tensor(&format!("{case}.{field}")).unwrap().data().to_vec();
        let part = |part: &str, e| layer(&file, &format!("{case}.{part}"), Some(e), codebook);
        let expert = |e| ExpertWeights { gate: part("gate", e), up: part("up", e), down: part("down", e) };
        let chosen: Vec<i32> =
            data("sel").as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as i32).collect();
        let routing =
            Routing { experts: Host::i32(&[3, 2], chosen), weights: Host::f32(&[3, 2], halves(&data("rw"))) };
        let x = Host::f32(&[3, 256], halves(&data("x")));
        for b in backends(Mode::Exact) {
            let experts = b.load_experts((0..4).map(expert).collect()).unwrap();
            let got = b.routed_experts(&x, &routing, &experts, 10.0);
            // The fused kernel rounds to fp16 before each product: 7.5e-4 was measured for that.
            let error = nrms(got.as_f32(), &floats(&data("out_bsz3")));
            assert!(error < 1e-3, "{case}: {error:e}");
        }
    }
}

/// The same weights, expanded to single precision.
fn expanded(w: &Weight) -> Weight {
    Weight::from_f32(w.name(), w.rows(), w.cols(), &w.to_f32()).unwrap()
}

fn input(rows: usize, width: usize) -> Host {
    let s = numerics::generator::Stream::new("x", 7);
    Host::f32(&[rows, width], (0..rows * width).map(|i| numerics::bf16::round(s.normal(i as u64))).collect())
}

#[test]
fn exact_equals_the_expanded_weights() {
    let b = &backends(Mode::Exact)[0];
    // 1e-5 is asked; f32 roundings of the rotations and sums leave some 1e-7.
    let near = |a: &Host, b: &Host, what: &str| {
        let error = nrms(a.as_f32(), b.as_f32());
        assert!(error < 2e-6, "{what}: {error:e}");
    };
    for (i, (rows, cols)) in
        [(128, 128), (300, 130), (64, 640), (1, 1)].into_iter().cycle().take(40).enumerate()
    {
        let w = generated_weight(&format!("w{i}"), Form::Exl3, rows, cols, 3);
        let x = input(1 + i % 5, cols);
        near(&b.linear(&x, &w, Io::Fp8), &b.linear(&x, &expanded(&w), Io::Fp8), &format!("{rows} x {cols}"));
    }
    let w = generated_weight("grouped", Form::Exl3, 4 * 96, 64, 3);
    let o = input(3, 4 * 64);
    near(&b.grouped_linear(&o, &w, 4), &b.grouped_linear(&o, &expanded(&w), 4), "grouped");
    let parts = |e: usize| {
        [("w1", 96, 160), ("w3", 96, 160), ("w2", 160, 96)]
            .map(|(n, rows, cols)| generated_weight(&format!("{e}.{n}"), Form::Exl3, rows, cols, 3))
    };
    let all: Vec<[Weight; 3]> = (0..4).map(parts).collect();
    let plain: Vec<[Weight; 3]> = all.iter().map(|e| e.each_ref().map(expanded)).collect();
    let routing = Routing {
        experts: Host::i32(&[3, 2], vec![0, 3, 2, 1, 3, 1]),
        weights: Host::f32(&[3, 2], vec![0.3, 1.2, 0.7, 0.4, 0.5, 0.9]),
    };
    let run = |all: &[[Weight; 3]]| {
        let experts = b.load_experts(all.iter().map(ExpertWeights::from).collect()).unwrap();
        b.routed_experts(&input(3, 160), &routing, &experts, 2.5)
    };
    near(&run(&all), &run(&plain), "experts");
}

/// Each form has its own activations in `source`: fp8 products take quantised ones, EXL3 products those of fp16.
#[test]
fn experts_of_mixed_forms_match_the_reference() {
    let forms = [Form::Exl3, Form::Fp4Row32, Form::Fp8Block32];
    let all: Vec<ExpertWeights> = (0..9)
        .map(|e| {
            let part = |n: usize, rows, cols| {
                generated_weight(&format!("{e}.{n}"), forms[(e / (1 + 2 * (n % 2)) + n) % 3], rows, cols, 3)
            };
            ExpertWeights { gate: part(0, 96, 160), up: part(1, 96, 160), down: part(2, 160, 96) }
        })
        .collect();
    let routing = Routing {
        experts: Host::i32(&[4, 3], vec![0, 3, 5, 8, 1, 2, 4, 6, 7, 0, 8, 4]),
        weights: Host::f32(&[4, 3], (0..12).map(|i| 0.2 + 0.1 * i as f32).collect()),
    };
    for mode in [Mode::Exact, Mode::Source] {
        let reference = Reference::new(mode);
        let experts = reference.load_experts(all.clone()).unwrap();
        let want = reference.routed_experts(&input(4, 160), &routing, &experts, 2.5);
        for b in backends(mode) {
            let got = b.routed_experts(&input(4, 160), &routing, &b.load_experts(all.clone()).unwrap(), 2.5);
            // The registry's limits: summation order, and in `source` flipped bf16 roundings.
            let limit = if mode == Mode::Exact { 2e-6 } else { 3e-3 };
            let error = nrms(got.as_f32(), want.as_f32());
            assert!(error < limit, "{}: {error:e}", mode.name());
        }
    }
}
