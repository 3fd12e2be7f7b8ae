//! AVX2: sixteen windows in 16-bit lanes, the codebook's product in two halves, VCVTPH2PS for its fp16 numbers.

use super::Source;
use super::layout::Layout;
use crate::rate::TILE;
use crate::{Codebook as Code, Rate};
use std::arch::x86_64::*;

/// Groups of sixteen windows in a tile.
const STEPS: usize = 16;
/// Tiles, one below the other, that share a pass over the sums and the tables of one row.
const ABREAST: usize = 2;

/// What a decoder reads beside the trellis.
#[repr(C, align(32))]
pub(super) struct Tables {
    /// Byte shuffles that bring windows into even and into odd 16-bit lanes (`Spread`), or into all (`Phases`: even).
    even: [[u8; 32]; STEPS],
    odd: [[u8; 32]; STEPS],
    /// Bits by which the even lanes' fields move right and the odd lanes' left.
    right: [[u32; 8]; STEPS],
    left: [[u32; 8]; STEPS],
    /// First words of the two 128-bit halves; -1: the last word of the tile and its first three.
    base: [[i32; 2]; STEPS],
    /// Ring position of each lane.
    position: [[u8; 16]; STEPS],
    /// Where the two vectors of a step go, in floats.
    place: [[u16; 2]; STEPS],
    constants: Constants,
}

/// Constants of a codebook as whole vectors: the compiler would spread the 16-bit ones anew at every use.
#[repr(C, align(32))]
struct Constants {
    /// Halves of the multiplier.
    multiplier: [[u16; 16]; 2],
    /// MUL1: byte ones.
    ones: [u8; 32],
    /// MUL1: high half of a float whose low half counts.
    exponent: [u16; 16],
    /// MUL1: what makes its value of such a float.
    slope: [f32; 8],
    offset: [f32; 8],
    /// Veltkamp's factor.
    split: [f32; 8],
    /// Of a product's half: what stays and what is flipped.
    mask: [u16; 16],
    bits: [u16; 16],
}

impl Constants {
    fn new(code: Code) -> Constants {
        use crate::codebook::{MUL1_OFFSET, MUL1_SLOPE};
        Constants {
            multiplier: [0, 16].map(|shift| [(code.multiplier() >> shift) as u16; 16]),
            ones: [1; 32],
            // 2^23 + byte sum as a float; slope and offset make it the exact value.
            exponent: [0x4B00; 16],
            slope: [MUL1_SLOPE; 8],
            offset: [MUL1_OFFSET - 8_388_608.0 * MUL1_SLOPE; 8],
            split: [8192.0; 8],
            mask: [0x8FFF; 16],
            bits: [0x3B60; 16],
        }
    }
}

/// All lanes of a constant.
#[target_feature(enable = "avx2")]
#[inline]
fn ints<T>(constant: &[T]) -> __m256i {
    assert!(size_of_val(constant) == 32);
    // SAFETY: 32 bytes, just checked.
    unsafe { _mm256_loadu_si256(constant.as_ptr().cast()) }
}

/// All lanes of a constant.
#[target_feature(enable = "avx2")]
#[inline]
fn floats(constant: &[f32; 8]) -> __m256 {
    // SAFETY: eight floats.
    unsafe { _mm256_loadu_ps(constant.as_ptr()) }
}

/// The same tables; the compiler can't know that, so it reads them where they are needed and copies none to the stack.
#[inline(always)]
fn as_new(tables: &Tables) -> &Tables {
    let mut at: *const Tables = tables;
    // SAFETY: no instruction: the pointer stays what it is.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) at, options(readonly, nostack, preserves_flags));
        &*at
    }
}

/// 1, 2, 4 and 8 bits: windows lie at byte steps in four pairs of words, for each of 8 / bits shifts.
fn phases(rate: Rate) -> Option<usize> {
    [2, 4, 8, 16].contains(&rate.half_bits()).then(|| 16 / rate.half_bits())
}

/// Sixteen windows in a row lie within four words, up to 5 bits.
fn one_load(rate: Rate) -> bool {
    rate.half_bits() <= 10
}

