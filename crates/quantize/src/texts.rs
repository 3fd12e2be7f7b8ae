//! Texts for calibration and comparison.

use std::{fs::File, io::Read, path::Path};

use serde::Deserialize;
use text::Tokenizer;

use crate::{Error, Result};

/// Largest file that is read.
const MAX_BYTES: u64 = 1 << 30;

/// What `quantize` calibrates with unless told otherwise: prose, code and conversations written for this project.
const DEFAULT: &str = include_str!("../calibration.jsonl");

/// One document. Special tokens in it are recognised.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Text {
    /// What it is about, for tables.
    pub category: String,
    /// What comes first; the whole document where there is no right answer.
    #[serde(alias = "text")]
    pub prompt: String,
    /// The right continuation; empty where there is none.
    pub answer: String,
}

impl Text {
    /// Token ids, and how many of them are the prompt's.
    pub fn encode(&self, tokenizer: &Tokenizer) -> (Vec<u32>, usize) {
        let mut ids = tokenizer.encode_with_added(&self.prompt);
        let prompt = ids.len();
        ids.extend(tokenizer.encode_with_added(&self.answer));
        (ids, prompt)
    }
}

/// The texts of `path`: JSON lines with `text`, or `prompt` and `answer`, and `category`; anything else is one plain
/// text.
///
/// # Errors
/// A file that can't be read, is empty, or has a line that is no such object.
pub fn read_texts(path: &Path) -> Result<Vec<Text>> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|f| f.take(MAX_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|e| Error::Input(format!("{}: {e}", path.display())))?;
    let name = path.display();
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Error::Input(format!("{name}: has more than {MAX_BYTES} bytes")));
    }
    let text = String::from_utf8(bytes).map_err(|e| Error::Input(format!("{name}: is not UTF-8: {e}")))?;
    parse_texts(&text, &name.to_string())
}

/// As [`read_texts`]; `name` is what errors call the file.
///
/// # Errors
/// As [`read_texts`].
pub fn parse_texts(text: &str, name: &str) -> Result<Vec<Text>> {
    if !text.trim_start().starts_with('{') {
        let plain = Text { prompt: text.to_owned(), ..Text::default() };
        return if text.trim().is_empty() {
            Err(Error::Input(format!("{name}: is empty")))
        } else {
            Ok(vec![plain])
        };
    }
    let lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty());
    lines
        .map(|(i, line)| {
            let bad = |what: String| Error::Input(format!("{name}: line {}: {what}", i + 1));
            let t: Text = serde_json::from_str(line).map_err(|e| bad(format!("is no text: {e}")))?;
            if t.prompt.is_empty() {
                return Err(bad("has neither text nor prompt".into()));
            }
            Ok(t)
        })
        .collect()
}

/// The texts that the program carries.
pub fn default_calibration() -> Vec<Text> {
    parse_texts(DEFAULT, "calibration.jsonl").expect("the program's own file, checked by a test")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_plain_texts() {
        let all = parse_texts(
            "{\"text\": \"a\"}\n\n{\"prompt\": \"b\", \"answer\": \"c\", \"category\": \"d\"}\n",
            "f",
        )
        .unwrap();
        let text = |category: &str, prompt: &str, answer: &str| Text {
            category: category.into(),
            prompt: prompt.into(),
            answer: answer.into(),
        };
        assert_eq!(all, [text("", "a", ""), text("d", "b", "c")]);
        assert_eq!(parse_texts("plain\ntext", "f").unwrap(), [text("", "plain\ntext", "")]);
        for (bad, want) in [
            (" \n", "f: is empty"),
            ("{\"text\": 1}", "f: line 1: is no text"),
            ("{\"text\": \"a\"}\n{}", "f: line 2: has neither"),
        ] {
            let e = parse_texts(bad, "f").unwrap_err();
            assert!(e.to_string().contains(want) && e.exit_code() == 4, "{e}");
        }
    }

    #[test]
    fn the_program_s_own_texts_are_many_and_varied() {
        let all = default_calibration();
        assert!(all.len() >= 250 && all.iter().all(|t| !t.prompt.is_empty() && t.answer.is_empty()));
    }
}
