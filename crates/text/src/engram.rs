//! Engram's compressed vocabulary: which tokens count as the same word (spec section 2.5).

use rustc_hash::FxHashMap;
use unicode_normalization::UnicodeNormalization;
use unicode_normalization::char::is_combining_mark;

use crate::error::sha256_hex;
use crate::{TextError, Tokenizer};

/// Token id to class, computed from the tokenizer at load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngramMap {
    /// Class of each id, numbered from 0 in order of first appearance.
    pub classes: Vec<u32>,
    /// Number of classes.
    pub count: usize,
    /// SHA-256 of `classes` as little-endian u32, in lower-case hex.
    pub sha256: String,
}

impl EngramMap {
    /// Computes the map for all ids of `tokenizer`.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, TextError> {
        let mut classes = Vec::with_capacity(tokenizer.vocab_size());
        let mut numbers: FxHashMap<String, u32> = FxHashMap::default();
        for id in 0..tokenizer.vocab_size() as u32 {
            let next = numbers.len() as u32;
            classes.push(*numbers.entry(key(tokenizer, id)?).or_insert(next));
        }
        let bytes: Vec<u8> = classes.iter().flat_map(|c| c.to_le_bytes()).collect();
        Ok(Self { count: numbers.len(), classes, sha256: sha256_hex(&bytes) })
    }

    /// Computes the map and checks its class count against the model's `engram_compressed_vocab_size`.
    pub fn checked(tokenizer: &Tokenizer, expected: usize) -> Result<Self, TextError> {
        let map = Self::new(tokenizer)?;
        if map.count != expected {
            let file = tokenizer.name().to_owned();
            return Err(TextError::EngramClasses { file, found: map.count, expected });
        }
        Ok(map)
    }
}

fn key(tokenizer: &Tokenizer, id: u32) -> Result<String, TextError> {
    let text = String::from_utf8_lossy(tokenizer.token_bytes(id)?);
    if text.contains(char::REPLACEMENT_CHARACTER) {
        return tokenizer.vocab_string(id);
    }
    let folded = if text.is_ascii() {
        text.to_ascii_lowercase()
    } else {
        text.nfkc().nfd().filter(|&c| !is_combining_mark(c)).flat_map(char::to_lowercase).collect()
    };
    let mut key = String::with_capacity(folded.len());
    for c in folded.chars() {
        let space = matches!(c, ' ' | '\t' | '\r' | '\n');
        if !space {
            key.push(c);
        } else if !key.ends_with(' ') {
            key.push(' ');
        }
    }
    if key != " " {
        key = key.trim().to_owned();
    }
    Ok(if key.is_empty() { text.into_owned() } else { key })
}
