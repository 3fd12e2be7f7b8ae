//! Linear layers on the CPU, straight from the trellis: a few tiles at a time are decoded into the first-level cache, to the
//! bit of every weight, and multiplied with all rows in float32. The order of every sum is a function of the shape, so a
//! row's bits depend neither on the other rows nor on threads or the instruction set.

mod apply;
mod arrange;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_half;
mod layout;
mod portable;
#[cfg(test)]
mod tests;

use crate::aligned::Aligned;
use crate::hadamard::{rotate_input, rotate_output};
use crate::rate::TILE;
use crate::{Arithmetic, BLOCK, Codebook, Error, Isa, Linear, Rate};
use layout::Layout;
use rayon::prelude::*;
use std::cell::Cell;
use std::ops::Range;
use std::sync::OnceLock;

/// Tiles decoded at once: 16 KiB of weights.
const CHUNK: usize = 16;
/// Rows up to which a product is bound by decoding and memory.
const FEW: usize = 8;
/// Columns of tiles that many rows go through together.
const WIDE: usize = 4;
/// Tiles of one call where weights stay in registers.
const FUSED_CHUNK: usize = 16;
/// Tiles side by side in one Hadamard block of outputs.
const ACROSS: usize = BLOCK / 16;
/// Rows that share one pass over the trellis at most; their sums and a chunk of their inputs stay in the cache.
const BATCH: usize = 32;

/// Decoder of one rate and codebook for one instruction set.
struct Kernel {
    isa: Isa,
    layout: Layout,
    decode: Decoder,
    /// What the sums must be multiplied by.
    scale: f32,
}

enum Decoder {
    #[cfg(target_arch = "x86_64")]
    Avx512Half(avx512_half::Decode, avx512_half::Fused, Box<avx512_half::Tables>),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Decode, avx512::Fused, Box<avx512::Tables>),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Decode, avx2::Fused, Box<avx2::Tables>),
    Portable(Rate, Codebook),
}

/// A run of tiles down one column of tiles, and what to fetch meanwhile.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // portable code fetches nothing ahead
struct Source {
    first: *const u8,
    /// Bytes from one tile to the next below it.
    stride: usize,
    count: usize,
    tile_bytes: usize,
    /// Where the tiles needed next begin: side by side in eights, or one below the other.
    ahead: *const u8,
    abreast: bool,
    /// Number among those tiles of the first to fetch.
    from: usize,
}

impl Source {
    /// Tiles `a..a + count` of column `b` of a block. `along`: the next tiles needed lie beside and below all eight columns,
    /// else below this one.
    fn new(linear: &Linear<'_>, block: usize, a: usize, count: usize, b: usize, along: bool) -> Source {
        let trellis = linear.trellis();
        let tile_bytes = trellis.rate().tile_bytes();
        let stride = linear.out_features() / 16 * tile_bytes;
        // What follows: the next rows of tiles, or the top of the next column or block.
        let last = a + count == linear.in_features() / 16;
        let next = match (along, last) {
            (true, false) => (a + count) * stride + block * ACROSS * tile_bytes,
            (true, true) => (block + 1) * ACROSS * tile_bytes,
            (false, false) => (a + count) * stride + (block * ACROSS + b) * tile_bytes,
            (false, true) => (block * ACROSS + b + 1) * tile_bytes,
        };
        Source {
            first: trellis.tile(a, block * ACROSS + b).as_ptr(),
            stride,
            count,
            tile_bytes,
            ahead: trellis.bytes().as_ptr().wrapping_add(next),
            abreast: along,
            from: if along { b * count } else { 0 },
        }
    }

    /// Asks for the tile that will be needed one chunk later than tile `i`.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn prefetch(&self, i: usize) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        let n = self.from + i;
        let (down, right) = if self.abreast { (n / ACROSS, n % ACROSS) } else { (n, 0) };
        let offset = down * self.stride + right * self.tile_bytes;
        let at = self.ahead.wrapping_add(offset).cast::<i8>();
        // SAFETY: hints; any address will do.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(at);
            if self.tile_bytes > 64 {
                _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(64));
            }
            if self.tile_bytes > 128 {
                _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(128));
                _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(192));
            }
        }
    }
}