impl Tables {
    pub(super) fn new(rate: Rate, code: Code) -> (Tables, Layout) {
        let mut t = Tables {
            even: [[0; 32]; STEPS],
            odd: [[0; 32]; STEPS],
            right: [[0; 8]; STEPS],
            left: [[0; 8]; STEPS],
            base: [[0; 2]; STEPS],
            position: [[0; 16]; STEPS],
            place: [[0; 2]; STEPS],
            constants: Constants::new(code),
        };
        for step in 0..STEPS {
            match phases(rate) {
                Some(phases) => {
                    let bits = rate.half_bits() / 2;
                    for lane in 0..16 {
                        // Pair of words, then byte within it; the window ends in the pair's second word.
                        let (pair, k) = (lane / 4, lane % 4);
                        let (block, shift) = (step / phases, step % phases * bits + 8 * k);
                        let within = (32 - shift) / bits - 1;
                        t.position[step][lane] = ((4 * block + pair) * 32 / bits + within) as u8;
                        let byte = (8 * (pair % 2) + k) as u8;
                        t.even[step][2 * lane..2 * lane + 2].copy_from_slice(&[byte, byte + 1]);
                    }
                }
                None if windows(rate) == EIGHTHS => t.eighths(step),
                None => t.spread(rate, step, code),
            }
        }
        let layout = Layout::new(8, &t.positions(code));
        let code = if code == Code::Mul1 { MUL1 } else { MCG };
        for (step, to) in layout.place.as_chunks::<2>().0.iter().enumerate() {
            for half in 0..2 {
                let at = place(windows(rate), code, step, half);
                let (slots, _) = slot(windows(rate), code, step, half);
                assert!(slots == layout.slots && at == usize::from(to[half]), "{rate} {step}");
                t.place[step][half] = 8 * at as u16;
            }
        }
        (t, layout)
    }

    /// Step 8g + j takes window j of every run of eight in half g of the tile. Four runs lie in four words; two 32-bit
    /// fields of each run, which `even` picks, hold windows 0 to 3 and 4 to 7.
    fn eighths(&mut self, step: usize) {
        for lane in 0..16 {
            let four = step / 8 * 4 + lane % 2 * 2 + lane / 8;
            self.position[step][lane] = (8 * (4 * four + lane / 2 % 4) + step % 8) as u8;
        }
        for (field, to) in self.even[..2].iter_mut().enumerate() {
            for (i, to) in to.iter_mut().enumerate() {
                // Words are little-endian in memory, the stream begins high.
                let from = 3 * (i / 4 % 4) + 2 + field + 3 - i % 4;
                *to = (from / 4 * 4 + 3 - from % 4) as u8;
            }
        }
    }

    fn spread(&mut self, rate: Rate, step: usize, code: Code) {
        let start = |i: usize| rate.end(i) as i32 - 16;
        for lane in 0..16 {
            // MUL1's sums are interleaved to floats: swapping the middle quarters undoes it.
            let i = if code == Code::Mul1 && (4..12).contains(&lane) { lane ^ 12 } else { lane };
            self.position[step][lane] = (16 * step + i) as u8;
        }
        for half in 0..2 {
            let lanes = 8 * half..8 * half + 8;
            let reached = if one_load(rate) { 0..16 } else { lanes.clone() };
            let first = reached.map(|l| start(usize::from(self.position[step][l]))).min().unwrap_or(0);
            let base = first.div_euclid(32).min(rate.words() as i32 - 4);
            self.base[step][half] = base;
            for lane in lanes {
                let begin = start(usize::from(self.position[step][lane])) - 32 * base;
                // Four stream bytes that hold the window: it must end low in even lanes and begin high in odd ones.
                let (byte, shuffle) = if lane % 2 == 0 {
                    let last = (begin + 15) / 8;
                    self.right[step][lane / 2] = (8 * (last + 1) - begin - 16) as u32;
                    (last - 3, &mut self.even)
                } else {
                    self.left[step][lane / 2] = (begin % 8) as u32;
                    (begin / 8, &mut self.odd)
                };
                for k in 0..4 {
                    // Little-endian byte k of the lane is stream byte 3 - k; words are little-endian in memory.
                    let from = byte + 3 - k as i32;
                    let at = if (0..16).contains(&from) { from / 4 * 4 + 3 - from % 4 } else { 0x80 };
                    shuffle[step][4 * (lane / 2) + k] = at as u8;
                }
            }
        }
    }

