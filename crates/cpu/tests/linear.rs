//! Linear layers: exact decoding, agreement with double precision, row invariance.

use checkpoint::{Bytes, Form, Weight};
use cpu::{Engine, Isa, Job};
use numerics::generator::Stream;

const FORMS: [Form; 5] = [Form::F32, Form::Bf16, Form::Fp8Block32, Form::Fp8Row32, Form::Fp4Row32];

/// Scale bytes of a case.
#[derive(Clone, Copy)]
enum Scales {
    /// 2^-6 to 2^1, as checkpoints have.
    Usual,
    /// Every byte but NaN: products overflow and become subnormal.
    All,
    /// So many bytes from the given one.
    From(u8, u8),
}

fn weight(form: Form, rows: usize, cols: usize, scales: Scales, seed: u64) -> Weight {
    let s = Stream::new("weight", seed);
    let n = form.data_len(rows, cols).expect("shape");
    let data: Vec<u8> = match form {
        Form::F32 => (0..rows * cols).flat_map(|i| s.normal(i as u64).to_le_bytes()).collect(),
        Form::Bf16 => {
            (0..rows * cols).flat_map(|i| numerics::bf16::to_bits(s.normal(i as u64)).to_le_bytes()).collect()
        }
        Form::Fp4Row32 => (0..n).map(|i| s.word(i as u64) as u8).collect(),
        Form::Exl3 => unreachable!("FORMS has none"),
        // No NaN codes here.
        Form::Fp8Block32 | Form::Fp8Row32 => {
            (0..n).map(|i| s.word(i as u64) as u8).map(|c| if c & 0x7f == 0x7f { c ^ 1 } else { c }).collect()
        }
    };
    let t = Stream::new("scale", seed);
    let count = form.scale_shape(rows, cols).map_or(0, |[r, c]| r * c);
    let scale: Vec<u8> = (0..count)
        .map(|i| match scales {
            Scales::Usual => 121 + (t.word(i as u64) % 8) as u8,
            Scales::All => (t.word(i as u64) % 255) as u8,
            Scales::From(low, count) => low + (t.word(i as u64) % u64::from(count)) as u8,
        })
        .collect();
    Weight::new("w", form, rows, cols, Bytes::copied(&data), Bytes::copied(&scale)).expect("weight")
}

fn activations(n: usize, seed: u64) -> Vec<f32> {
    let s = Stream::new("x", seed);
    (0..n).map(|i| s.normal(i as u64)).collect()
}

fn linear(e: &Engine, w: &Weight, x: &[f32], rows: usize) -> Vec<f32> {
    let mut y = vec![7.0; rows * w.rows()];
    e.linear(w, x, rows, &mut y);
    y
}

fn engine(threads: usize, isa: Isa) -> Engine {
    Engine::new(Some(threads), Some(isa)).expect("engine")
}

fn bits(y: &[f32]) -> Vec<u32> {
    y.iter().map(|v| v.to_bits()).collect()
}

/// Tails of every kind: columns and rows off the multiples of 16, 32 and 64, fewer than a step, slices of K.
fn shapes() -> Vec<[usize; 2]> {
    vec![[1, 2], [3, 30], [5, 32], [33, 34], [40, 62], [7, 66], [64, 96], [31, 130], [70, 514], [37, 1090]]
}

