//! What grammars let through and what they stop.

mod common;

use std::sync::Arc;

use serde_json::{Value, json};
use text::{
    Api, Event, Guide, Message, Options, Parser, Phase, Request, RequestError, Stop, Tokenizer, special::EOS,
};

fn request(api: Api, body: &Value) -> Result<Request, RequestError> {
    Request::from_json(api, body.to_string().as_bytes(), &Options::default())
}

fn chat(fields: Value) -> Value {
    let mut body =
        json!({"messages": [{"role": "user", "content": "json"}], "thinking": {"type": "disabled"}});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn guide(body: &Value) -> (Request, Guide) {
    let request = request(Api::Chat, body).unwrap();
    let guide = Guide::new(&request, &common::demo()).unwrap().expect("a constrained request");
    (request, guide)
}

fn allows(mask: Option<&[u32]>, id: u32) -> bool {
    mask.is_none_or(|mask| mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1))
}

/// How many of the ids of `output`, and of the end token behind them, may be drawn one after the other.
fn followed(request: &Request, guide: &Guide, tokenizer: &Arc<Tokenizer>, output: &str) -> (usize, usize) {
    let mut ids = tokenizer.encode_with_added(output);
    ids.push(tokenizer.special_id(EOS).unwrap());
    let mut parser = Parser::new(tokenizer.clone(), request.parser.clone());
    let mut steering = guide.follow();
    let mut events = Vec::new();
    for (n, &id) in ids.iter().enumerate() {
        let phase = parser.phase();
        let allowed = allows(steering.mask(phase).unwrap(), id) && steering.instead_of(id, phase).is_none();
        if !allowed {
            return (n, ids.len());
        }
        steering.accept(id).unwrap();
        if n + 1 < ids.len() {
            parser.push(id, &mut events).unwrap();
        }
    }
    (ids.len(), ids.len())
}

/// Checks whole outputs that may be drawn, and those that may not.
fn check(body: &Value, good: &[&str], bad: &[&str]) {
    let (request, guide) = guide(body);
    let tokenizer = common::demo();
    for output in good {
        let (n, all) = followed(&request, &guide, &tokenizer, output);
        let begin = tokenizer.decode(&tokenizer.encode_with_added(output)[..n.min(all - 1)]).unwrap();
        assert_eq!(n, all, "{output:?} is stopped behind {begin:?}: {body}");
    }
    for output in bad {
        let (n, all) = followed(&request, &guide, &tokenizer, output);
        assert!(n < all, "{output:?} is let through: {body}");
    }
}

/// A block of calls; each has a name and parameters, of which a string begins with `=`.
fn block(calls: &[(&str, &[(&str, &str)])]) -> String {
    let call = |(name, parameters): &(&str, &[(&str, &str)])| {
        let one = |(key, value): &(&str, &str)| {
            let (is_string, value) = match value.strip_prefix('=') {
                Some(text) => (true, text),
                None => (false, *value),
            };
            format!("<｜DSML｜ parameter name=\"{key}\" string=\"{is_string}\">{value}</｜DSML｜ parameter>")
        };
        let inner = parameters.iter().map(one).collect::<Vec<_>>().join("\n");
        format!("<｜DSML｜ invoke name=\"{name}\">\n{inner}\n</｜DSML｜ invoke>")
    };
    let inner = calls.iter().map(call).collect::<Vec<_>>().join("\n");
    format!("\n\n<｜DSML｜ calls>\n{inner}\n</｜DSML｜ calls>")
}

fn tool(name: &str, strict: bool, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}})
}