    /// In the order in which the decoder stores them.
    fn positions(&self, code: Code) -> Vec<usize> {
        let order: [usize; 16] = std::array::from_fn(|l| match code {
            Code::Mul1 => [0, 8, 4, 12][l / 4] + l % 4,
            _ => l,
        });
        self.position.iter().flat_map(|p| order.map(|l| usize::from(p[l]))).collect()
    }
}

const MCG: u8 = 0;
const MUL1: u8 = 1;
const THREE_INST: u8 = 2;

/// 3 bits: every eighth window, whose places within bytes are the same.
const EIGHTHS: i32 = 3;
/// Windows by shuffles and shifts from one load of four words, or from two.
const ONE_LOAD: i32 = 0;
const TWO_LOADS: i32 = -1;

/// Decodes into floats.
pub(super) type Decode = unsafe fn(&Tables, &Source, &mut [f32]);
/// Decodes and multiplies one row: inputs, sums.
pub(super) type Fused = unsafe fn(&Tables, &Source, &[f32], &mut [f32]);

/// The functions of a rate and codebook.
pub(super) fn functions(rate: Rate, code: Code) -> (Decode, Fused) {
    macro_rules! pick {
        ($($windows:pat => $bits:tt),*) => {
            match (windows(rate), code) {
                $(($windows, Code::Mcg) => (decode::<$bits, MCG>, fused::<$bits, MCG>),
                ($windows, Code::Mul1) => (decode::<$bits, MUL1>, fused::<$bits, MUL1>),
                ($windows, Code::ThreeInst) => (decode::<$bits, THREE_INST>, fused::<$bits, THREE_INST>),)*
            }
        };
    }
    pick!(1 => 1, 2 => 2, 4 => 4, 8 => 8, EIGHTHS => EIGHTHS, ONE_LOAD => ONE_LOAD, _ => TWO_LOADS)
}

/// The parameter WINDOWS of a rate.
fn windows(rate: Rate) -> i32 {
    match rate.half_bits() {
        6 => EIGHTHS,
        bits if phases(rate).is_some() => bits as i32 / 2,
        _ if one_load(rate) => ONE_LOAD,
        _ => TWO_LOADS,
    }
}

/// Number of input vectors, and which of them vector `half` of a step is multiplied with.
const fn slot(windows: i32, code: u8, step: usize, half: usize) -> (usize, usize) {
    match windows {
        2 | EIGHTHS if code == MUL1 => (8, 2 * (step % 4) + half),
        1 | 2 | EIGHTHS => (4, step % 4),
        8 if code == MUL1 => (2, step % 2),
        _ => (4, 2 * (step % 2) + half),
    }
}

/// Where vector `half` of a step goes: input vectors take turns.
const fn place(windows: i32, code: u8, step: usize, half: usize) -> usize {
    let (slots, slot) = self::slot(windows, code, step, half);
    let (mut earlier, mut v) = (0, 0);
    while v < 2 * step + half {
        if self::slot(windows, code, v / 2, v % 2).1 == slot {
            earlier += 1;
        }
        v += 1;
    }
    earlier * slots + slot
}

/// fp16 halves of a tile, before they are added: low and high halves of sixteen weights in turn.
#[repr(C, align(64))]
struct Halves([u16; 2 * TILE]);

