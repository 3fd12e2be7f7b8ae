//! Weights of the hyper-connections around a sublayer [§2.2].

use checkpoint::Config;
use ops::{Backend, blocks::SublayerWeights, hyper::MixConstants};

use crate::{
    Result, Weights,
    load::{Loader, mat, vector},
};

/// `part` is `attn` or `ffn`.
pub(crate) fn load<B: Backend>(
    b: &B,
    ckpt: &dyn Weights,
    prefix: &str,
    part: &str,
    c: &Config,
) -> Result<SublayerWeights<B>> {
    let at = Loader::new(b, ckpt, prefix);
    let constants = MixConstants { iterations: c.hc_sinkhorn_iters, eps: c.hc_eps, norm_eps: c.rms_norm_eps };
    Ok(SublayerWeights {
        fun: mat(&at, &format!("hc_{part}_fn"))?,
        scale: vector(&at, &format!("hc_{part}_scale"))?,
        base: vector(&at, &format!("hc_{part}_base"))?,
        constants,
        norm: vector(&at, &format!("{part}_norm"))?,
        tap: if part == "attn" { "hc_attn" } else { "hc_ffn" },
    })
}
