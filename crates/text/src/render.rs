//! From a conversation to one prompt (spec sections 3 and 4).

use std::{collections::HashMap, fmt, ops::Range};

use serde_json::{Map, Value, json};

use crate::conversation::{Content, Conversation, Message, ResponseFormat, Task, Tool, ToolCall, ToolChoice};
use crate::special::{ASSISTANT, BOS, DSML, EOS, GROUNDING, IMAGE, REMINDER, SYSTEM, THINK, THINK_END, USER};
use crate::{Image, Prompt, Segment, json, template};

/// What a piece of a prompt comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The tokens that the protocol puts around everything else.
    Template,
    /// The line that states the reasoning effort.
    Effort,
    /// The schemas of the tools.
    Tools,
    /// The schema of the answer.
    ResponseFormat,
    /// A message, by its role and its number, from 1, in the prompt.
    Message(&'static str, usize),
    /// A prompt that was given ready rendered.
    Given,
}

impl Part {
    /// What a token belongs to; `parts` has the first token of each part, ascending.
    pub fn at(parts: &[(usize, Part)], token: usize) -> Part {
        let before = parts.partition_point(|(start, _)| *start <= token);
        before.checked_sub(1).map_or(Part::Template, |i| parts[i].1)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Template => f.write_str("template"),
            Part::Effort => f.write_str("reasoning effort"),
            Part::Tools => f.write_str("tools"),
            Part::ResponseFormat => f.write_str("response format"),
            Part::Message(role, number) => write!(f, "{role} message {number}"),
            Part::Given => f.write_str("prompt"),
        }
    }
}

/// A rendered conversation.
pub(crate) struct Rendered {
    pub prompt: Prompt,
    /// Images in the order of their placeholders.
    pub images: Vec<Image>,
    /// Where each part begins, ascending.
    pub parts: Vec<(usize, Part)>,
    /// Earlier answers.
    pub turns: Vec<Turn>,
    /// Where the new answer begins, unless it goes on with a message or belongs to a task.
    pub answer: Option<usize>,
}

/// An earlier answer in a prompt.
pub(crate) struct Turn {
    /// Its bytes, behind its header and with its end token.
    pub body: Range<usize>,
    pub reasoning: Option<String>,
    pub text: String,
    pub calls: Vec<ToolCall>,
}

/// Renders the prompt and collects the images in the order of their placeholders.
pub fn render(conversation: &Conversation) -> (Prompt, Vec<Image>) {
    let Rendered { prompt, images, .. } = render_parts(conversation);
    (prompt, images)
}

