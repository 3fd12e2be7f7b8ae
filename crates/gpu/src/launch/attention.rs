//! Attention of queries and of draft blocks.

use numerics::quantise::{fp8_row_bytes, kv_row_bytes};
use ops::{Compressed, RopeTable, Window};

use crate::{Binding, Buf, Device, Gpu, pending::Pending, record::u32_of};

/// Most values of a head, as in attention.metal.
const DIM: usize = 512;
/// Columns of a step of the softmax and of a threadgroup of scores, heads of a threadgroup of scores and of values, and
/// dimensions of the latter, as there.
const STEP: usize = 64;
const CHUNK: usize = 8;
const SCORED: usize = 16;
const TEAM: usize = 4;
const SLICE: usize = 64;
/// Rows whose scores and decoded columns are in memory at a time: 50 MiB at the released widths.
const ROWS: usize = 64;

#[repr(C)]
struct Params {
    heads: u32,
    dim: u32,
    window: u32,
    slots: u32,
    base: u32,
    extra: u32,
    top: u32,
    key_bytes: u32,
    entry_bytes: u32,
    columns: u32,
    scale: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ValuesParams {
    heads: u32,
    dim: u32,
    columns: u32,
    turned: u32,
    kept: u32,
    code_bytes: u32,
    slots: u32,
}

/// Window rows, their positions and the ring that they go to.
struct Kept<D: Device> {
    codes: Buf<D>,
    positions: Buf<D>,
    ring: Binding<D::Buffer>,
}

/// The second half of attention, from scores and decoded columns to results.
pub(crate) struct Values<D: Device> {
    scores: Buf<D>,
    decoded: Buf<D>,
    sinks: Buf<D>,
    out: Buf<D>,
    /// Rotation of the results.
    turns: Option<Buf<D>>,
    kept: Option<Kept<D>>,
    params: ValuesParams,
}

impl<D: Device> Gpu<D> {
    /// Every query over its window and its chosen entries.
    pub(crate) fn attended(
        &self,
        q: &Buf<D>,
        window: &Window<'_, Buf<D>>,
        compressed: Option<&Compressed<'_, Buf<D>>>,
        sinks: &Buf<D>,
        positions: &[u32],
    ) -> Buf<D> {
        self.attend(q, window, 0, compressed, sinks, positions)
    }

    /// Every query over the window that ends at `position` and the whole block.
    pub(crate) fn draft_attended(
        &self,
        q: &Buf<D>,
        ring: &Buf<D>,
        size: usize,
        block: &Buf<D>,
        sinks: &Buf<D>,
        position: u32,
    ) -> Buf<D> {
        // No position of the window lies in `fresh`.
        let window = Window { ring, fresh: block, base: u32::MAX, size };
        self.attend(q, &window, block.rows(), None, sinks, &vec![position; q.rows()])
    }

