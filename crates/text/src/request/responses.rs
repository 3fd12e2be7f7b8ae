//! `POST /v1/responses` (spec section 7.3). Tool search and the `apply_patch` custom tool are not supported.

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use serde_json::{Value, json};

use super::common::{
    self, Choice, Sampling, SentEffort, TextOr, check_logprobs, check_max_tokens, check_model, check_schema,
    check_tool_name, image_content, mentions_json, resolve_constraint, resolve_think, resolve_tools,
    settle_reasoning,
};
use super::error::{Result, invalid};
use super::{NamespaceTool, Options, Request};
use crate::conversation::{Content, Conversation, Message, ResponseFormat, Tool, ToolCall};
use crate::parser::Start;

#[derive(Deserialize)]
struct Body {
    input: Option<TextOr<Item>>,
    instructions: Option<String>,
    model: Option<String>,
    tools: Option<Vec<SentTool>>,
    tool_choice: Option<SentChoice>,
    parallel_tool_calls: Option<bool>,
    reasoning: Option<ReasoningConfig>,
    text: Option<TextConfig>,
    max_output_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_logprobs: Option<u8>,
    stream: Option<bool>,
    user: Option<String>,
    previous_response_id: Option<String>,
}

#[derive(Deserialize)]
struct Item {
    r#type: Option<String>,
    #[serde(flatten)]
    rest: Value,
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
    Developer,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    InputText { text: String },
    OutputText { text: String },
    InputImage { image_url: Option<String>, file_id: Option<String>, detail: Option<String> },
    InputFile {},
}

#[derive(Deserialize)]
struct SentReasoning {
    content: Option<Vec<ReasoningText>>,
}

#[derive(Deserialize)]
struct ReasoningText {
    text: String,
}

#[derive(Deserialize)]
struct FunctionCall {
    call_id: String,
    name: String,
    arguments: String,
    namespace: Option<String>,
}

#[derive(Deserialize)]
struct CustomCall {
    call_id: String,
    name: String,
    input: String,
}

#[derive(Deserialize)]
struct CallOutput {
    call_id: Option<String>,
    output: Option<TextOr<Block>>,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum SentTool {
    Function(Function),
    Namespace {
        name: String,
        description: Option<String>,
        tools: Vec<SentTool>,
    },
    Custom {
        name: String,
    },
    /// Hosted tools of other servers are left out.
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    description: Option<String>,
    #[serde(default)]
    parameters: Value,
    strict: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "tool_choice must be none, auto, required, or name a tool")]
