//! Checks and resolutions that the APIs share.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{SeqAccess, Visitor, value};
use serde_json::Value;

use super::error::{Result, invalid};
use super::{Constraint, LARGEST_MAX_TOKENS, Options, Request, RequestError};
use crate::conversation::{Content, Message, ResponseFormat, Think, Tool, ToolChoice, budget_of};
use crate::parser::{ParserOptions, Start};
use crate::special::IMAGE;
use crate::{Effort, Image, SamplingParams, call_id, image, schema};

/// Reads a JSON body; the error names what is wrong and where.
pub(super) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|e| RequestError::invalid(format!("invalid request body: {e}")))
}

/// A string, or a list.
#[derive(Debug)]
pub(super) enum TextOr<T> {
    Text(String),
    List(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = TextOr<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list")
            }
            fn visit_str<E>(self, text: &str) -> std::result::Result<Self::Value, E> {
                Ok(TextOr::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> std::result::Result<Self::Value, A::Error> {
                Vec::deserialize(value::SeqAccessDeserializer::new(seq)).map(TextOr::List)
            }
        }
        deserializer.deserialize_any(Either(PhantomData))
    }
}

impl<T> TextOr<T> {
    /// One content: the string, or the blocks joined by blank lines.
    pub fn content(self, block: impl FnMut((usize, T)) -> Result<Content>) -> Result<Content> {
        match self {
            TextOr::Text(text) => Ok(Content::text(text)),
            TextOr::List(blocks) => {
                Ok(Content::join(blocks.into_iter().enumerate().map(block).collect::<Result<Vec<_>>>()?))
            }
        }
    }
}

/// Content that is one image; `place` begins the error.
pub(super) fn image_content(url: String, detail: Option<String>, place: &str) -> Result<Content> {
    image::check_url(&url).map_err(|e| RequestError::invalid(format!("{place}: {e}")))?;
    let mut content = Content::default();
    content.prompt.push_special(IMAGE);
    content.images.push(Image { url, detail });
    Ok(content)
}

/// The `thinking` field of chat and messages.
#[derive(Debug, Deserialize)]
pub(super) struct Thinking {
    pub r#type: ThinkingType,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ThinkingType {
    #[serde(alias = "adaptive")]
    Enabled,
    Disabled,
}

/// A reasoning effort as sent: a name, a number, or a number as text.
#[derive(Debug)]
pub(super) struct SentEffort(Think);

impl<'de> Deserialize<'de> for SentEffort {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let think = match Value::deserialize(deserializer)? {
            Value::String(name) if name != "off" => name.parse(),
            Value::Number(number) => number
                .as_f64()
                .and_then(budget_of)
                .map(|budget| Think::On(Effort::Budget(budget)))
                .ok_or_else(|| format!("reasoning effort {number} is neither 1 to 100 nor 0 to 0.99")),
            other => Err(format!("unknown reasoning effort {other}")),
        };
        think.map(SentEffort).map_err(serde::de::Error::custom)
    }
}

/// Thinking and effort (spec section 7.1): an explicit switch decides, else the effort, else the default.
pub(super) fn resolve_think(
    switch: Option<ThinkingType>,
    effort: Option<&SentEffort>,
    options: &Options,
) -> Think {
    if let Some(think) = options.think {
        return think;
    }
    let wanted = effort.and_then(|sent| sent.0.effort());
    let on = match (switch, effort) {
        (Some(switch), _) => switch == ThinkingType::Enabled,
        (None, Some(_)) => wanted.is_some(),
        (None, None) => options.thinks_by_default,
    };
    if on { Think::On(wanted.unwrap_or(Effort::High)) } else { Think::Off }
}

pub(super) fn check_model(model: Option<&str>, options: &Options, also: impl Fn(&str) -> bool) -> Result<()> {
    if options.models.is_empty() {
        return Ok(());
    }
    match model {
        Some(name) if options.models.iter().any(|known| known == name) || also(name) => Ok(()),
        Some(name) => {
            invalid(format!("model {name:?} is not served here; served: {}", options.models.join(", ")))
        }
        None => invalid(format!("the model is missing; served: {}", options.models.join(", "))),
    }
}

pub(super) fn check_tool_name(name: &str, place: &str) -> Result<()> {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    if (1..=128).contains(&name.len()) && name.bytes().all(fits) {
        return Ok(());
    }
    invalid(format!("{place}.name {name:?} must be 1 to 128 of the characters a-z, A-Z, 0-9, _ and -"))
}

