//! Random model output through both parsers.

use std::sync::Arc;

use deepseek_recipe::stream::{
    ChunkGenerator, FinishReason, InferenceChunk, InferenceFinishReason, OutputChunk, ParsingOptions,
    StreamProcessor, ThinkingInitialStage,
};
use futures::StreamExt;
use serde_json::{Value, json};
use text::{Event, Message, Parser, ParserOptions, Start, Stop};

use crate::Choices;

/// Hands the library's chunks on as they are.
struct Collect;

impl ChunkGenerator for Collect {
    type Chunk = OutputChunk;

    async fn generate(&mut self, chunk: OutputChunk) -> Vec<OutputChunk> {
        vec![chunk]
    }
}

/// Output as the model might write it: `⟨…⟩` is a special token, everything else ordinary ones. Left out, because the crate
/// decides otherwise on purpose: odd parameter headers, raw values that are no JSON, bodies and self-closing tags, JSON
/// mode, unfinished characters, and a line end right after a bracket (the library forgets to count it).
fn marked(c: &mut Choices) -> String {
    let text = |c: &mut Choices| -> String {
        let atoms = [
            "Hello",
            " world",
            "\n",
            "\n\n",
            " ",
            "STOP",
            "ST",
            "OP",
            "é",
            "🤭",
            "中文",
            "</ ",
            "< ",
            "<<a",
            "</div>",
            "\"",
            "\\",
            "⟨<think>⟩",
            "⟨<｜User｜>⟩",
            "a⟨｜DSML｜⟩",
            "</think>",
            "invoke",
            "12",
        ];
        (0..c.below(6)).map(|_| c.pick(&atoms)).collect()
    };
    let mut out = String::new();
    for _ in 0..c.below(5) {
        match c.below(4) {
            0 => out.push_str("⟨</think>⟩"),
            1 => {
                let spaced = c.pick(&[" ", ""]);
                let d = "⟨｜DSML｜⟩";
                out.push_str(&format!("<{d}{}>\n", c.pick(&[" calls", "tool_calls"])));
                for _ in 0..c.below(3) {
                    out.push_str(&format!(
                        "<{d}{spaced}invoke name=\"{}\">\n",
                        c.pick(&["f", "查询", "a-b"])
                    ));
                    for _ in 0..c.below(3) {
                        let name = c.pick(&["a", "城市", "x_1"]);
                        let (kind, value) = match c.below(3) {
                            0 => (
                                "false",
                                c.pick(&["1", "[1, {\"a\": null}]", " true", "\"x\"", "-1.5e3"]).to_owned(),
                            ),
                            _ => ("true", text(c)),
                        };
                        out.push_str(&format!(
                            "<{d}{spaced}parameter name=\"{name}\" string=\"{kind}\">{value}</{d}{spaced}parameter>\n"
                        ));
                    }
                    out.push_str(&format!("</{d}{spaced}invoke>\n"));
                }
                out.push_str(&format!("</{d}{}>", c.pick(&[" calls", "tool_calls"])));
            }
            _ => out.push_str(&text(c)),
        }
    }
    out
}

fn ids(tokenizer: &text::Tokenizer, marked: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    for (i, part) in marked.split(['⟨', '⟩']).enumerate() {
        if i % 2 == 0 {
            ids.extend(tokenizer.encode(part));
        } else {
            ids.push(tokenizer.special_id(part).expect("the tokenizer has the markers"));
        }
    }
    ids
}

