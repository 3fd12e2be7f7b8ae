//! AVX-512 with fp16 arithmetic: 32 windows per VPMULTISHIFTQB, the codebook's product in two halves, one fp16 operation for
//! its rounding, VCVTPH2PS from memory.

use super::Source;
use super::avx2::keep_in_memory;
use crate::rate::TILE;
use crate::{Codebook as Code, Rate};
use std::arch::x86_64::*;

/// Groups of 32 windows in a tile; each gives two vectors of floats.
const STEPS: usize = 8;

/// Any rate: 32 bytes spread by a permutation. 1, 2, 4 and 8 stand for rates whose windows end in every other word, read as
/// that many pairs of words.
const SPREAD: u8 = 0;
/// The same from 64 bytes.
const WIDE: u8 = 16;

/// What a decoder reads beside the trellis.
#[repr(C, align(64))]
pub(super) struct Tables {
    /// VPMULTISHIFTQB control of each step.
    control: [[u8; 64]; STEPS],
    /// Permutations: byte of each lane, counted from `base`.
    index: [[u8; 64]; STEPS],
    /// First word read for each step; -1: the last of the ring.
    base: [i32; STEPS],
    /// Ring position of each 16-bit lane.
    position: [[u8; 32]; STEPS],
}

fn scheme(rate: Rate) -> u8 {
    match rate.half_bits() {
        bits @ (2 | 4 | 8 | 16) => bits as u8 / 2,
        bits if bits <= 12 => SPREAD,
        _ => WIDE,
    }
}

/// Which four windows of a run of 4, 8, 16 or 32 the n-th 64-bit lane on them takes: first and third of four and so on come
/// before the others, so that both vectors of a step belong to the same rows.
fn quarter(run: usize, n: usize) -> usize {
    let quarters = run / 4;
    if quarters < 2 { n } else { n % (quarters / 2) * 2 + n / (quarters / 2) }
}

impl Tables {
    pub(super) fn new(rate: Rate) -> Tables {
        let mut t = Tables {
            control: [[0; 64]; STEPS],
            index: [[0; 64]; STEPS],
            base: [0; STEPS],
            position: [[0; 32]; STEPS],
        };
        let begin = |i: usize| rate.end(i) as i32 - 16;
        for step in 0..STEPS {
            match scheme(rate) {
                kind @ (SPREAD | WIDE) => {
                    let bytes = if kind == SPREAD { 32 } else { 64 };
                    let first = begin(32 * step).div_euclid(32);
                    t.base[step] = first.min((rate.tile_bytes() as i32 - bytes) / 4);
                    for q in 0..8 {
                        let i = 32 * step + 4 * quarter(32, q);
                        // Eight stream bytes, the first in the high byte; what lies beyond the windows does not matter.
                        let byte = begin(i).div_euclid(8) - 4 * t.base[step];
                        for k in 0..8 {
                            let from = (byte + 7 - k as i32).min(bytes - 1);
                            t.index[step][8 * q + k] = (from / 4 * 4 + 3 - from % 4) as u8;
                        }
                        for k in 0..4 {
                            t.position[step][4 * q + k] = (i + k) as u8;
                            let at = begin(i + k) - 8 * byte - 32 * t.base[step];
                            let inside = byte >= 0 && byte + (at + 23) / 8 <= bytes;
                            assert!((0..=48).contains(&at) && inside, "{rate} {step} {q}");
                            t.control[step][8 * q + 2 * k] = (48 - at) as u8;
                            t.control[step][8 * q + 2 * k + 1] = (56 - at) as u8;
                        }
                    }
                }
                pairs => {
                    let pairs = usize::from(pairs);
                    // Step z of group g takes the windows that end in words z, z + 2, .. of the group.
                    let (first, run) = (2 * pairs * (step / 2) + step % 2, 32 / pairs);
                    t.base[step] = first as i32 - 1;
                    for q in 0..8 {
                        let word = first + 2 * (q % pairs);
                        for k in 0..4 {
                            let i = word * run + 4 * quarter(run, q / pairs) + k;
                            t.position[step][4 * q + k] = i as u8;
                            let end = rate.end(i) as i32 - 32 * (word as i32 - 1);
                            assert!((33..=64).contains(&end), "{rate} {step} {q}");
                            // The pair's first word is the low half: seen as a ring, the stream begins at bit 31.
                            t.control[step][8 * q + 2 * k] = ((32 - end) & 63) as u8;
                            t.control[step][8 * q + 2 * k + 1] = ((40 - end) & 63) as u8;
                        }
                    }
                }
            }
        }
        t
    }

