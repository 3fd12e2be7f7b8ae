//! Pooling, index scores, candidates and the choice of entries.

use numerics::quantise::fp4_row_bytes;
use ops::blocks::Candidates;

use crate::{Buf, Device, Gpu, record::u32_of};

/// Keys of a threadgroup; most values of a query and most heads, as in indexer.metal.
const KEYS: usize = 64;
const QUERY: usize = 4096;
const HEADS: usize = 64;
const DIM: usize = 128;
/// Values beyond which a choice takes the largest threadgroup.
const MANY: usize = 4096;

#[repr(C)]
struct Width {
    width: u32,
}

#[repr(C)]
struct ScoreParams {
    heads: u32,
    dim: u32,
    n: u32,
    stride: u32,
    factor: f32,
    raw: u32,
}

#[repr(C)]
struct BlockParams {
    n: u32,
    block: u32,
    blocks: u32,
}

#[repr(C)]
struct SelectParams {
    n: u32,
    k: u32,
    each: u32,
}

#[repr(C)]
struct ChooseParams {
    n: u32,
    k: u32,
    each: u32,
    block: u32,
    blocks: u32,
    keep: u32,
    each_block: u32,
    masked: u32,
}

/// Threads of a choice among `n` values.
fn selectors(n: usize) -> usize {
    if n > MANY { 1024 } else { 256 }
}

impl<D: Device> Gpu<D> {
    /// Latents of pairs.
    pub(crate) fn pooled(&self, kv: &Buf<D>, score: &Buf<D>) -> Buf<D> {
        let (rows, width) = (kv.rows(), kv.shape()[2]);
        assert_eq!((kv.shape(), kv.shape()[1]), (score.shape(), 2), "pairs");
        let latent = self.values(&[rows, width]);
        let bindings = [kv, score, &latent].map(Buf::binding);
        let (params, grid) = (Width { width: u32_of(width) }, [width.div_ceil(256), rows, 1]);
        self.launch("pool_pairs", &[self.rounding()], &bindings, &params, grid, [256, 1, 1]);
        latent
    }

    /// Scores over the first `n` keys; `raw` queries come before their quantiser.
    pub(crate) fn scored(
        &self,
        q: &Buf<D>,
        raw: bool,
        w: &Buf<D>,
        keys: &Buf<D>,
        n: usize,
        visible: &[u32],
    ) -> Buf<D> {
        let (rows, heads) = (q.rows(), w.width());
        let dim = q.width() / heads;
        let fits = heads <= HEADS && dim <= DIM && dim.is_multiple_of(32) && heads * dim <= QUERY;
        assert!(fits && n <= keys.rows() && visible.len() == rows, "{heads} index heads of {dim}");
        assert_eq!(keys.width(), fp4_row_bytes(dim), "bytes of a key");
        let score = self.values(&[rows, n]);
        let params = ScoreParams {
            heads: u32_of(heads),
            dim: u32_of(dim),
            n: u32_of(n),
            stride: u32_of(keys.width()),
            factor: ((heads * dim) as f64).powf(-0.5) as f32,
            raw: raw.into(),
        };
        let visible = self.words(visible);
        let bindings = [q, w, keys, &visible, &score].map(Buf::binding);
        let grid = [n.div_ceil(KEYS), rows, 1];
        self.launch("index_scores", &[self.rounding()], &bindings, &params, grid, [256, 1, 1]);
        score
    }

    /// Kept blocks of every row.
    pub(crate) fn candidate_blocks(
        &self,
        scores: &Buf<D>,
        visible: &[u32],
        block: usize,
        keep: usize,
    ) -> Buf<D> {
        let (rows, n) = (scores.rows(), scores.width());
        let blocks = n.div_ceil(block);
        let best = self.values(&[rows, blocks]);
        let params = BlockParams { n: u32_of(n), block: u32_of(block), blocks: u32_of(blocks) };
        let bindings = [scores.binding(), self.words(visible).binding(), best.binding()];
        let grid = [blocks.div_ceil(256), rows, 1];
        self.launch("block_best", &[self.rounding()], &bindings, &params, grid, [256, 1, 1]);
        let mask = self.codes(&[rows, blocks]);
        self.select("select_mask", &best, &mask, keep);
        mask
    }

