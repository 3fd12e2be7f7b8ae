//! The whole answer, collected from its events.

use super::{Event, FinishReason};

/// An answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// The reasoning.
    pub reasoning: String,
    /// The answer's text.
    pub content: String,
    /// The tool calls.
    pub tool_calls: Vec<MessageCall>,
    /// Why it ends, once it has.
    pub finish_reason: Option<FinishReason>,
}

/// A tool call of an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MessageCall {
    /// The call id.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// JSON text; incomplete if the output ended inside the call.
    pub arguments: String,
}

impl Message {
    /// Adds one event.
    pub fn apply(&mut self, event: &Event) {
        match event {
            Event::Reasoning(piece) => self.reasoning.push_str(&piece.text),
            Event::Content(piece) => self.content.push_str(&piece.text),
            Event::CallOpened { id, name, .. } => {
                self.tool_calls.push(MessageCall {
                    id: id.clone(),
                    name: name.clone(),
                    ..Default::default()
                });
            }
            Event::Arguments { index, text } => {
                if let Some(call) = self.tool_calls.get_mut(*index) {
                    call.arguments.push_str(text);
                }
            }
        }
    }
}
