//! Request bodies of three APIs, checked and turned into one form (spec section 7).

mod chat;
mod common;
mod error;
mod messages;
mod responses;

use std::borrow::Cow;

use crate::conversation::ToolCall;
use crate::conversation::{Content, Conversation, Message, ResponseFormat, Think, Tool, ToolChoice};
use crate::parser::{ParserOptions, Start};
use crate::render::{self, Part, Rendered, Turn};
use crate::special::BOS;
use crate::{Effort, Image, Prompt, SamplingParams, TextError, Tokenizer};
pub use error::RequestError;

/// Which API a body is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `POST /v1/chat/completions`.
    Chat,
    /// `POST /v1/messages` (Anthropic).
    Messages,
    /// `POST /v1/responses`.
    Responses,
}

/// How the server is set up, as far as reading requests depends on it.
#[derive(Debug, Clone)]
pub struct Options {
    /// Model names that are served; with an empty list the name is not looked at.
    pub models: Vec<String>,
    /// Whether a request that does not say so thinks.
    pub thinks_by_default: bool,
    /// Replaces what the request says about thinking.
    pub think: Option<Think>,
    /// Refuses, with thinking and tools, an answer after the last user message that lacks its reasoning
    /// (spec section 3.3); else it counts as empty.
    pub strict_reasoning: bool,
    /// Most answers to one request.
    pub max_choices: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            models: Vec::new(),
            thinks_by_default: true,
            think: None,
            strict_reasoning: false,
            max_choices: 1,
        }
    }
}

/// Longest answer that a request may ask for.
pub const LARGEST_MAX_TOKENS: u32 = 393_216;

/// A checked request.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// What the model reads.
    pub input: Input,
    /// The model name as sent.
    pub model: Option<String>,
    /// Sampling parameters with every field used as sent; see [`SamplingParams::official`] for the other mode.
    pub sampling: SamplingParams,
    /// Token limit as sent; see [`max_tokens`](Self::max_tokens).
    pub requested_max_tokens: Option<u32>,
    /// Whether log-probabilities are reported.
    pub logprobs: bool,
    /// Alternatives reported for each token, at most 20.
    pub top_logprobs: Option<u8>,
    /// Number of answers.
    pub choices: u32,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether chunks before the last carry a null usage.
    pub include_usage: bool,
    /// How the output is read, stop strings included.
    pub parser: ParserOptions,
    /// What a grammar may enforce on the output.
    pub constraint: Option<Constraint>,
    /// Whether one answer may have several tool calls; only a grammar keeps it to one.
    pub parallel_calls: bool,
    /// Whether the answer must be a block of calls that the prompt does not open (Messages, `any`).
    pub forced_call: bool,
    /// Separates prefix-cache entries.
    pub user_id: Option<String>,
    /// Flattened name, namespace and own name of each namespace tool (Responses).
    pub namespaces: Vec<NamespaceTool>,
}

/// What the model reads.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A conversation, to be rendered.
    Conversation(Conversation),
    /// A ready prompt, tokenised with the full vocabulary.
    Raw(String),
}

/// A tool of a Responses namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceTool {
    /// The name that the model sees.
    pub flat: String,
    /// The namespace.
    pub namespace: String,
    /// The name inside the namespace.
    pub name: String,
}

/// What a grammar may enforce on the output (spec section 10); with thinking on it starts after the reasoning.
#[derive(Debug, Clone, PartialEq)]
pub enum Constraint {
    /// Any JSON, or JSON that follows a schema.
    Json(Option<serde_json::Value>),
    /// Text that matches an expression.
    Regex(String),
    /// A block of calls of these tools.
    ToolCalls {
        /// The tools.
        tools: Vec<Tool>,
        /// Whether there must be a call.
        required: bool,
        /// What an answer without a call must follow.
        answer: Option<Box<Constraint>>,
    },
}

