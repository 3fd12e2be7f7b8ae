//! Many clients, some of which leave, read slowly, or send what is no request: nothing is lost and nothing leaks.
//!
//! `HALLMARK_FULL=1`: 64 clients and 2,000 requests over five minutes; else fewer, as fast as they go.

mod common;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use checkpoint::Checkpoint;
use common::{Reply, post, repository, request, spawn};
use engine::{LoadOptions, Loaded};
use serde_json::{Value, json};
use server::{SessionEngine, Settings};

const MAX_BODY: usize = 40_000;

fn full() -> bool {
    std::env::var_os("HALLMARK_FULL").is_some_and(|v| v != "0")
}

/// What a client does with its request.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    Whole,
    Stream,
    /// Leaves at once, or after some bytes.
    Leaves(usize),
    /// Reads some bytes at a time.
    Slow,
    Oversized,
    Malformed,
    /// Sends half of its body and leaves.
    Half,
}

fn manner(n: usize) -> Manner {
    match n % 16 {
        0..4 => Manner::Whole,
        4..8 => Manner::Stream,
        8 => Manner::Leaves(0),
        9 => Manner::Leaves(100 + 37 * (n % 23)),
        10 | 11 => Manner::Slow,
        12 => Manner::Oversized,
        13 | 14 => Manner::Malformed,
        _ => Manner::Half,
    }
}

/// One of a few bodies, so that what the server keeps is bounded after a while.
fn body(n: usize) -> (&'static str, Value) {
    let question = format!("What is {} + 4?", n % 3);
    let (max, thinking) =
        (3 + n % 3, json!({"type": if n.is_multiple_of(2) { "enabled" } else { "disabled" }}));
    match n % 7 {
        0 => (
            "/v1/completions",
            json!({"model": "demo", "prompt": question, "max_tokens": max, "temperature": 0}),
        ),
        1 => {
            let user = json!([{"role": "user", "content": question}]);
            (
                "/v1/messages",
                json!({"model": "demo", "max_tokens": max, "messages": user, "thinking": thinking,
                "temperature": 0}),
            )
        }
        2 => (
            "/v1/responses",
            json!({"model": "demo", "input": question, "max_output_tokens": max, "temperature": 0}),
        ),
        kind => {
            let mut body = json!({"model": "demo", "max_tokens": max, "thinking": thinking, "temperature": 0,
                "messages": [{"role": "user", "content": question}]});
            if kind == 3 {
                body["tools"] = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
            }
            if kind == 4 {
                body["response_format"] = json!({"type": "regex", "regex": "[a-z]{1,9}"});
            }
            ("/v1/chat/completions", body)
        }
    }
}

/// Whether an answer is complete, or an error that says so; its status.
fn check(path: &str, reply: &Reply, stream: bool) -> u16 {
    let known = [200, 400, 408, 413, 429, 503];
    assert!(known.contains(&reply.status), "{path}: {} {}", reply.status, reply.body);
    if reply.status != 200 {
        assert!(reply.json()["error"]["message"].is_string(), "{path}: {}", reply.body);
        return reply.status;
    }
    if !stream {
        let value = reply.json();
        let answered = ["choices", "content", "output"].iter().any(|field| value[field].is_array());
        assert!(answered || value["error"]["message"].is_string(), "{path}: {value}");
        return 200;
    }
    let (events, done) = reply.events();
    let (name, last) = events.last().expect("a stream has events");
    let ended = match path {
        "/v1/messages" => name.as_deref() == Some("message_stop"),
        "/v1/responses" => {
            ["response.completed", "response.incomplete"].iter().any(|end| last["type"] == *end)
        }
        _ => done && last["choices"][0]["finish_reason"].is_string(),
    };
    assert!(
        ended || last["error"].is_object() || last["response"]["error"].is_object(),
        "{path}: {}",
        reply.body
    );
    200
}

