//! Hyper-connections: what leads from one sublayer's result to the next one's input.

use ops::{
    Mix, Taps,
    blocks::SublayerWeights,
    hyper::{MIX, MixConstants, STREAMS},
};

use super::norm::norm_threads;
use crate::{Buf, Device, Gpu, Mat, pending::Pending, record::u32_of};

/// Dimensions of a threadgroup of `sublayer_streams`, and sums that it leaves, as in hyper.metal.
const SLICE: usize = 64;
const SUMS: usize = 32;

#[repr(C)]
struct StreamsParams {
    width: u32,
    slices: u32,
    expand: u32,
    collapse: u32,
}

#[repr(C)]
struct SublayerParams {
    width: u32,
    slices: u32,
    first: u32,
    mix_part: f32,
    norm_part: f32,
    eps: f32,
    norm_eps: f32,
    iterations: u32,
}

#[repr(C)]
struct Width {
    width: u32,
}

/// A sublayer's result on its way into the streams `out`.
pub(crate) struct Expand<D: Device> {
    streams: Buf<D>,
    y: Buf<D>,
    post: Buf<D>,
    comb: Buf<D>,
    pub(crate) out: Buf<D>,
}

/// What a sublayer's way in makes besides the coefficients.
struct Input<'a, D: Device> {
    pre: &'a Buf<D>,
    norm: &'a Buf<D>,
    /// Before and after the norm.
    x: [&'a Buf<D>; 2],
}

impl<D: Device> Gpu<D> {
    /// The coefficients of a sublayer, and its input where it is wanted.
    fn entered(
        &self,
        streams: &Buf<D>,
        expand: Option<&Expand<D>>,
        [scale, base]: [&Buf<D>; 2],
        fun: &Mat<D>,
        constants: MixConstants,
        input: Option<Input<'_, D>>,
    ) -> Mix<Buf<D>> {
        let (rows, width) = (streams.rows(), streams.shape()[2]);
        let weight = fun.weight();
        assert_eq!(
            (weight.form(), weight.rows(), weight.cols(), streams.shape()[1]),
            (checkpoint::Form::F32, MIX, STREAMS * width, STREAMS),
            "{} of a mix",
            weight.name()
        );
        assert!(width.is_multiple_of(2), "streams of {width} values");
        let slices = width.div_ceil(SLICE);
        let sums = self.values(&[rows, slices, SUMS]);
        let mix = Mix {
            pre: self.values(&[rows, STREAMS]),
            post: self.values(&[rows, STREAMS]),
            comb: self.values(&[rows, STREAMS, STREAMS]),
        };
        // Where nothing is expanded or collapsed these are never touched.
        let [from, y, post, comb, next] = match expand {
            Some(e) => [&e.streams, &e.y, &e.post, &e.comb, &e.out],
            None => [streams, streams, scale, scale, &sums],
        };
        let (pre, norm, [x, normed]) = match &input {
            Some(i) => (i.pre, i.norm, i.x),
            None => (scale, scale, [&sums, &sums]),
        };
        let params = StreamsParams {
            width: u32_of(width),
            slices: u32_of(slices),
            expand: expand.is_some().into(),
            collapse: input.is_some().into(),
        };
        let bindings = [
            from.binding(),
            y.binding(),
            post.binding(),
            comb.binding(),
            pre.binding(),
            fun.data(),
            next.binding(),
            x.binding(),
            sums.binding(),
        ];
        let grid = [slices, rows, 1];
        self.launch("sublayer_streams", &[self.rounding()], &bindings, &params, grid, [128, 1, 1]);
        let params = SublayerParams {
            width: u32_of(width),
            slices: u32_of(slices),
            first: input.is_none().into(),
            mix_part: 1.0 / (STREAMS * width) as f32,
            norm_part: 1.0 / width as f32,
            eps: constants.eps,
            norm_eps: constants.norm_eps,
            iterations: u32_of(constants.iterations),
        };
        let bindings =
            [x, norm, normed, &sums, scale, base, &mix.pre, &mix.post, &mix.comb].map(Buf::binding);
        let grid = [if input.is_some() { 2 } else { 1 }, rows, 1];
        let threads = [norm_threads(width), 1, 1];
        self.launch("sublayer_finish", &[self.rounding()], &bindings, &params, grid, threads);
        mix
    }

    /// The coefficients of a sublayer.
    pub(crate) fn mixed(
        &self,
        streams: &Buf<D>,
        fun: &Mat<D>,
        coefficients: [&Buf<D>; 2],
        constants: MixConstants,
    ) -> Mix<Buf<D>> {
        self.entered(streams, None, coefficients, fun, constants, None)
    }

    /// Coefficients and input of a sublayer, in two launches that take in a pending result of the last one.
    pub(crate) fn sublayer_entered(
        &self,
        streams: &Buf<D>,
        pre: &Buf<D>,
        w: &SublayerWeights<Self>,
        taps: &mut Taps<'_, Buf<D>>,
    ) -> (Mix<Buf<D>>, Buf<D>) {
        let expand = {
            let mut pending = self.pending();
            match pending.take() {
                Some(Pending::Expand(e)) if e.out.is(streams) => Some(e),
                other => {
                    *pending = other;
                    None
                }
            }
        };
        let shape = [streams.rows(), streams.shape()[2]];
        let (x, normed) = (self.values(&shape), self.values(&shape));
        let input = Input { pre, norm: &w.norm, x: [&x, &normed] };
        let coefficients = [&w.scale, &w.base];
        let mix = self.entered(streams, expand.as_ref(), coefficients, &w.fun, w.constants, Some(input));
        if taps.enabled() {
            for (name, value) in [("pre", &mix.pre), ("post", &mix.post), ("comb", &mix.comb)] {
                taps.put(&format!("{}.{name}", w.tap), value);
            }
        }
        (mix, normed)
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

    /// The new streams; made by the next sublayer's first launch, or before anything else is launched.
    pub(crate) fn expanded(&self, streams: &Buf<D>, y: &Buf<D>, mix: &Mix<Buf<D>>) -> Buf<D> {
        let out = self.values(streams.shape());
        self.defer(Pending::Expand(Expand {
            streams: streams.clone(),
            y: y.clone(),
            post: mix.post.clone(),
            comb: mix.comb.clone(),
            out: out.clone(),
        }));
        out
    }

    /// An expansion that no sublayer took in.
    pub(crate) fn expand_alone(&self, e: &Expand<D>) {
        let (rows, width) = (e.streams.rows(), e.y.width());
        let bindings = [&e.streams, &e.y, &e.post, &e.comb, &e.out].map(Buf::binding);
        let (params, grid) = (Width { width: u32_of(width) }, [width.div_ceil(256), rows, 1]);
        self.record("hc_expand", &[self.rounding()], &bindings, &params, grid, [256, 1, 1]);
    }
}
