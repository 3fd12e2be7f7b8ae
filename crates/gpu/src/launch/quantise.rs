//! fp8 quantisation of activations.

use crate::{Buf, Device, Gpu};

const QUANTISE: &str = "quantise_fp8";

#[repr(C)]
struct Params {
    rows: u32,
    cols: u32,
}

impl<D: Device> Gpu<D> {
    /// `x` through E4M3 with a power-of-two scale for every 32 columns.
    pub(crate) fn quantised(&self, x: &Buf<D>) -> Buf<D> {
        let (rows, cols) = (x.rows(), x.width());
        let out = self.values(x.shape());
        let params = Params { rows: rows as u32, cols: cols as u32 };
        let groups = [cols.div_ceil(32).div_ceil(32), rows, 1];
        self.launch(QUANTISE, &[], &[x.binding(), out.binding()], &params, groups, [32, 1, 1]);
        out
    }
}