fn one(address: SocketAddr, n: usize) -> Option<u16> {
    let (path, mut body) = body(n);
    let manner = manner(n / 7 + n);
    let stream = !matches!(manner, Manner::Whole | Manner::Malformed | Manner::Oversized);
    body["stream"] = stream.into();
    match manner {
        Manner::Whole | Manner::Stream => Some(check(path, &post(address, path, &body), stream)),
        Manner::Oversized => {
            body["model"] = "x".repeat(MAX_BODY).into();
            let reply = post(address, path, &body);
            assert_eq!(reply.status, 413, "{}", reply.body);
            Some(check(path, &reply, false))
        }
        Manner::Malformed => {
            let mut text = body.to_string().into_bytes();
            match n % 3 {
                0 => text.truncate(n % text.len()),
                1 => drop(text.remove(n % text.len())),
                _ => text[n % 40] ^= 1 << (n % 8),
            }
            // Some of these are requests all the same.
            Some(check(path, &request(address, "POST", path, "", &text), false))
        }
        Manner::Half => {
            let text = body.to_string();
            let mut socket = TcpStream::connect(address).unwrap();
            let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", text.len());
            socket.write_all(head.as_bytes()).unwrap();
            socket.write_all(&text.as_bytes()[..text.len() / 2]).unwrap();
            None
        }
        Manner::Leaves(bytes) => {
            let mut socket = common::open(address, "POST", path, "", body.to_string().as_bytes());
            let _ = socket.read_exact(&mut vec![0; bytes]);
            None
        }
        Manner::Slow => {
            let mut socket = common::open(address, "POST", path, "", body.to_string().as_bytes());
            let (mut all, mut some) = (Vec::new(), [0; 199]);
            loop {
                match socket.read(&mut some).unwrap() {
                    0 => break,
                    n => all.extend_from_slice(&some[..n]),
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Some(check(path, &common::reply(&all), true))
        }
    }
}

/// Resident bytes of this process, server and clients.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).unwrap_or(0) * 1024
}

#[test]
fn many_clients() {
    let (clients, requests, pace) = if full() { (64, 2000, 150) } else { (16, 240, 0) };
    let checkpoint = Checkpoint::open(&repository("models/demo")).unwrap();
    let loaded =
        Loaded::new(&checkpoint, LoadOptions { threads: Some(1), ..LoadOptions::default() }).unwrap();
    let session = loaded.lm.clone().session(2048).unwrap();
    let eos = loaded.lm.config().eos_token_id;
    let engine = SessionEngine { tokenizer: loaded.tokenizer.clone(), eos, session };
    let settings = Settings { max_body: MAX_BODY, ..Settings::new("demo", 2048) };
    let address = spawn(settings, loaded.tokenizer.clone(), engine, clients);
    let (next, answered, refused) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let warm = std::sync::Mutex::new(Vec::new());
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..clients {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::SeqCst);
                    if n >= requests {
                        return;
                    }
                    let when = Duration::from_millis(pace * n as u64);
                    std::thread::sleep(when.saturating_sub(start.elapsed()));
                    match one(address, n) {
                        Some(200) => drop(answered.fetch_add(1, Ordering::SeqCst)),
                        Some(_) => drop(refused.fetch_add(1, Ordering::SeqCst)),
                        None => {}
                    }
                    if n.is_multiple_of(20) {
                        warm.lock().unwrap().push((n, resident()));
                    }
                }
            });
        }
    });
    let time = start.elapsed();
    // Everybody who left is forgotten, and the next one is served.
    let reply = post(address, "/v1/chat/completions", &body(5).1);
    assert_eq!(check("/v1/chat/completions", &reply, false), 200);
    let figures = request(address, "GET", "/metrics", "", b"").body;
    for figure in ["hallmark_requests_waiting 0", "hallmark_requests_running 0"] {
        assert!(figures.contains(figure), "{figures}");
    }
    let (answered, refused) = (answered.into_inner(), refused.into_inner());
    assert!(
        answered > requests * 9 / 16 && refused >= requests / 16,
        "{answered} answered, {refused} refused"
    );
    let samples = warm.into_inner().unwrap();
    let median = |from: usize, to: usize| {
        let mut bytes: Vec<u64> =
            samples.iter().filter(|(n, _)| (from..to).contains(n)).map(|(_, bytes)| *bytes).collect();
        bytes.sort_unstable();
        bytes[bytes.len() / 2]
    };
    let (second, last) = (median(requests / 4, requests / 2), median(requests * 3 / 4, requests));
    println!(
        "{requests} requests of {clients} clients in {:.1} s: {answered} answered, {refused} refused, the rest left; \
         resident {:.1} MB in the second quarter, {:.1} MB in the last",
        time.as_secs_f64(),
        second as f64 / 1e6,
        last as f64 / 1e6
    );
    // Memory that allocators keep for threads that come and go moves by some megabytes; a leak of one answer's text and
    // events in each request would exceed it in the long run.
    assert!(last < second + (16 << 20), "resident memory grew from {second} to {last}");
}
