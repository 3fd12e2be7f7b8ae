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
    /// What the answer is to follow cannot be followed.
    #[error(transparent)]
    Guide(#[from] text::GuideError),
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
    /// A session that could not be finished in the memory that is left; nothing was begun. A server answers 503.
    #[error(
        "this conversation may take {need} bytes of memory and {free} are left for it; ask for a shorter --context, or end others first"
    )]
    Memory {
        /// Bytes of its state at its full context, and of a step.
        need: u64,
        /// Bytes that are not promised to others.
        free: u64,
    },
    /// More is to be resident than fits; nothing was read.
    #[error(
        "{need} bytes are to be brought into memory and {free} are free; leave Engram tables on disk with --engram mmap or --engram cache:SIZE, or weights without --prefault and --mlock"
    )]
    Resident {
        /// Bytes to bring.
        need: u64,
        /// Bytes free.
        free: u64,
    },
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
            Error::Memory { .. } | Error::Resident { .. } => 5,
            Error::Text(_) | Error::Model(model::Error::TokenMap { .. }) => 4,
            Error::Request(_) | Error::Guide(_) | Error::TooLong { .. } | Error::EmptyPrompt => 4,
            Error::Model(model::Error::Device(e)) if e.refused => 3,
            Error::Model(model::Error::Device(_)) | Error::Sampler(_) | Error::CacheDir(_) => 6,
            Error::Model(model::Error::Replay(_)) => 3,
            Error::Model(_) => 4,
            Error::Refused(_) | Error::Cpu(_) => 3,
        }
    }
}