/// Decodes `source.count` tiles into `out`, 256 floats each. WINDOWS: bits of a rate with [`phases`], or how to load.
///
/// # Safety
/// The machine must have the features; `source` must describe tiles in memory; `tables` must be of its rate and code.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn decode<const WINDOWS: i32, const CODE: u8>(tables: &Tables, source: &Source, out: &mut [f32]) {
    assert!(out.len() >= source.count * TILE);
    let words = source.tile_bytes / 4;
    let mut halves = Halves([0; 2 * TILE]);
    let halves = halves.0.as_mut_ptr();
    for i in 0..source.count {
        source.prefetch(i);
        let tables = as_new(tables);
        // SAFETY: tile i is in memory; loads stay inside it (see `Tables::new` and `four_pairs`); places are below 256.
        unsafe {
            let tile = source.first.add(i * source.stride);
            let to = out.as_mut_ptr().add(i * TILE);
            let half_way = |state: __m256i, step: usize| {
                let at = tables.place[step].map(usize::from);
                if CODE == MUL1 {
                    let [a, b] = mul1(&tables.constants, byte_sums(&tables.constants, state));
                    _mm256_storeu_ps(to.add(at[0]), a);
                    _mm256_storeu_ps(to.add(at[1]), b);
                } else {
                    let [low, high] = fp16_halves::<CODE>(&tables.constants, state);
                    _mm256_store_si256(halves.add(32 * step).cast(), low);
                    _mm256_store_si256(halves.add(32 * step + 16).cast(), high);
                }
            };
            if WINDOWS == EIGHTHS {
                for step in 0..STEPS {
                    let data = two_fours(tile, words, step / 8);
                    half_way(eighths(fields(tables, data, step), step), step);
                }
            } else if WINDOWS > 0 {
                let phases = (8 / WINDOWS) as usize;
                let shuffle = _mm256_load_si256(tables.even[0].as_ptr().cast());
                for block in 0..STEPS / phases {
                    let pairs = four_pairs(tile, words, block);
                    for phase in 0..phases {
                        let moved = _mm256_srl_epi64(pairs, _mm_cvtsi32_si128(phase as i32 * WINDOWS));
                        half_way(_mm256_shuffle_epi8(moved, shuffle), block * phases + phase);
                    }
                }
            } else {
                half_way(spread_states::<WINDOWS, true>(tables, tile, words, 0), 0);
                for step in 1..STEPS {
                    half_way(spread_states::<WINDOWS, false>(tables, tile, words, step), step);
                }
            }
            if CODE != MUL1 {
                keep_in_memory(halves);
                for step in 0..STEPS {
                    let at = tables.place[step].map(usize::from);
                    let [a, b] = fp16_sums(&tables.constants, halves, step);
                    _mm256_storeu_ps(to.add(at[0]), a);
                    _mm256_storeu_ps(to.add(at[1]), b);
                }
            }
        }
    }
}

/// Expands `$do!(0)` to `$do!(15)`.
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

