//! Names of prefixes: a hash over the tokens from the first on, page by page.

use std::fmt;

use sha2::{Digest, Sha256};

/// Hash of a prefix. Found by it, never trusted by it: tokens are compared one by one before a state is used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key([u8; 16]);

impl Key {
    /// The empty prefix of a model.
    pub fn root(identity: &[u8; 32]) -> Self {
        Self::of(&Sha256::digest(identity))
    }

    fn of(digest: &[u8]) -> Self {
        let mut key = [0; 16];
        key.copy_from_slice(&digest[..16]);
        Self(key)
    }

    /// This prefix and `ids` behind it.
    pub fn then(self, ids: &[u32]) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0);
        ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        Self::of(&hash.finalize())
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// From the form that [`fmt::Display`] gives.
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() != 32 || !text.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c)) {
            return None;
        }
        u128::from_str_radix(text, 16).ok().map(|v| Self(v.to_be_bytes()))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
