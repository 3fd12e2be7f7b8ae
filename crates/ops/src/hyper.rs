//! Single-pass manifold-constrained hyper-connections [§2.2].

use checkpoint::Form;

use crate::{
    Backend, DeviceError, Host, Mode,
    norm::{mean_square, rsqrt},
    registry::*,
};

/// Residual streams.
pub const STREAMS: usize = 4;
/// Coefficients of one mix: pre, post, comb.
pub const MIX: usize = 2 * STREAMS + STREAMS * STREAMS;

/// The coefficients of one sublayer: `pre [T, 4]`, `post [T, 4]`, `comb [T, 4, 4]` (input stream first).
#[derive(Clone, Debug)]
pub struct Mix<T> {
    /// Weights of the next sublayer's input.
    pub pre: T,
    /// Weights of this sublayer's output.
    pub post: T,
    /// Mixing of the streams, `[input][output]`.
    pub comb: T,
}

/// The constants of a mix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MixConstants {
    /// Sinkhorn normalisations of rows and of columns.
    pub iterations: usize,
    /// Added to pre, to the softmax and to every Sinkhorn denominator.
    pub eps: f32,
    /// Added to the mean square.
    pub norm_eps: f32,
}

#[inline]
fn sigmoid(exp: impl Fn(f32) -> f32, x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Sum of four in the reference's butterfly order.
#[inline]
fn sum4(a: [f32; 4]) -> f32 {
    (a[0] + a[2]) + (a[1] + a[3])
}

/// Doubly normalises exp(c): softmax over the output streams, then alternating columns and rows; the last
/// normalisation is over columns.
pub fn sinkhorn(c: [[f32; 4]; 4], constants: MixConstants) -> [[f32; 4]; 4] {
    sinkhorn_by(f32::exp, c, constants)
}

fn sinkhorn_by(exp: impl Fn(f32) -> f32, mut c: [[f32; 4]; 4], constants: MixConstants) -> [[f32; 4]; 4] {
    let eps = constants.eps;
    for row in &mut c {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let e = row.map(|v| exp(v - max));
        let sum = sum4(e);
        *row = e.map(|v| v / sum + eps);
    }
    let columns = |c: &mut [[f32; 4]; 4]| {
        for j in 0..STREAMS {
            let sum = sum4([c[0][j], c[1][j], c[2][j], c[3][j]]) + eps;
            c.iter_mut().for_each(|row| row[j] /= sum);
        }
    };
    columns(&mut c);
    for _ in 1..constants.iterations {
        for row in &mut c {
            let sum = sum4(*row) + eps;
            *row = row.map(|v| v / sum);
        }
        columns(&mut c);
    }
    c
}

/// Coefficients of one row from the projections `fn·f` (24 values) and mean(f²).
pub fn mix_row(
    projections: &[f32],
    mean: f32,
    scale: &[f32],
    base: &[f32],
    constants: MixConstants,
    pre: &mut [f32],
    post: &mut [f32],
    comb: &mut [f32],
) {
    mix_row_by(f32::exp, projections, mean, scale, base, constants, pre, post, comb);
}

/// [`mix_row`] with another exponential.
pub fn mix_row_by(
    exp: impl Fn(f32) -> f32 + Copy,
    projections: &[f32],
    mean: f32,
    scale: &[f32],
    base: &[f32],
    constants: MixConstants,
    pre: &mut [f32],
    post: &mut [f32],
    comb: &mut [f32],
) {
    let r = rsqrt(mean + constants.norm_eps);
    let m = |k: usize, s: usize| (projections[k] * r).mul_add(scale[s], base[k]);
    for i in 0..STREAMS {
        pre[i] = sigmoid(exp, m(i, 0)) + constants.eps;
        post[i] = 2.0 * sigmoid(exp, m(STREAMS + i, 1));
    }
    let mut c = [[0.0; 4]; 4];
    for (k, v) in c.as_flattened_mut().iter_mut().enumerate() {
        *v = m(2 * STREAMS + k, 2);
    }
    comb.copy_from_slice(sinkhorn_by(exp, c, constants).as_flattened());
}

/// The reference of [`Backend::hc_mix`].
pub fn hc_mix(
    streams: &Host,
    fun: &checkpoint::Weight,
    scale: &[f32],
    base: &[f32],
    constants: MixConstants,
) -> Mix<Host> {
    let rows = streams.rows();
    let projections = crate::linear::linear(Mode::Exact, crate::Io::F32, fun, streams.as_f32());
    let (mut pre, mut post, mut comb) = (vec![0.0; rows * 4], vec![0.0; rows * 4], vec![0.0; rows * 16]);
    for t in 0..rows {
        mix_row(
            &projections[t * MIX..][..MIX],
            mean_square(streams.row(t)),
            scale,
            base,
            constants,
            &mut pre[t * 4..][..4],
            &mut post[t * 4..][..4],
            &mut comb[t * 16..][..16],
        );
    }
    Mix {
        pre: Host::f32(&[rows, 4], pre),
        post: Host::f32(&[rows, 4], post),
        comb: Host::f32(&[rows, 4, 4], comb),
    }
}

/// One row of the sublayer's input: Σ_i pre[i]·X[i].
pub fn collapse_row(mode: Mode, streams: &[f32], pre: &[f32], out: &mut [f32]) {
    let d = out.len();
    for (k, o) in out.iter_mut().enumerate() {
        let sum = (0..STREAMS).fold(0.0, |acc, i| acc + pre[i] * streams[i * d + k]);
        *o = mode.bf16(sum);
    }
}

/// One row of the new streams: X'[j] = post[j]·y + Σ_i comb[i][j]·X[i].
pub fn expand_row(mode: Mode, streams: &[f32], y: &[f32], post: &[f32], comb: &[f32], out: &mut [f32]) {
    let d = y.len();
    for j in 0..STREAMS {
        for k in 0..d {
            let mixed = (0..STREAMS).fold(0.0, |acc, i| acc + comb[i * STREAMS + j] * streams[i * d + k]);
            out[j * d + k] = mode.bf16(post[j] * y[k] + mixed);
        }
    }
}

/// Registry entry of the mix.
pub struct HcMix;

impl Operator for HcMix {
    const SPEC: Spec = Spec {
        name: "hc_mix",
        section: "2.2",
        contract: "X [T, 4, d], fn [24, 4d] f32, scale [3], base [24] -> pre [T, 4], post [T, 4], comb [T, 4, 4]; all \
                   fp32; comb is [input][output], 20 Sinkhorn steps, columns last",
        exact: Tolerance::nrms(2e-6, "fp32 accumulation order over 4d, exp of 1 ulp"),
        source: Tolerance::nrms(2e-6, "fp32 accumulation order over 4d, exp of 1 ulp"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("streams", &[STREAMS, g.hidden], 1.0).weight("fn", Form::F32, MIX, STREAMS * g.hidden);
        c.shared_normal("scale", &[3], 0.2, 1.0).shared_normal("base", &[MIX], 1.0, 0.0);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let constants = MixConstants { iterations: 20, eps: 1e-6, norm_eps: 1e-20 };
        let (x, scale, base) = (c.buf(b, "streams")?, c.buf(b, "scale")?, c.buf(b, "base")?);
        let m = b.hc_mix(&x, &c.mat(b, "fn")?, &scale, &base, constants);
        Ok(vec![("pre", b.read(&m.pre)?), ("post", b.read(&m.post)?), ("comb", b.read(&m.comb)?)])
    }
}

/// Registry entry of the collapse.
pub struct HcCollapse;

impl Operator for HcCollapse {
    const SPEC: Spec = Spec {
        name: "hc_collapse",
        section: "2.2",
        contract: "X [T, 4, d], pre [T, 4] -> x [T, d] = sum_i pre_i X_i; source: result bf16",
        exact: Tolerance::nrms(2e-7, "fused multiply-adds"),
        source: Tolerance::nrms(2e-4, "fused multiply-adds flip isolated bf16 roundings"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("streams", &[STREAMS, g.hidden], 1.0).normal("pre", &[STREAMS], 0.3);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        Ok(vec![("x", b.read(&b.hc_collapse(&c.buf(b, "streams")?, &c.buf(b, "pre")?))?)])
    }
}

/// Registry entry of the expand.
pub struct HcExpand;

impl Operator for HcExpand {
    const SPEC: Spec = Spec {
        name: "hc_expand",
        section: "2.2",
        contract: "X [T, 4, d], y [T, d], post [T, 4], comb [T, 4, 4] -> X' [T, 4, d], X'_j = post_j y + sum_i comb_ij \
                   X_i; source: result bf16",
        exact: Tolerance::nrms(2e-7, "fused multiply-adds"),
        source: Tolerance::nrms(2e-4, "fused multiply-adds flip isolated bf16 roundings"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("streams", &[STREAMS, g.hidden], 1.0).normal("y", &[g.hidden], 1.0);
        c.normal("post", &[STREAMS], 0.5).normal("comb", &[STREAMS, STREAMS], 0.3);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let mix = Mix { pre: c.buf(b, "post")?, post: c.buf(b, "post")?, comb: c.buf(b, "comb")? };
        Ok(vec![("streams", b.read(&b.hc_expand(&c.buf(b, "streams")?, &c.buf(b, "y")?, &mix))?)])
    }
}
