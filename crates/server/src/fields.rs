//! What becomes of every field of a request: the table behind `docs/api.md` and `/openapi.json`.

use serde_json::{Map, Value, json};

/// What becomes of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It has its documented effect.
    Honoured,
    /// It may be there and changes nothing.
    Ignored,
    /// A request with it gets status 400.
    Refused,
}

/// A field of a request.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name, with the field that it is in.
    pub name: &'static str,
    /// What becomes of it.
    pub fate: Fate,
    /// A JSON value; of a refused field one that is refused.
    pub example: &'static str,
    /// Limits and departures.
    pub note: &'static str,
}

const fn field(name: &'static str, fate: Fate, example: &'static str, note: &'static str) -> Field {
    Field { name, fate, example, note }
}

use Fate::{Honoured, Ignored, Refused};

/// Fields of `POST /v1/chat/completions`.
pub const CHAT: &[Field] = &[
    field(
        "model",
        Honoured,
        "\"deepseek-v4.1-flash\"",
        "required; one of the names that `GET /v1/models` and an error list",
    ),
    field(
        "messages",
        Honoured,
        "[{\"role\": \"user\", \"content\": \"hi\"}]",
        "required; roles system, developer, user, assistant, tool, latest_reminder; `name` is ignored",
    ),
    field(
        "messages[].content[].image_url",
        Refused,
        "[{\"role\": \"user\", \"content\": [{\"type\": \"image_url\", \"image_url\": {\"url\": \"https://example.org/a.png\"}}]}]",
        "the vision tower is not built",
    ),
    field(
        "messages[].reasoning_content",
        Honoured,
        "[{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", \"content\": \"a\", \"reasoning_content\": \"r\"}, {\"role\": \"user\", \"content\": \"b\"}]",
        "kept in thinking turns",
    ),
    field(
        "messages[].prefix",
        Honoured,
        "[{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", \"content\": \"a\", \"prefix\": true}]",
        "last message only; not with tools or json_object",
    ),
    field("stream", Honoured, "true", ""),
    field(
        "stream_options.include_usage",
        Honoured,
        "{\"include_usage\": true}",
        "needs `stream`; the last chunk has the usage anyway",
    ),
    field(
        "max_tokens",
        Honoured,
        "10",
        "1 to 393,216; default 8,192 without thinking, 65,536 with it, 131,072 with effort max, lowered to the context",
    ),
    field("max_completion_tokens", Honoured, "10", "wins over `max_tokens`"),
    field(
        "temperature",
        Honoured,
        "0.5",
        "0 to 2, default 1; with `--sampling official` as the official API applies it",
    ),
    field(
        "top_p",
        Honoured,
        "0.9",
        "above 0 to 1, default 1; `--sampling official`: at least 0.95 with thinking, else 1",
    ),
    field("top_k", Honoured, "40", "0 and -1 are off"),
    field("min_p", Honoured, "0.05", "0 to 1"),
    field("repetition_penalty", Honoured, "1.1", "above 0 to 2"),
    field("presence_penalty", Honoured, "0.1", "-2 to 2; ignored with `--sampling official`"),
    field("frequency_penalty", Honoured, "0.1", "-2 to 2; ignored with `--sampling official`"),
    field("logit_bias", Honoured, "{\"5\": -1}", "token ids; -100 to 100"),
    field("seed", Honoured, "7", "below 2^63; same seed, same request: same answer"),
    field(
        "stop",
        Honoured,
        "[\"END\"]",
        "a string or at most 16; in the answer's text only, never in reasoning or tool calls",
    ),
    field("logprobs", Honoured, "true", "of the raw logits; `content` and `reasoning_content`"),
    field("top_logprobs", Honoured, "3", "0 to 20, needs `logprobs`"),
    field(
        "thinking.type",
        Honoured,
        "{\"type\": \"disabled\"}",
        "enabled, adaptive, disabled; default enabled; `budget_tokens` is ignored",
    ),
    field(
        "reasoning_effort",
        Honoured,
        "42",
        "none, minimal, low, medium, high, xhigh, max, ultra, or 1 to 100",
    ),
    field(
        "chat_template_kwargs",
        Honoured,
        "{\"thinking\": false}",
        "`thinking`, `enable_thinking`, `reasoning_effort`; the rest is ignored",
    ),
    field(
        "tools",
        Honoured,
        "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"type\": \"object\"}}}]",
        "functions",
    ),
    field(
        "tools[].function.strict",
        Honoured,
        "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"strict\": true, \"parameters\": {\"type\": \"object\", \"properties\": {}}}}]",
        "all parameters in the schema's order, with values of their schemas; not beside tools without it or a response format",
    ),
    field(
        "tool_choice",
        Honoured,
        "\"auto\"",
        "required and a named function need thinking turned off; the prompt opens the call then",
    ),
    field("parallel_tool_calls", Honoured, "false", "false: one call at most"),
    field(
        "response_format: json_object",
        Honoured,
        "{\"type\": \"json_object\"}",
        "an object; needs the word json in the messages",
    ),
    field(
        "response_format: json_schema",
        Honoured,
        "{\"type\": \"json_schema\", \"json_schema\": {\"name\": \"s\", \"schema\": {\"type\": \"object\"}}}",
        "what the grammar library cannot express is refused, with its reason",
    ),
    field(
        "response_format: regex",
        Honoured,
        "{\"type\": \"regex\", \"regex\": \"a+\"}",
        "of the whole answer, in the syntax of Rust's regex crate; not shown to the model",
    ),
    field("n", Refused, "2", "1 only"),
    field("user_id", Ignored, "\"u\"", "the prefix cache is shared by all clients"),
    field("user", Ignored, "\"u\"", ""),
    field("metadata", Ignored, "{}", ""),
    field("store", Ignored, "false", "nothing is stored"),
    field("service_tier", Ignored, "\"auto\"", ""),
];

