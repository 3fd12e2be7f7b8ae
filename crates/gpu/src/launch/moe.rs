//! Routed and shared experts. Ids come from the router's buffer: nothing is read by the host.

use exl3::BLOCK;
use ops::{Io, Routing};

use super::{
    exl3::{FLIP, RUNS, trellis_constants},
    linear::{MAX_ROWS, ORDERED_ROWS, OUTS, ordered_threads, product_constants, slices},
    mat::{Class, Experts, Mat, splits},
};
use crate::{Binding, Buf, Constant, Device, Gpu};

const GROUP: &str = "moe_runs";
const SWIGLU: &str = "swiglu";
const HIDDEN: &str = "moe_hidden";
const COMBINE: &str = "moe_combine";
const PRODUCT: &str = "experts_rows";
const ORDERED: &str = "experts_ordered";
const EXL3_ROTATE: &str = "exl3_expert_rotate";
const EXL3_PRODUCT: &str = "exl3_expert_product";

/// Most values of the input that a product makes itself, as in exl3_product.metal.
const INNER: u32 = 2048;

/// Numbers of a run: expert, count, slots.
const RUN: usize = 10;

#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    slots: u32,
    top: u32,
    experts: u32,
    cols: u32,
    outs: u32,
    inputs: u32,
    outputs: u32,
    parts: u32,
    first: u32,
    splits: u32,
    planes: u32,
    class: u32,
    slices: u32,
    round: u32,
    shared: u32,
    flip: u32,
    limit: f32,
    inner: u32,
    before: u32,
}

#[repr(C)]
struct RunParams {
    slots: u32,
    experts: u32,
    runs: u32,
}

#[repr(C)]
struct SwigluParams {
    count: u32,
    limit: f32,
}

/// One of the two products of an expert: gate and up, or down.
struct Step<'a, D: Device> {
    experts: &'a Experts<D>,
    params: Params,
    classes: &'a [Class],
}

impl<D: Device> Gpu<D> {
    /// Σ over a row's experts, ascending by id, of `w2·(weight·(silu(w1·x)·(w3·x)))`.
    pub(crate) fn experts(
        &self,
        x: &Buf<D>,
        routing: &Routing<Buf<D>>,
        experts: &Experts<D>,
        limit: f32,
    ) -> Buf<D> {
        self.experts_with(x, routing, experts, None, limit)
    }

    /// As [`Gpu::experts`]; `shared [T, d]` is added to the sum, which is rounded as the model's next operator would.
    pub(crate) fn experts_with(
        &self,
        x: &Buf<D>,
        routing: &Routing<Buf<D>>,
        experts: &Experts<D>,
        shared: Option<&Buf<D>>,
        limit: f32,
    ) -> Buf<D> {
        let (rows, top) = (x.rows(), routing.experts.width());
        let slots = rows * top;
        let acc = self.values(x.shape());
        if slots == 0 {
            return acc;
        }
        let padded = |n: usize| n.next_multiple_of(BLOCK);
        let (hidden, inter) = (experts.hidden, experts.inter);
        let step = |cols: usize, outs: usize, parts: usize, classes| {
            let splits = splits(padded(cols) / 16, padded(outs) / BLOCK * parts * top);
            let planes = if rows > MAX_ROWS { 1 } else { splits };
            let numbers =
                [slots, top, experts.count, cols, outs, padded(cols), padded(outs), parts, splits, planes];
            let [slots, top, experts_, cols, outs, inputs, outputs, parts, splits, planes] =
                numbers.map(|n| n as u32);
            let first = if parts == 2 { 0 } else { 2 };
            let params = Params {
                slots,
                top,
                experts: experts_,
                cols,
                outs,
                inputs,
                outputs,
                parts,
                first,
                splits,
                planes,
                class: 0,
                slices: slices(cols as usize, outs as usize) as u32,
                round: u32::from(self.source()),
                shared: u32::from(shared.is_some()),
                flip: FLIP,
                limit,
                inner: 0,
                before: 0,
            };
            Step { experts, params, classes }
        };
        let mut one = step(hidden, inter, 2, &experts.first[..]);
        let mut two = step(inter, hidden, 1, &experts.second[..]);
        // Of one row the products of EXL3 make their inputs themselves, where those fit.
        let inner = |s: &Step<'_, D>| {
            let exl3 = s.classes.iter().all(|c| c.is_exl3());
            let part = s.params.inputs.div_ceil(s.params.planes) + 2 * BLOCK as u32;
            rows == 1 && exl3 && part <= INNER
        };
        (one.params.inner, two.params.inner) = (inner(&one).into(), 2 * u32::from(inner(&two)));
        two.params.before = one.params.planes;

