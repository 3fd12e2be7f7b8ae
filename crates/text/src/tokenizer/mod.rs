//! The byte-level BPE tokenizer of the DeepSeek family (spec section 2).
//!
//! User text is encoded without the added vocabulary ([`Tokenizer::encode`]), so that no text that a user types
//! becomes a special token; prompts name their special tokens explicitly ([`Tokenizer::encode_prompt`]).

mod bpe;
mod file;
mod split;
mod utf8;

use std::path::Path;
use std::sync::OnceLock;

use aho_corasick::{AhoCorasick, MatchKind};
use rustc_hash::FxHashMap;

use crate::error::sha256_hex;
use crate::grammar::Grammars;
use crate::prompt::{Prompt, Segment};
use crate::{TextError, released};
pub use utf8::{Decoder, TextItem};

/// A loaded tokenizer. Immutable and cheap to share behind an `Arc`.
pub struct Tokenizer {
    name: String,
    sha256: String,
    bpe: bpe::Bpe,
    /// Bytes of all tokens, one after the other; `starts[id]..starts[id + 1]` are those of `id`.
    bytes: Vec<u8>,
    starts: Vec<u32>,
    added: Vec<bool>,
    special_ids: FxHashMap<String, u32>,
    /// Finds added tokens; the pattern number indexes `pattern_ids`.
    matcher: AhoCorasick,
    pattern_ids: Vec<u32>,
    /// Made when the first answer is to follow a grammar.
    grammars: OnceLock<Result<Grammars, String>>,
}

/// The text of a log-probability entry (spec section 7.2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenText {
    /// The token as text; `\xe4\xbd`, one escape per byte, when its bytes are not valid UTF-8.
    pub token: String,
    /// The token's bytes.
    pub bytes: Vec<u8>,
}

impl Tokenizer {
    /// Loads `tokenizer.json`.
    pub fn from_file(path: &Path) -> Result<Self, TextError> {
        let bytes =
            std::fs::read(path).map_err(|source| TextError::Read { path: path.to_owned(), source })?;
        Self::from_bytes(&bytes, &path.display().to_string())
    }

    /// Loads the contents of a `tokenizer.json`; errors call it `name`.
    pub fn from_bytes(json: &[u8], name: &str) -> Result<Self, TextError> {
        let fail = |reason: String| TextError::tokenizer(name, reason);
        let file = file::parse(json, name)?;
        let entries = file.model.vocab.0.len() + file.added_tokens.len();
        let size = file
            .model
            .vocab
            .0
            .iter()
            .map(|(_, id)| *id)
            .chain(file.added_tokens.iter().map(|t| t.id))
            .max()
            .map_or(0, |id| id as usize + 1);
        // Every id has an entry, so a file cannot ask for more memory than it is long.
        if size > entries {
            return Err(fail(format!("ids go up to {}, but there are only {entries} entries", size - 1)));
        }

        let mut spelled: Vec<Option<&str>> = vec![None; size];
        let mut ids: FxHashMap<&str, u32> = FxHashMap::default();
        for (token, id) in &file.model.vocab.0 {
            if let Some(other) = spelled[*id as usize].replace(token) {
                return Err(fail(format!("model.vocab gives id {id} to both {other:?} and {token:?}")));
            }
            if ids.insert(token, *id).is_some() {
                return Err(fail(format!("model.vocab lists {token:?} twice")));
            }
        }
        let mut added = vec![false; size];
        let mut special_ids = FxHashMap::default();
        for token in &file.added_tokens {
            let slot = &mut spelled[token.id as usize];
            if slot.is_some_and(|base| base != token.content) || added[token.id as usize] {
                return Err(fail(format!("added token {:?} reuses id {}", token.content, token.id)));
            }
            *slot = Some(&token.content);
            added[token.id as usize] = true;
            if token.content.is_empty()
                || special_ids.insert(token.content.clone().into_owned(), token.id).is_some()
            {
                return Err(fail(format!("added token {} is empty or listed twice", token.id)));
            }
        }

        let alphabet = Alphabet::new();
        let (mut bytes, mut starts) = (Vec::new(), vec![0u32]);
        for (id, token) in spelled.iter().enumerate() {
            let token = token.ok_or_else(|| fail(format!("id {id} has no entry")))?;
            match alphabet.decode(token) {
                Some(decoded) if !added[id] => bytes.extend(decoded),
                _ => bytes.extend_from_slice(token.as_bytes()),
            }
            starts.push(u32::try_from(bytes.len()).map_err(|_| fail("the vocabulary exceeds 4 GiB".into()))?);
        }

        let mut byte_ids = [0u32; 256];
        for (byte, id) in byte_ids.iter_mut().enumerate() {
            let symbol = alphabet.char(byte as u8);
            *id = *ids
                .get(symbol.encode_utf8(&mut [0; 4]) as &str)
                .ok_or_else(|| fail(format!("model.vocab has no entry {symbol:?} for byte {byte}")))?;
        }
        let mut merges = FxHashMap::with_capacity_and_hasher(file.model.merges.len(), Default::default());
        let mut joined = String::new();
        for (rank, merge) in (0u32..).zip(&file.model.merges) {
            let unknown = || fail(format!("model.merges[{rank}] names a token that model.vocab lacks"));
            let (left, right) = merge.parts().ok_or_else(unknown)?;
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            let id = |token: &str| ids.get(token).copied().ok_or_else(unknown);
            // A repeated pair keeps its last rank, as a map filled in order would.
            merges.insert((id(left)?, id(right)?), (rank, id(&joined)?));
        }

        let pattern_ids: Vec<u32> = file.added_tokens.iter().map(|t| t.id).collect();
        let matcher = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(file.added_tokens.iter().map(|t| t.content.as_bytes()))
            .map_err(|e| fail(format!("the added tokens cannot be searched for: {e}")))?;
        Ok(Self {
            name: name.to_owned(),
            sha256: sha256_hex(json),
            bpe: bpe::Bpe::new(byte_ids, merges),
            bytes,
            starts,
            added,
            special_ids,
            matcher,
            pattern_ids,
            grammars: OnceLock::new(),
        })
    }

