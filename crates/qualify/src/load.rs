//! A checkpoint as a model: the Engram map comes from its tokenizer.

use checkpoint::Checkpoint;
use model::Model;
use ops::Backend;
use text::{EngramMap, Tokenizer};

use crate::Result;

/// Engram class of every token, from the checkpoint's `tokenizer.json`.
///
/// # Errors
/// A tokenizer that is missing, damaged or does not belong to the weights.
pub fn token_map(checkpoint: &Checkpoint) -> Result<Vec<u32>> {
    let name = "tokenizer.json";
    let tokenizer = Tokenizer::from_bytes(&checkpoint.file(name)?, name)?;
    Ok(EngramMap::checked(&tokenizer, checkpoint.config().engram.compressed_vocab_size)?.classes)
}

/// The checkpoint's model on `backend`.
///
/// # Errors
/// Those of [`token_map`], and what the checkpoint or the device reports.
pub fn load<B: Backend>(checkpoint: &Checkpoint, backend: B) -> Result<Model<B>> {
    Ok(Model::load(backend, checkpoint, token_map(checkpoint)?)?)
}