#[test]
fn a_block_of_calls_has_its_form_once_it_opens() {
    let closed = json!({"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}},
        "additionalProperties": false});
    let nothing = json!({"type": "object", "additionalProperties": false});
    let open = tool("write", false, json!({"type": "object", "properties": {"path": {"type": "string"}}}));
    let tools = json!([open, tool("read", false, closed), tool("ping", false, nothing)]);
    let write: &[_] = &[("path", "=a.html"), ("text", "=<p>1 </p>\n</div> {\"</\": 2}</")];
    let read: &[_] = &[("n", "-3"), ("path", "=")];
    let two = block(&[("write", write), ("read", read)]);
    let one = block(&[("ping", &[])]);
    let raw = |value: &str| block(&[("write", &[("x", value)])]);
    let text = "Free <text> with </b> and \"anything\"";
    let good = [text, &one, &two, &format!("{text}{one}"), &raw("{\"a\": [1, null, \"</\"]}"), &raw("\"x\"")];
    let bad = [
        &block(&[("unlink", &[])]),
        &block(&[("read", &[("name", "=x")])]),
        &block(&[("ping", &[("x", "=y")])]),
        &raw("{\"a\": 01}"),
        &raw("nothing"),
        &raw(""),
        "<｜DSML｜ tool_calls>",
        "\n\n<｜DSML｜ calls>\n\n</｜DSML｜ calls>",
        &format!("{one}\nmore"),
        &one.replace("</｜DSML｜ invoke>", ""),
    ];
    check(&chat(json!({"tools": tools})), &good, &bad);
    let single = chat(json!({"tools": tools, "parallel_tool_calls": false}));
    check(&single, &[&one], &[&two]);
}

#[test]
fn a_required_call_goes_on_where_the_prompt_opened_it() {
    let tools = json!([
        tool("ping", false, json!({"type": "object"})),
        tool("pong", false, json!({"type": "object"}))
    ]);
    let inner = |name: &str| block(&[(name, &[])]).split_once("calls>\n").unwrap().1.to_owned();
    let body = chat(json!({"tools": tools, "tool_choice": "required"}));
    check(
        &body,
        &[&inner("ping"), &inner("pong")],
        &["", "text", "</｜DSML｜ calls>", &block(&[("ping", &[])])],
    );
    let choice = json!({"type": "function", "function": {"name": "pong"}});
    check(&chat(json!({"tools": tools, "tool_choice": choice})), &[&inner("pong")], &[&inner("ping")]);
}

/// Anthropic's `any`: no block in the prompt, and yet no answer without one, also after thinking.
#[test]
fn any_call_is_forced_after_the_reasoning() {
    let body = json!({"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "any"},
        "tools": [{"name": "ping", "input_schema": {"type": "object"}}]});
    let request = request(Api::Messages, &body).unwrap();
    let tokenizer = common::demo();
    let guide = Guide::new(&request, &tokenizer).unwrap().unwrap();
    let call = block(&[("ping", &[])]);
    let whole = |output: &str| {
        let (n, all) = followed(&request, &guide, &tokenizer, output);
        n == all
    };
    assert!(whole(&format!("I think, <b>freely.</think>{call}")) && whole(&format!("I open at once{call}")));
    assert!(
        !whole("I think.</think>An answer.") && !whole("I think.</think>") && !whole("I think and stop.")
    );
}

#[test]
fn strict_tools_have_all_parameters_with_values_of_the_schema() {
    let schema = json!({"type": "object", "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$"},
        "kind": {"type": "string", "enum": ["a\"b", "</x>", "c"]},
        "id": {"type": "string", "format": "uuid"},
        "n": {"type": "integer", "minimum": 1, "maximum": 20},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}, {"$ref": "#/$defs/point"}]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/point"}},
        "any": {"type": ["string", "number"]},
    }, "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}}}});
    let body = chat(json!({"tools": [tool("f", true, schema)]}));
    let id = "=00000000-aaaa-BBBB-cccc-0123456789ab";
    let right = [
        ("name", "=abc"),
        ("kind", "=</x>"),
        ("id", id),
        ("n", "20"),
        ("maybe", "=free</p>"),
        ("list", "[{\"x\": 1.5}, {\"x\":2}]"),
        ("any", "=text"),
    ];
    let with = |key: &str, value: &'static str| {
        let mut changed = right;
        changed.iter_mut().filter(|(k, _)| *k == key).for_each(|(_, v)| *v = value);
        block(&[("f", &changed)])
    };
    let good = [
        with("", ""),
        with("kind", "=a\"b"),
        with("kind", "=c"),
        with("maybe", "null"),
        with("maybe", "{\"x\": 0}"),
        with("any", "-1e3"),
        with("list", "[]"),
    ];
    let bad = [
        with("name", "=Abc"),
        with("name", "="),
        with("name", "3"),
        with("kind", "=d"),
        with("kind", "=cc"),
        with("id", "=1"),
        with("n", "0"),
        with("n", "21"),
        with("n", "=3"),
        with("n", "1.5"),
        with("maybe", "true"),
        with("maybe", "{\"x\": null}"),
        with("list", "[{\"y\": 1}]"),
        with("list", "{}"),
        with("any", "null"),
        block(&[("f", &right[..6])]),
        block(&[("f", &[right[1], right[0]])]),
    ];
    check(&body, &good.each_ref().map(|s| &s[..]), &bad.each_ref().map(|s| &s[..]));
    let none = chat(json!({"tools": [tool("f", true, json!({"type": "object", "properties": {}}))]}));
    check(&none, &[&block(&[("f", &[])])], &[&block(&[("f", &[("x", "1")])])]);
}

