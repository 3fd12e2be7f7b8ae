//! Sparse attention with sinks and index scores, over cache rows as stored [§2.5, §2.7].

use std::cell::RefCell;

use crate::{
    Engine,
    kernels::{Buffer, Kernels, Online, SLOTS, Tile, Values},
    linear::INLINE,
    order::LANES,
};

/// One place in the slot list of a query.
#[derive(Clone, Copy, Debug)]
pub enum Slot<'a> {
    /// No token: takes a place in its block of 64 and nothing else.
    Empty,
    /// A window row: E4M3 codes, then E8M0 scales (`numerics::quantise::store_fp8`).
    Fp8(&'a [u8]),
    /// A compressed row: packed E2M1, then E4M3 scales (`numerics::quantise::store_kv`).
    Kv(&'a [u8]),
    /// A row of values.
    Plain(&'a [f32]),
}

/// Queries of sparse attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// `[rows, heads, dim]`.
    pub q: &'a [f32],
    /// Values per head.
    pub dim: usize,
    /// One per head; their number is the number of heads.
    pub sinks: &'a [f32],
    /// Multiplies the dot products (not the sinks).
    pub scale: f32,
    /// Rounds the probabilities, against the running maximum, and the results to bf16 (mode `source`).
    pub round: bool,
}

/// Queries of the indexer.
#[derive(Clone, Copy, Debug)]
pub struct IndexQueries<'a> {
    /// `[rows, heads, dim]`.
    pub q: &'a [f32],
    /// Values per head, an even number.
    pub dim: usize,
    /// `[rows, heads]`, all factors included.
    pub w: &'a [f32],
    /// Heads.
    pub heads: usize,
    /// Rounds dot products, terms and scores to bf16 (mode `source`).
    pub round: bool,
}

/// Heads under which splitting a query over threads would decode its keys too often.
const HEADS: usize = 8;
/// Keys that are decoded at a time for a block of index queries.
const KEYS: usize = 256;
/// Index queries that share decoded keys.
const QUERIES: usize = 16;

#[derive(Default)]
struct Scratch {
    keys: Buffer,
    queries: Buffer,
    lanes: Buffer,
    scores: Buffer,
    sums: Buffer,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Disjoint parts of one output, written from several threads.
struct Out(*mut f32);
// SAFETY: each task of a call writes elements that no other task touches.
unsafe impl Sync for Out {}

impl Out {
    /// # Safety
    /// The range lies in the output and belongs to this task alone.
    unsafe fn part<'a>(&self, start: usize, len: usize) -> &'a mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

/// Floats from one row of `dim` values to the next: whole lane sets, and one more so that rows do not all fall into the
/// same cache sets.
fn stride(dim: usize) -> usize {
    dim.next_multiple_of(LANES) + LANES
}

/// Copies rows of `dim` values to rows of [`stride`], zeros behind.
fn spread(rows: &[f32], dim: usize, out: &mut [f32]) {
    for (o, r) in out.chunks_exact_mut(stride(dim)).zip(rows.chunks_exact(dim)) {
        o[..dim].copy_from_slice(r);
        o[dim..].fill(0.0);
    }
}

/// Dot products of `m` queries with `n` keys (at most [`SLOTS`]), rows of [`stride`]: `out` is `[m][SLOTS]`.
fn products(
    k: &Kernels,
    q: &[f32],
    m: usize,
    keys: &[f32],
    n: usize,
    dim: usize,
    lanes: &mut Buffer,
    out: &mut [f32],
) {
    let stride = stride(dim);
    let [tm, tn] = k.tile_rows;
    assert!(m * stride <= q.len() && n * stride <= keys.len() && n <= SLOTS && m * SLOTS <= out.len());
    let lanes = lanes.take(tm * SLOTS * LANES);
    for i in (0..m).step_by(tm) {
        let rows = tm.min(m - i);
        for j in (0..n).step_by(tn) {
            let tile = Tile {
                x: q[i * stride..].as_ptr(),
                x_stride: stride,
                w: keys[j * stride..].as_ptr(),
                w_stride: stride,
                steps: dim.div_ceil(LANES),
                acc: lanes[j * LANES..].as_mut_ptr(),
                acc_stride: SLOTS * LANES,
                first: true,
            };
            // SAFETY: the machine has these instructions; rows and lanes lie in the buffers.
            unsafe { (k.tile)(&tile, rows, tn.min(n - j)) };
        }
        for r in 0..rows {
            let out = &mut out[(i + r) * SLOTS..][..n];
            // SAFETY: as above; 16 lanes per output.
            unsafe { (k.reduce)(lanes[r * SLOTS * LANES..].as_ptr(), out) };
        }
    }
}

impl Engine {
    /// Attention of every query over its own slot list, online softmax in blocks of 64 slots: `slots(row)` gives the list
    /// of a query, `out` is `[rows, heads, dim]`. A query without a valid slot gives zeros.
    pub fn attention<'s>(
        &self,
        a: Attention,
        slots: impl Fn(usize) -> Vec<Slot<'s>> + Sync,
        out: &mut [f32],
    ) {
        let (heads, dim) = (a.sinks.len(), a.dim);
        if heads * dim == 0 || a.q.is_empty() {
            return;
        }
        assert!(a.q.len().is_multiple_of(heads * dim), "queries of {heads} heads of {dim}");
        assert_eq!(a.q.len(), out.len(), "attention results");
        let rows = a.q.len() / (heads * dim);
        // Few queries: split their heads too.
        let parts = if self.threads() == 1 || rows >= 2 * self.threads() {
            1
        } else {
            (2 * self.threads()).div_ceil(rows).min(heads.div_ceil(HEADS))
        };
        let per = heads.div_ceil(parts);
        let out = Out(out.as_mut_ptr());
        let task = |i: usize| {
            let (row, h) = (i / parts, i % parts * per);
            let n = per.min(heads.saturating_sub(h));
            if n == 0 {
                return;
            }
            let start = (row * heads + h) * dim;
            // SAFETY: the tasks partition rows and heads.
            let out = unsafe { out.part(start, n * dim) };
            let part = Attention { q: &a.q[start..][..n * dim], sinks: &a.sinks[h..][..n], ..a };
            SCRATCH.with_borrow_mut(|s| attend(self.kernels(), part, &slots(row), s, out));
        };
        if self.threads() == 1 || a.q.len() * slots(0).len() / 10 < INLINE {
            (0..rows * parts).for_each(task);
        } else {
            self.par_rows(rows * parts, task);
        }
    }

