//! AVX-512: sixteen windows of the bit stream per VPMULTISHIFTQB, then the codebook in integer arithmetic.

use super::Source;
use crate::rate::TILE;
use crate::{Codebook as Code, Rate};
use std::arch::x86_64::*;

/// Vectors of a tile.
const VECTORS: usize = 16;

/// How the windows of a vector come into reach of its eight 64-bit lanes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scheme {
    /// 2 bits: one pair of words for all.
    Pair,
    /// 4 bits: two pairs, words apart.
    Two,
    /// 8 bits: four pairs.
    Four,
    /// 3 bits: 64 positions in four vectors, each from one or two pairs.
    Three,
    /// Any rate: eight words, spread by a permutation.
    Spread,
}

/// What a decoder reads beside the trellis.
#[repr(C, align(64))]
pub(super) struct Tables {
    /// VPMULTISHIFTQB control of each vector.
    control: [[u8; 64]; VECTORS],
    /// `Spread`: word of each 32-bit lane, counted from `base`.
    index: [[u32; 16]; VECTORS],
    /// First word read for each vector; negative: the end of the ring.
    base: [i32; VECTORS],
    /// Ring position of each lane.
    position: [[u8; 16]; VECTORS],
}

impl Tables {
    pub(super) fn scheme(rate: Rate) -> Scheme {
        match rate.half_bits() {
            4 => Scheme::Pair,
            6 => Scheme::Three,
            8 => Scheme::Two,
            16 => Scheme::Four,
            _ => Scheme::Spread,
        }
    }

    pub(super) fn new(rate: Rate) -> Tables {
        let mut t = Tables {
            control: [[0; 64]; VECTORS],
            index: [[0; 16]; VECTORS],
            base: [0; VECTORS],
            position: [[0; 16]; VECTORS],
        };
        let words = rate.words() as i32;
        for v in 0..VECTORS {
            // Word of the pair that each 64-bit lane sees, counted from the start of the tile.
            let mut pair = [0i32; 8];
            match Self::scheme(rate) {
                Scheme::Pair => {
                    t.position[v] = std::array::from_fn(|l| (16 * v + l) as u8);
                    t.base[v] = first_word(rate, 16 * v);
                    pair = [t.base[v]; 8];
                }
                Scheme::Two | Scheme::Four => {
                    // Vector z of group g takes the windows that end in words z, z + 2, .. of the group.
                    let (g, z) = (v / 2, v % 2);
                    let pairs = rate.half_bits() / 4;
                    let per_word = 64 / rate.half_bits();
                    t.base[v] = (2 * pairs * g + z) as i32 - 1;
                    for q in 0..8 {
                        let p = q % pairs;
                        pair[q] = t.base[v] + 2 * p as i32;
                        for k in 0..2 {
                            let within = (z + 2 * p) * per_word + 2 * (q / pairs) + k;
                            t.position[v][2 * q + k] = (32 * g + within) as u8;
                        }
                    }
                }
                Scheme::Three => {
                    let (g, z) = (v / 4, v % 4);
                    let groups = three_bit_groups();
                    let (even, odd) = [(0, 2), (1, 4), (3, 5), (6, 7)][z];
                    t.base[v] = 6 * g as i32 + THREE_BIT_PAIRS[even];
                    for q in 0..8 {
                        let group = if q % 2 == 0 { even } else { odd };
                        pair[q] = 6 * g as i32 + THREE_BIT_PAIRS[group];
                        for k in 0..2 {
                            t.position[v][2 * q + k] = (64 * g + groups[group][q / 2 * 2 + k]) as u8;
                        }
                    }
                }
                Scheme::Spread => {
                    t.position[v] = std::array::from_fn(|l| (16 * v + l) as u8);
                    // Never past the tile; before it only in the first vector, whose words are rotated in.
                    t.base[v] = first_word(rate, 16 * v).min(words - 8);
                    for q in 0..8 {
                        pair[q] = first_word(rate, 16 * v + 2 * q);
                        for k in 0..2 {
                            t.index[v][2 * q + k] = (pair[q] + k as i32 - t.base[v]) as u32;
                        }
                    }
                }
            }
            for l in 0..16 {
                let end = rate.end(usize::from(t.position[v][l])) as i32 - 32 * pair[l / 2];
                assert!((16..=64).contains(&end), "window {l} of vector {v}");
                // The pair's first word is the low half: seen as a ring of 64 bits, the stream begins at bit 31.
                t.control[v][4 * l] = ((32 - end) & 63) as u8;
                t.control[v][4 * l + 1] = ((40 - end) & 63) as u8;
            }
        }
        t
    }

    pub(super) fn positions(&self) -> Vec<usize> {
        self.position.iter().flatten().map(|p| usize::from(*p)).collect()
    }
}

