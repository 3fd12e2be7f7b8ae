//! `POST /v1/messages`, the Anthropic API (spec section 7.4).

use std::collections::{BTreeSet, HashMap, HashSet};

use serde::Deserialize;
use serde_json::Value;

use super::common::{
    self, Choice, Sampling, SentEffort, TextOr, Thinking, check_max_tokens, check_model, check_schema,
    check_stops, check_tool_name, image_content, resolve_constraint, resolve_think, resolve_tools,
    settle_reasoning,
};
use super::error::{Result, invalid};
use super::{LARGEST_MAX_TOKENS, Options, Request, RequestError};
use crate::conversation::{Content, Conversation, Message, ResponseFormat, Tool, ToolCall};
use crate::parser::Start;
use crate::{image, json};

#[derive(Deserialize)]
struct Body {
    messages: Vec<SentMessage>,
    model: Option<String>,
    system: Option<TextOr<SystemBlock>>,
    tools: Option<Vec<SentTool>>,
    tool_choice: Option<SentChoice>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    max_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    metadata: Option<Metadata>,
}

#[derive(Deserialize)]
struct SentMessage {
    role: Role,
    content: TextOr<Block>,
}

#[derive(Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    User,
    Assistant,
    System,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum SystemBlock {
    Text { text: String },
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text { text: String },
    Image { source: ImageSource },
    Document { source: DocumentSource },
    Thinking { thinking: String },
    RedactedThinking {},
    ToolUse { id: String, name: String, input: Value },
    ToolResult { tool_use_id: String, content: Option<TextOr<ResultBlock>> },
    ToolAddition { tool: ToolReference },
    ServerToolUse {},
    WebSearchToolResult {},
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResultBlock {
    Text { text: String },
    Image { source: ImageSource },
    Document { source: DocumentSource },
    ToolReference { tool_name: String },
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ImageSource {
    Base64 { media_type: String, data: String },
    Url { url: String },
    File {},
}

#[derive(Deserialize)]
struct DocumentSource {
    media_type: Option<String>,
}

#[derive(Deserialize)]
struct ToolReference {
    name: String,
}

#[derive(Deserialize)]
struct SentTool {
    r#type: Option<String>,
    name: String,
    description: Option<String>,
    #[serde(default)]
    input_schema: Value,
    defer_loading: Option<bool>,
    strict: Option<bool>,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum SentChoice {
    Auto { disable_parallel_tool_use: Option<bool> },
    Any { disable_parallel_tool_use: Option<bool> },
    None {},
    Tool { name: String, disable_parallel_tool_use: Option<bool> },
}

#[derive(Deserialize)]
struct OutputConfig {
    effort: Option<SentEffort>,
    format: Option<Format>,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Format {
    JsonSchema { schema: Value },
}

#[derive(Deserialize)]
struct Metadata {
    user_id: Option<String>,
}

pub(super) fn request(body: &[u8], options: &Options) -> Result<Request> {
    let body: Body = common::parse(body)?;
    check_model(body.model.as_deref(), options, |name| name.starts_with("claude"))?;
    let effort = body.output_config.as_ref().and_then(|config| config.effort.as_ref());
    let think = resolve_think(body.thinking.as_ref().map(|thinking| thinking.r#type), effort, options);

    let tools = declared_tools(body.tools.unwrap_or_default())?;
    let by_name = tools.iter().map(|tool| (tool.name.as_str(), tool)).collect();
    let mut reader = Reader { tools: by_name, out: Vec::new(), open: BTreeSet::new() };
    reader.system(body.system);
    if body.messages.is_empty() {
        return invalid("messages is empty");
    }
    let count = body.messages.len();
    for (i, message) in body.messages.into_iter().enumerate() {
        reader.message(i, message)?;
    }
    reader.require_answered(count)?;
    let mut messages = reader.out;
    settle_reasoning(&mut messages, think.is_on(), !tools.is_empty(), options)?;

    let parallel_calls = match &body.tool_choice {
        Some(
            SentChoice::Auto { disable_parallel_tool_use: disabled }
            | SentChoice::Any { disable_parallel_tool_use: disabled }
            | SentChoice::Tool { disable_parallel_tool_use: disabled, .. },
        ) => *disabled != Some(true),
        Some(SentChoice::None {}) | None => true,
    };
    let forced_call = !tools.is_empty() && matches!(body.tool_choice, Some(SentChoice::Any { .. }));
    let choice = match body.tool_choice {
        Some(SentChoice::None {}) => Choice::None,
        Some(SentChoice::Tool { name, .. }) => Choice::Named(name),
        // The maker's library opens no block with `any`; the grammar makes the model open it.
        None | Some(SentChoice::Auto { .. } | SentChoice::Any { .. }) => Choice::Auto,
    };
    let (tools, tool_choice) = resolve_tools(tools, choice, think.is_on())?;
    keep_chosen_tools(&mut messages, &tools);
    let response_format = match body.output_config.and_then(|config| config.format) {
        None => ResponseFormat::Text,
        Some(Format::JsonSchema { schema }) => ResponseFormat::JsonSchema(check_schema(&schema, None)?),
    };
    let constraint = resolve_constraint(&tools, tool_choice, &response_format, false, true)?;
    let stop = body.stop_sequences.unwrap_or_default();
    check_stops(&stop)?;
    let sampling = Sampling {
        temperature: body.temperature,
        top_p: body.top_p,
        top_k: body.top_k,
        ..Sampling::default()
    }
    .resolve()?;
    let max_tokens = check_max_tokens(body.max_tokens.map(|n| n.min(LARGEST_MAX_TOKENS)))?;

    let conversation = Conversation { messages, think, tools, tool_choice, response_format, task: None };
    let start = if think.is_on() { Start::Reasoning } else { Start::Content };
    Ok(Request {
        model: body.model,
        sampling,
        requested_max_tokens: max_tokens,
        parallel_calls,
        forced_call,
        stream: body.stream == Some(true),
        user_id: body.metadata.and_then(|metadata| metadata.user_id),
        ..common::assemble(conversation, start, stop, constraint)
    })
}

fn declared_tools(sent: Vec<SentTool>) -> Result<Vec<Tool>> {
    let mut tools = Vec::with_capacity(sent.len());
    for (i, tool) in sent.into_iter().enumerate() {
        if tool.r#type.as_deref().is_some_and(|kind| kind != "custom") {
            return invalid(format!("tools[{i}]: server tools are not supported"));
        }
        check_tool_name(&tool.name, &format!("tools[{i}]"))?;
        if tool.input_schema.is_null() {
            return invalid(format!("tools[{i}]: input_schema is missing"));
        }
        tools.push(Tool {
            name: tool.name,
            description: tool.description,
            parameters: tool.input_schema,
            strict: tool.strict,
            deferred: tool.defer_loading == Some(true),
        });
    }
    if !tools.is_empty() && tools.iter().all(|tool| tool.deferred) {
        return invalid("tools: at least one tool must not have defer_loading");
    }
    Ok(tools)
}

/// Messages add only tools that the choice leaves; one that neither says nor adds anything vanishes.
fn keep_chosen_tools(messages: &mut Vec<Message>, chosen: &[Tool]) {
    let chosen: HashSet<&str> = chosen.iter().map(|tool| tool.name.as_str()).collect();
    messages.retain_mut(|message| match message {
        Message::System { content, tools } if !tools.is_empty() => {
            tools.retain(|tool| chosen.contains(tool.name.as_str()));
            !content.prompt.is_empty() || !tools.is_empty()
        }
        _ => true,
    });
}

struct Reader<'a> {
    tools: HashMap<&'a str, &'a Tool>,
    out: Vec<Message>,
    /// Ids of calls that wait for their result.
    open: BTreeSet<String>,
}

impl Reader<'_> {
    fn system(&mut self, system: Option<TextOr<SystemBlock>>) {
        let content = match system {
            None => return,
            Some(TextOr::Text(text)) => Content::text(text),
            Some(TextOr::List(mut blocks)) => {
                let billing = "x-anthropic-billing-header";
                if let Some(SystemBlock::Text { text }) = blocks.first()
                    && text.to_lowercase().starts_with(billing)
                {
                    blocks.remove(0);
                }
                Content::join(blocks.into_iter().map(|SystemBlock::Text { text }| Content::text(text)))
            }
        };
        self.out.push(Message::System { content, tools: Vec::new() });
    }

    /// Every call must have its result at the start of the user turn that follows it.
    fn require_answered(&self, i: usize) -> Result<()> {
        if self.open.is_empty() {
            return Ok(());
        }
        let ids = self.open.iter().cloned().collect::<Vec<_>>().join(", ");
        invalid(format!("messages[{i}]: tool_use without a tool_result right after it: {ids}"))
    }

    fn message(&mut self, i: usize, message: SentMessage) -> Result<()> {
        let place = format!("messages[{i}]");
        if message.role != Role::User {
            self.require_answered(i)?;
        }
        match (message.role, message.content) {
            (Role::User, TextOr::Text(text)) => {
                self.require_answered(i)?;
                self.out.push(Message::User { content: Content::text(text) });
                Ok(())
            }
            (Role::Assistant, TextOr::Text(text)) => {
                self.out.push(Message::Assistant { text, reasoning: None, calls: Vec::new(), prefix: false });
                Ok(())
            }
            (Role::User | Role::Assistant, TextOr::List(blocks)) if blocks.is_empty() => {
                invalid(format!("{place}: the content is empty"))
            }
            (Role::User, TextOr::List(blocks)) => self.user(i, blocks),
            (Role::Assistant, TextOr::List(blocks)) => self.assistant(&place, blocks),
            (Role::System, content) => {
                let mut added = Vec::new();
                let mut parts = Vec::new();
                match content {
                    TextOr::Text(text) => parts.push(Content::text(text)),
                    TextOr::List(blocks) => {
                        for block in blocks {
                            match block {
                                Block::ToolAddition { tool } => added.push(self.tool(&tool.name, &place)?),
                                block => parts.push(plain_block(block, &place, "system")?),
                            }
                        }
                    }
                }
                self.out.push(Message::System { content: Content::join(parts), tools: added });
                Ok(())
            }
        }
    }

    fn tool(&self, name: &str, place: &str) -> Result<Tool> {
        match self.tools.get(name) {
            Some(tool) => Ok(Tool::clone(tool)),
            None => invalid(format!("{place}: tool {name:?} is not declared in tools")),
        }
    }

    fn user(&mut self, i: usize, blocks: Vec<Block>) -> Result<()> {
        let place = format!("messages[{i}]");
        let mut added = Vec::new();
        for block in blocks {
            let Block::ToolResult { tool_use_id: id, content } = block else {
                self.require_answered(i)?;
                self.out.push(Message::User { content: plain_block(block, &place, "user")? });
                continue;
            };
            if !self.open.remove(&id) {
                return invalid(format!(
                    "{place}: tool_result {id:?} answers no tool_use of the preceding message, or answers it twice"
                ));
            }
            let content = match content {
                None => Content::default(),
                Some(content) => content.content(|(_, block)| match block {
                    ResultBlock::Text { text } => Ok(Content::text(text)),
                    ResultBlock::Image { source } => image_block(source, &place),
                    ResultBlock::Document { source } => Ok(document(&source)),
                    ResultBlock::ToolReference { tool_name } => {
                        added.push(self.tool(&tool_name, &place)?);
                        Ok(Content::text(tool_name))
                    }
                })?,
            };
            self.out.push(Message::Tool { content, call_id: Some(id) });
        }
        self.require_answered(i)?;
        if !added.is_empty() {
            self.out.push(Message::System { content: Content::default(), tools: added });
        }
        Ok(())
    }

    fn assistant(&mut self, place: &str, blocks: Vec<Block>) -> Result<()> {
        let mut text = String::new();
        let mut reasoning: Option<String> = None;
        let mut calls = Vec::new();
        for block in blocks {
            match block {
                Block::ToolUse { id, name, input } => {
                    if !self.open.insert(id.clone()) {
                        return invalid(format!("{place}: tool_use id {id:?} is used twice"));
                    }
                    calls.push(ToolCall { id, name, arguments: json::to_text(&input) });
                }
                Block::Thinking { thinking } => match &mut reasoning {
                    Some(reasoning) => {
                        reasoning.push_str("\n\n");
                        reasoning.push_str(&thinking);
                    }
                    None => reasoning = Some(thinking),
                },
                // Reasoning that only its maker can read.
                Block::RedactedThinking {} => {}
                Block::ServerToolUse {} | Block::WebSearchToolResult {} => {
                    return invalid(format!("{place}: server tools are not supported"));
                }
                block => {
                    let content = plain_block(block, place, "assistant")?;
                    if !content.images.is_empty() {
                        return invalid(format!("{place}: an assistant message cannot contain images"));
                    }
                    if !calls.is_empty() {
                        return invalid(format!("{place}: tool_use blocks must come after all text"));
                    }
                    text.push_str(if text.is_empty() { "" } else { "\n\n" });
                    text.push_str(content.prompt.text());
                }
            }
        }
        self.out.push(Message::Assistant { text, reasoning, calls, prefix: false });
        Ok(())
    }
}

/// Text, image or document; every other block belongs to another role.
fn plain_block(block: Block, place: &str, role: &str) -> Result<Content> {
    let kind = match block {
        Block::Text { text } => return Ok(Content::text(text)),
        Block::Image { source } => return image_block(source, place),
        Block::Document { source } => return Ok(document(&source)),
        Block::Thinking { .. } | Block::RedactedThinking {} => "thinking",
        Block::ToolUse { .. } => "tool_use",
        Block::ToolResult { .. } => "tool_result",
        Block::ToolAddition { .. } => "tool_addition",
        Block::ServerToolUse {} | Block::WebSearchToolResult {} => "server tool",
    };
    invalid(format!("{place}: {kind} blocks cannot stand in a {role} message"))
}

fn image_block(source: ImageSource, place: &str) -> Result<Content> {
    let url = match source {
        ImageSource::Url { url } if !url.starts_with("data:") => url,
        ImageSource::Url { .. } => return invalid(format!("{place}: an image url must be an http(s) link")),
        ImageSource::Base64 { media_type, data } => {
            image::data_url(&media_type, &data).map_err(|e| RequestError::invalid(format!("{place}: {e}")))?
        }
        ImageSource::File {} => {
            return invalid(format!(
                "{place}: image files by id are not supported; send the image as base64"
            ));
        }
    };
    image_content(url, None, place)
}

/// Documents are not read.
fn document(source: &DocumentSource) -> Content {
    let media = source.media_type.as_deref().unwrap_or("unknown");
    Content::text(format!("[Unsupported document type: {media}]"))
}
