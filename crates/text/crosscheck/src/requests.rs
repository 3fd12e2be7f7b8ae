//! Random request bodies through both.

use std::sync::Arc;

use deepseek_recipe::anthropic::MessagesRequest;
use deepseek_recipe::openai::{ChatCompletionRequest, ResponsesRequest};
use deepseek_recipe::request::{ConversationRequest, ConversionOptions, ProtocolRequest};
use deepseek_recipe::stream::ThinkingInitialStage;
use deepseek_recipe_core::special_tokens::SpecialTokensMap;
use deepseek_recipe_encoding::PromptEncoding;
use deepseek_recipe_encoding::v4::dsv41::DeepseekV41Encoding;
use serde_json::{Value, json};
use text::{Api, Request, Start};

use crate::Choices;

/// The library spells the image token in another way; everything else is the same.
pub fn special_tokens() -> SpecialTokensMap {
    SpecialTokensMap { image: text::special::IMAGE.into(), ..SpecialTokensMap::default() }
}

fn words(c: &mut Choices) -> String {
    let atoms = [
        "Hello",
        " ",
        "\n",
        "\n\n",
        "json",
        "中文",
        "🤭",
        "é",
        "<｜User｜>",
        "</think>",
        "<｜ref｜>",
        "<｜/box｜>",
        "｜DSML｜",
        "<｜deepseek_image｜>",
        "x-anthropic-billing-header",
        "You are",
        "1234",
        "  ",
        "\t",
        "\"",
        "\\",
        "<",
        "｜",
        ":",
    ];
    (0..c.below(6)).map(|_| c.pick(&atoms)).collect()
}

fn optional_words(c: &mut Choices) -> Value {
    if c.once_in(3) { Value::Null } else { words(c).into() }
}

fn value(c: &mut Choices, depth: usize) -> Value {
    match c.below(if depth == 0 { 7 } else { 9 }) {
        0 => Value::Null,
        1 => c.once_in(2).into(),
        2 => (c.next() as i64 >> c.below(64)).into(),
        3 => c.next().into(),
        4 => json!(f64::from_bits(c.next())),
        5 => json!((c.below(2_000_001) as f64 - 1e6) / 10f64.powi(c.below(12) as i32)),
        6 => words(c).into(),
        7 => (0..c.below(4)).map(|_| value(c, depth - 1)).collect(),
        _ => Value::Object((0..c.below(4)).map(|_| (words(c), value(c, depth - 1))).collect()),
    }
}

fn object(c: &mut Choices) -> Value {
    Value::Object((0..c.below(4)).map(|_| (words(c), value(c, 3))).collect())
}

/// Schemas that are valid as such: the library also checks every keyword of a schema that is not strict.
fn schema(c: &mut Choices) -> Value {
    let mut schema = json!({"type": "object"});
    if c.once_in(2) {
        schema["properties"] = (0..c.below(4))
            .map(|_| {
                let node = match c.below(5) {
                    0 => json!({"type": "string", "description": words(c), "enum": ["a", "b"]}),
                    1 => json!({"type": "integer", "minimum": 3, "title": words(c)}),
                    2 => json!({"type": "array", "items": {"type": "number", "maximum": 0.5}}),
                    3 => json!({"anyOf": [{"type": "null"}, {"type": "boolean"}]}),
                    _ => json!({"type": ["string", "null"]}),
                };
                (format!("p{}", c.below(9)), node)
            })
            .collect::<serde_json::Map<_, _>>()
            .into();
    }
    if c.once_in(3) {
        schema["description"] = words(c).into();
    }
    if c.once_in(9) {
        schema["additionalProperties"] = c.once_in(2).into();
    }
    if c.once_in(5) {
        schema["default"] = value(c, 2);
    }
    if c.once_in(40) {
        schema["type"] = "string".into();
    }
    schema
}

fn tool_name(c: &mut Choices) -> &'static str {
    if c.once_in(30) { c.pick(&["", "bad name", "ü"]) } else { c.pick(&["a", "get_weather", "x-1", "calc"]) }
}

fn maybe(
    c: &mut Choices,
    body: &mut Value,
    field: &str,
    n: usize,
    value: impl FnOnce(&mut Choices) -> Value,
) {
    if c.once_in(n) {
        body[field] = value(c);
    }
}

fn sampling(c: &mut Choices, body: &mut Value) {
    maybe(c, body, "temperature", 5, |c| json!(c.below(25) as f64 / 10.0));
    maybe(c, body, "top_p", 5, |c| json!(c.below(12) as f64 / 10.0));
    maybe(c, body, "stream", 4, |c| c.once_in(2).into());
}

