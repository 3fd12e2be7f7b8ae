//! The output parser on the fixtures, on every split of them, and on random output.

mod common;

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};
use text::{Event, FinishReason, Message, Parser, ParserOptions, Start, Stop, Tokenizer};

fn options(case: &Value) -> ParserOptions {
    let given = &case["options"];
    let start = match given["stage"].as_str() {
        None => Start::Content,
        Some("reasoning_start") => Start::Reasoning,
        Some("reasoning_continuation") => Start::ReasoningContinued,
        Some("content_continuation") => Start::ContentContinued,
        Some(other) => panic!("unknown stage {other}"),
    };
    ParserOptions {
        parse_tool_calls: given["parse_tool_calls"] == true,
        starts_in_tool_calls: given["starts_in_tool_calls"] == true,
        json_object: given["parse_json_output"] == true,
        stop: serde_json::from_value(given["stop_sequences"].clone()).unwrap(),
        ..ParserOptions::new(start)
    }
}

fn stop(case: &Value) -> Stop {
    match case["options"]["finish"].as_str().unwrap() {
        "stop" => Stop::End,
        "length" => Stop::Length,
        other => panic!("unknown finish {other}"),
    }
}

/// Parses ids given chunk by chunk; the events of a chunk are collected before they are applied.
fn parse<'a>(
    tokenizer: &Arc<Tokenizer>,
    options: &ParserOptions,
    chunks: impl IntoIterator<Item = &'a [u32]>,
    stop: Stop,
) -> (Message, Vec<Event>) {
    let mut parser = Parser::new(tokenizer.clone(), options.clone());
    let (mut message, mut all) = (Message::default(), Vec::new());
    for chunk in chunks {
        let mut events = Vec::new();
        chunk.iter().for_each(|&id| parser.push(id, &mut events).unwrap());
        events.iter().for_each(|event| message.apply(event));
        all.extend(events);
    }
    let mut events = Vec::new();
    message.finish_reason = Some(parser.finish(stop, &mut events));
    events.iter().for_each(|event| message.apply(event));
    all.extend(events);
    (message, all)
}

fn as_json(message: &Message) -> Value {
    let calls: Vec<Value> = message
        .tool_calls
        .iter()
        .map(|call| json!({"name": call.name, "arguments": call.arguments}))
        .collect();
    json!({
        "reasoning": message.reasoning,
        "content": message.content,
        "tool_calls": calls,
        "finish_reason": message.finish_reason.map(FinishReason::as_str),
    })
}

#[test]
fn parse_fixtures_in_every_split() {
    let tokenizer = common::released();
    let cases = common::cases("fixtures/encoding/parse.jsonl.gz");
    assert_eq!(cases.len(), 96);
    for case in &cases {
        let id = case["id"].as_str().unwrap();
        let (options, stop) = (options(case), stop(case));
        let ids = common::ids(&case["token_ids"]);
        let check = |chunks: Vec<&[u32]>, how: &str| {
            let (message, _) = parse(&tokenizer, &options, chunks, stop);
            assert_eq!(as_json(&message), case["expect"], "{id}, {how}");
        };
        check(vec![&ids], "one chunk");
        check(ids.chunks(1).collect(), "one token per chunk");
        for at in 0..=ids.len() {
            check(vec![&ids[..at], &ids[at..]], &format!("split at {at}"));
        }
    }
}

/// Text that cannot be the beginning of a marker comes out with its token; text that can is held until it is decided.
#[test]
fn text_is_held_back_only_while_it_may_be_a_marker() {
    let tokenizer = common::demo();
    let options = ParserOptions { stop: vec!["STOP".into()], ..with_tools(Start::Content) };
    let mut parser = Parser::new(tokenizer.clone(), options);
    let mut given = |text: &str| {
        let mut events = Vec::new();
        tokenizer.encode(text).into_iter().for_each(|id| parser.push(id, &mut events).unwrap());
        let mut message = Message::default();
        events.iter().for_each(|event| message.apply(event));
        message.content
    };
    for (text, out) in [
        ("Hello", "Hello"),
        (" you", " you"),
        (" ST", " "),
        ("x", "STx"),
        ("\n\n", ""),
        ("y<", "\n\ny"),
        ("<", "<"),
        ("/", "</"),
        ("STO", ""),
        ("ST", "STO"),
        ("OP!", ""),
        ("dropped", ""),
    ] {
        assert_eq!(given(text), out, "after {text:?}");
    }
}