        let (list, run_count) = self.runs(routing, experts);
        let list = &list;
        let raw = |b: &D::Buffer| Binding::Buffer(b.clone(), 0);
        let (slab, table) = (raw(&experts.slab.buffer), raw(&experts.table));
        let source = [(0, Constant::Bool(self.source()))];
        let some = |classes: &[Class], exl3: bool| classes.iter().any(|c| c.is_exl3() == exl3);
        let none = self.values(&[1]);

        let xh = match some(one.classes, true) {
            false => none.clone(),
            true if one.params.inner != 0 => x.clone(),
            true => {
                let xh = self.values(&[slots * 2, padded(hidden)]);
                let bindings =
                    [x.binding(), slab.clone(), table.clone(), routing.experts.binding(), xh.binding()];
                // Slots go along x, the one dimension that CUDA lets exceed 65,535.
                let grid = [slots, 2, padded(hidden).div_ceil(RUNS * BLOCK)];
                self.launch(EXL3_ROTATE, &source, &bindings, &one.params, grid, [32 * RUNS, 1, 1]);
                xh
            }
        };
        let given = [&none, &none, &routing.weights];
        let (values, sums) = self.expert_products(&one, x, &xh, list, run_count, given);

        let (mut down_plain, mut down_exl3) = (none.clone(), none.clone());
        if two.params.inner == 0 {
            if some(two.classes, false) {
                down_plain = self.values(&[slots, inter]);
            }
            if some(two.classes, true) {
                down_exl3 = self.values(&[slots, padded(inter)]);
            }
            let bindings = [
                values.binding(),
                sums.binding(),
                slab.clone(),
                table.clone(),
                routing.experts.binding(),
                routing.weights.binding(),
                down_plain.binding(),
                down_exl3.binding(),
            ];
            let grid = [slots, padded(inter).div_ceil(RUNS * BLOCK), 1];
            self.launch(HIDDEN, &source, &bindings, &one.params, grid, [32 * RUNS, 1, 1]);
        }

