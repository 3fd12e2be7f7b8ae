//! Text in, text out for DeepSeek-V4.1-Flash: tokenizer, prompts, output parser.

#![forbid(unsafe_code)]

mod engram;
mod error;
mod prompt;
pub mod released;
mod tokenizer;

pub use engram::EngramMap;
pub use error::TextError;
pub use prompt::{Prompt, Segment};
pub use tokenizer::{Decoder, TextItem, TokenText, Tokenizer};