/// Decodes `source.count` tiles and adds their products with one row's inputs `x` to `sums`, in the order of `apply`.
///
/// # Safety
/// As [`decode`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fused<const WINDOWS: i32, const CODE: u8>(
    tables: &Tables,
    source: &Source,
    x: &[f32],
    sums: &mut [f32],
) {
    let slots = const { slot(WINDOWS, CODE, 0, 0).0 };
    assert!(source.count.is_multiple_of(ABREAST), "blocks of inputs are 8 tiles high");
    assert!(x.len() >= source.count * slots * 8 && sums.len() == TILE);
    let words = source.tile_bytes / 4;
    let mut halves = [const { Halves([0; 2 * TILE]) }; ABREAST];
    let halves: [*mut u16; ABREAST] = halves.each_mut().map(|h| h.0.as_mut_ptr());
    // SAFETY: tile i is in memory; loads stay inside it; inputs and sums were checked above.
    unsafe {
        let sums = sums.as_mut_ptr();
        for i in (0..source.count).step_by(ABREAST) {
            let tables = as_new(tables);
            (i..i + ABREAST).for_each(|i| source.prefetch(i));
            let tile: [*const u8; ABREAST] =
                std::array::from_fn(|t| source.first.wrapping_add((i + t) * source.stride));
            let x = x.as_ptr().add(i * slots * 8);
            macro_rules! add {
                ($step:literal, $half:literal, $value:expr) => {
                    let at = const { place(WINDOWS, CODE, $step, $half) };
                    let to = sums.add(at * 8);
                    let mut sum = _mm256_loadu_ps(to);
                    for t in 0..ABREAST {
                        let x = _mm256_loadu_ps(x.add((t * slots + at % slots) * 8));
                        sum = _mm256_fmadd_ps($value(t), x, sum);
                    }
                    _mm256_storeu_ps(to, sum);
                };
            }
            let mut pairs = [_mm256_setzero_si256(); ABREAST];
            let mut data = [[_mm256_setzero_si256(); 2]; ABREAST];
            let mut runs = data;
            macro_rules! states {
                ($step:expr) => {{
                    let step: usize = $step;
                    let mut states = [_mm256_setzero_si256(); ABREAST];
                    for t in 0..ABREAST {
                        states[t] = if WINDOWS == EIGHTHS {
                            if step % 8 == 0 {
                                data[t] = two_fours(tile[t], words, step / 8);
                            }
                            if step % 4 == 0 {
                                runs[t] = fields(tables, data[t], step);
                            }
                            eighths(runs[t], step)
                        } else if WINDOWS > 0 {
                            let phases = (8 / WINDOWS) as usize;
                            if step % phases == 0 {
                                pairs[t] = four_pairs(tile[t], words, step / phases);
                            }
                            let shift = _mm_cvtsi32_si128((step % phases) as i32 * WINDOWS);
                            let moved = _mm256_srl_epi64(pairs[t], shift);
                            _mm256_shuffle_epi8(moved, ints(&tables.even[0]))
                        } else {
                            spread_states::<WINDOWS, { $step == 0 }>(tables, tile[t], words, step)
                        };
                    }
                    states
                }};
            }
            // More sums than registers, which hold constants.
            keep_in_memory(sums);
            if CODE == MUL1 {
                // A step's byte sums are made while those before become floats.
                let mut now = states!(0);
                for now in &mut now {
                    *now = byte_sums(&tables.constants, *now);
                }
                macro_rules! product {
                    ($step:literal) => {
                        let mut next = now;
                        if $step + 1 < STEPS {
                            next = states!($step + 1);
                            for next in &mut next {
                                *next = byte_sums(&tables.constants, *next);
                            }
                            in_order(&mut now, &mut next);
                        }
                        let mut values = [[_mm256_setzero_ps(); 2]; ABREAST];
                        for (values, sums) in values.iter_mut().zip(now) {
                            *values = mul1(&tables.constants, sums);
                        }
                        add!($step, 0, |t: usize| values[t][0]);
                        add!($step, 1, |t: usize| values[t][1]);
                        now = next;
                    };
                }
                each_step!(product);
                let _ = now;
            } else {
                macro_rules! product {
                    ($step:literal) => {
                        for (state, halves) in states!($step).into_iter().zip(halves) {
                            let [low, high] = fp16_halves::<CODE>(&tables.constants, state);
                            _mm256_store_si256(halves.add(32 * $step).cast(), low);
                            _mm256_store_si256(halves.add(32 * $step + 16).cast(), high);
                        }
                    };
                }
                each_step!(product);
                halves.iter().for_each(|h| keep_in_memory(*h));
                macro_rules! finish {
                    ($step:literal) => {
                        let mut values = [[_mm256_setzero_ps(); 2]; ABREAST];
                        for (values, halves) in values.iter_mut().zip(halves) {
                            *values = fp16_sums(&tables.constants, halves, $step);
                        }
                        add!($step, 0, |t: usize| values[t][0]);
                        add!($step, 1, |t: usize| values[t][1]);
                    };
                }
                each_step!(finish);
            }
        }
    }
}

/// Keeps the compiler from making `next` after what becomes of `now`: both are under way together.
#[target_feature(enable = "avx2")]
#[inline]
fn in_order(now: &mut [__m256i; ABREAST], next: &mut [__m256i; ABREAST]) {
    let ([a, b], [c, d]) = (now, next);
    // SAFETY: no instruction.
    unsafe {
        std::arch::asm!(
            "/* {0} {1} {2} {3} */",
            inout(ymm_reg) * a,
            inout(ymm_reg) * b,
            inout(ymm_reg) * c,
            inout(ymm_reg) * d,
            options(nomem, nostack, preserves_flags)
        );
    }
}

