//! The kernels that each instruction set provides.

use crate::{
    Isa,
    order::{Layout, View},
    portable,
};

/// 16 floats on a cache line of their own.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub [f32; 16]);

/// A growing buffer of floats that starts on a cache line.
#[derive(Default)]
pub(crate) struct Buffer(Vec<Line>);

impl Buffer {
    /// At least `n` floats, with whatever they held before.
    pub(crate) fn take(&mut self, n: usize) -> &mut [f32] {
        let lines = n.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        // SAFETY: a Line is 16 floats without padding, and the vector holds at least `lines` of them.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast::<f32>(), n) }
    }

    /// The first `n` floats.
    pub(crate) fn get(&self, n: usize) -> &[f32] {
        assert!(n <= self.0.len() * 16, "{n} floats of {}", self.0.len() * 16);
        // SAFETY: a Line is 16 floats without padding, and the bound was checked.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast::<f32>(), n) }
    }
}

/// Operands of one register tile: `m` activation rows times `n` weight rows over `steps` lines of 16 columns.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub x: *const f32,
    /// Floats from one activation row to the next.
    pub x_stride: usize,
    pub w: *const f32,
    /// Floats from one weight row to the next.
    pub w_stride: usize,
    pub steps: usize,
    /// 16 lanes per output, `[m][n]`.
    pub acc: *mut f32,
    /// Floats from the lanes of one activation row to those of the next.
    pub acc_stride: usize,
    /// Start from zero instead of from `acc`.
    pub first: bool,
}

/// Slots of a step of the online softmax, and keys of a step of the index scores [§2.7].
pub(crate) const SLOTS: usize = 64;

/// Running state of the online softmax of a head.
#[derive(Clone, Copy)]
pub(crate) struct Online {
    pub max: f32,
    pub sum: f32,
}

/// Operands of the value product of some heads: o = o * shrink + Σ_j p_j k_j.
#[derive(Clone, Copy)]
pub(crate) struct Values {
    /// Probabilities, [`SLOTS`] per head.
    pub p: *const f32,
    /// By what each head's earlier sums shrink.
    pub shrink: *const f32,
    pub k: *const f32,
    /// Floats from one key to the next.
    pub k_stride: usize,
    pub slots: usize,
    pub o: *mut f32,
    /// Floats from one head to the next.
    pub o_stride: usize,
}

/// See [`Kernels::gemv`].
pub(crate) type Gemv =
    unsafe fn(v: &View, r: usize, x: &[f32], scratch: &mut Buffer, out: &mut [f32]) -> bool;

/// See [`Kernels::softmax`].
pub(crate) type Softmax = unsafe fn(
    s: &mut [f32; SLOTS],
    valid: &[bool; SLOTS],
    scale: f32,
    round: bool,
    state: &mut Online,
) -> f32;

/// Function table of one instruction set.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    /// Activation and weight rows of the largest register tile.
    pub tile_rows: [usize; 2],
    /// `order::pack_row`.
    pub pack: unsafe fn(x: &[f32], layout: Layout, out: &mut [f32]) -> bool,
    /// `View::decode` of `kn` columns from `k0` of each row from `r`, `out.len() / kn` rows.
    pub decode: unsafe fn(v: &View, r: usize, k0: usize, kn: usize, out: &mut [f32]),
    /// Adds a tile's products to its lanes: `m`, `n` at most `tile_rows`.
    pub tile: unsafe fn(t: &Tile, m: usize, n: usize),
    /// `order::reduce` of `out.len()` outputs.
    pub reduce: unsafe fn(acc: *const f32, out: &mut [f32]),
    /// Rows `r..r + out.len()` times one activation row without a detour through memory. Every activation and K lie in
    /// the window of `order`, and where the form is `Fp8Block32` the rows lie in one block of 32. False, and nothing
    /// done, where the scales are not such as the kernel can move.
    pub gemv: Option<Gemv>,
    /// Heads and lane sets of the largest `values` tile.
    pub value_rows: [usize; 2],
    /// `body::values` of at most `value_rows` heads and lane sets.
    pub values: unsafe fn(t: &Values, m: usize, n: usize),
    /// `quantise::load_fp8`, `load_kv` and `load_fp4`.
    pub load_fp8: unsafe fn(row: &[u8], out: &mut [f32]),
    pub load_kv: unsafe fn(row: &[u8], out: &mut [f32]),
    pub load_fp4: unsafe fn(row: &[u8], out: &mut [f32]),
    /// `body::softmax`.
    pub softmax: Softmax,
    /// `body::combine`.
    pub combine: unsafe fn(t: &[f32], w: &[f32], round: bool, out: &mut [f32; SLOTS]),
    /// `body::dot`.
    pub dot: unsafe fn(a: &[f32], b: &[f32]) -> f32,
    /// `body::axpy`.
    pub axpy: unsafe fn(alpha: f32, x: &[f32], y: &mut [f32]),
    /// Reads all of `data` (for the measure of bandwidth).
    pub read: unsafe fn(data: &[u64]) -> u64,
    /// Multiply-adds in registers, `spin_fma` times `rounds` of them (for the measure of the peak).
    pub spin: unsafe fn(rounds: usize) -> f32,
    /// Multiply-adds of a round of `spin`.
    pub spin_fma: usize,
}

impl Kernels {
    pub(crate) fn of(isa: Isa) -> &'static Kernels {
        assert!(isa.is_available(), "this machine has no {}", isa.name());
        match isa {
            Isa::Portable => &portable::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &crate::avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &crate::avx512::KERNELS,
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("not available on this architecture"),
        }
    }
}
