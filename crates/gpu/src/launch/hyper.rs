//! Hyper-connections: what leads from one sublayer's result to the next one's input.

use ops::{
    Mix, Taps,
    blocks::SublayerWeights,
    hyper::{MIX, MixConstants, STREAMS},
};

use super::norm::norm_threads;
use crate::{Binding, Buf, Device, Gpu, Mat, pending::Pending, record::u32_of};

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
#[derive(Clone, Copy, Default)]
pub(crate) struct SublayerParams {
    width: u32,
    slices: u32,
    parts: u32,
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

/// The end of a sublayer's way in: coefficients from sums, and the norm of the input.
pub(crate) struct Finish<D: Device> {
    x: Buf<D>,
    norm: Buf<D>,
    normed: Buf<D>,
    sums: Buf<D>,
    scale: Buf<D>,
    base: Buf<D>,
    mix: Mix<Buf<D>>,
    params: SublayerParams,
}

impl<D: Device> Finish<D> {
    /// As `entering` of sublayer.h takes them.
    fn bindings(&self) -> [Binding<D::Buffer>; 8] {
        let mix = &self.mix;
        [&self.norm, &self.normed, &self.sums, &self.scale, &self.base, &mix.pre, &mix.post, &mix.comb]
            .map(Buf::binding)
    }
}

/// The row that a launch takes in before its norm, as its kernel has it.
pub(crate) struct Entering<D: Device> {
    pub x: Binding<D::Buffer>,
    pub bindings: [Binding<D::Buffer>; 8],
    pub params: SublayerParams,
    /// Threadgroups in front of the launch's own.
    pub groups: usize,
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
            parts: u32_of(norm_threads(width) / 32),
            first: input.is_none().into(),
            mix_part: 1.0 / (STREAMS * width) as f32,
            norm_part: 1.0 / width as f32,
            eps: constants.eps,
            norm_eps: constants.norm_eps,
            iterations: u32_of(constants.iterations),
        };
        let [scale, base] = [scale.clone(), base.clone()];
        let [x, norm, normed] = [x, norm, normed].map(Buf::clone);
        let finish = Finish { x, norm, normed, sums, scale, base, mix: mix.clone(), params };
        if input.is_some() {
            self.defer(Pending::Finish(finish));
        } else {
            self.finish_alone(&finish);
        }
        mix
    }

    /// A way in whose end no launch took in.
    pub(crate) fn finish_alone(&self, f: &Finish<D>) {
        let [norm, normed, rest @ ..] = f.bindings();
        let bindings: Vec<_> = [f.x.binding(), norm, normed].into_iter().chain(rest).collect();
        let grid = [if f.params.first == 0 { 2 } else { 1 }, f.mix.pre.rows(), 1];
        let threads = [norm_threads(f.params.width as usize), 1, 1];
        self.record("sublayer_finish", &[self.rounding()], &bindings, &f.params, grid, threads);
    }

    /// Whether the end of a sublayer's way in, of one row `x`, waits for a launch that takes it in.
    pub(crate) fn enters(&self, x: &Buf<D>) -> bool {
        let waits = matches!(&*self.pending(), Some(Pending::Finish(f)) if f.normed.is(x));
        waits && x.rows() == 1 && !self.source()
    }

    /// What a launch of few rows binds for its input `x`: the end of a sublayer's way in, where that waits.
    pub(crate) fn entering(&self, x: &Buf<D>) -> Entering<D> {
        let enters = self.enters(x);
        let mut pending = self.pending();
        match pending.take() {
            Some(Pending::Finish(f)) if enters => {
                Entering { x: f.x.binding(), bindings: f.bindings(), params: f.params, groups: 2 }
            }
            other => {
                *pending = other;
                // Never touched.
                let bindings = std::array::from_fn(|_| x.binding());
                Entering { x: x.binding(), bindings, params: SublayerParams::default(), groups: 0 }
            }
        }
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
