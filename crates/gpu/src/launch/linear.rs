//! Linear layers on every form but EXL3.

use checkpoint::Form;
use ops::{Io, Mode, RopeTable};

use super::{
    hyper::SublayerParams,
    mat::{Class, Mat},
};
use crate::{Binding, Buf, Constant, Device, Gpu};

const ROWS: &str = "linear_rows";
const ORDERED: &str = "linear_ordered";
const PAIR: &str = "linear_pair";
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
    head_pairs: u32,
    turned: u32,
}

/// A rotation of the results of a product: turns, pairs of a head, and of those the last that are turned.
struct Turn<D: Device> {
    turns: Buf<D>,
    head_pairs: usize,
    turned: usize,
}

#[repr(C)]
struct Pair {
    rows: u32,
    cols: u32,
    outs: u32,
    outs_b: u32,
    scale_shift: u32,
    slices: u32,
    slices_b: u32,
    blocks: u32,
    round: u32,
    enter: SublayerParams,
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

/// Threads of a threadgroup in the released order: one for each group of 32 columns.
pub(crate) fn ordered_threads(cols: usize) -> [usize; 3] {
    [cols.div_ceil(32).next_multiple_of(32).min(256), 1, 1]
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

    /// Whether products of `rows` rows go through 8x8 matrices.
    fn tiled(&self, rows: usize) -> bool {
        self.mode == Mode::Native && rows > MAX_ROWS && self.device.multiplies_matrices()
    }

    /// `y [T, out]` = x · Wᵀ.
    pub(crate) fn linear_any(&self, x: &Buf<D>, mat: &Mat<D>, io: Io) -> Buf<D> {
        assert_eq!(x.width(), mat.weight.cols(), "activations of {}", mat.weight.name());
        if mat.weight.form() == Form::Exl3 {
            return self.linear_exl3(x, mat, io, 1);
        }
        if self.source() && io == Io::Fp8 {
            let x = self.quantised(x);
            return self.linear_plain(&x, mat, io, 1, mat.class.has_order(), None);
        }
        if let (true, Class::Plain { form, scale_shift }) = (self.enters(x), mat.class) {
            let [y, _] = self.linear_few(x, [mat, mat], [mat.weight.rows(), 0], form, scale_shift, io);
            return y;
        }
        self.linear_plain(x, mat, io, 1, false, None)
    }

    /// [`Gpu::linear_any`] and the rotation of its results, in one launch where the product's kernel can.
    pub(crate) fn linear_turned(
        &self,
        x: &Buf<D>,
        mat: &Mat<D>,
        io: Io,
        head_dim: usize,
        table: &RopeTable,
        positions: &[u32],
    ) -> Buf<D> {
        let quantised = self.source() && io == Io::Fp8;
        let ordered = quantised && mat.class.has_order();
        if mat.weight.form() == Form::Exl3 || ordered || self.tiled(x.rows()) {
            let y = self.linear_any(x, mat, io);
            return self.rope_rows(&y, head_dim, table, positions, false);
        }
        assert!(
            x.width() == mat.weight.cols()
                && mat.weight.rows().is_multiple_of(head_dim)
                && positions.len() == x.rows(),
            "activations and heads of {}",
            mat.weight.name()
        );
        let turn =
            Turn { turns: self.turns(table, positions), head_pairs: head_dim / 2, turned: table.dim() / 2 };
        let x = if quantised { &self.quantised(x) } else { x };
        self.linear_plain(x, mat, io, 1, false, Some(&turn))
    }

    /// Group g of the outputs from group g of the columns of `x`.
    pub(crate) fn grouped_any(&self, x: &Buf<D>, mat: &Mat<D>, groups: usize) -> Buf<D> {
        assert_eq!(x.width(), mat.weight.cols() * groups, "activations of {}", mat.weight.name());
        match mat.weight.form() {
            Form::Exl3 => self.linear_exl3(x, mat, Io::Bf16, groups),
            _ => self.linear_plain(x, mat, Io::Bf16, groups, false, None),
        }
    }

    /// Two layers on the same rows, with the bits that each alone would have; in one launch where their forms agree and
    /// the order of the sums allows it.
    pub(crate) fn linear_both(&self, x: &Buf<D>, [a, b]: [&Mat<D>; 2], io: Io) -> [Buf<D>; 2] {
        let (rows, cols) = (x.rows(), a.weight.cols());
        let many = self.tiled(rows);
        let quantised = self.source() && io == Io::Fp8;
        let Class::Plain { form, scale_shift } = a.class else {
            return [a, b].map(|m| self.linear_any(x, m, io));
        };
        if rows == 0 || a.class != b.class || many || quantised {
            return [a, b].map(|m| self.linear_any(x, m, io));
        }
        assert!(x.width() == cols && b.weight.cols() == cols, "activations of {}", a.weight.name());
        self.linear_few(x, [a, b], [a.weight.rows(), b.weight.rows()], form, scale_shift, io)
    }

    /// Two layers of one form in one launch, which takes in the end of a sublayer's way in; `outs` of each.
    fn linear_few(
        &self,
        x: &Buf<D>,
        [a, b]: [&Mat<D>; 2],
        outs: [usize; 2],
        form: u32,
        scale_shift: u32,
        io: Io,
    ) -> [Buf<D>; 2] {
        let (rows, cols) = (x.rows(), x.width());
        let y = outs.map(|o| self.values(&[rows, o]));
        let sliced = outs.map(|o| slices(cols, o));
        let blocks = [0, 1].map(|i| outs[i].div_ceil(OUTS * 8 / sliced[i]));
        let numbers = [rows, cols, outs[0], outs[1], sliced[0], sliced[1], blocks[0]];
        let [rows32, cols32, outs32, outs_b, slices32, slices_b, blocks32] = numbers.map(|n| n as u32);
        let entering = self.entering(x);
        let params = Pair {
            rows: rows32,
            cols: cols32,
            outs: outs32,
            outs_b,
            scale_shift,
            slices: slices32,
            slices_b,
            blocks: blocks32,
            round: u32::from(self.rounds(io)),
            enter: entering.params,
        };
        let part = |m: &Mat<D>, i: usize| {
            let offset = m.slab.offsets[i.min(m.slab.offsets.len() - 1)];
            Binding::Buffer(m.slab.buffer.clone(), offset)
        };
        let own = [part(a, 0), part(a, 1), y[0].binding(), part(b, 0), part(b, 1), y[1].binding()];
        let bindings: Vec<_> = [entering.x].into_iter().chain(own).chain(entering.bindings).collect();
        let tile = tile(rows);
        let constants =
            [&product_constants(form, cols, tile)[..], &[(3, Constant::Bool(entering.groups > 0))]].concat();
        let grid = [entering.groups + blocks[0] + blocks[1], rows.div_ceil(tile), 1];
        self.launch(PAIR, &constants, &bindings, &params, grid, [256, 1, 1]);
        y
    }

    /// A product without quantisation of `x`; `ordered` takes the released order of the sums, without groups. Only products
    /// of lanes turn their results.
    fn linear_plain(
        &self,
        x: &Buf<D>,
        mat: &Mat<D>,
        io: Io,
        groups: usize,
        ordered: bool,
        turn: Option<&Turn<D>>,
    ) -> Buf<D> {
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
            let threads = ordered_threads(cols);
            self.launch(ORDERED, &product_constants(form, cols, tile), &bindings, &params, grid, threads);
        } else if self.tiled(rows) {
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
                head_pairs: turn.map_or(1, |t| t.head_pairs as u32),
                turned: turn.map_or(0, |t| t.turned as u32),
            };
            // Without a rotation nothing reads its turns.
            let turns = turn.map_or(x, |t| &t.turns).binding();
            let [x, data, scale, y] = bindings;
            let bindings = [x, data, scale, y, turns];
            let grid = [outs.div_ceil(OUTS * 8 / slices), rows.div_ceil(tile), groups];
            self.launch(ROWS, &product_constants(form, cols, tile), &bindings, &params, grid, [256, 1, 1]);
        }
        y
    }
}