    fn select(&self, kernel: &'static str, values: &Buf<D>, to: &Buf<D>, k: usize) {
        let (rows, n) = (values.rows(), values.width());
        let threads = selectors(n);
        let params = SelectParams { n: u32_of(n), k: u32_of(k), each: u32_of(n.div_ceil(threads)) };
        let bindings = [values.binding(), to.binding()];
        self.launch(kernel, &[self.rounding()], &bindings, &params, [rows, 1, 1], [threads, 1, 1]);
    }

    /// Scores with minus infinity outside kept blocks.
    pub(crate) fn masked(&self, scores: &Buf<D>, mask: &Buf<D>, block: usize) -> Buf<D> {
        let (rows, n) = (scores.rows(), scores.width());
        let blocks = n.div_ceil(block);
        assert_eq!(mask.shape(), [rows, blocks], "a mask of blocks");
        let out = self.values(scores.shape());
        let params = BlockParams { n: u32_of(n), block: u32_of(block), blocks: u32_of(blocks) };
        let bindings = [scores, mask, &out].map(Buf::binding);
        let grid = [n.div_ceil(256), rows, 1];
        self.launch("mask_scores", &[self.rounding()], &bindings, &params, grid, [256, 1, 1]);
        out
    }

    /// Places of the highest scores, ascending, then -1.
    pub(crate) fn highest(&self, scores: &Buf<D>, k: usize) -> Buf<D> {
        let k = k.min(scores.width());
        let index = self.indices(&[scores.rows(), k]);
        self.select("select_places", scores, &index, k);
        index
    }

    /// Mask of the kept blocks where they are chosen here, and places of the highest scores, in one launch.
    pub(crate) fn chosen(
        &self,
        scores: &Buf<D>,
        visible: &[u32],
        block: usize,
        candidates: Candidates<'_, Buf<D>>,
        k: usize,
    ) -> (Option<Buf<D>>, Buf<D>) {
        let (rows, n) = (scores.rows(), scores.width());
        let (blocks, k) = (n.div_ceil(block), k.min(n));
        let index = self.indices(&[rows, k]);
        let threads = selectors(n);
        let (keep, masked) = match candidates {
            Candidates::Choose(keep) => (keep, false),
            Candidates::Kept(_) => (0, true),
            Candidates::All => (0, false),
        };
        let made = (keep > 0).then(|| self.codes(&[rows, blocks]));
        let mask = match candidates {
            Candidates::Kept(mask) => Some(mask),
            _ => made.as_ref(),
        };
        if let Some(mask) = mask {
            assert_eq!(mask.shape(), [rows, blocks], "a mask of blocks");
        }
        let scratch = |wanted: bool, width: usize| self.values(&[if wanted { rows * width } else { 1 }]);
        let params = ChooseParams {
            n: u32_of(n),
            k: u32_of(k),
            each: u32_of(n.div_ceil(threads)),
            block: u32_of(block),
            blocks: u32_of(blocks),
            keep: u32_of(keep),
            each_block: u32_of(blocks.div_ceil(threads)),
            masked: masked.into(),
        };
        let bindings = [
            scores.binding(),
            self.words(visible).binding(),
            // Without blocks nothing touches it.
            mask.unwrap_or(scores).binding(),
            scratch(keep > 0, blocks).binding(),
            scratch(masked, n).binding(),
            index.binding(),
        ];
        let grid = [if keep > 0 { 2 } else { 1 }, rows, 1];
        self.launch("choose_entries", &[self.rounding()], &bindings, &params, grid, [threads, 1, 1]);
        (made, index)
    }
}