/// The demo's tokenizer, plain text as its ids and `{…}` as special tokens.
fn demo_ids(tokenizer: &Tokenizer, marked: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    for (i, part) in marked.split(['⟨', '⟩']).enumerate() {
        if i % 2 == 0 {
            ids.extend(tokenizer.encode(part));
        } else {
            ids.push(tokenizer.require_special(part).unwrap());
        }
    }
    ids
}

fn demo_parse(options: &ParserOptions, marked: &str, stop: Stop) -> Message {
    let tokenizer = common::demo();
    let ids = demo_ids(&tokenizer, marked);
    let (message, _) = parse(&tokenizer, options, ids.chunks(1), stop);
    message
}

fn with_tools(start: Start) -> ParserOptions {
    ParserOptions { parse_tool_calls: true, ..ParserOptions::new(start) }
}

const D: &str = "⟨｜DSML｜⟩";

fn call_arguments(body: &str) -> Vec<(String, String)> {
    let text = format!("<{D} calls>\n<{D} invoke name=\"f\"{body}</{D} invoke>\n</{D} calls>");
    let message = demo_parse(&with_tools(Start::Content), &text, Stop::End);
    message.tool_calls.into_iter().map(|call| (call.name, call.arguments)).collect()
}

/// Cases beside the fixtures that the text of section 6.3 decides.
#[test]
fn call_bodies() {
    let one = |body: &str, arguments: &str| {
        assert_eq!(call_arguments(body), [("f".to_owned(), arguments.to_owned())], "{body}");
    };
    let parameter =
        |head: &str, value: &str| format!(">\n<{D} parameter name={head}{value}</{D} parameter>\n");
    one(&parameter("\"a\" string=\"false\" >", " [1] "), "{\"a\":  [1] }");
    one(&parameter("\"a b>c\" string=\"true\">", "x"), "{\"a b>c\": \"x\"}");
    one(&parameter("\"a\" string=\"maybe\">", "x"), "{}");
    one(&parameter("\"a\" string=\"true\">", "é\u{7f}\u{1}\"\\<|"), "{\"a\": \"é\u{7f}\\u0001\\\"\\\\<|\"}");
    one(">\n{\"a\": [1, {\"b\": \"</x\"}]}\n", "{\"a\": [1, {\"b\": \"</x\"}]}");
    one(">\n[1]\n", "{}");
    one(">\nwords\n", "{}");
    one(
        &format!(">\n{{\"x\": 1}}\n<{D} parameter name=\"a\" string=\"true\">v</{D} parameter>\n"),
        "{\"a\": \"v\"}",
    );
    one(
        &parameter("\"a\" string=\"true\">", "⟨<think>⟩⟨｜DSML｜⟩<⟨｜DSML｜⟩"),
        "{\"a\": \"<think>｜DSML｜<｜DSML｜\"}",
    );
    // The first call closes itself; what is between is no part of it.
    assert_eq!(
        call_arguments(&format!("/>\n words <{D} invoke name=\"g\" />\n")),
        [("f".to_owned(), "{}".to_owned()), ("g".to_owned(), "{}".to_owned())]
    );
}

