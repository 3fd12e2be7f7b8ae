//! From a checkpoint to weights on a backend.

use checkpoint::{Checkpoint, Config, Role, Weight};
use ops::{Backend, Host, RopeTable, rope::Yarn};

use crate::{
    Model, Result, Ropes, attention, compressor::Source, dspark, engram, engram::Hasher, head, hyper,
    identity, indexer::Indexer, layer::Layer, moe,
};

/// Where a model's weights come from.
pub trait Weights {
    /// The weight of a module, by the name that [`Checkpoint::weight`] takes.
    ///
    /// # Errors
    /// A weight that is missing or can't be read.
    fn weight(&self, module: &str) -> checkpoint::Result<Weight>;
}

impl Weights for Checkpoint {
    fn weight(&self, module: &str) -> checkpoint::Result<Weight> {
        Checkpoint::weight(self, module)
    }
}

/// Reads weights whose names share a prefix.
pub(crate) struct Loader<'a, B: Backend> {
    backend: &'a B,
    ckpt: &'a dyn Weights,
    prefix: &'a str,
}

impl<'a, B: Backend> Loader<'a, B> {
    pub(crate) fn new(backend: &'a B, ckpt: &'a dyn Weights, prefix: &'a str) -> Self {
        Self { backend, ckpt, prefix }
    }
}

/// A weight in its stored form.
pub(crate) fn mat<B: Backend>(at: &Loader<'_, B>, name: &str) -> Result<B::Mat> {
    Ok(at.backend.load(&at.ckpt.weight(&format!("{}{name}", at.prefix))?)?)
}

/// A small weight as values, one row.
pub(crate) fn vector<B: Backend>(at: &Loader<'_, B>, name: &str) -> Result<B::Buf> {
    let w = at.ckpt.weight(&format!("{}{name}", at.prefix))?;
    Ok(at.backend.upload(&Host::f32(&[w.rows() * w.cols()], w.to_f32()))?)
}

/// A small weight as values, its rows kept.
pub(crate) fn matrix<B: Backend>(at: &Loader<'_, B>, name: &str) -> Result<B::Buf> {
    let w = at.ckpt.weight(&format!("{}{name}", at.prefix))?;
    Ok(at.backend.upload(&Host::f32(&[w.rows(), w.cols()], w.to_f32()))?)
}

/// The weights of layer `l`.
pub(crate) fn layer<B: Backend>(b: &B, ckpt: &dyn Weights, c: &Config, l: usize) -> Result<Layer<B>> {
    let plan = c.layer(l);
    let prefix = format!("layers.{l}.");
    let attn = format!("{prefix}attn.");
    let engram = match plan.engram {
        Some(index) => Some(engram::load(b, ckpt, &format!("{prefix}engram."), c, index)?),
        None => None,
    };
    Ok(Layer {
        engram,
        attn_in: hyper::load(b, ckpt, &prefix, "attn", c)?,
        attention: attention::load(b, ckpt, &attn, c)?,
        source: match plan.role {
            Role::Full => Some(Source::load(b, ckpt, &attn, c, plan.ratio)?),
            _ => None,
        },
        indexer: match plan.role {
            Role::Full | Role::Reindex => Some(Indexer::load(b, ckpt, &attn, c)?),
            _ => None,
        },
        ffn_in: hyper::load(b, ckpt, &prefix, "ffn", c)?,
        moe: moe::load(b, ckpt, &format!("{prefix}ffn."), c, c.n_routed_experts, c.num_experts_per_tok)?,
    })
}

impl Ropes {
    /// The tables of configuration `c`.
    pub(crate) fn new(c: &Config) -> Self {
        let yarn = Yarn {
            factor: c.yarn.factor,
            beta_fast: c.yarn.beta_fast,
            beta_slow: c.yarn.beta_slow,
            original: c.yarn.original_max_position_embeddings,
        };
        Self {
            plain: RopeTable::plain(c.rope_theta, c.qk_rope_head_dim),
            yarn: RopeTable::yarn(c.compress_rope_theta, c.qk_rope_head_dim, yarn),
        }
    }
}

impl<B: Backend> Model<B> {
    /// Prepares every weight of `ckpt` on `backend`; `token_map` gives the Engram id of every token.
    ///
    /// # Errors
    /// What the checkpoint or the device reports, or a map of the wrong size.
    pub fn load(backend: B, ckpt: &Checkpoint, token_map: Vec<u32>) -> Result<Self> {
        let mut model = Self::assemble(backend, ckpt.config().clone(), ckpt, token_map)?;
        let (b, c) = (&model.backend, &model.config);
        model.draft = if ckpt.has_dspark() { Some(dspark::load(b, ckpt, c)?) } else { None };
        model.identity = identity::identity(b, ckpt, &model.hasher.map)?;
        Ok(model)
    }

    /// The same from weights that are no checkpoint; without draft stages. States of such a model are not kept beyond
    /// it: it has no identity.
    ///
    /// # Errors
    /// What `weights` or the device reports, or a map of the wrong size.
    pub fn assemble(backend: B, config: Config, weights: &dyn Weights, token_map: Vec<u32>) -> Result<Self> {
        let (b, c) = (&backend, &config);
        let mut layers = Vec::with_capacity(c.num_hidden_layers);
        for l in 0..c.num_hidden_layers {
            layers.push(layer(b, weights, c, l)?);
        }
        let (embed, head) = (mat(&Loader::new(b, weights, ""), "embed")?, head::load(b, weights, c)?);
        let (ropes, hasher) = (Ropes::new(c), Hasher::new(c, token_map)?);
        Ok(Self { backend, config, embed, layers, head, ropes, hasher, draft: None, identity: [0; 32] })
    }
}
