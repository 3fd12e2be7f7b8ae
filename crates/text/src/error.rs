//! Errors of the tokenizer and of everything that turns ids into text.

use std::path::PathBuf;

/// What can go wrong with a tokenizer file or with the ids given to it.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The file could not be read.
    #[error("cannot read the tokenizer file {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is not a DeepSeek tokenizer.
    #[error("{file}: {reason}")]
    Tokenizer {
        /// The file, as the caller named it.
        file: String,
        /// What is wrong and where.
        reason: String,
    },
    /// An id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {size} ids")]
    UnknownId {
        /// The id.
        id: u32,
        /// Number of ids.
        size: usize,
    },
    /// A prompt needs a special token that the tokenizer does not have.
    #[error(
        "{file} has no added token {spelling:?}, which the prompt needs; use the model's own tokenizer.json"
    )]
    NoSpecial {
        /// The token's text.
        spelling: String,
        /// The tokenizer file.
        file: String,
    },
    /// The Engram map of this tokenizer does not fit the model's configuration.
    #[error(
        "{file} gives {found} Engram token classes, but config.json says engram_compressed_vocab_size {expected}; \
         use the tokenizer.json that belongs to these weights"
    )]
    EngramClasses {
        /// The tokenizer file.
        file: String,
        /// Classes of this tokenizer.
        found: usize,
        /// Classes the configuration asks for.
        expected: usize,
    },
    /// The V4 tokenizer file, or the file rebuilt from it, has the wrong hash.
    #[error("{what} has SHA-256 {found}, expected {expected}")]
    Hash {
        /// The file.
        what: &'static str,
        /// Its hash.
        found: String,
        /// The hash it must have.
        expected: &'static str,
    },
}

impl TextError {
    pub(crate) fn tokenizer(file: &str, reason: impl Into<String>) -> Self {
        Self::Tokenizer { file: file.to_owned(), reason: reason.into() }
    }
}

/// Lower-case hexadecimal SHA-256.
pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}