#[test]
fn string_formats() {
    for (format, good, bad) in [
        ("ipv4", &["=1.2.3.4", "=255.0.10.99"][..], &["=256.1.1.1", "=1.2.3", "=01.2.3.4"][..]),
        (
            "ipv6",
            &["=::", "=::1", "=1:2:3:4:5:6:7:8", "=fe80::a:b", "=1::"],
            &["=1:2", "=:::", "=1:2:3:4:5:6:7:8:9", "=1::2::3"],
        ),
        ("hostname", &["=a", "=a-b.example.org"], &["=-a", "=a..b", "="]),
        ("email", &["=a.b+c@example.org"], &["=a", "=@b", "=a b@c"]),
    ] {
        let schema = json!({"type": "object", "properties": {"x": {"type": "string", "format": format}}});
        let body = chat(json!({"tools": [tool("f", true, schema)]}));
        let whole = |values: &[&str]| -> Vec<String> {
            values.iter().map(|v| block(&[("f", &[("x", v)])])).collect()
        };
        let (good, bad) = (whole(good), whole(bad));
        let refs = |list: &[String]| -> Vec<String> { list.to_vec() };
        check(
            &body,
            &refs(&good).iter().map(String::as_str).collect::<Vec<_>>(),
            &refs(&bad).iter().map(String::as_str).collect::<Vec<_>>(),
        );
    }
}

#[test]
fn response_formats() {
    let object = chat(json!({"response_format": {"type": "json_object"}}));
    check(
        &object,
        &["{}", "{\"a\": [1, {\"b\": null}]}", "{ \"a\" : 1 }"],
        &["{   }", "[]", "1", "Here: {}", "```json\n{}\n```", "{} more", "{\"a\": }", ""],
    );
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    let good = ["{\"a\": 1}", "{\"a\":-5,\"b\":\"\\n é\"}"];
    let bad = ["{\"b\": \"x\"}", "{\"a\": \"1\"}", "{\"a\": 1, \"c\": 2}", "{\"a\": 1", "\n{\"a\": 1} x"];
    check(&chat(json!({"response_format": format})), &good, &bad);
    check(
        &chat(json!({"response_format": {"type": "regex", "regex": "[0-9]{2}/(yes|no)"}})),
        &["12/yes", "00/no"],
        &["1/yes", "12/yesno", "x"],
    );
    // Reasoning is free, and an answer follows it.
    let thinking = json!({"messages": [{"role": "user", "content": "x"}], "response_format": format});
    check(
        &thinking,
        &["Anything, {\"b\": 1}\n</think>{\"a\": 1}", "</think>{\"a\": 2}"],
        &["Anything", "x</think>Text", "x</think>"],
    );
    // With tools an answer is a call, or follows the format.
    let mut both = chat(json!({"tools": [tool("ping", false, json!({"type": "object"}))]}));
    both["response_format"] = format.clone();
    check(
        &both,
        &["{\"a\": 1}", &block(&[("ping", &[])])],
        &["Text", &format!("Text{}", block(&[("ping", &[])]))],
    );
    // A prefix belongs to the answer.
    let mut prefix = chat(json!({"response_format": format}));
    prefix["messages"]
        .as_array_mut()
        .unwrap()
        .push(json!({"role": "assistant", "content": "{\"a\": 4", "prefix": true}));
    check(&prefix, &["}", "2}", ", \"b\": \"\"}"], &["{\"a\": 4}", "x}"]);
    prefix["messages"][1]["content"] = "Well: {".into();
    let refused = Guide::new(&request(Api::Chat, &prefix).unwrap(), &common::demo()).unwrap_err();
    assert!(refused.status == 400 && refused.message.contains("prefix"), "{refused}");
}