#[test]
fn states_and_markers() {
    let reason = with_tools(Start::Reasoning);
    let message = demo_parse(&reason, "\n\n a\n\n⟨</think>⟩\n\n\nb\n⟨</think>⟩\nc", Stop::End);
    assert_eq!((message.reasoning.as_str(), message.content.as_str()), (" a", "b\n\nc"));
    // Line ends after a failed bracket still belong to the marker that follows.
    let text = format!("x<\n\n<{D} calls>\n</{D} calls>");
    assert_eq!(demo_parse(&with_tools(Start::Content), &text, Stop::End).content, "x<");
    // A held bracket ends the stripping of line ends.
    assert_eq!(demo_parse(&with_tools(Start::Content), "\n<\n\nx", Stop::End).content, "<\n\nx");
    assert_eq!(demo_parse(&reason, "<\n\n", Stop::Length).reasoning, "<\n\n");
    // Special tokens never complete a stop string.
    let stops = ParserOptions { stop: vec!["<think>".into()], ..ParserOptions::new(Start::Content) };
    assert_eq!(demo_parse(&stops, "a⟨<think>⟩b<think>c", Stop::End).content, "a<think>b");
    // Raw output is all text.
    let raw =
        demo_parse(&ParserOptions::new(Start::Raw), &format!("\n⟨<think>⟩a⟨</think>⟩<{D}"), Stop::Length);
    assert_eq!(
        (raw.content.as_str(), raw.finish_reason),
        ("\n<think>a</think><｜DSML｜", Some(FinishReason::Length))
    );
    let json = ParserOptions { json_object: true, ..with_tools(Start::Content) };
    assert_eq!(demo_parse(&json, "\nso: [1] {", Stop::End).content, "[1] {");
    assert_eq!(demo_parse(&json, "```json\n{}\n```\nmore [", Stop::End).content, "{}");
    for (stop, reason) in [
        (Stop::Filter, FinishReason::ContentFilter),
        (Stop::Resources, FinishReason::InsufficientSystemResource),
    ] {
        assert_eq!(demo_parse(&json, "x", stop).finish_reason, Some(reason));
    }
}

#[test]
fn stop_strings_end_the_parser() {
    let tokenizer = common::demo();
    let options = ParserOptions { stop: vec!["b".into(), "".into()], ..ParserOptions::new(Start::Content) };
    let mut parser = Parser::new(tokenizer.clone(), options);
    let mut events = Vec::new();
    for id in tokenizer.encode("ab") {
        parser.push(id, &mut events).unwrap();
    }
    assert_eq!(parser.stopped_by(), Some("b"));
    assert_eq!(parser.finish(Stop::Length, &mut events), FinishReason::Stop);
    assert!(matches!(&events[..], [Event::Content(piece)] if piece.text == "a"));
    assert!(parser.push(u32::MAX, &mut events).is_err());
}

#[test]
fn call_ids_say_whether_there_was_reasoning() {
    let text = format!("<{D} calls>\n<{D} invoke name=\"f\"/>\n<{D} invoke name=\"f\"/>\n</{D} calls>");
    let ids = |start: Start, before: &str| {
        let message = demo_parse(&with_tools(start), &format!("{before}{text}"), Stop::End);
        message.tool_calls.into_iter().map(|call| call.id).collect::<Vec<_>>()
    };
    let silent = ids(Start::Reasoning, "\n⟨</think>⟩");
    assert!(silent[0].starts_with("call_00_ET_") && silent[1].starts_with("call_01_ET_"), "{silent:?}");
    assert!(ids(Start::Reasoning, "hm⟨</think>⟩").iter().all(|id| !id.contains("_ET_")));
    assert!(ids(Start::Content, "").iter().all(|id| !id.contains("_ET_")));
}

#[test]
fn reasoning_is_counted_in_tokens() {
    let tokenizer = common::released();
    for case in &common::cases("fixtures/encoding/parse.jsonl.gz") {
        let Some(reference) = case["reference_reasoning_tokens"].as_u64() else { continue };
        let mut parser = Parser::new(tokenizer.clone(), options(case));
        let mut events = Vec::new();
        for id in common::ids(&case["token_ids"]) {
            parser.push(id, &mut events).unwrap();
        }
        // The library encodes the reasoning text again: trimmed line ends and markers are not in its count.
        let difference = parser.reasoning_tokens().abs_diff(reference as usize);
        assert!(
            difference <= 4,
            "{}: {} tokens, reference {reference}",
            case["id"],
            parser.reasoning_tokens()
        );
    }
}

/// Every token that gives text is named exactly once, in order, with the text it gave; others are not named.
#[test]
fn text_names_its_tokens() {
    let tokenizer = common::released();
    let text = "🤭a⟨</think>⟩\nb🥹c\n\n";
    let ids = demo_ids(&tokenizer, text);
    let (message, events) = parse(&tokenizer, &with_tools(Start::Reasoning), ids.chunks(1), Stop::End);
    assert_eq!((message.reasoning.as_str(), message.content.as_str()), ("🤭a", "b🥹c\n\n"));
    let named: Vec<usize> = events
        .iter()
        .flat_map(|event| match event {
            Event::Reasoning(piece) | Event::Content(piece) => piece.tokens.clone(),
            _ => Vec::new(),
        })
        .collect();
    let giving: Vec<usize> = (0..ids.len())
        .filter(|&i| !matches!(tokenizer.token_bytes(ids[i]).unwrap(), b"</think>" | b"\n"))
        .collect();
    assert_eq!(named, giving);
}

