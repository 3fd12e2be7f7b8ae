//! Mutated request bodies and outputs: an answer or an error, never a panic, and the same events however ids are cut.
//!
//! `HALLMARK_FULL=1` runs a million of them; each test prints how many it ran.

mod common;

use std::time::Instant;

use serde_json::Value;
use text::{Api, Event, Guide, Message, Options, Parser, ParserOptions, Request, Start, Stop};

fn runs(quick: usize) -> usize {
    if std::env::var_os("HALLMARK_FULL").is_some_and(|v| v != "0") { 500_000 } else { quick }
}

/// The counter generator of splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// What parsers stumble over.
const WORDS: &[&str] = &[
    "null",
    "true",
    "-",
    "1e999",
    "-0",
    "18446744073709551616",
    "0.1e-400",
    "\\ud800",
    "\\u0000",
    "\"",
    "\\",
    "[[[[[[[[",
    "{\"a\":",
    "}",
    "]",
    ",",
    "\"$ref\":\"#\"",
    "\"$ref\":\"#/$defs/x\"",
    "\"anyOf\":[]",
    "\"type\":\"object\"",
    "\"type\":[\"string\",\"null\"]",
    "\"strict\":true",
    "\"enum\":[]",
    "\"pattern\":\"^(a\"",
    "\"minimum\":1e308",
    "<｜DSML｜",
    "</think>",
    "<｜User｜>",
    "<｜deepseek_image｜>",
    "\u{feff}",
    "\u{2028}",
    "é",
    "🤭",
    "x-anthropic-billing-header",
    "\"prefix\":true",
    "\"response_format\":{\"type\":\"json_object\"}",
    "\"tool_choice\":\"required\"",
    "\"n\":2",
    "data:image/png;base64,AAAA",
    "\"role\":\"latest_reminder\"",
    "\"task\":\"query\"",
];

/// One to eight edits, some of which put in pieces of another seed.
fn mutate(random: &mut Random, seeds: &[(Api, Vec<u8>)], body: &[u8]) -> Vec<u8> {
    let mut out = body.to_vec();
    for _ in 0..=random.below(8) {
        let at = random.below(out.len() + 1);
        let end = (at + random.below(40)).min(out.len());
        match random.below(7) {
            0 if at < out.len() => out[at] ^= 1 << random.below(8),
            1 => drop(out.drain(at..end)),
            2 => {
                let again = out[at..end].to_vec();
                out.splice(at..at, again);
            }
            3 => {
                let other = &random.pick(seeds).1;
                let from = random.below(other.len());
                let piece = &other[from..(from + random.below(80)).min(other.len())];
                out.splice(at..end, piece.iter().copied());
            }
            4 => out.truncate(at),
            _ => drop(out.splice(at..at, random.pick(WORDS).bytes())),
        }
    }
    out
}

/// A value of a document replaced by another: what is well-formed goes deeper.
fn change_value(random: &mut Random, value: &mut Value, depth: usize) {
    let stop = depth == 0 || random.below(4) == 0;
    match value {
        Value::Object(members) if !stop && !members.is_empty() => {
            let at = random.below(members.len());
            if let Some((_, value)) = members.iter_mut().nth(at) {
                change_value(random, value, depth - 1);
            }
        }
        Value::Array(items) if !stop && !items.is_empty() => {
            let at = random.below(items.len());
            change_value(random, &mut items[at], depth - 1);
        }
        // Mostly something of the same type, which gets past the first look.
        Value::String(text) if random.below(4) > 0 => {
            let at =
                (0..=random.below(text.len() + 1)).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            text.insert_str(at, random.pick::<&str>(WORDS));
        }
        Value::Number(_) if random.below(4) > 0 => {
            *value = random
                .pick(&[Value::from(0), 1.into(), 20.into(), 0.5.into(), (-1).into(), u64::MAX.into()])
                .clone();
        }
        Value::Bool(b) if random.below(4) > 0 => *b = !*b,
        Value::Array(items) if !items.is_empty() && random.below(4) > 0 => {
            let at = random.below(items.len());
            let item = items.remove(at);
            for _ in 0..random.below(3) {
                items.insert(at, item.clone());
            }
        }
        Value::Object(members) if !members.is_empty() && random.below(4) > 0 => {
            let name = members.keys().nth(random.below(members.len())).cloned().unwrap_or_default();
            members.remove(&name);
        }
        value => {
            let kinds = [
                Value::Null,
                true.into(),
                (-1).into(),
                0.5.into(),
                u64::MAX.into(),
                "".into(),
                "json".into(),
                Value::Array(vec![value.clone(), value.clone()]),
                serde_json::json!({"type": "string", "x": value.clone()}),
                serde_json::json!([]),
                serde_json::json!({}),
            ];
            *value = random.pick(&kinds).clone();
        }
    }
}