    fn attend(
        &self,
        q: &Buf<D>,
        window: &Window<'_, Buf<D>>,
        extra: usize,
        compressed: Option<&Compressed<'_, Buf<D>>>,
        sinks: &Buf<D>,
        positions: &[u32],
    ) -> Buf<D> {
        let (rows, heads) = (q.rows(), sinks.len());
        let dim = q.width() / heads;
        assert!(dim <= DIM && dim.is_multiple_of(16), "heads of {dim} values");
        assert_eq!(window.ring.width(), fp8_row_bytes(dim), "bytes of a window row");
        assert_eq!(positions.len(), rows, "positions of the queries");
        let out = self.values(q.shape());
        let top = compressed.map_or(0, |c| c.topk.width());
        let entry = compressed.map_or(0, |c| c.cache.width() * c.cache.element().bytes());
        assert!([0, kv_row_bytes(dim), 4 * dim].contains(&entry), "entries of {entry} bytes");
        let columns = (window.size + extra + top).next_multiple_of(STEP);
        let params = Params {
            heads: u32_of(heads),
            dim: u32_of(dim),
            window: u32_of(window.size),
            slots: u32_of(window.ring.rows()),
            base: window.base,
            extra: u32_of(extra),
            top: u32_of(top),
            key_bytes: u32_of(fp8_row_bytes(dim)),
            entry_bytes: u32_of(entry),
            columns: u32_of(columns),
            scale: (dim as f64).powf(-0.5) as f32,
        };
        let positions = self.words(positions);
        for first in (0..rows).step_by(ROWS) {
            let count = (rows - first).min(ROWS);
            let (q, out) = (q.rows_at(first, count), out.rows_at(first, count));
            let positions = positions.rows_at(first, count);
            // Without entries nothing reads these two.
            let (cache, chosen) = match compressed {
                Some(c) => (c.cache, c.topk.rows_at(first, count)),
                None => (window.ring, window.ring.clone()),
            };
            let (scores, decoded) =
                (self.values(&[count, heads, columns]), self.values(&[count, columns, DIM / 2]));
            let bindings = [&q, window.ring, window.fresh, cache, &chosen, &positions, &scores, &decoded]
                .map(Buf::binding);
            let grid = [columns / CHUNK, heads.div_ceil(SCORED), count];
            self.launch("attention_scores", &[self.rounding()], &bindings, &params, grid, [256, 1, 1]);
            let params = ValuesParams {
                heads: u32_of(heads),
                dim: u32_of(dim),
                columns: u32_of(columns),
                turned: 0,
                kept: 0,
                code_bytes: 0,
                slots: 1,
            };
            let sinks = sinks.clone();
            self.defer(Pending::Values(Values {
                scores,
                decoded,
                sinks,
                out,
                turns: None,
                kept: None,
                params,
            }));
        }
        out
    }

    /// Records the second half.
    pub(crate) fn add_values(&self, v: &Values<D>) {
        let p = v.params;
        // What is not asked for is never touched.
        let none = || v.scores.binding();
        let turns = v.turns.as_ref().map_or_else(none, Buf::binding);
        let [codes, positions, ring] = match &v.kept {
            Some(k) => [k.codes.binding(), k.positions.binding(), k.ring.clone()],
            None => [none(), none(), none()],
        };
        let bindings = [
            v.scores.binding(),
            v.decoded.binding(),
            v.sinks.binding(),
            v.out.binding(),
            turns,
            codes,
            positions,
            ring,
        ];
        let grid = [(p.dim as usize).div_ceil(SLICE), (p.heads as usize).div_ceil(TEAM), v.out.rows()];
        self.record("attention_values", &[self.rounding()], &bindings, &p, grid, [128, 1, 1]);
    }

    /// Lets waiting attention write `codes` to `ring`, whose old rows nothing reads by then; `false` where none waits that
    /// can.
    pub(crate) fn keep_with_values(&self, ring: &Buf<D>, codes: &Buf<D>, positions: &Buf<D>) -> bool {
        match &mut *self.pending() {
            Some(Pending::Values(v)) if v.kept.is_none() && codes.rows() <= v.out.rows() => {
                v.kept =
                    Some(Kept { codes: codes.clone(), positions: positions.clone(), ring: ring.binding() });
                v.params.kept = u32_of(codes.rows());
                v.params.code_bytes = u32_of(codes.width());
                v.params.slots = u32_of(ring.rows());
                true
            }
            _ => false,
        }
    }

    /// Attention's results turned back: in place where they still wait.
    pub(crate) fn turned_back(
        &self,
        o: &Buf<D>,
        head_dim: usize,
        table: &RopeTable,
        positions: &[u32],
    ) -> Buf<D> {
        let turns = self.turns(table, positions);
        if let Some(Pending::Values(v)) = &mut *self.pending()
            && v.out.is(o)
            && v.turns.is_none()
            && v.params.dim as usize == head_dim
        {
            v.params.turned = u32_of(table.dim() / 2);
            v.turns = Some(turns);
            return o.clone();
        }
        self.rope_rows(o, head_dim, table, positions, true)
    }
}