/// Word in which the window of position `i` begins; -1 for the last of the ring.
fn first_word(rate: Rate, i: usize) -> i32 {
    (rate.end(i) as i32 - 16).div_euclid(32)
}

/// Words of the pairs from which groups of eight windows are taken, at 3 bits and 64 positions (six words).
const THREE_BIT_PAIRS: [i32; 8] = [-1, 0, 1, 1, 2, 3, 4, 4];

/// The eight positions of each group: the first that lie within its pair and are not taken.
fn three_bit_groups() -> [[usize; 8]; 8] {
    let mut taken = [false; 64];
    THREE_BIT_PAIRS.map(|pair| {
        let mut group = [0; 8];
        let mut free =
            (0..64usize).filter(|i| !taken[*i] && (16..=64).contains(&(3 * (*i as i32 + 1) - 32 * pair)));
        group.iter_mut().for_each(|g| *g = free.next().unwrap_or(usize::MAX));
        group.iter().for_each(|g| taken[*g] = true);
        group
    })
}

const PAIR: u8 = 0;
const TWO: u8 = 1;
const FOUR: u8 = 2;
const THREE: u8 = 3;
const SPREAD: u8 = 4;
const MCG: u8 = 0;
const MUL1: u8 = 1;
const THREE_INST: u8 = 2;

/// Decodes into floats.
pub(super) type Decode = unsafe fn(&Tables, &Source, &mut [f32]);
/// Decodes and multiplies one row: inputs, sums.
pub(super) type Fused = unsafe fn(&Tables, &Source, &[f32], &mut [f32]);

/// The functions of a rate and codebook. Their values are multiples: see [`scale`].
pub(super) fn functions(rate: Rate, code: Code) -> (Decode, Fused) {
    macro_rules! pick {
        ($($s:ident => $c:ident),*) => {
            match (Tables::scheme(rate), code) {
                $((Scheme::$s, Code::Mcg) => (decode::<$c, MCG>, fused::<$c, MCG>),
                (Scheme::$s, Code::Mul1) => (decode::<$c, MUL1>, fused::<$c, MUL1>),
                (Scheme::$s, Code::ThreeInst) => (decode::<$c, THREE_INST>, fused::<$c, THREE_INST>),)*
            }
        };
    }
    pick!(Pair => PAIR, Two => TWO, Four => FOUR, Three => THREE, Spread => SPREAD)
}

/// What decoded values must be multiplied by.
pub(super) fn scale(code: Code) -> f32 {
    match code {
        Code::Mul1 => 1.0,
        _ => 1.0 / (1u32 << 21) as f32,
    }
}

/// Vectors of a scheme that differ in more than their place: the rest repeats, word for word.
const fn period(scheme: u8) -> usize {
    match scheme {
        PAIR => 1,
        TWO | FOUR => 2,
        THREE => 4,
        _ => VECTORS,
    }
}

/// The sixteen states of vector `v` of a tile.
///
/// # Safety
/// `tile` must point to `words` words that end a trellis or have more behind them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma")]
#[inline]
unsafe fn states<const SCHEME: u8>(tables: &Tables, tile: *const u8, words: usize, v: usize) -> __m512i {
    // SAFETY: a vector's loads stay inside the tile (see `Tables::new`); tables are aligned.
    unsafe {
        let data = match SCHEME {
            PAIR if v == 0 => {
                let word = |w: usize| tile.add(4 * w).cast::<u32>().read_unaligned();
                _mm512_set1_epi64((u64::from(word(0)) << 32 | u64::from(word(words - 1))) as i64)
            }
            PAIR => _mm512_set1_epi64(tile.add(4 * (v - 1)).cast::<i64>().read_unaligned()),
            TWO | THREE if v == 0 => _mm512_broadcast_i32x4(last_first_128(tile, words)),
            TWO => broadcast128(tile.add(4 * (4 * (v / 2) + v % 2 - 1))),
            FOUR if v == 0 => _mm512_broadcast_i64x4(last_first_256(tile, words)),
            FOUR => _mm512_broadcast_i64x4(load256(tile.add(4 * (8 * (v / 2) + v % 2 - 1)))),
            THREE if v % 4 == 3 => {
                _mm512_set1_epi64(tile.add(4 * (6 * (v / 4) + 4)).cast::<i64>().read_unaligned())
            }
            THREE => broadcast128(tile.add(4 * (6 * (v / 4) + v % 4 - 1))),
            _ => {
                let eight = if v == 0 && tables.base[0] < 0 {
                    last_first_256(tile, words)
                } else {
                    load256(tile.offset(4 * tables.base[v] as isize))
                };
                let index = _mm512_load_si512(tables.index[v].as_ptr().cast());
                _mm512_permutexvar_epi32(index, _mm512_castsi256_si512(eight))
            }
        };
        let control = _mm512_load_si512(tables.control[v % period(SCHEME)].as_ptr().cast());
        low_halves(control, data)
    }
}

