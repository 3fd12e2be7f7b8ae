//! What can be wrong with a model folder.

use std::path::{Path, PathBuf};

/// A refused or unreadable checkpoint. The message is one sentence that names the file, tensor or field.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the folder says something that can't be true.
    #[error("{file}: {what}")]
    Invalid {
        /// The file.
        file: String,
        /// What is wrong, with the field or offset.
        what: String,
    },
    /// A tensor is missing, superfluous, misshapen, mistyped or holds a value that no weight may hold.
    #[error("{file}: tensor {tensor} {what}")]
    Tensor {
        /// The shard, or the folder where no shard has it.
        file: String,
        /// The tensor's full name.
        tensor: String,
        /// What is wrong.
        what: String,
    },
    /// A valid file of a kind that hallmark does not run.
    #[error("{file}: {what}")]
    Unsupported {
        /// The file or folder.
        file: String,
        /// What it is and what is wanted instead.
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
}

/// Result with the checkpoint's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The process exit code of the command line contract: 3 unsupported, 4 bad checkpoint, 6 I/O.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Unsupported { .. } => 3,
            Error::Invalid { .. } | Error::Tensor { .. } => 4,
            Error::Io { .. } => 6,
        }
    }

    pub(crate) fn invalid(file: impl Into<String>, what: impl Into<String>) -> Self {
        Error::Invalid { file: file.into(), what: what.into() }
    }

    pub(crate) fn unsupported(file: impl Into<String>, what: impl Into<String>) -> Self {
        Error::Unsupported { file: file.into(), what: what.into() }
    }

    pub(crate) fn tensor(
        file: impl Into<String>,
        tensor: impl Into<String>,
        what: impl Into<String>,
    ) -> Self {
        Error::Tensor { file: file.into(), tensor: tensor.into(), what: what.into() }
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    }
}
