//! What the model sampled, kept by conversation turn.
//!
//! Clients give an answer back normalised: arguments of a call written anew, white space trimmed, reasoning left out.
//! Rendered from that, the turn would have other ids than those that the model sampled, and the state kept for them would be
//! of no use. So a turn that says the same is given back to the model as it sampled it.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde_json::Value;
use sha2::{Digest, Sha256};
use text::{ConversationToolCall as ToolCall, Message, Said};

/// Answers to one prompt that are told apart.
const ANSWERS: usize = 8;

/// Hash of the ids before a turn.
type Before = [u8; 32];

struct Turn {
    message: Message,
    ids: Vec<u32>,
    number: u64,
}

#[derive(Default)]
struct Turns {
    by_prompt: HashMap<Before, VecDeque<Turn>>,
    /// Every turn in the order kept, oldest first; turns given back since are here again, with a later number.
    order: VecDeque<(Before, u64)>,
    next: u64,
    tokens: usize,
}

/// Turns, the least recently used of which are forgotten.
pub struct Replay {
    turns: Mutex<Turns>,
    /// Most sampled tokens kept.
    most: usize,
}

impl Replay {
    /// Keeps turns of at most `most` sampled tokens in all; with 0 none.
    pub fn new(most: usize) -> Self {
        Self { turns: Mutex::default(), most }
    }

    fn lock(&self) -> MutexGuard<'_, Turns> {
        // Every change leaves the turns whole.
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the turn that the model answered to a prompt of ids `before`: the ids from there on, and what they say.
    pub fn keep(&self, before: &[u32], ids: Vec<u32>, message: &Message) {
        if ids.len() > self.most {
            return;
        }
        let key = hash(before);
        let mut turns = self.lock();
        let turns = &mut *turns;
        turns.next += 1;
        turns.tokens += ids.len();
        turns.order.push_back((key, turns.next));
        let answers = turns.by_prompt.entry(key).or_default();
        answers.push_back(Turn { message: message.clone(), ids, number: turns.next });
        if answers.len() > ANSWERS
            && let Some(turn) = answers.pop_front()
        {
            turns.tokens -= turn.ids.len();
        }
        while turns.tokens > self.most
            && let Some((key, number)) = turns.order.pop_front()
        {
            turns.forget(key, number);
        }
        // Entries of turns that were forgotten or used since do not pile up.
        if turns.order.len() > 64 && turns.order.len() > 4 * turns.by_prompt.len() * ANSWERS {
            let by_prompt = &turns.by_prompt;
            turns.order.retain(|(key, number)| {
                by_prompt.get(key).is_some_and(|answers| answers.iter().any(|t| t.number == *number))
            });
        }
    }

    /// The ids of the turn after the ids `before` that says the same as `said`, the latest one.
    pub fn recall(&self, before: &[u32], said: &Said) -> Option<Vec<u32>> {
        if self.most == 0 {
            return None;
        }
        let key = hash(before);
        let mut turns = self.lock();
        let turns = &mut *turns;
        let answers = turns.by_prompt.get_mut(&key)?;
        let turn = answers.iter_mut().rev().find(|turn| says(&turn.message, said))?;
        turns.next += 1;
        turn.number = turns.next;
        turns.order.push_back((key, turns.next));
        Some(turn.ids.clone())
    }
}

impl Turns {
    fn forget(&mut self, key: Before, number: u64) {
        let Some(answers) = self.by_prompt.get_mut(&key) else { return };
        if let Some(at) = answers.iter().position(|turn| turn.number == number)
            && let Some(turn) = answers.remove(at)
        {
            self.tokens -= turn.ids.len();
        }
        if answers.is_empty() {
            self.by_prompt.remove(&key);
        }
    }
}

fn hash(ids: &[u32]) -> Before {
    let mut hash = Sha256::new();
    for chunk in ids.chunks(1024) {
        let bytes: Vec<u8> = chunk.iter().flat_map(|id| id.to_le_bytes()).collect();
        hash.update(bytes);
    }
    hash.finalize().into()
}

