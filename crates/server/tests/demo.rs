//! The demo model over HTTP: the text of `hallmark run`, tool calls, memory.

mod common;

use std::net::SocketAddr;

use checkpoint::Checkpoint;
use common::{cases, post, repository, spawn};
use engine::{LoadOptions, Loaded, Prompt};
use serde_json::{Value, json};
use server::{SessionEngine, Settings};
use text::{Api, Options, Parser, ParserOptions, Request, Start, Stop};

const CONTEXT: usize = 4096;

fn load() -> Loaded {
    let checkpoint = Checkpoint::open(&repository("models/demo")).unwrap();
    // One thread: the tests run beside others.
    Loaded::new(&checkpoint, LoadOptions { threads: Some(1), ..LoadOptions::default() }).unwrap()
}

fn serve(loaded: &Loaded) -> SocketAddr {
    let session = loaded.lm.clone().session(CONTEXT).unwrap();
    let eos = loaded.lm.config().eos_token_id;
    let engine = SessionEngine { tokenizer: loaded.tokenizer.clone(), eos, session };
    spawn(Settings::new("demo", CONTEXT), loaded.tokenizer.clone(), engine, 64)
}

fn content(reply: &Value) -> (String, String) {
    let message = &reply["choices"][0]["message"];
    let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
    (text("reasoning_content"), text("content"))
}

/// Gate G5: what `hallmark run` computes for a body, on a session of its own.
fn run(loaded: &Loaded, body: &Value) -> (String, String) {
    let request = Request::from_json(Api::Chat, body.to_string().as_bytes(), &Options::default()).unwrap();
    let prompt = Prompt::from_request(&request, loaded, CONTEXT, None).unwrap();
    let mut session = loaded.lm.clone().session(CONTEXT).unwrap();
    let answer = engine::answer(loaded, &mut *session, &prompt, &mut |_| {}, &|| false).unwrap();
    (answer.message.reasoning, answer.message.content)
}

#[test]
fn served_text_is_the_text_of_run() {
    let loaded = load();
    let address = serve(&loaded);
    let bodies: Vec<Value> = ["What is 12 * 13?", "What is the capital of France?", "Count from 3 to 9."]
        .iter()
        .enumerate()
        .map(|(i, text)| {
            json!({"model": "demo", "messages": [{"role": "user", "content": text}], "seed": 40 + i,
                "temperature": 1.5, "max_tokens": 48, "reasoning_effort": if i == 1 { json!("none") } else { json!(20 * i + 5) }})
        })
        .collect();
    let expected: Vec<_> = bodies.iter().map(|body| run(&loaded, body)).collect();
    assert!(expected.iter().all(|(reasoning, text)| reasoning.len() + text.len() > 10), "{expected:?}");
    // Twice, and all at once, so that answers stand anywhere in the queue and before or behind kept states.
    for _ in 0..2 {
        std::thread::scope(|scope| {
            for (body, expected) in bodies.iter().zip(&expected) {
                scope.spawn(move || {
                    let whole = post(address, "/v1/chat/completions", body);
                    assert_eq!(whole.status, 200, "{}", whole.body);
                    assert_eq!(content(&whole.json()), *expected);
                    let mut body = body.clone();
                    body["stream"] = true.into();
                    let (events, done) = post(address, "/v1/chat/completions", &body).events();
                    let join = |name: &str| -> String {
                        events.iter().filter_map(|(_, e)| e["choices"][0]["delta"][name].as_str()).collect()
                    };
                    assert!(done);
                    assert_eq!((join("reasoning_content"), join("content")), *expected);
                });
            }
        });
    }
}

/// A chat body that renders to the prompt of a tool case, if there is one.
fn body_of(case: &Value) -> Option<Value> {
    let prompt = case["prompt"].as_str()?;
    let (before, rest) = prompt.split_once("<｜User｜>")?;
    let (user, end) = rest.split_once("<｜Assistant｜>")?;
    let mut system = before.split_once("<｜System｜>")?.1;
    if system.starts_with("Reasoning Effort:") {
        system = system.split_once("\n\n")?.1;
    }
    let system = system.split_once("## Tools")?.0.trim_end();
    let tools: Vec<Value> = before
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok().filter(Value::is_object))
        .map(|function| json!({"type": "function", "function": function}))
        .collect();
    let mut messages = vec![json!({"role": "user", "content": user})];
    if !system.is_empty() {
        messages.insert(0, json!({"role": "system", "content": system}));
    }
    let thinking = if end == "<think>" { "enabled" } else { "disabled" };
    Some(json!({"model": "demo", "messages": messages, "tools": tools, "temperature": 0, "max_tokens": 200,
        "thinking": {"type": thinking}}))
}

#[test]
fn sixty_tool_calls() {
    let loaded = load();
    let address = serve(&loaded);
    let mut calls = 0;
    for case in cases("fixtures/demo_eval.jsonl").iter().filter(|case| case["kind"] == "tools") {
        let (Some(body), Some(answer)) = (body_of(case), case["answer"].as_str()) else { continue };
        let request = Request::from_json(Api::Chat, body.to_string().as_bytes(), &Options::default());
        let rendered = request.unwrap().encode(&loaded.tokenizer).unwrap();
        if calls >= 60 || rendered.prompt.text() != case["prompt"] || !answer.contains("invoke") {
            continue;
        }
        let start = if body["thinking"]["type"] == "enabled" { Start::Reasoning } else { Start::Content };
        let options = ParserOptions { parse_tool_calls: true, ..ParserOptions::new(start) };
        let mut parser = Parser::new(loaded.tokenizer.clone(), options);
        let (mut events, mut expected) = (Vec::new(), text::Message::default());
        for id in loaded.tokenizer.encode_with_added(answer.trim_end_matches(text::special::EOS)) {
            parser.push(id, &mut events).unwrap();
        }
        parser.finish(Stop::End, &mut events);
        events.iter().for_each(|event| expected.apply(event));
        let reply = post(address, "/v1/chat/completions", &body).json();
        let choice = &reply["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{}: {reply}", body["messages"]);
        let got = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(got.len(), expected.tool_calls.len(), "{reply}");
        for (got, expected) in got.iter().zip(&expected.tool_calls) {
            assert_eq!(got["function"]["name"], expected.name.as_str());
            let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
            assert_eq!(json(got["function"]["arguments"].as_str().unwrap()), json(&expected.arguments));
            calls += 1;
        }
        assert!(!choice["message"]["content"].as_str().unwrap().contains("DSML"), "{reply}");
    }
    assert!(calls >= 60, "{calls} tool calls");
}

#[test]
fn earlier_turns_are_remembered_and_reused() {
    let address = serve(&load());
    let mut messages = vec![json!({"role": "user", "content": "My name is Sophie."})];
    let mut cached = 0;
    let mut last = String::new();
    for question in ["What is 3 + 4?", "What is my name?", ""] {
        let body = json!({"model": "demo", "messages": messages, "temperature": 0,
            "thinking": {"type": "disabled"}});
        let reply = post(address, "/v1/chat/completions", &body);
        last = content(&reply.json()).1;
        cached = reply.json()["usage"]["prompt_cache_hit_tokens"].as_u64().unwrap();
        assert!(reply.head.contains(&format!("x-hallmark-cache: hit={cached}")), "{}", reply.head);
        messages.push(json!({"role": "assistant", "content": last}));
        messages.push(json!({"role": "user", "content": question}));
    }
    assert!(last.contains("Sophie"), "{last}");
    assert!(cached > 0, "the earlier turns are kept");
}
