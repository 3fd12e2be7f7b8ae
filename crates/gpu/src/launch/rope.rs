//! Rotary position embedding.

use ops::RopeTable;

use crate::{Buf, Device, Gpu, record::u32_of};

#[repr(C)]
struct Params {
    pairs: u32,
    head_pairs: u32,
    turned: u32,
    inverse: u32,
}

impl<D: Device> Gpu<D> {
    pub(crate) fn rope_rows(
        &self,
        x: &Buf<D>,
        head_dim: usize,
        table: &RopeTable,
        positions: &[u32],
        inverse: bool,
    ) -> Buf<D> {
        let (rows, pairs) = (x.rows(), x.width() / 2);
        assert!(x.width().is_multiple_of(head_dim) && positions.len() == rows, "rope of {:?}", x.shape());
        let y = self.values(x.shape());
        let turns = self.turns(table, positions);
        let params = Params {
            pairs: u32_of(pairs),
            head_pairs: u32_of(head_dim / 2),
            turned: u32_of(table.dim() / 2),
            inverse: inverse.into(),
        };
        let bindings = [x.binding(), turns.binding(), y.binding()];
        let grid = [pairs.div_ceil(256), rows, 1];
        self.launch("rope", &[self.rounding()], &bindings, &params, grid, [256, 1, 1]);
        y
    }
}