/// VPMULTISHIFTQB into bytes 0 and 1 of each 32-bit lane, zero elsewhere. The compiler would turn the masked intrinsic into
/// an AND.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn low_halves(control: __m512i, data: __m512i) -> __m512i {
    let mask: __mmask64 = 0x3333_3333_3333_3333;
    let out;
    // SAFETY: registers only.
    unsafe {
        std::arch::asm!(
            "vpmultishiftqb {out}{{{mask}}}{{z}}, {control}, {data}",
            out = lateout(zmm_reg) out, mask = in(kreg) mask, control = in(zmm_reg) control, data = in(zmm_reg) data,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    out
}

/// VPERMB into the odd bytes, zero elsewhere; assembly for the same reason.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn odd_bytes(index: __m512i, table: __m512i) -> __m512i {
    let mask: __mmask64 = 0xAAAA_AAAA_AAAA_AAAA;
    let out;
    // SAFETY: registers only.
    unsafe {
        std::arch::asm!(
            "vpermb {out}{{{mask}}}{{z}}, {index}, {table}",
            out = lateout(zmm_reg) out, mask = in(kreg) mask, index = in(zmm_reg) index, table = in(zmm_reg) table,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    out
}

/// Expands `$do!(0)` to `$do!(15)`.
macro_rules! each_vector {
    ($do:ident) => {
        $do!(0);
        $do!(1);
        $do!(2);
        $do!(3);
        $do!(4);
        $do!(5);
        $do!(6);
        $do!(7);
        $do!(8);
        $do!(9);
        $do!(10);
        $do!(11);
        $do!(12);
        $do!(13);
        $do!(14);
        $do!(15);
    };
}

/// Decodes `source.count` tiles into `out`, 256 floats each.
///
/// # Safety
/// The machine must have the features; `source` must describe tiles in memory; `tables` must be of its rate.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma")]
unsafe fn decode<const SCHEME: u8, const CODE: u8>(tables: &Tables, source: &Source, out: &mut [f32]) {
    assert!(out.len() >= source.count * TILE);
    let words = source.tile_bytes / 4;
    let code = Constants::<CODE>::new();
    for i in 0..source.count {
        source.prefetch(i);
        // SAFETY: tile i is in memory, 256 floats of `out` too.
        unsafe {
            let tile = source.first.add(i * source.stride);
            let to = out.as_mut_ptr().add(i * TILE);
            macro_rules! vector {
                ($v:literal) => {
                    _mm512_storeu_ps(to.add(16 * $v), code.value(states::<SCHEME>(tables, tile, words, $v)))
                };
            }
            each_vector!(vector);
        }
    }
}

/// Input vectors of a scheme; vector v is multiplied with input vector v modulo this.
const fn slots(scheme: u8) -> usize {
    match scheme {
        THREE => 4,
        FOUR => 1,
        _ => 2,
    }
}

/// Decodes `source.count` tiles and adds their products with one row's inputs `x` to `sums`, in the order of `apply`.
///
/// # Safety
/// As [`decode`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma")]
unsafe fn fused<const SCHEME: u8, const CODE: u8>(
    tables: &Tables,
    source: &Source,
    x: &[f32],
    sums: &mut [f32],
) {
    let slots = slots(SCHEME);
    assert!(x.len() >= source.count * slots * 16 && sums.len() == TILE);
    let words = source.tile_bytes / 4;
    let code = Constants::<CODE>::new();
    // SAFETY: tile i is in memory, as are the inputs and sums (checked above).
    unsafe {
        let mut sum = [_mm512_setzero_ps(); 16];
        for (sum, from) in sum.iter_mut().zip(sums.as_chunks::<16>().0) {
            *sum = _mm512_loadu_ps(from.as_ptr());
        }
        for i in 0..source.count {
            source.prefetch(i);
            let tile = source.first.add(i * source.stride);
            let x = x.as_ptr().add(i * slots * 16);
            macro_rules! vector {
                ($v:literal) => {
                    let value = code.value(states::<SCHEME>(tables, tile, words, $v));
                    let x = _mm512_loadu_ps(x.add($v % slots * 16));
                    sum[$v] = _mm512_fmadd_ps(value, x, sum[$v]);
                };
            }
            each_vector!(vector);
        }
        for (sum, to) in sum.iter().zip(sums.as_chunks_mut::<16>().0) {
            _mm512_storeu_ps(to.as_mut_ptr(), *sum);
        }
    }
}

#[target_feature(enable = "avx512f,avx2")]
#[inline]
unsafe fn broadcast128(p: *const u8) -> __m512i {
    // SAFETY: the caller's 16 bytes.
    unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast())) }
}

