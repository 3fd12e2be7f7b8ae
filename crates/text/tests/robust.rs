//! Damaged input: an error, never a panic.

mod common;

use proptest::prelude::*;
use text::{Api, Event, Options, Parser, ParserOptions, Request, Start, Stop, Tokenizer};

fn runner(cases: u32) -> proptest::test_runner::TestRunner {
    proptest::test_runner::TestRunner::new(ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    })
}

/// Bytes with a few of them replaced, removed or doubled.
fn damaged(bytes: &[u8], edits: &[(u32, u8, u8)]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for &(at, kind, byte) in edits {
        let at = at as usize % out.len().max(1);
        match kind % 3 {
            0 if at < out.len() => out[at] = byte,
            1 if at < out.len() => drop(out.remove(at)),
            _ => out.insert(at, b"{}[]\",:0\\\xff"[byte as usize % 10]),
        }
    }
    out
}

fn edits() -> impl Strategy<Value = Vec<(u32, u8, u8)>> {
    prop::collection::vec(any::<(u32, u8, u8)>(), 1..6)
}

#[test]
fn damaged_tokenizer_files() {
    let file = std::fs::read(common::repository("models/demo/tokenizer.json")).unwrap();
    runner(400)
        .run(&edits(), |edits| {
            match Tokenizer::from_bytes(&damaged(&file, &edits), "damaged.json") {
                Err(error) => prop_assert!(error.to_string().starts_with("damaged.json: ")),
                Ok(tokenizer) => {
                    let ids = tokenizer.encode_with_added("Hello, 12 worlds!\n<think>中文🤭");
                    prop_assert!(ids.iter().all(|&id| tokenizer.token_bytes(id).is_ok()));
                    text::EngramMap::new(&tokenizer).unwrap();
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn damaged_requests() {
    let tokenizer = common::demo();
    let bodies: Vec<(Api, String)> = common::cases("fixtures/encoding/encode.jsonl.gz")
        .iter()
        .map(|case| {
            let api = match case["api"].as_str().unwrap() {
                "chat" => Api::Chat,
                "messages" => Api::Messages,
                _ => Api::Responses,
            };
            (api, case["request"].to_string())
        })
        .collect();
    runner(20_000)
        .run(&(any::<prop::sample::Index>(), edits()), |(which, edits)| {
            let (api, body) = which.get(&bodies);
            match Request::from_json(*api, &damaged(body.as_bytes(), &edits), &Options::default()) {
                Err(error) => prop_assert!(error.status == 400 && !error.message.is_empty()),
                Ok(request) => {
                    let encoded = request.encode(&tokenizer);
                    if let Ok(encoded) = encoded {
                        prop_assert!(request.max_tokens(encoded.ids.len(), 1 << 20).is_ok());
                    }
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn any_ids_are_parsed() {
    let tokenizer = common::demo();
    let ids = prop::collection::vec(0..tokenizer.vocab_size() as u32 + 2, 0..60);
    runner(2000)
        .run(&(ids, any::<[bool; 3]>()), |(ids, [tools, json, inside])| {
            let options = ParserOptions {
                parse_tool_calls: tools,
                json_object: json,
                starts_in_tool_calls: inside,
                ..ParserOptions::new(Start::Reasoning)
            };
            let mut parser = Parser::new(tokenizer.clone(), options);
            let mut events: Vec<Event> = Vec::new();
            for id in ids {
                let known = (id as usize) < tokenizer.vocab_size();
                prop_assert_eq!(parser.push(id, &mut events).is_ok(), known);
            }
            parser.finish(Stop::End, &mut events);
            Ok(())
        })
        .unwrap();
}
