//! Everything that multiplies by stored weights, on the emulator: decoding bit for bit, the released order of the sums, the
//! format's own outputs, mixtures of forms, odd shapes.

use checkpoint::{Bytes, Exl3, Form, Weight};
use exl3::{Codebook, Rate};
use half::f16;
use numerics::generator::Stream;
use ops::{
    ExpertWeights, Host, Io, Mode, Routing,
    registry::{self, Geometry, generated_weight, nrms},
};
use safetensors::SafeTensors;

use crate::{Experts, Gpu, Mat, emu::Emu};

const FORMS: [Form; 6] =
    [Form::F32, Form::Bf16, Form::Fp8Block32, Form::Fp8Row32, Form::Fp4Row32, Form::Exl3];

fn emu(mode: Mode) -> Gpu<Emu> {
    Gpu::new(mode, Emu::open().unwrap())
}

/// `native` computes what `exact` does.
fn reference(mode: Mode) -> Mode {
    if mode == Mode::Source { Mode::Source } else { Mode::Exact }
}

fn input(rows: usize, width: usize) -> Host {
    let s = Stream::new("x", 7);
    Host::f32(&[rows, width], (0..rows * width).map(|i| numerics::bf16::round(s.normal(i as u64))).collect())
}

fn linear(b: &Gpu<Emu>, x: &Host, w: &Weight, io: Io) -> Host {
    let mat = Mat::new(&b.device, w).unwrap();
    b.fetch(&b.linear_any(&b.upload_host(x).unwrap(), &mat, io)).unwrap()
}

fn decoded(b: &Gpu<Emu>, w: &Weight) -> Host {
    b.fetch(&b.decoded(&Mat::new(&b.device, w).unwrap())).unwrap()
}

fn routed(b: &Gpu<Emu>, x: &Host, routing: &Routing<Host>, all: &[ExpertWeights], limit: f32) -> Host {
    let up = |h: &Host| b.upload_host(h).unwrap();
    let routing = Routing { experts: up(&routing.experts), weights: up(&routing.weights) };
    let experts = Experts::new(&b.device, all).unwrap();
    b.fetch(&b.experts(&up(x), &routing, &experts, limit)).unwrap()
}

/// A layer of `rows` x `cols` with any bits as trellis.
fn trellis(rate: Rate, codebook: Codebook, rows: usize, cols: usize) -> Weight {
    let s = Stream::new("trellis", rate.half_bits() as u64);
    let shape = [cols / 16, rows / 16, rate.words16()];
    let words = shape.iter().product::<usize>() as u64;
    let bytes: Vec<u8> = (0..words).flat_map(|i| (s.word(i) as u16).to_le_bytes()).collect();
    let ones = |n: usize| Bytes::copied(&f16::ONE.to_le_bytes().repeat(n));
    let layer = Exl3::new("w", rows, cols, shape, codebook, Bytes::copied(&bytes), ones(cols), ones(rows));
    Weight::exl3("w", vec![layer.unwrap()]).unwrap()
}

/// Every rate with every codebook that it may have: the kernels' values are the reference's, bit for bit.
#[test]
fn trellises_decode_bit_for_bit() {
    let b = emu(Mode::Exact);
    let mut count = 0;
    for (rate, codebook) in Rate::ALL.into_iter().flat_map(|r| Codebook::ALL.map(|c| (r, c))) {
        if rate.is_half() && codebook != Codebook::Mul1 {
            continue;
        }
        let w = trellis(rate, codebook, 384, 256);
        let want = exl3::reference::inner(&w.layers()[0].linear());
        assert!(decoded(&b, &w).as_f32() == want, "{rate} bits, {}", codebook.name());
        count += 1;
    }
    assert_eq!(count, 27);
}

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

#[test]
fn exl3_layers_match_the_library() {
    let b = emu(Mode::Source);
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
            let got = linear(&b, &x, &weight, Io::F32);
            // A result in single precision: two f32 summation orders of the same exact products.
            let worst = got.as_f32().iter().zip(&want).fold(0f32, |m, (g, w)| m.max((g - w).abs()));
            assert!(worst <= 1e-6 * largest, "{name}: {worst:e} of {largest}");
            let want = exl3::reference::inner(&weight.layers()[0].linear());
            assert!(decoded(&b, &weight).as_f32() == want, "{name}");
            count += 1;
        }
    }
    assert_eq!(count, 31);
}

