//! Limits, keys, refusals, cancellation.

mod common;

use std::{
    io::Read,
    time::{Duration, Instant},
};

use common::{open, post, request, scripted, settings};
use serde_json::{Value, json};
use server::{
    Settings,
    fields::{ENDPOINTS, Fate},
};

/// Polls until `met`, which holds soon unless something is broken.
fn wait_for(what: &str, mut met: impl FnMut() -> bool) {
    let start = Instant::now();
    while !met() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn chat(stream: bool) -> Value {
    json!({"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "q"}], "stream": stream,
        "thinking": {"type": "disabled"}})
}

#[test]
fn every_field_of_the_documentation_has_its_fate() {
    let server = scripted(settings(), 8);
    server.script.lock().unwrap().says = vec![23166, 1031, 16];
    for (path, fields) in ENDPOINTS {
        for field in fields {
            let mut body = match path {
                "/v1/responses" => json!({"model": "deepseek-flash", "input": "json"}),
                "/v1/completions" => json!({"model": "deepseek-flash", "prompt": "hi"}),
                _ => json!({"model": "deepseek-flash", "messages": [{"role": "user", "content": "json"}]}),
            };
            if field.name.starts_with("stream_options") {
                body["stream"] = true.into();
            }
            if field.name == "top_logprobs" && path == "/v1/chat/completions" {
                body["logprobs"] = true.into();
            }
            let top = if field.name.starts_with("response_format") { "response_format" } else { field.top() };
            body[top] = serde_json::from_str(field.example).unwrap();
            let reply = post(server.address, path, &body);
            let status = if field.fate == Fate::Refused { 400 } else { 200 };
            assert_eq!(reply.status, status, "{path} {}: {}", field.name, reply.body);
        }
    }
}

#[test]
fn errors_have_the_form_of_their_api() {
    let settings = Settings { api_keys: vec!["one".into(), "two".into()], max_body: 2000, ..settings() };
    let server = scripted(settings, 8);
    let at = server.address;
    let body = chat(false).to_string();
    let send = |method: &str, path: &str, headers: &str, body: &str| {
        request(at, method, path, headers, body.as_bytes())
    };
    let key = "Authorization: Bearer two\r\n";
    assert_eq!(send("POST", "/v1/chat/completions", key, &body).status, 200);
    assert_eq!(send("POST", "/chat/completions", "x-api-key: one\r\n", &body).status, 200);
    for (path, header) in [("/v1/chat/completions", ""), ("/v1/models", "Authorization: Bearer on\r\n")] {
        let reply = send(if path.ends_with("models") { "GET" } else { "POST" }, path, header, &body);
        assert_eq!(
            (reply.status, reply.json()["error"]["type"].clone()),
            (401, json!("authentication_error"))
        );
    }
    let reply = send("POST", "/v1/messages", "", &body);
    assert_eq!((reply.status, reply.json()["type"].clone()), (401, json!("error")));
    assert_eq!(send("GET", "/health", "", "").json(), json!({"status": "ok"}));
    assert_eq!(send("GET", "/nothing", "", "").status, 404);
    assert_eq!(send("GET", "/v1/chat/completions", key, "").status, 405);
    assert_eq!(send("POST", "/v1/chat/completions", key, &" ".repeat(3000)).status, 413);
    for bad in ["", "{", "[]", "null", "{\"model\": 3}", "\u{0}", "{\"messages\": [[[[[["] {
        for path in ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"] {
            let reply = send("POST", path, key, bad);
            assert_eq!(reply.status, 400, "{path} {bad:?}: {}", reply.body);
            assert_eq!(reply.json()["error"]["type"], "invalid_request_error");
        }
    }
    let models = send("GET", "/v1/models", key, "").json();
    assert_eq!(models["data"][0]["id"], "DeepSeek-V4.1-Flash");
    assert_eq!(send("GET", "/v1/models/deepseek-flash", key, "").status, 200);
    assert_eq!(send("GET", "/v1/models/gpt", key, "").status, 404);
    let count = json!({"model": "claude-x", "messages": [{"role": "user", "content": "Hello"}]}).to_string();
    assert_eq!(send("POST", "/v1/messages/count_tokens", key, &count).json(), json!({"input_tokens": 31}));
    assert!(send("GET", "/openapi.json", "", "").json()["paths"]["/v1/responses"].is_object());
}

#[test]
fn a_full_queue_refuses_and_a_lost_client_frees_its_place() {
    let server = scripted(settings(), 1);
    {
        let mut script = server.script.lock().unwrap();
        script.says = vec![23166];
        script.endless = Some(Duration::from_millis(10));
    }
    let figure = |name: &str| {
        let text = request(server.address, "GET", "/metrics", "", b"").body;
        let line = text.lines().find(|line| line.starts_with(name)).expect("the figure is there").to_owned();
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let body = chat(true).to_string();
    let start = |_| open(server.address, "POST", "/v1/chat/completions", "", body.as_bytes());
    let mut first = start(0);
    let mut some = [0; 200];
    first.read_exact(&mut some).unwrap();
    let second = start(1);
    wait_for("the second request's wait", || figure("hallmark_requests_waiting") == 1.0);
    let third = request(server.address, "POST", "/v1/chat/completions", "", body.as_bytes());
    assert_eq!((third.status, third.json()["error"]["type"].clone()), (429, json!("rate_limit_error")));
    assert!(third.head.contains("retry-after: "), "{}", third.head);
    drop(second);
    wait_for("the end of the wait", || figure("hallmark_requests_waiting") == 0.0);
    drop(first);
    wait_for("the end of the answer", || figure("hallmark_requests_running") == 0.0);
    let said = server.script.lock().unwrap().said;
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(server.script.lock().unwrap().said, said, "nobody computes for a client that is gone");
    // A whole answer is cancelled as well.
    let whole = open(server.address, "POST", "/v1/chat/completions", "", chat(false).to_string().as_bytes());
    wait_for("the answer's begin", || figure("hallmark_requests_running") == 1.0);
    drop(whole);
    wait_for("its end", || figure("hallmark_requests_running") == 0.0);
}

#[test]
fn a_deadline_ends_an_answer_with_an_error() {
    let limit = Duration::from_millis(300);
    let server =
        scripted(Settings { deadline: limit, keep_alive: Duration::from_millis(50), ..settings() }, 8);
    {
        let mut script = server.script.lock().unwrap();
        script.says = vec![23166];
        script.endless = Some(Duration::from_millis(10));
    }
    let (events, done) = post(server.address, "/v1/chat/completions", &chat(true)).events();
    assert!(!done && events.last().unwrap().1["error"]["type"] == "service_unavailable", "{events:?}");
    let reply = post(server.address, "/v1/chat/completions", &chat(false));
    assert!(reply.body.starts_with('\n'), "empty lines keep the connection alive: {:?}", reply.body);
    assert_eq!(reply.json()["error"]["type"], "service_unavailable");
}
