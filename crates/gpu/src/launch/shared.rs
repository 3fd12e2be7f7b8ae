//! The router and the shared expert of few rows in two launches, where nothing is rounded between.

use ops::Routing;

use super::{
    hyper::SublayerParams,
    linear::{MAX_ROWS, OUTS, product_constants, slices},
    mat::{Class, Mat},
    router::MOST,
};
use crate::{Binding, Buf, Constant, Device, Gpu};

const FIRST: &str = "gate_and_shared";
const SECOND: &str = "route_and_shared";

#[repr(C)]
struct GateParams {
    rows: u32,
    cols: u32,
    experts: u32,
    outs: u32,
    blocks: u32,
    gate_slices: u32,
    slices: u32,
    gate_shift: u32,
    shared_shift: u32,
    limit: f32,
    enter: SublayerParams,
}

#[repr(C)]
struct DownParams {
    rows: u32,
    cols: u32,
    outs: u32,
    slices: u32,
    shared_shift: u32,
    experts: u32,
    top: u32,
    scale: f32,
    images: u32,
}

/// What a choice of experts depends on besides the logits.
pub(crate) struct Choice<'a, D: Device> {
    pub bias: &'a Buf<D>,
    /// Another bias and the rows that take it.
    pub image: Option<(&'a Buf<D>, &'a [bool])>,
    pub top: usize,
    pub scale: f32,
}

impl<D: Device> Gpu<D> {
    /// The choice of experts and the shared expert's result, with the bits that each has alone; `None` where they do not go
    /// together.
    pub(crate) fn routed_and_shared(
        &self,
        x: &Buf<D>,
        gate: &Mat<D>,
        choice: &Choice<'_, D>,
        [w1, w3, w2]: [&Mat<D>; 3],
        limit: f32,
    ) -> Option<(Routing<Buf<D>>, Buf<D>)> {
        let plain = |m: &Mat<D>| match m.class {
            Class::Plain { form, scale_shift } => Some((form, scale_shift)),
            Class::Exl3 { .. } => None,
        };
        let ((gate_form, gate_shift), (form, shift)) = (plain(gate)?, plain(w1)?);
        let (rows, cols, experts) = (x.rows(), gate.weight.cols(), gate.weight.rows());
        let (inter, outs) = (w1.weight.rows(), w2.weight.rows());
        let alike = w1.class == w3.class && w1.class == w2.class && experts <= MOST && choice.top <= experts;
        if self.source() || !alike || !(1..=MAX_ROWS).contains(&rows) {
            return None;
        }
        let tile = if rows == 1 { 1 } else { MAX_ROWS };
        let part = |m: &Mat<D>, i: usize| {
            let offset = m.slab.offsets[i.min(m.slab.offsets.len() - 1)];
            Binding::Buffer(m.slab.buffer.clone(), offset)
        };
        let shared_form = form;
        let constants = |form: u32, cols: usize, enter: bool| {
            let own = [(3, Constant::U32(shared_form)), (4, Constant::Bool(enter))];
            [&product_constants(form, cols, tile)[..], &own].concat()
        };
        let (logits, h) = (self.values(&[rows, experts]), self.values(&[rows, inter]));
        let (gate_slices, first_slices) = (slices(cols, experts), slices(cols, inter));
        let blocks = experts.div_ceil(OUTS * 8 / gate_slices);
        let numbers = [rows, cols, experts, inter, blocks, gate_slices, first_slices];
        let [rows32, cols32, experts32, outs32, blocks32, gate_slices, slices32] = numbers.map(|n| n as u32);
        let entering = self.entering(x);
        let params = GateParams {
            rows: rows32,
            cols: cols32,
            experts: experts32,
            outs: outs32,
            blocks: blocks32,
            gate_slices,
            slices: slices32,
            gate_shift,
            shared_shift: shift,
            limit,
            enter: entering.params,
        };
        let own = [
            part(gate, 0),
            part(gate, 1),
            logits.binding(),
            part(w1, 0),
            part(w1, 1),
            part(w3, 0),
            part(w3, 1),
            h.binding(),
        ];
        let bindings: Vec<_> = [entering.x].into_iter().chain(own).chain(entering.bindings).collect();
        let grid = [entering.groups + blocks + inter.div_ceil(OUTS / 2 * 8 / first_slices), 1, 1];
        let first = constants(gate_form, cols, entering.groups > 0);
        self.launch(FIRST, &first, &bindings, &params, grid, [256, 1, 1]);

        let routing =
            Routing { experts: self.indices(&[rows, choice.top]), weights: self.values(&[rows, choice.top]) };
        let (other, flags) = choice.image.map_or((choice.bias, choice.bias.clone()), |(other, flags)| {
            let flags: Vec<u32> = flags.iter().map(|f| (*f).into()).collect();
            (other, self.words(&flags))
        });
        let y = self.values(&[rows, outs]);
        let second_slices = slices(inter, outs);
        let params = DownParams {
            rows: rows32,
            cols: inter as u32,
            outs: outs as u32,
            slices: second_slices as u32,
            shared_shift: shift,
            experts: experts32,
            top: choice.top as u32,
            scale: choice.scale,
            images: choice.image.is_some().into(),
        };
        let bindings = [
            logits.binding(),
            choice.bias.binding(),
            other.binding(),
            flags.binding(),
            routing.experts.binding(),
            routing.weights.binding(),
            h.binding(),
            part(w2, 0),
            part(w2, 1),
            y.binding(),
        ];
        let grid = [rows + outs.div_ceil(OUTS * 8 / second_slices), 1, 1];
        self.launch(SECOND, &constants(form, inter, false), &bindings, &params, grid, [256, 1, 1]);
        Some((routing, y))
    }
}