/// Renders the prompt and says what stands where.
pub(crate) fn render_parts(conversation: &Conversation) -> Rendered {
    let mut messages = merge(&conversation.messages);
    let shows_tools = conversation.tool_choice != ToolChoice::None && !conversation.tools.is_empty();
    let schema = match &conversation.response_format {
        ResponseFormat::JsonObject => Some(template::JSON_OBJECT.to_owned()),
        ResponseFormat::JsonSchema(schema) => Some(json::to_text(schema)),
        ResponseFormat::Text | ResponseFormat::Regex(_) => None,
    };
    // Where in the first message tools and format begin.
    let (mut tools_at, mut format_at) = (None, None);
    if shows_tools || schema.is_some() {
        if !matches!(messages.first(), Some(Message::System { .. })) {
            messages.insert(0, Message::System { content: Content::default(), tools: Vec::new() });
        }
        if let Some(Message::System { content: Content { prompt, .. }, .. }) = messages.first_mut() {
            if shows_tools {
                tools_at = Some(prompt.text().len());
                push_tool_prompt(prompt, &conversation.tools);
            }
            if let Some(schema) = schema {
                format_at = Some(prompt.text().len());
                prompt.push(template::RESPONSE_FORMAT);
                prompt.push(&schema);
            }
        }
    }

    let thinking = conversation.think.is_on();
    let mut out = Prompt::default();
    out.push_special(BOS);
    let mut parts = vec![(0, Part::Template)];
    let mut turns = Vec::new();
    if let (Some(effort), false) = (conversation.think.effort(), messages.is_empty()) {
        // The budget stands before the first message, whatever its role.
        out.push_special(SYSTEM);
        parts.push((out.text().len(), Part::Effort));
        out.push(template::EFFORT[0]);
        out.push(&effort.budget().to_string());
        out.push(template::EFFORT[1]);
    } else if let Some(Message::System { .. }) = messages.first() {
        out.push_special(SYSTEM);
    }
    for (i, message) in messages.iter().enumerate() {
        let previous = i.checked_sub(1).map(|p| &messages[p]);
        let begin = out.text().len();
        push_message(&mut out, message, previous, thinking, shows_tools);
        let (role, turn) = match message {
            Message::System { .. } => ("system", None),
            Message::User { .. } => ("user", None),
            Message::Tool { .. } => ("tool", None),
            Message::Reminder { .. } => ("reminder", None),
            Message::Assistant { text, reasoning, calls, prefix } => {
                let reasons = thinking && i > 0 && shows_tools;
                let reasoning = reasoning.clone().filter(|_| reasons);
                let turn =
                    Turn { body: 0..out.text().len(), reasoning, text: text.clone(), calls: calls.clone() };
                ("assistant", (!prefix).then_some(turn))
            }
        };
        // The header is the template's as far as it is made of tokens of its own.
        let header = if matches!(message, Message::Assistant { .. }) { 2 } else { 1 };
        let specials = out.special_ranges();
        let first = specials.partition_point(|range| range.start < begin);
        let mut inside = begin;
        for range in specials[first..].iter().take(header) {
            if range.start != inside || &out.text()[range.clone()] == IMAGE {
                break;
            }
            inside = range.end;
        }
        parts.push((begin, Part::Template));
        parts.push((inside, Part::Message(role, i + 1)));
        if i == 0 {
            for (at, part) in [(tools_at, Part::Tools), (format_at, Part::ResponseFormat)] {
                parts.extend(at.map(|at| (inside + at, part)));
            }
        }
        if let Some(mut turn) = turn {
            turn.body.start = inside;
            turns.push(turn);
        }
    }
    parts.push((out.text().len(), Part::Template));
    let continues = matches!(messages.last(), Some(Message::Assistant { prefix: true, .. }));
    match conversation.task {
        Some(task) if task != Task::Action => out.push_special(task.token()),
        task => {
            if !continues {
                out.push_special(ASSISTANT);
                out.push_special(if thinking { THINK } else { THINK_END });
            }
            if let Some(task) = task {
                out.push_special(task.token());
            }
        }
    }
    let answer = (!continues && conversation.task.is_none()).then_some(out.text().len());
    if conversation.tool_choice == ToolChoice::Required && shows_tools {
        push_tag(&mut out, "\n\n<", " calls>\n");
    }
    let images = messages
        .into_iter()
        .flat_map(|message| match message {
            Message::System { content, .. } | Message::User { content } | Message::Tool { content, .. } => {
                content.images
            }
            Message::Assistant { .. } | Message::Reminder { .. } => Vec::new(),
        })
        .collect();
    Rendered { prompt: out, images, parts, turns, answer }
}

fn push_message(
    out: &mut Prompt,
    message: &Message,
    previous: Option<&Message>,
    thinking: bool,
    keep_reasoning: bool,
) {
    let in_user_turn = matches!(previous, Some(Message::User { .. } | Message::Tool { .. }));
    let user_turn = |out: &mut Prompt| if in_user_turn { out.push("\n\n") } else { out.push_special(USER) };
    match message {
        Message::System { content, tools } => {
            if previous.is_some() {
                out.push_special(SYSTEM);
            }
            out.append(&content.prompt);
            if !tools.is_empty() {
                out.push(template::UPDATED_TOOLS);
                out.push(&tool_lines(tools.iter()));
            }
        }
        Message::User { content } => {
            user_turn(out);
            out.append(&content.prompt);
        }
        Message::Tool { content, .. } => {
            user_turn(out);
            out.push(template::TOOL_RESULT[0]);
            out.append(&content.prompt);
            out.push(template::TOOL_RESULT[1]);
        }
        Message::Reminder { text } => {
            out.push_special(REMINDER);
            out.push(text);
        }
        Message::Assistant { text, reasoning, calls, prefix } => {
            out.push_special(ASSISTANT);
            if thinking && previous.is_some() && (keep_reasoning || *prefix) {
                out.push_special(THINK);
                push_grounded(out, reasoning.as_deref().unwrap_or_default());
                let still_reasons = *prefix && text.is_empty() && calls.is_empty();
                if !still_reasons {
                    out.push_special(THINK_END);
                }
            } else {
                out.push_special(THINK_END);
            }
            push_grounded(out, text);
            push_calls(out, calls);
            if !prefix {
                out.push_special(EOS);
            }
        }
    }
}