    /// The name given at load, for error messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// SHA-256 of the file, in lower-case hex.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Whether the file is the one released with DeepSeek-V4.1-Flash.
    pub fn is_released(&self) -> bool {
        self.sha256 == released::V41_SHA256
    }

    /// Number of ids, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.added.len()
    }

    /// Whether `id` is a member of the added vocabulary; unknown ids are not.
    pub fn is_added(&self, id: u32) -> bool {
        self.added.get(id as usize).copied().unwrap_or(false)
    }

    /// Id of an added token by its exact spelling.
    pub fn special_id(&self, spelling: &str) -> Option<u32> {
        self.special_ids.get(spelling).copied()
    }

    /// The ids of `text`, without the added vocabulary: the rule for all user text (spec section 2.4).
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 4);
        self.encode_into(text, &mut bpe::Scratch::default(), &mut ids);
        ids
    }

    fn encode_into(&self, text: &str, scratch: &mut bpe::Scratch, ids: &mut Vec<u32>) {
        split::split(text, |piece| self.bpe.encode(piece.as_bytes(), scratch, ids));
    }

    /// The ids of `text` with the full vocabulary: added tokens first, leftmost and longest, the rest as
    /// [`encode`](Self::encode). Only for prompts that a user gives ready rendered, and for recorded raw output.
    pub fn encode_with_added(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 4);
        let mut scratch = bpe::Scratch::default();
        let mut at = 0;
        for found in self.matcher.find_iter(text) {
            self.encode_into(&text[at..found.start()], &mut scratch, &mut ids);
            ids.push(self.pattern_ids[found.pattern().as_usize()]);
            at = found.end();
        }
        self.encode_into(&text[at..], &mut scratch, &mut ids);
        ids
    }

    /// The ids of a rendered prompt: explicit special tokens by their spelling, each plain segment on its own.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::with_capacity(prompt.text().len() / 4);
        let mut scratch = bpe::Scratch::default();
        for segment in prompt.segments() {
            match segment {
                Segment::Plain(text) => self.encode_into(text, &mut scratch, &mut ids),
                Segment::Special(text) => ids.push(self.require_special(text)?),
            }
        }
        Ok(ids)
    }

    /// [`special_id`](Self::special_id), or the error that names what is missing.
    pub fn require_special(&self, spelling: &str) -> Result<u32, TextError> {
        self.special_id(spelling)
            .ok_or_else(|| TextError::NoSpecial { spelling: spelling.to_owned(), file: self.name.clone() })
    }

    /// What all grammars share, or why there are none.
    pub(crate) fn grammars(&self) -> Result<&Grammars, String> {
        self.grammars.get_or_init(|| Grammars::new(self)).as_ref().map_err(Clone::clone)
    }

    /// The bytes of one token; an added token gives its spelling.
    pub fn token_bytes(&self, id: u32) -> Result<&[u8], TextError> {
        if id as usize >= self.vocab_size() {
            return Err(TextError::UnknownId { id, size: self.vocab_size() });
        }
        Ok(&self.bytes[self.starts[id as usize] as usize..self.starts[id as usize + 1] as usize])
    }

    /// The bytes of a sequence of tokens.
    pub fn decode_bytes(&self, ids: &[u32]) -> Result<Vec<u8>, TextError> {
        let mut out = Vec::new();
        for &id in ids {
            out.extend_from_slice(self.token_bytes(id)?);
        }
        Ok(out)
    }

    /// The text of a sequence of tokens, invalid UTF-8 replaced by U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        Ok(String::from_utf8_lossy(&self.decode_bytes(ids)?).into_owned())
    }

    /// Token string and bytes of a log-probability entry.
    pub fn token_text(&self, id: u32) -> Result<TokenText, TextError> {
        let bytes = self.token_bytes(id)?;
        let token = match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes.iter().map(|b| format!("\\x{b:02x}")).collect(),
        };
        Ok(TokenText { token, bytes: bytes.to_owned() })
    }

    /// The token as `model.vocab` spells it: byte-level alphabet, added tokens as they are.
    pub fn vocab_string(&self, id: u32) -> Result<String, TextError> {
        let bytes = self.token_bytes(id)?;
        Ok(if self.is_added(id) {
            String::from_utf8_lossy(bytes).into_owned()
        } else {
            let alphabet = Alphabet::new();
            bytes.iter().map(|&b| alphabet.char(b)).collect()
        })
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({}, {} ids, sha256 {})", self.name, self.vocab_size(), self.sha256)
    }
}

/// The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up.
struct Alphabet([char; 256]);

impl Alphabet {
    fn new() -> Self {
        let mut next = 0x100u32;
        Self(std::array::from_fn(|byte| match byte {
            33..=126 | 161..=172 | 174..=255 => char::from(byte as u8),
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
            }
        }))
    }

    fn char(&self, byte: u8) -> char {
        self.0[byte as usize]
    }

    /// The bytes that `token` stands for, or nothing if it has a character outside the alphabet.
    fn decode(&self, token: &str) -> Option<Vec<u8>> {
        let byte = |c: char| match c as u32 {
            0x100..0x144 => (0..=255u8).find(|&b| self.char(b) == c),
            code => u8::try_from(code).ok().filter(|&b| self.char(b) == c),
        };
        token.chars().map(byte).collect()
    }
}