#[test]
fn exl3_experts_match_the_library() {
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
        let all: Vec<ExpertWeights> = (0..4).map(expert).collect();
        let got = routed(&emu(Mode::Exact), &x, &routing, &all, 10.0);
        // The fused kernel rounds to fp16 before each product: 7.5e-4 was measured for that.
        let error = nrms(got.as_f32(), &floats(&data("out_bsz3")));
        assert!(error < 1e-3, "{case}: {error:e}");
    }
}

/// Forms, rates and codebooks differ from expert to expert and within one; each has its own activations in `source`. A row
/// alone has the bits that it has among others.
#[test]
fn experts_of_mixed_forms_match_the_reference() {
    let mixed = [Form::Exl3, Form::Fp4Row32, Form::Fp8Block32];
    for forms in [mixed, [Form::Fp4Row32; 3], [Form::Exl3; 3]] {
        let all: Vec<ExpertWeights> = (0..9)
            .map(|e| {
                let part = |n: usize, rows, cols| {
                    let form = forms[(e / (1 + 2 * (n % 2)) + n) % 3];
                    generated_weight(&format!("{e}.{n}"), form, rows, cols, 3)
                };
                ExpertWeights { gate: part(0, 96, 160), up: part(1, 96, 160), down: part(2, 160, 96) }
            })
            .collect();
        // Twenty rows, so that some expert has more than eight.
        let rows = 20;
        let ids = [0, 3, 5, 8, 1, 2, 4, 6, 7, 0, 8, 4].repeat(5);
        let routing = Routing {
            experts: Host::i32(&[rows, 3], ids),
            weights: Host::f32(&[rows, 3], (0..3 * rows).map(|i| 0.2 + 0.1 * (i % 12) as f32).collect()),
        };
        let x = input(rows, 160);
        for mode in [Mode::Exact, Mode::Source] {
            let want = ops::moe::routed_experts(mode, &x, &routing, &all, 2.5);
            let b = emu(mode);
            let got = routed(&b, &x, &routing, &all, 2.5);
            // The registry's limits: summation order, and in `source` flipped bf16 roundings.
            let limit = if mode == Mode::Exact { 2e-6 } else { 3e-3 };
            let error = nrms(got.as_f32(), want.as_f32());
            assert!(error < limit, "{forms:?}, {}: {error:e}", mode.name());
            for (start, count) in [(0, 1), (7, 1), (3, 6)] {
                let part = |h: &Host| h.slice_rows(start, count);
                let few = Routing { experts: part(&routing.experts), weights: part(&routing.weights) };
                let alone = routed(&b, &part(&x), &few, &all, 2.5);
                assert!(alone == part(&got), "{forms:?}, {}: rows {start}+{count}", mode.name());
            }
        }
    }
}

/// Two layers in one launch have the bits that each has alone.
#[test]
fn a_pair_of_layers_has_the_bits_of_each() {
    for (forms, cols) in [
        ([Form::Fp8Block32; 2], 2080),
        ([Form::F32; 2], 2304),
        ([Form::Bf16; 2], 100),
        ([Form::Fp8Block32, Form::Bf16], 64),
    ] {
        let a = generated_weight("a", forms[0], 520, cols, 3);
        let c = generated_weight("b", forms[1], 72, cols, 3);
        for (mode, rows, io) in [
            (Mode::Exact, 1, Io::Fp8),
            (Mode::Exact, 3, Io::Bf16),
            (Mode::Source, 2, Io::F32),
            (Mode::Source, 2, Io::Bf16),
            (Mode::Source, 2, Io::Fp8),
            (Mode::Native, 12, Io::Bf16),
        ] {
            let b = emu(mode);
            let (x, mats) = (input(rows, cols), [&a, &c].map(|w| Mat::new(&b.device, w).unwrap()));
            let pair = b.linear_both(&b.upload_host(&x).unwrap(), [&mats[0], &mats[1]], io);
            let alone = [linear(&b, &x, &a, io), linear(&b, &x, &c, io)];
            assert!(pair.map(|y| b.fetch(&y).unwrap()) == alone, "{forms:?} {} {rows} {io:?}", mode.name());
        }
    }
}