impl Constraint {
    /// The constraint's kind by name.
    pub fn kind(&self) -> &'static str {
        match self {
            Constraint::Json(_) => "json",
            Constraint::Regex(_) => "regex",
            Constraint::ToolCalls { required: false, .. } => "tool_call",
            Constraint::ToolCalls { required: true, .. } => "tool_call_required",
        }
    }

    /// The constraint as text: compact JSON of the schema or of the tools, the expression, or nothing for any JSON.
    pub fn schema(&self) -> String {
        match self {
            Constraint::Json(schema) => schema.as_ref().map(ToString::to_string).unwrap_or_default(),
            Constraint::Regex(regex) => regex.clone(),
            Constraint::ToolCalls { tools, .. } => {
                let function = |tool: &Tool| {
                    let mut function = serde_json::json!({"type": "function", "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.parameters,
                        "strict": tool.strict,
                    }});
                    if tool.deferred {
                        function["defer_loading"] = true.into();
                    }
                    function
                };
                tools.iter().map(function).collect::<serde_json::Value>().to_string()
            }
        }
    }
}

/// A prompt, ready for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The text with its special tokens marked; of a raw prompt all of it is plain.
    pub prompt: Prompt,
    /// Its token ids, one per image.
    pub ids: Vec<u32>,
    /// Images in the order of their tokens.
    pub images: Vec<Image>,
    /// The first token of each part, ascending.
    pub parts: Vec<(usize, Part)>,
    /// Tokens before the new answer's own; the prompt may open a block of calls behind them. None where the answer goes on
    /// with a message, or with a ready prompt.
    pub answer: Option<usize>,
    /// Earlier answers given to the model as it sampled them.
    pub recalled: usize,
}

/// What an earlier answer says, as the client gives it back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Said<'a> {
    /// Its reasoning, where the prompt has it.
    pub reasoning: Option<&'a str>,
    /// Its text.
    pub text: &'a str,
    /// Its calls.
    pub calls: &'a [ToolCall],
}

/// Gives the ids of an earlier answer as the model sampled them, its end token included, from the ids before it and from
/// what it says; none where it does not know them.
pub type Recall<'a> = dyn FnMut(&[u32], &Said) -> Option<Vec<u32>> + 'a;

impl Request {
    /// Reads the body of a request.
    pub fn from_json(api: Api, body: &[u8], options: &Options) -> Result<Self, RequestError> {
        match api {
            Api::Chat => chat::request(body, options),
            Api::Messages => messages::request(body, options),
            Api::Responses => responses::request(body, options),
        }
    }

    /// One user message.
    pub fn from_text(text: &str, think: Think) -> Self {
        let conversation = Conversation {
            messages: vec![Message::User { content: Content::text(text) }],
            think,
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            response_format: ResponseFormat::Text,
            task: None,
        };
        let start = if think.is_on() { Start::Reasoning } else { Start::Content };
        Self::new(Input::Conversation(conversation), ParserOptions::new(start))
    }

    /// A ready prompt: special tokens in it are recognised, the output is not parsed, special tokens in it stay as
    /// spelled (spec section 8.2).
    pub fn from_raw(prompt: &str) -> Self {
        Self::new(Input::Raw(prompt.to_owned()), ParserOptions::new(Start::Raw))
    }

    fn new(input: Input, parser: ParserOptions) -> Self {
        Self {
            input,
            model: None,
            sampling: SamplingParams::default(),
            requested_max_tokens: None,
            logprobs: false,
            top_logprobs: None,
            choices: 1,
            stream: false,
            include_usage: false,
            parser,
            constraint: None,
            parallel_calls: true,
            forced_call: false,
            user_id: None,
            namespaces: Vec::new(),
        }
    }

    /// Whether the answer begins with reasoning, and how much of it is asked for.
    pub fn think(&self) -> Think {
        match &self.input {
            Input::Conversation(conversation) => conversation.think,
            Input::Raw(_) => Think::Off,
        }
    }

    /// Tools that the model may call.
    pub fn tools(&self) -> &[Tool] {
        match &self.input {
            Input::Conversation(conversation) => &conversation.tools,
            Input::Raw(_) => &[],
        }
    }