    /// In the order in which the decoder makes vectors of floats.
    pub(super) fn positions(&self) -> Vec<usize> {
        self.position.iter().flatten().map(|p| usize::from(*p)).collect()
    }
}

/// Input vectors of a scheme.
const fn slots(scheme: u8) -> usize {
    if matches!(scheme, 2 | 4) { 2 } else { 1 }
}

/// Where the decoder's n-th vector goes: with two input vectors those take turns.
pub(super) const fn place(scheme: u8, n: usize) -> usize {
    if slots(scheme) == 2 { n & !3 | (n & 1) << 1 | n >> 1 & 1 } else { n }
}

/// As [`place`] for all vectors of a rate.
pub(super) fn places(rate: Rate) -> Vec<u8> {
    (0..2 * STEPS).map(|n| place(scheme(rate), n) as u8).collect()
}

const MCG: u8 = 0;
const MUL1: u8 = 1;
const THREE_INST: u8 = 2;

/// Decodes into floats.
pub(super) type Decode = unsafe fn(&Tables, &Source, &mut [f32]);
/// Decodes and multiplies one row: inputs, sums.
pub(super) type Fused = unsafe fn(&Tables, &Source, &[f32], &mut [f32]);

/// The functions of a rate and codebook.
pub(super) fn functions(rate: Rate, code: Code) -> (Decode, Fused) {
    macro_rules! pick {
        ($($scheme:tt),*) => {
            match (scheme(rate), code) {
                $(($scheme, Code::Mcg) => (decode::<$scheme, MCG>, fused::<$scheme, MCG>),
                ($scheme, Code::Mul1) => (decode::<$scheme, MUL1>, fused::<$scheme, MUL1>),
                ($scheme, Code::ThreeInst) => (decode::<$scheme, THREE_INST>, fused::<$scheme, THREE_INST>),)*
                (other, _) => unreachable!("scheme {other}"),
            }
        };
    }
    pick!(1, 2, 4, 8, SPREAD, WIDE)
}

/// The weights of a tile as fp16.
#[repr(C, align(64))]
struct Halves([u16; TILE]);

/// Expands `$do!(0)` to `$do!(7)`.
macro_rules! each_step {
    ($do:ident) => {
        $do!(0);
        $do!(1);
        $do!(2);
        $do!(3);
        $do!(4);
        $do!(5);
        $do!(6);
        $do!(7);
    };
}

/// Decodes `source.count` tiles into `out`, 256 floats each.
///
/// # Safety
/// The machine must have the features; `source` must describe tiles in memory; `tables` must be of its rate.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512fp16,avx2,fma")]
unsafe fn decode<const SCHEME: u8, const CODE: u8>(tables: &Tables, source: &Source, out: &mut [f32]) {
    assert!(out.len() >= source.count * TILE);
    let words = source.tile_bytes / 4;
    let code = Constants::<CODE>::new();
    let mut halves = Halves([0; TILE]);
    let halves = halves.0.as_mut_ptr();
    for i in 0..source.count {
        source.prefetch(i);
        // SAFETY: tile i is in memory, 256 floats of `out` too.
        unsafe {
            let tile = source.first.add(i * source.stride);
            let to = out.as_mut_ptr().add(i * TILE);
            macro_rules! step {
                ($s:literal) => {
                    let value = code.value(states::<SCHEME>(tables, tile, words, $s));
                    _mm512_store_si512(halves.add(32 * $s).cast(), value);
                };
            }
            each_step!(step);
            keep_in_memory(halves);
            macro_rules! widen {
                ($s:literal) => {
                    for half in 0..2 {
                        let at = place(SCHEME, 2 * $s + half);
                        _mm512_storeu_ps(to.add(16 * at), floats(halves, 2 * $s + half));
                    }
                };
            }
            each_step!(widen);
        }
    }
}

