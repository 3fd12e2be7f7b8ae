//! From generated ids to reasoning, answer and tool calls (spec section 6).
//!
//! Markers match only as special ids; the same text spelled with ordinary tokens stays text. What comes out does not
//! depend on how the ids are cut into calls of [`Parser::push`].

mod call;
mod marker;
mod message;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::special::{DSML, THINK_END};
use crate::{Decoder, TextError, TextItem, Tokenizer, call_id, json};
use marker::Marker;
pub use message::{Message, MessageCall};

/// How the output is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParserOptions {
    /// Whether the turn thinks; marks the ids of calls that come without reasoning.
    pub thinking: bool,
    /// Where the output begins.
    pub start: Start,
    /// Whether blocks of calls are recognised.
    pub parse_tool_calls: bool,
    /// The prompt has opened a block of calls; takes precedence over `start`.
    pub starts_in_tool_calls: bool,
    /// The answer is the JSON in the text; what is around it is dropped.
    pub json_object: bool,
    /// The answer ends before the first of these.
    pub stop: Vec<String>,
}

impl ParserOptions {
    /// Options without tools, JSON and stop strings.
    pub fn new(start: Start) -> Self {
        Self {
            thinking: matches!(start, Start::Reasoning | Start::ReasoningContinued | Start::ContentContinued),
            start,
            parse_tool_calls: false,
            starts_in_tool_calls: false,
            json_object: false,
            stop: Vec::new(),
        }
    }
}

/// Where the output begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// A new answer; its leading line ends are dropped.
    Content,
    /// New reasoning; its leading line ends are dropped.
    Reasoning,
    /// Reasoning that the prompt has begun.
    ReasoningContinued,
    /// An answer that the prompt has begun, its reasoning over.
    ContentContinued,
    /// Everything is text, special tokens as spelled; stop strings apply.
    Raw,
}

/// A piece of the parsed output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Reasoning.
    Reasoning(Text),
    /// The answer.
    Content(Text),
    /// The name of a call is complete.
    CallOpened {
        /// Number of the call, from 0.
        index: usize,
        /// A new call id.
        id: String,
        /// The tool's name.
        name: String,
    },
    /// More of the arguments of the open call, JSON text.
    Arguments {
        /// Number of the call.
        index: usize,
        /// The piece.
        text: String,
    },
}

/// Text with the tokens it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// The text.
    pub text: String,
    /// Which tokens, counted from 0 in the order pushed, first gave text here; what they gave may go on in later events.
    /// Log-probabilities are reported for these.
    pub tokens: Vec<usize>,
}

/// Why the engine stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The end token, which is not pushed, or a stop string that the parser reported.
    End,
    /// The token limit.
    Length,
    /// A content filter.
    Filter,
    /// The engine dropped the request for lack of memory.
    Resources,
}

/// Why the answer ends, as the client is told (spec section 6.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// It is complete, or a stop string ended it.
    Stop,
    /// The token limit.
    Length,
    /// Tools are to be called.
    ToolCalls,
    /// A content filter.
    ContentFilter,
    /// The engine ran out of memory.
    InsufficientSystemResource,
}

impl FinishReason {
    /// The reason as the chat API spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
            FinishReason::ContentFilter => "content_filter",
            FinishReason::InsufficientSystemResource => "insufficient_system_resource",
        }
    }
}

/// What the next token belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Reasoning.
    Reasoning,
    /// The answer.
    Answer,
    /// A block of calls.
    Calls,
    /// Nothing that is read.
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Reason {
        strip: bool,
    },
    Content {
        strip: bool,
    },
    /// Answer text before its JSON, in JSON mode.
    BeforeJson {
        strip: bool,
    },
    Json,
    AfterJson,
    Calls,
    Name,
    /// Between the parameters of a call.
    Arguments,
    Header,
    StringValue,
    RawValue,
    Done,
    Raw,
}

/// What a complete marker does.
#[derive(Debug, Clone, Copy)]
enum Action {
    Enter(State),
    /// Enters JSON with the bracket that begins it.
    OpenJson(char),
    StopString(usize),
    OpenCall,
    CloseString,
    CloseRaw,
    CloseCall,
}

/// An item that waits, with the first and last token that it came from.
#[derive(Clone, Copy)]
struct Held {
    item: TextItem,
    first: usize,
    last: usize,
}

/// The call that is being read.
#[derive(Default)]
struct OpenCall {
    name: String,
    /// Text between the parameters; only read while there is none.
    body: String,
    /// Text of the header or raw value being read.
    text: String,
    has_parameters: bool,
}