        let given = [&values, &sums, &routing.weights];
        let (values, sums) = self.expert_products(&two, &down_plain, &down_exl3, list, run_count, given);
        let shared = shared.unwrap_or(&none).binding();
        let ids = routing.experts.binding();
        let bindings = [values.binding(), sums.binding(), slab, table, ids, shared, acc.binding()];
        let grid = [padded(hidden).div_ceil(RUNS * BLOCK), rows, 1];
        self.launch(COMBINE, &source, &bindings, &two.params, grid, [32 * RUNS, 1, 1]);
        acc
    }

    /// The sum of a row's routed experts and its shared one: `y` holds the results of all slots, then of all rows.
    pub(crate) fn combined(&self, y: &Buf<D>, routing: &Routing<Buf<D>>, experts: &Experts<D>) -> Buf<D> {
        let (rows, slots) = (routing.experts.rows(), routing.experts.len());
        let (acc, outs) = (self.values(&[rows, y.width()]), y.width());
        let numbers = [slots, slots / rows, experts.count, outs, outs.next_multiple_of(BLOCK)];
        let [slots32, top, experts32, outs32, outputs] = numbers.map(|n| n as u32);
        let params = Params {
            slots: slots32,
            top,
            experts: experts32,
            cols: 0,
            outs: outs32,
            inputs: 0,
            outputs,
            parts: 1,
            first: 2,
            splits: 1,
            planes: 1,
            class: 0,
            slices: 1,
            round: 0,
            shared: 1,
            flip: FLIP,
            limit: 0.0,
            inner: 0,
            before: 0,
        };
        let raw = |b: &D::Buffer| Binding::Buffer(b.clone(), 0);
        let (slab, table) = (raw(&experts.slab.buffer), raw(&experts.table));
        let (ids, shared) = (routing.experts.binding(), y.binding_at(slots * outs));
        let bindings = [y.binding(), y.binding(), slab, table, ids, shared, acc.binding()];
        let grid = [outs.next_multiple_of(BLOCK).div_ceil(RUNS * BLOCK), rows, 1];
        let source = [(0, Constant::Bool(self.source()))];
        self.launch(COMBINE, &source, &bindings, &params, grid, [32 * RUNS, 1, 1]);
        acc
    }

    /// Runs of up to eight slots of one expert, so that rows which chose the same share its decoding, and their number; the
    /// slots themselves for one row.
    pub(crate) fn runs(&self, routing: &Routing<Buf<D>>, experts: &Experts<D>) -> (Buf<D>, usize) {
        let slots = routing.experts.len();
        if routing.experts.rows() == 1 {
            return (routing.experts.clone(), slots);
        }
        let most = slots / MAX_ROWS + slots.min(experts.count);
        let runs = self.indices(&[most, RUN]);
        let numbers = [slots, experts.count, most];
        let [slots, experts, runs_] = numbers.map(|n| n as u32);
        let params = RunParams { slots, experts, runs: runs_ };
        let bindings = [routing.experts.binding(), runs.binding()];
        let source = [(0, Constant::Bool(self.source()))];
        self.launch(GROUP, &source, &bindings, &params, [1, 1, 1], [256, 1, 1]);
        (runs, most)
    }

    /// Products of one step: results of plain forms `[slots, parts, outs]` and planes of sums of EXL3. `given` are the products of
    /// the step before and the routing's weights, for products that make their input themselves.
    fn expert_products(
        &self,
        step: &Step<'_, D>,
        x: &Buf<D>,
        xh: &Buf<D>,
        list: &Buf<D>,
        runs: usize,
        given: [&Buf<D>; 3],
    ) -> (Buf<D>, Buf<D>) {
        let p = step.params;
        let [slots, parts, outs, outputs, planes, cols] =
            [p.slots, p.parts, p.outs, p.outputs, p.planes, p.cols].map(|n| n as usize);
        let some = |exl3: bool| step.classes.iter().any(|c| c.is_exl3() == exl3);
        let sized = |wanted: bool, n: usize| self.values(&[if wanted { n } else { 1 }]);
        let values = sized(some(false), slots * parts * outs);
        let sums = sized(some(true), planes * slots * parts * outputs);
        let raw = |b: &D::Buffer| Binding::Buffer(b.clone(), 0);
        let (slab, table) = (raw(&step.experts.slab.buffer), raw(&step.experts.table));
        let grouped = p.slots != p.top;
        let rows = if grouped { MAX_ROWS } else { 1 };
        let quantised = self.source() && some(false);
        let x = if quantised { &self.quantised(x) } else { x };
        for class in step.classes {
            let params = Params { class: class.code(), ..p };
            if class.is_exl3() {
                let [v, s, w] = given.map(Buf::binding);
                let (slab, table) = (slab.clone(), table.clone());
                let bindings = [xh.binding(), slab, table, list.binding(), sums.binding(), v, s, w];
                let grid = [outputs / BLOCK, parts * planes, runs];
                let constants = trellis_constants(*class, rows);
                self.launch(EXL3_PRODUCT, &constants, &bindings, &params, grid, [256, 1, 1]);
                continue;
            }
            let Class::Plain { form, .. } = *class else { unreachable!("EXL3 went above") };
            let bindings = [x.binding(), slab.clone(), table.clone(), list.binding(), values.binding()];
            if self.source() && class.has_order() {
                let constants = product_constants(form, cols, rows.min(ORDERED_ROWS));
                let grid = [outs.div_ceil(OUTS), parts, runs];
                self.launch(ORDERED, &constants, &bindings, &params, grid, ordered_threads(cols));
            } else {
                let constants = product_constants(form, cols, rows);
                let grid = [outs.div_ceil(OUTS * 8 / p.slices as usize), parts, runs];
                self.launch(PRODUCT, &constants, &bindings, &params, grid, [256, 1, 1]);
            }
        }
        (values, sums)
    }

    /// `y [T, d]` = w2·(silu(w1·x)·(w3·x)), clamped.
    pub(crate) fn shared(&self, x: &Buf<D>, [w1, w3, w2]: [&Mat<D>; 3], limit: f32) -> Buf<D> {
        let (gate, up) = (self.linear_any(x, w1, Io::Fp8), self.linear_any(x, w3, Io::Fp8));
        let h = self.values(&[x.rows(), w1.weight.rows()]);
        let count = x.rows() * w1.weight.rows();
        let params = SwigluParams { count: count as u32, limit };
        let constants = [(0, Constant::Bool(self.source()))];
        let bindings = [gate.binding(), up.binding(), h.binding()];
        self.launch(SWIGLU, &constants, &bindings, &params, [count.div_ceil(256), 1, 1], [256, 1, 1]);
        self.linear_any(&h, w2, Io::Fp8)
    }
}
