//! All encoding fixtures over HTTP, a scripted model behind the engine seam.

mod common;

use common::{cases, ids, path, post, scripted, settings};
use serde_json::{Value, json};

#[test]
fn encode_fixtures() {
    let server = scripted(settings(), 8);
    let (mut answered, mut images) = (0, 0);
    for case in cases("fixtures/encoding/encode.jsonl.gz") {
        let id = case["id"].as_str().unwrap();
        let mut body = case["request"].clone();
        if body.get("model").is_none() {
            body["model"] = "DeepSeek-V4.1-Flash".into();
        }
        server.script.lock().unwrap().asked.clear();
        let reply = post(server.address, path(&case["api"]), &body);
        if let Some(expected) = case.get("expect_error") {
            assert_eq!(json!(reply.status), expected["status"], "{id}: {}", reply.body);
            let kind = expected.get("body").map_or(&expected["type"], |body| &body["error"]["type"]);
            assert_eq!(reply.json()["error"]["type"], *kind, "{id}");
            if case["api"] == "messages" {
                assert_eq!(reply.json()["type"], "error", "{id}");
            }
            continue;
        }
        if reply.status == 400 {
            assert!(reply.body.contains("images are refused"), "{id}: {}", reply.body);
            assert_ne!(case["expect"]["images"], json!([]), "{id}");
            images += 1;
            continue;
        }
        assert_eq!(reply.status, 200, "{id}: {}", reply.body);
        assert_eq!(server.script.lock().unwrap().asked, ids(&case["expect"]["token_ids"]), "{id}");
        answered += 1;
    }
    assert_eq!((answered, images), (119, 8));
}

/// The request that makes the server parse as a case says; the answers' prompts do not matter.
fn parse_request(case: &Value) -> Value {
    let options = &case["options"];
    let mut messages = vec![json!({"role": "user", "content": "json"})];
    let mut body = json!({"model": "DeepSeek-V4.1-Flash", "temperature": 0});
    let mut continues = true;
    match options["stage"].as_str() {
        Some("content_continuation") => {
            messages
                .push(json!({"role": "assistant", "content": "x", "reasoning_content": "y", "prefix": true}));
        }
        Some("reasoning_continuation") => messages
            .push(json!({"role": "assistant", "content": "", "reasoning_content": "y", "prefix": true})),
        other => {
            continues = false;
            body["thinking"] = json!({"type": if other.is_some() { "enabled" } else { "disabled" }});
        }
    }
    body["messages"] = messages.into();
    if options["parse_tool_calls"] == true && !continues {
        body["tools"] =
            json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    }
    if options["starts_in_tool_calls"] == true {
        body["tool_choice"] = "required".into();
    }
    if options["parse_json_output"] == true {
        body["response_format"] = json!({"type": "json_object"});
    }
    if options["stop_sequences"] != json!([]) {
        body["stop"] = options["stop_sequences"].clone();
    }
    if options["finish"] == "length" {
        body["max_tokens"] = case["token_ids"].as_array().unwrap().len().into();
    }
    body
}

fn message(choice: &Value) -> Value {
    let message = &choice["message"];
    let calls: Vec<Value> = message["tool_calls"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|c| json!({"name": c["function"]["name"], "arguments": c["function"]["arguments"]}))
        .collect();
    json!({
        "reasoning": message.get("reasoning_content").cloned().unwrap_or(json!("")),
        "content": message["content"],
        "tool_calls": calls,
        "finish_reason": choice["finish_reason"],
    })
}

#[test]
fn parse_fixtures_streamed_and_whole() {
    let server = scripted(settings(), 8);
    for case in cases("fixtures/encoding/parse.jsonl.gz") {
        let id = case["id"].as_str().unwrap();
        server.script.lock().unwrap().says = ids(&case["token_ids"]);
        let mut body = parse_request(&case);
        let reply = post(server.address, "/v1/chat/completions", &body);
        assert_eq!(reply.status, 200, "{id}: {}", reply.body);
        let mut expected = case["expect"].clone();
        if case["token_ids"] == json!([]) && case["options"]["finish"] == "length" {
            expected["finish_reason"] = "stop".into(); // no limit of 0 tokens can be asked for
        }
        assert_eq!(message(&reply.json()["choices"][0]), expected, "{id}");
        body["stream"] = true.into();
        let (events, done) = post(server.address, "/v1/chat/completions", &body).events();
        assert!(done, "{id}");
        let mut text = json!({"reasoning": "", "content": "", "tool_calls": [], "finish_reason": null});
        let add = |text: &mut Value, more: &Value| {
            *text = format!("{}{}", text.as_str().unwrap(), more.as_str().unwrap_or("")).into();
        };
        for (_, event) in events {
            let choice = &event["choices"][0];
            add(&mut text["reasoning"], &choice["delta"]["reasoning_content"]);
            add(&mut text["content"], &choice["delta"]["content"]);
            for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
                let index = call["index"].as_u64().unwrap() as usize;
                let calls = text["tool_calls"].as_array_mut().unwrap();
                if index == calls.len() {
                    calls.push(json!({"name": call["function"]["name"], "arguments": ""}));
                }
                add(&mut calls[index]["arguments"], &call["function"]["arguments"]);
            }
            text["finish_reason"] = choice["finish_reason"].clone();
        }
        assert_eq!(text, expected, "{id}, streamed");
    }
}

