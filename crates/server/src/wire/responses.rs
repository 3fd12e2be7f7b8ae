//! OpenAI responses.

use engine::{Answer, Reuse};
use serde_json::{Value, json};
use text::{Event, FinishReason, NamespaceTool};

use super::{Frame, Head, Wire, error, log_entries};
use crate::worker::{Failure, TokenLog};

#[derive(Clone, Copy, PartialEq)]
enum Item {
    Reasoning,
    Message,
    Call,
}

/// An answer of `POST /v1/responses`.
pub struct Responses {
    head: Head,
    /// The response object without output, status and usage.
    echo: Value,
    namespaces: Vec<NamespaceTool>,
    output: Vec<Value>,
    open: Option<Item>,
    text: String,
    logs: Vec<Value>,
    sequence: u64,
    status: &'static str,
    incomplete: Option<&'static str>,
    usage: Value,
    failure: Value,
}

impl Responses {
    /// For one request; `body` is what was sent.
    pub fn new(head: Head, body: &Value, namespaces: Vec<NamespaceTool>) -> Self {
        Self {
            head,
            echo: echo(body),
            namespaces,
            output: Vec::new(),
            open: None,
            text: String::new(),
            logs: Vec::new(),
            sequence: 0,
            status: "in_progress",
            incomplete: None,
            usage: Value::Null,
            failure: Value::Null,
        }
    }

    fn response(&self) -> Value {
        let head = &self.head;
        let completed = if self.status == "in_progress" { Value::Null } else { head.created.into() };
        let mut response = json!({
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": self.status,
            "background": false,
            "completed_at": completed,
            "content_filters": null,
            "error": self.failure,
            "incomplete_details": self.incomplete.map(|reason| json!({"reason": reason})),
            "model": head.model,
            "output": self.output,
            "usage": self.usage,
        });
        for (key, value) in self.echo.as_object().into_iter().flatten() {
            response[key] = value.clone();
        }
        response
    }

    fn push(&mut self, out: &mut Vec<Frame>, event: &'static str, fields: Value) {
        let mut data = json!({"type": event});
        for (key, value) in fields.as_object().into_iter().flatten() {
            data[key] = value.clone();
        }
        data["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.push(Frame { event: Some(event), data });
    }

    fn index(&self) -> usize {
        self.output.len().saturating_sub(1)
    }

    fn id(&self) -> Value {
        self.output.last().map(|item| item["id"].clone()).unwrap_or_default()
    }

    fn part(&self, item: Item) -> Value {
        match item {
            Item::Reasoning => json!({"type": "reasoning_text", "text": self.text}),
            _ => {
                json!({"type": "output_text", "annotations": [], "logprobs": self.logs, "text": self.text})
            }
        }
    }

    fn open(&mut self, kind: Item, mut item: Value, prefix: &str, out: &mut Vec<Frame>) {
        self.close(kind == Item::Call, "completed", out);
        let index = self.output.len();
        item["id"] = format!("{prefix}_{}_{index}", self.head.id).into();
        item["status"] = "in_progress".into();
        if kind == Item::Reasoning {
            item["encrypted_content"] = format!("{}-{index}", self.head.id).into();
        }
        self.output.push(item.clone());
        self.open = Some(kind);
        self.push(out, "response.output_item.added", json!({"item": item, "output_index": index}));
        if kind != Item::Call {
            let part = self.part(kind);
            let fields =
                json!({"content_index": 0, "item_id": self.id(), "output_index": index, "part": part});
            self.push(out, "response.content_part.added", fields);
        }
    }

    /// Closes the open item; a call follows it, or not.
    fn close(&mut self, before_call: bool, status: &str, out: &mut Vec<Frame>) {
        let Some(kind) = self.open.take() else { return };
        let (index, id, text) = (self.index(), self.id(), self.text.clone());
        if kind == Item::Call {
            let fields = json!({"arguments": text, "item_id": id, "output_index": index});
            self.push(out, "response.function_call_arguments.done", fields);
        } else {
            let mut fields = json!({"content_index": 0, "item_id": id, "output_index": index, "text": text});
            let event = if kind == Item::Reasoning {
                "response.reasoning_text.done"
            } else {
                fields["logprobs"] = self.logs.clone().into();
                "response.output_text.done"
            };
            self.push(out, event, fields);
            let part = self.part(kind);
            let fields = json!({"content_index": 0, "item_id": id, "output_index": index, "part": part});
            self.push(out, "response.content_part.done", fields);
        }
        let part = self.part(kind);
        if let Some(item) = self.output.last_mut() {
            item["status"] = status.into();
            match kind {
                Item::Call => item["arguments"] = text.into(),
                Item::Reasoning => item["content"] = json!([part]),
                Item::Message => {
                    item["content"] = json!([part]);
                    item["phase"] = if before_call { "commentary" } else { "final_answer" }.into();
                }
            }
            let fields = json!({"item": item.clone(), "output_index": index});
            self.push(out, "response.output_item.done", fields);
        }
        self.text.clear();
        self.logs.clear();
    }

    fn delta(&mut self, event: &'static str, delta: &str, logs: Option<Vec<Value>>, out: &mut Vec<Frame>) {
        self.text.push_str(delta);
        let mut fields = json!({"delta": delta, "item_id": self.id(), "output_index": self.index()});
        if self.open != Some(Item::Call) {
            fields["content_index"] = 0.into();
        }
        if let Some(logs) = logs {
            self.logs.extend_from_slice(&logs);
            fields["logprobs"] = logs.into();
        }
        self.push(out, event, fields);
    }
}

/// The fields of a response that repeat the request.
fn echo(body: &Value) -> Value {
    let sent = |name: &str, default: Value| match &body[name] {
        Value::Null => default,
        value => value.clone(),
    };
    let tool = |tool: &Value| match tool["type"].as_str() {
        Some("function") => json!({
            "type": "function",
            "name": tool["name"],
            "description": tool["description"],
            "parameters": tool["parameters"],
            "strict": tool["strict"],
        }),
        _ => tool.clone(),
    };
    let tools: Value = body["tools"].as_array().into_iter().flatten().map(tool).collect();
    let format = match &body["text"]["format"] {
        Value::Null => json!({"type": "text"}),
        format => format.clone(),
    };
    json!({
        "frequency_penalty": 0.0,
        "instructions": body["instructions"],
        "max_output_tokens": body["max_output_tokens"],
        "max_tool_calls": null,
        "moderation": null,
        "parallel_tool_calls": true,
        "presence_penalty": 0.0,
        "previous_response_id": null,
        "prompt_cache_key": null,
        "prompt_cache_retention": null,
        "reasoning": {"effort": body["reasoning"]["effort"], "summary": null},
        "safety_identifier": null,
        "service_tier": "default",
        "store": false,
        "temperature": sent("temperature", json!(1.0)),
        "text": {"format": format, "verbosity": null},
        "tool_choice": sent("tool_choice", json!("auto")),
        "tools": tools,
        "top_logprobs": sent("top_logprobs", json!(0)),
        "top_p": sent("top_p", json!(1.0)),
        "truncation": "disabled",
        "user": body["user"],
        "metadata": sent("metadata", json!({})),
    })
}

impl Wire for Responses {
    fn begin(&mut self, _: &Reuse, out: &mut Vec<Frame>) {
        for event in ["response.created", "response.in_progress"] {
            let response = self.response();
            self.push(out, event, json!({"response": response}));
        }
    }

