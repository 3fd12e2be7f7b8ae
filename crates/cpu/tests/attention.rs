//! Attention and index scores: the scalar reference, row invariance, exact cache decoding.

use cpu::{Attention, Engine, IndexQueries, Isa, Slot};
use numerics::{generator::Stream, quantise};
use ops::Mode;

fn engines() -> Vec<Engine> {
    let both = |isa| [1, 3].map(|threads| Engine::new(Some(threads), Some(isa)).expect("engine"));
    Isa::available().into_iter().flat_map(both).collect()
}

fn normal(name: &str, n: usize) -> Vec<f32> {
    let s = Stream::new(name, 5);
    (0..n).map(|i| s.normal(i as u64)).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

fn nrms(a: &[f32], b: &[f32]) -> f64 {
    let square = |v: f64| v * v;
    let off: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    if off == 0.0 {
        return 0.0;
    }
    (off / b.iter().map(|b| square(f64::from(*b))).sum::<f64>()).sqrt()
}

/// Slot lists as code rows, with the same values decoded.
struct Case {
    heads: usize,
    dim: usize,
    q: Vec<f32>,
    sinks: Vec<f32>,
    stored: Vec<Stored>,
}

enum Stored {
    Empty,
    Fp8(Vec<u8>),
    Kv(Vec<u8>),
    Plain(Vec<f32>),
}

impl Case {
    fn new(heads: usize, dim: usize, rows: usize, slots: usize) -> Self {
        let kinds = Stream::new("kinds", 9);
        let stored = (0..slots)
            .map(|j| {
                let x = normal(&format!("key {j}"), dim);
                match kinds.word(j as u64) % 7 {
                    0 => Stored::Empty,
                    1..=3 => {
                        let mut row = vec![0; quantise::fp8_row_bytes(dim)];
                        quantise::store_fp8(&x, &mut row);
                        Stored::Fp8(row)
                    }
                    4 => Stored::Plain(x),
                    _ => {
                        let mut row = vec![0; quantise::kv_row_bytes(dim)];
                        quantise::store_kv(&x, &mut row);
                        Stored::Kv(row)
                    }
                }
            })
            .collect();
        Self { heads, dim, q: normal("q", rows * heads * dim), sinks: normal("sinks", heads), stored }
    }

    /// The slots of query `row`: each query sees its own part.
    fn slots(&self, row: usize) -> Vec<Slot<'_>> {
        let n = self.stored.len() - row * 3 % self.stored.len().max(1);
        self.stored[..n]
            .iter()
            .map(|s| match s {
                Stored::Empty => Slot::Empty,
                Stored::Fp8(row) => Slot::Fp8(row),
                Stored::Kv(row) => Slot::Kv(row),
                Stored::Plain(row) => Slot::Plain(row),
            })
            .collect()
    }

    fn panel(&self, row: usize) -> (Vec<f32>, Vec<bool>) {
        let mut panel = Vec::new();
        let mut valid = Vec::new();
        for slot in self.slots(row) {
            let mut x = vec![0.0; self.dim];
            match slot {
                Slot::Empty => {}
                Slot::Fp8(row) => quantise::load_fp8(row, &mut x),
                Slot::Kv(row) => quantise::load_kv(row, &mut x),
                Slot::Plain(row) => x.copy_from_slice(row),
            }
            valid.push(!matches!(slot, Slot::Empty));
            panel.extend(x);
        }
        (panel, valid)
    }

    fn run(&self, e: &Engine, rows: std::ops::Range<usize>, round: bool) -> Vec<f32> {
        let width = self.heads * self.dim;
        let mut out = vec![f32::NAN; rows.len() * width];
        let a = Attention {
            q: &self.q[rows.start * width..rows.end * width],
            dim: self.dim,
            sinks: &self.sinks,
            scale: (self.dim as f64).powf(-0.5) as f32,
            round,
        };
        e.attention(a, |r| self.slots(rows.start + r), &mut out);
        out
    }
}