/// Ids, times, names and the prompt's length as in the fixtures.
fn normalise(text: &str, id: &str, expected_model: &str) -> Value {
    fn walk(value: &mut Value, model: &str) {
        match value {
            Value::Object(map) => {
                for (key, value) in map.iter_mut() {
                    match key.as_str() {
                        "created" | "created_at" => *value = 1_700_000_000.into(),
                        "completed_at" if value.is_number() => *value = 1_700_000_000.into(),
                        "model" => *value = model.into(),
                        "system_fingerprint" => *value = "fp_x".into(),
                        "id" | "call_id"
                            if value
                                .as_str()
                                .is_some_and(|id| id.starts_with("call_") && !id.contains('<')) =>
                        {
                            let id = value.as_str().unwrap();
                            *value = format!("{}<20 random><4 digits>", &id[..id.len() - 24]).into();
                        }
                        // The prompts of the fixtures were 20 tokens long by decree.
                        "prompt_tokens" => *value = 20.into(),
                        "prompt_cache_miss_tokens" => *value = 12.into(),
                        "input_tokens" | "total_tokens" => *value = Value::Null,
                        _ => walk(value, model),
                    }
                }
            }
            Value::Array(list) => list.iter_mut().for_each(|value| walk(value, model)),
            _ => {}
        }
    }
    let mut value = serde_json::from_str(&text.replace(id, "resp_0001")).unwrap();
    walk(&mut value, expected_model);
    value
}

/// Events with pieces of one text joined: where the pieces are cut is not binding.
fn joined(events: Vec<Value>) -> Vec<Value> {
    const SLOTS: [&str; 7] = [
        "/choices/0/delta/content",
        "/choices/0/delta/reasoning_content",
        "/choices/0/delta/tool_calls/0/function/arguments",
        "/delta/text",
        "/delta/thinking",
        "/delta/partial_json",
        "/delta",
    ];
    let mut out: Vec<Value> = Vec::new();
    for mut event in events {
        if let Some(object) = event.as_object_mut() {
            object.remove("sequence_number");
        }
        let same = out.last().and_then(|last| {
            SLOTS.iter().find(|slot| {
                let blank = |value: &Value| {
                    let mut value = value.clone();
                    let slot = value.pointer_mut(slot).filter(|slot| slot.is_string())?;
                    *slot = Value::Null;
                    Some(value)
                };
                blank(last).is_some() && blank(last) == blank(&event)
            })
        });
        match same {
            Some(slot) => {
                let more = event.pointer(slot).and_then(Value::as_str).unwrap().to_owned();
                let text = out.last_mut().unwrap().pointer_mut(slot).unwrap();
                *text = format!("{}{more}", text.as_str().unwrap()).into();
            }
            None => out.push(event),
        }
    }
    out
}

#[test]
fn transcripts_of_three_apis() {
    let server = scripted(settings(), 8);
    for case in cases("fixtures/encoding/responses.jsonl.gz") {
        let id = case["id"].as_str().unwrap();
        {
            let mut script = server.script.lock().unwrap();
            script.says = ids(&case["token_ids"]);
            script.cached = 8;
        }
        let mut body = case["request"].clone();
        // Long enough for eight tokens to be kept.
        let long = "one two three four five six seven eight nine ten";
        match body["messages"].as_array().is_some() {
            true => body["messages"][0]["content"] = long.into(),
            false => body["input"] = long.into(),
        }
        let length = case["finish"] == "length";
        let limit = if case["api"] == "responses" { "max_output_tokens" } else { "max_tokens" };
        if length {
            body[limit] = case["token_ids"].as_array().unwrap().len().into();
        }
        let model = case["final"]["model"].as_str().unwrap();
        let expect = |value: &Value| {
            let mut text = value.to_string();
            if length {
                text = text.replace("\"max_output_tokens\":null", "\"max_output_tokens\":3");
            }
            if id.starts_with("stop_sequence") {
                // The reference was given three tokens at a time; we stop at the second, which completes the stop string.
                text = text.replace("\"completion_tokens\":3", "\"completion_tokens\":2");
                text = text.replace("\"output_tokens\":3", "\"output_tokens\":2");
            }
            normalise(&text, "resp_0001", model)
        };
        let reply = post(server.address, path(&case["api"]), &body);
        assert_eq!(reply.status, 200, "{id}: {}", reply.body);
        assert!(reply.head.contains("x-hallmark-cache: hit=8; miss=token 8"), "{id}: {}", reply.head);
        let (events, done) = reply.events();
        assert_eq!(done, case["sse_done"] == "[DONE]", "{id}");
        let first = &events[0].1;
        let own = [&first["id"], &first["message"]["id"], &first["response"]["id"]];
        let own = own.iter().find_map(|id| id.as_str()).unwrap().to_owned();
        for (i, (name, event)) in events.iter().enumerate() {
            if case["api"] == "responses" {
                assert_eq!(event["sequence_number"], i, "{id}");
            }
            if let Some(name) = name {
                assert_eq!(event["type"], name.as_str(), "{id}");
            }
        }
        let got = events.iter().map(|(_, data)| normalise(&data.to_string(), &own, model)).collect();
        let want = case["stream_events"].as_array().unwrap();
        let want = joined(want.iter().map(|event| expect(&event["data"])).collect());
        let got = joined(got);
        for (got, want) in got.iter().zip(&want) {
            assert_eq!(got, want, "{id}, streamed");
        }
        assert_eq!(got.len(), want.len(), "{id}: {got:?}");

        body["stream"] = false.into();
        if let Some(object) = body.as_object_mut() {
            object.remove("stream_options");
        }
        let whole = post(server.address, path(&case["api"]), &body);
        let own = whole.json()["id"].as_str().unwrap().to_owned();
        assert_eq!(normalise(&whole.body, &own, model), expect(&case["final"]), "{id}, whole");
    }
}
