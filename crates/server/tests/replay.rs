//! A turn that comes back normalised is read as it was sampled; the header says what was kept and why not more.

mod common;

use common::{Server, post, scripted, settings};
use serde_json::{Value, json};
use server::Settings;

/// A block of one call whose JSON no serialiser would write like this.
const CALL: &str = "\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"f\">\n<｜DSML｜ parameter name=\"list\" string=\"false\">[1,2 ,{\"b\":1.50,\"a\":\"\\u00e9\"}]</｜DSML｜ parameter>\n<｜DSML｜ parameter name=\"text\" string=\"true\">x</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>";

fn says(server: &Server, text: &str) {
    let mut script = server.script.lock().unwrap();
    script.remembers = true;
    script.says = server.tokenizer.encode_with_added(text);
}

fn hit(head: &str) -> usize {
    let value = head.split("x-hallmark-cache: hit=").nth(1).unwrap_or_else(|| panic!("no header: {head}"));
    value.split([';', '\r']).next().unwrap().parse().unwrap()
}

fn miss(head: &str) -> &str {
    head.split("miss=").nth(1).unwrap_or_default().split('\r').next().unwrap()
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
}

/// The arguments as another program writes them: keys sorted, other spaces, other numbers.
fn rewritten(arguments: &str) -> String {
    let value: Value = serde_json::from_str(arguments).unwrap();
    assert_eq!(value, json!({"list": [1, 2, {"b": 1.5, "a": "é"}], "text": "x"}));
    "{\n  \"text\": \"x\",\n  \"list\": [1, 2.0, {\"a\": \"\\u00e9\", \"b\": 1.5}]\n}".into()
}