/// Whether what a client gives back is what the model said, up to what clients normalise.
fn says(kept: &Message, said: &Said) -> bool {
    let same_reasoning = match said.reasoning {
        // Clients of most APIs leave it out.
        Some(given) if !given.trim().is_empty() => same_text(&kept.reasoning, given),
        _ => true,
    };
    same_reasoning
        && same_text(&kept.content, said.text)
        && kept.tool_calls.len() == said.calls.len()
        && kept.tool_calls.iter().zip(said.calls).all(|(kept, said): (_, &ToolCall)| {
            kept.name == said.name && same_json(&kept.arguments, &said.arguments)
        })
}

fn same_text(a: &str, b: &str) -> bool {
    let (a, b) = (a.trim(), b.trim());
    a == b || ((a.contains('\r') || b.contains('\r')) && a.replace("\r\n", "\n") == b.replace("\r\n", "\n"))
}

fn same_json(a: &str, b: &str) -> bool {
    match (serde_json::from_str::<Value>(a), serde_json::from_str::<Value>(b)) {
        (Ok(a), Ok(b)) => same_value(&a, &b),
        _ => same_text(a, b),
    }
}

/// Equal values, whatever the order of keys and the spelling of numbers.
fn same_value(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_value(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same_value(a, b)))
        }
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use text::MessageCall;

    fn message(content: &str, arguments: &str) -> Message {
        let call = MessageCall { id: String::new(), name: "f".into(), arguments: arguments.into() };
        Message {
            content: content.into(),
            reasoning: "thought".into(),
            tool_calls: vec![call],
            finish_reason: None,
        }
    }

    fn calls(arguments: &str) -> Vec<ToolCall> {
        vec![ToolCall { id: "other".into(), name: "f".into(), arguments: arguments.into() }]
    }

    #[test]
    fn a_turn_is_known_however_it_is_written() {
        let kept = message("text", "{\"a\":1.0,\"b\":[\"\\u00e9\",null]}");
        let known =
            |reasoning, text, arguments| says(&kept, &Said { reasoning, text, calls: &calls(arguments) });
        for arguments in ["{\"b\": [\"é\", null], \"a\": 1}", "{\"a\":1.0,\"b\":[\"\\u00e9\",null]}"] {
            assert!(known(None, "text", arguments) && known(Some("thought "), "\ntext\n", arguments));
            assert!(known(Some(""), "text", arguments));
            assert!(!known(Some("other"), "text", arguments) && !known(None, "texts", arguments));
        }
        for arguments in
            ["{\"a\": 1}", "{\"a\": 2, \"b\": [\"é\", null]}", "{\"a\": 1, \"b\": [null, \"é\"]}", "{"]
        {
            assert!(!known(None, "text", arguments), "{arguments}");
        }
        let broken = message("", "{\"a\": ");
        assert!(says(&broken, &Said { reasoning: None, text: "", calls: &calls("{\"a\": ") }));
        assert!(!says(&broken, &Said { reasoning: None, text: "", calls: &[] }));
    }

    #[test]
    fn the_least_recently_used_turns_are_forgotten() {
        let replay = Replay::new(30);
        let empty = calls("{}");
        let ask = |n: u32| replay.recall(&[n], &Said { reasoning: None, text: "x", calls: &empty });
        for n in 0..3 {
            replay.keep(&[n], vec![n; 10], &message("x", "{}"));
        }
        assert_eq!(ask(0), Some(vec![0; 10]), "used, so that 1 is the oldest");
        replay.keep(&[3], vec![3; 10], &message("x", "{}"));
        assert_eq!((ask(1), ask(0), ask(3)), (None, Some(vec![0; 10]), Some(vec![3; 10])));
        replay.keep(&[4], vec![4; 31], &message("x", "{}"));
        assert_eq!(ask(4), None, "larger than all the room");
        for n in 0..10_000 {
            replay.keep(&[5], vec![n; 3], &message("x", "{}"));
            assert!(ask(5) == Some(vec![n; 3]), "the latest of equal answers");
        }
        let turns = replay.lock();
        assert!(turns.tokens <= 30 && turns.order.len() < 1000, "{} {}", turns.tokens, turns.order.len());
    }

    #[test]
    fn without_room_nothing_is_kept() {
        let replay = Replay::new(0);
        replay.keep(&[1], Vec::new(), &message("x", "{}"));
        assert_eq!(replay.recall(&[1], &Said { reasoning: None, text: "x", calls: &calls("{}") }), None);
    }
}