impl Kernel {
    fn new(isa: Isa, rate: Rate, codebook: Codebook) -> Kernel {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Half => {
                let tables = avx512_half::Tables::new(rate);
                let layout = Layout::new(16, &tables.positions());
                assert_eq!(layout.place, avx512_half::places(rate));
                let (decode, fused) = avx512_half::functions(rate, codebook);
                let decode = Decoder::Avx512Half(decode, fused, Box::new(tables));
                Kernel { isa, layout, decode, scale: 1.0 }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                let tables = avx512::Tables::new(rate);
                let layout = Layout::new(16, &tables.positions());
                assert!(layout.place.iter().enumerate().all(|(v, at)| usize::from(*at) == v));
                let (decode, fused) = avx512::functions(rate, codebook);
                let decode = Decoder::Avx512(decode, fused, Box::new(tables));
                Kernel { isa, layout, decode, scale: avx512::scale(codebook) }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                let (tables, layout) = avx2::Tables::new(rate, codebook);
                let (decode, fused) = avx2::functions(rate, codebook);
                let decode = Decoder::Avx2(decode, fused, Box::new(tables));
                Kernel { isa, layout, decode, scale: 1.0 }
            }
            Isa::Portable => {
                let decode = Decoder::Portable(rate, codebook);
                Kernel { isa, layout: Layout::row_major(), decode, scale: 1.0 }
            }
        }
    }

    /// The one instance for these parameters.
    fn get(isa: Isa, rate: Rate, codebook: Codebook) -> &'static Kernel {
        static KERNELS: [OnceLock<Kernel>; 4 * 17 * 3] = [const { OnceLock::new() }; 4 * 17 * 3];
        let index = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Half => 0,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => 1,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => 2,
            Isa::Portable => 3,
        };
        let index = (index * 17 + rate.half_bits()) * 3 + codebook as usize;
        KERNELS[index].get_or_init(|| Kernel::new(isa, rate, codebook))
    }

    /// Whether there is a kernel for one row that keeps the weights in registers.
    fn is_fused(&self) -> bool {
        !matches!(self.decode, Decoder::Portable(..))
    }

    /// Decodes and multiplies one row, where [`Kernel::is_fused`].
    fn fused(&self, source: &Source, x: &[f32], sums: &mut [f32]) {
        match &self.decode {
            // SAFETY: as in `decode`.
            #[cfg(target_arch = "x86_64")]
            Decoder::Avx512Half(_, fused, tables) => unsafe { fused(tables, source, x, sums) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Decoder::Avx512(_, fused, tables) => unsafe { fused(tables, source, x, sums) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Decoder::Avx2(_, fused, tables) => unsafe { fused(tables, source, x, sums) },
            _ => unreachable!(
                "no such kernel: {} tiles, {} inputs, {} sums",
                source.count,
                x.len(),
                sums.len()
            ),
        }
    }

    fn decode(&self, source: &Source, out: &mut [f32]) {
        match &self.decode {
            // SAFETY: kernels exist for instruction sets of this machine only; sources lie within their trellis.
            #[cfg(target_arch = "x86_64")]
            Decoder::Avx512Half(decode, _, tables) => unsafe { decode(tables, source, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Decoder::Avx512(decode, _, tables) => unsafe { decode(tables, source, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Decoder::Avx2(decode, _, tables) => unsafe { decode(tables, source, out) },
            Decoder::Portable(rate, codebook) => {
                for (i, out) in out.as_chunks_mut::<TILE>().0[..source.count].iter_mut().enumerate() {
                    // SAFETY: tile i lies within the trellis.
                    let tile = unsafe {
                        std::slice::from_raw_parts(source.first.add(i * source.stride), source.tile_bytes)
                    };
                    portable::decode(*rate, *codebook, tile, out);
                }
            }
        }
    }
}

/// Rotated inputs (see [`rotate_input`]) in the order in which a kernel reads them. Layers of equal `suh`, rate and codebook
/// share them.
pub struct Rows {
    kernel: &'static Kernel,
    codebook: Codebook,
    rate: Rate,
    count: usize,
    features: usize,
    /// Rows go through the kernels in groups of 8 (or 4), then 4, 2, 1: (rows, start in `data`).
    groups: Vec<(usize, usize)>,
    /// For each group: input tiles x input vectors x rows x lanes.
    data: Aligned<f32>,
}

impl Rows {
    /// Arranges `xh` (rows, features) for layers of `rate` and `codebook`, for this machine's best instruction set.
    pub fn new(xh: &[f32], features: usize, rate: Rate, codebook: Codebook) -> Result<Rows, Error> {
        Self::with_isa(Isa::best(), xh, features, rate, codebook)
    }

    /// As [`Rows::new`] for a given instruction set of this machine.
    ///
    /// # Panics
    /// If the machine lacks it.
    pub fn with_isa(
        isa: Isa,
        xh: &[f32],
        features: usize,
        rate: Rate,
        codebook: Codebook,
    ) -> Result<Rows, Error> {
        assert!(Isa::available().contains(&isa), "{isa:?} is not available");
        if features == 0 || !features.is_multiple_of(BLOCK) {
            return Err(Error::NotPadded { what: "input features", found: features });
        }
        let count = xh.len() / features;
        if xh.len() != count * features {
            return Err(Error::Length { what: "rotated input", found: xh.len(), expected: count * features });
        }
        let kernel = Kernel::get(isa, rate, codebook);
        let lanes = if kernel.layout.plain { 1 } else { kernel.layout.lanes };
        let width = kernel.layout.input_width();
        let most = if width > 32 { 4 } else { 8 }; // a group's inputs of one chunk take 16 KiB
        let mut data = Aligned::new(count * features / 16 * width);
        let (mut groups, mut first) = (vec![], 0);
        while first < count {
            let rows = 1 << (count - first).min(most).ilog2();
            let start = first * features / 16 * width;
            groups.push((rows, start));
            let to = &mut data[start..start + rows * features / 16 * width];
            for (a, to) in to.chunks_exact_mut(rows * width).enumerate() {
                for r in 0..rows {
                    let x = &xh[(first + r) * features + 16 * a..];
                    let Some(x) = x.first_chunk::<16>() else { break };
                    arrange::arrange(isa, &kernel.layout, x, &mut to[r * lanes..], rows * lanes);
                }
            }
            first += rows;
        }
        Ok(Rows { kernel, codebook, rate, count, features, groups, data })
    }

    /// Number of rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Input features of a row.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Inputs of a group for input tiles `a..a + count`.
    fn inputs(&self, (rows, start): (usize, usize), a: usize, count: usize) -> &[f32] {
        let width = rows * self.kernel.layout.input_width();
        &self.data[start + a * width..start + (a + count) * width]
    }
}

impl Linear<'_> {
    /// Number of [`BLOCK`]s of output features.
    pub fn blocks(&self) -> usize {
        self.out_features() / BLOCK
    }

    /// y = (xh What P) * svh for a range of output blocks: `y[block][row][128]`, the first index counted from
    /// `blocks.start`. Weights are exact, sums are float32. A row's bits depend on that row alone and a block's not on the
    /// range, so callers may split both as they like. Runs on the calling thread.
    pub fn multiply(&self, rows: &Rows, blocks: Range<usize>, y: &mut [f32]) -> Result<(), Error> {
        if (rows.rate, rows.codebook, rows.features)
            != (self.trellis().rate(), self.codebook(), self.in_features())
        {
            return Err(Error::OtherLayer);
        }
        if blocks.start > blocks.end || blocks.end > self.blocks() {
            return Err(Error::Length { what: "output blocks", found: blocks.end, expected: self.blocks() });
        }
        let expected = blocks.len() * rows.count * BLOCK;
        if y.len() != expected {
            return Err(Error::Length { what: "y", found: y.len(), expected });
        }
        if rows.count == 0 {
            return Ok(());
        }
        let mut work = Work::new(rows);
        for (block, y) in blocks.zip(y.chunks_exact_mut(rows.count * BLOCK)) {
            let mut svh = [0f32; BLOCK];
            crate::hadamard::widen(&self.svh()[2 * BLOCK * block..][..2 * BLOCK], &mut svh);
            let mut rest = y;
            // Large groups come first, so that batches hold whole ones.
            for groups in rows.groups.chunks(BATCH / rows.groups[0].0) {
                let count: usize = groups.iter().map(|g| g.0).sum();
                let (y, behind) = std::mem::take(&mut rest).split_at_mut(count * BLOCK);
                rest = behind;
                work.block(self, rows, groups, block);
                for (r, y) in y.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                    work.collect(rows.kernel, count, r, y);
                    rotate_output(y, &svh);
                }
            }
        }
        WORK.set(Some(work));
        Ok(())
    }

    /// y = x W for `x` (rows, in), row-major like the result, on the caller's rayon pool.
    pub fn forward(&self, x: &[f32], arithmetic: Arithmetic) -> Result<Vec<f32>, Error> {
        let mut xh = vec![0.0; x.len()];
        rotate_input(x, self.suh(), arithmetic, &mut xh)?;
        let rows = Rows::new(&xh, self.in_features(), self.trellis().rate(), self.codebook())?;
        let mut blocks = vec![0.0; rows.count * self.out_features()];
        if rows.count > 0 {
            blocks
                .par_chunks_mut(rows.count * BLOCK)
                .enumerate()
                .try_for_each(|(i, y)| self.multiply(&rows, i..i + 1, y))?;
        }
        Ok(row_major(&blocks, rows.count))
    }
}

/// `y[block][row][128]` as [`Linear::multiply`] writes it, in (rows, out) order.
pub fn row_major(y: &[f32], rows: usize) -> Vec<f32> {
    if rows <= 1 {
        return y.to_vec();
    }
    let columns = y.len() / rows;
    let mut out = vec![0.0; y.len()];
    for (block, y) in y.chunks_exact(rows * BLOCK).enumerate() {
        for (row, y) in y.chunks_exact(BLOCK).enumerate() {
            out[row * columns + block * BLOCK..][..BLOCK].copy_from_slice(y);
        }
    }
    out
}

/// Buffers of one thread, as large as its products so far needed.
struct Work {
    tiles: Aligned<f32>,
    /// across x rows x sums, for one block.
    sums: Aligned<f32>,
}

thread_local! {
    /// A thread's last buffers: for small layers new ones would cost more than the product.
    static WORK: Cell<Option<Work>> = const { Cell::new(None) };
}

impl Work {
    fn new(rows: &Rows) -> Work {
        let sums = ACROSS * rows.count.min(BATCH) * TILE;
        let tiles = match rows.count {
            1 if rows.kernel.is_fused() => 0,
            ..=FEW => CHUNK,
            _ => CHUNK.max(WIDE * CHUNK / 2), // the last batch may have few rows
        };
        let large = |w: &Work| w.tiles.len() >= tiles * TILE && w.sums.len() >= sums;
        WORK.take()
            .filter(large)
            .unwrap_or_else(|| Work { tiles: Aligned::new(tiles * TILE), sums: Aligned::new(sums) })
    }

    /// Sums of some rows over all inputs, for one block of outputs.
    fn block(&mut self, linear: &Linear<'_>, rows: &Rows, groups: &[(usize, usize)], block: usize) {
        let kernel = rows.kernel;
        let high = linear.in_features() / 16;
        let batch: usize = groups.iter().map(|g| g.0).sum();
        self.sums[..ACROSS * batch * TILE].fill(0.0);
        let fused = batch == 1 && kernel.is_fused();
        // Few rows: along the rows of tiles, as they lie in memory. Many: down a few columns, whose sums and inputs stay
        // in the cache; memory is no limit then.
        let along = batch <= FEW;
        let (across, depth) = match (fused, along) {
            (true, _) => (1, FUSED_CHUNK),
            (_, true) => (1, CHUNK),
            _ => (WIDE, CHUNK / 2),
        };
        let mut step = |a: usize, first: usize| {
            let count = depth.min(high - a);
            for b in first..first + across {
                let source = Source::new(linear, block, a, count, b, along);
                if fused {
                    let sums = &mut self.sums[b * TILE..(b + 1) * TILE];
                    kernel.fused(&source, rows.inputs(groups[0], a, count), sums);
                } else {
                    kernel.decode(&source, &mut self.tiles[(b - first) * count * TILE..][..count * TILE]);
                }
            }
            if fused {
                return;
            }
            let mut done = 0;
            for group in groups {
                let x = rows.inputs(*group, a, count);
                for b in first..first + across {
                    let tiles = &self.tiles[(b - first) * count * TILE..][..count * TILE];
                    let sums = &mut self.sums[(b * batch + done) * TILE..][..group.0 * TILE];
                    apply::apply(kernel.isa, &kernel.layout, tiles, x, group.0, sums);
                }
                done += group.0;
            }
        };
        let (chunks, columns) = ((0..high).step_by(depth), (0..ACROSS).step_by(across));
        if along {
            chunks.for_each(|a| columns.clone().for_each(|first| step(a, first)));
        } else {
            columns.for_each(|first| chunks.clone().for_each(|a| step(a, first)));
        }
    }

    /// The 128 column sums of row `r` of a batch of `rows`, times the kernel's scale.
    fn collect(&self, kernel: &Kernel, rows: usize, r: usize, z: &mut [f32; BLOCK]) {
        let sums = self.sums.as_chunks::<TILE>().0.iter().skip(r).step_by(rows);
        for (z, sums) in z.as_chunks_mut::<16>().0.iter_mut().zip(sums) {
            *z = kernel.layout.columns(sums).map(|sum| sum * kernel.scale);
        }
    }
}
