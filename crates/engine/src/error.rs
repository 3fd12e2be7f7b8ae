//! What can go wrong between a request and its answer.

/// An error with the exit code that the command line gives it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint is bad, unsupported or unreadable.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// Loading or running the model failed.
    #[error(transparent)]
    Model(#[from] model::Error),
    /// The tokenizer or its map is bad.
    #[error(transparent)]
    Text(#[from] text::TextError),
    /// No token can be drawn.
    #[error(transparent)]
    Sampler(#[from] crate::sampler::SamplerError),
    /// The request is not one.
    #[error(transparent)]
    Request(#[from] text::RequestError),
    /// What was asked for is not there, by a decision that the sentence explains.
    #[error("{0}")]
    Refused(String),
    /// The folder of the prefix cache cannot be used.
    #[error("{0}")]
    CacheDir(String),
    /// The device could not be made ready.
    #[error(transparent)]
    Cpu(#[from] cpu::Error),
    /// No token to begin with.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {prompt} tokens and the context holds {context}; shorten the prompt or ask for a longer --context"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that fit.
        context: usize,
    },
}

impl Error {
    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Checkpoint(e) | Error::Model(model::Error::Checkpoint(e)) => e.exit_code(),
            Error::Text(_) | Error::Model(model::Error::TokenMap { .. }) => 4,
            Error::Request(_) | Error::TooLong { .. } | Error::EmptyPrompt => 4,
            Error::Model(model::Error::Device(e)) if e.refused => 3,
            Error::Model(model::Error::Device(_)) | Error::Sampler(_) | Error::CacheDir(_) => 6,
            Error::Model(model::Error::Replay(_)) => 3,
            Error::Model(_) => 4,
            Error::Refused(_) | Error::Cpu(_) => 3,
        }
    }
}