/// Checks the schemas and the choice, and keeps the named tool only (spec sections 4.4 and 4.5).
pub(super) fn resolve_tools(
    mut tools: Vec<Tool>,
    choice: Choice,
    thinking: bool,
) -> Result<(Vec<Tool>, ToolChoice)> {
    if matches!(choice, Choice::None) {
        return Ok((Vec::new(), ToolChoice::None));
    }
    if tools.is_empty() {
        return Ok((tools, ToolChoice::Auto));
    }
    let mut names = std::collections::HashSet::new();
    for tool in &mut tools {
        let name = &tool.name;
        if !names.insert(name.clone()) {
            return invalid(format!("tool {name:?} is declared twice; tool names must be unique"));
        }
        if tool.strict == Some(true) {
            let given =
                if tool.parameters.is_null() { schema::empty_object() } else { tool.parameters.take() };
            tool.parameters = schema::strict(&given, true)
                .map_err(|e| RequestError::invalid(format!("invalid strict schema of tool {name:?}: {e}")))?;
        } else if tool.parameters.is_null() {
            tool.parameters = Value::Object(Default::default());
        } else if tool.parameters["type"] != "object" {
            return invalid(format!(
                "invalid schema of tool {name:?}: its type must be \"object\", not {}",
                tool.parameters["type"]
            ));
        }
    }
    let required = match choice {
        Choice::Named(name) => {
            tools.retain(|tool| tool.name == name);
            if tools.is_empty() {
                return invalid(format!("tool_choice names {name:?}, which tools does not declare"));
            }
            true
        }
        Choice::Required => true,
        Choice::Auto | Choice::None => false,
    };
    if required && thinking {
        return invalid("a required or named tool_choice needs thinking turned off");
    }
    Ok((tools, if required { ToolChoice::Required } else { ToolChoice::Auto }))
}

/// A tool choice before it meets the tools.
pub(super) enum Choice {
    Auto,
    None,
    Required,
    Named(String),
}

/// Reasoning of earlier answers (spec section 3.3): dropped without thinking, else empty where it is missing.
pub(super) fn settle_reasoning(
    messages: &mut [Message],
    thinking: bool,
    has_tools: bool,
    options: &Options,
) -> Result<()> {
    let last_user = messages.iter().rposition(|m| matches!(m, Message::User { .. }));
    for (i, message) in messages.iter_mut().enumerate() {
        let Message::Assistant { reasoning, calls, .. } = message else { continue };
        if !thinking {
            *reasoning = None;
        } else if reasoning.is_none() {
            let needed = last_user.is_none_or(|last| i > last) && (has_tools || !calls.is_empty());
            let was_empty = calls.iter().any(|call| call_id::marks_empty_thinking(&call.id));
            if options.strict_reasoning && needed && !was_empty {
                return invalid(
                    "an assistant message after the last user message lacks its reasoning, which must be given back \
                     while thinking with tools",
                );
            }
            *reasoning = Some(String::new());
        }
    }
    Ok(())
}

/// Whether any message's text has the letters `json`, in any case.
pub(super) fn mentions_json(messages: &[Message]) -> bool {
    messages.iter().any(|message| {
        let text = match message {
            Message::System { content, .. } | Message::User { content } | Message::Tool { content, .. } => {
                content.prompt.text()
            }
            Message::Assistant { text, .. } | Message::Reminder { text } => text,
        };
        text.as_bytes().windows(4).any(|letters| letters.eq_ignore_ascii_case(b"json"))
    })
}

/// The format's schema checked; returns the schema that a grammar enforces.
pub(super) fn check_schema(given: &Value, strict: Option<bool>) -> Result<Value> {
    if strict == Some(true) {
        return schema::strict(given, false)
            .map_err(|e| RequestError::invalid(format!("invalid strict json_schema: {e}")));
    }
    if given.is_object() || given.is_boolean() {
        return Ok(given.clone());
    }
    invalid(format!("json_schema.schema must be an object, not {given}"))
}

/// What a grammar may enforce. `format` carries the schema to enforce, `has_format` whether the request named any,
/// `mixes` whether strict and other tools may stand together.
pub(super) fn resolve_constraint(
    tools: &[Tool],
    choice: ToolChoice,
    format: &ResponseFormat,
    has_format: bool,
    mixes: bool,
) -> Result<Option<Constraint>> {
    if !tools.is_empty() && choice != ToolChoice::None {
        let strict = tools.iter().filter(|tool| tool.strict == Some(true)).count();
        if strict > 0 && strict < tools.len() && !mixes {
            return invalid("strict and other tools cannot be mixed in one request");
        }
        if strict > 0 && has_format {
            return invalid("strict tools cannot be combined with a response format");
        }
        let required = choice == ToolChoice::Required;
        let answer = of_format(format).filter(|_| !required).map(Box::new);
        return Ok(Some(Constraint::ToolCalls { tools: tools.to_vec(), required, answer }));
    }
    Ok(of_format(format))
}

