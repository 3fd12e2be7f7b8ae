//! What can go wrong in qualification.

use std::path::{Path, PathBuf};

/// An error of reading, running or writing; the message is one sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A trace, receipt, thresholds or document file says something that can't be used.
    #[error("{file}: {what}")]
    File {
        /// The file.
        file: String,
        /// What is wrong and what to do.
        what: String,
    },
    /// The operating system refused to read or write.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A request that does not fit the model or the trace.
    #[error("{0}")]
    Usage(String),
    /// The checkpoint is bad, unsupported or unreadable.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// The model could not run.
    #[error(transparent)]
    Model(#[from] model::Error),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] ops::DeviceError),
    /// A session could not run.
    #[error(transparent)]
    Engine(#[from] engine::Error),
    /// The tokenizer could not be read.
    #[error(transparent)]
    Text(#[from] text::TextError),
}

/// Result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The process exit code of the command line contract.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) => 2,
            Error::Engine(e) => e.exit_code(),
            Error::File { .. } | Error::Text(_) => 4,
            // A file that is not there was named wrongly.
            Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => 4,
            Error::Checkpoint(e) | Error::Model(model::Error::Checkpoint(e)) => e.exit_code(),
            Error::Model(model::Error::Device(_)) | Error::Device(_) | Error::Io { .. } => 6,
            Error::Model(_) => 4,
        }
    }

    pub(crate) fn file(file: impl Into<String>, what: impl Into<String>) -> Self {
        Error::File { file: file.into(), what: what.into() }
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    }
}