#[test]
fn mutated_bodies() {
    let tokenizer = common::demo();
    let seeds: Vec<(Api, Vec<u8>)> = common::cases("fixtures/encoding/encode.jsonl.gz")
        .iter()
        .map(|case| {
            let api = match case["api"].as_str().unwrap() {
                "chat" => Api::Chat,
                "messages" => Api::Messages,
                _ => Api::Responses,
            };
            (api, case["request"].to_string().into_bytes())
        })
        .collect();
    let (count, start, mut random, mut read) = (runs(6000), Instant::now(), Random(1), 0);
    for n in 0..count {
        let (api, seed) = random.pick(&seeds);
        let body = match n % 3 {
            0 => mutate(&mut random, &seeds, seed),
            _ => {
                let mut value: Value = serde_json::from_slice(seed).unwrap();
                for _ in 0..=random.below(3) {
                    change_value(&mut random, &mut value, 8);
                }
                value.to_string().into_bytes()
            }
        };
        match Request::from_json(*api, &body, &Options::default()) {
            Err(error) => assert!(error.status == 400 && !error.message.is_empty(), "{error:?}"),
            Ok(request) => {
                read += 1;
                let encoded = request.encode(&tokenizer);
                if let Ok(encoded) = &encoded {
                    assert!(request.max_tokens(encoded.ids.len(), 1 << 20).is_ok());
                    assert!(encoded.parts.windows(2).all(|pair| pair[0].0 <= pair[1].0));
                }
                // Grammars take milliseconds.
                if n.is_multiple_of(50)
                    && let Err(error) = Guide::new(&request, &tokenizer)
                {
                    assert!(error.status == 400 && !error.message.is_empty(), "{error:?}");
                }
            }
        }
    }
    println!("{count} bodies, {read} of them requests, in {:.1} s", start.elapsed().as_secs_f64());
    assert!(read > count / 20, "{read} of {count} were requests");
}

fn parse(
    tokenizer: &std::sync::Arc<text::Tokenizer>,
    options: &ParserOptions,
    ids: &[u32],
) -> (Message, usize) {
    let mut parser = Parser::new(tokenizer.clone(), options.clone());
    let (mut events, mut message) = (Vec::<Event>::new(), Message::default());
    for &id in ids {
        parser.push(id, &mut events).unwrap();
        parser.phase();
    }
    message.finish_reason = Some(parser.finish(Stop::End, &mut events));
    events.iter().for_each(|event| message.apply(event));
    // Ids of calls are random.
    message.tool_calls.iter_mut().for_each(|call| call.id.clear());
    (message, parser.reasoning_tokens())
}

#[test]
fn mutated_outputs() {
    let tokenizer = common::demo();
    let seeds: Vec<Vec<u32>> = common::cases("fixtures/encoding/parse.jsonl.gz")
        .iter()
        .map(|case| {
            tokenizer.encode_with_added(&common::released().decode(&common::ids(&case["token_ids"])).unwrap())
        })
        .filter(|ids| !ids.is_empty())
        .collect();
    let added: Vec<u32> = (0..tokenizer.vocab_size() as u32).filter(|&id| tokenizer.is_added(id)).collect();
    let (count, start, mut random, mut calls) = (runs(20_000), Instant::now(), Random(2), 0);
    for _ in 0..count {
        let mut ids = random.pick(&seeds).clone();
        for _ in 0..random.below(6) {
            let at = random.below(ids.len() + 1);
            let end = (at + random.below(8)).min(ids.len());
            match random.below(5) {
                0 => drop(ids.drain(at..end)),
                1 => ids.insert(at, random.below(tokenizer.vocab_size()) as u32),
                2 => ids.insert(at, *random.pick(&added)),
                3 => {
                    let other = random.pick(&seeds);
                    let from = random.below(other.len());
                    drop(ids.splice(
                        at..end,
                        other[from..(from + random.below(30)).min(other.len())].iter().copied(),
                    ));
                }
                _ => {
                    let again = ids[at..end].to_vec();
                    drop(ids.splice(at..at, again));
                }
            }
        }
        let starts = [
            Start::Content,
            Start::Reasoning,
            Start::ReasoningContinued,
            Start::ContentContinued,
            Start::Raw,
        ];
        let options = ParserOptions {
            parse_tool_calls: random.below(4) > 0,
            starts_in_tool_calls: random.below(8) == 0,
            json_object: random.below(4) == 0,
            stop: ["", "END", "\n", "}", "a"][..random.below(6)].iter().map(|s| (*s).to_owned()).collect(),
            ..ParserOptions::new(*random.pick(&starts))
        };
        let (message, reasoning) = parse(&tokenizer, &options, &ids);
        assert!(reasoning <= ids.len());
        calls += message.tool_calls.len();
        for call in &message.tool_calls {
            assert!(!call.name.contains('"'), "{call:?}");
        }
    }
    println!("{count} outputs with {calls} calls in {:.1} s", start.elapsed().as_secs_f64());
    assert!(calls > count / 20, "{calls} calls in {count} outputs");
}
