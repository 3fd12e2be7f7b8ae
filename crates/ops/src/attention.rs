//! Sparse attention over window and compressed entries, with sinks [§2.7].

use numerics::quantise::{self, fp8_row_bytes, kv_row_bytes};

use crate::{Backend, Data, DeviceError, Host, Mode, cache::generated_cache, registry::*};

/// Slots that one step of the online softmax takes.
pub const SLOT_BLOCK: usize = 64;

/// The window of the queries: the ring of earlier positions and the rows of this call, which are not yet in it.
pub struct Window<'a, T> {
    /// Stored rows, slot = position mod slots.
    pub ring: &'a T,
    /// Stored rows of positions `base`, `base + 1`, ….
    pub fresh: &'a T,
    /// Position of the first fresh row.
    pub base: u32,
    /// Positions a query sees, itself included.
    pub size: usize,
}

/// The compressed entries that the queries chose.
pub struct Compressed<'a, T> {
    /// Stored entries; or bf16 values `[n, dim]`, which no cache of a model holds but another implementation's keys are.
    pub cache: &'a T,
    /// `[T, k]`, ascending, then -1.
    pub topk: &'a T,
}

/// One query over slots of decoded keys `[slots, dim]`: online softmax per head in blocks of [`SLOT_BLOCK`].
///
/// `valid[j]` false is an empty slot. In `source` the probabilities are rounded to bf16, against the running maximum,
/// before the value product.
pub fn attend(
    mode: Mode,
    q: &[f32],
    dim: usize,
    panel: &[f32],
    valid: &[bool],
    sinks: &[f32],
    out: &mut [f32],
) {
    attend_by(f32::exp, mode, q, dim, panel, valid, sinks, out);
}

/// [`attend`] with another exponential.
pub fn attend_by(
    exp: impl Fn(f32) -> f32,
    mode: Mode,
    q: &[f32],
    dim: usize,
    panel: &[f32],
    valid: &[bool],
    sinks: &[f32],
    out: &mut [f32],
) {
    let scale = (dim as f64).powf(-0.5) as f32;
    for (h, sink) in sinks.iter().enumerate() {
        let q = &q[h * dim..][..dim];
        let (mut m, mut l, mut o) = (-1e30f32, 0.0f32, vec![0.0f32; dim]);
        for (block, flags) in valid.chunks(SLOT_BLOCK).enumerate() {
            let first = block * SLOT_BLOCK;
            let scores: Vec<f32> = flags
                .iter()
                .enumerate()
                .map(|(j, ok)| {
                    let k = &panel[(first + j) * dim..][..dim];
                    let dot: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    if *ok { dot as f32 * scale } else { f32::NEG_INFINITY }
                })
                .collect();
            let next = scores.iter().fold(m, |a, b| a.max(*b));
            let alpha = exp(m - next);
            l *= alpha;
            o.iter_mut().for_each(|v| *v *= alpha);
            for (j, s) in scores.iter().enumerate() {
                let p = exp(s - next);
                l += p;
                let p = mode.bf16(p);
                let k = &panel[(first + j) * dim..][..dim];
                if p != 0.0 {
                    o.iter_mut().zip(k).for_each(|(o, k)| *o += p * k);
                }
            }
            m = next;
        }
        l += exp(sink - m);
        for (out, v) in out[h * dim..][..dim].iter_mut().zip(&o) {
            *out = mode.bf16(v / l);
        }
    }
}

/// Decodes the slots of query row `t` at position `p`: `size` window columns, oldest first, then the chosen entries.
/// Empty columns keep their place, so that block borders depend on the position alone.
pub fn gather_slots(
    window: &Window<'_, Host>,
    compressed: Option<&Compressed<'_, Host>>,
    t: usize,
    p: u32,
    dim: usize,
) -> (Vec<f32>, Vec<bool>) {
    let chosen: &[i32] = compressed.map_or(&[], |c| {
        let k = c.topk.width();
        &c.topk.as_i32()[t * k..][..k]
    });
    let columns = window.size + chosen.len();
    let (mut panel, mut valid) = (vec![0.0; columns * dim], vec![false; columns]);
    let slots = window.ring.rows();
    let oldest = (p + 1).saturating_sub(window.size as u32);
    for (c, s) in (oldest..=p).enumerate() {
        let row = if s >= window.base {
            window.fresh.code_row((s - window.base) as usize)
        } else {
            window.ring.code_row(s as usize % slots)
        };
        quantise::load_fp8(row, &mut panel[c * dim..][..dim]);
        valid[c] = true;
    }
    if let Some(compressed) = compressed {
        for (c, j) in chosen.iter().enumerate() {
            if let Ok(j) = usize::try_from(*j) {
                let c = window.size + c;
                let to = &mut panel[c * dim..][..dim];
                match compressed.cache.data() {
                    Data::F32(_) => to.copy_from_slice(compressed.cache.row(j)),
                    _ => quantise::load_kv(compressed.cache.code_row(j), to),
                }
                valid[c] = true;
            }
        }
    }
    (panel, valid)
}