/// Fields of `POST /v1/completions`.
pub const COMPLETIONS: &[Field] = &[
    field("model", Honoured, "\"deepseek-v4.1-flash\"", "required"),
    field(
        "prompt",
        Honoured,
        "\"hi\"",
        "required; a string (special tokens in it are recognised) or a list of token ids, or a list of one of these",
    ),
    field("prompt: several", Refused, "[\"a\", \"b\"]", "one prompt per request"),
    field("suffix", Honoured, "\"end\"", "fill in the middle, at most 4,096 tokens"),
    field("max_tokens", Honoured, "4", "default 16"),
    field("echo", Honoured, "true", "not with `logprobs`"),
    field("logprobs", Honoured, "2", "0 to 20"),
    field("stop", Honoured, "\"END\"", "as in chat"),
    field("stream", Honoured, "true", ""),
    field("stream_options.include_usage", Honoured, "{\"include_usage\": true}", "needs `stream`"),
    field("temperature", Honoured, "0.5", "used as sent in both sampling modes, as all below"),
    field("top_p", Honoured, "0.9", ""),
    field("top_k", Honoured, "40", ""),
    field("min_p", Honoured, "0.05", ""),
    field("repetition_penalty", Honoured, "1.1", ""),
    field("presence_penalty", Honoured, "0.1", ""),
    field("frequency_penalty", Honoured, "0.1", ""),
    field("logit_bias", Honoured, "{\"5\": -1}", ""),
    field("seed", Honoured, "7", ""),
    field("n", Refused, "2", "1 only"),
    field("best_of", Refused, "2", "1 only"),
    field("user", Ignored, "\"u\"", ""),
];

