//! RMSNorm.

use crate::{Buf, Device, Gpu, record::u32_of};

#[repr(C)]
struct Params {
    width: u32,
    part: f32,
    eps: f32,
}

impl<D: Device> Gpu<D> {
    pub(crate) fn rmsnorm_rows(&self, x: &Buf<D>, weight: &Buf<D>, eps: f32) -> Buf<D> {
        let (rows, width) = (x.rows(), x.width());
        assert_eq!(weight.len(), width, "a norm's weight");
        let y = self.values(x.shape());
        let params = Params { width: u32_of(width), part: 1.0 / width as f32, eps };
        let bindings = [x.binding(), weight.binding(), y.binding()];
        self.launch("rmsnorm", &[self.rounding()], &bindings, &params, [rows, 1, 1], [256, 1, 1]);
        y
    }
}