fn content(c: &mut Choices) -> Value {
    if c.once_in(2) {
        return words(c).into();
    }
    (0..c.below(4))
        .map(|_| match c.below(5) {
            0 => json!({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}),
            1 if c.once_in(4) => json!({"type": "image_url", "image_url": {"url": "data:image/bmp;base64,AAAA"}}),
            1 => json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}),
            _ => json!({"type": "text", "text": words(c)}),
        })
        .collect()
}

fn effort(c: &mut Choices) -> Value {
    c.pick(&["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]).into()
}

fn thinking(c: &mut Choices) -> Value {
    json!({"type": c.pick(&["enabled", "adaptive", "disabled", "disabled", "disabled"])})
}

fn chat(c: &mut Choices) -> Value {
    let mut messages = Vec::new();
    for _ in 0..c.below(7) {
        match c.below(9) {
            0 | 1 => messages.push(json!({"role": "system", "content": content(c)})),
            2..=4 => messages.push(json!({"role": "user", "content": content(c)})),
            5 => messages.push(json!({"role": "latest_reminder", "content": words(c)})),
            6 => {
                let mut turn =
                    json!({"role": "assistant", "content": words(c), "reasoning_content": optional_words(c)});
                maybe(c, &mut turn, "prefix", 6, |_| true.into());
                messages.push(turn);
            }
            _ => {
                let count = 1 + c.below(3);
                let call = |c: &mut Choices, i: usize| {
                    let arguments = if c.once_in(6) { words(c) } else { object(c).to_string() };
                    json!({"id": format!("c{i}"), "type": "function",
                        "function": {"name": c.pick(&["a", "get_weather"]), "arguments": arguments}})
                };
                let calls: Vec<Value> = (0..count).map(|i| call(c, i)).collect();
                messages.push(json!({"role": "assistant", "content": optional_words(c),
                    "reasoning_content": optional_words(c), "tool_calls": calls}));
                let turn = c.below(count);
                for i in 0..count {
                    if !c.once_in(40) {
                        let id = format!("c{}", (i + turn) % count);
                        messages.push(json!({"role": "tool", "tool_call_id": id, "content": content(c)}));
                    }
                }
            }
        }
    }
    let mut body = json!({"model": "DeepSeek-V4.1-Flash", "messages": messages});
    if c.once_in(2) {
        let strict = c.once_in(5);
        let function = |c: &mut Choices| {
            let mut function = json!({"name": tool_name(c)});
            maybe(c, &mut function, "description", 2, |c| words(c).into());
            maybe(c, &mut function, "parameters", 2, schema);
            if strict {
                function["strict"] = (!c.once_in(9)).into();
            }
            json!({"type": "function", "function": function})
        };
        body["tools"] = (0..c.below(4)).map(|_| function(c)).collect();
        maybe(c, &mut body, "tool_choice", 2, |c| match c.below(4) {
            0 => "none".into(),
            1 => "auto".into(),
            2 => "required".into(),
            _ => json!({"type": "function", "function": {"name": tool_name(c)}}),
        });
    }
    maybe(c, &mut body, "response_format", 4, |c| match c.below(4) {
        0 => json!({"type": "text"}),
        1 => json!({"type": "json_object"}),
        2 => json!({"type": "regex", "regex": words(c)}),
        _ => {
            json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema(c), "strict": c.once_in(3)}})
        }
    });
    maybe(c, &mut body, "thinking", 2, thinking);
    maybe(c, &mut body, "reasoning_effort", 3, effort);
    sampling(c, &mut body);
    maybe(c, &mut body, "max_tokens", 6, |c| c.below(500_000).into());
    maybe(c, &mut body, "seed", 9, |c| c.next().into());
    maybe(c, &mut body, "presence_penalty", 9, |c| json!(c.below(6) as f64 - 3.0));
    maybe(c, &mut body, "frequency_penalty", 9, |c| json!(c.below(6) as f64 - 3.0));
    maybe(c, &mut body, "n", 12, |c| (1 + c.below(2)).into());
    maybe(c, &mut body, "logprobs", 6, |c| c.once_in(2).into());
    maybe(c, &mut body, "top_logprobs", 12, |c| c.below(25).into());
    maybe(c, &mut body, "stop", 6, |c| match c.below(3) {
        0 => "STOP".into(),
        1 => json!(["a", "b"]),
        _ => (0..c.below(20)).map(|_| words(c)).collect(),
    });
    maybe(c, &mut body, "stream_options", 9, |_| json!({"include_usage": true}));
    body
}