/// The table of dispatches is what the launchers do.
#[test]
fn dispatches_are_those_of_the_table() {
    let forms = [
        ("linear_fp8", Form::Fp8Block32, Io::Fp8),
        ("linear_bf16", Form::Bf16, Io::Bf16),
        ("linear_f32", Form::F32, Io::F32),
        ("linear_exl3", Form::Exl3, Io::Fp8),
    ];
    let w = |form, name: &str, rows, cols| generated_weight(name, form, rows, cols, 3);
    let experts = |form| ExpertWeights {
        gate: w(form, "gate", 64, 128),
        up: w(form, "gate", 64, 128),
        down: w(form, "down", 128, 64),
    };
    for (column, mode, rows) in [(0, Mode::Native, 1), (1, Mode::Exact, 3), (2, Mode::Source, 1)] {
        let b = emu(mode);
        let check = |operator: &str, work: &dyn Fn()| {
            let entry = crate::cost::DISPATCHES.iter().find(|d| d.operator == operator).unwrap();
            let counts = b.counted(work);
            let want = [entry.one, entry.few, entry.source][column];
            assert_eq!(
                counts.values().sum::<u64>(),
                u64::from(want),
                "{operator} {}: {counts:?}",
                mode.name()
            );
        };
        let x = b.upload_host(&input(rows, 128)).unwrap();
        for (operator, form, io) in forms {
            let mat = Mat::new(&b.device, &w(form, "w", 64, 128)).unwrap();
            check(operator, &|| drop(b.linear_any(&x, &mat, io)));
        }
        for (operator, form) in [("grouped_linear", Form::Fp8Block32), ("grouped_linear_exl3", Form::Exl3)] {
            let mat = Mat::new(&b.device, &w(form, "w", 64, 64)).unwrap();
            check(operator, &|| drop(b.grouped_any(&x, &mat, 2)));
        }
        let shared = [("a", 64, 128), ("b", 64, 128), ("c", 128, 64)]
            .map(|(name, rows, cols)| Mat::new(&b.device, &w(Form::Fp8Block32, name, rows, cols)).unwrap());
        let [w1, w3, w2] = &shared;
        check("shared_expert", &|| drop(b.shared(&x, [w1, w3, w2], 9.0)));
        let routing = Routing {
            experts: b.upload_host(&Host::i32(&[rows, 1], vec![0; rows])).unwrap(),
            weights: b.upload_host(&Host::f32(&[rows, 1], vec![1.0; rows])).unwrap(),
        };
        for (operator, form) in [("routed_experts", Form::Fp4Row32), ("experts_exl3", Form::Exl3)] {
            let all = Experts::new(&b.device, &[experts(form)]).unwrap();
            check(operator, &|| drop(b.experts(&x, &routing, &all, 9.0)));
            if form != Form::Exl3 {
                check("moe", &|| drop(b.experts_and_shared(&x, &routing, &all, [w1, w3, w2], 9.0)));
            }
        }
    }
}

/// Routed and shared experts together have the bits that they have one after the other, in at most three dispatches where no
/// expert is EXL3.
#[test]
fn fused_experts_have_the_bits_of_the_operators() {
    for (routed, shared) in
        [(Form::Fp4Row32, Form::Fp8Block32), (Form::Fp8Row32, Form::Bf16), (Form::Exl3, Form::Fp8Block32)]
    {
        let part = |name: &str, form, rows, cols| generated_weight(name, form, rows, cols, 3);
        let all: Vec<ExpertWeights> = (0..9)
            .map(|e| ExpertWeights {
                gate: part(&format!("{e}.0"), routed, 98, 160),
                up: part(&format!("{e}.1"), routed, 98, 160),
                down: part(&format!("{e}.2"), routed, 160, 98),
            })
            .collect();
        let [w1, w3, w2] = [("w1", 98, 160), ("w3", 98, 160), ("w2", 160, 98)]
            .map(|(name, rows, cols)| part(name, shared, rows, cols));
        for (mode, rows) in
            [(Mode::Exact, 1), (Mode::Exact, 5), (Mode::Exact, 9), (Mode::Native, 1), (Mode::Source, 3)]
        {
            let b = emu(mode);
            let x = b.upload_host(&input(rows, 160)).unwrap();
            let ids = [0, 3, 5, 8, 1, 2, 4, 6, 7].repeat(3)[..3 * rows].to_vec();
            let weights = (0..3 * rows).map(|i| 0.2 + 0.1 * (i % 12) as f32).collect();
            let routing = Routing {
                experts: b.upload_host(&Host::i32(&[rows, 3], ids)).unwrap(),
                weights: b.upload_host(&Host::f32(&[rows, 3], weights)).unwrap(),
            };
            let experts = Experts::new(&b.device, &all).unwrap();
            let mats = [&w1, &w3, &w2].map(|w| Mat::new(&b.device, w).unwrap());
            let [m1, m3, m2] = &mats;
            let acc = b.fetch(&b.experts(&x, &routing, &experts, 2.5)).unwrap();
            let one = b.fetch(&b.shared(&x, [m1, m3, m2], 2.5)).unwrap();
            let want = ops::moe::moe_sum(reference(mode), acc.as_f32(), one.as_f32());
            let mut got = None;
            let counts =
                b.counted(|| got = Some(b.experts_and_shared(&x, &routing, &experts, [m1, m3, m2], 2.5)));
            let what = format!("{}, {}, {}, {rows} rows", routed.name(), shared.name(), mode.name());
            assert!(b.fetch(&got.unwrap()).unwrap().as_f32() == want, "{what}");
            if routed != Form::Exl3 && mode == Mode::Native {
                assert_eq!(counts.values().sum::<u64>(), 3, "{what}: {counts:?}");
            }
        }
    }
}

