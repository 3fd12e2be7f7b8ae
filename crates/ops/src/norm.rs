//! RMSNorm [§2.1].

use crate::{Backend, DeviceError, Mode, registry::*};

/// 1/sqrt(x), correctly rounded.
#[inline]
pub fn rsqrt(x: f32) -> f32 {
    (1.0 / f64::from(x).sqrt()) as f32
}

/// mean(x²): the sum, taken in double precision in eight lanes, rounded to single and times 1/n. PyTorch multiplies by the
/// reciprocal on CUDA, which is not the correctly rounded quotient and decides bits of a normed row.
pub fn mean_square(x: &[f32]) -> f32 {
    let mut lanes = [0.0f64; 8];
    let chunks = x.chunks_exact(8);
    let tail: f64 = chunks.remainder().iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*v) * f64::from(*v);
        }
    }
    (lanes.iter().sum::<f64>() + tail) as f32 * (1.0 / x.len() as f32)
}

/// One row: w · (x · rsqrt(mean(x²) + eps)).
pub fn rmsnorm_row(mode: Mode, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let r = rsqrt(mean_square(x) + eps);
    for ((o, v), w) in out.iter_mut().zip(x).zip(weight) {
        *o = mode.bf16(w * (v * r));
    }
}

/// Registry entry of RMSNorm.
pub struct RmsNorm;

impl Operator for RmsNorm {
    const SPEC: Spec = Spec {
        name: "rmsnorm",
        section: "2.1",
        contract: "x [T, d], weight [d] -> y [T, d] = weight * (x * rsqrt(mean(x^2) + eps)); one statistic a row",
        exact: Tolerance::nrms(3e-7, "summation order of the mean, two fp32 products"),
        source: Tolerance::nrms(3e-4, "a last-bit change of the statistic flips isolated bf16 roundings"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("x", &[g.hidden], 1.0).shared_normal("weight", &[g.hidden], 0.1, 1.0);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let y = b.rmsnorm(&c.buf(b, "x")?, &c.buf(b, "weight")?, 1e-20);
        Ok(vec![("y", b.read(&y)?)])
    }
}
