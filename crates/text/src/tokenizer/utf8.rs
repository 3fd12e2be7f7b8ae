//! Streaming bytes to characters (spec section 6.1), constant work per token.

use super::Tokenizer;
use crate::TextError;

/// What the output parser reads: characters of ordinary tokens, and added tokens as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextItem {
    /// A character of ordinary tokens.
    Char(char),
    /// An id of the added vocabulary.
    Special(u32),
}

/// Turns ids into characters as soon as they are complete.
///
/// An incomplete character waits, at most three bytes; bytes that can never become valid turn into U+FFFD at once; an
/// added token turns a waiting tail into U+FFFD first. A tail that waits at the end of the stream is dropped.
#[derive(Debug, Clone, Default)]
pub struct Decoder {
    tail: Vec<u8>,
}

impl Decoder {
    /// Feeds one id and calls `item` for everything that is complete.
    pub fn items(
        &mut self,
        tokenizer: &Tokenizer,
        id: u32,
        mut item: impl FnMut(TextItem),
    ) -> Result<(), TextError> {
        let bytes = tokenizer.token_bytes(id)?;
        if tokenizer.is_added(id) {
            if !self.tail.is_empty() {
                self.tail.clear();
                item(TextItem::Char(char::REPLACEMENT_CHARACTER));
            }
            item(TextItem::Special(id));
            return Ok(());
        }
        self.tail.extend_from_slice(bytes);
        let mut rest: &[u8] = &self.tail;
        loop {
            let (valid, error) = match std::str::from_utf8(rest) {
                Ok(text) => (text, None),
                Err(e) => {
                    let valid = std::str::from_utf8(&rest[..e.valid_up_to()]).unwrap_or_default();
                    (valid, Some(e.error_len()))
                }
            };
            valid.chars().for_each(|c| item(TextItem::Char(c)));
            rest = &rest[valid.len()..];
            match error {
                Some(Some(invalid)) => {
                    item(TextItem::Char(char::REPLACEMENT_CHARACTER));
                    rest = &rest[invalid..];
                }
                Some(None) | None => break,
            }
        }
        let kept = self.tail.len() - rest.len();
        self.tail.drain(..kept);
        Ok(())
    }

    /// Feeds one id and appends the text that is complete; added tokens appear as spelled.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) -> Result<(), TextError> {
        let mut special = None;
        self.items(tokenizer, id, |item| match item {
            TextItem::Char(c) => text.push(c),
            TextItem::Special(id) => special = Some(id),
        })?;
        if let Some(id) = special {
            text.push_str(&String::from_utf8_lossy(tokenizer.token_bytes(id)?));
        }
        Ok(())
    }

    /// Whether the bytes of an incomplete character wait.
    pub fn is_pending(&self) -> bool {
        !self.tail.is_empty()
    }
}
