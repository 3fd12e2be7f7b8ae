//! Kernels of every instruction set of this machine against the scalar reference.

use super::*;
use crate::Trellis;
use crate::reference;

struct Case {
    shape: [usize; 3],
    trellis: Vec<u8>,
    suh: Vec<u8>,
    svh: Vec<u8>,
    codebook: Codebook,
}

impl Case {
    /// Random bits are a valid trellis.
    fn new(rate: Rate, codebook: Codebook, features: usize, columns: usize) -> Case {
        let shape = [features / 16, columns / 16, rate.words16()];
        let mut state = 88_172_645_463_325_252u64 + rate.half_bits() as u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u32
        };
        let trellis = (0..shape[0] * shape[1] * rate.tile_bytes()).map(|_| next() as u8).collect();
        let mut halves = |count: usize| -> Vec<u8> {
            let scale = |r: u32| half::f16::from_f32((r % 1000) as f32 / 500.0 - 1.0005);
            (0..count).flat_map(|_| scale(next()).to_le_bytes()).collect()
        };
        Case { shape, trellis, suh: halves(features), svh: halves(columns), codebook }
    }

    fn linear(&self) -> Linear<'_> {
        let trellis = Trellis::new("t", &self.shape, &self.trellis).unwrap();
        Linear::new("w", trellis, &self.suh, &self.svh, self.codebook).unwrap()
    }
}

fn cases(features: usize, columns: usize) -> impl Iterator<Item = Case> {
    let all = Rate::ALL.into_iter().flat_map(|r| Codebook::ALL.map(|c| (r, c)));
    let valid = all.filter(|(r, c)| !r.is_half() || *c == Codebook::Mul1);
    valid.map(move |(r, c)| Case::new(r, c, features, columns))
}

fn inputs(count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 7919 % 2003) as f32 / 1001.5 - 1.0) * if i % 97 == 0 { 20.0 } else { 1.0 })
        .collect()
}

#[test]
fn layouts_cover_the_tile() {
    for isa in Isa::available() {
        for rate in Rate::ALL {
            for codebook in Codebook::ALL {
                let layout = &Kernel::get(isa, rate, codebook).layout;
                let mut lanes = layout.lane.to_vec();
                lanes.sort_unstable();
                assert!(lanes.iter().enumerate().all(|(i, l)| i == usize::from(*l)), "{isa:?} {rate}");
            }
        }
    }
}

/// A one-hot input picks one weight per column: the product must be that weight, to the bit.
#[test]
fn weights_are_exact_to_the_bit() {
    for case in cases(128, 256) {
        let linear = case.linear();
        let inner = reference::inner(&linear);
        for isa in Isa::available() {
            let mut unit = vec![0f32; 128 * 128];
            (0..128).for_each(|i| unit[129 * i] = 1.0);
            let rows = Rows::with_isa(isa, &unit, 128, linear.trellis().rate(), linear.codebook()).unwrap();
            let mut work = Work::new(&rows);
            for block in 0..2 {
                let mut first = 0;
                for groups in rows.groups.chunks(BATCH / rows.groups[0].0) {
                    let count = groups.iter().map(|g| g.0).sum();
                    work.block(&linear, &rows, groups, block);
                    for r in 0..count {
                        let mut z = [0f32; BLOCK];
                        work.collect(rows.kernel, count, r, &mut z);
                        let want = &inner[(first + r) * 256 + block * BLOCK..][..BLOCK];
                        let (rate, codebook) = (linear.trellis().rate(), linear.codebook());
                        assert!(z == want, "{isa:?} {rate} {codebook:?} row {}", first + r);
                    }
                    first += count;
                }
                assert_eq!(first, 128);
            }
        }
    }
}

/// Eight bits: tiles that alternate between one byte and 128 others hold all pairs of bytes, which are all states.
#[test]
fn every_state_is_exact_to_the_bit() {
    let rate = Rate::from_bits(8.0).unwrap();
    let (features, columns) = (1024, 128);
    let mut tiles = vec![];
    for tile in 0..512u32 {
        let states: [u16; TILE] = std::array::from_fn(|i| {
            let byte = |i: usize| {
                if i.is_multiple_of(2) { tile / 2 } else { tile % 2 * 128 + i as u32 % TILE as u32 / 2 }
            };
            (byte((i + TILE - 1) % TILE) << 8 | byte(i)) as u16
        });
        let mut bytes = vec![0; rate.tile_bytes()];
        crate::trellis::pack(rate, &states, &mut bytes);
        tiles.extend(bytes);
    }
    let mut unit = vec![0f32; features * features];
    (0..features).for_each(|i| unit[(features + 1) * i] = 1.0);
    let ones = [0x00, 0x3C].repeat(features);
    for codebook in Codebook::ALL {
        let trellis = Trellis::new("t", &[features / 16, columns / 16, rate.words16()], &tiles).unwrap();
        let states =
            (0..features / 16).flat_map(|a| (0..columns / 16).flat_map(move |b| trellis.states(a, b)));
        assert_eq!(states.collect::<std::collections::HashSet<_>>().len(), 1 << 16);
        let linear = Linear::new("w", trellis, &ones, &ones[..2 * columns], codebook).unwrap();
        let inner = reference::inner(&linear);
        for isa in Isa::available() {
            let check = |range: Range<usize>| {
                let x = &unit[range.start * features..range.end * features];
                let rows = Rows::with_isa(isa, x, features, rate, codebook).unwrap();
                let mut work = Work::new(&rows);
                let mut first = range.start;
                for groups in rows.groups.chunks(BATCH / rows.groups[0].0) {
                    let count = groups.iter().map(|g| g.0).sum();
                    work.block(&linear, &rows, groups, 0);
                    for r in 0..count {
                        let mut z = [0f32; BLOCK];
                        work.collect(rows.kernel, count, r, &mut z);
                        let want = &inner[(first + r) * columns..][..columns];
                        assert!(z == want, "{isa:?} {codebook:?} row {}", first + r);
                    }
                    first += count;
                }
            };
            check(0..features);
            if Kernel::get(isa, rate, codebook).is_fused() {
                (0..features).for_each(|r| check(r..r + 1));
            }
        }
    }
}