#[test]
fn experts_of_other_shapes_are_refused_by_name() {
    let w = |name: &str, rows, cols| generated_weight(name, Form::Fp4Row32, rows, cols, 3);
    let one = |e: usize, inter| ExpertWeights {
        gate: w(&format!("experts.{e}.w1"), inter, 64),
        up: w(&format!("experts.{e}.w3"), inter, 64),
        down: w(&format!("experts.{e}.w2"), 64, inter),
    };
    let b = emu(Mode::Exact);
    let error = Experts::new(&b.device, &[one(0, 32), one(1, 64)]).err().unwrap();
    assert!(error.refused && error.reason.contains("experts.1.w1 is 64 x 64"), "{error}");
    assert!(Experts::new(&b.device, &[]).err().unwrap().refused);
}

/// Every form at shapes that are whole in nothing: columns that end within a group and within eight, one output.
#[test]
fn odd_shapes_match_the_reference() {
    for (form, (outs, cols)) in
        FORMS.into_iter().flat_map(|f| [(1, 2), (3, 40), (33, 100), (70, 2058), (700, 36)].map(|s| (f, s)))
    {
        let w = generated_weight("w", form, outs, cols, 3);
        for (mode, rows) in [(Mode::Exact, 3), (Mode::Source, 2), (Mode::Native, 11)] {
            let x = input(rows, cols);
            let want = ops::linear::linear(reference(mode), Io::Fp8, &w, x.as_f32());
            let got = linear(&emu(mode), &x, &w, Io::Fp8);
            // The registry's limits of linear_fp8; of few outputs one flipped bf16 rounding, 2^-8 at most, may show.
            let flipped = if outs < 64 { 4e-3 } else { 3e-4 };
            let limit = if mode == Mode::Source { flipped } else { 1e-6 };
            let error = nrms(got.as_f32(), &want);
            assert!(error <= limit, "{} {outs} x {cols}, {}: {error:e}", form.name(), mode.name());
        }
    }
}

/// Any number of rows gives a row the same bits, in `native` on either side of its prefill kernels.
#[test]
fn rows_of_a_product_do_not_depend_on_others() {
    for form in FORMS {
        let w = generated_weight("w", form, 140, 2080, 3);
        for mode in [Mode::Exact, Mode::Source, Mode::Native] {
            let b = emu(mode);
            let x = input(41, 2080);
            let many = linear(&b, &x, &w, Io::Fp8);
            let few = linear(&b, &x.slice_rows(3, 8), &w, Io::Fp8);
            let same = |start: usize, count: usize, of: &Host, first: usize| {
                let part = linear(&b, &x.slice_rows(start, count), &w, Io::Fp8);
                let what = format!("{}, {}, rows {start}+{count}", form.name(), mode.name());
                assert!(part == of.slice_rows(start - first, count), "{what}");
            };
            same(3, 1, &few, 3);
            same(5, 2, &few, 3);
            same(4, 5, &few, 3);
            same(20, 12, &many, 0);
            if mode != Mode::Native {
                same(3, 8, &many, 0);
            }
        }
    }
}

