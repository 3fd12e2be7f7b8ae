//! A rendered prompt: text in which explicit special tokens are marked.

use std::ops::Range;

/// Prompt text and the byte ranges of its explicit special tokens.
///
/// Plain text that is appended piece by piece is one segment: BPE runs across the joints.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    text: String,
    special: Vec<Range<usize>>,
}

/// A maximal stretch of plain text, or one special token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment<'a> {
    /// Text that is tokenised without the added vocabulary.
    Plain(&'a str),
    /// The spelling of one added token.
    Special(&'a str),
}

impl Prompt {
    /// Plain text only.
    pub fn plain(text: impl Into<String>) -> Self {
        Self { text: text.into(), special: Vec::new() }
    }

    /// Appends plain text.
    pub fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Appends one special token.
    pub fn push_special(&mut self, spelling: &str) {
        let start = self.text.len();
        self.text.push_str(spelling);
        self.special.push(start..self.text.len());
    }

    /// Appends another prompt, its special tokens included.
    pub fn append(&mut self, other: &Prompt) {
        let offset = self.text.len();
        self.text.push_str(&other.text);
        self.special.extend(other.special.iter().map(|r| r.start + offset..r.end + offset));
    }

    /// The part of these bytes, whose ends must be character borders outside special tokens.
    pub(crate) fn part(&self, bytes: Range<usize>) -> Self {
        let at = bytes.start;
        let inside = |r: &&Range<usize>| r.start >= at && r.end <= bytes.end;
        Self {
            special: self.special.iter().filter(inside).map(|r| r.start - at..r.end - at).collect(),
            text: self.text[bytes].to_owned(),
        }
    }

    /// The whole text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether there is no text.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Byte ranges of the special tokens, ascending.
    pub fn special_ranges(&self) -> &[Range<usize>] {
        &self.special
    }

    /// The segments in order; no plain one is empty.
    pub fn segments(&self) -> impl Iterator<Item = Segment<'_>> {
        let mut at = 0;
        let mut parts = Vec::with_capacity(2 * self.special.len() + 1);
        for range in &self.special {
            parts.push(Segment::Plain(&self.text[at..range.start]));
            parts.push(Segment::Special(&self.text[range.clone()]));
            at = range.end;
        }
        parts.push(Segment::Plain(&self.text[at..]));
        parts.into_iter().filter(|s| *s != Segment::Plain(""))
    }
}
