//! RMSNorm.

use crate::{Buf, Device, Gpu, record::u32_of};

#[repr(C)]
struct Params {
    width: u32,
    part: f32,
    eps: f32,
}

/// Threads that share a row; by the width alone, as the order of the sum is.
pub(crate) fn norm_threads(width: usize) -> usize {
    if width < 2048 { 256 } else { 512 }
}

impl<D: Device> Gpu<D> {
    pub(crate) fn rmsnorm_rows(&self, x: &Buf<D>, weight: &Buf<D>, eps: f32) -> Buf<D> {
        let (rows, width) = (x.rows(), x.width());
        assert_eq!(weight.len(), width, "a norm's weight");
        let y = self.values(x.shape());
        let params = Params { width: u32_of(width), part: 1.0 / width as f32, eps };
        let bindings = [x.binding(), weight.binding(), y.binding()];
        let threads = [norm_threads(width), 1, 1];
        self.launch("rmsnorm", &[self.rounding()], &bindings, &params, [rows, 1, 1], threads);
        y
    }
}
