//! Hashes of files, as a repository names them.

use std::io::Read;

use serde::{Deserialize, Serialize};
use sha1::{Digest, Sha1};
use sha2::Sha256;

/// What the bytes of a file must hash to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hash {
    /// SHA-256 of the bytes, of files in large storage.
    Sha256(String),
    /// Git's hash of a blob, SHA-1 over its length and bytes, of the others.
    GitBlob(String),
}

impl Hash {
    /// Its name in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Hash::Sha256(_) => "SHA-256",
            Hash::GitBlob(_) => "git hash",
        }
    }

    /// Lower-case hexadecimal.
    pub fn hex(&self) -> &str {
        match self {
            Hash::Sha256(hex) | Hash::GitBlob(hex) => hex,
        }
    }

    /// The same hash of `size` bytes.
    ///
    /// # Errors
    /// A failed read.
    pub fn of(&self, mut bytes: impl Read, size: u64) -> std::io::Result<String> {
        let mut buffer = vec![0; 1 << 20];
        let (mut sha256, mut sha1) = (Sha256::new(), Sha1::new());
        if matches!(self, Hash::GitBlob(_)) {
            sha1.update(format!("blob {size}\0"));
        }
        loop {
            let n = bytes.read(&mut buffer)?;
            match self {
                _ if n == 0 => break,
                Hash::Sha256(_) => sha256.update(&buffer[..n]),
                Hash::GitBlob(_) => sha1.update(&buffer[..n]),
            }
        }
        Ok(match self {
            Hash::Sha256(_) => hex(&sha256.finalize()),
            Hash::GitBlob(_) => hex(&sha1.finalize()),
        })
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Git's own hash of the file `hello\n`.
    #[test]
    fn a_small_file_hashes_as_git_does() {
        let hash = Hash::GitBlob(String::new());
        assert_eq!(hash.of(&b"hello\n"[..], 6).unwrap(), "ce013625030ba8dba906f756967f9e9ca394464a");
    }
}
