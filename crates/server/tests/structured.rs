//! Answers of a fixed form over HTTP: schemas, expressions, forced and strict calls.

mod common;

use std::net::SocketAddr;

use checkpoint::Checkpoint;
use common::{post, repository, scripted, settings, spawn};
use engine::{LoadOptions, Loaded, Prompt};
use serde_json::{Value, json};
use server::{SessionEngine, Settings};
use text::{Api, Options, Request};

const CONTEXT: usize = 2048;

fn load() -> Loaded {
    let checkpoint = Checkpoint::open(&repository("models/demo")).unwrap();
    Loaded::new(&checkpoint, LoadOptions { threads: Some(1), ..LoadOptions::default() }).unwrap()
}

fn serve(loaded: &Loaded) -> SocketAddr {
    let session = loaded.lm.clone().session(CONTEXT).unwrap();
    let eos = loaded.lm.config().eos_token_id;
    let engine = SessionEngine { tokenizer: loaded.tokenizer.clone(), eos, session };
    spawn(Settings::new("demo", CONTEXT), loaded.tokenizer.clone(), engine, 64)
}

fn schema() -> Value {
    json!({"type": "object", "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99},
        "sights": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
        "required": ["city", "population", "sights"], "additionalProperties": false})
}

fn follows(answer: &Value) -> bool {
    let sights = answer["sights"].as_array();
    answer.as_object().is_some_and(|members| members.len() == 3)
        && ["Paris", "Rome"].iter().any(|city| answer["city"] == *city)
        && answer["population"].as_u64().is_some_and(|n| n < 100)
        && sights.is_some_and(|list| list.len() <= 3 && list.iter().all(Value::is_boolean))
}

fn format() -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "city", "schema": schema()}})
}