/// # Safety
/// `tile` must point to the tile's words; FIRST for step 0, whose windows begin at the end of the ring.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn spread_states<const WINDOWS: i32, const FIRST: bool>(
    tables: &Tables,
    tile: *const u8,
    words: usize,
    step: usize,
) -> __m256i {
    // SAFETY: bases lie at least four words before the tile's end; only step 0 has negative ones.
    unsafe {
        let part = |half: usize| {
            let base = tables.base[step][half];
            if FIRST && base < 0 {
                last_first(tile, words)
            } else {
                _mm_loadu_si128(tile.offset(4 * base as isize).cast())
            }
        };
        let data = if WINDOWS == ONE_LOAD {
            _mm256_broadcastsi128_si256(part(0))
        } else {
            _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(part(0)), part(1))
        };
        let bytes = |t: &[[u8; 32]; STEPS]| _mm256_load_si256(t[step].as_ptr().cast());
        let counts = |t: &[[u32; 8]; STEPS]| _mm256_load_si256(t[step].as_ptr().cast());
        let even = _mm256_shuffle_epi8(data, bytes(&tables.even));
        let odd = _mm256_shuffle_epi8(data, bytes(&tables.odd));
        let (even, odd) =
            (_mm256_srlv_epi32(even, counts(&tables.right)), _mm256_sllv_epi32(odd, counts(&tables.left)));
        _mm256_blend_epi16::<0xAA>(even, odd)
    }
}

/// 3 bits: the words of sixteen runs of eight windows, for even lanes and for odd ones.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn two_fours(tile: *const u8, words: usize, half: usize) -> [__m256i; 2] {
    // SAFETY: the words from 12 four - 4 bytes on end at the tile's 24th at the latest; the first begin at the ring's end.
    unsafe {
        let load = |four: usize| match four {
            0 => last_first(tile, words),
            _ => _mm_loadu_si128(tile.add(12 * four - 4).cast()),
        };
        let two = |four| _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(load(four)), load(four + 1));
        [two(4 * half), two(4 * half + 2)]
    }
}

/// 3 bits: a 32-bit field of each run that holds this step's window and its neighbours.
#[target_feature(enable = "avx2")]
#[inline]
fn fields(tables: &Tables, data: [__m256i; 2], step: usize) -> [__m256i; 2] {
    let shuffle = ints(&tables.even[step / 4 % 2]);
    [_mm256_shuffle_epi8(data[0], shuffle), _mm256_shuffle_epi8(data[1], shuffle)]
}

/// 3 bits: the windows of a step in such fields, where they begin at bit 3, 6, 9, 12, or 7, 10, 13, 16.
#[target_feature(enable = "avx2")]
#[inline]
fn eighths(fields: [__m256i; 2], step: usize) -> __m256i {
    let begin = 3 * (step % 4) as i32 + if step % 8 < 4 { 3 } else { 7 };
    let even = _mm256_srl_epi32(fields[0], _mm_cvtsi32_si128(16 - begin));
    let odd = _mm256_sll_epi32(fields[1], _mm_cvtsi32_si128(begin));
    _mm256_blend_epi16::<0xAA>(even, odd)
}

/// The last word of a tile, then its first three.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn last_first(tile: *const u8, words: usize) -> __m128i {
    // SAFETY: a tile has at least 8 words.
    unsafe {
        let last = _mm_loadu_si128(tile.add(4 * words - 16).cast());
        _mm_alignr_epi8::<12>(_mm_loadu_si128(tile.cast()), last)
    }
}

/// The pairs of words (4b - 1, 4b), (4b, 4b + 1), .., the first in the high half.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn four_pairs(tile: *const u8, words: usize, block: usize) -> __m256i {
    // SAFETY: eight words from word 4b - 4 exist for b > 0, and the first eight always.
    unsafe {
        if block == 0 {
            let first = _mm256_loadu_si256(tile.cast());
            let pairs = _mm256_permutevar8x32_epi32(first, _mm256_setr_epi32(0, 0, 1, 0, 2, 1, 3, 2));
            let last = tile.add(4 * words - 4).cast::<i32>().read_unaligned();
            _mm256_blend_epi32::<2>(pairs, _mm256_set1_epi32(last))
        } else {
            let eight = _mm256_loadu_si256(tile.add(16 * (block - 1)).cast());
            _mm256_permutevar8x32_epi32(eight, _mm256_setr_epi32(4, 3, 5, 4, 6, 5, 7, 6))
        }
    }
}