#[target_feature(enable = "avx512f,avx2")]
#[inline]
unsafe fn load256(p: *const u8) -> __m256i {
    // SAFETY: the caller's 32 bytes.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

/// The last word of a tile, then its first three.
#[target_feature(enable = "avx512f,avx2")]
#[inline]
unsafe fn last_first_128(tile: *const u8, words: usize) -> __m128i {
    // SAFETY: a tile has at least 8 words.
    unsafe {
        _mm_alignr_epi8::<12>(_mm_loadu_si128(tile.cast()), _mm_loadu_si128(tile.add(4 * words - 16).cast()))
    }
}

/// The last word of a tile, then its first seven.
#[target_feature(enable = "avx512f,avx512vl,avx2")]
#[inline]
unsafe fn last_first_256(tile: *const u8, words: usize) -> __m256i {
    // SAFETY: a tile has at least 8 words.
    unsafe { _mm256_alignr_epi32::<7>(load256(tile), load256(tile.add(4 * words - 32))) }
}

/// Constants of a codebook, kept in registers.
struct Constants<const CODE: u8> {
    multiplier: __m512i,
    /// 3INST's increment; MUL1: 2^23 as f32 bits, to which byte sums are added.
    seed: __m512i,
    /// Mantissa bits of the halves; MUL1: byte ones.
    mask: __m512i,
    /// Constant bits of the halves.
    bits: __m512i,
    /// +-2^exponent of a half by its top six bits.
    power: __m512i,
    slope: __m512,
    offset: __m512,
    split: __m512,
}

impl<const CODE: u8> Constants<CODE> {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma")]
    #[inline]
    fn new() -> Self {
        use crate::Codebook::{Mcg, Mul1, ThreeInst};
        let multiplier = match CODE {
            MCG => Mcg.multiplier(),
            MUL1 => Mul1.multiplier(),
            _ => ThreeInst.multiplier(),
        };
        // The exponent field of a half is 12 + (x11 ^ 1, x10): as a factor 2^((i & 3) ^ 2), negative by bit 15.
        let power: [i8; 64] = std::array::from_fn(|i| {
            let magnitude = 1i8 << ((i & 3) ^ 2);
            if i & 32 != 0 { -magnitude } else { magnitude }
        });
        let ones = if CODE == MUL1 { _mm512_set1_epi8(1) } else { _mm512_set1_epi16(0x3FF) };
        let seed = if CODE == MUL1 { 0x4B00_0000 } else { ThreeInst.increment() };
        Constants {
            multiplier: _mm512_set1_epi32(multiplier as i32),
            seed: _mm512_set1_epi32(seed as i32),
            mask: ones,
            bits: _mm512_set1_epi16(0x760),
            // SAFETY: 64 bytes.
            power: unsafe { _mm512_loadu_si512(power.as_ptr().cast()) },
            slope: _mm512_set1_ps(crate::codebook::MUL1_SLOPE),
            offset: _mm512_set1_ps(crate::codebook::MUL1_OFFSET - 8_388_608.0 * crate::codebook::MUL1_SLOPE),
            split: _mm512_set1_ps(8192.0),
        }
    }

    /// Values of sixteen states, times 2^21 except for MUL1.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma")]
    #[inline]
    fn value(&self, state: __m512i) -> __m512 {
        let x = _mm512_mullo_epi32(state, self.multiplier);
        let sum = if CODE == MUL1 {
            // 2^23 + byte sum as a float; slope and offset make it the exact value.
            let sum = _mm512_dpbusd_epi32(self.seed, x, self.mask);
            _mm512_fmadd_ps(_mm512_castsi512_ps(sum), self.slope, self.offset)
        } else {
            let x = if CODE == THREE_INST { _mm512_add_epi32(x, self.seed) } else { x };
            // Each half is +-(1024 + mantissa) 2^e: two products of integers, added exactly.
            let mantissa = _mm512_ternarylogic_epi32::<0x6A>(x, self.mask, self.bits);
            let factor = odd_bytes(_mm512_srli_epi16::<2>(x), self.power);
            _mm512_cvtepi32_ps(_mm512_madd_epi16(mantissa, factor))
        };
        // Veltkamp's split keeps 11 bits, rounded to nearest even: fp16, as no value of a codebook is subnormal there.
        let high = _mm512_fmadd_ps(sum, self.split, sum);
        _mm512_fnmadd_ps(sum, self.split, high)
    }
}
