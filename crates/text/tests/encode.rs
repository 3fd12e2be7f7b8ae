//! Requests to prompts: the encoding fixtures and the demo model's recorded prompts.

mod common;

use serde_json::{Value, json};
use text::{Api, Effort, FinishReason, Message, Options, Parser, Request, RequestError, Start, Stop, Think};

/// Cases of `encode.jsonl` whose surface this crate does not have, each with the reason. There are none.
const WITHOUT_SURFACE: [(&str, &str); 0] = [];

fn options() -> Options {
    Options { models: vec!["DeepSeek-V4-Pro".into(), "DeepSeek-V4.1-Flash".into()], ..Options::default() }
}

fn api(case: &Value) -> Api {
    match case["api"].as_str().unwrap() {
        "chat" => Api::Chat,
        "messages" => Api::Messages,
        "responses" => Api::Responses,
        other => panic!("unknown api {other}"),
    }
}

fn read(case: &Value) -> Result<Request, RequestError> {
    let mut body = case["request"].clone();
    if body.get("model").is_none() {
        body["model"] = "DeepSeek-V4.1-Flash".into();
    }
    Request::from_json(api(case), body.to_string().as_bytes(), &options())
}

fn effort(think: Think) -> Value {
    match think.effort() {
        None => Value::Null,
        Some(Effort::Low) => "low".into(),
        Some(Effort::High) => "high".into(),
        Some(Effort::Xhigh) => "xhigh".into(),
        Some(Effort::Max) => "max".into(),
        Some(Effort::Budget(n)) => n.into(),
    }
}

fn start(start: Start) -> Value {
    match start {
        Start::Content => Value::Null,
        Start::Reasoning => "reasoning_start".into(),
        Start::ReasoningContinued => "reasoning_continuation".into(),
        Start::ContentContinued => "content_continuation".into(),
        Start::Raw => panic!("no request starts raw"),
    }
}

#[test]
fn encode_fixtures() {
    let tokenizer = common::released();
    let cases = common::cases("fixtures/encoding/encode.jsonl.gz");
    assert_eq!(cases.len(), 165);
    let mut without_surface = Vec::new();
    for case in &cases {
        let id = case["id"].as_str().unwrap();
        if WITHOUT_SURFACE.iter().any(|(known, _)| *known == id) {
            without_surface.push(id);
            continue;
        }
        if let Some(expected) = case.get("expect_error") {
            let error = read(case).expect_err(id);
            assert_eq!(json!(error.status), expected["status"], "{id}");
            let given = error.body();
            let (kind, code) = match expected.get("body") {
                Some(body) => (&body["error"]["type"], &body["error"]["code"]),
                None => (&expected["type"], &expected["type"]),
            };
            assert_eq!((&given["error"]["type"], &given["error"]["code"]), (kind, code), "{id}");
            assert!(error.message.len() > 10, "{id}: {error}");
            continue;
        }
        let expected = &case["expect"];
        let request = read(case).unwrap_or_else(|e| panic!("{id}: {e}"));
        let encoded = request.encode(&tokenizer).unwrap();
        assert_eq!(encoded.prompt.text(), expected["prompt"].as_str().unwrap(), "prompt of {id}");
        let ranges: Vec<[usize; 2]> =
            encoded.prompt.special_ranges().iter().map(|r| [r.start, r.end]).collect();
        assert_eq!(json!(ranges), expected["special_ranges"], "special ranges of {id}");
        assert_eq!(encoded.ids, common::ids(&expected["token_ids"]), "ids of {id}");
        let images: Vec<&str> = encoded.images.iter().map(|image| image.url.as_str()).collect();
        assert_eq!(json!(images), expected["images"], "images of {id}");
        assert_eq!(json!(request.think().is_on()), expected["thinking"], "thinking of {id}");
        assert_eq!(effort(request.think()), expected["effort"], "effort of {id}");

        // The fixture holds what the maker's library hands on: the official mode.
        let sampling = request.sampling.official(request.think().is_on());
        assert_eq!(
            json!({
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_tokens": request.requested_max_tokens,
                "seed": sampling.seed,
                "logprobs": request.logprobs,
                "top_logprobs": request.top_logprobs,
            }),
            rounded(&expected["sampling"]),
            "sampling of {id}"
        );
        let parser = &request.parser;
        assert_eq!(
            json!({
                "stage": start(parser.start),
                "parse_tool_calls": parser.parse_tool_calls,
                "starts_in_tool_calls": parser.starts_in_tool_calls,
                "parse_json_output": parser.json_object,
                "stop_sequences": parser.stop,
            }),
            expected["parse"],
            "parser of {id}"
        );
        let constraint = request.constraint.as_ref().map(|c| json!({"kind": c.kind(), "schema": c.schema()}));
        assert_eq!(json!(constraint), expected["constraint"], "constraint of {id}");

        if let Some(same) = case.get("full_vocab_tokenisation_gives_same_ids") {
            let naive = tokenizer.encode_with_added(encoded.prompt.text());
            assert_eq!(json!(naive == encoded.ids), *same, "full vocabulary of {id}");
        }
    }
    assert_eq!(without_surface.len(), WITHOUT_SURFACE.len(), "WITHOUT_SURFACE lists cases that do not exist");
}

