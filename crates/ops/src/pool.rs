//! The ratio-2 compressor's pooling [§2.4].

use crate::{Backend, DeviceError, Mode, registry::*};

/// One group: per channel the softmax of two scores weighs the two values. `kv` and `score` hold both tokens' rows.
pub fn pool_pair(mode: Mode, kv: &[f32], score: &[f32], out: &mut [f32]) {
    let d = out.len();
    for c in 0..d {
        let (s0, s1) = (score[c], score[d + c]);
        let m = s0.max(s1);
        let (e0, e1) = ((s0 - m).exp(), (s1 - m).exp());
        let sum = e0 + e1;
        out[c] = mode.bf16(e0 / sum * kv[c] + e1 / sum * kv[d + c]);
    }
}

/// Registry entry of the pooling.
pub struct PoolPairs;

impl Operator for PoolPairs {
    const SPEC: Spec = Spec {
        name: "pool_pairs",
        section: "2.4",
        contract: "kv [G, 2, d], score [G, 2, d] -> latent [G, d]: softmax over the pair per channel; fp32, source: \
                   result bf16",
        exact: Tolerance::nrms(5e-7, "exp of 1 ulp, a fused multiply-add"),
        source: Tolerance::nrms(3e-4, "a last-bit change flips isolated bf16 roundings"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("kv", &[2, g.head_dim], 1.0).normal("score", &[2, g.head_dim], 2.0);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        Ok(vec![("latent", b.read(&b.pool_pairs(&c.buf(b, "kv")?, &c.buf(b, "score")?))?)])
    }
}