/// In `source` products of fp8 and fp4 add up in the order of the released kernels: the bits are those of that order written
/// plainly.
#[test]
fn the_released_order_is_kept_to_the_bit() {
    for form in [Form::Fp8Block32, Form::Fp8Row32, Form::Fp4Row32] {
        for (rows, outs, cols) in [(1, 70, 64), (6, 33, 9024), (3, 32, 320)] {
            let w = generated_weight("w", form, outs, cols, 3);
            let x = input(rows, cols);
            let a = ops::linear::activations(Mode::Source, Io::Fp8, x.as_f32(), cols);
            let (mut row, mut want) = (vec![0.0; cols], vec![0.0; rows * outs]);
            for o in 0..outs {
                w.decode_row(o, &mut row);
                for r in 0..rows {
                    let part =
                        |(w, x): (&[f32], &[f32])| w.iter().zip(x).fold(0f32, |p, (w, x)| w.mul_add(*x, p));
                    let groups = row.chunks(32).zip(a[r * cols..][..cols].chunks(32)).map(part);
                    want[r * outs + o] = numerics::bf16::round(groups.fold(0f32, |s, p| s + p));
                }
            }
            let got = linear(&emu(Mode::Source), &x, &w, Io::Fp8);
            assert!(got.as_f32() == want, "{} {rows} x {outs} x {cols}", form.name());
        }
    }
}

/// Codes that mean NaN stay NaN, and only in their own output.
#[test]
fn nan_codes_stay_nan() {
    let mut codes = vec![0x38u8; 4 * 64];
    codes[64 + 37] = 0x7f;
    codes[3 * 64 + 2] = 0xff;
    let scale = Bytes::copied(&[127; 2]);
    let w = Weight::new("w", Form::Fp8Block32, 4, 64, Bytes::copied(&codes), scale).unwrap();
    for (mode, rows) in [(Mode::Exact, 1), (Mode::Source, 1), (Mode::Native, 9)] {
        let y = linear(&emu(mode), &Host::f32(&[rows, 64], vec![1.0; 64 * rows]), &w, Io::Fp8);
        for y in y.as_f32().chunks(4) {
            assert_eq!([y[0], y[2]], [64.0; 2], "{}", mode.name());
            assert!(y[1].is_nan() && y[3].is_nan(), "{}", mode.name());
        }
    }
}

/// A mapped checkpoint's weights are read in place.
#[test]
fn a_mapped_weight_is_not_copied() {
    let path = std::env::temp_dir().join(format!("hallmark-gpu-{}.bin", std::process::id()));
    let (rows, cols) = (256, 256);
    let made = generated_weight("w", Form::Fp8Block32, rows, cols, 3);
    let mut bytes = vec![0u8; 32 << 10];
    bytes.extend_from_slice(made.data());
    bytes.extend_from_slice(made.scale());
    bytes.resize(256 << 10, 0);
    std::fs::write(&path, &bytes).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    // SAFETY: nobody else knows the file.
    let all = Bytes::mapped(unsafe { memmap2::Mmap::map(&file).unwrap() });
    let part = |start, len| all.slice(start, len).unwrap();
    let (data, scale) = (part(32 << 10, rows * cols), part((32 << 10) + rows * cols, 64));
    let w = Weight::new("w", Form::Fp8Block32, rows, cols, data, scale).unwrap();
    let b = emu(Mode::Exact);
    let mat = Mat::new(&b.device, &w).unwrap();
    assert!(mat.slab.imported(), "the emulator takes pages of 16 KiB");
    assert_eq!(linear(&b, &input(2, cols), &w, Io::F32), linear(&b, &input(2, cols), &made, Io::F32));
    std::fs::remove_file(&path).unwrap();
}
/// The widest sums of the model, on either side of eight rows, within the registry's limit of linear layers.
#[test]
fn the_longest_sums_stay_within_the_limit() {
    for (form, outs, cols) in [
        (Form::F32, 24, 20480),
        (Form::Bf16, 384, 5120),
        (Form::Fp8Block32, 64, 8192),
        (Form::Exl3, 128, 8192),
    ] {
        let w = generated_weight("w", form, outs, cols, 3);
        for (mode, rows) in [(Mode::Exact, 1), (Mode::Native, 9)] {
            let x = input(rows, cols);
            let want = ops::linear::linear(reference(mode), Io::F32, &w, x.as_f32());
            let error = nrms(linear(&emu(mode), &x, &w, Io::F32).as_f32(), &want);
            assert!(error <= 1e-6, "{} {outs} x {cols}, {rows} rows: {error:e}", form.name());
        }
    }
}

/// More rows than the scores of attention are kept for at a time.
#[test]
fn attention_of_many_rows_has_the_bits_of_single_ones() {
    let differing = registry::row_variance("sparse_attention", &emu(Mode::Source), &Geometry::TINY, 67, 3);
    assert_eq!(differing.unwrap(), []);
}
