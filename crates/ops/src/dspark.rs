//! Pieces of the DSpark draft head [§4].

use numerics::quantise::{self, fp8_row_bytes};

use crate::{
    Backend, DeviceError, Host, Mode, attention::attend, cache::generated_cache, hyper::STREAMS, registry::*,
};

/// Plain mean over the streams of one row.
pub fn stream_mean_row(mode: Mode, streams: &[f32], out: &mut [f32]) {
    let d = out.len();
    for (k, o) in out.iter_mut().enumerate() {
        let sum: f32 = (0..STREAMS).map(|i| streams[i * d + k]).sum();
        *o = mode.bf16(sum / STREAMS as f32);
    }
}

/// Every query of a draft block attends the window of positions that ends at `position` and the whole block.
pub fn draft_attention(
    mode: Mode,
    q: &Host,
    ring: &Host,
    window: usize,
    block: &Host,
    sinks: &[f32],
    position: u32,
) -> Host {
    let dim = q.width() / sinks.len();
    let columns = window + block.rows();
    let (mut panel, mut valid) = (vec![0.0; columns * dim], vec![false; columns]);
    let oldest = (position + 1).saturating_sub(window as u32);
    for (c, p) in (oldest..=position).enumerate() {
        quantise::load_fp8(ring.code_row(p as usize % ring.rows()), &mut panel[c * dim..][..dim]);
        valid[c] = true;
    }
    for b in 0..block.rows() {
        let c = window + b;
        quantise::load_fp8(block.code_row(b), &mut panel[c * dim..][..dim]);
        valid[c] = true;
    }
    let mut out = vec![0.0; q.rows() * q.width()];
    for (t, out) in out.chunks_mut(q.width()).enumerate() {
        attend(mode, q.row(t), dim, &panel, &valid, sinks, out);
    }
    Host::f32(q.shape(), out)
}

/// Joins tensors of equal rows column by column.
pub fn concat_cols(parts: &[&Host]) -> Host {
    let rows = parts[0].rows();
    let width = parts.iter().map(|p| p.width()).sum();
    let mut out = Vec::with_capacity(rows * width);
    for t in 0..rows {
        parts.iter().for_each(|p| out.extend_from_slice(p.row(t)));
    }
    Host::f32(&[rows, width], out)
}

/// Registry entry of the mean over streams.
pub struct StreamMean;

impl Operator for StreamMean {
    const SPEC: Spec = Spec {
        name: "stream_mean",
        section: "4",
        contract: "X [T, 4, d] -> x [T, d], plain mean; source: result bf16",
        exact: Tolerance::nrms(2e-7, "summation order of four"),
        source: Tolerance::nrms(2e-4, "summation order of four flips isolated bf16 roundings"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("streams", &[STREAMS, g.hidden], 1.0);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        Ok(vec![("x", b.read(&b.stream_mean(&c.buf(b, "streams")?))?)])
    }
}

/// Registry entry of the draft block's attention.
pub struct DraftAttention;

impl Operator for DraftAttention {
    const SPEC: Spec = Spec {
        name: "draft_attention",
        section: "4",
        contract: "q [T, heads*d], ring codes, block codes [b, ..], sinks, position -> o [T, heads*d]: every query sees \
                   the window that ends at position and all rows of the block",
        exact: Tolerance::nrms(2e-6, "fp32 accumulation order of both products, exp of 1 ulp"),
        source: Tolerance::nrms(
            5e-4,
            "a last-bit change of a score flips bf16 roundings of p and of the result",
        ),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        let (d, slots) = (g.head_dim, g.window + g.draft_block);
        let ring = generated_cache(&c, "ring", slots, d, fp8_row_bytes(d), quantise::store_fp8);
        let block = generated_cache(&c, "block", g.draft_block, d, fp8_row_bytes(d), quantise::store_fp8);
        c.normal("q", &[g.heads * d], 1.0).shared("ring", ring).shared("block", block);
        c.shared_normal("sinks", &[g.heads], 1.0, 0.0);
        c.shared("window", Host::i32(&[1], vec![g.window as i32]));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let (q, ring, block, sinks) =
            (c.buf(b, "q")?, c.buf(b, "ring")?, c.buf(b, "block")?, c.buf(b, "sinks")?);
        let window = c.u32s("window")[0] as usize;
        let mut outputs = Vec::new();
        for (name, position) in [("early", 3), ("late", 1000)] {
            outputs.push((name, b.read(&b.draft_attention(&q, &ring, window, &block, &sinks, position))?));
        }
        Ok(outputs)
    }
}

/// Registry entry of the sum of base logits and Markov bias.
pub struct MarkovBias;

impl Operator for MarkovBias {
    const SPEC: Spec = Spec {
        name: "markov_bias",
        section: "4",
        contract: "base [T, V] fp32, bias [T, V] fp32 -> logits [T, V]",
        exact: Tolerance::bits("one addition"),
        source: Tolerance::bits("one addition"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("base", &[g.vocab], 1.0).normal("bias", &[g.vocab], 1.0);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        Ok(vec![("logits", b.read(&b.markov_bias(&c.buf(b, "base")?, &c.buf(b, "bias")?))?)])
    }
}

/// Registry entry of the joining of columns.
pub struct ConcatCols;

impl Operator for ConcatCols {
    const SPEC: Spec = Spec {
        name: "concat_cols",
        section: "4",
        contract: "x [T, a], y [T, b] -> [T, a+b] (input of the confidence head and of main_proj)",
        exact: Tolerance::bits("a copy"),
        source: Tolerance::bits("a copy"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("x", &[g.hidden], 1.0).normal("y", &[g.markov_rank], 1.0);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        Ok(vec![("xy", b.read(&b.concat_cols(&[&c.buf(b, "x")?, &c.buf(b, "y")?]))?)])
    }
}