    fn event(&mut self, event: &Event, logs: &[TokenLog], out: &mut Vec<Frame>) {
        match event {
            Event::Reasoning(piece) => {
                if self.open != Some(Item::Reasoning) {
                    let item = json!({"type": "reasoning", "content": [], "summary": []});
                    self.open(Item::Reasoning, item, "rs", out);
                }
                self.delta("response.reasoning_text.delta", &piece.text, None, out);
            }
            Event::Content(piece) => {
                if self.open != Some(Item::Message) {
                    let item = json!({"type": "message", "role": "assistant", "phase": "final_answer",
                        "content": []});
                    self.open(Item::Message, item, "msg", out);
                }
                let entries =
                    if self.head.log_probs { log_entries(&self.head, piece, logs) } else { Vec::new() };
                self.delta("response.output_text.delta", &piece.text, Some(entries), out);
            }
            Event::CallOpened { id, name, .. } => {
                let mut item = json!({"type": "function_call", "call_id": id, "name": name, "arguments": ""});
                if let Some(tool) = self.namespaces.iter().find(|tool| tool.flat == *name) {
                    item["name"] = tool.name.clone().into();
                    item["namespace"] = tool.namespace.clone().into();
                }
                self.open(Item::Call, item, "fc", out);
            }
            Event::Arguments { text, .. } => {
                self.delta("response.function_call_arguments.delta", text, None, out);
            }
        }
    }

    fn done(&mut self, answer: &Answer, _: &[TokenLog], out: &mut Vec<Frame>) {
        self.incomplete = match answer.message.finish_reason {
            Some(FinishReason::Length | FinishReason::InsufficientSystemResource) => {
                Some("max_output_tokens")
            }
            Some(FinishReason::ContentFilter) => Some("content_filter"),
            _ => None,
        };
        self.status = if self.incomplete.is_some() { "incomplete" } else { "completed" };
        self.close(false, self.status, out);
        let u = &answer.usage;
        self.usage = json!({
            "input_tokens": u.prompt_tokens,
            "input_tokens_details": {"cached_tokens": u.cached_tokens},
            "output_tokens": u.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": u.reasoning_tokens},
            "total_tokens": u.total_tokens,
        });
        let event = if self.incomplete.is_some() { "response.incomplete" } else { "response.completed" };
        let response = self.response();
        self.push(out, event, json!({"response": response}));
    }

    fn failed(&mut self, failure: &Failure, out: &mut Vec<Frame>) {
        self.status = "failed";
        self.failure = error(failure.status, &failure.message)["error"].clone();
        let response = self.response();
        self.push(out, "response.failed", json!({"response": response}));
    }

    fn whole(&mut self) -> Value {
        self.response()
    }
}