    /// Index scores of every query for `n` stored keys (rows of `numerics::quantise::store_fp4`, one after the other): the
    /// sum over heads of relu(q·k) w; −inf from `visible[row]` on. `out` is `[rows, n]`.
    pub fn index_scores(&self, a: IndexQueries, keys: &[u8], n: usize, visible: &[usize], out: &mut [f32]) {
        let IndexQueries { dim, heads, .. } = a;
        let rows = visible.len();
        let bytes = numerics::quantise::fp4_row_bytes(dim);
        assert_eq!(a.q.len(), rows * heads * dim, "index queries of {heads} heads of {dim}");
        assert_eq!(a.w.len(), rows * heads, "index head weights");
        assert_eq!(out.len(), rows * n, "index scores");
        assert!(keys.len() >= n * bytes, "{} bytes of {n} keys", keys.len());
        let (blocks, parts) = (n.div_ceil(KEYS), rows.div_ceil(QUERIES));
        let out = Out(out.as_mut_ptr());
        let task = |i: usize| {
            let (j0, r0) = (i / parts * KEYS, i % parts * QUERIES);
            let (jn, rn) = (KEYS.min(n - j0), QUERIES.min(rows - r0));
            // SAFETY: the tasks partition rows and keys.
            let out_of = |r: usize| unsafe { out.part(r * n + j0, jn) };
            let seen = visible[r0..r0 + rn].iter().max().map_or(0, |v| v.saturating_sub(j0)).min(jn);
            let keys = &keys[j0 * bytes..][..seen * bytes];
            SCRATCH.with_borrow_mut(|s| {
                let queries = r0..r0 + rn;
                score(
                    self.kernels(),
                    a,
                    queries,
                    keys,
                    |r| (visible[r].saturating_sub(j0).min(jn), out_of(r)),
                    s,
                );
            });
        };
        if rows * n * heads * dim / 20 < INLINE {
            (0..blocks * parts).for_each(task);
        } else {
            self.par_rows(blocks * parts, task);
        }
    }

    /// `numerics::quantise::load_fp8`.
    pub fn load_fp8(&self, row: &[u8], out: &mut [f32]) {
        // SAFETY: the kernels are of an instruction set that the machine has.
        unsafe { (self.kernels().load_fp8)(row, out) }
    }

    /// `numerics::quantise::load_kv`.
    pub fn load_kv(&self, row: &[u8], out: &mut [f32]) {
        // SAFETY: as above.
        unsafe { (self.kernels().load_kv)(row, out) }
    }

    /// `numerics::quantise::load_fp4`.
    pub fn load_fp4(&self, row: &[u8], out: &mut [f32]) {
        // SAFETY: as above.
        unsafe { (self.kernels().load_fp4)(row, out) }
    }

    /// Σ a b, in 16 lanes.
    pub fn dot(&self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "dot product");
        // SAFETY: as above.
        unsafe { (self.kernels().dot)(a, b) }
    }

    /// Σ x², in 16 lanes.
    pub fn sum_squares(&self, x: &[f32]) -> f32 {
        self.dot(x, x)
    }

    /// y += `alpha` x, each a fused multiply-add.
    pub fn axpy(&self, alpha: f32, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "sum of vectors");
        // SAFETY: as above.
        unsafe { (self.kernels().axpy)(alpha, x, y) }
    }
}

