//! Counter-based generators of test weights: every element depends on the seed, the tensor's name and its index
//! alone, so any program can make the same bytes in any order.
//!
//! [`Stream`] is the common core. [`Tiny`] makes the tiny checkpoints of `fixtures/model`, [`smgen`] the tensors of
//! `fixtures/source-cuda`.

use crate::{bf16, e2m1, e4m3, e8m0, quantise::pow2};

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of splitmix64.
#[inline]
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// FNV-1a, 64 bits.
pub fn fnv1a64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// The words of one named tensor.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    key: u64,
}

impl Stream {
    /// The stream of tensor `name` under `seed`.
    pub fn new(name: &str, seed: u64) -> Self {
        Self { key: fnv1a64(name.as_bytes()) ^ mix(seed) }
    }

    /// Word number `i`.
    #[inline]
    pub fn word(self, i: u64) -> u64 {
        mix(self.key.wrapping_add(i.wrapping_add(1).wrapping_mul(GOLDEN)))
    }

    /// Sum of the four 16-bit lanes of word `i`, less their mean: near normal, standard deviation 37837.
    #[inline]
    pub fn lanes(self, i: u64) -> i32 {
        let w = self.word(i);
        ((w & 0xffff) + ((w >> 16) & 0xffff) + ((w >> 32) & 0xffff) + (w >> 48)) as i32 - 131_070
    }

    /// A uniform value in [0, 1) from word `i`.
    #[inline]
    pub fn uniform(self, i: u64) -> f64 {
        (self.word(i) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A near normal value of unit standard deviation from word `i`.
    #[inline]
    pub fn normal(self, i: u64) -> f32 {
        self.lanes(i) as f32 * (1.0 / 37_837.227)
    }
}

/// One tensor of a tiny checkpoint: its plain values and its stored forms.
#[derive(Clone, Copy, Debug)]
pub struct Tiny {
    values: Stream,
    blocks: Stream,
    mean: f32,
    multiplier: f32,
}

/// A quantised tensor as stored: codes and scale bytes, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// E4M3 codes, or E2M1 codes packed two to a byte (low nibble first).
    pub codes: Vec<u8>,
    /// E8M0 scale bytes.
    pub scales: Vec<u8>,
}

impl Tiny {
    /// Tensor `name` under `seed` with the recipe's mean and multiplier.
    pub fn new(name: &str, seed: u64, mean: f32, multiplier: f32) -> Self {
        let blocks = Stream::new(&format!("{name}#block"), seed);
        Self { values: Stream::new(name, seed), blocks, mean, multiplier }
    }

    fn gauss(&self, i: usize) -> f32 {
        self.values.lanes(i as u64) as f32 * self.multiplier
    }

    /// The block factor 1/2, 1 or 2.
    fn factor(&self, block: usize) -> f32 {
        [0.5, 1.0, 2.0][(self.blocks.word(block as u64) % 3) as usize]
    }

    /// Plain single-precision element `i`.
    pub fn f32(&self, i: usize) -> f32 {
        self.mean + self.gauss(i)
    }

    /// Bits of bf16 element `i`.
    pub fn bf16(&self, i: usize) -> u16 {
        bf16::to_bits(self.f32(i))
    }

    /// fp8 with one scale per 32x32 block; partial blocks at the edges.
    pub fn fp8_block32(&self, rows: usize, cols: usize) -> Stored {
        let (brows, bcols) = (rows.div_ceil(32), cols.div_ceil(32));
        let mut out = Stored { codes: vec![0; rows * cols], scales: vec![0; brows * bcols] };
        for b in 0..brows * bcols {
            let (r0, c0) = (b / bcols * 32, b % bcols * 32);
            let f = self.factor(b);
            let cells: Vec<(usize, f32)> = (r0..rows.min(r0 + 32))
                .flat_map(|r| (c0..cols.min(c0 + 32)).map(move |c| r * cols + c))
                .map(|i| (i, self.gauss(i) * f))
                .collect();
            let e = exponent(&cells, e4m3::MAX);
            for (i, v) in cells {
                out.codes[i] = e4m3::encode(v * pow2(-e));
            }
            out.scales[b] = e8m0::encode(e);
        }
        out
    }