fn of_format(format: &ResponseFormat) -> Option<Constraint> {
    match format {
        ResponseFormat::Text => None,
        ResponseFormat::JsonObject => Some(Constraint::Json(None)),
        ResponseFormat::JsonSchema(schema) => Some(Constraint::Json(Some(schema.clone()))),
        ResponseFormat::Regex(regex) => Some(Constraint::Regex(regex.clone())),
    }
}

pub(super) fn check_stops(stops: &[String]) -> Result<()> {
    if stops.len() > 16 {
        return invalid(format!("stop has {} strings, at most 16 are accepted", stops.len()));
    }
    match stops.iter().position(String::is_empty) {
        Some(i) => invalid(format!("stop[{i}] is empty")),
        None => Ok(()),
    }
}

/// Sampling fields as sent, all optional.
#[derive(Debug, Default)]
pub(super) struct Sampling {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub logit_bias: Vec<(u32, f32)>,
    pub seed: Option<u64>,
}

impl Sampling {
    /// Checks the ranges; what is left out takes its default.
    pub fn resolve(self) -> Result<SamplingParams> {
        let range = |name: &str, value: Option<f32>, fits: &dyn Fn(f32) -> bool, range: &str| match value {
            Some(value) if !fits(value) => invalid(format!("{name} is {value}, its range is {range}")),
            _ => Ok(()),
        };
        let two = |x: f32| (-2.0..=2.0).contains(&x);
        range("presence_penalty", self.presence_penalty, &two, "-2 to 2")?;
        range("frequency_penalty", self.frequency_penalty, &two, "-2 to 2")?;
        range("temperature", self.temperature, &|x| (0.0..=2.0).contains(&x), "0 to 2")?;
        range("top_p", self.top_p, &|x| x > 0.0 && x <= 1.0, "above 0 to 1")?;
        range("min_p", self.min_p, &|x| (0.0..=1.0).contains(&x), "0 to 1")?;
        range("repetition_penalty", self.repetition_penalty, &|x| x > 0.0 && x <= 2.0, "above 0 to 2")?;
        let top_k = match self.top_k.unwrap_or(0) {
            -1 | 0 => 0,
            k => u32::try_from(k).map_err(|_| {
                RequestError::invalid(format!("top_k is {k}, use a positive number, or 0 or -1 for off"))
            })?,
        };
        for (id, bias) in &self.logit_bias {
            range(
                &format!("logit_bias[{id}]"),
                Some(*bias),
                &|x| (-100.0..=100.0).contains(&x),
                "-100 to 100",
            )?;
        }
        if self.seed.is_some_and(|seed| seed >= 1 << 63) {
            return invalid("seed must be below 2^63");
        }
        let default = SamplingParams::default();
        Ok(SamplingParams {
            temperature: self.temperature.unwrap_or(default.temperature),
            top_p: self.top_p.unwrap_or(default.top_p),
            top_k,
            min_p: self.min_p.unwrap_or(default.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(default.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(default.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(default.frequency_penalty),
            logit_bias: self.logit_bias,
            seed: self.seed,
        })
    }
}

pub(super) fn check_logprobs(logprobs: bool, top: Option<u8>) -> Result<()> {
    match top {
        Some(_) if !logprobs => invalid("top_logprobs needs logprobs: true"),
        Some(n) if n > 20 => invalid(format!("top_logprobs is {n}, its range is 0 to 20")),
        _ => Ok(()),
    }
}

pub(super) fn check_max_tokens(max_tokens: Option<u32>) -> Result<Option<u32>> {
    match max_tokens {
        Some(n) if !(1..=LARGEST_MAX_TOKENS).contains(&n) => {
            invalid(format!("max_tokens is {n}, its range is 1 to {LARGEST_MAX_TOKENS}"))
        }
        other => Ok(other),
    }
}

/// A request with its parser set up; `json` is for `json_object` answers.
pub(super) fn assemble(
    conversation: crate::Conversation,
    start: Start,
    stop: Vec<String>,
    constraint: Option<Constraint>,
) -> Request {
    let shows_tools = !conversation.tools.is_empty() && conversation.tool_choice != ToolChoice::None;
    let parser = ParserOptions {
        thinking: conversation.think.is_on(),
        start,
        parse_tool_calls: shows_tools,
        starts_in_tool_calls: conversation.tool_choice == ToolChoice::Required,
        json_object: conversation.response_format == ResponseFormat::JsonObject,
        stop,
    };
    Request { constraint, ..Request::new(super::Input::Conversation(conversation), parser) }
}
