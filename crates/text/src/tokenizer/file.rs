//! `tokenizer.json` as serde sees it, and the checks that it is a tokenizer of this family (spec section 2.2).

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::{MapAccess, Visitor};
use serde_json::Value;

use crate::TextError;

#[derive(Deserialize)]
pub(super) struct File<'a> {
    #[serde(borrow)]
    pub added_tokens: Vec<AddedToken<'a>>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    truncation: Value,
    #[serde(default)]
    padding: Value,
    #[serde(borrow)]
    pub model: Model<'a>,
}

#[derive(Deserialize)]
pub(super) struct AddedToken<'a> {
    pub id: u32,
    #[serde(borrow)]
    pub content: Cow<'a, str>,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

#[derive(Deserialize)]
pub(super) struct Model<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    dropout: Value,
    #[serde(default)]
    unk_token: Value,
    #[serde(default)]
    continuing_subword_prefix: Value,
    #[serde(default)]
    end_of_word_suffix: Value,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    #[serde(borrow)]
    pub vocab: Vocab<'a>,
    #[serde(borrow)]
    pub merges: Vec<Merge<'a>>,
}

/// The vocabulary as a list: a map would hide a repeated entry.
pub(super) struct Vocab<'a>(pub Vec<(Cow<'a, str>, u32)>);

impl<'de: 'a, 'a> Deserialize<'de> for Vocab<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Vec<(Cow<'de, str>, u32)>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of token to id")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some((Text(token), id)) = map.next_entry::<Text<'de>, u32>()? {
                    entries.push((token, id));
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Entries).map(Vocab)
    }
}

#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// A merge rule: `"a b"` in older files, `["a", "b"]` in newer ones.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Merge<'a> {
    Line(#[serde(borrow)] Cow<'a, str>),
    Pair(#[serde(borrow)] Cow<'a, str>, #[serde(borrow)] Cow<'a, str>),
}

impl Merge<'_> {
    /// Left and right part, or nothing when a line has no single space.
    pub fn parts(&self) -> Option<(&str, &str)> {
        match self {
            Merge::Line(line) => line.split_once(' ').filter(|(_, right)| !right.contains(' ')),
            Merge::Pair(left, right) => Some((left, right)),
        }
    }
}

/// The three splitting expressions of the family; `split` implements exactly these.
const SPLITS: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
];

/// Parses the file and refuses every setting that this crate would not honour.
pub(super) fn parse<'a>(bytes: &'a [u8], name: &str) -> Result<File<'a>, TextError> {
    let fail = |reason: String| TextError::tokenizer(name, reason);
    let file: File<'a> = serde_json::from_slice(bytes)
        .map_err(|e| fail(format!("not a tokenizer.json of a byte-level BPE tokenizer: {e}")))?;
    let model = &file.model;
    if model.kind.as_deref() != Some("BPE") {
        return Err(fail(format!("model.type is {:?}, only BPE is supported", model.kind)));
    }
    for (field, value) in [
        ("truncation", &file.truncation),
        ("padding", &file.padding),
        ("model.dropout", &model.dropout),
        ("model.unk_token", &model.unk_token),
        ("model.continuing_subword_prefix", &model.continuing_subword_prefix),
        ("model.end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if !value.is_null() && value.as_str() != Some("") {
            return Err(fail(format!("{field} is {value}, a DeepSeek tokenizer has none")));
        }
    }
    for (field, value) in
        [("model.byte_fallback", model.byte_fallback), ("model.ignore_merges", model.ignore_merges)]
    {
        if value {
            return Err(fail(format!("{field} is true, a DeepSeek tokenizer has it false")));
        }
    }
    let normalises =
        !file.normalizer.is_null() && file.normalizer["normalizers"].as_array().is_none_or(|n| !n.is_empty());
    if normalises {
        return Err(fail("normalizer is set, a DeepSeek tokenizer normalises nothing".into()));
    }
    if !file.post_processor.is_null() && file.post_processor["type"] != "ByteLevel" {
        return Err(fail("post_processor adds tokens, a DeepSeek tokenizer adds none".into()));
    }
    check_splits(&file.pre_tokenizer).map_err(fail)?;
    for token in &file.added_tokens {
        if token.single_word || token.lstrip || token.rstrip {
            return Err(fail(format!(
                "added token {:?} strips or wants whole words, which is not supported",
                token.content
            )));
        }
    }
    Ok(file)
}

fn check_splits(pre_tokenizer: &Value) -> Result<(), String> {
    let steps = pre_tokenizer["pretokenizers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let (Some(byte_level), true) = (steps.last(), steps.len() == SPLITS.len() + 1) else {
        return Err("pre_tokenizer is not the four-step sequence of the DeepSeek tokenizers".into());
    };
    for (i, (step, expected)) in steps.iter().zip(SPLITS).enumerate() {
        let regex = step["pattern"]["Regex"].as_str().unwrap_or_default();
        // Some writers escape line ends and the quote inside the class; the expression is the same.
        let regex = regex.replace("\\r", "\r").replace("\\n", "\n").replace("\\\"", "\"");
        if step["behavior"] != "Isolated" || step["invert"] != false || regex != expected {
            return Err(format!(
                "pre_tokenizer.pretokenizers[{i}] is not the DeepSeek splitting rule {expected:?}"
            ));
        }
    }
    if byte_level["type"] != "ByteLevel"
        || byte_level["add_prefix_space"] == true
        || byte_level["use_regex"] == true
    {
        return Err("pre_tokenizer.pretokenizers[3] is not a plain ByteLevel step".into());
    }
    Ok(())
}
