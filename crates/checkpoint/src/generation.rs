//! `generation_config.json`: what the model's maker says about sampling. The released model has none.

use serde::{Deserialize, Serialize};

use crate::{
    Checkpoint,
    error::{Error, Result},
};

const FILE: &str = "generation_config.json";

/// The fields of `generation_config.json` that bear on sampling; absent ones are `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    /// First token of a prompt.
    pub bos_token_id: Option<u32>,
    /// Tokens that end an answer.
    pub eos_token_id: Option<Stops>,
    /// Whether to sample at all.
    pub do_sample: Option<bool>,
    /// Softmax temperature.
    pub temperature: Option<f64>,
    /// Nucleus mass.
    pub top_p: Option<f64>,
}

/// One stop token or several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Stops {
    /// A single token.
    One(u32),
    /// Any of these.
    Any(Vec<u32>),
}

impl Checkpoint {
    /// The model's `generation_config.json`, if it has one.
    pub fn generation(&self) -> Result<Option<Generation>> {
        if !self.has_file(FILE) {
            return Ok(None);
        }
        let bytes = self.file(FILE)?;
        let label = format!("{}: {FILE}", self.location());
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|e| Error::invalid(label, format!("is not a valid generation configuration: {e}")))
    }
}