/// Product of sixteen states with the multiplier, low and high halves.
#[target_feature(enable = "avx2")]
#[inline]
fn product<const CODE: u8>(c: &Constants, state: __m256i) -> [__m256i; 2] {
    use crate::Codebook::ThreeInst;
    let (m0, m1) = (ints(&c.multiplier[0]), ints(&c.multiplier[1]));
    let low = _mm256_mullo_epi16(state, m0);
    let high = _mm256_add_epi16(_mm256_mulhi_epu16(state, m0), _mm256_mullo_epi16(state, m1));
    if CODE != THREE_INST {
        return [low, high];
    }
    // A 32-bit addition in halves; the carry is where the low sum wrapped.
    let add = _mm256_set1_epi16(ThreeInst.increment() as i16);
    let sum = _mm256_add_epi16(low, add);
    let kept = _mm256_cmpeq_epi16(_mm256_max_epu16(sum, add), sum);
    let high = _mm256_add_epi16(high, _mm256_set1_epi16((ThreeInst.increment() >> 16) as i16 + 1));
    [sum, _mm256_add_epi16(high, kept)]
}

/// Sums of the bytes of sixteen MUL1 products.
#[target_feature(enable = "avx2")]
#[inline]
fn byte_sums(c: &Constants, state: __m256i) -> __m256i {
    let [low, high] = product::<MUL1>(c, state);
    let one = ints(&c.ones);
    _mm256_add_epi16(_mm256_maddubs_epi16(low, one), _mm256_maddubs_epi16(high, one))
}

/// Their sixteen values: those of the first four states of each 128 bits, then of the others.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn mul1(c: &Constants, sum: __m256i) -> [__m256; 2] {
    let exponent = ints(&c.exponent);
    let value =
        |bits| round(c, _mm256_fmadd_ps(_mm256_castsi256_ps(bits), floats(&c.slope), floats(&c.offset)));
    [value(_mm256_unpacklo_epi16(sum, exponent)), value(_mm256_unpackhi_epi16(sum, exponent))]
}

/// The fp16 numbers whose sums are the values of sixteen MCG or 3INST states.
#[target_feature(enable = "avx2")]
#[inline]
fn fp16_halves<const CODE: u8>(c: &Constants, state: __m256i) -> [__m256i; 2] {
    let (mask, bits) = (ints(&c.mask), ints(&c.bits));
    product::<CODE>(c, state).map(|half| _mm256_xor_si256(_mm256_and_si256(half, mask), bits))
}

/// Their sums, eight and eight, from memory: the conversions' loads spare a shuffle each.
///
/// # Safety
/// `halves` must have 512 numbers.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn fp16_sums(c: &Constants, halves: *const u16, step: usize) -> [__m256; 2] {
    // SAFETY: 32 numbers for each of 16 steps.
    let eight = |n: usize| unsafe { _mm256_cvtph_ps(_mm_load_si128(halves.add(32 * step + 8 * n).cast())) };
    [round(c, _mm256_add_ps(eight(0), eight(2))), round(c, _mm256_add_ps(eight(1), eight(3)))]
}

/// Keeps the compiler from forwarding registers to later loads.
#[inline(always)]
pub(super) fn keep_in_memory<T>(data: *mut T) {
    // SAFETY: no instruction.
    unsafe { std::arch::asm!("/* {0} */", in(reg) data, options(nostack, preserves_flags)) };
}

/// To fp16, nearest even, by Veltkamp's split: no value of a codebook is subnormal there.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn round(c: &Constants, v: __m256) -> __m256 {
    let split = floats(&c.split);
    _mm256_fnmadd_ps(v, split, _mm256_fmadd_ps(v, split, v))
}
