//! Why quantising or comparing ends early.

use std::path::{Path, PathBuf};

/// An error with the exit code that the command line gives it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint is bad, unsupported or unreadable.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// Running the model failed.
    #[error(transparent)]
    Model(#[from] model::Error),
    /// The tokenizer is bad.
    #[error(transparent)]
    Text(#[from] text::TextError),
    /// The CPU backend could not be made.
    #[error(transparent)]
    Cpu(#[from] cpu::Error),
    /// The encoder refused a matrix.
    #[error("{module}: {source}")]
    Encoder {
        /// The layer.
        module: String,
        /// What the encoder says.
        source: exl3::Error,
    },
    /// Settings that do not go together.
    #[error("{0}")]
    Settings(String),
    /// Something that is refused.
    #[error("{0}")]
    Refused(String),
    /// A file of texts that is none.
    #[error("{0}")]
    Input(String),
    /// The operating system refused to read or write.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Checkpoint(e) | Error::Model(model::Error::Checkpoint(e)) => e.exit_code(),
            Error::Model(model::Error::Device(e)) if e.refused => 3,
            Error::Model(model::Error::Device(_)) => 6,
            Error::Model(_) | Error::Text(_) | Error::Input(_) | Error::Encoder { .. } => 4,
            Error::Settings(_) => 2,
            Error::Refused(_) | Error::Cpu(_) => 3,
            Error::Io { .. } => 6,
        }
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    }
}
