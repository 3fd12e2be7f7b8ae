//! A conversation in the one form that all request formats are turned into (spec section 3.1).

use std::str::FromStr;

use serde_json::Value;

use crate::Prompt;

/// Everything that rendering reads.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    /// Messages in order.
    pub messages: Vec<Message>,
    /// Whether the answer begins with reasoning, and how much of it is asked for.
    pub think: Think,
    /// Tools in order of declaration.
    pub tools: Vec<Tool>,
    /// Whether tools may or must be called.
    pub tool_choice: ToolChoice,
    /// The form asked of the answer.
    pub response_format: ResponseFormat,
    /// Task token in place of, or after, the assistant header (spec section 3.4).
    pub task: Option<Task>,
}

/// One message.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// Instructions, wherever they stand.
    System {
        /// Text and images.
        content: Content,
        /// Tools that become available here.
        tools: Vec<Tool>,
    },
    /// What the user says.
    User {
        /// Text and images.
        content: Content,
    },
    /// An earlier answer, or the beginning of the next one.
    Assistant {
        /// The answer's text.
        text: String,
        /// The reasoning before it, if it was given back.
        reasoning: Option<String>,
        /// Its tool calls.
        calls: Vec<ToolCall>,
        /// Whether the model continues this message instead of answering it.
        prefix: bool,
    },
    /// The result of a tool call.
    Tool {
        /// Text and images.
        content: Content,
        /// The call it answers.
        call_id: Option<String>,
    },
    /// A reminder.
    Reminder {
        /// Its text.
        text: String,
    },
}

/// Text with an image token where each image stands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    /// The text; its special tokens are image placeholders.
    pub prompt: Prompt,
    /// The images, in the order of their placeholders.
    pub images: Vec<Image>,
}

impl Content {
    /// Text without images.
    pub fn text(text: impl Into<String>) -> Self {
        Self { prompt: Prompt::plain(text), images: Vec::new() }
    }

    pub(crate) fn append(&mut self, other: Content) {
        self.prompt.append(&other.prompt);
        self.images.extend(other.images);
    }

    /// Blocks with a blank line between them.
    pub(crate) fn join(blocks: impl IntoIterator<Item = Content>) -> Self {
        let mut joined = Content::default();
        for (i, block) in blocks.into_iter().enumerate() {
            joined.prompt.push(if i > 0 { "\n\n" } else { "" });
            joined.append(block);
        }
        joined
    }
}

/// An image as the request names it; nothing is fetched or decoded here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// An `http(s)` link or a `data:` URL.
    pub url: String,
    /// The level of detail asked for.
    pub detail: Option<String>,
}

/// A tool that the client can run.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Name, unique in the request.
    pub name: String,
    /// What it is for.
    pub description: Option<String>,
    /// JSON Schema of its arguments.
    pub parameters: Value,
    /// Whether arguments must follow the schema exactly.
    pub strict: Option<bool>,
    /// Left out of the tool prompt until a message adds it.
    pub deferred: bool,
}

/// A call in an earlier answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Id that the result refers to.
    pub id: String,
    /// Tool name.
    pub name: String,
    /// Arguments as JSON text.
    pub arguments: String,
}

/// Whether the model may call tools.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As it sees fit.
    #[default]
    Auto,
    /// Never; the tools are not shown to it.
    None,
    /// It must: the prompt opens the block of calls.
    Required,
}

/// The form asked of the answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum ResponseFormat {
    /// Any text.
    #[default]
    Text,
    /// Any JSON.
    JsonObject,
    /// JSON that follows a schema.
    JsonSchema(Value),
    /// Text that matches an expression; not shown to the model.
    Regex(String),
}

/// Thinking off, or on with an effort.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Think {
    /// The answer begins at once.
    Off,
    /// Reasoning comes first.
    On(Effort),
}

impl Think {
    /// Whether reasoning comes first.
    pub fn is_on(self) -> bool {
        self != Think::Off
    }

    /// The effort, when thinking is on.
    pub fn effort(self) -> Option<Effort> {
        match self {
            Think::Off => None,
            Think::On(effort) => Some(effort),
        }
    }
}

/// How thorough the reasoning should be (spec section 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// Budget 50.
    Low,
    /// Budget 75.
    High,
    /// Budget 75.
    Xhigh,
    /// Budget 100.
    Max,
    /// A budget of 1 to 100 by number.
    Budget(u8),
}

impl Effort {
    /// The number that the prompt states.
    pub fn budget(self) -> u8 {
        match self {
            Effort::Low => 50,
            Effort::High | Effort::Xhigh => 75,
            Effort::Max => 100,
            Effort::Budget(n) => n,
        }
    }
}

impl FromStr for Think {
    type Err = String;

    /// `off`, a level by name, or a number of 1 to 100 or 0 to 0.99.
    fn from_str(level: &str) -> Result<Self, String> {
        Ok(Think::On(match level {
            "off" | "none" => return Ok(Think::Off),
            "minimal" | "low" => Effort::Low,
            "medium" | "high" => Effort::High,
            "xhigh" => Effort::Xhigh,
            "max" | "ultra" => Effort::Max,
            number => number.parse().ok().and_then(budget_of).map(Effort::Budget).ok_or_else(|| {
                format!(
                    "unknown reasoning effort {level:?}: use off, low, high, xhigh, max, a number from 1 to 100, or a \
                     fraction from 0 to 0.99"
                )
            })?,
        }))
    }
}

/// Budget of a numeric effort: 1 to 100 as it is, a fraction below 1 in hundredths, at least 1.
pub(crate) fn budget_of(number: f64) -> Option<u8> {
    if (0.0..1.0).contains(&number) && number <= 0.99 {
        Some(((number * 100.0).round() as u8).max(1))
    } else if (1.0..=100.0).contains(&number) && number.fract() == 0.0 {
        Some(number as u8)
    } else {
        None
    }
}

/// A task of the model's own retrieval system (spec section 3.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Follows the assistant header.
    Action,
    /// Replaces it, as all below.
    Query,
    /// Site authority.
    Authority,
    /// Subject area.
    Domain,
    /// Conversation title.
    Title,
    /// Whether to read a link.
    ReadUrl,
}

impl Task {
    /// Spelling of the task's token.
    pub fn token(self) -> &'static str {
        match self {
            Task::Action => "<｜action｜>",
            Task::Query => "<｜query｜>",
            Task::Authority => "<｜authority｜>",
            Task::Domain => "<｜domain｜>",
            Task::Title => "<｜title｜>",
            Task::ReadUrl => "<｜read_url｜>",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn think_levels() {
        let budget = |s: &str| s.parse::<Think>().ok().and_then(|t| t.effort().map(Effort::budget));
        assert_eq!("off".parse(), Ok(Think::Off));
        for (level, number) in [
            ("low", 50),
            ("medium", 75),
            ("xhigh", 75),
            ("ultra", 100),
            ("42", 42),
            ("0.3", 30),
            ("0", 1),
            ("0.99", 99),
        ] {
            assert_eq!(budget(level), Some(number), "{level}");
        }
        for bad in ["", "101", "-1", "1.5", "0.995", "NaN", "inf", "High"] {
            assert!(bad.parse::<Think>().is_err(), "{bad}");
        }
    }
}