/// Decodes `source.count` tiles and adds their products with one row's inputs `x` to `sums`, in the order of `apply`.
///
/// # Safety
/// As [`decode`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512fp16,avx2,fma")]
unsafe fn fused<const SCHEME: u8, const CODE: u8>(
    tables: &Tables,
    source: &Source,
    x: &[f32],
    sums: &mut [f32],
) {
    let slots = slots(SCHEME);
    assert!(source.count > 0 && x.len() >= source.count * slots * 16 && sums.len() == TILE);
    let words = source.tile_bytes / 4;
    let code = Constants::<CODE>::new();
    let mut halves = [const { Halves([0; TILE]) }; 2];
    let halves: [*mut u16; 2] = halves.each_mut().map(|h| h.0.as_mut_ptr());
    // SAFETY: tile i is in memory, as are the inputs and sums (checked above).
    unsafe {
        let mut sum = [_mm512_setzero_ps(); 16];
        for (sum, from) in sum.iter_mut().zip(sums.as_chunks::<16>().0) {
            *sum = _mm512_loadu_ps(from.as_ptr());
        }
        macro_rules! make {
            ($s:literal, $tile:expr, $to:expr) => {
                let value = code.value(states::<SCHEME>(tables, $tile, words, $s));
                _mm512_store_si512($to.add(32 * $s).cast(), value);
            };
        }
        macro_rules! add {
            ($s:literal, $x:expr, $from:expr) => {
                let (a, b) = const { (place(SCHEME, 2 * $s), place(SCHEME, 2 * $s + 1)) };
                let (xa, xb) =
                    (_mm512_loadu_ps($x.add(a % slots * 16)), _mm512_loadu_ps($x.add(b % slots * 16)));
                sum[a] = _mm512_fmadd_ps(floats($from, 2 * $s), xa, sum[a]);
                sum[b] = _mm512_fmadd_ps(floats($from, 2 * $s + 1), xb, sum[b]);
            };
        }
        // A tile is made while the one before is multiplied: operations that do not wait for each other side by side.
        source.prefetch(0);
        macro_rules! first {
            ($s:literal) => {
                make!($s, source.first, halves[0]);
            };
        }
        each_step!(first);
        for i in 1..source.count {
            source.prefetch(i);
            let tile = source.first.add(i * source.stride);
            let x = x.as_ptr().add((i - 1) * slots * 16);
            let (from, to) = (halves[(i - 1) % 2], halves[i % 2]);
            keep_in_memory(from);
            macro_rules! step {
                ($s:literal) => {
                    make!($s, tile, to);
                    add!($s, x, from);
                };
            }
            each_step!(step);
        }
        let x = x.as_ptr().add((source.count - 1) * slots * 16);
        let from = halves[(source.count - 1) % 2];
        keep_in_memory(from);
        macro_rules! last {
            ($s:literal) => {
                add!($s, x, from);
            };
        }
        each_step!(last);
        for (sum, to) in sum.iter().zip(sums.as_chunks_mut::<16>().0) {
            _mm512_storeu_ps(to.as_mut_ptr(), *sum);
        }
    }
}

