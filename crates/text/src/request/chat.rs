//! `POST /v1/chat/completions` (spec section 7.2).

use std::collections::{BTreeMap, HashSet};

use serde::Deserialize;
use serde_json::Value;

use super::common::{
    self, Choice, Sampling, SentEffort, TextOr, Thinking, ThinkingType, check_logprobs, check_max_tokens,
    check_model, check_schema, check_stops, check_tool_name, image_content, mentions_json,
    resolve_constraint, resolve_think, resolve_tools, settle_reasoning,
};
use super::error::{Result, invalid};
use super::{Options, Request};
use crate::conversation::{Content, Conversation, Message, ResponseFormat, Task, Tool, ToolCall};
use crate::parser::Start;

#[derive(Deserialize)]
struct Body {
    messages: Vec<SentMessage>,
    model: Option<String>,
    tools: Option<Vec<SentTool>>,
    tool_choice: Option<SentChoice>,
    parallel_tool_calls: Option<bool>,
    response_format: Option<SentFormat>,
    thinking: Option<Thinking>,
    reasoning_effort: Option<SentEffort>,
    chat_template_kwargs: Option<TemplateArguments>,
    task: Option<Task>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<BTreeMap<u32, f32>>,
    seed: Option<u64>,
    logprobs: Option<bool>,
    top_logprobs: Option<u8>,
    n: Option<u32>,
    stop: Option<TextOr<String>>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    user_id: Option<String>,
}

#[derive(Deserialize)]
struct SentMessage {
    role: Role,
    content: Option<TextOr<Block>>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<SentCall>>,
    tool_call_id: Option<String>,
    prefix: Option<bool>,
}

#[derive(Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
    LatestReminder,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text {
        text: String,
    },
    ImageUrl {
        image_url: ImageUrl,
    },
    File {
        #[serde(flatten)]
        own: File,
        file: Option<File>,
    },
}

#[derive(Deserialize)]
struct ImageUrl {
    url: String,
    detail: Option<String>,
}

#[derive(Deserialize)]
struct File {
    file_data: Option<String>,
    file_id: Option<String>,
}

#[derive(Deserialize)]
struct SentCall {
    id: String,
    function: SentFunctionCall,
}

#[derive(Deserialize)]
struct SentFunctionCall {
    name: String,
    arguments: Value,
}

#[derive(Deserialize)]
struct SentTool {
    r#type: FunctionType,
    function: SentFunction,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum FunctionType {
    Function,
}

#[derive(Deserialize)]
struct SentFunction {
    name: String,
    description: Option<String>,
    #[serde(default)]
    parameters: Value,
    strict: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "tool_choice must be none, auto, required, or name a function")]
enum SentChoice {
    Mode(ChoiceMode),
    Named { function: ChosenFunction },
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ChoiceMode {
    None,
    Auto,
    Required,
}

#[derive(Deserialize)]
struct ChosenFunction {
    name: String,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum SentFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: SentSchema },
    Regex { regex: String },
}

#[derive(Deserialize)]
struct SentSchema {
    schema: Value,
    strict: Option<bool>,
}

#[derive(Deserialize)]
struct TemplateArguments {
    thinking: Option<bool>,
    enable_thinking: Option<bool>,
    reasoning_effort: Option<SentEffort>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// The checks stand in the order of the specification: it decides which of several faults is reported.
pub(super) fn request(body: &[u8], options: &Options) -> Result<Request> {
    let body: Body = common::parse(body)?;
    check_model(body.model.as_deref(), options, |_| false)?;
    let kwargs = body.chat_template_kwargs.as_ref();
    let switch = body.thinking.as_ref().map(|thinking| thinking.r#type).or_else(|| {
        let on = kwargs?.thinking.or(kwargs?.enable_thinking)?;
        Some(if on { ThinkingType::Enabled } else { ThinkingType::Disabled })
    });
    let effort = body.reasoning_effort.as_ref().or_else(|| kwargs?.reasoning_effort.as_ref());
    let think = resolve_think(switch, effort, options);