#[test]
fn one_column_makes_the_exact_weight() {
    // x = e_k gives the weight's own value, so every decoder is checked on every position, bit for bit.
    for isa in Isa::available() {
        let e = engine(1, isa);
        for form in FORMS {
            for scales in [Scales::Usual, Scales::All] {
                for [rows, cols] in [[35, 70], [4, 130], [9, 64]] {
                    let w = weight(form, rows, cols, scales, 3);
                    let mut x = vec![0.0; cols * cols];
                    (0..cols).for_each(|k| x[k * cols + k] = 1.0);
                    let many = linear(&e, &w, &x, cols);
                    let mut row = vec![0.0; cols];
                    for o in 0..rows {
                        w.decode_row(o, &mut row);
                        for k in 0..cols {
                            let one = linear(&e, &w.clone(), &x[k * cols..][..cols], 1)[o];
                            let case = format!("{} {} {rows}x{cols} [{o}][{k}]", isa.name(), form.name());
                            // A sum that starts at +0 cannot keep the sign of -0; a value beyond the largest single
                            // is infinite, and infinity times the other zeros is NaN.
                            if row.iter().any(|v| v.is_infinite()) {
                                assert_eq!(many[k * rows + o].to_bits(), one.to_bits(), "{case}");
                            } else {
                                assert_eq!(many[k * rows + o], row[k], "{case}");
                                assert_eq!(one, row[k], "{case}");
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn agrees_with_double_precision() {
    // 16 lanes of K/16 rounded additions and a tree of 4: random-walk error about sqrt(K/16 + 4) half units of the
    // partial sums, which the sum of magnitudes bounds; 4 sqrt(K) 2^-24 of that sum leaves a factor of 16.
    for isa in Isa::available() {
        let e = engine(2, isa);
        for form in FORMS {
            for [rows, cols] in shapes() {
                let w = weight(form, rows, cols, Scales::Usual, 11);
                let x = activations(5 * cols, 12);
                let y = linear(&e, &w, &x, 5);
                let mut row = vec![0.0; cols];
                for o in 0..rows {
                    w.decode_row(o, &mut row);
                    for r in 0..5 {
                        let products =
                            row.iter().zip(&x[r * cols..]).map(|(w, x)| f64::from(*w) * f64::from(*x));
                        let (sum, size) = products.fold((0.0, 0.0), |(s, a), p| (s + p, a + p.abs()));
                        let limit = 4.0 * (cols as f64).sqrt() * 2f64.powi(-24) * size;
                        let off = (f64::from(y[r * rows + o]) - sum).abs();
                        assert!(
                            off <= limit,
                            "{} {} {rows}x{cols} [{r}][{o}]: {off} > {limit}",
                            isa.name(),
                            form.name()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn rows_threads_and_instruction_sets_do_not_change_a_bit() {
    let shapes = [[70, 514], [33, 34], [5, 1090], [160, 64]];
    let engines: Vec<Engine> =
        Isa::available().into_iter().flat_map(|isa| [1, 2, 3].map(|threads| engine(threads, isa))).collect();
    for form in FORMS {
        for [out, cols] in shapes {
            for scales in [Scales::Usual, Scales::All] {
                let w = weight(form, out, cols, scales, 21);
                let x = activations(129 * cols, 22);
                let one: Vec<u32> = (0..129)
                    .flat_map(|r| bits(&linear(&engines[0], &w, &x[r * cols..][..cols], 1)))
                    .collect();
                for e in &engines {
                    for rows in (1..=9).chain([16, 33, 129]) {
                        // Also from another place in the batch.
                        for first in [0, 129 - rows] {
                            let y = linear(e, &w, &x[first * cols..][..rows * cols], rows);
                            assert!(
                                bits(&y) == one[first * out..][..rows * out],
                                "{} {out}x{cols}, {rows} rows from {first}, {} with {} threads",
                                form.name(),
                                e.isa().name(),
                                e.threads()
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn large_products_use_the_threads_and_give_the_same_bits() {
    // Above the limit under which a call stays on its thread.
    let reference = engine(1, Isa::best());
    for isa in [Isa::best(), Isa::available()[0]] {
        for threads in [2, 5] {
            let e = engine(threads, isa);
            for form in FORMS {
                let w = weight(form, 1000, 640, Scales::Usual, 31);
                let x = activations(14 * 640, 32);
                for rows in [1, 14] {
                    let x = &x[..rows * 640];
                    assert!(
                        bits(&linear(&e, &w, x, rows)) == bits(&linear(&reference, &w, x, rows)),
                        "{} {rows} rows, {} with {threads} threads",
                        form.name(),
                        isa.name()
                    );
                }
            }
        }
    }
}

#[test]
fn extreme_activations_take_the_exact_path() {
    // Activations and scales whose product is subnormal or overflows: folding the scale would round or lose them.
    let cols = 96;
    for form in FORMS {
        for scales in [Scales::Usual, Scales::All] {
            let w = weight(form, 40, cols, scales, 41);
            let mut x = activations(6 * cols, 42);
            let factors = [1e-38, 1e-44, 3e37, 1e-20, f32::INFINITY, f32::NAN];
            for (r, f) in factors.into_iter().enumerate() {
                x[r * cols + 5] *= f;
                x[r * cols + 70] *= f;
            }
            let want = bits(&linear(&engine(1, Isa::Portable), &w, &x, 6));
            for isa in Isa::available() {
                let e = engine(1, isa);
                assert!(bits(&linear(&e, &w, &x, 6)) == want, "{} {}", isa.name(), form.name());
                for r in 0..6 {
                    let one = linear(&e, &w, &x[r * cols..][..cols], 1);
                    assert!(bits(&one) == want[r * 40..][..40], "{} {} row {r}", isa.name(), form.name());
                }
            }
        }
    }
}

#[test]
fn moved_scales_leave_no_trace() {
    // The kernels move scales between 2^-40 and 2^40 off the weights, fp4 where they span at most 26 binades: at the
    // ends of that, with activations from 2^-40 to 2^40, one row must still have the bits of decoded weights.
    let (rows, cols) = (40, 200);
    let s = Stream::new("magnitude", 7);
    let mut x = activations(cols, 81);
    for (i, v) in x.iter_mut().enumerate() {
        let magnitude = v.abs().clamp(1.0, 1.99) * 2f32.powi((s.word(i as u64) % 81) as i32 - 40);
        *v = magnitude.copysign(*v);
    }
    for form in FORMS {
        for (low, count) in [(87, 1), (87, 27), (87, 28), (141, 27), (167, 1), (87, 81), (86, 3), (166, 3)] {
            let w = weight(form, rows, cols, Scales::From(low, count), 82);
            let want = bits(&linear(&engine(1, Isa::Portable), &w, &x, 1));
            assert!(want.iter().all(|v| f32::from_bits(*v).is_finite()));
            for isa in Isa::available() {
                let y = bits(&linear(&engine(1, isa), &w, &x, 1));
                assert!(y == want, "{} {} scales from {low}, {count} of them", isa.name(), form.name());
            }
        }
    }
}

#[test]
fn a_nan_code_or_scale_makes_its_rows_nan() {
    for form in [Form::Fp8Block32, Form::Fp8Row32, Form::Fp4Row32] {
        let (rows, cols) = (35, 130);
        let good = weight(form, rows, cols, Scales::Usual, 51);
        let x = activations(3 * cols, 52);
        let mut cases = Vec::new();
        let mut scale = good.scale().to_vec();
        scale[6] = 255;
        cases.push((good.data().to_vec(), scale));
        if form != Form::Fp4Row32 {
            for code in [0x7f, 0xff] {
                let mut data = good.data().to_vec();
                data[2 * cols + 129] = code;
                cases.push((data, good.scale().to_vec()));
            }
        }
        for (data, scale) in cases {
            let w = Weight::new("w", form, rows, cols, Bytes::copied(&data), Bytes::copied(&scale))
                .expect("weight");
            let mut row = vec![0.0; cols];
            let nan: Vec<bool> = (0..rows)
                .map(|r| {
                    w.decode_row(r, &mut row);
                    row.iter().any(|v| v.is_nan())
                })
                .collect();
            assert!(nan.contains(&true) && nan.contains(&false));
            for isa in Isa::available() {
                let e = engine(1, isa);
                for batch in [1, 3] {
                    let y = linear(&e, &w, &x[..batch * cols], batch);
                    for (i, v) in y.iter().enumerate() {
                        let name = format!("{} {} {i}", isa.name(), form.name());
                        assert_eq!(v.is_nan(), nan[i % rows], "{name}");
                        assert!(!v.is_nan() || v.to_bits() == f32::NAN.to_bits(), "{name}");
                    }
                }
            }
        }
    }
}

#[test]
fn jobs_of_a_run_equal_single_calls() {
    for isa in Isa::available() {
        let e = engine(2, isa);
        let ws: Vec<Weight> = FORMS
            .iter()
            .enumerate()
            .map(|(i, f)| weight(*f, 130 + i, 320, Scales::Usual, 60 + i as u64))
            .collect();
        let x = activations(4 * 320, 61);
        let other = activations(320, 62);
        let mut ys: Vec<Vec<f32>> = ws.iter().map(|w| vec![0.0; 4 * w.rows()]).collect();
        let mut last = vec![0.0; 130];
        let mut jobs: Vec<Job> =
            ws.iter().zip(&mut ys).map(|(weight, y)| Job { weight, x: &x, rows: 4, y }).collect();
        jobs.push(Job { weight: &ws[0], x: &other, rows: 1, y: &mut last });
        e.run(&mut jobs);
        for (w, y) in ws.iter().zip(&ys) {
            assert_eq!(bits(y), bits(&linear(&e, w, &x, 4)), "{} {}", isa.name(), w.form().name());
        }
        assert_eq!(bits(&last), bits(&linear(&e, &ws[0], &other, 1)));
        e.run(&mut []);
    }
}

#[test]
fn unaligned_weights_give_the_same_bits() {
    // Tensors of a file start anywhere.
    let n = 40 * 130 + 3;
    for form in FORMS {
        let w = weight(form, 40, 130, Scales::Usual, 71);
        let mut data = vec![0; 3];
        data.extend_from_slice(w.data());
        data.extend_from_slice(&[0xff; 5]);
        let moved = Bytes::copied(&data).slice(3, w.data().len()).expect("range");
        let moved = Weight::new("w", form, 40, 130, moved, Bytes::copied(w.scale())).expect("weight");
        let x = activations(n, 72);
        for isa in Isa::available() {
            let e = engine(1, isa);
            for rows in [1, 3] {
                let x = &x[..rows * 130];
                assert_eq!(
                    bits(&linear(&e, &w, x, rows)),
                    bits(&linear(&e, &moved, x, rows)),
                    "{}",
                    form.name()
                );
            }
        }
    }
}

#[test]
fn a_missing_instruction_set_is_named() {
    for isa in [Isa::Avx2, Isa::Avx512] {
        match Engine::new(Some(1), Some(isa)) {
            Ok(e) => assert_eq!(e.isa(), isa),
            Err(e) => {
                assert!(e.to_string().contains(isa.name()) && e.to_string().contains("portable"), "{e}")
            }
        }
    }
}