fn push_tool_prompt(out: &mut Prompt, tools: &[Tool]) {
    for segment in template::TOOLS {
        match segment {
            Segment::Plain(text) => out.push(text),
            Segment::Special(text) => out.push_special(text),
        }
    }
    out.push(&tool_lines(tools.iter().filter(|tool| !tool.deferred)));
    out.push(template::TOOLS_END);
}

fn tool_lines<'a>(tools: impl Iterator<Item = &'a Tool>) -> String {
    let line = |tool: &Tool| {
        json::to_text(&json!({
            "name": tool.name,
            "description": tool.description.as_deref().unwrap_or_default(),
            "parameters": tool.parameters,
        }))
    };
    tools.map(line).collect::<Vec<_>>().join("\n")
}

fn push_tag(out: &mut Prompt, before: &str, after: &str) {
    out.push(before);
    out.push_special(DSML);
    out.push(after);
}

/// The block of calls. Names, keys and string values go in raw: the format has no escapes.
fn push_calls(out: &mut Prompt, calls: &[ToolCall]) {
    if calls.is_empty() {
        return;
    }
    push_tag(out, "\n\n<", " calls>\n");
    for (i, call) in calls.iter().enumerate() {
        out.push(if i > 0 { "\n" } else { "" });
        push_tag(out, "<", &format!(" invoke name=\"{}\">\n", call.name));
        let arguments: Map<String, Value> = serde_json::from_str(&call.arguments)
            .unwrap_or_else(|_| Map::from_iter([("arguments".into(), call.arguments.as_str().into())]));
        for (j, (key, value)) in arguments.iter().enumerate() {
            out.push(if j > 0 { "\n" } else { "" });
            let is_string = value.is_string();
            push_tag(out, "<", &format!(" parameter name=\"{key}\" string=\"{is_string}\">"));
            match value {
                Value::String(text) => out.push(text),
                other => out.push(&json::to_text(other)),
            }
            push_tag(out, "</", " parameter>");
        }
        push_tag(out, "\n</", " invoke>");
    }
    push_tag(out, "\n</", " calls>");
}

/// Assistant text: grounding spellings in it are special tokens, every other spelling is plain.
fn push_grounded(out: &mut Prompt, text: &str) {
    let mut rest = text;
    // All of them begin with the same two characters, and none is the beginning of another.
    while let Some(start) = rest.find("<｜") {
        match GROUNDING.iter().find(|token| rest[start..].starts_with(**token)) {
            Some(token) => {
                out.push(&rest[..start]);
                out.push_special(token);
                rest = &rest[start + token.len()..];
            }
            None => {
                let skip = start + "<｜".len();
                out.push(&rest[..skip]);
                rest = &rest[skip..];
            }
        }
    }
    out.push(rest);
}

/// Joins adjacent user messages, drops repeated reminders, and puts tool results in the order of their calls
/// (spec section 3.2).
fn merge(messages: &[Message]) -> Vec<Message> {
    let mut merged: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        match (merged.last_mut(), message) {
            (Some(Message::User { content: before }), Message::User { content }) => {
                before.prompt.push("\n\n");
                before.append(content.clone());
            }
            (Some(Message::Reminder { .. }), Message::Reminder { .. }) => {}
            _ => merged.push(message.clone()),
        }
    }
    let mut order: HashMap<String, usize> = HashMap::new();
    let mut at = 0;
    while at < merged.len() {
        let run = merged[at..]
            .iter()
            .take_while(|m| matches!(m, Message::User { .. } | Message::Tool { .. }))
            .count();
        if run > 0 {
            sort_results(&mut merged[at..at + run], &order);
            at += run;
            continue;
        }
        if let Message::Assistant { calls, .. } = &merged[at]
            && !calls.is_empty()
        {
            order.clear();
            for (i, call) in calls.iter().enumerate() {
                order.entry(call.id.clone()).or_insert(i);
            }
        }
        at += 1;
    }
    merged
}

/// Sorts the results with a call id among the slots that such results hold.
fn sort_results(run: &mut [Message], order: &HashMap<String, usize>) {
    let key = |message: &Message| match message {
        Message::Tool { call_id: Some(id), .. } => Some(order.get(id).copied().unwrap_or(0)),
        _ => None,
    };
    let slots: Vec<usize> = (0..run.len()).filter(|&i| key(&run[i]).is_some()).collect();
    let mut results: Vec<Message> = slots.iter().map(|&i| run[i].clone()).collect();
    results.sort_by_key(key);
    for (slot, result) in slots.into_iter().zip(results) {
        run[slot] = result;
    }
}