/// Vector `n` of a tile's weights.
///
/// # Safety
/// `halves` must have 256 numbers.
#[target_feature(enable = "avx512f,avx2")]
#[inline]
unsafe fn floats(halves: *const u16, n: usize) -> __m512 {
    let out;
    // The intrinsic takes a register, which costs a shuffle more.
    // SAFETY: 16 numbers for each of 16 vectors.
    unsafe {
        std::arch::asm!(
            "vcvtph2ps {out}, ymmword ptr [{from}]",
            out = lateout(zmm_reg) out, from = in(reg) halves.add(16 * n),
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    out
}

/// The 32 states of step `s` of a tile.
///
/// # Safety
/// `tile` must point to its `words` words.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2")]
#[inline]
unsafe fn states<const SCHEME: u8>(tables: &Tables, tile: *const u8, words: usize, s: usize) -> __m512i {
    // SAFETY: a step's loads stay inside the tile (see `Tables::new`); tables are aligned.
    unsafe {
        let table = |t: &[[u8; 64]; STEPS], s: usize| _mm512_load_si512(t[s].as_ptr().cast());
        if SCHEME == SPREAD || SCHEME == WIDE {
            let wrapped = s == 0 && tables.base[0] < 0;
            let from = tile.offset(4 * tables.base[s] as isize);
            let data = match (SCHEME == WIDE, wrapped) {
                (false, true) => _mm512_castsi256_si512(last_first_256(tile, words)),
                (false, false) => _mm512_castsi256_si512(_mm256_loadu_si256(from.cast())),
                (true, true) => last_first_512(tile, words),
                (true, false) => _mm512_loadu_si512(from.cast()),
            };
            let data = _mm512_permutexvar_epi8(table(&tables.index, s), data);
            return _mm512_multishift_epi64_epi8(table(&tables.control, s), data);
        }
        let pairs = SCHEME as usize;
        let from = tile.offset(4 * ((2 * pairs * (s / 2) + s % 2) as isize - 1));
        let data = match (SCHEME, s) {
            (1, 0) => {
                let word = |w: usize| tile.add(4 * w).cast::<u32>().read_unaligned();
                _mm512_set1_epi64((u64::from(word(0)) << 32 | u64::from(word(words - 1))) as i64)
            }
            (1, _) => _mm512_set1_epi64(from.cast::<i64>().read_unaligned()),
            (2, 0) => {
                let last = _mm_loadu_si128(tile.add(4 * words - 16).cast());
                _mm512_broadcast_i32x4(_mm_alignr_epi8::<12>(_mm_loadu_si128(tile.cast()), last))
            }
            (2, _) => _mm512_broadcast_i32x4(_mm_loadu_si128(from.cast())),
            (4, 0) => _mm512_broadcast_i64x4(last_first_256(tile, words)),
            (4, _) => _mm512_broadcast_i64x4(_mm256_loadu_si256(from.cast())),
            (_, 0) => last_first_512(tile, words),
            _ => _mm512_loadu_si512(from.cast()),
        };
        _mm512_multishift_epi64_epi8(table(&tables.control, 0), data)
    }
}

/// The last word of a tile, then its first seven.
#[target_feature(enable = "avx512f,avx512vl,avx2")]
#[inline]
unsafe fn last_first_256(tile: *const u8, words: usize) -> __m256i {
    // SAFETY: a tile has at least 8 words.
    unsafe {
        let last = _mm256_loadu_si256(tile.add(4 * words - 32).cast());
        _mm256_alignr_epi32::<7>(_mm256_loadu_si256(tile.cast()), last)
    }
}

/// The last word of a tile, then its first fifteen.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn last_first_512(tile: *const u8, words: usize) -> __m512i {
    // SAFETY: tiles of the rates that ask for it have at least 16 words.
    unsafe {
        let last = _mm512_loadu_si512(tile.add(4 * words - 64).cast());
        _mm512_alignr_epi32::<15>(_mm512_loadu_si512(tile.cast()), last)
    }
}

/// Constants of a codebook, kept in registers.
struct Constants<const CODE: u8> {
    /// Halves of the multiplier.
    low: __m512i,
    high: __m512i,
    /// 3INST: halves of the increment.
    add: [__m512i; 2],
    /// What stays of a product's half, and what is flipped; MUL1: byte twos.
    mask: __m512i,
    bits: __m512i,
    /// MUL1: slope times 2^23 and offset, both exact.
    factor: __m512i,
    addend: __m512i,
}

impl<const CODE: u8> Constants<CODE> {
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    fn new() -> Self {
        use crate::Codebook::{Mcg, Mul1, ThreeInst};
        let multiplier = match CODE {
            MCG => Mcg.multiplier(),
            MUL1 => Mul1.multiplier(),
            _ => ThreeInst.multiplier(),
        };
        let all = |v: u32| _mm512_set1_epi16(v as i16);
        let halves = |v: u32| [all(v), all(v >> 16)];
        let [low, high] = halves(multiplier);
        Constants {
            low,
            high,
            add: halves(ThreeInst.increment()),
            mask: all(if CODE == MUL1 { 0x0202 } else { 0x8FFF }),
            bits: all(0x3B60),
            factor: all(half::f16::from_f32_const(8_388_608.0 * crate::codebook::MUL1_SLOPE)
                .to_bits()
                .into()),
            addend: all(half::f16::from_f32_const(crate::codebook::MUL1_OFFSET).to_bits().into()),
        }
    }

    /// Values of 32 states, fp16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512fp16,avx2,fma")]
    #[inline]
    fn value(&self, state: __m512i) -> __m512i {
        let mut low = _mm512_mullo_epi16(state, self.low);
        let mut high =
            _mm512_add_epi16(_mm512_mulhi_epu16(state, self.low), _mm512_mullo_epi16(state, self.high));
        if CODE == THREE_INST {
            // A 32-bit addition in halves; it carries where the low sum wraps.
            low = _mm512_add_epi16(low, self.add[0]);
            high = _mm512_add_epi16(high, self.add[1]);
            let carry = _mm512_cmplt_epu16_mask(low, self.add[0]);
            high = _mm512_mask_add_epi16(high, carry, high, _mm512_set1_epi16(1));
        }
        let ph = |v| _mm512_castsi512_ph(v);
        let value = if CODE == MUL1 {
            // Twice the byte sum is below 2048: as the bits of an fp16 number it stands for itself times 2^-24.
            let pairs = |half| _mm512_maddubs_epi16(half, self.mask);
            let sum = _mm512_add_epi16(pairs(low), pairs(high));
            _mm512_fmadd_ph(ph(sum), ph(self.factor), ph(self.addend))
        } else {
            let half = |v| ph(_mm512_ternarylogic_epi32::<0x6A>(v, self.mask, self.bits));
            _mm512_add_ph(half(low), half(high))
        };
        _mm512_castph_si512(value)
    }
}
