//! Gate G5 on the commands themselves: `hallmark serve` says what `hallmark run` says.
#![cfg(feature = "server")]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};

/// A server that ends with the test.
struct Server {
    child: Child,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The built-in demo model, from a folder where nothing of the repository is.
fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hallmark"));
    command.args(args).current_dir(std::env::temp_dir()).stdin(Stdio::piped());
    command
}

fn serve(extra: &[&str]) -> Server {
    let args = [&["serve", "--port", "0", "--threads", "1", "--context", "2048"], extra].concat();
    let mut child = command(&args).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let address = lines
        .by_ref()
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("listening on http://").map(str::to_owned))
        .expect("the server listens");
    // What it says later must not block it.
    std::thread::spawn(move || lines.for_each(drop));
    Server { child, address }
}

fn post(address: &str, body: &Value) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let body = body.to_string();
    let head = "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n";
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.0 200"), "{text}");
    body.to_owned()
}

/// Reasoning, content and the calls' names and arguments.
type Said = (String, String, Vec<(String, Value)>);

fn said(message: &Value, calls: &Value, reasoning: &str) -> Said {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let call = |call: &Value| {
        let call = if call["function"].is_object() { &call["function"] } else { call };
        // `run` prints arguments as JSON, the API as text.
        let arguments = match &call["arguments"] {
            Value::String(text) => serde_json::from_str(text).unwrap(),
            value => value.clone(),
        };
        (text(&call["name"]), arguments)
    };
    let calls = calls.as_array().into_iter().flatten().map(call).collect();
    (text(&message[reasoning]), text(&message["content"]), calls)
}

fn run(body: &Value) -> Said {
    let args = ["run", "--threads", "1", "--context", "2048", "--messages", "-", "--json"];
    let mut child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(body.to_string().as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let answer: Value = serde_json::from_slice(&out.stdout).unwrap();
    said(&answer, &answer["tool_calls"], "reasoning")
}

fn streamed(text: &str) -> Said {
    let (mut message, mut calls) = (json!({"reasoning_content": "", "content": ""}), json!([]));
    let append = |to: &mut Value, more: &Value| {
        *to = format!("{}{}", to.as_str().unwrap_or_default(), more.as_str().unwrap_or_default()).into();
    };
    for line in text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]") {
        let event: Value = serde_json::from_str(line).unwrap();
        let delta = &event["choices"][0]["delta"];
        append(&mut message["reasoning_content"], &delta["reasoning_content"]);
        append(&mut message["content"], &delta["content"]);
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let list = calls.as_array_mut().unwrap();
            if call["function"]["name"].is_string() {
                list.push(json!({"name": call["function"]["name"], "arguments": ""}));
            }
            append(&mut list.last_mut().unwrap()["arguments"], &call["function"]["arguments"]);
        }
    }
    said(&message, &calls, "reasoning_content")
}

#[test]
fn served_text_is_the_text_of_run() {
    let tool = json!({"type": "function", "function": {"name": "look_up", "strict": true, "parameters":
        {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}, "n": {"type": "integer"}}}}});
    let schema = json!({"type": "json_schema", "json_schema": {"name": "s", "schema":
        {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false}}});
    let body = |question: &str, seed: u64, more: Value| {
        let mut body = json!({"model": "deepseek-v4.1-flash", "messages": [{"role": "user", "content": question}],
            "seed": seed, "temperature": 1.3, "max_tokens": 60, "thinking": {"type": "disabled"}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let bodies = [
        body("What is 12 * 13?", 5, json!({"thinking": {"type": "enabled"}})),
        body("What is the capital of France?", 6, json!({})),
        body("Say a number as json.", 7, json!({"response_format": schema})),
        body("Look it up.", 8, json!({"tools": [tool], "tool_choice": "required", "max_tokens": 150})),
    ];
    let expected: Vec<Said> = bodies.iter().map(run).collect();
    assert!(expected[0].0.len() > 5 && expected[1].1.len() > 5 && expected[3].2.len() == 1, "{expected:?}");
    for extra in [&["--drafts", "on"][..], &["--drafts", "off"]] {
        let server = serve(extra);
        // All at once, whole and streamed: every place in the queue, before and behind kept states.
        std::thread::scope(|scope| {
            for (body, expected) in bodies.iter().zip(&expected) {
                let address = &server.address;
                scope.spawn(move || {
                    let whole: Value = serde_json::from_str(post(address, body).trim()).unwrap();
                    let message = &whole["choices"][0]["message"];
                    assert_eq!(said(message, &message["tool_calls"], "reasoning_content"), *expected);
                    let mut body = body.clone();
                    body["stream"] = true.into();
                    assert_eq!(streamed(&post(address, &body)), *expected);
                });
            }
        });
    }
}