/// Some heads of one query.
fn attend(k: &Kernels, a: Attention, slots: &[Slot], scratch: &mut Scratch, out: &mut [f32]) {
    let (heads, dim, stride) = (a.sinks.len(), a.dim, stride(a.dim));
    let sets = dim.div_ceil(LANES);
    let queries = scratch.queries.take(heads * stride);
    spread(a.q, dim, queries);
    let sums = scratch.sums.take(heads * sets * LANES);
    sums.fill(0.0);
    let scores = scratch.scores.take(heads * SLOTS);
    let keys = scratch.keys.take(SLOTS * stride);
    let mut state = vec![Online { max: -1e30, sum: 0.0 }; heads];
    let mut shrink = vec![0.0; heads];
    let mut any = false;
    for block in slots.chunks(SLOTS) {
        let mut valid = [false; SLOTS];
        for ((key, slot), valid) in keys.chunks_exact_mut(stride).zip(block).zip(&mut valid) {
            let (head, tail) = key.split_at_mut(dim);
            tail.fill(0.0);
            *valid = true;
            match slot {
                // SAFETY: the machine has these instructions.
                Slot::Fp8(row) => unsafe { (k.load_fp8)(row, head) },
                // SAFETY: as above.
                Slot::Kv(row) => unsafe { (k.load_kv)(row, head) },
                Slot::Plain(row) => head.copy_from_slice(row),
                Slot::Empty => {
                    head.fill(0.0);
                    *valid = false;
                }
            }
        }
        // Without a valid slot neither maximum nor sums move.
        if !valid.contains(&true) {
            continue;
        }
        any = true;
        let n = block.len();
        products(k, queries, heads, keys, n, dim, &mut scratch.lanes, scores);
        for (h, s) in scores.as_chunks_mut::<SLOTS>().0.iter_mut().enumerate() {
            // SAFETY: the machine has these instructions.
            shrink[h] = unsafe { (k.softmax)(s, &valid, a.scale, a.round, &mut state[h]) };
        }
        let [vm, vn] = k.value_rows;
        for h in (0..heads).step_by(vm) {
            for c in (0..sets).step_by(vn) {
                let values = Values {
                    p: scores[h * SLOTS..].as_ptr(),
                    shrink: shrink[h..].as_ptr(),
                    k: keys[c * LANES..].as_ptr(),
                    k_stride: stride,
                    slots: n,
                    o: sums[(h * sets + c) * LANES..].as_mut_ptr(),
                    o_stride: sets * LANES,
                };
                // SAFETY: the machine has these instructions; heads, lane sets and keys lie in the buffers.
                unsafe { (k.values)(&values, vm.min(heads - h), vn.min(sets - c)) };
            }
        }
    }
    for (h, out) in out.chunks_exact_mut(dim).enumerate() {
        let sum = state[h].sum + crate::exp::exp(a.sinks[h] - state[h].max);
        for (o, v) in out.iter_mut().zip(&sums[h * sets * LANES..]) {
            let v = if any { v / sum } else { 0.0 };
            *o = if a.round { numerics::bf16::round(v) } else { v };
        }
    }
}

/// Scores of some queries for the decoded form of `keys`; `part(row)` gives how many the row sees and its outputs.
fn score<'o>(
    k: &Kernels,
    a: IndexQueries,
    rows: std::ops::Range<usize>,
    keys: &[u8],
    part: impl Fn(usize) -> (usize, &'o mut [f32]),
    scratch: &mut Scratch,
) {
    let (heads, dim, stride) = (a.heads, a.dim, stride(a.dim));
    let bytes = numerics::quantise::fp4_row_bytes(dim);
    let decoded = scratch.keys.take(KEYS * stride);
    for (key, row) in decoded.chunks_exact_mut(stride).zip(keys.chunks_exact(bytes.max(1))) {
        // SAFETY: the machine has these instructions.
        unsafe { (k.load_fp4)(row, &mut key[..dim]) };
        key[dim..].fill(0.0);
    }
    let queries = scratch.queries.take(heads * stride);
    let products_of = scratch.scores.take(heads * SLOTS);
    for r in rows {
        let (seen, out) = part(r);
        out[seen..].fill(f32::NEG_INFINITY);
        spread(&a.q[r * heads * dim..][..heads * dim], dim, queries);
        for j in (0..seen).step_by(SLOTS) {
            let n = SLOTS.min(seen - j);
            products(k, queries, heads, &decoded[j * stride..], n, dim, &mut scratch.lanes, products_of);
            let mut scores = [0.0; SLOTS];
            // SAFETY: the machine has these instructions.
            unsafe { (k.combine)(products_of, &a.w[r * heads..][..heads], a.round, &mut scores) };
            out[j..j + n].copy_from_slice(&scores[..n]);
        }
    }
}