    let sent_tools = body.tools.unwrap_or_default();
    for (i, tool) in sent_tools.iter().enumerate() {
        let FunctionType::Function = tool.r#type;
        check_tool_name(&tool.function.name, &format!("tools[{i}].function"))?;
    }
    let has_tools = !sent_tools.is_empty();
    let about_tools =
        has_tools || body.messages.iter().any(|m| m.tool_calls.is_some() || m.role == Role::Tool);
    let mut messages = convert_messages(body.messages)?;
    settle_reasoning(&mut messages, think.is_on(), has_tools, options)?;
    let continues = check_prefix(&messages)?;
    let wants_json = matches!(body.response_format, Some(SentFormat::JsonObject));
    if wants_json && !mentions_json(&messages) {
        return invalid("response_format json_object needs the word json somewhere in the messages");
    }
    let tools = sent_tools.into_iter().map(|SentTool { function, .. }| Tool {
        name: function.name,
        description: function.description,
        parameters: function.parameters,
        strict: function.strict,
        deferred: false,
    });
    let choice = match body.tool_choice {
        None | Some(SentChoice::Mode(ChoiceMode::Auto)) => Choice::Auto,
        Some(SentChoice::Mode(ChoiceMode::None)) => Choice::None,
        Some(SentChoice::Mode(ChoiceMode::Required)) => Choice::Required,
        Some(SentChoice::Named { function }) => Choice::Named(function.name),
    };
    let (tools, tool_choice) = resolve_tools(tools.collect(), choice, think.is_on())?;
    if continues && wants_json {
        return invalid("prefix cannot be combined with response_format json_object");
    }
    if continues && about_tools {
        return invalid("prefix cannot be combined with tools or tool calls");
    }
    let stop = match body.stop {
        None => Vec::new(),
        Some(TextOr::Text(stop)) => vec![stop],
        Some(TextOr::List(stops)) => stops,
    };
    check_stops(&stop)?;
    if body.stream_options.is_some() && body.stream != Some(true) {
        return invalid("stream_options needs stream: true");
    }
    let has_format = body.response_format.is_some();
    let (response_format, enforced) = match body.response_format {
        None | Some(SentFormat::Text) => (ResponseFormat::Text, ResponseFormat::Text),
        Some(SentFormat::JsonObject) => (ResponseFormat::JsonObject, ResponseFormat::JsonObject),
        Some(SentFormat::JsonSchema { json_schema: SentSchema { schema, strict } }) => {
            let enforced = check_schema(&schema, strict)?;
            (ResponseFormat::JsonSchema(schema), ResponseFormat::JsonSchema(enforced))
        }
        Some(SentFormat::Regex { regex }) => {
            (ResponseFormat::Regex(regex.clone()), ResponseFormat::Regex(regex))
        }
    };
    let constraint = resolve_constraint(&tools, tool_choice, &enforced, has_format, false)?;

    let choices = body.n.unwrap_or(1);
    if !(1..=options.max_choices).contains(&choices) {
        return invalid(format!("n is {choices}, this server gives at most {}", options.max_choices));
    }
    let sampling = Sampling {
        temperature: body.temperature,
        top_p: body.top_p,
        top_k: body.top_k,
        min_p: body.min_p,
        repetition_penalty: body.repetition_penalty,
        presence_penalty: body.presence_penalty,
        frequency_penalty: body.frequency_penalty,
        logit_bias: body.logit_bias.unwrap_or_default().into_iter().collect(),
        seed: body.seed,
    }
    .resolve()?;
    let logprobs = body.logprobs == Some(true);
    check_logprobs(logprobs, body.top_logprobs)?;
    let max_tokens = check_max_tokens(body.max_completion_tokens.or(body.max_tokens))?;

    check_task(body.task, &messages)?;
    let start = start(&messages, think.is_on(), body.task);
    let conversation = Conversation { messages, think, tools, tool_choice, response_format, task: body.task };
    let mut request = common::assemble(conversation, start, stop, constraint);
    if body.task.is_some_and(|task| task != Task::Action) {
        request.parser.parse_tool_calls = false;
    }
    Ok(Request {
        model: body.model,
        sampling,
        requested_max_tokens: max_tokens,
        logprobs,
        top_logprobs: body.top_logprobs,
        choices,
        parallel_calls: body.parallel_tool_calls != Some(false),
        stream: body.stream == Some(true),
        include_usage: body.stream_options.and_then(|options| options.include_usage) == Some(true),
        user_id: body.user_id,
        ..request
    })
}

/// Where the output begins: a prefix with text goes on with the answer, one with reasoning only with the reasoning.
fn start(messages: &[Message], thinking: bool, task: Option<Task>) -> Start {
    if !thinking || task.is_some_and(|task| task != Task::Action) {
        return Start::Content;
    }
    match messages.last() {
        Some(Message::Assistant { prefix: true, text, .. }) if !text.is_empty() => Start::ContentContinued,
        Some(Message::Assistant { prefix: true, reasoning: Some(reasoning), .. })
            if !reasoning.is_empty() =>
        {
            Start::ReasoningContinued
        }
        _ => Start::Reasoning,
    }
}

fn check_task(task: Option<Task>, messages: &[Message]) -> Result<()> {
    match (task, messages.last()) {
        (None, _) | (Some(_), Some(Message::User { .. } | Message::System { .. })) => Ok(()),
        _ => invalid("task needs a conversation that ends with a user or system message"),
    }
}

/// Whether the last message is to be continued; no other may ask for it.
fn check_prefix(messages: &[Message]) -> Result<bool> {
    let asks = |message: &Message| matches!(message, Message::Assistant { prefix: true, .. });
    match messages.iter().position(asks) {
        None => Ok(false),
        Some(i) if i + 1 == messages.len() => Ok(true),
        Some(_) => invalid("prefix is only possible on the last message, which must be an assistant message"),
    }
}