fn messages_image(c: &mut Choices) -> Value {
    let source = match c.below(3) {
        0 => json!({"type": "base64", "media_type": "image/png", "data": "AAAA"}),
        _ => json!({"type": "url", "url": "https://example.com/a.png"}),
    };
    json!({"type": "image", "source": source})
}

fn messages_text_or_image(c: &mut Choices) -> Value {
    match c.below(6) {
        0 => messages_image(c),
        1 => {
            json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}})
        }
        _ => json!({"type": "text", "text": words(c)}),
    }
}

fn anthropic(c: &mut Choices) -> Value {
    let mut messages = Vec::new();
    for _ in 0..c.below(5) {
        match c.below(6) {
            0 | 1 => messages.push(json!({"role": "user", "content": words(c)})),
            2 => {
                let blocks: Vec<Value> = (0..c.below(4)).map(|_| messages_text_or_image(c)).collect();
                messages.push(json!({"role": "user", "content": blocks}));
            }
            3 => {
                let mut blocks: Vec<Value> =
                    (0..c.below(3)).map(|_| json!({"type": "text", "text": words(c)})).collect();
                maybe_block(c, &mut blocks);
                messages.push(json!({"role": "system", "content": blocks}));
            }
            4 => messages.push(json!({"role": "assistant", "content": words(c)})),
            _ => {
                let mut blocks = Vec::new();
                for _ in 0..c.below(3) {
                    blocks.push(json!({"type": "thinking", "thinking": words(c), "signature": "s"}));
                }
                for _ in 0..c.below(3) {
                    blocks.push(json!({"type": "text", "text": words(c)}));
                }
                let count = c.below(3);
                for i in 0..count {
                    // Input that is no object becomes text; the library prints its small numbers in another way there.
                    blocks.push(
                        json!({"type": "tool_use", "id": format!("t{i}"), "name": "a", "input": object(c)}),
                    );
                }
                messages.push(json!({"role": "assistant", "content": blocks}));
                if count > 0 {
                    let turn = c.below(count);
                    let mut blocks: Vec<Value> = Vec::new();
                    for i in 0..count {
                        if !c.once_in(30) {
                            let mut result = json!({"type": "tool_result", "tool_use_id": format!("t{}", (i + turn) % count)});
                            maybe(c, &mut result, "content", 2, |c| words(c).into());
                            maybe(c, &mut result, "content", 4, |c| {
                                (0..c.below(3)).map(|_| messages_text_or_image(c)).collect()
                            });
                            maybe(
                                c,
                                &mut result,
                                "content",
                                9,
                                |_| json!([{"type": "tool_reference", "tool_name": "late"}]),
                            );
                            blocks.push(result);
                        }
                    }
                    if c.once_in(2) {
                        blocks.push(json!({"type": "text", "text": words(c)}));
                    }
                    messages.push(json!({"role": "user", "content": blocks}));
                }
            }
        }
    }
    let mut body =
        json!({"model": "DeepSeek-V4.1-Flash", "messages": messages, "max_tokens": 1 + c.below(600_000)});
    maybe(c, &mut body, "system", 3, |c| words(c).into());
    maybe(c, &mut body, "system", 4, |c| {
        (0..c.below(4)).map(|_| json!({"type": "text", "text": words(c)})).collect()
    });
    if c.once_in(2) {
        let tool = |c: &mut Choices, name: &str, late: bool| {
            let mut tool = json!({"name": name, "input_schema": schema(c)});
            maybe(c, &mut tool, "description", 2, |c| words(c).into());
            if late {
                tool["defer_loading"] = true.into();
            }
            tool
        };
        let first = tool_name(c);
        let late = c.once_in(2);
        body["tools"] = json!([tool(c, first, false), tool(c, "late", late)]);
        maybe(c, &mut body, "tool_choice", 2, |c| match c.below(4) {
            0 => json!({"type": "none"}),
            1 => json!({"type": "auto"}),
            2 => json!({"type": "any"}),
            _ => json!({"type": "tool", "name": tool_name(c)}),
        });
    }
    maybe(c, &mut body, "thinking", 2, thinking);
    maybe(c, &mut body, "output_config", 3, |c| json!({"effort": effort(c)}));
    maybe(c, &mut body, "stop_sequences", 6, |c| (0..c.below(3)).map(|_| words(c)).collect());
    sampling(c, &mut body);
    body
}

fn maybe_block(c: &mut Choices, blocks: &mut Vec<Value>) {
    if c.once_in(3) {
        blocks.push(json!({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}}));
    }
}

