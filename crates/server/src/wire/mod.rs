//! Answers in the form of each API, as a stream and as a whole.

mod chat;
mod completions;
mod messages;
mod responses;

use std::sync::Arc;

use engine::{Answer, Reuse, sampler::LEAST_LOG_PROB};
use serde_json::{Value, json};
use text::{Event, Text, Tokenizer};

use crate::worker::{Failure, TokenLog};
pub use chat::Chat;
pub use completions::Completion;
pub use messages::Messages;
pub use responses::Responses;

/// One server-sent event.
pub struct Frame {
    /// Its name.
    pub event: Option<&'static str>,
    /// Its data.
    pub data: Value,
}

impl Frame {
    /// The bytes of the stream.
    pub fn write(&self, out: &mut Vec<u8>) {
        if let Some(event) = self.event {
            out.extend_from_slice(b"event: ");
            out.extend_from_slice(event.as_bytes());
            out.push(b'\n');
        }
        out.extend_from_slice(b"data: ");
        // A document of strings, numbers and lists is always written.
        let _ = serde_json::to_writer(&mut *out, &self.data);
        out.extend_from_slice(b"\n\n");
    }
}

/// What every answer repeats.
#[derive(Clone)]
pub struct Head {
    /// Id of the answer.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name as sent.
    pub model: String,
    /// What computes.
    pub fingerprint: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Whether the turn thinks.
    pub thinking: bool,
    /// Spells tokens of log-probabilities.
    pub tokenizer: Arc<Tokenizer>,
    /// Whether log-probabilities were asked for.
    pub log_probs: bool,
}

/// The form of one API. Pieces come in order; [`Wire::whole`] comes after [`Wire::done`].
pub trait Wire: Send {
    /// The first step is about to run.
    fn begin(&mut self, reuse: &Reuse, out: &mut Vec<Frame>);
    /// A piece; `logs` has the log-probabilities of all tokens so far, if they were asked for.
    fn event(&mut self, event: &Event, logs: &[TokenLog], out: &mut Vec<Frame>);
    /// The end.
    fn done(&mut self, answer: &Answer, logs: &[TokenLog], out: &mut Vec<Frame>);
    /// An end without an answer.
    fn failed(&mut self, failure: &Failure, out: &mut Vec<Frame>);
    /// The answer in one piece.
    fn whole(&mut self) -> Value;
    /// Whether `[DONE]` ends the stream.
    fn marks_end(&self) -> bool {
        false
    }
}

/// Entries of the log-probabilities of the tokens that gave a piece.
fn log_entries(head: &Head, piece: &Text, logs: &[TokenLog]) -> Vec<Value> {
    let entry = |id: u32, log_prob: f32| {
        let (token, bytes) = head.tokenizer.token_text(id).map(|t| (t.token, t.bytes)).unwrap_or_default();
        json!({"token": token, "logprob": finite(log_prob), "bytes": bytes})
    };
    let one = |log: &TokenLog| {
        let mut value = entry(log.id, log.log_prob);
        value["top_logprobs"] = log.top.iter().map(|&(id, log_prob)| entry(id, log_prob)).collect();
        value
    };
    piece.tokens.iter().filter_map(|&token| logs.get(token)).map(one).collect()
}

fn finite(log_prob: f32) -> f32 {
    if log_prob.is_finite() { log_prob } else { LEAST_LOG_PROB }
}

/// The error object of the OpenAI paths.
pub fn error(status: u16, message: &str) -> Value {
    let kind = match status {
        401 => "authentication_error",
        404 => "not_found_error",
        429 => "rate_limit_error",
        500 => "internal_error",
        503 => "service_unavailable",
        _ => "invalid_request_error",
    };
    json!({"error": {"message": message, "type": kind, "param": null, "code": kind}})
}

/// The error object of the Anthropic paths.
pub fn anthropic_error(status: u16, message: &str) -> Value {
    json!({"type": "error", "error": error(status, message)["error"]})
}
