//! Linear layers on every form but EXL3.

use checkpoint::Form;
use ops::{Io, Mode};

use super::mat::{Class, Mat};
use crate::{Binding, Buf, Constant, Device, Gpu};

const ROWS: &str = "linear_rows";
const ORDERED: &str = "linear_ordered";
const TILES: &str = "linear_tiles";

/// Outputs of a simdgroup.
pub(crate) const OUTS: usize = 4;
/// Rows that share the decoding of a weight at most.
pub(crate) const MAX_ROWS: usize = 8;
/// The same in the released order of the sums.
pub(crate) const ORDERED_ROWS: usize = 4;

#[repr(C)]
struct Rows {
    rows: u32,
    cols: u32,
    outs: u32,
    groups: u32,
    scale_shift: u32,
    slices: u32,
    round: u32,
}

#[repr(C)]
struct Ordered {
    rows: u32,
    cols: u32,
    outs: u32,
    scale_shift: u32,
    round: u32,
}

#[repr(C)]
struct Tiles {
    rows: u32,
    cols: u32,
    outs: u32,
    groups: u32,
    scale_shift: u32,
}

/// Rows of a tile for `rows` rows: 1, 2, 4 or 8.
pub(crate) fn tile(rows: usize) -> usize {
    rows.next_power_of_two().min(MAX_ROWS)
}

/// Simdgroups of a threadgroup that share the columns of an output. By the shape alone, as the order of the sums is.
pub(crate) fn slices(cols: usize, outs: usize) -> usize {
    match (cols, outs) {
        (..2048, _) => 1,
        (_, ..=512) => 8,
        _ => 4,
    }
}

/// Function constants of the kernels that include `product.h`.
pub(crate) fn product_constants(form: u32, cols: usize, rows: usize) -> [(u32, Constant); 3] {
    let whole = cols.is_multiple_of(8);
    [(0, Constant::U32(form)), (1, Constant::Bool(whole)), (2, Constant::U32(rows as u32))]
}

impl<D: Device> Gpu<D> {
    /// Whether results under `io` are rounded to bf16.
    pub(crate) fn rounds(&self, io: Io) -> bool {
        self.source() && io != Io::F32
    }

    /// `y [T, out]` = x · Wᵀ.
    pub(crate) fn linear_any(&self, x: &Buf<D>, mat: &Mat<D>, io: Io) -> Buf<D> {
        assert_eq!(x.width(), mat.weight.cols(), "activations of {}", mat.weight.name());
        if mat.weight.form() == Form::Exl3 {
            return self.linear_exl3(x, mat, io, 1);
        }
        if self.source() && io == Io::Fp8 {
            let x = self.quantised(x);
            return self.linear_plain(&x, mat, io, 1, mat.class.has_order());
        }
        self.linear_plain(x, mat, io, 1, false)
    }

    /// Group g of the outputs from group g of the columns of `x`.
    pub(crate) fn grouped_any(&self, x: &Buf<D>, mat: &Mat<D>, groups: usize) -> Buf<D> {
        assert_eq!(x.width(), mat.weight.cols() * groups, "activations of {}", mat.weight.name());
        match mat.weight.form() {
            Form::Exl3 => self.linear_exl3(x, mat, Io::Bf16, groups),
            _ => self.linear_plain(x, mat, Io::Bf16, groups, false),
        }
    }

    /// A product without quantisation of `x`; `ordered` takes the released order of the sums, without groups.
    fn linear_plain(&self, x: &Buf<D>, mat: &Mat<D>, io: Io, groups: usize, ordered: bool) -> Buf<D> {
        let (rows, cols, all) = (x.rows(), mat.weight.cols(), mat.weight.rows());
        let outs = all / groups;
        let y = self.values(&[rows, all]);
        if rows == 0 {
            return y;
        }
        let Class::Plain { form, scale_shift } = mat.class else {
            unreachable!("EXL3 has kernels of its own")
        };
        let round = u32::from(self.rounds(io));
        let [rows32, cols32, outs32, groups32] = [rows, cols, outs, groups].map(|n| n as u32);
        let data = Binding::Buffer(mat.slab.buffer.clone(), mat.slab.offsets[0]);
        let scale = Binding::Buffer(mat.slab.buffer.clone(), *mat.slab.offsets.last().expect("a part"));
        let bindings = [x.binding(), data, scale, y.binding()];
        if ordered {
            let tile = if rows == 1 { 1 } else { ORDERED_ROWS };
            let params = Ordered { rows: rows32, cols: cols32, outs: outs32, scale_shift, round };
            let grid = [outs.div_ceil(OUTS), rows.div_ceil(tile), 1];
            self.launch(ORDERED, &product_constants(form, cols, tile), &bindings, &params, grid, [256, 1, 1]);
        } else if self.mode == Mode::Native && rows > MAX_ROWS {
            let params = Tiles { rows: rows32, cols: cols32, outs: outs32, groups: groups32, scale_shift };
            let grid = [outs.div_ceil(64), rows.div_ceil(32), groups];
            let constants = &product_constants(form, cols, 0)[..2];
            self.launch(TILES, constants, &bindings, &params, grid, [128, 1, 1]);
        } else {
            let (tile, slices) = (tile(rows), slices(cols, outs));
            let params = Rows {
                rows: rows32,
                cols: cols32,
                outs: outs32,
                groups: groups32,
                scale_shift,
                slices: slices as u32,
                round,
            };
            let grid = [outs.div_ceil(OUTS * 8 / slices), rows.div_ceil(tile), groups];
            self.launch(ROWS, &product_constants(form, cols, tile), &bindings, &params, grid, [256, 1, 1]);
        }
        y
    }
}