#[test]
fn attention_agrees_with_the_reference() {
    // Lengths around blocks of 64, widths off the lanes, heads off the tiles.
    for (heads, dim, slots) in
        [(1, 32, 1), (4, 64, 63), (7, 48, 65), (3, 80, 130), (64, 512, 200), (5, 2, 64)]
    {
        let c = Case::new(heads, dim, 2, slots);
        for (round, mode, limit) in [
            // Single precision sums in another order, an exponential of 1 ulp: the registry's tolerance.
            (false, Mode::Exact, 2e-6),
            // A last-bit change of a score flips bf16 roundings: the registry's tolerance.
            (true, Mode::Source, 5e-4),
        ] {
            for row in 0..2 {
                let (panel, valid) = c.panel(row);
                let width = heads * dim;
                let mut want = vec![0.0; width];
                let q = &c.q[row * width..][..width];
                ops::attention::attend(mode, q, dim, &panel, &valid, &c.sinks, &mut want);
                for e in &engines() {
                    let got = c.run(e, row..row + 1, round);
                    let off = nrms(&got, &want);
                    assert!(
                        off < limit,
                        "{} {heads}x{dim}, {slots} slots, round {round}: {off}",
                        e.isa().name()
                    );
                }
            }
        }
    }
}

#[test]
fn attention_keeps_its_bits_in_any_company() {
    for (heads, dim, slots) in [(20, 64, 150), (3, 48, 70)] {
        let c = Case::new(heads, dim, 33, slots);
        let engines = engines();
        for round in [false, true] {
            let width = heads * dim;
            let one: Vec<u32> = (0..33).flat_map(|r| bits(&c.run(&engines[0], r..r + 1, round))).collect();
            for e in &engines {
                for rows in [1, 2, 3, 5, 9, 16, 33] {
                    for first in [0, 33 - rows] {
                        assert!(
                            bits(&c.run(e, first..first + rows, round))
                                == one[first * width..][..rows * width],
                            "{heads}x{dim}: {rows} rows from {first}, {} with {} threads",
                            e.isa().name(),
                            e.threads()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_query_without_slots_gives_zeros() {
    let e = Engine::new(Some(1), None).expect("engine");
    for slots in [vec![], vec![Slot::Empty; 70]] {
        let mut out = vec![f32::NAN; 64];
        let a = Attention {
            q: &normal("q", 64),
            dim: 32,
            sinks: &[1.0, f32::NEG_INFINITY],
            scale: 1.0,
            round: false,
        };
        e.attention(a, |_| slots.clone(), &mut out);
        assert_eq!(out, vec![0.0; 64]);
    }
}

#[test]
fn an_empty_block_changes_nothing() {
    // A block of empty slots before, between or behind the others.
    let c = Case::new(4, 64, 1, 128);
    let a = Attention { q: &c.q, dim: 64, sinks: &c.sinks, scale: 0.125, round: false };
    let slots = c.slots(0);
    for e in &engines() {
        let mut want = vec![0.0; 256];
        e.attention(a, |_| slots.clone(), &mut want);
        for at in [0, 64, 128] {
            let mut longer = slots.clone();
            longer.splice(at..at, [Slot::Empty; 64]);
            let mut out = vec![0.0; 256];
            e.attention(a, |_| longer.clone(), &mut out);
            assert_eq!(bits(&out), bits(&want), "{} at {at}", e.isa().name());
        }
    }
}

#[test]
fn cache_rows_decode_bit_for_bit() {
    let s = Stream::new("codes", 3);
    for e in &engines() {
        for dim in [2, 30, 32, 48, 128, 512] {
            for seed in 0..40 {
                let row = |n: usize| -> Vec<u8> {
                    (0..n).map(|i| s.word((seed * 9000 + i) as u64) as u8).collect()
                };
                let (mut want, mut got) = (vec![0.0; dim], vec![1.0; dim]);
                // NaN has one meaning, whatever its bits.
                let same = |a: &[f32], b: &[f32]| {
                    a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
                };
                let codes = row(quantise::fp8_row_bytes(dim));
                quantise::load_fp8(&codes, &mut want);
                e.load_fp8(&codes, &mut got);
                assert!(same(&got, &want), "fp8 {dim} {}", e.isa().name());
                let codes = row(quantise::kv_row_bytes(dim));
                quantise::load_kv(&codes, &mut want);
                e.load_kv(&codes, &mut got);
                assert!(same(&got, &want), "kv {dim} {}", e.isa().name());
                let codes = row(quantise::fp4_row_bytes(dim));
                quantise::load_fp4(&codes, &mut want);
                e.load_fp4(&codes, &mut got);
                assert!(same(&got, &want), "fp4 {dim} {}", e.isa().name());
            }
        }
    }
}

#[test]
fn index_scores_agree_with_the_reference_and_keep_their_bits() {
    let engines = engines();
    for (heads, dim, n, rows) in [(32, 128, 300, 3), (4, 32, 65, 40), (7, 48, 513, 5), (2, 2, 1, 1)] {
        let (q, w) = (normal("iq", rows * heads * dim), normal("iw", rows * heads));
        let bytes = quantise::fp4_row_bytes(dim);
        let mut keys = vec![0; n * bytes];
        let mut panel = vec![0.0; n * dim];
        for (j, row) in keys.chunks_mut(bytes).enumerate() {
            quantise::store_fp4(&normal(&format!("ik {j}"), dim), row);
            quantise::load_fp4(row, &mut panel[j * dim..][..dim]);
        }
        let visible: Vec<usize> = (0..rows).map(|r| n - (r * 7) % n).collect();
        for (round, mode, limit) in [
            // Another order of single-precision sums: the registry's tolerance.
            (false, Mode::Exact, 1e-6),
            // Isolated flips of bf16 roundings: the registry's tolerance.
            (true, Mode::Source, 2e-3),
        ] {
            // The reference rounds the head weights; these are so already.
            let w: Vec<f32> = w.iter().map(|w| numerics::bf16::round(*w)).collect();
            let run = |e: &Engine, rows: std::ops::Range<usize>| {
                let a = IndexQueries {
                    q: &q[rows.start * heads * dim..rows.end * heads * dim],
                    dim,
                    w: &w[rows.start * heads..rows.end * heads],
                    heads,
                    round,
                };
                let mut out = vec![f32::NAN; rows.len() * n];
                e.index_scores(a, &keys, n, &visible[rows], &mut out);
                out
            };
            let first = run(&engines[0], 0..rows);
            for r in 0..rows {
                let mut want = vec![0.0; n];
                let q = &q[r * heads * dim..][..heads * dim];
                ops::indexer::index_scores_row(
                    mode,
                    q,
                    &w[r * heads..][..heads],
                    1.0,
                    &panel,
                    visible[r],
                    &mut want,
                );
                let got = &first[r * n..][..n];
                assert!(got[visible[r]..].iter().all(|v| *v == f32::NEG_INFINITY));
                let off = nrms(&got[..visible[r]], &want[..visible[r]]);
                assert!(off < limit, "{heads}x{dim}, {n} keys, row {r}, round {round}: {off}");
            }
            for e in &engines {
                assert!(bits(&run(e, 0..rows)) == bits(&first), "{} {}", e.isa().name(), e.threads());
                for r in 0..rows {
                    assert!(
                        bits(&run(e, r..r + 1)) == bits(&first[r * n..][..n]),
                        "{} row {r}",
                        e.isa().name()
                    );
                }
            }
        }
    }
}

#[test]
fn vector_sums_agree_and_keep_their_bits() {
    for n in [0, 1, 15, 16, 17, 100, 5120] {
        let (a, b) = (normal("a", n), normal("b", n));
        let want: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let size: f64 = a.iter().zip(&b).map(|(a, b)| (f64::from(*a) * f64::from(*b)).abs()).sum();
        let mut first = None;
        for e in &engines() {
            let dot = e.dot(&a, &b);
            // Random-walk error of n/16 additions a lane and a tree, with room.
            assert!((f64::from(dot) - want).abs() <= 4.0 * (n as f64).sqrt() * 2f64.powi(-24) * size, "{n}");
            assert_eq!(*first.get_or_insert(dot.to_bits()), dot.to_bits(), "{n} {}", e.isa().name());
            assert_eq!(e.sum_squares(&a).to_bits(), e.dot(&a, &a).to_bits());
            let mut y = b.clone();
            e.axpy(0.3, &a, &mut y);
            for i in 0..n {
                assert_eq!(y[i].to_bits(), 0.3f32.mul_add(a[i], b[i]).to_bits());
            }
        }
    }
}
