//! Weights of the final norm and the head [§2.10].

use checkpoint::Config;
use ops::{Backend, blocks::HeadWeights};

use crate::{
    Result, Weights,
    load::{Loader, mat, vector},
};

pub(crate) fn load<B: Backend>(b: &B, ckpt: &dyn Weights, c: &Config) -> Result<HeadWeights<B>> {
    let at = Loader::new(b, ckpt, "");
    Ok(HeadWeights { norm: vector(&at, "norm")?, head: mat(&at, "head")?, eps: c.rms_norm_eps })
}