fn responses(c: &mut Choices) -> Value {
    let mut body = json!({"model": "DeepSeek-V4.1-Flash"});
    let blocks = |c: &mut Choices| -> Value {
        if c.once_in(2) {
            return words(c).into();
        }
        (0..c.below(3))
            .map(|_| match c.below(5) {
                0 => json!({"type": "input_image", "image_url": "https://example.com/a.png"}),
                1 => json!({"type": "input_file", "file_id": "f"}),
                _ => json!({"type": "input_text", "text": words(c)}),
            })
            .collect()
    };
    if c.once_in(4) {
        body["input"] = words(c).into();
    } else {
        let mut items = Vec::new();
        let mut id = 0;
        for _ in 0..c.below(7) {
            match c.below(8) {
                0..=2 => {
                    let role = c.pick(&["user", "user", "assistant", "system", "developer"]);
                    items.push(json!({"type": "message", "role": role, "content": blocks(c)}));
                }
                3 => items.push(json!({"role": "user", "content": blocks(c)})),
                4 => items.push(json!({"type": "reasoning", "encrypted_content": "x",
                    "content": (0..c.below(3)).map(|_| json!({"type": "reasoning_text", "text": words(c)})).collect::<Vec<_>>()})),
                5 => items.push(json!({"type": c.pick(&["web_search_call", "unknown_item"])})),
                _ => {
                    let first = id;
                    let count = 1 + c.below(3);
                    id += count;
                    let mut outputs = Vec::new();
                    for i in first..id {
                        // Ids fall, so that sorting the calls changes their order.
                        let call = format!("c{}", 90 - i);
                        if c.once_in(4) {
                            items.push(json!({"type": "custom_tool_call", "call_id": call, "name": "a", "input": words(c)}));
                            outputs.push(json!({"type": "custom_tool_call_output", "call_id": call, "output": blocks(c)}));
                        } else {
                            let mut item = json!({"type": "function_call", "call_id": call, "name": "a", "arguments": object(c).to_string()});
                            maybe(c, &mut item, "namespace", 4, |c| c.pick(&["ns", "other"]).into());
                            items.push(item);
                            outputs.push(json!({"type": "function_call_output", "call_id": call, "output": blocks(c)}));
                        }
                    }
                    let turn = c.below(count);
                    outputs.rotate_left(turn);
                    if c.once_in(30) {
                        outputs.pop();
                    }
                    for output in outputs {
                        items.push(output);
                        if c.once_in(6) {
                            let notice = "<image_resize_notice>x</image_resize_notice>";
                            items.push(json!({"role": "developer", "content": [{"type": "input_text", "text": notice}]}));
                        }
                    }
                }
            }
        }
        body["input"] = items.into();
    }
    maybe(c, &mut body, "instructions", 3, |c| words(c).into());
    if c.once_in(2) {
        let function = |c: &mut Choices| {
            let mut function = json!({"type": "function", "name": tool_name(c)});
            maybe(c, &mut function, "description", 2, |c| words(c).into());
            maybe(c, &mut function, "parameters", 2, schema);
            function
        };
        body["tools"] = (0..c.below(3))
            .map(|_| match c.below(5) {
                0 => json!({"type": "web_search"}),
                1 => json!({"type": "namespace", "name": c.pick(&["ns", "n2"]), "description": words(c),
                    "tools": (0..c.below(3)).map(|_| function(c)).collect::<Vec<_>>()}),
                _ => function(c),
            })
            .collect();
        maybe(c, &mut body, "tool_choice", 2, |c| match c.below(5) {
            0 => "none".into(),
            1 => "auto".into(),
            2 => "required".into(),
            3 => json!({"type": "web_search"}),
            _ => json!({"type": "function", "name": tool_name(c)}),
        });
    }
    maybe(c, &mut body, "reasoning", 2, |c| json!({"effort": effort(c)}));
    maybe(c, &mut body, "text", 4, |c| match c.below(3) {
        0 => json!({"format": {"type": "text"}}),
        1 => json!({"format": {"type": "json_object"}}),
        _ => {
            json!({"format": {"type": "json_schema", "name": "n", "schema": schema(c), "strict": c.once_in(3)}})
        }
    });
    maybe(c, &mut body, "max_output_tokens", 6, |c| c.below(500_000).into());
    maybe(c, &mut body, "top_logprobs", 9, |c| c.below(25).into());
    sampling(c, &mut body);
    body
}