fn body(fields: Value) -> Value {
    let mut body = json!({"model": "demo", "messages": [{"role": "user", "content": "Tell me of a city as json."}],
        "thinking": {"type": "disabled"}, "temperature": 1.5, "max_tokens": 120});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// A model that was never taught the schema, drawn from at a high temperature.
#[test]
fn the_demo_model_keeps_to_a_schema() {
    let loaded = load();
    let address = serve(&loaded);
    for seed in 0..6 {
        let asked = body(json!({"response_format": format(), "seed": seed}));
        let reply = post(address, "/v1/chat/completions", &asked).json();
        let choice = &reply["choices"][0];
        let text = choice["message"]["content"].as_str().unwrap();
        assert_eq!(choice["finish_reason"], "stop", "{reply}");
        assert!(serde_json::from_str(text).is_ok_and(|answer| follows(&answer)), "{text}");
        // Gate G5 holds for constrained answers, streamed ones too.
        let request =
            Request::from_json(Api::Chat, asked.to_string().as_bytes(), &Options::default()).unwrap();
        let prompt = Prompt::from_request(&request, &loaded, CONTEXT, None).unwrap();
        let mut session = loaded.lm.clone().session(CONTEXT).unwrap();
        let run = engine::answer(&loaded, &mut *session, &prompt, &mut |_| {}, &|| false).unwrap();
        assert_eq!(run.message.content, text);
        let mut asked = asked;
        asked["stream"] = true.into();
        let (events, _) = post(address, "/v1/chat/completions", &asked).events();
        let streamed: String =
            events.iter().filter_map(|(_, e)| e["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(streamed, text);
    }
}

/// Reasoning is free: to its end it is the one of the request without a format.
#[test]
fn reasoning_before_a_schema_is_free() {
    let address = serve(&load());
    let mut complete = 0;
    for seed in 0..4 {
        let ask = |fields: Value| {
            let mut body = body(fields);
            body["thinking"] = json!({"type": "enabled"});
            body["temperature"] = 0.9.into();
            body["seed"] = seed.into();
            body["messages"][0]["content"] = "What is 12 * 13?".into();
            post(address, "/v1/chat/completions", &body).json()["choices"][0].clone()
        };
        // Without the tokens that the schema's prompt adds, nothing that is free differs: the expression is not shown.
        let expression = json!({"type": "regex", "regex": "\\{\"n\": [0-9]{1,4}\\}"});
        let (free, held) = (ask(json!({})), ask(json!({"response_format": expression})));
        let reasoning = |choice: &Value| choice["message"]["reasoning_content"].as_str().unwrap().to_owned();
        if held["finish_reason"] == "stop" && free["finish_reason"] == "stop" {
            complete += 1;
            assert_eq!(reasoning(&free), reasoning(&held));
            let text = held["message"]["content"].as_str().unwrap();
            assert!(serde_json::from_str::<Value>(text).is_ok_and(|v| v["n"].is_u64()), "{text}");
        }
    }
    assert!(complete > 0, "no answer came to its end");
}

#[test]
fn the_demo_model_makes_the_call_that_is_asked_for() {
    let address = serve(&load());
    let function = |strict: bool| {
        json!([{"type": "function", "function": {"name": "look_up", "strict": strict, "parameters": {"type": "object",
            "properties": {"kind": {"type": "string", "enum": ["x", "y"]}, "count": {"type": "integer"}}}}}])
    };
    for (strict, choice) in [
        (true, json!("required")),
        (true, json!({"type": "function", "function": {"name": "look_up"}})),
        (false, json!("required")),
    ] {
        let asked = body(json!({"tools": function(strict), "tool_choice": choice, "temperature": 0,
            "parallel_tool_calls": false, "max_tokens": 300}));
        let reply = post(address, "/v1/chat/completions", &asked).json();
        let choice = &reply["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{reply}");
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!((calls.len(), &calls[0]["function"]["name"]), (1, &json!("look_up")), "{reply}");
        let arguments: Value =
            serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        if strict {
            assert!(
                arguments["count"].is_i64() && matches!(arguments["kind"].as_str(), Some("x" | "y")),
                "{arguments}"
            );
        }
    }
}

/// The released vocabulary, and a model with a taste for what ends soonest.
#[test]
fn forms_hold_for_three_apis() {
    let server = scripted(settings(), 8);
    let id = |text: &str| match server.tokenizer.encode(text)[..] {
        [id] => id,
        _ => panic!("{text} is one token"),
    };
    let dsml = server.tokenizer.special_id(text::special::DSML).unwrap();
    let eos = server.tokenizer.special_id(text::special::EOS).unwrap();
    let end = server.tokenizer.special_id(text::special::THINK_END).unwrap();
    let prefers = [end, eos, dsml, id("</"), id("}"), id("]"), id("\""), id("x"), id("1"), id("Text")];
    server.script.lock().unwrap().prefers = prefers.to_vec();
    let model = "deepseek-flash";
    let question = json!([{"role": "user", "content": "json"}]);
    let parameters =
        json!({"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}});

    let chat = post(
        server.address,
        "/v1/chat/completions",
        &json!({"model": model, "messages": question,
        "response_format": format(), "temperature": 0}),
    )
    .json();
    let text = chat["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(serde_json::from_str(text).is_ok_and(|answer| follows(&answer)), "{text}");
    let object = post(
        server.address,
        "/v1/chat/completions",
        &json!({"model": model, "messages": question,
        "response_format": {"type": "json_object"}, "temperature": 0}),
    )
    .json();
    assert_eq!(object["choices"][0]["message"]["content"], "{}");

    let anthropic = post(
        server.address,
        "/v1/messages",
        &json!({"model": model, "messages": question,
        "max_tokens": 200, "temperature": 0, "output_config": {"format": {"type": "json_schema", "schema": schema()}}}),
    );
    let text = anthropic.json()["content"][1]["text"].as_str().unwrap().to_owned();
    assert!(serde_json::from_str(&text).is_ok_and(|answer| follows(&answer)), "{text}");
    let forced = post(server.address, "/v1/messages", &json!({"model": model, "messages": question, "temperature": 0,
        "max_tokens": 200, "tool_choice": {"type": "any"},
        "tools": [{"name": "f", "strict": true, "input_schema": parameters}, {"name": "g", "input_schema": {"type": "object"}}]})).json();
    assert_eq!(forced["stop_reason"], "tool_use", "{forced}");

    let format = json!({"format": {"type": "json_schema", "name": "s", "schema": schema()}});
    let responses = post(
        server.address,
        "/v1/responses",
        &json!({"model": model, "input": "json", "text": format,
        "temperature": 0}),
    )
    .json();
    let text = responses["output"].as_array().unwrap().last().unwrap()["content"][0]["text"].clone();
    assert!(serde_json::from_str(text.as_str().unwrap()).is_ok_and(|answer| follows(&answer)), "{responses}");
    let strict = post(
        server.address,
        "/v1/responses",
        &json!({"model": model, "input": "json", "temperature": 0,
        "reasoning": {"effort": "none"}, "tool_choice": "required",
        "tools": [{"type": "function", "name": "f", "strict": true, "parameters": parameters}]}),
    )
    .json();
    let arguments = strict["output"][0]["arguments"].as_str().unwrap();
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    assert!(arguments["s"].is_string() && arguments["n"].is_i64(), "{arguments}");

    let refused =
        json!({"model": model, "messages": question, "response_format": {"type": "regex", "regex": "(?=x)"}});
    let reply = post(server.address, "/v1/chat/completions", &refused);
    assert_eq!(reply.status, 400, "{}", reply.body);
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("look-around"), "{}", reply.body);
}
