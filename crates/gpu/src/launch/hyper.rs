//! Hyper-connections.

use ops::{
    Mix,
    hyper::{MIX, MixConstants, STREAMS},
};

use crate::{Buf, Device, Gpu, Mat, record::u32_of};

/// Columns of a threadgroup of `hc_project`, and sums that it leaves, as in hyper.metal.
const SLICE: usize = 1024;
const SUMS: usize = 32;

#[repr(C)]
pub(crate) struct MixParams {
    columns: u32,
    slices: u32,
    part: f32,
    eps: f32,
    norm_eps: f32,
    iterations: u32,
}

#[repr(C)]
struct Width {
    width: u32,
}

impl<D: Device> Gpu<D> {
    /// Sums of a mix over slices of the columns.
    pub(crate) fn mix_sums(
        &self,
        streams: &Buf<D>,
        fun: &Mat<D>,
        constants: MixConstants,
    ) -> (Buf<D>, MixParams) {
        let (rows, columns) = (streams.rows(), streams.width());
        let weight = fun.weight();
        assert_eq!(
            (weight.form(), weight.rows(), weight.cols(), streams.shape()[1]),
            (checkpoint::Form::F32, MIX, columns, STREAMS),
            "{} of a mix",
            weight.name()
        );
        let slices = columns.div_ceil(SLICE);
        let sums = self.values(&[rows, slices, SUMS]);
        let params = MixParams {
            columns: u32_of(columns),
            slices: u32_of(slices),
            part: 1.0 / columns as f32,
            eps: constants.eps,
            norm_eps: constants.norm_eps,
            iterations: u32_of(constants.iterations),
        };
        let bindings = [streams.binding(), fun.data(), sums.binding()];
        self.launch("hc_project", &[self.rounding()], &bindings, &params, [slices, rows, 1], [256, 1, 1]);
        (sums, params)
    }

    /// The coefficients of a sublayer.
    pub(crate) fn mixed(
        &self,
        streams: &Buf<D>,
        fun: &Mat<D>,
        [scale, base]: [&Buf<D>; 2],
        constants: MixConstants,
    ) -> Mix<Buf<D>> {
        let rows = streams.rows();
        let (sums, params) = self.mix_sums(streams, fun, constants);
        let mix = Mix {
            pre: self.values(&[rows, STREAMS]),
            post: self.values(&[rows, STREAMS]),
            comb: self.values(&[rows, STREAMS, STREAMS]),
        };
        let bindings = [&sums, scale, base, &mix.pre, &mix.post, &mix.comb].map(Buf::binding);
        self.launch("hc_mix", &[self.rounding()], &bindings, &params, [rows, 1, 1], [32, 1, 1]);
        mix
    }

    /// The sublayer's input.
    pub(crate) fn collapsed(&self, streams: &Buf<D>, pre: &Buf<D>) -> Buf<D> {
        let (rows, width) = (streams.rows(), streams.shape()[2]);
        let x = self.values(&[rows, width]);
        let bindings = [streams, pre, &x].map(Buf::binding);
        let (params, grid) = (Width { width: u32_of(width) }, [width.div_ceil(256), rows, 1]);
        self.launch("hc_collapse", &[self.rounding()], &bindings, &params, grid, [256, 1, 1]);
        x
    }

    /// The new streams.
    pub(crate) fn expanded(&self, streams: &Buf<D>, y: &Buf<D>, mix: &Mix<Buf<D>>) -> Buf<D> {
        let (rows, width) = (streams.rows(), y.width());
        let out = self.values(streams.shape());
        let bindings = [streams, y, &mix.post, &mix.comb, &out].map(Buf::binding);
        let (params, grid) = (Width { width: u32_of(width) }, [width.div_ceil(256), rows, 1]);
        self.launch("hc_expand", &[self.rounding()], &bindings, &params, grid, [256, 1, 1]);
        out
    }
}