/// The numbers of `sampling` as single precision, which is how they are kept.
fn rounded(sampling: &Value) -> Value {
    let mut sampling = sampling.clone();
    for field in ["temperature", "top_p"] {
        sampling[field] = json!(sampling[field].as_f64().unwrap() as f32);
    }
    sampling
}

#[test]
fn demo_prompts() {
    let tokenizer = common::demo();
    let cases = common::cases("models/demo/expected.jsonl");
    assert_eq!(cases.len(), 50);
    for case in &cases {
        let mut body = json!({
            "messages": case["messages"],
            "thinking": {"type": if case["thinking"] == true { "enabled" } else { "disabled" }},
        });
        for field in ["tools", "reasoning_effort"] {
            if !case[field].is_null() {
                body[field] = case[field].clone();
            }
        }
        let request =
            Request::from_json(Api::Chat, body.to_string().as_bytes(), &Options::default()).unwrap();
        let encoded = request.encode(&tokenizer).unwrap();
        assert_eq!(encoded.prompt.text(), case["prompt"].as_str().unwrap(), "{}", case["id"]);
        assert_eq!(encoded.ids, common::ids(&case["prompt_ids"]), "{}", case["id"]);
        // The recorded continuation is raw output: its ids come back from its text with the full vocabulary.
        let recorded = common::ids(&case["float32"]["ids"]);
        assert_eq!(tokenizer.decode(&recorded).unwrap(), case["float32"]["text"].as_str().unwrap());

        if case["tools"].is_null()
            && let [message] = case["messages"].as_array().unwrap().as_slice()
            && message["role"] == "user"
            && case["reasoning_effort"].is_null()
        {
            let think = if case["thinking"] == true { Think::On(Effort::High) } else { Think::Off };
            let short = Request::from_text(message["content"].as_str().unwrap(), think);
            assert_eq!(short.encode(&tokenizer).unwrap(), encoded, "{}", case["id"]);
            assert_eq!((short.parser.clone(), short.think()), (request.parser.clone(), request.think()));
            let raw = Request::from_raw(case["prompt"].as_str().unwrap()).encode(&tokenizer).unwrap();
            assert_eq!(raw.ids, encoded.ids, "{}", case["id"]);
        }
    }
}

#[test]
fn raw_prompts_get_their_first_token() {
    let tokenizer = common::demo();
    let ids = |text: &str| Request::from_raw(text).encode(&tokenizer).unwrap().ids;
    let bos = tokenizer.special_id(text::special::BOS).unwrap();
    assert_eq!(ids("Once")[0], bos);
    assert_eq!(ids("Once"), ids(&format!("{}Once", text::special::BOS)));
    assert_eq!(ids(""), [bos]);
}

#[test]
fn token_limits() {
    let limit = |body: Value, prompt: usize, context: usize| {
        let body = body.to_string();
        let request = Request::from_json(Api::Chat, body.as_bytes(), &Options::default()).unwrap();
        request.max_tokens(prompt, context).map_err(|e| e.message)
    };
    let body = |extra: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let off = json!({"thinking": {"type": "disabled"}});
    assert_eq!(limit(body(off.clone()), 10, 1 << 20), Ok(8192));
    assert_eq!(limit(body(json!({})), 10, 1 << 20), Ok(65_536));
    assert_eq!(limit(body(json!({"reasoning_effort": "max"})), 10, 1 << 20), Ok(131_072));
    assert_eq!(limit(body(json!({"reasoning_effort": 100})), 10, 1 << 20), Ok(131_072));
    assert_eq!(limit(body(json!({"reasoning_effort": 99})), 10, 1 << 20), Ok(65_536));
    assert_eq!(limit(body(off.clone()), 4000, 4096), Ok(96));
    assert_eq!(limit(body(off.clone()), 4096, 4096), Ok(1));
    assert_eq!(limit(body(json!({"max_tokens": 96})), 4000, 4096), Ok(96));
    let error = limit(body(json!({"max_tokens": 97})), 4000, 4096).unwrap_err();
    assert!(error.contains("4097") && error.contains("4096"), "{error}");
    assert!(limit(body(off), 4097, 4096).is_err());
}