#[test]
fn what_cannot_be_expressed_is_refused_with_the_reason() {
    let format =
        |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    for (body, reason) in [
        (chat(json!({"response_format": format(json!({"not": {"type": "string"}}))})), "not"),
        (
            chat(json!({"response_format": format(json!({"$ref": "https://example.org/schema"}))})),
            "example.org",
        ),
        (chat(json!({"response_format": format(json!({"type": "string", "pattern": "(?=x)"}))})), "look"),
        (
            chat(json!({"response_format": format(json!({"type": "array", "uniqueItems": true}))})),
            "uniqueItems",
        ),
        (
            chat(json!({"response_format": format(json!({"type": "integer", "minimum": 5, "maximum": 4}))})),
            "nsatisfiable",
        ),
        (chat(json!({"response_format": {"type": "regex", "regex": "(a"}})), "unclosed"),
        (chat(json!({"response_format": {"type": "regex", "regex": "a\\1"}})), "backreference"),
    ] {
        let refused =
            Guide::new(&request(Api::Chat, &body).unwrap(), &common::demo()).map(|_| ()).unwrap_err();
        assert_eq!(refused.status, 400);
        assert!(refused.message.contains(reason), "{reason}: {refused}");
        assert!(!refused.message.contains('\n') && refused.message.len() < 800, "{refused}");
    }
    let free = request(Api::Chat, &chat(json!({}))).unwrap();
    assert!(Guide::new(&free, &common::demo()).unwrap().is_none());
}

/// Outputs drawn at random from what is allowed, told to close what they open: all of them parse to what was asked for.
#[test]
fn random_outputs_follow_the_schema() {
    let tokenizer = common::demo();
    let schema = json!({"type": "object", "properties": {
        "s": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array", "items": {"type": "boolean"}}}});
    let body = chat(
        json!({"tools": [tool("f", true, schema), tool("g", true, json!({"type": "object", "properties": {"x": {"type": "string"}}}))],
        "tool_choice": "required"}),
    );
    let (request, guide) = guide(&body);
    let eos = tokenizer.special_id(EOS).unwrap();
    let mut random = 1u64;
    let mut complete = 0;
    for _ in 0..40 {
        let mut parser = Parser::new(tokenizer.clone(), request.parser.clone());
        let (mut steering, mut events, mut ended) = (guide.follow(), Vec::new(), false);
        for n in 0..400 {
            let mask =
                steering.mask(parser.phase()).unwrap().expect("constrained from the first token").to_vec();
            let allowed: Vec<u32> =
                (0..tokenizer.vocab_size() as u32).filter(|&id| allows(Some(&mask), id)).collect();
            assert!(!allowed.is_empty(), "no token is allowed after {n}");
            // What ends soonest, most of the time.
            let closing = [b"" as &[u8], b"</", b"}", b"]", b"\"", b"\n</"].iter().find_map(|end| {
                allowed.iter().find(|id| match end.is_empty() {
                    true => tokenizer.is_added(**id),
                    false => tokenizer.token_bytes(**id).unwrap() == *end,
                })
            });
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let draw = (random >> 33) as usize;
            let id =
                *closing.filter(|_| !draw.is_multiple_of(3)).unwrap_or(&allowed[draw / 3 % allowed.len()]);
            steering.accept(id).unwrap();
            if id == eos {
                ended = true;
                break;
            }
            parser.push(id, &mut events).unwrap();
        }
        if !ended {
            continue;
        }
        complete += 1;
        parser.finish(Stop::End, &mut events);
        let mut message = Message::default();
        events.iter().for_each(|event: &Event| message.apply(event));
        assert!(!message.tool_calls.is_empty() && message.content.is_empty(), "{message:?}");
        for call in &message.tool_calls {
            let arguments: Value =
                serde_json::from_str(&call.arguments).unwrap_or_else(|e| panic!("{e}: {call:?}"));
            match call.name.as_str() {
                "f" => {
                    assert!(arguments["s"].is_string() && arguments["n"].is_number(), "{arguments}");
                    assert!(arguments["l"].as_array().unwrap().iter().all(Value::is_boolean), "{arguments}");
                }
                "g" => assert!(arguments["x"].is_string(), "{arguments}"),
                other => panic!("{other} was not declared"),
            }
        }
    }
    assert!(complete >= 20, "{complete} outputs came to their end");
    assert_eq!(Phase::Calls, Parser::new(tokenizer, request.parser).phase());
}