/// What both say about one request.
fn of_library(request: ConversationRequest, encoding: &DeepseekV41Encoding) -> Value {
    let rendered = encoding.render_conversation(&request.conversation);
    let ids = encoding.encode(&request.conversation).expect("the library encodes");
    let ranges: Vec<_> = rendered.special_ranges.iter().map(|r| [r.start, r.end]).collect();
    let parsing = &request.parsing_options;
    let inference = &request.inference_options;
    json!({
        "prompt": rendered.prompt,
        "ranges": ranges,
        "ids": ids,
        "images": rendered.image_sources.len(),
        "thinking": request.conversation.thinking_mode,
        "temperature": inference.temperature,
        "top_p": inference.top_p,
        "max_tokens": inference.max_tokens,
        "seed": inference.seed,
        "logprobs": inference.logprobs,
        "top_logprobs": inference.top_logprobs,
        "limit": request.resolve_max_tokens(ids.len() as u32, 1 << 20).ok(),
        "start": parsing.thinking_initial_stage.as_ref().map(|stage| match stage {
            ThinkingInitialStage::ReasoningStart => "new",
            ThinkingInitialStage::ReasoningContinuation => "reasoning",
            ThinkingInitialStage::ContentContinuation => "content",
        }),
        "calls": [parsing.parse_tool_calls, parsing.starts_in_tool_calls],
        "json": parsing.parse_json_output,
        "stop": parsing.stop_sequences,
        "constraint": inference.output_constraint.as_ref().map(|c| json!([c.kind(), c.schema()])),
        "stream": [request.stream, request.response_options.include_usage],
    })
}

fn of_ours(request: &Request, tokenizer: &text::Tokenizer) -> Value {
    let encoded = request.encode(tokenizer).expect("this crate encodes");
    let ranges: Vec<_> = encoded.prompt.special_ranges().iter().map(|r| [r.start, r.end]).collect();
    let sampling = request.sampling.official(request.think().is_on());
    json!({
        "prompt": encoded.prompt.text(),
        "ranges": ranges,
        "ids": encoded.ids,
        "images": encoded.images.len(),
        "thinking": request.think().is_on(),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": request.requested_max_tokens,
        "seed": sampling.seed,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
        "limit": request.max_tokens(encoded.ids.len(), 1 << 20).ok(),
        "start": match request.parser.start {
            Start::Content | Start::Raw => None,
            Start::Reasoning => Some("new"),
            Start::ReasoningContinued => Some("reasoning"),
            Start::ContentContinued => Some("content"),
        },
        "calls": [request.parser.parse_tool_calls, request.parser.starts_in_tool_calls],
        "json": request.parser.json_object,
        "stop": request.parser.stop,
        "constraint": request.constraint.as_ref().map(|c| json!([c.kind(), c.schema()])),
        "stream": [request.stream, request.include_usage],
    })
}

/// Draws a body and compares what the two make of it; returns whether both accept it.
pub fn compare(
    c: &mut Choices,
    ours: &Arc<text::Tokenizer>,
    encoding: &DeepseekV41Encoding,
) -> Result<bool, String> {
    let (api, body) = match c.below(4) {
        0 | 1 => (Api::Chat, chat(c)),
        2 => (Api::Messages, anthropic(c)),
        _ => (Api::Responses, responses(c)),
    };
    let body = body.to_string();
    let options = ConversionOptions::default().with_special_tokens(special_tokens());
    let read = |e: serde_json::Error| e.to_string();
    let library = match api {
        Api::Chat => serde_json::from_str::<ChatCompletionRequest>(&body)
            .map_err(read)
            .and_then(|r| r.convert(options).map_err(|e| e.to_string())),
        Api::Messages => serde_json::from_str::<MessagesRequest>(&body)
            .map_err(read)
            .and_then(|r| r.convert(options).map_err(|e| e.to_string())),
        Api::Responses => serde_json::from_str::<ResponsesRequest>(&body)
            .map_err(read)
            .and_then(|r| r.convert(options).map_err(|e| e.to_string())),
    };
    let own = Request::from_json(api, body.as_bytes(), &text::Options::default());
    match (library, own) {
        (Err(_), Err(_)) => Ok(false),
        (Ok(library), Ok(own)) => {
            let (library, own) = (of_library(library, encoding), of_ours(&own, ours));
            let differing =
                library.as_object().into_iter().flatten().find(|(key, value)| own[*key] != **value);
            match differing {
                None => Ok(true),
                Some((key, value)) => Err(format!("{body}\n{key}\nlibrary {value}\nours    {}", own[key])),
            }
        }
        (Ok(_), Err(e)) => Err(format!("{body}\nonly this crate refuses: {e}")),
        (Err(e), Ok(_)) => Err(format!("{body}\nonly the library refuses: {e}")),
    }
}
