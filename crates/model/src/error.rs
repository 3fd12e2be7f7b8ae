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
    /// A length that a state cannot go back to in place.
    #[error("the state cannot go back to {len} tokens, only to {oldest} or more, or to none")]
    Truncate {
        /// Tokens asked for.
        len: usize,
        /// Fewest tokens that it can go back to.
        oldest: usize,
    },
    /// Bounded replay does not exist for the configuration.
    #[error("bounded replay is refused: config.json: {0}; use the full prefill")]
    Replay(String),
    /// A kept state that cannot be used.
    #[error("the kept state is not used: {0}; its tokens must be taken again")]
    Kept(#[from] crate::sealed::Unsealed),
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