/// Two turns with a call between; returns the second's hit and the tokens of the first.
fn round_trip(server: &Server, thinking: bool, returns_reasoning: bool) -> (usize, usize, String) {
    let thought = if thinking { "A  thought.\n</think>" } else { "" };
    says(server, &format!("{thought}Let me see.{CALL}"));
    let mut body = json!({"model": "deepseek-flash", "tools": tools(), "temperature": 0,
        "thinking": {"type": if thinking { "enabled" } else { "disabled" }},
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go on."}]});
    let first = post(server.address, "/v1/chat/completions", &body).json();
    let mut message = first["choices"][0]["message"].clone();
    let arguments = &mut message["tool_calls"][0]["function"]["arguments"];
    *arguments = rewritten(arguments.as_str().unwrap()).into();
    message["content"] = " Let me see.\r\n".into();
    if !returns_reasoning {
        message.as_object_mut().unwrap().remove("reasoning_content");
    }
    let id = message["tool_calls"][0]["id"].clone();
    let messages = body["messages"].as_array_mut().unwrap();
    messages.extend([message, json!({"role": "tool", "tool_call_id": id, "content": "7"})]);
    says(server, "Seven.");
    let second = post(server.address, "/v1/chat/completions", &body);
    assert_eq!(second.status, 200, "{}", second.body);
    let total = first["usage"]["total_tokens"].as_u64().unwrap() as usize;
    (hit(&second.head), total, miss(&second.head).to_owned())
}

#[test]
fn a_call_that_comes_back_rewritten_hits_at_full_length() {
    let server = scripted(settings(), 8);
    for (thinking, returns_reasoning) in [(false, false), (true, true), (true, false)] {
        let (hit, total, miss) = round_trip(&server, thinking, returns_reasoning);
        assert_eq!(hit, total, "thinking {thinking}, reasoning returned {returns_reasoning}: {miss}");
        // The end token was sampled, and is the first that the kept state has not taken.
        assert_eq!(miss, format!("token {total}: new (assistant message 3)"));
    }
    let without = scripted(Settings { replay: 0, ..settings() }, 8);
    let (hit, total, miss) = round_trip(&without, false, false);
    assert!(hit < total && miss.ends_with("differs (assistant message 3)"), "{hit} of {total}: {miss}");
}

#[test]
fn a_required_call_hits_too() {
    let server = scripted(settings(), 8);
    says(&server, CALL.split_once("calls>\n").unwrap().1);
    let question = json!({"role": "user", "content": "Go on."});
    let mut body = json!({"model": "deepseek-flash", "tools": tools(), "tool_choice": "required", "temperature": 0,
        "thinking": {"type": "disabled"}, "messages": [question]});
    let first = post(server.address, "/v1/chat/completions", &body).json();
    let message = first["choices"][0]["message"].clone();
    let id = message["tool_calls"][0]["id"].clone();
    let result = json!({"role": "tool", "tool_call_id": id, "content": "7"});
    body["messages"] = json!([question, message, result]);
    body["tool_choice"] = "auto".into();
    says(&server, "Seven.");
    let second = post(server.address, "/v1/chat/completions", &body);
    assert_eq!(hit(&second.head) as u64, first["usage"]["total_tokens"].as_u64().unwrap(), "{}", second.head);
}

/// Anthropic's and OpenAI's responses give arguments back as JSON and as text.
#[test]
fn turns_of_other_apis_hit_as_well() {
    let server = scripted(settings(), 8);
    says(&server, &format!("Thought.</think>Let me see.{CALL}"));
    let tool = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    let question = json!({"role": "user", "content": "Go on."});
    let mut body =
        json!({"model": "deepseek-flash", "max_tokens": 500, "tools": tool, "messages": [question]});
    let first = post(server.address, "/v1/messages", &body).json();
    let call = first["content"].as_array().unwrap().last().unwrap()["id"].clone();
    let result = json!([{"type": "tool_result", "tool_use_id": call, "content": "7"}]);
    body["messages"] = json!([question, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": result}]);
    says(&server, "Seven.</think>7");
    let second = post(server.address, "/v1/messages", &body);
    let usage = &first["usage"];
    let total = usage["input_tokens"].as_u64().unwrap()
        + usage["cache_read_input_tokens"].as_u64().unwrap()
        + usage["output_tokens"].as_u64().unwrap();
    assert_eq!(hit(&second.head) as u64, total, "{}", second.head);

    says(&server, &format!("Thought.</think>{CALL}"));
    let tool = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}]);
    let mut body = json!({"model": "deepseek-flash", "input": [question], "tools": tool});
    let first = post(server.address, "/v1/responses", &body).json();
    let items = first["output"].as_array().unwrap().clone();
    let call = items.last().unwrap()["call_id"].clone();
    let input = body["input"].as_array_mut().unwrap();
    input.extend(items);
    input.push(json!({"type": "function_call_output", "call_id": call, "output": "7"}));
    says(&server, "Seven.</think>7");
    let second = post(server.address, "/v1/responses", &body);
    assert_eq!(hit(&second.head) as u64, first["usage"]["total_tokens"].as_u64().unwrap(), "{}", second.head);
}

#[test]
fn a_miss_names_its_token_and_its_reason() {
    let server = scripted(settings(), 8);
    let ask = |system: &str, tools: Value, effort: Value, question: &str| {
        says(&server, "Well.");
        let body = json!({"model": "deepseek-flash", "temperature": 0, "tools": tools, "reasoning_effort": effort,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]});
        let before = server.script.lock().unwrap().asked.clone();
        let reply = post(server.address, "/v1/chat/completions", &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        let asked = server.script.lock().unwrap().asked.clone();
        let at = before.iter().zip(&asked).take_while(|(a, b)| a == b).count();
        (miss(&reply.head).to_owned(), at)
    };
    let (none, off) = (json!([]), json!("none"));
    ask("You are a cook, and brief.", none.clone(), off.clone(), "Go on.");
    let (miss, at) = ask("You are a baker, and brief.", none.clone(), off.clone(), "Go on.");
    assert_eq!(miss, format!("token {at}: differs (system message 1)"));
    assert!(at > 2);
    let (miss, at) = ask("You are a baker, and brief.", none.clone(), off.clone(), "Go back.");
    assert_eq!(miss, format!("token {at}: differs (user message 2)"));
    ask("You are a baker, and brief.", tools(), off.clone(), "Go back.");
    let other =
        json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": 1}}}]);
    let (miss, at) = ask("You are a baker, and brief.", other.clone(), off, "Go back.");
    assert_eq!(miss, format!("token {at}: differs (tools)"));
    ask("You are a baker, and brief.", other.clone(), json!(20), "Go back.");
    let (miss, at) = ask("You are a baker, and brief.", other, json!(30), "Go back.");
    assert_eq!(miss, format!("token {at}: differs (reasoning effort)"));
}