/// Draws an output and compares what the two make of it; returns whether it has calls.
pub fn compare(
    c: &mut Choices,
    ours: &Arc<text::Tokenizer>,
    reference: &Arc<tokenizers::Tokenizer>,
) -> Result<bool, String> {
    let marked = marked(c);
    let mut tokens = ids(ours, &marked);
    // Output that ends anywhere, but not inside a character, a header or a raw value, which are decided otherwise.
    if c.once_in(3) && !marked.contains("false") {
        tokens.truncate(c.below(tokens.len() + 1));
        let bytes = ours.decode_bytes(&tokens).expect("known ids");
        let Ok(text) = std::str::from_utf8(&bytes) else { return Ok(false) };
        if text.rsplit_once("parameter name=").is_some_and(|(_, header)| !header.contains("\">")) {
            return Ok(false);
        }
    }
    let (start, stage) = match c.below(4) {
        0 => (Start::Content, None),
        1 => (Start::Reasoning, Some(ThinkingInitialStage::ReasoningStart)),
        2 => (Start::ReasoningContinued, Some(ThinkingInitialStage::ReasoningContinuation)),
        _ => (Start::ContentContinued, Some(ThinkingInitialStage::ContentContinuation)),
    };
    let tools = !c.once_in(4);
    let inside = tools && c.once_in(6);
    let stop: Vec<String> = match c.below(4) {
        0 => vec!["STOP".into()],
        1 => vec!["\n\n".into(), "TO".into(), "world\n".into()],
        _ => Vec::new(),
    };
    let length = c.once_in(4);
    let width = 1 + c.below(4);

    let options = ParsingOptions {
        parse_tool_calls: tools,
        starts_in_tool_calls: inside,
        thinking_initial_stage: stage,
        stop_sequences: stop.clone(),
        ..ParsingOptions::default()
    };
    let mut chunks: Vec<InferenceChunk> = tokens
        .chunks(width)
        .map(|ids| InferenceChunk::Tokens { token_ids: ids.to_vec(), logprobs: None })
        .collect();
    let finish_reason = if length { InferenceFinishReason::Length } else { InferenceFinishReason::Stop };
    chunks.push(InferenceChunk::Finish { finish_reason });
    let stream = StreamProcessor::new(Collect, options)
        .with_tokenizer(reference.clone())
        .into_protocol_stream(futures::stream::iter(chunks));
    let produced: Vec<_> = futures::executor::block_on(stream.collect());
    let library = of_library(produced.into_iter().map(|chunk| chunk.expect("the library parses")));

    let options = ParserOptions {
        parse_tool_calls: tools,
        starts_in_tool_calls: inside,
        stop: stop.clone(),
        ..ParserOptions::new(start)
    };
    let mut parser = Parser::new(ours.clone(), options);
    let (mut message, mut events) = (Message::default(), Vec::<Event>::new());
    for id in &tokens {
        parser.push(*id, &mut events).expect("known ids");
        if parser.stopped_by().is_some() {
            break;
        }
    }
    let stopped = parser.stopped_by().map(str::to_owned);
    let reason = parser.finish(if length { Stop::Length } else { Stop::End }, &mut events);
    events.iter().for_each(|event| message.apply(event));
    let calls: Vec<Value> =
        message.tool_calls.iter().map(|call| json!([call.name, call.arguments])).collect();
    let own = json!({
        "reasoning": message.reasoning,
        "content": message.content,
        "calls": calls,
        "finish": reason.as_str(),
        "stop": stopped,
    });
    if library == own {
        return Ok(!message.tool_calls.is_empty());
    }
    Err(format!(
        "{marked:?}\n{start:?} tools {tools} inside {inside} stop {stop:?}\nlibrary {library}\nours    {own}"
    ))
}

fn of_library(chunks: impl Iterator<Item = OutputChunk>) -> Value {
    let (mut reasoning, mut content) = (String::new(), String::new());
    let mut calls: Vec<(String, String)> = Vec::new();
    let (mut finish, mut stop) = ("", None);
    for chunk in chunks {
        match chunk {
            OutputChunk::Start { .. } | OutputChunk::ToolCallBegin => {}
            OutputChunk::Content { content: text, .. } => content.push_str(&text),
            OutputChunk::Reasoning { content: text, .. } => reasoning.push_str(&text),
            OutputChunk::ToolCallNamed { tool_name } => calls.push((tool_name, String::new())),
            OutputChunk::ToolCallArgumentsDelta { arguments } => {
                if let Some(call) = calls.last_mut() {
                    call.1.push_str(&arguments);
                }
            }
            OutputChunk::Finish { finish_reason, stop_sequence, .. } => {
                stop = stop_sequence;
                finish = match finish_reason {
                    FinishReason::Stop | FinishReason::StopSequence | FinishReason::EndOfStream => "stop",
                    FinishReason::Length => "length",
                    FinishReason::ToolCalls => "tool_calls",
                    FinishReason::ContentFilter => "content_filter",
                };
            }
        }
    }
    json!({"reasoning": reasoning, "content": content, "calls": calls, "finish": finish, "stop": stop})
}
