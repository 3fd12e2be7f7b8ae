//! The trellis search (EXL3 specification, section 7): closed rings of states near tiles of weights.
//!
//! Two passes of the Viterbi algorithm: A finds the node at the seam of the ring, B goes once round from that node to
//! itself. Two tiles are searched side by side, so that they share the reads of the codebook.

#[cfg(target_arch = "x86_64")]
mod half_cost;
mod half_emulated;
mod single_cost;

use crate::aligned::Aligned;
use crate::codebook::STATES;
use crate::rate::TILE;
use crate::{Codebook, Isa, Rate};

/// Arithmetic of the path costs. Each gives the same states on every machine, with any number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SearchCosts {
    /// float32: fast everywhere.
    Single,
    /// fp16, to the bit as exllamav3's reference kernel. Fastest with AVX512-FP16; emulated elsewhere, at a fifth of the
    /// speed of `Single`.
    Half,
}

/// Larger inputs are cut: no codebook value is near, and sums of their squares must stay finite in f32.
const LIMIT: f32 = 1e4;

/// Bits in which the number of a winner among 2^`new` is stored.
const fn width(new: usize) -> usize {
    match new {
        1 | 2 => new,
        3 | 4 => 4,
        _ => 8,
    }
}

/// Nodes between two positions, the later of which has `new` new bits.
const fn nodes(new: usize) -> usize {
    STATES >> new
}

/// A number type for path costs.
trait Cost: bytemuck::Pod + Send + Sync {
    /// Candidates in one vector of the inner loop; the winners of a vector go to as many bytes.
    const LANES: usize;
    /// How the codebook is held.
    type Value: 'static;
    const ZERO: Self;
    /// Of a node that cannot be reached.
    const FAR: Self;
    fn from_weight(w: f32) -> Self;
    /// Ascending with the cost at the end of pass A, then in the order of ties.
    fn key(self, node: usize) -> u64;
}

/// Place of a node in the reference kernel's reduction tree, by which ties at the end of pass A go.
fn rank(node: usize) -> u64 {
    let reverse5 = |v: usize| (v as u64).reverse_bits() >> 59;
    reverse5(node >> 5 & 31) << 10 | reverse5(node & 31) << 5 | (node >> 10) as u64
}

/// What one step reads and writes, for two tiles: costs before and behind a position, and the winners (may be empty).
struct Lane<'a, C> {
    w: C,
    cost: &'a [C],
    next: &'a mut [C],
    winners: &'a mut [u8],
}