/// Fields of `POST /v1/messages`.
pub const MESSAGES: &[Field] = &[
    field("model", Honoured, "\"claude-x\"", "required; as in chat, or any name that begins with claude"),
    field(
        "messages",
        Honoured,
        "[{\"role\": \"user\", \"content\": \"hi\"}]",
        "required; text, thinking, tool_use, tool_result",
    ),
    field(
        "messages[].content[]: image",
        Refused,
        "[{\"role\": \"user\", \"content\": [{\"type\": \"image\", \"source\": {\"type\": \"url\", \"url\": \"https://example.org/a.png\"}}]}]",
        "the vision tower is not built",
    ),
    field("max_tokens", Honoured, "10", "lowered to what the context leaves"),
    field("system", Honoured, "\"be brief\"", ""),
    field("stop_sequences", Honoured, "[\"END\"]", ""),
    field("stream", Honoured, "true", ""),
    field("temperature", Honoured, "0.5", ""),
    field("top_p", Honoured, "0.9", ""),
    field("top_k", Honoured, "40", ""),
    field("thinking.type", Honoured, "{\"type\": \"disabled\"}", "`budget_tokens` is ignored"),
    field("output_config.effort", Honoured, "{\"effort\": \"low\"}", ""),
    field("tools", Honoured, "[{\"name\": \"f\", \"input_schema\": {\"type\": \"object\"}}]", ""),
    field(
        "tools[].strict",
        Honoured,
        "[{\"name\": \"f\", \"strict\": true, \"input_schema\": {\"type\": \"object\", \"properties\": {}}}]",
        "as in chat, also beside tools without it",
    ),
    field(
        "output_config.format",
        Honoured,
        "{\"format\": {\"type\": \"json_schema\", \"schema\": {\"type\": \"object\"}}}",
        "json_schema",
    ),
    field(
        "tool_choice",
        Honoured,
        "{\"type\": \"auto\"}",
        "any forces a call, after the reasoning if there is one; tool needs thinking turned off; with `disable_parallel_tool_use` one call at most",
    ),
    field("metadata", Ignored, "{\"user_id\": \"u\"}", "the prefix cache is shared by all clients"),
    field("service_tier", Ignored, "\"auto\"", ""),
];

/// Fields of `POST /v1/responses`.
pub const RESPONSES: &[Field] = &[
    field("model", Honoured, "\"deepseek-v4.1-flash\"", "required"),
    field("input", Honoured, "\"hi\"", "a string or items; this or `instructions` is required"),
    field(
        "input[].content[]: input_image",
        Refused,
        "[{\"role\": \"user\", \"content\": [{\"type\": \"input_image\", \"image_url\": \"https://example.org/a.png\"}]}]",
        "the vision tower is not built",
    ),
    field("instructions", Honoured, "\"be brief\"", ""),
    field("max_output_tokens", Honoured, "10", ""),
    field("stream", Honoured, "true", ""),
    field("temperature", Honoured, "0.5", ""),
    field("top_p", Honoured, "0.9", ""),
    field("top_logprobs", Honoured, "2", "turns log-probabilities on"),
    field("reasoning.effort", Honoured, "{\"effort\": \"low\"}", ""),
    field(
        "tools",
        Honoured,
        "[{\"type\": \"function\", \"name\": \"f\", \"parameters\": {\"type\": \"object\"}}]",
        "functions and namespaces; hosted tools are left out",
    ),
    field(
        "tools[].strict",
        Honoured,
        "[{\"type\": \"function\", \"name\": \"f\", \"strict\": true, \"parameters\": {\"type\": \"object\", \"properties\": {}}}]",
        "as in chat",
    ),
    field(
        "tools[]: custom",
        Refused,
        "[{\"type\": \"custom\", \"name\": \"apply_patch\"}]",
        "declare a function",
    ),
    field("tool_choice", Honoured, "\"auto\"", "as in chat"),
    field("parallel_tool_calls", Honoured, "false", "false: one call at most"),
    field("text.format: json_object", Honoured, "{\"format\": {\"type\": \"json_object\"}}", "as in chat"),
    field(
        "text.format: json_schema",
        Honoured,
        "{\"format\": {\"type\": \"json_schema\", \"name\": \"s\", \"schema\": {\"type\": \"object\"}}}",
        "as in chat",
    ),
    field("previous_response_id", Refused, "\"resp_1\"", "nothing is stored"),
    field("store", Ignored, "false", "nothing is stored"),
    field("user", Ignored, "\"u\"", ""),
    field("metadata", Ignored, "{}", ""),
];

/// Every endpoint that answers, with its fields.
pub const ENDPOINTS: [(&str, &[Field]); 4] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", COMPLETIONS),
    ("/v1/messages", MESSAGES),
    ("/v1/responses", RESPONSES),
];

impl Field {
    /// The outermost field of the body.
    pub fn top(&self) -> &'static str {
        self.name.split(['.', '[', ':']).next().unwrap_or(self.name)
    }
}

/// The tables of `docs/api.md`.
pub fn markdown() -> String {
    let mut text = String::new();
    for (path, fields) in ENDPOINTS {
        text += &format!("### POST {path}\n\n| field | | |\n|---|---|---|\n");
        for Field { name, fate, note, .. } in fields {
            let fate = match fate {
                Honoured => "honoured",
                Ignored => "ignored",
                Refused => "refused",
            };
            text += &format!("| `{name}` | {fate} | {note} |\n");
        }
        text.push('\n');
    }
    text
}