fn convert_messages(sent: Vec<SentMessage>) -> Result<Vec<Message>> {
    if sent.is_empty() {
        return invalid("messages is empty");
    }
    let mut out = Vec::with_capacity(sent.len());
    let mut sent = sent.into_iter().enumerate().peekable();
    while let Some((i, message)) = sent.next() {
        if message.prefix == Some(true) && message.role != Role::Assistant {
            return invalid(format!("messages[{i}]: prefix is only possible on an assistant message"));
        }
        match message.role {
            Role::System | Role::Developer => {
                let content = without_billing_header(content(i, message.content)?);
                if !content.prompt.is_empty() {
                    out.push(Message::System { content, tools: Vec::new() });
                }
            }
            Role::User => out.push(Message::User { content: content(i, message.content)? }),
            Role::LatestReminder => match message.content {
                Some(TextOr::Text(text)) => out.push(Message::Reminder { text }),
                _ => return invalid(format!("messages[{i}]: a latest_reminder needs a string as content")),
            },
            Role::Tool => {
                return invalid(format!(
                    "messages[{i}]: a tool message must follow the assistant message that calls it"
                ));
            }
            Role::Assistant => {
                let mut open = assistant(i, message, &mut out)?;
                while !open.is_empty() {
                    let Some((j, result)) = sent.next_if(|(_, next)| next.role == Role::Tool) else {
                        return invalid(format!(
                            "messages[{i}]: each of its tool_calls must be followed by a tool message that answers it"
                        ));
                    };
                    let id = result.tool_call_id.unwrap_or_default();
                    if !open.remove(&id) {
                        return invalid(format!(
                            "messages[{j}]: tool_call_id {id:?} is not a call of the preceding assistant message, or is \
                             answered twice"
                        ));
                    }
                    out.push(Message::Tool { content: content(j, result.content)?, call_id: Some(id) });
                }
            }
        }
    }
    Ok(out)
}

/// Appends an assistant message; returns the ids of its calls.
fn assistant(i: usize, message: SentMessage, out: &mut Vec<Message>) -> Result<HashSet<String>> {
    if message.content.is_none() && message.tool_calls.is_none() {
        return invalid(format!("messages[{i}]: an assistant message needs content or tool_calls"));
    }
    let content = match message.content {
        Some(given) => content(i, Some(given))?,
        None => Content::default(),
    };
    if !content.images.is_empty() {
        return invalid(format!("messages[{i}]: an assistant message cannot contain images"));
    }
    let mut calls = Vec::new();
    let mut ids = HashSet::new();
    if let Some(sent) = message.tool_calls {
        if sent.is_empty() {
            return invalid(format!("messages[{i}].tool_calls is empty; leave it out instead"));
        }
        for SentCall { id, function } in sent {
            if !ids.insert(id.clone()) {
                return invalid(format!("messages[{i}]: tool call id {id:?} is used twice"));
            }
            let arguments = match function.arguments {
                Value::String(text) => text,
                object @ Value::Object(_) => object.to_string(),
                _ => {
                    return invalid(format!("messages[{i}]: the arguments of call {id:?} must be JSON text"));
                }
            };
            calls.push(ToolCall { id, name: function.name, arguments });
        }
    }
    out.push(Message::Assistant {
        text: content.prompt.text().to_owned(),
        reasoning: message.reasoning_content,
        calls,
        prefix: message.prefix == Some(true),
    });
    Ok(ids)
}

fn content(i: usize, sent: Option<TextOr<Block>>) -> Result<Content> {
    let place = format!("messages[{i}]");
    let Some(sent) = sent else { return invalid(format!("{place}: the content is missing")) };
    sent.content(|(_, block)| match block {
        Block::Text { text } => Ok(Content::text(text)),
        Block::ImageUrl { image_url } => image_content(image_url.url, image_url.detail, &place),
        Block::File { own, file } => {
            let file = file.unwrap_or(own);
            match (file.file_data, file.file_id) {
                (Some(data), None) if data.starts_with("data:") => image_content(data, None, &place),
                (Some(_), None) => invalid(format!("{place}: file_data must be a data URL with base64")),
                _ => invalid(format!(
                    "{place}: a file needs file_data, an image as data URL; file_id is not supported"
                )),
            }
        }
    })
}

/// Cuts a client's billing header off a system text: up to the first line end or `You are`, then spaces.
fn without_billing_header(mut content: Content) -> Content {
    let text = content.prompt.text();
    if text.starts_with("x-anthropic-billing-header") {
        let cut = ["\n", "You are"].iter().filter_map(|end| text.find(end)).min().unwrap_or(text.len());
        let start = text.len() - text[cut..].trim_start().len();
        content.prompt = content.prompt.part(start..content.prompt.text().len());
    }
    content
}