/// Reads generated ids and reports what they mean.
pub struct Parser {
    tokenizer: Arc<Tokenizer>,
    options: ParserOptions,
    decoder: Decoder,
    think_end: Option<u32>,
    dsml: Option<u32>,
    state: State,
    /// In order of precedence.
    markers: Vec<(Marker, Action)>,
    held: VecDeque<Held>,
    call: OpenCall,
    calls: usize,
    has_reasoning: bool,
    stopped_by: Option<usize>,
    tokens: usize,
    /// First token of the character that is being decoded.
    char_start: usize,
    /// Tokens before this one have been named in an event.
    reported: usize,
    reasoning_tokens: usize,
}

impl Parser {
    /// A parser for one answer.
    pub fn new(tokenizer: Arc<Tokenizer>, mut options: ParserOptions) -> Self {
        options.stop.retain(|stop| !stop.is_empty());
        let state = match options.start {
            _ if options.starts_in_tool_calls => State::Calls,
            Start::Content => content_state(&options, true),
            Start::ContentContinued => content_state(&options, false),
            Start::Reasoning => State::Reason { strip: true },
            Start::ReasoningContinued => State::Reason { strip: false },
            Start::Raw => State::Raw,
        };
        let mut parser = Self {
            think_end: tokenizer.special_id(THINK_END),
            dsml: tokenizer.special_id(DSML),
            tokenizer,
            options,
            decoder: Decoder::default(),
            state,
            markers: Vec::new(),
            held: VecDeque::new(),
            call: OpenCall::default(),
            calls: 0,
            has_reasoning: false,
            stopped_by: None,
            tokens: 0,
            char_start: 0,
            reported: 0,
            reasoning_tokens: 0,
        };
        parser.enter(state);
        parser
    }

    /// Reads one generated id, the end token excepted, and appends what it completes. Ids after a stop string are ignored.
    pub fn push(&mut self, id: u32, events: &mut Vec<Event>) -> Result<(), TextError> {
        let token = self.tokens;
        self.tokens += 1;
        if matches!(self.state, State::Reason { .. }) && self.think_end != Some(id) {
            self.reasoning_tokens += 1;
        }
        if !self.decoder.is_pending() {
            self.char_start = token;
        }
        let mut items = Vec::new();
        self.decoder.items(&self.tokenizer, id, |item| items.push(item))?;
        let is_special = self.tokenizer.is_added(id);
        for item in items {
            let held = match item {
                TextItem::Special(_) => Held { item, first: token, last: token },
                // Before a special token only an unfinished character of earlier tokens comes out.
                TextItem::Char(_) => {
                    Held { item, first: self.char_start, last: token - usize::from(is_special) }
                }
            };
            // Only the first character of a token can have begun in an earlier one.
            self.char_start = token;
            self.item(held, events);
        }
        self.release_unheld(events);
        Ok(())
    }

    /// Ends the output: releases what was held back and says why the answer ends.
    pub fn finish(&mut self, stop: Stop, events: &mut Vec<Event>) -> FinishReason {
        self.release(self.held.len(), events);
        if self.state == State::RawValue {
            let text = std::mem::take(&mut self.call.text);
            self.arguments(text, events);
        }
        let complete_calls = self.calls > 0;
        self.enter(State::Done);
        match stop {
            _ if self.stopped_by.is_some() => FinishReason::Stop,
            Stop::End if complete_calls => FinishReason::ToolCalls,
            Stop::End => FinishReason::Stop,
            Stop::Length => FinishReason::Length,
            Stop::Filter => FinishReason::ContentFilter,
            Stop::Resources => FinishReason::InsufficientSystemResource,
        }
    }

    /// The stop string that ended the answer; the engine should stop then.
    pub fn stopped_by(&self) -> Option<&str> {
        self.stopped_by.map(|i| self.options.stop[i].as_str())
    }

    /// What the next token belongs to.
    pub fn phase(&self) -> Phase {
        match self.state {
            State::Reason { .. } => Phase::Reasoning,
            State::Content { .. }
            | State::BeforeJson { .. }
            | State::Json
            | State::AfterJson
            | State::Raw => Phase::Answer,
            State::Calls
            | State::Name
            | State::Arguments
            | State::Header
            | State::StringValue
            | State::RawValue => Phase::Calls,
            State::Done => Phase::Done,
        }
    }