#[test]
fn products_match_the_reference_with_the_same_bits_on_every_instruction_set() {
    for case in cases(384, 256) {
        let linear = case.linear();
        let x = inputs(3 * 384);
        for arithmetic in [Arithmetic::Exact, Arithmetic::Source] {
            let want = reference::linear(&linear, &x, arithmetic).unwrap();
            let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
            let mut first: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let mut xh = vec![0.0; x.len()];
                rotate_input(&x, linear.suh(), arithmetic, &mut xh).unwrap();
                let rows = Rows::with_isa(isa, &xh, 384, linear.trellis().rate(), linear.codebook()).unwrap();
                let mut y = vec![0.0; want.len()];
                linear.multiply(&rows, 0..2, &mut y).unwrap();
                assert!(y == *first.get_or_insert_with(|| y.clone()), "{isa:?} gives other bits");
                for (got, want) in row_major(&y, 3).iter().zip(&want) {
                    // f32 sums of 384 products, then 7 butterfly steps: some ulp of the largest.
                    assert!(
                        (got - want).abs() < 2e-6 * largest,
                        "{isa:?} {} {got} {want}",
                        linear.trellis().rate()
                    );
                }
            }
        }
    }
}

/// DESIGN's row invariance: bits do not depend on the number of rows, their place, or how blocks are split.
#[test]
fn a_row_does_not_see_its_company() {
    for (bits, codebook) in
        [(2.0, Codebook::Mcg), (3.0, Codebook::Mul1), (8.0, Codebook::Mcg), (2.5, Codebook::Mul1)]
    {
        let case = Case::new(Rate::from_bits(bits).unwrap(), codebook, 640, 384);
        let linear = case.linear();
        let x = inputs(129 * 640);
        for isa in Isa::available() {
            let run = |range: Range<usize>, split: bool| {
                let rows = Rows::with_isa(
                    isa,
                    &x[640 * range.start..640 * range.end],
                    640,
                    linear.trellis().rate(),
                    codebook,
                )
                .unwrap();
                let mut y = vec![0.0; range.len() * 384];
                if split {
                    for (i, y) in y.chunks_exact_mut(range.len() * BLOCK).enumerate() {
                        linear.multiply(&rows, i..i + 1, y).unwrap();
                    }
                } else {
                    linear.multiply(&rows, 0..3, &mut y).unwrap();
                }
                row_major(&y, range.len())
            };
            let alone: Vec<Vec<f32>> = (0..129).map(|i| run(i..i + 1, i % 2 == 0)).collect();
            for count in (1..=9).chain([16, 33, 129]) {
                let start = if count == 129 { 0 } else { count % 3 };
                let together = run(start..start + count, count % 2 == 0);
                for (r, y) in together.chunks_exact(384).enumerate() {
                    assert!(y == alone[start + r], "{isa:?} {bits} bits, {count} rows, row {r}");
                }
            }
        }
    }
}

#[test]
fn forward_does_not_depend_on_threads_or_alignment() {
    let case = Case::new(Rate::from_bits(3.0).unwrap(), Codebook::Mcg, 256, 512);
    let x = inputs(5 * 256);
    let run = |linear: Linear<'_>, threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| linear.forward(&x, Arithmetic::Source).unwrap())
    };
    let one = run(case.linear(), 1);
    assert!(one == run(case.linear(), 3));
    for shift in 1..4 {
        let mut moved = vec![0u8; shift];
        moved.extend(&case.trellis);
        let trellis = Trellis::new("t", &case.shape, &moved[shift..]).unwrap();
        let linear = Linear::new("w", trellis, &case.suh, &case.svh, case.codebook).unwrap();
        assert!(one == run(linear, 1), "shifted by {shift}");
    }
    assert_eq!(case.linear().forward(&[], Arithmetic::Exact).unwrap(), Vec::<f32>::new());
}

#[test]
fn wrong_rows_and_ranges_are_refused() {
    let case = Case::new(Rate::from_bits(2.0).unwrap(), Codebook::Mcg, 128, 256);
    let linear = case.linear();
    let x = inputs(2 * 128);
    let rate = linear.trellis().rate();
    let rows = Rows::new(&x, 128, rate, Codebook::Mcg).unwrap();
    let mut y = vec![0.0; 2 * 256];
    assert_eq!(linear.multiply(&rows, 0..2, &mut y), Ok(()));
    assert!(linear.multiply(&rows, 0..3, &mut y).is_err());
    assert!(linear.multiply(&rows, 0..1, &mut y).is_err());
    assert!(linear.multiply(&rows, Range { start: 2, end: 1 }, &mut []).is_err());
    let other = Rows::new(&x, 128, rate, Codebook::Mul1).unwrap();
    assert_eq!(linear.multiply(&other, 0..2, &mut y), Err(Error::OtherLayer));
    assert!(Rows::new(&x[1..], 128, rate, Codebook::Mcg).is_err());
    assert!(Rows::new(&x, 100, rate, Codebook::Mcg).is_err());
    assert!(linear.forward(&x[1..], Arithmetic::Exact).is_err());
}
