//! What can go wrong between a repository and a folder.

use std::path::{Path, PathBuf};

/// One sentence that names the address, file or folder, with the exit code of the command line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not a repository's name.
    #[error("{0}: name a repository and a revision as OWNER/NAME@REVISION (a branch, a tag or a commit)")]
    Name(String),
    /// The server cannot be reached, refuses, or does not answer as it should, after all attempts.
    #[error("{url}: {what}")]
    Server {
        /// Where.
        url: String,
        /// What happened and what helps.
        what: String,
    },
    /// The repository's list of files cannot be used.
    #[error("{repository}: {what}")]
    Repository {
        /// Which.
        repository: String,
        /// Why not.
        what: String,
    },
    /// Bytes are not those of the revision.
    #[error(
        "{file}: its {kind} is {got}, the revision's is {want}; the bad file is {}, pull again to fetch it anew",
        kept.display()
    )]
    Mismatch {
        /// Name in the repository.
        file: String,
        /// Which hash.
        kind: &'static str,
        /// What the bytes have.
        got: String,
        /// What the revision says.
        want: String,
        /// Where the bad file is.
        kept: PathBuf,
    },
    /// A file is in the way that no pull has written.
    #[error("{}: is another file than the revision's and was not written by a pull; move it away", .0.display())]
    Occupied(PathBuf),
    /// Another pull writes to the folder.
    #[error("{}: another pull writes to this folder; wait for it or choose another --out", .0.display())]
    Busy(PathBuf),
    /// The disk is too small.
    #[error("{}: {need} bytes are still to come and {free} are free; free some space or choose another --out", dir.display())]
    Space {
        /// The folder.
        dir: PathBuf,
        /// Bytes to come.
        need: u64,
        /// Bytes free.
        free: u64,
    },
    /// A downloaded configuration or header is bad.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
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
    /// The process exit code: 2 usage, 4 bad files, 5 no space, 6 network or I/O.
    pub fn exit_code(&self) -> u8 {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            Error::Name(_) => 2,
            Error::Mismatch { .. } | Error::Occupied(_) | Error::Repository { .. } => 4,
            Error::Space { .. } => 5,
            Error::Io { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded) => 5,
            Error::Checkpoint(e) => e.exit_code(),
            Error::Server { .. } | Error::Busy(_) | Error::Io { .. } => 6,
        }
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    }
}