#[test]
fn honour_mode_keeps_every_field() {
    let body = json!({
        "messages": [{"role": "user", "content": "x"}], "temperature": 0.25, "top_p": 0.5, "top_k": 40, "min_p": 0.125,
        "repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"7": -100, "3": 2.5},
        "seed": 9,
    });
    let request = Request::from_json(Api::Chat, body.to_string().as_bytes(), &Options::default()).unwrap();
    let expected = text::SamplingParams {
        temperature: 0.25,
        top_p: 0.5,
        top_k: 40,
        min_p: 0.125,
        repetition_penalty: 1.5,
        presence_penalty: 1.0,
        frequency_penalty: -1.0,
        logit_bias: vec![(3, 2.5), (7, -100.0)],
        seed: Some(9),
    };
    assert_eq!(request.sampling, expected);
    let official = request.sampling.official(true);
    assert_eq!(
        official,
        text::SamplingParams {
            temperature: 1.0,
            top_p: 0.95,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            ..expected
        }
    );
}

/// Requests beyond the fixtures that must be refused, each with a word of the reason.
#[test]
fn refusals_name_the_field() {
    let refused = |api: Api, options: &Options, body: &str, part: &str| {
        let error = Request::from_json(api, body.as_bytes(), options).expect_err(body);
        assert_eq!(error.status, 400);
        assert!(error.message.contains(part), "{body}: {error}");
    };
    let chat = |fields: &str, part: &str| {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "json"}}], {fields}}}"#);
        refused(Api::Chat, &Options::default(), &body, part);
    };
    chat(r#""top_k": -2"#, "top_k");
    chat(r#""min_p": 1.5"#, "min_p");
    chat(r#""repetition_penalty": 0"#, "repetition_penalty");
    chat(r#""logit_bias": {"5": 101}"#, "logit_bias[5]");
    chat(r#""logit_bias": {"x": 1}"#, "invalid request body");
    chat(r#""reasoning_effort": 101"#, "101");
    chat(r#""reasoning_effort": "off""#, "off");
    chat(r#""reasoning_effort": true"#, "true");
    chat(r#""n": 0"#, "n is 0");
    chat(r#""seed": -1"#, "invalid request body");
    chat(r#""task": "sing""#, "sing");
    chat(r#""tool_choice": "maybe""#, "tool_choice");
    chat(
        r#""tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": 1e999}}}]"#,
        "invalid",
    );
    chat(
        r#""tools": [{"type": "function", "function": {"name": "f", "strict": true, "parameters": {"type": "object", "additionalProperties": true}}}]"#,
        "additionalProperties",
    );
    chat(r#""response_format": {"type": "json_schema", "json_schema": {"schema": 5}}"#, "schema");
    let messages = |messages: &str, part: &str| {
        refused(Api::Chat, &Options::default(), &format!(r#"{{"messages": {messages}}}"#), part);
    };
    messages(r#"[{"role": "user"}]"#, "messages[0]");
    messages(r#"[{"role": "user", "content": "x", "prefix": true}]"#, "prefix");
    messages(r#"[{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]"#, "file_id");
    messages(r#"[{"role": "user", "content": [{"type": "audio"}]}]"#, "audio");
    messages(
        r#"[{"role": "assistant", "content": "a"}, {"role": "user", "content": "b", "task": 1}, 5]"#,
        "invalid",
    );
    let task = r#"{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "task": "query"}"#;
    refused(Api::Chat, &Options::default(), task, "task");

    let strict = Options { strict_reasoning: true, ..Options::default() };
    let turn = |id: &str| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "q"}}, {{"role": "assistant", "content": null, "tool_calls":
            [{{"id": "{id}", "type": "function", "function": {{"name": "f", "arguments": "{{}}"}}}}]}},
            {{"role": "tool", "tool_call_id": "{id}", "content": "1"}}]}}"#
        )
    };
    refused(Api::Chat, &strict, &turn("c1"), "reasoning");
    assert!(Request::from_json(Api::Chat, turn("c1").as_bytes(), &Options::default()).is_ok());
    assert!(Request::from_json(Api::Chat, turn("call_00_ET_abc").as_bytes(), &strict).is_ok());

    let named = Options { models: vec!["demo".into()], ..Options::default() };
    refused(
        Api::Messages,
        &named,
        r#"{"model": "x", "messages": [{"role": "user", "content": "q"}]}"#,
        "demo",
    );
    let claude = r#"{"model": "claude-x", "messages": [{"role": "user", "content": "q"}]}"#;
    assert!(Request::from_json(Api::Messages, claude.as_bytes(), &named).is_ok());

    let responses = |body: &str, part: &str| refused(Api::Responses, &Options::default(), body, part);
    responses(r#"{"input": []}"#, "input");
    responses(r#"{"input": "x", "previous_response_id": "r"}"#, "previous_response_id");
    responses(r#"{"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}"#, "input[0]");
    responses(
        r#"{"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}]}"#,
        "\"c\"",
    );
    responses(r#"{"input": [{"role": "narrator", "content": "x"}]}"#, "input[0]");
    responses(r#"{"input": "x", "tools": [{"type": "custom", "name": "apply_patch"}]}"#, "tools[0]");
    refused(Api::Chat, &Options::default(), "{", "invalid request body");
    refused(Api::Chat, &Options::default(), &format!("{{\"messages\": {}", "[".repeat(100_000)), "invalid");
}

#[test]
fn choices_and_overrides() {
    let body = br#"{"messages": [{"role": "user", "content": "q"}], "n": 3, "reasoning_effort": "max"}"#;
    let options = Options { max_choices: 8, think: Some(Think::Off), ..Options::default() };
    let request = Request::from_json(Api::Chat, body, &options).unwrap();
    assert_eq!((request.choices, request.think(), request.parser.start), (3, Think::Off, Start::Content));
    let quiet = Options { thinks_by_default: false, ..Options::default() };
    let body = br#"{"messages": [{"role": "user", "content": "q"}]}"#;
    assert_eq!(Request::from_json(Api::Chat, body, &quiet).unwrap().think(), Think::Off);
}

/// A prompt that needs a token which the tokenizer lacks is an error that names it, not other text.
#[test]
fn missing_special_tokens_are_named() {
    let path = common::repository("models/demo/tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for token in file["added_tokens"].as_array_mut().unwrap() {
        if token["content"] == "<｜User｜>" {
            token["content"] = "<｜Somebody｜>".into();
        }
    }
    let tokenizer = text::Tokenizer::from_bytes(file.to_string().as_bytes(), "other.json").unwrap();
    let error = RequestError::from(Request::from_text("x", Think::Off).encode(&tokenizer).unwrap_err());
    assert!(error.message.contains("<｜User｜>") && error.message.contains("other.json"), "{error}");
    assert_eq!((error.status, error.kind), (500, "internal_error"));
    let mut request = Request::from_raw("x");
    request.sampling.logit_bias = vec![(99_999, 1.0)];
    let error = RequestError::from(request.encode(&tokenizer).unwrap_err());
    assert!(error.status == 400 && error.message.contains("99999"), "{error}");
}

/// `responses.jsonl` records the wire form, which is the server's; request, parser and collected answer are checked here.
#[test]
fn wire_fixtures_through_the_parser() {
    let tokenizer = common::released();
    let cases = common::cases("fixtures/encoding/responses.jsonl.gz");
    assert_eq!(cases.len(), 17);
    for case in &cases {
        let id = case["id"].as_str().unwrap();
        let request = read(case).unwrap_or_else(|e| panic!("{id}: {e}"));
        let mut parser = Parser::new(tokenizer.clone(), request.parser.clone());
        let mut message = Message::default();
        for ids in common::ids(&case["token_ids"]).chunks(3) {
            let mut events = Vec::new();
            for &token in ids {
                parser.push(token, &mut events).unwrap();
            }
            events.iter().for_each(|event| message.apply(event));
        }
        let mut events = Vec::new();
        let stop = if case["finish"] == "length" { Stop::Length } else { Stop::End };
        message.finish_reason = Some(parser.finish(stop, &mut events));
        events.iter().for_each(|event| message.apply(event));
        let fin = &case["final"];
        match case["api"].as_str().unwrap() {
            "chat" => check_chat(id, &fin["choices"][0], &message),
            "messages" => check_messages(id, fin, &message, parser.stopped_by()),
            _ => check_responses(id, fin, &message),
        }
        if let Some(count) = fin["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64() {
            assert_eq!(parser.reasoning_tokens() as u64, count, "{id}");
        }
    }
}

/// The part of a call id that is not random.
fn known_part(id: &Value) -> &str {
    id.as_str().unwrap().split('<').next().unwrap()
}

fn check_chat(id: &str, choice: &Value, message: &Message) {
    let given = &choice["message"];
    assert_eq!(message.content, given["content"].as_str().unwrap(), "{id}");
    assert_eq!(message.reasoning, given["reasoning_content"].as_str().unwrap_or_default(), "{id}");
    assert_eq!(message.finish_reason.unwrap().as_str(), choice["finish_reason"], "{id}");
    let calls = given["tool_calls"].as_array().cloned().unwrap_or_default();
    assert_eq!(message.tool_calls.len(), calls.len(), "{id}");
    for (ours, given) in message.tool_calls.iter().zip(&calls) {
        assert_eq!(ours.name, given["function"]["name"].as_str().unwrap(), "{id}");
        assert_eq!(ours.arguments, given["function"]["arguments"].as_str().unwrap(), "{id}");
        assert!(ours.id.starts_with(known_part(&given["id"])), "{id}: {}", ours.id);
    }
}

fn check_messages(id: &str, given: &Value, message: &Message, stopped_by: Option<&str>) {
    let joined = |kind: &str, field: &str| -> String {
        let blocks = given["content"].as_array().unwrap().iter().filter(|block| block["type"] == kind);
        blocks.map(|block| block[field].as_str().unwrap()).collect()
    };
    assert_eq!(message.content, joined("text", "text"), "{id}");
    assert_eq!(message.reasoning, joined("thinking", "thinking"), "{id}");
    let calls: Vec<&Value> =
        given["content"].as_array().unwrap().iter().filter(|block| block["type"] == "tool_use").collect();
    assert_eq!(message.tool_calls.len(), calls.len(), "{id}");
    for (ours, given) in message.tool_calls.iter().zip(calls) {
        assert_eq!(ours.name, given["name"].as_str().unwrap(), "{id}");
        let arguments: Value = serde_json::from_str(&ours.arguments).unwrap_or_else(|_| json!({}));
        assert_eq!(arguments, given["input"], "{id}");
        assert!(ours.id.starts_with(known_part(&given["id"])), "{id}: {}", ours.id);
    }
    assert_eq!(json!(stopped_by), given["stop_sequence"], "{id}");
    let reason = match message.finish_reason.unwrap() {
        FinishReason::Stop if stopped_by.is_some() => "stop_sequence",
        FinishReason::Stop => "end_turn",
        FinishReason::Length => "max_tokens",
        FinishReason::ToolCalls => "tool_use",
        other => panic!("{id}: {other:?}"),
    };
    assert_eq!(reason, given["stop_reason"], "{id}");
}

fn check_responses(id: &str, given: &Value, message: &Message) {
    let items = |kind: &'static str| {
        given["output"].as_array().unwrap().iter().filter(move |item| item["type"] == kind)
    };
    let text = |kind: &'static str| -> String {
        items(kind).map(|item| item["content"][0]["text"].as_str().unwrap()).collect()
    };
    assert_eq!(message.content, text("message"), "{id}");
    assert_eq!(message.reasoning, text("reasoning"), "{id}");
    assert_eq!(message.tool_calls.len(), items("function_call").count(), "{id}");
    for (ours, given) in message.tool_calls.iter().zip(items("function_call")) {
        assert_eq!(ours.name, given["name"].as_str().unwrap(), "{id}");
        assert_eq!(ours.arguments, given["arguments"].as_str().unwrap(), "{id}");
        assert!(ours.id.starts_with(known_part(&given["call_id"])), "{id}: {}", ours.id);
    }
    let incomplete = message.finish_reason == Some(FinishReason::Length);
    assert_eq!(incomplete, given["status"] == "incomplete", "{id}");
}