    /// fp8 with one scale per row and 32 columns.
    pub fn fp8_row32(&self, rows: usize, cols: usize) -> Stored {
        let groups = cols.div_ceil(32);
        let mut out = Stored { codes: vec![0; rows * cols], scales: vec![0; rows * groups] };
        self.row_groups(rows, cols, e4m3::MAX, |group, i, v, e| {
            out.codes[i] = e4m3::encode(v);
            out.scales[group] = e8m0::encode(e);
        });
        out
    }

    /// Packed fp4 with one scale per row and 32 columns; `cols` is even.
    pub fn fp4_row32(&self, rows: usize, cols: usize) -> Stored {
        assert!(cols.is_multiple_of(2), "fp4 rows have even length, not {cols}");
        let groups = cols.div_ceil(32);
        let mut out = Stored { codes: vec![0; rows * cols / 2], scales: vec![0; rows * groups] };
        self.row_groups(rows, cols, e2m1::MAX, |group, i, v, e| {
            out.codes[i / 2] |= e2m1::encode(v) << (4 * (i % 2));
            out.scales[group] = e8m0::encode(e);
        });
        out
    }

    fn row_groups(&self, rows: usize, cols: usize, max: f32, mut put: impl FnMut(usize, usize, f32, i32)) {
        let groups = cols.div_ceil(32);
        for group in 0..rows * groups {
            let (r, c0) = (group / groups, group % groups * 32);
            let f = self.factor(group);
            let cells: Vec<(usize, f32)> =
                (c0..cols.min(c0 + 32)).map(|c| (r * cols + c, self.gauss(r * cols + c) * f)).collect();
            let e = exponent(&cells, max);
            for (i, v) in cells {
                put(group, i, v * pow2(-e), e);
            }
        }
    }
}

/// The smallest e >= -127 with amax <= max * 2^e, 0 for an all-zero block.
fn exponent(cells: &[(usize, f32)], max: f32) -> i32 {
    let amax = cells.iter().fold(0.0f32, |m, (_, v)| m.max(v.abs()));
    if amax == 0.0 {
        return 0;
    }
    let mut e = -127;
    // 2^e · max is exact in double precision over the whole range.
    while f64::from(amax) > f64::from(max) * 2f64.powi(e) {
        e += 1;
    }
    e
}

/// The generator `smgen/1` of the source-CUDA fixtures: E4M3 and E2M1 codes come from 256-entry quantile tables.
pub mod smgen {
    use super::{Stream, fnv1a64, mix};
    use crate::bf16;

    /// E4M3 code of 128·q(b), q the normal quantile of (b + 0.5)/256; a constant, not to be recomputed.
    const T8: &[u8; 512] =
        b"fcfaf9f9f8f8f8f7f7f6f6f6f5f5f5f4f4f4f4f3f3f3f3f3f2f2f2f2f2f2f1f1f1f1f1f1f1f0f0f0f0f0f0efefefefee\
          eeeeeeedededededececececebebebebebeaeaeaeaeaeae9e9e9e9e9e8e8e8e8e7e7e7e6e6e6e5e5e5e4e4e4e3e3e3e2\
          e2e2e1e1e1e0e0e0dfdededddcdcdbdadad9d8d8d6d5d4d3d1d0cecbc9c5bfb2323f45494b4e5051535455565858595a\
          5a5b5c5c5d5e5e5f6060606161616262626363636464646565656666666767676868686869696969696a6a6a6a6a6a6b\
          6b6b6b6b6c6c6c6c6d6d6d6d6d6e6e6e6e6f6f6f6f707070707070717171717171717272727272727373737373747474\
          74757575767676777778787879797a7c";
    /// E2M1 code of 2.2·q(b).
    const T4: &[u8; 256] =
        b"fffeeeeeeeeeeedddddddddddddddddddccccccccccccccccccccccbbbbbbbbbbbbbbbbbbaaaaaaaaaaaaaaaaaaaaa99\
          999999999999999999998888888888880000000000001111111111111111111111222222222222222222222333333333\
          3333333334444444444444444444444555555555555555555566666666666777";

