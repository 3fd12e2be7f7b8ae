//! Anthropic messages.

use engine::{Answer, Reuse};
use serde_json::{Value, json};
use text::{Event, FinishReason};

use super::{Frame, Head, Wire, anthropic_error};
use crate::worker::{Failure, TokenLog};

#[derive(Clone, Copy, PartialEq)]
enum Block {
    Thinking,
    Text,
    Call,
}

/// An answer of `POST /v1/messages`.
pub struct Messages {
    head: Head,
    cached: usize,
    /// The blocks so far; of the open call the input is missing.
    content: Vec<Value>,
    open: Option<Block>,
    arguments: String,
    stop: (Value, Value),
    output_tokens: usize,
}

impl Messages {
    /// For one request.
    pub fn new(head: Head) -> Self {
        Self {
            head,
            cached: 0,
            content: Vec::new(),
            open: None,
            arguments: String::new(),
            stop: (Value::Null, Value::Null),
            output_tokens: 0,
        }
    }

    fn usage(&self) -> Value {
        json!({
            "input_tokens": self.head.prompt_tokens - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.output_tokens,
            "service_tier": "standard",
        })
    }

    fn message(&self) -> Value {
        json!({
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": self.content,
            "stop_reason": self.stop.0,
            "stop_sequence": self.stop.1,
            "usage": self.usage(),
        })
    }

    fn push(out: &mut Vec<Frame>, event: &'static str, mut data: Value) {
        let mut whole = json!({"type": event});
        if let (Some(whole), Some(data)) = (whole.as_object_mut(), data.as_object_mut()) {
            whole.append(data);
        }
        out.push(Frame { event: Some(event), data: whole });
    }

    fn open(&mut self, kind: Block, block: Value, out: &mut Vec<Frame>) {
        self.close(out);
        let index = self.content.len();
        Self::push(out, "content_block_start", json!({"index": index, "content_block": block}));
        if index == 0 {
            Self::push(out, "ping", json!({}));
        }
        self.content.push(block);
        self.open = Some(kind);
    }

    fn delta(&self, delta: Value, out: &mut Vec<Frame>) {
        let index = self.content.len().saturating_sub(1);
        Self::push(out, "content_block_delta", json!({"index": index, "delta": delta}));
    }

    fn close(&mut self, out: &mut Vec<Frame>) {
        let Some(kind) = self.open.take() else { return };
        let signature = self.head.id.clone();
        if kind == Block::Thinking {
            self.delta(json!({"type": "signature_delta", "signature": signature}), out);
        }
        let arguments = std::mem::take(&mut self.arguments);
        if let Some(block) = self.content.last_mut() {
            match kind {
                Block::Thinking => block["signature"] = signature.into(),
                Block::Call => {
                    let input = serde_json::from_str(&arguments).ok().filter(Value::is_object);
                    block["input"] = input.unwrap_or_else(|| json!({}));
                }
                Block::Text => {}
            }
        }
        Self::push(out, "content_block_stop", json!({"index": self.content.len().saturating_sub(1)}));
    }

    fn append(&mut self, field: &str, text: &str) {
        if let Some(Value::String(whole)) = self.content.last_mut().and_then(|block| block.get_mut(field)) {
            whole.push_str(text);
        }
    }
}

impl Wire for Messages {
    fn begin(&mut self, reuse: &Reuse, out: &mut Vec<Frame>) {
        self.cached = reuse.kept;
        Self::push(out, "message_start", json!({"message": self.message()}));
        if self.head.thinking {
            self.open(Block::Thinking, json!({"type": "thinking", "thinking": "", "signature": ""}), out);
        }
    }

    fn event(&mut self, event: &Event, _: &[TokenLog], out: &mut Vec<Frame>) {
        match event {
            Event::Reasoning(piece) => {
                self.append("thinking", &piece.text);
                self.delta(json!({"type": "thinking_delta", "thinking": piece.text}), out);
            }
            Event::Content(piece) => {
                if self.open != Some(Block::Text) {
                    self.open(Block::Text, json!({"type": "text", "text": ""}), out);
                }
                self.append("text", &piece.text);
                self.delta(json!({"type": "text_delta", "text": piece.text}), out);
            }
            Event::CallOpened { id, name, .. } => {
                let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.open(Block::Call, block, out);
            }
            Event::Arguments { text, .. } => {
                self.arguments.push_str(text);
                self.delta(json!({"type": "input_json_delta", "partial_json": text}), out);
            }
        }
    }

    fn done(&mut self, answer: &Answer, _: &[TokenLog], out: &mut Vec<Frame>) {
        self.close(out);
        self.cached = answer.usage.cached_tokens;
        self.output_tokens = answer.usage.completion_tokens;
        let reason = match (&answer.stopped_by, answer.message.finish_reason) {
            (Some(_), _) => "stop_sequence",
            (None, Some(FinishReason::ToolCalls)) => "tool_use",
            (None, Some(FinishReason::Length | FinishReason::InsufficientSystemResource)) => "max_tokens",
            (None, Some(FinishReason::ContentFilter)) => "refusal",
            (None, Some(FinishReason::Stop) | None) => "end_turn",
        };
        self.stop = (reason.into(), answer.stopped_by.clone().into());
        let delta = json!({"stop_reason": self.stop.0, "stop_sequence": self.stop.1});
        Self::push(out, "message_delta", json!({"delta": delta, "usage": self.usage()}));
        Self::push(out, "message_stop", json!({}));
    }

    fn failed(&mut self, failure: &Failure, out: &mut Vec<Frame>) {
        out.push(Frame { event: Some("error"), data: anthropic_error(failure.status, &failure.message) });
    }

    fn whole(&mut self) -> Value {
        self.message()
    }
}