/// Random output of markers and fragments of them: any two splits agree, text is never lost or invented without tools,
/// and complete calls have arguments that are JSON.
#[test]
fn random_output() {
    let tokenizer = common::demo();
    let atoms = prop::sample::select(vec![
        "\n",
        "\n\n",
        " ",
        "<",
        "</",
        ">",
        "/>",
        "\"",
        "a",
        "é",
        "🤭",
        "invoke name=\"",
        " invoke",
        "f\">",
        " calls>",
        "parameter name=",
        "\"k\"",
        " string=\"true\">",
        " string=\"false\">",
        "1",
        "{",
        "}",
        "[",
        "```",
        "```json\n",
        "STOP",
        "ST",
        "⟨｜DSML｜⟩",
        "<⟨｜DSML｜⟩",
        "</⟨｜DSML｜⟩",
        "⟨</think>⟩",
        "⟨<think>⟩",
        "⟨<｜User｜>⟩",
        "<⟨｜DSML｜⟩ invoke name=\"f\">\n<⟨｜DSML｜⟩ parameter name=\"k\" string=\"true\">",
        "</⟨｜DSML｜⟩ parameter>\n</⟨｜DSML｜⟩ invoke>",
    ]);
    let starts = prop::sample::select(vec![
        Start::Content,
        Start::Reasoning,
        Start::ReasoningContinued,
        Start::ContentContinued,
        Start::Raw,
    ]);
    let case = (prop::collection::vec(atoms, 0..30), starts, any::<[bool; 4]>(), any::<u64>());
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 3000,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&case, |(atoms, start, [tools, json, stops, inside], cuts)| {
            let options = ParserOptions {
                parse_tool_calls: tools,
                json_object: json,
                starts_in_tool_calls: tools && inside && start != Start::Raw,
                stop: if stops { vec!["STOP".into(), "TT".into(), "\n\n\n".into()] } else { Vec::new() },
                ..ParserOptions::new(start)
            };
            let ids = demo_ids(&tokenizer, &atoms.concat());
            let (whole, _) = parse(&tokenizer, &options, [&ids[..]], Stop::End);
            let (single, _) = parse(&tokenizer, &options, ids.chunks(1), Stop::End);
            prop_assert_eq!(as_json(&whole), as_json(&single));
            let cut = cuts as usize % (ids.len() + 1);
            let (halves, _) = parse(&tokenizer, &options, [&ids[..cut], &ids[cut..]], Stop::End);
            prop_assert_eq!(as_json(&whole), as_json(&halves));
            if start == Start::Raw && !stops {
                prop_assert_eq!(&whole.content, &tokenizer.decode(&ids).unwrap());
            }
            let closed = whole.tool_calls.len().saturating_sub(1);
            for call in &whole.tool_calls[..closed] {
                prop_assert!(
                    serde_json::from_str::<Value>(&call.arguments).is_ok(),
                    "arguments {:?}",
                    call.arguments
                );
            }
            Ok(())
        })
        .unwrap();
}

/// Reading is linear: long held text and long stop strings cost no more per token than short ones.
#[test]
fn long_output_is_linear() {
    let tokenizer = common::demo();
    let newline = tokenizer.encode("\n")[0];
    let options = ParserOptions {
        stop: vec![format!("{}x", "\n".repeat(100_000))],
        ..with_tools(Start::ContentContinued)
    };
    let mut parser = Parser::new(tokenizer, options);
    let (mut events, start) = (Vec::new(), std::time::Instant::now());
    for _ in 0..300_000 {
        parser.push(newline, &mut events).unwrap();
    }
    parser.finish(Stop::Length, &mut events);
    let mut message = Message::default();
    events.iter().for_each(|event| message.apply(event));
    assert_eq!(message.content.len(), 300_000);
    // Quadratic work on this many tokens takes minutes.
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}
