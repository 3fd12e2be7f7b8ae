//! Text completions.

use engine::{Answer, Reuse};
use serde_json::{Map, Value, json};
use text::{Event, Text};

use super::{Frame, Head, Wire, chat, error, finite};
use crate::worker::{Failure, TokenLog};

/// An answer of `POST /v1/completions`.
pub struct Completion {
    head: Head,
    /// What stands before the answer: the prompt, where it is echoed.
    echo: String,
    include_usage: bool,
    text: String,
    /// Characters so far, the echoed ones included.
    characters: usize,
    logs: [Vec<Value>; 4],
    finish: &'static str,
    usage: Value,
}

const LOGS: [&str; 4] = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];

impl Completion {
    /// For one request; `echo` is sent before the answer.
    pub fn new(head: Head, echo: String, include_usage: bool) -> Self {
        Self {
            head,
            characters: echo.chars().count(),
            text: echo.clone(),
            echo,
            include_usage,
            logs: Default::default(),
            finish: "stop",
            usage: Value::Null,
        }
    }

    fn object(&self, text: &str, logs: &[Vec<Value>; 4], finish: Option<&str>) -> Value {
        let log_probs = match self.head.log_probs {
            true => LOGS
                .iter()
                .zip(logs)
                .map(|(name, list)| (*name, Value::Array(list.clone())))
                .collect::<Value>(),
            false => Value::Null,
        };
        json!({
            "id": self.head.id,
            "object": "text_completion",
            "created": self.head.created,
            "model": self.head.model,
            "choices": [{"index": 0, "text": text, "logprobs": log_probs, "finish_reason": finish}],
            "system_fingerprint": self.head.fingerprint,
        })
    }

    fn chunk(&self, text: &str, logs: &[Vec<Value>; 4], finish: Option<&str>) -> Frame {
        let mut data = self.object(text, logs, finish);
        if finish.is_some() {
            data["usage"] = self.usage.clone();
        } else if self.include_usage {
            data["usage"] = Value::Null;
        }
        Frame { event: None, data }
    }

    fn log(&self, piece: &Text, logs: &[TokenLog]) -> [Vec<Value>; 4] {
        let mut lists: [Vec<Value>; 4] = Default::default();
        let spell = |id: u32| self.head.tokenizer.token_text(id).map(|t| t.token).unwrap_or_default();
        let mut offset = self.characters;
        for log in piece.tokens.iter().filter_map(|&token| logs.get(token)) {
            let token = spell(log.id);
            let mut top = Map::new();
            for &(id, log_prob) in &log.top {
                top.insert(spell(id), json!(finite(log_prob)));
            }
            top.insert(token.clone(), json!(finite(log.log_prob)));
            lists[0].push(token.clone().into());
            lists[1].push(json!(finite(log.log_prob)));
            lists[2].push(top.into());
            lists[3].push(offset.into());
            offset += token.chars().count();
        }
        lists
    }
}

impl Wire for Completion {
    fn begin(&mut self, _: &Reuse, out: &mut Vec<Frame>) {
        if !self.echo.is_empty() {
            out.push(self.chunk(&self.echo, &Default::default(), None));
        }
    }

    fn event(&mut self, event: &Event, logs: &[TokenLog], out: &mut Vec<Frame>) {
        // Raw output has content only.
        let Event::Content(piece) = event else { return };
        let lists = self.log(piece, logs);
        out.push(self.chunk(&piece.text, &lists, None));
        for (all, new) in self.logs.iter_mut().zip(lists) {
            all.extend(new);
        }
        self.text.push_str(&piece.text);
        self.characters += piece.text.chars().count();
    }

    fn done(&mut self, answer: &Answer, _: &[TokenLog], out: &mut Vec<Frame>) {
        self.finish = answer.message.finish_reason.map_or("stop", |f| f.as_str());
        self.usage = chat::usage(answer, false);
        out.push(self.chunk("", &Default::default(), Some(self.finish)));
    }

    fn failed(&mut self, failure: &Failure, out: &mut Vec<Frame>) {
        out.push(Frame { event: None, data: error(failure.status, &failure.message) });
    }

    fn whole(&mut self) -> Value {
        let mut whole = self.object(&self.text, &self.logs, Some(self.finish));
        whole["usage"] = self.usage.clone();
        whole
    }

    fn marks_end(&self) -> bool {
        true
    }
}
