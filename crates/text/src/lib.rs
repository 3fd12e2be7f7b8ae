//! Text in, text out for DeepSeek-V4.1-Flash: everything between an HTTP request and token ids, and between generated ids
//! and an HTTP answer. Section numbers in this crate refer to the encoding specification.
//!
//! ```text
//! body ─► Request ─► Conversation ─► Prompt ─► ids ─► (engine) ─► ids ─► Parser ─► Event ─► Message
//! ```
//!
//! - [`Tokenizer`] loads `tokenizer.json`; user text never becomes a special token. [`EngramMap`] is computed from it.
//! - [`Request`] reads the bodies of three APIs, or a plain text, and renders and encodes the prompt.
//! - [`Guide`] holds the output to a response format and to the form of tool calls.
//! - [`Parser`] splits generated ids into reasoning, answer and tool calls as they come.
//!
//! # Why not over the maker's library
//!
//! `deepseek-recipe` 0.2.0 does most of this, and its output is the reference of the fixtures. It is not a dependency: it
//! turns on the default features of `tokenizers`, which bring Oniguruma (C), esaxx (C++), `ring` and a download client, so
//! no build with it cross-compiles; and its parser and prompts lack the decisions of the specification (names with spaces,
//! invalid raw values, numeric efforts, tasks). This crate is tested equal to it on all its cases, and `crosscheck/`
//! compares the two on random requests and outputs.
//!
//! The tokenizer is own code too: without Oniguruma the `tokenizers` crate splits with an engine that ends its search
//! silently at a step limit, which a long run of spaces reaches. It is the oracle of a property test instead.

#![forbid(unsafe_code)]

mod call_id;
mod conversation;
mod engram;
mod error;
mod grammar;
mod image;
mod json;
mod parser;
mod prompt;
pub mod released;
mod render;
mod request;
mod sampling;
mod schema;
pub mod special;
mod template;
mod tokenizer;

pub use call_id::new_call_id;
pub use conversation::{
    Content, Conversation, Effort, Image, Message as ConversationMessage, ResponseFormat, Task, Think, Tool,
    ToolCall as ConversationToolCall, ToolChoice,
};
pub use engram::EngramMap;
pub use error::TextError;
pub use grammar::{Guide, GuideError, Steering};
pub use image::image_tokens;
pub use parser::{
    Event, FinishReason, Message, MessageCall, Parser, ParserOptions, Phase, Start, Stop, Text,
};
pub use prompt::{Prompt, Segment};
pub use render::{Part, render};
pub use request::{
    Api, Constraint, Encoded, Input, LARGEST_MAX_TOKENS, NamespaceTool, Options, Recall, Request,
    RequestError, Said,
};
pub use sampling::SamplingParams;
pub use tokenizer::{Decoder, TextItem, TokenText, Tokenizer};