    /// Tokens consumed while reasoning, `</think>` not counted.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    fn item(&mut self, held: Held, events: &mut Vec<Event>) {
        self.held.push_back(held);
        // The markers of a state compete: the first in the list that is complete wins, all of them start anew then.
        let complete =
            self.markers.iter_mut().fold(None, |found: Option<(usize, Action)>, (marker, action)| {
                let complete = marker.feed(held.item);
                found.or_else(|| complete.then(|| (marker.held(), *action)))
            });
        if let Some((length, action)) = complete {
            self.release(self.held.len() - length, events);
            self.held.clear();
            self.act(action, held, events);
            return;
        }
        if is_stripping(self.state) && held.item != TextItem::Char('\n') {
            self.stop_stripping();
        }
        if matches!(self.state, State::Arguments | State::Header) {
            // These two look at their text as it grows.
            self.release_unheld(events);
        }
    }

    fn release_unheld(&mut self, events: &mut Vec<Event>) {
        let keep = self.markers.iter().map(|(marker, _)| marker.held()).max().unwrap_or(0);
        self.release(self.held.len().saturating_sub(keep), events);
    }

    /// Gives the first `count` held items to the state as its text.
    fn release(&mut self, count: usize, events: &mut Vec<Event>) {
        let mut text = String::new();
        let mut tokens = Vec::new();
        for _ in 0..count {
            let Some(held) = self.held.pop_front() else { break };
            match self.state {
                State::Reason { .. } | State::Content { .. } | State::Json | State::Raw => {
                    self.spell(held.item, &mut text);
                    for token in held.first.max(self.reported)..=held.last {
                        tokens.push(token);
                        self.reported = token + 1;
                    }
                }
                State::StringValue => {
                    let mut plain = String::new();
                    self.spell(held.item, &mut plain);
                    plain.chars().for_each(|c| json::escape(c, &mut text));
                }
                State::Name => {
                    let mut name = std::mem::take(&mut self.call.name);
                    self.spell(held.item, &mut name);
                    self.call.name = name;
                }
                State::Arguments if !self.call.has_parameters => {
                    let mut body = std::mem::take(&mut self.call.body);
                    self.spell(held.item, &mut body);
                    self.call.body = body;
                    if call::is_self_closing(&self.call.body) {
                        self.close_call(events);
                        return;
                    }
                }
                State::Header | State::RawValue => {
                    let mut buffer = std::mem::take(&mut self.call.text);
                    self.spell(held.item, &mut buffer);
                    self.call.text = buffer;
                    if self.state == State::Header && held.item == TextItem::Char('>') {
                        self.try_header(events);
                    }
                }
                State::Arguments
                | State::BeforeJson { .. }
                | State::AfterJson
                | State::Calls
                | State::Done => {}
            }
        }
        if text.is_empty() {
            return;
        }
        match self.state {
            State::Reason { .. } => {
                self.has_reasoning = true;
                append(events, Event::Reasoning(Text { text, tokens }));
            }
            State::StringValue => self.arguments(text, events),
            _ => append(events, Event::Content(Text { text, tokens })),
        }
    }

    fn spell(&self, item: TextItem, text: &mut String) {
        match item {
            TextItem::Char(c) => text.push(c),
            TextItem::Special(id) => {
                text.push_str(&String::from_utf8_lossy(self.tokenizer.token_bytes(id).unwrap_or_default()));
            }
        }
    }

    fn arguments(&mut self, text: String, events: &mut Vec<Event>) {
        if !text.is_empty() {
            append(events, Event::Arguments { index: self.calls.saturating_sub(1), text });
        }
    }

    fn act(&mut self, action: Action, held: Held, events: &mut Vec<Event>) {
        match action {
            Action::Enter(state) => self.enter(state),
            Action::OpenJson(bracket) => {
                self.enter(State::Json);
                self.held.push_back(Held { item: TextItem::Char(bracket), ..held });
                self.release(1, events);
            }
            Action::StopString(i) => {
                self.stopped_by = Some(i);
                self.enter(State::Done);
            }
            Action::OpenCall => {
                let index = self.calls;
                self.calls += 1;
                let name = std::mem::take(&mut self.call.name);
                let id = call_id::new_call_id(index, self.options.thinking && !self.has_reasoning);
                events.push(Event::CallOpened { index, id, name });
                self.call = OpenCall::default();
                self.enter(State::Arguments);
            }
            Action::CloseString => {
                self.arguments("\"".into(), events);
                self.enter(State::Arguments);
            }
            Action::CloseRaw => {
                let text = std::mem::take(&mut self.call.text);
                self.arguments(call::raw_value(&text), events);
                self.enter(State::Arguments);
            }
            Action::CloseCall => self.close_call(events),
        }
    }

    fn close_call(&mut self, events: &mut Vec<Event>) {
        let call = std::mem::take(&mut self.call);
        let end = if call.has_parameters { "}".into() } else { call::body_arguments(&call.body) };
        self.arguments(end, events);
        self.held.clear();
        self.enter(State::Calls);
    }

    /// Writes the name once the header is complete, and goes on with the value.
    fn try_header(&mut self, events: &mut Vec<Event>) {
        let Some(header) = call::header(&self.call.text) else { return };
        self.call.text.clear();
        let mut text = String::from(if self.call.has_parameters { ", " } else { "{" });
        self.call.has_parameters = true;
        json::write_string(&header.name, &mut text);
        text.push_str(if header.is_string { ": \"" } else { ": " });
        self.arguments(text, events);
        self.enter(if header.is_string { State::StringValue } else { State::RawValue });
    }

    /// One item other than a line end ends the stripping, even while it is held.
    fn stop_stripping(&mut self) {
        self.markers.retain(|(_, action)| !matches!(action, Action::Enter(next) if *next == self.state));
        match &mut self.state {
            State::Reason { strip } | State::Content { strip } | State::BeforeJson { strip } => {
                *strip = false
            }
            _ => {}
        }
    }

    fn enter(&mut self, state: State) {
        if state == State::Header {
            self.call.text.clear();
        }
        self.state = state;
        self.markers = self.markers_of(state);
    }

    fn markers_of(&self, state: State) -> Vec<(Marker, Action)> {
        let tag = |text: &str, rest: &str| {
            let items = text.chars().map(TextItem::Char);
            let items = items.chain(self.dsml.map(TextItem::Special)).chain(rest.chars().map(TextItem::Char));
            self.dsml.map(|_| Marker::new(items.collect()))
        };
        let think_end = || self.think_end.map(|id| Marker::new(vec![TextItem::Special(id)]));
        let calls = || tag("<", "").filter(|_| self.options.parse_tool_calls).map(Marker::after_newlines);
        let mut markers = Vec::new();
        let mut add = |marker: Option<Marker>, action| markers.extend(marker.map(|marker| (marker, action)));
        match state {
            State::Reason { .. } => {
                add(calls(), Action::Enter(State::Calls));
                let next = content_state(&self.options, true);
                add(think_end().map(Marker::after_newlines), Action::Enter(next));
            }
            State::Content { .. } | State::Json | State::Raw => {
                for (i, stop) in self.options.stop.iter().enumerate() {
                    add(Some(Marker::text(stop)), Action::StopString(i));
                }
                if state == State::Json {
                    add(Some(Marker::text("\n```")), Action::Enter(State::AfterJson));
                } else if state != State::Raw {
                    add(calls(), Action::Enter(State::Calls));
                    add(think_end(), Action::Enter(State::Content { strip: false }));
                }
            }
            State::BeforeJson { .. } => {
                add(Some(Marker::text("```json\n")), Action::Enter(State::Json));
                add(Some(Marker::text("```\n")), Action::Enter(State::Json));
                add(Some(Marker::text("{")), Action::OpenJson('{'));
                add(Some(Marker::text("[")), Action::OpenJson('['));
                add(calls(), Action::Enter(State::Calls));
                add(think_end(), Action::Enter(State::BeforeJson { strip: false }));
            }
            State::AfterJson => add(calls(), Action::Enter(State::Calls)),
            State::Calls => {
                add(Some(Marker::text("invoke name=\"")), Action::Enter(State::Name));
                add(tag("</", "tool_calls>"), Action::Enter(State::Done));
                add(tag("</", " calls>"), Action::Enter(State::Done));
            }
            State::Name => add(Some(Marker::text("\"")), Action::OpenCall),
            State::Arguments => {
                add(Some(Marker::text("parameter name=")), Action::Enter(State::Header));
                add(tag("</", ""), Action::CloseCall);
            }
            State::Header => add(tag("</", ""), Action::Enter(State::Arguments)),
            State::StringValue => add(tag("</", ""), Action::CloseString),
            State::RawValue => add(tag("</", ""), Action::CloseRaw),
            State::Done => {}
        }
        if is_stripping(state) {
            add(Some(Marker::text("\n")), Action::Enter(state));
        }
        markers
    }
}

fn content_state(options: &ParserOptions, strip: bool) -> State {
    if options.json_object { State::BeforeJson { strip } } else { State::Content { strip } }
}

fn is_stripping(state: State) -> bool {
    matches!(
        state,
        State::Reason { strip: true } | State::Content { strip: true } | State::BeforeJson { strip: true }
    )
}

/// Appends an event, joined with the one before it where both are of one kind.
fn append(events: &mut Vec<Event>, event: Event) {
    match (events.last_mut(), event) {
        (Some(Event::Reasoning(before)), Event::Reasoning(Text { text, tokens }))
        | (Some(Event::Content(before)), Event::Content(Text { text, tokens })) => {
            before.text.push_str(&text);
            before.tokens.extend(tokens);
        }
        (Some(Event::Arguments { index: i, text: before }), Event::Arguments { index, text })
            if *i == index =>
        {
            before.push_str(&text);
        }
        (_, event) => events.push(event),
    }
}
