//! Linear layers on EXL3 weights: one rotation of the input for each distinct suh, products straight from the trellis, one
//! rotation of the sums.

use std::sync::Arc;

use exl3::BLOCK;
use ops::Io;

use super::{
    linear::{MAX_ROWS, tile},
    mat::{Class, Mat, Plan},
};
use crate::{Binding, Buf, Constant, Device, Gpu};

const ROTATE: &str = "exl3_rotate";
const PRODUCT: &str = "exl3_product";
const FINISH: &str = "exl3_finish";
const DECODE: &str = "exl3_decode";

/// What two of the codebooks flip in a product [EXL3 specification, section 4].
pub(crate) const FLIP: u32 = 0x3B60_3B60;

/// Runs of 128 that a threadgroup of the element-wise kernels takes, a simdgroup each.
pub(crate) const RUNS: usize = 4;

#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    rows: u32,
    cols: u32,
    inputs: u32,
    groups: u32,
    outs: u32,
    units: u32,
    splits: u32,
    planes: u32,
    class: u32,
    round: u32,
    flip: u32,
}

/// Function constants of the kernels that include `trellis.h`.
pub(crate) fn trellis_constants(class: Class, rows: usize) -> [(u32, Constant); 3] {
    let Class::Exl3 { half_bits, codebook } = class else { unreachable!("a class of EXL3") };
    [(0, Constant::U32(half_bits)), (1, Constant::U32(codebook)), (2, Constant::U32(rows as u32))]
}

impl<D: Device> Gpu<D> {
    /// `y [T, out]`; outputs in `groups` groups take their own columns of `x`.
    pub(crate) fn linear_exl3(&self, x: &Buf<D>, mat: &Mat<D>, io: Io, groups: usize) -> Buf<D> {
        let (rows, outs) = (x.rows(), mat.weight.rows());
        let y = self.values(&[rows, outs]);
        if rows == 0 {
            return y;
        }
        let trellises = mat.exl3.as_ref().expect("an EXL3 weight");
        let Some(plan) = self.planned(mat, groups) else { return y };
        let (inputs, splits) = (trellises.inputs, plan.splits);
        // Many rows: a threadgroup goes through all splits, in the order in which their planes would be added.
        let planes = if rows > MAX_ROWS { 1 } else { splits };
        let numbers = [rows, mat.weight.cols(), inputs, groups, outs, plan.unit_count, splits, planes];
        let [rows32, cols, inputs32, groups32, outs32, units, splits, planes32] = numbers.map(|n| n as u32);
        let params = Params {
            rows: rows32,
            cols,
            inputs: inputs32,
            groups: groups32,
            outs: outs32,
            units,
            splits,
            planes: planes32,
            class: 0,
            round: u32::from(self.rounds(io)),
            flip: FLIP,
        };
        let raw = |b: &D::Buffer| Binding::Buffer(b.clone(), 0);
        let (slab, table) = (raw(&mat.slab.buffer), raw(&trellises.table));
        let source = (0, Constant::Bool(self.source()));
        let xh = self.values(&[plan.rotation_count * rows, inputs]);
        let bindings = [x.binding(), slab.clone(), table.clone(), raw(&plan.rotations), xh.binding()];
        let grid = [inputs.div_ceil(RUNS * BLOCK), rows, plan.rotation_count];
        self.launch(ROTATE, &[source], &bindings, &params, grid, [32 * RUNS, 1, 1]);

        let sums = self.values(&[planes * rows * plan.unit_count, BLOCK]);
        for class in &plan.classes {
            let params = Params { class: class.code(), ..params };
            let bindings = [xh.binding(), slab.clone(), table.clone(), raw(&plan.units), sums.binding()];
            let grid = [plan.unit_count, planes, rows.div_ceil(tile(rows))];
            self.launch(
                PRODUCT,
                &trellis_constants(*class, tile(rows)),
                &bindings,
                &params,
                grid,
                [256, 1, 1],
            );
        }

        let bindings = [sums.binding(), slab, table, raw(&plan.units), y.binding()];
        let grid = [plan.unit_count.div_ceil(RUNS), rows, 1];
        self.launch(FINISH, &[source], &bindings, &params, grid, [32 * RUNS, 1, 1]);
        y
    }

    /// The plan; where the device has no memory for it the next read says so.
    fn planned(&self, mat: &Mat<D>, groups: usize) -> Option<Arc<Plan<D>>> {
        mat.plan(&self.device, groups).inspect_err(|e| self.note(e)).ok()
    }

    /// The values of an EXL3 weight before scales and rotations, `[inputs, blocks of 128]`, as the kernels decode them.
    pub fn decoded(&self, mat: &Mat<D>) -> Buf<D> {
        let trellises = mat.exl3.as_ref().expect("an EXL3 weight");
        let blocks: usize = mat.weight.layers().iter().map(|l| l.rows().div_ceil(BLOCK)).sum();
        let values = self.values(&[trellises.inputs, BLOCK * blocks]);
        let Some(plan) = self.planned(mat, 1) else { return values };
        let raw = |b: &D::Buffer| Binding::Buffer(b.clone(), 0);
        for class in &plan.classes {
            let params = Params {
                rows: 0,
                cols: 0,
                inputs: trellises.inputs as u32,
                groups: 1,
                outs: 0,
                units: plan.unit_count as u32,
                splits: 1,
                planes: 1,
                class: class.code(),
                round: 0,
                flip: FLIP,
            };
            let bindings = [raw(&mat.slab.buffer), raw(&trellises.table), raw(&plan.units), values.binding()];
            let grid = [plan.unit_count, trellises.inputs / 16, 1];
            self.launch(DECODE, &trellis_constants(*class, 1), &bindings, &params, grid, [32, 1, 1]);
        }
        values
    }
}
