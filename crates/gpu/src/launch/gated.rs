//! Routed and shared experts of few rows in two launches and a sum, where nothing is rounded between.

use ops::Routing;

use super::{
    linear::{MAX_ROWS, OUTS, product_constants, slices},
    mat::{Class, Experts, Mat},
};
use crate::{Binding, Buf, Constant, Device, Gpu};

const GATED: &str = "experts_gated";
const DOWN: &str = "experts_down";

#[repr(C)]
struct Params {
    rows: u32,
    slots: u32,
    top: u32,
    experts: u32,
    runs: u32,
    cols: u32,
    outs: u32,
    scale_shift: u32,
    shared_shift: u32,
    slices: u32,
    limit: f32,
}

/// Form and granularity of scales; none for EXL3 and mixtures.
fn plain(classes: &[Class]) -> Option<(u32, u32)> {
    match classes {
        [Class::Plain { form, scale_shift }] => Some((*form, *scale_shift)),
        _ => None,
    }
}

/// Routed experts as the two launches take them.
struct Routed<'a, D: Device> {
    experts: &'a Experts<D>,
    routing: &'a Routing<Buf<D>>,
    /// Form and granularity of scales of gate and up, and of down.
    forms: [(u32, u32); 2],
}

impl<D: Device> Gpu<D> {
    /// `moe_sum` of `routed_experts` and `shared_expert`, with their bits, in fewer dispatches.
    pub(crate) fn experts_and_shared(
        &self,
        x: &Buf<D>,
        routing: &Routing<Buf<D>>,
        experts: &Experts<D>,
        shared: [&Mat<D>; 3],
        limit: f32,
    ) -> Buf<D> {
        let [w1, w3, w2] = shared;
        let same = w1.class == w3.class;
        let fused = match (plain(&[w1.class]), plain(&[w2.class])) {
            (Some(one), Some(two)) if same && !self.source() && (1..=MAX_ROWS).contains(&x.rows()) => {
                Some([one, two])
            }
            _ => None,
        };
        let Some(forms) = fused else {
            return self.experts_with(x, routing, experts, Some(&self.shared(x, shared, limit)), limit);
        };
        match (plain(&experts.first), plain(&experts.second)) {
            (Some(one), Some(two)) => {
                let routed = Routed { experts, routing, forms: [one, two] };
                let y = self.gated(x, Some(&routed), shared, forms, limit);
                self.combined(&y, routing, experts)
            }
            _ => {
                let shared = self.gated(x, None, shared, forms, limit);
                self.experts_with(x, routing, experts, Some(&shared), limit)
            }
        }
    }

    /// Results of the routed experts' slots and then of the shared expert's rows.
    fn gated(
        &self,
        x: &Buf<D>,
        routed: Option<&Routed<'_, D>>,
        [w1, w3, w2]: [&Mat<D>; 3],
        shared: [(u32, u32); 2],
        limit: f32,
    ) -> Buf<D> {
        let (rows, hidden, inter) = (x.rows(), w1.weight.cols(), w1.weight.rows());
        let (list, runs) = routed.map_or((x.clone(), 0), |r| self.runs(r.routing, r.experts));
        let slots = routed.map_or(0, |r| r.routing.experts.len());
        let top = routed.map_or(1, |r| r.routing.experts.width());
        let count = routed.map_or(0, |r| r.experts.count);
        let tile = if rows == 1 { 1 } else { MAX_ROWS };
        let params = |cols: usize, outs: usize, step: usize| {
            let numbers = [rows, slots, top, count, runs, cols, outs, slices(cols, outs)];
            let [rows, slots, top, experts, runs, cols, outs, slices] = numbers.map(|n| n as u32);
            let scale_shift = routed.map_or(0, |r| r.forms[step].1);
            let shared_shift = shared[step].1;
            Params { rows, slots, top, experts, runs, cols, outs, scale_shift, shared_shift, slices, limit }
        };
        let constants = |cols: usize, step: usize| {
            let form = routed.map_or(shared[step].0, |r| r.forms[step].0);
            [&product_constants(form, cols, tile)[..], &[(3, Constant::U32(shared[step].0))]].concat()
        };
        let part = |m: &Mat<D>, i: usize| {
            let offset = m.slab.offsets[i.min(m.slab.offsets.len() - 1)];
            Binding::Buffer(m.slab.buffer.clone(), offset)
        };
        // What a launch without routed experts never touches.
        let (slab, table, weights) = match routed {
            Some(r) => (
                Binding::Buffer(r.experts.slab.buffer.clone(), 0),
                Binding::Buffer(r.experts.table.clone(), 0),
                r.routing.weights.binding(),
            ),
            None => (part(w1, 0), part(w1, 0), x.binding()),
        };
        let h = self.values(&[slots + rows, inter]);
        let one = params(hidden, inter, 0);
        let bindings = [
            x.binding(),
            slab.clone(),
            table.clone(),
            list.binding(),
            weights,
            part(w1, 0),
            part(w1, 1),
            part(w3, 0),
            part(w3, 1),
            h.binding(),
        ];
        let each = OUTS / 2 * 8 / one.slices as usize;
        let grid = [inter.div_ceil(each), 1, runs + rows.div_ceil(tile)];
        self.launch(GATED, &constants(hidden, 0), &bindings, &one, grid, [256, 1, 1]);
        let y = self.values(&[slots + rows, hidden]);
        let two = params(inter, hidden, 1);
        let bindings = [h.binding(), slab, table, list.binding(), part(w2, 0), part(w2, 1), y.binding()];
        let grid = [hidden.div_ceil(OUTS * 8 / two.slices as usize), 1, runs + rows.div_ceil(tile)];
        self.launch(DOWN, &constants(inter, 1), &bindings, &two, grid, [256, 1, 1]);
        y
    }
}
