//! Index scores, two-level candidates and top-k selection [§2.5, §2.6, §3.6].

use numerics::quantise::{self, fp4_row_bytes};

use crate::{Backend, DeviceError, Host, Mode, cache::generated_cache, registry::*};

/// Scores of one query against decoded keys `[n, d]`: Σ_h relu(q_h·k_j)·w_h·`factor`; −inf from `visible` on.
pub fn index_scores_row(
    mode: Mode,
    q: &[f32],
    w: &[f32],
    factor: f32,
    keys: &[f32],
    visible: usize,
    out: &mut [f32],
) {
    let heads = w.len();
    let d = q.len() / heads;
    let w: Vec<f32> = w.iter().map(|w| mode.bf16(mode.bf16(*w) * factor)).collect();
    for (j, score) in out.iter_mut().enumerate() {
        if j >= visible {
            *score = f32::NEG_INFINITY;
            continue;
        }
        let k = &keys[j * d..][..d];
        let mut sum = 0.0f32;
        for (q, w) in q.chunks(d).zip(&w) {
            let dot: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            sum += mode.bf16(mode.bf16(dot as f32).max(0.0) * w);
        }
        *score = mode.bf16(sum);
    }
}

/// Indices of the `k` highest finite scores, higher first, the lower index on ties.
pub fn highest(scores: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).filter(|j| scores[*j] > f32::NEG_INFINITY).collect();
    let by_score = |a: &usize, b: &usize| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b));
    if order.len() > k {
        order.select_nth_unstable_by(k, by_score);
        order.truncate(k);
    }
    order.sort_unstable_by(by_score);
    order
}

/// Kept blocks of one row: the `keep` with the highest maximum, the newest always.
pub fn candidates_row(scores: &[f32], visible: usize, block: usize, keep: usize, mask: &mut [u8]) {
    mask.fill(0);
    if visible == 0 {
        return;
    }
    let mut best: Vec<f32> =
        scores.chunks(block).map(|b| b.iter().copied().fold(f32::NEG_INFINITY, f32::max)).collect();
    best[(visible - 1) / block] = f32::INFINITY;
    for b in highest(&best, keep) {
        mask[b] = 1;
    }
}

/// The chosen entries of one row, ascending, then -1.
pub fn topk_row(scores: &[f32], out: &mut [i32]) {
    let mut chosen = highest(scores, out.len());
    chosen.sort_unstable();
    out.fill(-1);
    for (o, j) in out.iter_mut().zip(chosen) {
        *o = j as i32;
    }
}

/// Registry entry of the scores.
pub struct IndexScores;

impl Operator for IndexScores {
    const SPEC: Spec = Spec {
        name: "index_scores",
        section: "2.5",
        contract: "q [T, heads*d], w [T, heads], keys [n, d/2 + d/32], visible [T] -> score [T, n] = sum_h \
                   relu(q_h.k_j)*w_h/sqrt(d*heads), -inf from visible on; source: bf16 after each step",
        exact: Tolerance::nrms(1e-6, "fp32 accumulation order over d"),
        source: Tolerance::nrms(
            2e-3,
            "a last-bit change flips isolated bf16 roundings of a term or of the score",
        ),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        let visible = (0..rows).map(|r| (g.entries - (r * 7) % g.entries) as i32).collect();
        let keys = generated_cache(
            &c,
            "keys",
            g.entries,
            g.index_dim,
            fp4_row_bytes(g.index_dim),
            quantise::store_fp4,
        );
        c.normal("q", &[g.index_heads * g.index_dim], 1.0).normal("w", &[g.index_heads], 1.0);
        c.shared("keys", keys).row_input("visible", Host::i32(&[rows], visible));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let q = b.quantise_index_query(&c.buf(b, "q")?);
        let n = c.host("keys").rows();
        let scores = b.index_scores(&q, &c.buf(b, "w")?, &c.buf(b, "keys")?, n, &c.u32s("visible"));
        Ok(vec![("score", b.read(&scores)?)])
    }
}

/// Scores with few distinct values, so that ties decide often.
fn tied_scores(c: &mut Case, g: &Geometry) {
    let (rows, n) = (c.rows(), g.entries);
    let s = c.stream("scores");
    let visible: Vec<i32> = (0..rows).map(|r| (n - (r * 11) % n) as i32).collect();
    let scores =
        (0..rows * n)
            .map(|i| {
                if (i % n) as i32 >= visible[i / n] {
                    f32::NEG_INFINITY
                } else {
                    (s.word(i as u64) % 9) as f32
                }
            })
            .collect();
    c.row_input("scores", Host::f32(&[rows, n], scores)).row_input("visible", Host::i32(&[rows], visible));
}

/// Registry entry of the candidate blocks.
pub struct Candidates;

impl Operator for Candidates {
    const SPEC: Spec = Spec {
        name: "candidates",
        section: "2.6",
        contract: "scores [T, n], visible [T], block, keep -> mask [T, ceil(n/block)]: blocks with the highest \
                   maximum, the newest always; lower index on ties",
        exact: Tolerance::bits("a choice"),
        source: Tolerance::bits("a choice"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        tied_scores(&mut c, g);
        let keep = g.keep_blocks.min(g.entries / g.block / 2);
        c.shared("sizes", Host::i32(&[2], vec![g.block as i32, keep as i32]));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let sizes = c.u32s("sizes");
        let mask =
            b.candidates(&c.buf(b, "scores")?, &c.u32s("visible"), sizes[0] as usize, sizes[1] as usize);
        Ok(vec![("mask", b.read(&mask)?)])
    }
}

/// Registry entry of the candidate filter.
pub struct MaskScores;

impl Operator for MaskScores {
    const SPEC: Spec = Spec {
        name: "mask_scores",
        section: "2.6",
        contract: "scores [T, n], mask [T, blocks], block -> scores with -inf outside kept blocks",
        exact: Tolerance::bits("a choice"),
        source: Tolerance::bits("a choice"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        tied_scores(&mut c, g);
        let (s, blocks) = (c.stream("mask"), g.entries.div_ceil(g.block));
        let mask = (0..(rows * blocks) as u64).map(|i| (s.word(i) & 1) as u8).collect();
        c.row_input("mask", Host::u8(&[rows, blocks], mask));
        c.shared("block", Host::i32(&[1], vec![g.block as i32]));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let block = c.u32s("block")[0] as usize;
        Ok(vec![("scores", b.read(&b.mask_scores(&c.buf(b, "scores")?, &c.buf(b, "mask")?, block))?)])
    }
}

/// Registry entry of the selection.
pub struct TopK;

impl Operator for TopK {
    const SPEC: Spec = Spec {
        name: "topk",
        section: "2.5",
        contract: "scores [T, n], k -> index [T, min(k, n)]: the k highest finite scores, lower index on ties, \
                   ascending, then -1",
        exact: Tolerance::bits("a choice"),
        source: Tolerance::bits("a choice"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        tied_scores(&mut c, g);
        c.shared("k", Host::i32(&[1], vec![g.topk as i32]));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        Ok(vec![("index", b.read(&b.topk(&c.buf(b, "scores")?, c.u32s("k")[0] as usize))?)])
    }
}
