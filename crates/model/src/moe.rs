//! Weights of a mixture of experts [§2.8].

use checkpoint::Config;
use ops::{Backend, ExpertWeights, blocks::MoeWeights};

use crate::{
    Result, Weights,
    load::{Loader, mat, vector},
};

/// A mixture of `count` experts, `top` a token.
pub(crate) fn load<B: Backend>(
    b: &B,
    ckpt: &dyn Weights,
    prefix: &str,
    c: &Config,
    count: usize,
    top: usize,
) -> Result<MoeWeights<B>> {
    let at = Loader::new(b, ckpt, prefix);
    let mut experts = Vec::with_capacity(count);
    for e in 0..count {
        let part = |w: &str| ckpt.weight(&format!("{prefix}experts.{e}.{w}"));
        experts.push(ExpertWeights { gate: part("w1")?, up: part("w3")?, down: part("w2")? });
    }
    Ok(MoeWeights {
        gate: mat(&at, "gate")?,
        bias: vector(&at, "gate.bias")?,
        bias_vl: vector(&at, "gate.bias_vl")?,
        experts: b.load_experts(experts)?,
        shared: [
            mat(&at, "shared_experts.w1")?,
            mat(&at, "shared_experts.w3")?,
            mat(&at, "shared_experts.w2")?,
        ],
        top,
        scale: c.routed_scaling_factor,
        limit: c.swiglu_limit,
    })
}