enum SentChoice {
    Mode(ChoiceMode),
    Tool { r#type: String, name: Option<String> },
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ChoiceMode {
    None,
    Auto,
    Required,
}

#[derive(Deserialize)]
struct ReasoningConfig {
    effort: Option<SentEffort>,
}

#[derive(Deserialize)]
struct TextConfig {
    format: Option<Format>,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Format {
    Text,
    JsonObject,
    JsonSchema { schema: Value, strict: Option<bool> },
}

pub(super) fn request(body: &[u8], options: &Options) -> Result<Request> {
    let body: Body = common::parse(body)?;
    check_model(body.model.as_deref(), options, |_| false)?;
    if body.previous_response_id.is_some() {
        return invalid("previous_response_id is not supported: this server keeps no responses");
    }
    let effort = body.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_ref());
    let think = resolve_think(None, effort, options);
    let mut names = Names::default();
    let tools = names.declare(body.tools.unwrap_or_default())?;

    let mut reader = Reader::default();
    if let Some(text) = body.instructions.filter(|text| !text.is_empty()) {
        reader.out.push(Message::System { content: Content::text(text), tools: Vec::new() });
    }
    match body.input {
        Some(TextOr::Text(text)) => reader.out.push(Message::User { content: Content::text(text) }),
        Some(TextOr::List(items)) if items.is_empty() => return invalid("input is an empty list"),
        Some(TextOr::List(items)) => reader.items(items, &mut names)?,
        None if reader.out.is_empty() => return invalid("either input or instructions is needed"),
        None => {}
    }
    let mut messages = reader.out;
    settle_reasoning(&mut messages, think.is_on(), !tools.is_empty(), options)?;

    let choice = match body.tool_choice {
        None | Some(SentChoice::Mode(ChoiceMode::Auto)) => Choice::Auto,
        Some(SentChoice::Mode(ChoiceMode::None)) => Choice::None,
        Some(SentChoice::Mode(ChoiceMode::Required)) => Choice::Required,
        Some(SentChoice::Tool { r#type, name }) => match (r#type.as_str(), name) {
            ("function" | "custom", Some(name)) => Choice::Named(name),
            // The tool it names was left out.
            (kind, _) if kind.starts_with("web_search") => Choice::Auto,
            (kind, _) => return invalid(format!("tool_choice of type {kind:?} is not supported")),
        },
    };
    let (tools, tool_choice) = resolve_tools(tools, choice, think.is_on())?;
    let (response_format, enforced) = match body.text.and_then(|text| text.format) {
        None | Some(Format::Text) => (ResponseFormat::Text, ResponseFormat::Text),
        Some(Format::JsonObject) => {
            if !mentions_json(&messages) {
                return invalid("text.format json_object needs the word json somewhere in the input");
            }
            (ResponseFormat::JsonObject, ResponseFormat::JsonObject)
        }
        Some(Format::JsonSchema { schema, strict }) => {
            let enforced = check_schema(&schema, strict)?;
            (ResponseFormat::JsonSchema(schema), ResponseFormat::JsonSchema(enforced))
        }
    };
    let has_format = response_format != ResponseFormat::Text;
    let constraint = resolve_constraint(&tools, tool_choice, &enforced, has_format, false)?;
    let sampling =
        Sampling { temperature: body.temperature, top_p: body.top_p, ..Sampling::default() }.resolve()?;
    let logprobs = body.top_logprobs.is_some();
    check_logprobs(logprobs, body.top_logprobs)?;
    let max_tokens = check_max_tokens(body.max_output_tokens)?;

    let conversation = Conversation { messages, think, tools, tool_choice, response_format, task: None };
    let start = if think.is_on() { Start::Reasoning } else { Start::Content };
    Ok(Request {
        model: body.model,
        sampling,
        requested_max_tokens: max_tokens,
        logprobs,
        top_logprobs: body.top_logprobs,
        parallel_calls: body.parallel_tool_calls != Some(false),
        stream: body.stream == Some(true),
        user_id: body.user,
        namespaces: names.namespaces,
        ..common::assemble(conversation, start, Vec::new(), constraint)
    })
}

/// Names that the model sees.
#[derive(Default)]
struct Names {
    taken: HashSet<String>,
    namespaces: Vec<NamespaceTool>,
    /// Namespace and own name to the flat name, of declared tools and of those that only earlier calls name.
    flat: HashMap<(String, String), String>,
    /// Numbers tried for a flat name that was taken.
    numbers: HashMap<String, usize>,
}

impl Names {
    fn declare(&mut self, sent: Vec<SentTool>) -> Result<Vec<Tool>> {
        self.taken.extend(sent.iter().filter_map(|tool| match tool {
            SentTool::Function(function) => Some(function.name.clone()),
            _ => None,
        }));
        let mut tools = Vec::new();
        for (i, tool) in sent.into_iter().enumerate() {
            let place = format!("tools[{i}]");
            match tool {
                SentTool::Function(function) => {
                    check_tool_name(&function.name, &place)?;
                    tools.push(function.into());
                }
                SentTool::Namespace { name: namespace, description, tools: inner } => {
                    check_tool_name(&namespace, &place)?;
                    let mut own_names = HashSet::new();
                    for (j, tool) in inner.into_iter().enumerate() {
                        let SentTool::Function(mut function) = tool else {
                            return invalid(format!(
                                "{place}.tools[{j}]: a namespace can only hold functions"
                            ));
                        };
                        check_tool_name(&function.name, &format!("{place}.tools[{j}]"))?;
                        if !own_names.insert(function.name.clone()) {
                            return invalid(format!("{place}: {:?} is declared twice", function.name));
                        }
                        if let Some(of_all) = description.as_deref().filter(|text| !text.is_empty()) {
                            let own = function.description.as_deref().unwrap_or_default();
                            function.description = Some(format!("{of_all}\n{own}"));
                        }
                        let flat = self.unique(&namespace, &function.name);
                        let name = std::mem::replace(&mut function.name, flat.clone());
                        self.namespaces.push(NamespaceTool { flat, namespace: namespace.clone(), name });
                        tools.push(function.into());
                    }
                }
                SentTool::Custom { name } => {
                    return invalid(format!(
                        "{place}: the custom tool {name:?} is not supported; declare a function"
                    ));
                }
                SentTool::Other => {}
            }
        }
        Ok(tools)
    }

    fn unique(&mut self, namespace: &str, name: &str) -> String {
        let base = format!("{namespace}::{name}");
        let mut flat = base.clone();
        while !self.taken.insert(flat.clone()) {
            let number = self.numbers.entry(base.clone()).or_insert(0);
            *number += 1;
            flat = format!("{base}_{number}");
        }
        // Of a name declared twice the first is meant by calls.
        self.flat.entry((namespace.to_owned(), name.to_owned())).or_insert_with(|| flat.clone());
        flat
    }

    fn of_call(&mut self, namespace: String, name: String) -> String {
        match self.flat.get(&(namespace.clone(), name.clone())) {
            Some(flat) => flat.clone(),
            None => self.unique(&namespace, &name),
        }
    }
}

impl From<Function> for Tool {
    fn from(function: Function) -> Self {
        Tool {
            name: function.name,
            description: function.description,
            parameters: function.parameters,
            strict: function.strict,
            deferred: false,
        }
    }
}

/// Turns items into messages. Calls and their outputs are held until every call has its output.
#[derive(Default)]
struct Reader {
    out: Vec<Message>,
    calls: Vec<ToolCall>,
    outputs: HashMap<String, Vec<Message>>,
    /// Ids of calls that wait for their output.
    open: HashSet<String>,
    seen: HashSet<String>,
}

impl Reader {
    fn items(&mut self, items: Vec<Item>, names: &mut Names) -> Result<()> {
        let mut items = items.into_iter().enumerate().peekable();
        while let Some((i, Item { r#type, rest })) = items.next() {
            let place = format!("input[{i}]");
            match r#type.as_deref() {
                None | Some("message") => {
                    self.require_outputs(&place)?;
                    self.message(read(rest, &place)?, &place)?;
                }
                Some("reasoning") => {
                    self.require_outputs(&place)?;
                    self.reasoning(read(rest, &place)?);
                }
                Some("web_search_call") => self.require_outputs(&place)?,
                Some("function_call") => {
                    let call: FunctionCall = read(rest, &place)?;
                    let name = match call.namespace {
                        Some(namespace) => names.of_call(namespace, call.name),
                        None => call.name,
                    };
                    self.call(ToolCall { id: call.call_id, name, arguments: call.arguments }, &place)?;
                }
                Some("custom_tool_call") => {
                    let call: CustomCall = read(rest, &place)?;
                    let arguments = json!({ "input": call.input }).to_string();
                    self.call(ToolCall { id: call.call_id, name: call.name, arguments }, &place)?;
                }
                Some("function_call_output" | "custom_tool_call_output") => {
                    let CallOutput { call_id, output } = read(rest, &place)?;
                    let content = match output {
                        Some(output) => content(output, &place)?,
                        None => Content::default(),
                    };
                    let notice = items.next_if(|(_, next)| resize_notice(next).is_some());
                    let notice = notice.and_then(|(_, item)| resize_notice(&item));
                    self.output(call_id, content, notice, &place)?;
                }
                Some(_) => {}
            }
        }
        self.require_outputs("input")
    }

    fn require_outputs(&self, place: &str) -> Result<()> {
        match self.open.iter().min() {
            Some(id) => invalid(format!("{place}: the call {id:?} before it has no output")),
            None => Ok(()),
        }
    }

    fn call(&mut self, call: ToolCall, place: &str) -> Result<()> {
        if call.id.is_empty() || !self.seen.insert(call.id.clone()) {
            return invalid(format!("{place}: call_id {:?} is empty or was used before", call.id));
        }
        self.open.insert(call.id.clone());
        self.calls.push(call);
        Ok(())
    }

    fn output(
        &mut self,
        call_id: Option<String>,
        content: Content,
        notice: Option<String>,
        place: &str,
    ) -> Result<()> {
        if let Some(id) = &call_id {
            if !self.open.remove(id) {
                return invalid(format!(
                    "{place}: the output of {id:?} has no call before it, or is its second"
                ));
            }
        } else {
            self.require_outputs(place)?;
        }
        let mut messages = vec![Message::Tool { content, call_id: call_id.clone() }];
        messages
            .extend(notice.map(|text| Message::System { content: Content::text(text), tools: Vec::new() }));
        match call_id {
            None => self.out.extend(messages),
            Some(id) => {
                self.outputs.insert(id, messages);
                if self.open.is_empty() {
                    self.close_calls();
                }
            }
        }
        Ok(())
    }

    /// All calls have their outputs: calls sorted by id join the assistant turn, outputs follow in the same order.
    fn close_calls(&mut self) {
        let mut calls = std::mem::take(&mut self.calls);
        calls.sort_by(|a, b| a.id.cmp(&b.id));
        let outputs: Vec<Message> =
            calls.iter().filter_map(|call| self.outputs.remove(&call.id)).flatten().collect();
        if !matches!(self.out.last(), Some(Message::Assistant { .. })) {
            self.out.push(empty_assistant());
        }
        if let Some(Message::Assistant { calls: earlier, .. }) = self.out.last_mut() {
            earlier.extend(calls);
        }
        self.out.extend(outputs);
    }

    fn message(&mut self, message: SentMessage, place: &str) -> Result<()> {
        let content = content(message.content, place)?;
        match message.role {
            Role::System | Role::Developer => {
                self.out.push(Message::System { content, tools: Vec::new() });
            }
            Role::User => self.out.push(Message::User { content }),
            Role::Assistant => {
                if !content.images.is_empty() {
                    return invalid(format!("{place}: an assistant message cannot contain images"));
                }
                let said = content.prompt.text();
                match self.out.last_mut() {
                    Some(Message::Assistant { text, calls, .. }) if calls.is_empty() => {
                        if !said.is_empty() {
                            text.push_str(if text.is_empty() { "" } else { "\n\n" });
                            text.push_str(said);
                        }
                    }
                    _ => self.out.push(Message::Assistant {
                        text: said.to_owned(),
                        reasoning: None,
                        calls: Vec::new(),
                        prefix: false,
                    }),
                }
            }
        }
        Ok(())
    }

    fn reasoning(&mut self, sent: SentReasoning) {
        let texts: Vec<String> = sent.content.unwrap_or_default().into_iter().map(|part| part.text).collect();
        let thought = texts.join("\n");
        if thought.is_empty() {
            return;
        }
        if !matches!(self.out.last(), Some(Message::Assistant { text, .. }) if text.is_empty()) {
            self.out.push(empty_assistant());
        }
        if let Some(Message::Assistant { reasoning, .. }) = self.out.last_mut() {
            match reasoning {
                Some(before) => {
                    before.push('\n');
                    before.push_str(&thought);
                }
                None => *reasoning = Some(thought),
            }
        }
    }
}

fn empty_assistant() -> Message {
    Message::Assistant { text: String::new(), reasoning: None, calls: Vec::new(), prefix: false }
}

fn read<T: serde::de::DeserializeOwned>(item: Value, place: &str) -> Result<T> {
    serde_json::from_value(item).or_else(|e| invalid(format!("{place}: {e}")))
}

fn content(sent: TextOr<Block>, place: &str) -> Result<Content> {
    sent.content(|(_, block)| match block {
        Block::InputText { text } | Block::OutputText { text } => Ok(Content::text(text)),
        Block::InputFile {} => Ok(Content::text("[Unsupported Document]")),
        Block::InputImage { image_url, file_id, detail } => {
            match (image_url.filter(|u| !u.is_empty()), file_id) {
                (Some(url), None) => image_content(url, detail, place),
                _ => invalid(format!("{place}: an input_image needs image_url; file_id is not supported")),
            }
        }
    })
}

/// The text of a developer message that only says how an image of the output before it was resized.
fn resize_notice(item: &Item) -> Option<String> {
    if !matches!(item.r#type.as_deref(), None | Some("message")) || item.rest["role"] != "developer" {
        return None;
    }
    let [block] = item.rest["content"].as_array()?.as_slice() else { return None };
    let text = block["text"].as_str().filter(|_| block["type"] == "input_text")?;
    let wrapped = text.starts_with("<image_resize_notice>") && text.ends_with("</image_resize_notice>");
    wrapped.then(|| text.to_owned())
}