    const fn nibble(c: u8) -> u8 {
        match c {
            b'0'..=b'9' => c - b'0',
            _ => c - b'a' + 10,
        }
    }

    const CODES8: [u8; 256] = {
        let mut t = [0; 256];
        let mut i = 0;
        while i < 256 {
            t[i] = nibble(T8[2 * i]) << 4 | nibble(T8[2 * i + 1]);
            i += 1;
        }
        t
    };

    const CODES4: [u8; 256] = {
        let mut t = [0; 256];
        let mut i = 0;
        while i < 256 {
            t[i] = nibble(T4[i]);
            i += 1;
        }
        t
    };

    /// One named tensor.
    #[derive(Clone, Copy, Debug)]
    pub struct Tensor {
        stream: Stream,
    }

    impl Tensor {
        /// The tensor `name` under `seed`.
        pub fn new(name: &str, seed: u64) -> Self {
            Self { stream: Stream { key: mix(fnv1a64(name.as_bytes()) ^ mix(seed)) } }
        }

        /// The words behind the elements.
        pub fn stream(self) -> Stream {
            self.stream
        }

        /// Single-precision element `i`: two roundings, product and sum.
        pub fn f32(self, i: u64, std: f64, offset: f64) -> f32 {
            let product = self.stream.lanes(i) as f32 * (std / 37837.0) as f32;
            product + offset as f32
        }

        /// Bits of bf16 element `i`.
        pub fn bf16(self, i: u64, std: f64, offset: f64) -> u16 {
            bf16::to_bits(self.f32(i, std, offset))
        }

        fn byte(self, i: u64) -> u8 {
            (self.stream.word(i >> 3) >> (8 * (i & 7))) as u8
        }

        /// E4M3 code of element `i`.
        pub fn e4m3(self, i: u64) -> u8 {
            CODES8[self.byte(i) as usize]
        }

        /// E2M1 code of element `i`.
        pub fn e2m1(self, i: u64) -> u8 {
            CODES4[self.byte(i) as usize]
        }

        /// Elements 2`j` and 2`j`+1 as one packed E2M1 byte.
        pub fn e2m1_packed(self, j: u64) -> u8 {
            self.e2m1(2 * j) | self.e2m1(2 * j + 1) << 4
        }

        /// E4M3 codes of elements 8`w` to 8`w`+7.
        pub fn e4m3_word(self, w: u64) -> [u8; 8] {
            self.stream.word(w).to_le_bytes().map(|b| CODES8[b as usize])
        }

        /// Elements 8`w` to 8`w`+7 as four packed E2M1 bytes.
        pub fn e2m1_word(self, w: u64) -> [u8; 4] {
            let b = self.stream.word(w).to_le_bytes().map(|b| CODES4[b as usize]);
            [b[0] | b[1] << 4, b[2] | b[3] << 4, b[4] | b[5] << 4, b[6] | b[7] << 4]
        }

        /// E8M0 scale byte `i`: `e0` in half of the cases, else one more or one less.
        pub fn e8m0(self, i: u64, e0: u8) -> u8 {
            match self.stream.word(i) >> 62 {
                3 => e0 + 1,
                0 => e0 - 1,
                _ => e0,
            }
        }

        /// Integer element `i`, below `n`.
        pub fn int(self, i: u64, n: u64) -> u64 {
            (self.stream.word(i) >> 32) % n
        }
    }
}