    /// Renders the prompt and makes its ids. Fails on a special token that the tokenizer lacks and on a `logit_bias` for
    /// an id outside the vocabulary.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Encoded, TextError> {
        self.encode_recalling(tokenizer, &mut |_, _| None)
    }

    /// As [`encode`](Self::encode), with earlier answers as the model sampled them where `recall` knows them.
    ///
    /// # Errors
    /// As there.
    pub fn encode_recalling(&self, tokenizer: &Tokenizer, recall: &mut Recall) -> Result<Encoded, TextError> {
        for (id, _) in &self.sampling.logit_bias {
            tokenizer.token_bytes(*id)?;
        }
        match &self.input {
            Input::Conversation(conversation) => {
                let Rendered { prompt, images, parts, turns, answer } = render::render_parts(conversation);
                let mut encoder =
                    Encoder { tokenizer, prompt: &prompt, ids: Vec::new(), at: 0, starts: Vec::new() };
                let mut recalled = 0;
                for turn in &turns {
                    encoder.take(turn.body.start)?;
                    let Turn { reasoning, text, calls, .. } = turn;
                    let said = Said { reasoning: reasoning.as_deref(), text, calls };
                    match recall(&encoder.ids, &said) {
                        Some(ids) => {
                            encoder.replace(turn.body.end, &ids);
                            recalled += 1;
                        }
                        None => encoder.take(turn.body.end)?,
                    }
                }
                // The answer's header ends with a special token, so that its text can be encoded apart.
                let mut before = None;
                if let Some(at) = answer {
                    encoder.take(at)?;
                    before = Some(encoder.ids.len());
                }
                encoder.take(prompt.text().len())?;
                let parts = parts.into_iter().map(|(byte, part)| (encoder.token_at(byte), part)).collect();
                let ids = encoder.ids;
                Ok(Encoded { ids, prompt, images, parts, answer: before, recalled })
            }
            Input::Raw(text) => {
                let text = if text.starts_with(BOS) {
                    Cow::Borrowed(text.as_str())
                } else {
                    Cow::Owned(format!("{BOS}{text}"))
                };
                let ids = tokenizer.encode_with_added(&text);
                let parts = vec![(0, Part::Given)];
                let prompt = Prompt::plain(text);
                Ok(Encoded { prompt, ids, images: Vec::new(), parts, answer: None, recalled: 0 })
            }
        }
    }

    /// Token limit of the answer to a prompt of `prompt_tokens` in a context of `context` tokens: what was asked for,
    /// else a default by thinking and effort, lowered to what the context leaves, at least 1 (spec section 7.2).
    pub fn max_tokens(&self, prompt_tokens: usize, context: usize) -> Result<usize, RequestError> {
        let requested = self.requested_max_tokens.map(|n| n as usize);
        let total = prompt_tokens.saturating_add(requested.unwrap_or(0));
        if total > context {
            return Err(RequestError::invalid(format!(
                "the context holds {context} tokens, but the request needs {total}: {prompt_tokens} in the prompt and \
                 {} for the answer; shorten the prompt or lower max_tokens",
                requested.unwrap_or(0)
            )));
        }
        let default = match self.think() {
            Think::Off => 8 * 1024,
            Think::On(Effort::Max | Effort::Budget(100)) => 128 * 1024,
            Think::On(_) => 64 * 1024,
        };
        Ok(requested.unwrap_or(default).min(context - prompt_tokens).max(1))
    }
}

/// Encodes a prompt in pieces that end at special tokens, so that the ids are those of the whole.
struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    prompt: &'a Prompt,
    ids: Vec<u32>,
    /// Bytes done.
    at: usize,
    /// First byte and first token of each piece.
    starts: Vec<(usize, usize)>,
}

impl Encoder<'_> {
    /// Encodes up to byte `end`.
    fn take(&mut self, end: usize) -> Result<(), TextError> {
        self.starts.push((self.at, self.ids.len()));
        self.ids.extend(self.tokenizer.encode_prompt(&self.prompt.part(self.at..end))?);
        self.at = end;
        Ok(())
    }

    /// Puts `ids` in the place of the text up to byte `end`.
    fn replace(&mut self, end: usize, ids: &[u32]) {
        self.starts.push((self.at, self.ids.len()));
        self.ids.extend_from_slice(ids);
        self.at = end;
    }

    /// The token that holds byte `at`; in a piece that was replaced, one near it.
    fn token_at(&self, at: usize) -> usize {
        let piece = self.starts.partition_point(|(byte, _)| *byte <= at).saturating_sub(1);
        let Some(&(mut byte, mut token)) = self.starts.get(piece) else { return 0 };
        let end = self.starts.get(piece + 1).map_or(self.ids.len(), |(_, token)| *token);
        while token < end {
            byte += self.tokenizer.token_bytes(self.ids[token]).map_or(0, <[u8]>::len);
            if byte > at {
                break;
            }
            token += 1;
        }
        token
    }
}
