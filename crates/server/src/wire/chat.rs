//! Chat completions.

use engine::{Answer, Reuse};
use serde_json::{Value, json};
use text::{Event, Message};

use super::{Frame, Head, Wire, error, log_entries};
use crate::worker::{Failure, TokenLog};

/// An answer of `POST /v1/chat/completions`.
pub struct Chat {
    head: Head,
    starts_reasoning: bool,
    include_usage: bool,
    message: Message,
    content_logs: Vec<Value>,
    reasoning_logs: Vec<Value>,
    usage: Value,
}

impl Chat {
    /// For one request; `starts_reasoning`: the output begins with reasoning.
    pub fn new(head: Head, starts_reasoning: bool, include_usage: bool) -> Self {
        Self {
            head,
            starts_reasoning,
            include_usage,
            message: Message::default(),
            content_logs: Vec::new(),
            reasoning_logs: Vec::new(),
            usage: Value::Null,
        }
    }

    fn chunk(&self, delta: Value, log_probs: Value, finish: Option<&str>) -> Frame {
        let head = &self.head;
        let mut data = json!({
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": [{"index": 0, "delta": delta, "logprobs": log_probs, "finish_reason": finish}],
        });
        if finish.is_some() {
            data["usage"] = self.usage.clone();
        } else if self.include_usage {
            data["usage"] = Value::Null;
        }
        Frame { event: None, data }
    }

    /// A delta of content, with the null beside it that thinking turns carry.
    fn content(&self, text: &str) -> Value {
        match self.head.thinking {
            true => json!({"content": text, "reasoning_content": null}),
            false => json!({"content": text}),
        }
    }
}

/// Usage as the OpenAI paths report it.
pub(super) fn usage(answer: &Answer, thinking: bool) -> Value {
    let u = &answer.usage;
    let mut usage = json!({
        "prompt_tokens": u.prompt_tokens,
        "completion_tokens": u.completion_tokens,
        "total_tokens": u.total_tokens,
        "prompt_tokens_details": {"cached_tokens": u.cached_tokens},
    });
    if thinking {
        usage["completion_tokens_details"] = json!({"reasoning_tokens": u.reasoning_tokens});
    }
    usage["prompt_cache_hit_tokens"] = u.cached_tokens.into();
    usage["prompt_cache_miss_tokens"] = (u.prompt_tokens - u.cached_tokens).into();
    usage
}

impl Wire for Chat {
    fn begin(&mut self, _: &Reuse, out: &mut Vec<Frame>) {
        let delta = match (self.starts_reasoning, self.head.thinking) {
            (true, _) => json!({"role": "assistant", "content": null, "reasoning_content": ""}),
            (false, true) => json!({"role": "assistant", "content": "", "reasoning_content": null}),
            (false, false) => json!({"role": "assistant", "content": ""}),
        };
        out.push(self.chunk(delta, Value::Null, None));
    }

    fn event(&mut self, event: &Event, logs: &[TokenLog], out: &mut Vec<Frame>) {
        self.message.apply(event);
        let mut log_probs = Value::Null;
        let delta = match event {
            Event::Reasoning(piece) => {
                if self.head.log_probs {
                    let entries = log_entries(&self.head, piece, logs);
                    self.reasoning_logs.extend_from_slice(&entries);
                    log_probs = json!({"content": null, "reasoning_content": entries});
                }
                json!({"content": null, "reasoning_content": piece.text})
            }
            Event::Content(piece) => {
                if self.head.log_probs {
                    let entries = log_entries(&self.head, piece, logs);
                    self.content_logs.extend_from_slice(&entries);
                    log_probs = json!({"content": entries, "reasoning_content": null});
                }
                self.content(&piece.text)
            }
            Event::CallOpened { index, id, name } => json!({"tool_calls": [{
                "index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""},
            }]}),
            Event::Arguments { index, text } => {
                json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            }
        };
        out.push(self.chunk(delta, log_probs, None));
    }

    fn done(&mut self, answer: &Answer, _: &[TokenLog], out: &mut Vec<Frame>) {
        self.usage = usage(answer, self.head.thinking);
        self.message.finish_reason = answer.message.finish_reason;
        let finish = self.message.finish_reason.map_or("stop", |f| f.as_str());
        out.push(self.chunk(self.content(""), Value::Null, Some(finish)));
    }

    fn failed(&mut self, failure: &Failure, out: &mut Vec<Frame>) {
        out.push(Frame { event: None, data: error(failure.status, &failure.message) });
    }

    fn whole(&mut self) -> Value {
        let message = &self.message;
        let mut sent = json!({"role": "assistant", "content": message.content});
        if self.head.thinking {
            sent["reasoning_content"] = message.reasoning.clone().into();
        }
        if !message.tool_calls.is_empty() {
            let call = |(index, call): (usize, &text::MessageCall)| {
                json!({"index": index, "id": call.id, "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments}})
            };
            sent["tool_calls"] = message.tool_calls.iter().enumerate().map(call).collect();
        }
        let log_probs = match self.head.log_probs {
            true => json!({"content": self.content_logs, "reasoning_content": self.reasoning_logs}),
            false => Value::Null,
        };
        let finish = message.finish_reason.map_or("stop", |f| f.as_str());
        json!({
            "id": self.head.id,
            "object": "chat.completion",
            "created": self.head.created,
            "model": self.head.model,
            "choices": [{"index": 0, "message": sent, "logprobs": log_probs, "finish_reason": finish}],
            "usage": self.usage,
            "system_fingerprint": self.head.fingerprint,
        })
    }

    fn marks_end(&self) -> bool {
        true
    }
}