/// The first example of a field by name.
fn example(name: &str, fields: &[Field], model: &str) -> Option<Value> {
    if name == "model" {
        return Some(model.into());
    }
    let field = fields.iter().find(|field| field.name == name)?;
    serde_json::from_str(field.example).ok()
}

/// The schema of an outermost field: the types that its examples have.
fn property(top: &str, fields: &[Field], model: &str) -> Value {
    if top == "model" {
        return json!({"type": "string", "enum": [model]});
    }
    let own = || fields.iter().filter(|field| field.top() == top);
    let examples: Vec<Value> = own().filter_map(|field| serde_json::from_str(field.example).ok()).collect();
    let mut types: Vec<&str> = examples
        .iter()
        .map(|example| match example {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        })
        .collect();
    types.sort_unstable();
    types.dedup();
    let mut schema = json!({"type": types, "examples": examples});
    if let Some(field) = own().find(|field| field.name == top).filter(|field| !field.note.is_empty()) {
        schema["description"] = field.note.into();
    }
    if top == "messages" {
        schema["minItems"] = 1.into();
        schema["items"] = json!({"type": "object", "required": ["role", "content"], "properties": {
            "role": {"type": "string", "enum": ["system", "user", "assistant"]},
            "content": {"type": ["string", "array"], "items": {"type": "object"}},
        }});
    }
    schema
}

/// The description of a server of `model`.
pub fn openapi(model: &str) -> Value {
    let answer = |description: &str| json!({"description": description});
    let answers = |codes: &[(&str, &str)]| -> Value {
        codes.iter().map(|(code, text)| ((*code).to_owned(), answer(text))).collect()
    };
    let post = |fields: &[Field], required: &[&str]| {
        let mut properties = Map::new();
        for field in fields {
            properties.entry(field.top()).or_insert_with(|| property(field.top(), fields, model));
        }
        // A whole body for every field.
        let base: Map<String, Value> = required
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), example(name, fields, model)?)))
            .chain((required == ["model"]).then(|| ("input".to_owned(), json!("hi"))))
            .collect();
        let mut examples = Map::new();
        for field in fields.iter().filter(|field| field.top() != "model") {
            let mut body = base.clone();
            if let Ok(value) = serde_json::from_str(field.example) {
                body.insert(field.top().into(), value);
            }
            examples.insert(field.name.into(), json!({"value": body}));
        }
        json!({"post": {
            "requestBody": {"required": true, "content": {"application/json": {"schema": {
                "type": "object", "properties": properties, "required": required,
            }, "examples": examples}}},
            "responses": answers(&[
                ("200", "the answer, or a stream of server-sent events"), ("400", "refused, with the reason"),
                ("401", "no or a wrong key"), ("408", "the body did not come in time"), ("413", "the body is too large"),
                ("429", "too many wait"), ("503", "the server ends, or the deadline is over"),
            ]),
        }})
    };
    let read = |text: &str| json!({"get": {"responses": answers(&[("200", text), ("401", "no or a wrong key"), ("503", "failed")])}});
    let mut count = post(&MESSAGES[..2], &["model", "messages"]);
    count["post"]["responses"]["200"] = answer("the number of tokens");
    json!({
        "openapi": "3.1.0",
        "info": {"title": "hallmark", "version": env!("CARGO_PKG_VERSION")},
        "paths": {
            "/v1/chat/completions": post(CHAT, &["model", "messages"]),
            "/v1/completions": post(COMPLETIONS, &["model", "prompt"]),
            "/v1/messages": post(MESSAGES, &["model", "messages"]),
            "/v1/messages/count_tokens": count,
            "/v1/responses": post(RESPONSES, &["model"]),
            "/v1/models": read("the models"),
            "/health": read("whether the server works"),
            "/metrics": read("figures for Prometheus"),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_has_the_tables() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md");
        let text = std::fs::read_to_string(path).expect("docs/api.md is there");
        assert!(text.contains(&markdown()), "docs/api.md lacks the present tables:\n{}", markdown());
    }
}