/// Registry entry of sparse attention.
pub struct SparseAttention;

impl Operator for SparseAttention {
    const SPEC: Spec = Spec {
        name: "sparse_attention",
        section: "2.7",
        contract: "q [T, heads*d], window rows (ring and fresh codes), compressed entries and their chosen indices, \
                   sinks [heads], position [T] -> o [T, heads*d]; online softmax in blocks of 64 slots; entries may \
                   be given as bf16 values [n, d]; source: probabilities bf16 before the value product, result bf16",
        exact: Tolerance::nrms(2e-6, "fp32 accumulation order of both products, exp of 1 ulp"),
        source: Tolerance::nrms(
            5e-4,
            "a last-bit change of a score flips bf16 roundings of p and of the result",
        ),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        let (d, base) = (g.head_dim, 2 * g.window as i32 + 5);
        let slots = g.window + 5;
        let ring = generated_cache(&c, "ring", slots, d, fp8_row_bytes(d), quantise::store_fp8);
        let fresh = generated_cache(&c, "fresh", rows, d, fp8_row_bytes(d), quantise::store_fp8);
        let cache = generated_cache(&c, "cache", g.entries, d, kv_row_bytes(d), quantise::store_kv);
        let (s, k) = (c.stream("topk"), g.topk);
        let mut topk = Vec::with_capacity(rows * k);
        for r in 0..rows {
            let scores: Vec<f32> =
                (0..g.entries).map(|j| s.uniform((r * g.entries + j) as u64) as f32).collect();
            let mut row = vec![-1; k];
            // Every third row has empty places at its end.
            let n = if r % 3 == 1 { k / 2 } else { k };
            crate::indexer::topk_row(&scores, &mut row[..n]);
            topk.extend(row);
        }
        c.normal("q", &[g.heads * d], 1.0);
        c.row_input("topk", Host::i32(&[rows, k], topk));
        c.row_input("position", Host::i32(&[rows], (0..rows as i32).map(|r| base + r).collect()));
        c.row_input("early", Host::i32(&[rows], (0..rows as i32).collect()));
        c.shared("ring", ring).shared("fresh", fresh).shared("cache", cache);
        c.shared_normal("values", &[g.entries, d], 1.0, 0.0);
        c.shared("base", Host::i32(&[2], vec![base, g.window as i32]));
        c.shared_normal("sinks", &[g.heads], 1.0, 0.0);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let (q, ring, fresh) = (c.buf(b, "q")?, c.buf(b, "ring")?, c.buf(b, "fresh")?);
        let (cache, topk, sinks) = (c.buf(b, "cache")?, c.buf(b, "topk")?, c.buf(b, "sinks")?);
        let base = c.u32s("base");
        let window = Window { ring: &ring, fresh: &fresh, base: base[0], size: base[1] as usize };
        let compressed = Compressed { cache: &cache, topk: &topk };
        let o = b.sparse_attention(&q, &window, Some(&compressed), &sinks, &c.u32s("position"));
        // The start of a text: fewer positions than the window has columns, and no entry yet.
        let start = Window { base: 0, ..window };
        let early = b.sparse_attention(&q, &start, None, &sinks, &c.u32s("early"));
        // A list of nothing but entries, with gaps, that are given as values.
        let (values, none) = (c.buf(b, "values")?, Window { size: 0, ..window });
        let plain = Compressed { cache: &values, topk: &topk };
        let plain = b.sparse_attention(&q, &none, Some(&plain), &sinks, &c.u32s("position"));
        Ok(vec![("o", b.read(&o)?), ("early", b.read(&early)?), ("plain", b.read(&plain)?)])
    }
}

/// The reference of [`Backend::sparse_attention`].
pub fn sparse_attention(
    mode: Mode,
    q: &Host,
    window: &Window<'_, Host>,
    compressed: Option<&Compressed<'_, Host>>,
    sinks: &[f32],
    positions: &[u32],
) -> Host {
    let dim = q.width() / sinks.len();
    let mut out = vec![0.0; q.rows() * q.width()];
    for (t, p) in positions.iter().enumerate() {
        let (panel, valid) = gather_slots(window, compressed, t, *p, dim);
        attend(mode, q.row(t), dim, &panel, &valid, sinks, &mut out[t * q.width()..][..q.width()]);
    }
    Host::f32(q.shape(), out)
}
