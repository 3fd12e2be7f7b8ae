//! What can go wrong in the model.

/// An error of loading or running a model.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint is bad, unsupported or unreadable.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] ops::DeviceError),
    /// A token id that the embedding does not have.
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    Token {
        /// The id.
        id: u32,
        /// Entries of the vocabulary.
        vocab: usize,
    },
    /// A step longer than the context that was reserved.
    #[error("{need} tokens do not fit the context of {context}; ask for a longer --context or send less")]
    Context {
        /// Tokens after the step.
        need: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// A context that the model does not have.
    #[error("a context of {context} tokens is more than the model's max_position_embeddings of {max}")]
    Positions {
        /// Tokens asked for.
        context: usize,
        /// Positions of the model.
        max: usize,
    },
    /// The token map does not belong to the model.
    #[error("the Engram token map has {got} ids, the vocabulary {vocab}")]
    TokenMap {
        /// Ids of the map.
        got: usize,
        /// Entries of the vocabulary.
        vocab: usize,
    },
}