/// Costs behind one position. Slices are as long as [`Search::new`] made them: one vector longer than the nodes.
type Step<C> = unsafe fn(&[<C as Cost>::Value; STATES], &mut [Lane<'_, C>; 2]);

/// `[even, odd]` positions' instances of a step with the new bits of a position and of the next as parameters.
macro_rules! steps {
    ($f:ident, $rate:expr) => {
        match $rate.half_bits() {
            2 => [$f::<1, 1>, $f::<1, 1>],
            3 => [$f::<1, 2>, $f::<2, 1>],
            4 => [$f::<2, 2>, $f::<2, 2>],
            5 => [$f::<2, 3>, $f::<3, 2>],
            6 => [$f::<3, 3>, $f::<3, 3>],
            7 => [$f::<3, 4>, $f::<4, 3>],
            8 => [$f::<4, 4>, $f::<4, 4>],
            10 => [$f::<5, 5>, $f::<5, 5>],
            12 => [$f::<6, 6>, $f::<6, 6>],
            14 => [$f::<7, 7>, $f::<7, 7>],
            _ => [$f::<8, 8>, $f::<8, 8>],
        }
    };
}
use steps;

/// The trellis search for one rate and codebook.
pub struct Search {
    codebook: Codebook,
    inner: Inner,
}

enum Inner {
    Single(Typed<f32>),
    #[cfg(target_arch = "x86_64")]
    Half(Typed<u16>),
    Emulated(Typed<half_emulated::Emulated>),
}

/// Working memory of a [`Search`]; reusable, one per thread.
pub struct Scratch(Memory);

enum Memory {
    Single(Buffers<f32>),
    #[cfg(target_arch = "x86_64")]
    Half(Buffers<u16>),
    Emulated(Buffers<half_emulated::Emulated>),
}

impl Search {
    /// `context`: positions on each side of the seam that pass A looks at, 1 to 128. 128 is the reference scheme;
    /// 32 takes 0.63 of the time for about 1.5 % more squared error (section 7.1).
    pub fn new(rate: Rate, codebook: Codebook, costs: SearchCosts, context: usize) -> Search {
        Self::with_isa(rate, codebook, costs, context, Isa::best())
    }

    pub(super) fn with_isa(
        rate: Rate,
        codebook: Codebook,
        costs: SearchCosts,
        context: usize,
        isa: Isa,
    ) -> Search {
        let context = context.clamp(1, TILE / 2);
        let inner = match costs {
            SearchCosts::Single => {
                let steps = single_cost::steps(rate, isa);
                Inner::Single(Typed { rate, table: single_cost::table(codebook), steps, context })
            }
            #[cfg(target_arch = "x86_64")]
            SearchCosts::Half if isa == Isa::Avx512Half => {
                let steps = half_cost::steps(rate);
                Inner::Half(Typed { rate, table: half_cost::table(codebook), steps, context })
            }
            SearchCosts::Half => {
                let steps = half_emulated::steps(rate, isa);
                Inner::Emulated(Typed { rate, table: half_emulated::table(codebook), steps, context })
            }
        };
        Search { codebook, inner }
    }

    /// The codebook that the states mean.
    pub fn codebook(&self) -> Codebook {
        self.codebook
    }

    /// Working memory for this search.
    pub fn scratch(&self) -> Scratch {
        Scratch(match &self.inner {
            Inner::Single(s) => Memory::Single(s.buffers()),
            #[cfg(target_arch = "x86_64")]
            Inner::Half(s) => Memory::Half(s.buffers()),
            Inner::Emulated(s) => Memory::Emulated(s.buffers()),
        })
    }

    /// States of closed rings near two `tiles` (ring order). NaN counts as 0. `scratch` of another search is replaced.
    pub fn pair(&self, tiles: [&[f32; TILE]; 2], scratch: &mut Scratch) -> [[u16; TILE]; 2] {
        let tiles = tiles.map(|t| t.map(|v| if v.is_nan() { 0.0 } else { v.clamp(-LIMIT, LIMIT) }));
        match (&self.inner, &mut scratch.0) {
            (Inner::Single(s), Memory::Single(b)) if s.fits(b) => s.search(&tiles, b),
            #[cfg(target_arch = "x86_64")]
            (Inner::Half(s), Memory::Half(b)) if s.fits(b) => s.search(&tiles, b),
            (Inner::Emulated(s), Memory::Emulated(b)) if s.fits(b) => s.search(&tiles, b),
            _ => {
                *scratch = self.scratch();
                self.pair([&tiles[0], &tiles[1]], scratch)
            }
        }
    }
}

struct Buffers<C> {
    cost: [Aligned<C>; 2],
    next: [Aligned<C>; 2],
    winners: [Aligned<u8>; 2],
}

struct Typed<C: Cost> {
    rate: Rate,
    table: &'static [C::Value; STATES],
    /// For even and for odd positions.
    steps: [Step<C>; 2],
    context: usize,
}

impl<C: Cost> Typed<C> {
    fn cost_length(&self) -> usize {
        nodes(self.rate.new_bits(0)) + C::LANES
    }

    fn buffers(&self) -> Buffers<C> {
        let costs = |skews: [usize; 2]| skews.map(|skew| Aligned::skewed(self.cost_length(), skew));
        let winners = [(); 2].map(|_| Aligned::new(self.winners_start(TILE)));
        Buffers { cost: costs([0, 9]), next: costs([18, 36]), winners }
    }

    fn fits(&self, b: &Buffers<C>) -> bool {
        b.cost[0].len() == self.cost_length() && b.winners[0].len() == self.winners_start(TILE)
    }

    /// Bytes of winners before position `i`.
    fn winners_start(&self, i: usize) -> usize {
        let bytes = |next: usize| {
            let new = self.rate.new_bits(next);
            nodes(new) * width(new) / 8
        };
        i.div_ceil(2) * bytes(1) + i / 2 * bytes(0)
    }

    fn advance(&self, i: usize, tiles: &[[f32; TILE]; 2], b: &mut Buffers<C>, keep: bool) {
        let kept = if keep { self.winners_start(i)..self.winners_start(i + 1) } else { 0..0 };
        let ([c0, c1], [n0, n1], [w0, w1]) = (&b.cost, &mut b.next, &mut b.winners);
        let mut lanes = [
            Lane { w: C::from_weight(tiles[0][i]), cost: c0, next: n0, winners: &mut w0[kept.clone()] },
            Lane { w: C::from_weight(tiles[1][i]), cost: c1, next: n1, winners: &mut w1[kept] },
        ];
        // SAFETY: `steps` were chosen for an instruction set that this machine has.
        unsafe { self.steps[i % 2](self.table, &mut lanes) };
        std::mem::swap(&mut b.cost, &mut b.next);
    }

    /// State of position `i` on the best path to the node behind it.
    fn winner(&self, i: usize, node: usize, winners: &[u8]) -> usize {
        let new = self.rate.new_bits(i + 1);
        let (width, lanes) = (width(new), C::LANES);
        let group = lanes * 8 / width;
        let byte = winners[self.winners_start(i) + node / group * lanes + node % lanes];
        let k = usize::from(byte) >> (node % group / lanes * width) & ((1 << new) - 1);
        k << (16 - new) | node
    }

    fn search(&self, tiles: &[[f32; TILE]; 2], b: &mut Buffers<C>) -> [[u16; TILE]; 2] {
        // Pass A: the node at the seam, from the positions around it, ends free.
        b.cost.iter_mut().for_each(|c| c.fill(C::ZERO));
        for i in (TILE - self.context..TILE).chain(0..self.context) {
            self.advance(i, tiles, b, i < self.context);
        }
        let mut seam = [0; 2];
        for t in 0..2 {
            let last = &b.cost[t][..nodes(self.rate.new_bits(self.context))];
            let best = last.iter().enumerate().min_by_key(|(node, c)| c.key(*node));
            let mut node = best.map_or(0, |(node, _)| node);
            for i in (0..self.context).rev() {
                node = self.winner(i, node, &b.winners[t]) >> self.rate.new_bits(i);
            }
            seam[t] = node;
        }
        // Pass B.
        for t in 0..2 {
            b.cost[t].fill(C::FAR);
            b.cost[t][seam[t]] = C::ZERO;
        }
        for i in 0..TILE {
            self.advance(i, tiles, b, true);
        }
        let mut states = [[0; TILE]; 2];
        for t in 0..2 {
            let mut node = seam[t];
            for i in (0..TILE).rev() {
                let state = self.winner(i, node, &b.winners[t]);
                states[t][i] = state as u16;
                node = state >> self.rate.new_bits(i);
            }
        }
        states
    }
}
