//! The body of `POST /v1/completions`.

use engine::Prompt;
use serde_json::{Map, Value, json};
use text::{Api, Options, Request, RequestError, Tokenizer, special::BOS};

/// Tokens of an answer whose request sets no limit.
const DEFAULT_TOKENS: usize = 16;
/// Most tokens of an answer between a prefix and a suffix.
const INFILL_TOKENS: usize = 4096;
/// Fields that mean the same as in a chat request, and are checked as there.
const SHARED: [&str; 14] = [
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "max_tokens",
];

/// A checked completion request.
pub struct Completion {
    /// The checked fields that a chat request has too.
    pub request: Request,
    /// What to continue.
    pub prompt: Prompt,
    /// What to send before the answer.
    pub echo: String,
    /// Alternatives to report, if log-probabilities are.
    pub log_probs: Option<usize>,
}

/// Reads a body for a context of `context` tokens.
///
/// # Errors
/// What is wrong with it.
pub fn read(
    body: &[u8],
    options: &Options,
    tokenizer: &Tokenizer,
    context: usize,
) -> Result<Completion, RequestError> {
    let invalid = |message: String| RequestError::invalid(message);
    let body: Value =
        serde_json::from_slice(body).map_err(|e| invalid(format!("invalid request body: {e}")))?;
    let fields = body.as_object().ok_or_else(|| invalid("the request body must be a JSON object".into()))?;
    let mut chat = Map::new();
    for name in SHARED {
        if let Some(value) = fields.get(name) {
            chat.insert(name.into(), value.clone());
        }
    }
    chat.insert("messages".into(), json!([{"role": "user", "content": ""}]));
    chat.insert("thinking".into(), json!({"type": "disabled"}));
    let mut request = Request::from_json(Api::Chat, &serde_json::to_vec(&chat).unwrap_or_default(), options)?;
    for name in ["n", "best_of"] {
        if fields.get(name).is_some_and(|n| !n.is_null() && *n != 1) {
            return Err(invalid(format!("{name} must be 1: this server gives one answer to a request")));
        }
    }
    let log_probs = match fields.get("logprobs") {
        None | Some(Value::Null) => None,
        Some(n) => match n.as_u64() {
            Some(n @ 0..=20) => Some(n as usize),
            _ => return Err(invalid(format!("logprobs is {n}, its range is 0 to 20"))),
        },
    };
    let echo = match fields.get("echo") {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Bool(true)) if log_probs.is_some() => {
            return Err(invalid("echo cannot be combined with logprobs: the prompt has none".into()));
        }
        Some(Value::Bool(true)) => true,
        Some(other) => return Err(invalid(format!("echo must be true or false, not {other}"))),
    };
    let suffix = match fields.get("suffix") {
        None | Some(Value::Null) => None,
        Some(Value::String(suffix)) => Some(suffix),
        Some(other) => return Err(invalid(format!("suffix must be a string, not {other}"))),
    };
    let ids = ids(fields.get("prompt").unwrap_or(&Value::Null), suffix, tokenizer)?;
    request.parser = Request::from_raw("").parser;
    request.parser.stop = request_stops(fields);
    if ids.len() >= context {
        return Err(invalid(format!(
            "the prompt has {} tokens and the context holds {context}; shorten the prompt",
            ids.len()
        )));
    }
    request.requested_max_tokens.get_or_insert(DEFAULT_TOKENS as u32);
    let mut max_tokens = request.max_tokens(ids.len(), context)?;
    if suffix.is_some() {
        max_tokens = max_tokens.min(INFILL_TOKENS);
    }
    for (id, _) in &request.sampling.logit_bias {
        tokenizer.token_bytes(*id)?;
    }
    let mut prompt = Prompt::from_ids(ids, request.sampling.clone(), max_tokens);
    prompt.parser = request.parser.clone();
    let echo = match echo {
        true => tokenizer.decode(&prompt.ids)?.trim_start_matches(BOS).to_owned(),
        false => String::new(),
    };
    Ok(Completion { request, prompt, echo, log_probs })
}

/// The stop strings, which the chat reader has checked.
fn request_stops(fields: &Map<String, Value>) -> Vec<String> {
    match fields.get("stop") {
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(Value::Array(stops)) => stops.iter().filter_map(|s| s.as_str().map(str::to_owned)).collect(),
        _ => Vec::new(),
    }
}

fn ids(prompt: &Value, suffix: Option<&String>, tokenizer: &Tokenizer) -> Result<Vec<u32>, RequestError> {
    match (prompt, suffix) {
        (Value::String(prefix), Some(suffix)) => {
            let mut ids = vec![tokenizer.require_special(BOS)?];
            for (marker, text) in
                [("<｜fim▁begin｜>", prefix.as_str()), ("<｜fim▁hole｜>", suffix), ("<｜fim▁end｜>", "")]
            {
                ids.push(tokenizer.require_special(marker)?);
                ids.extend(tokenizer.encode(text));
            }
            Ok(ids)
        }
        (_, Some(_)) => Err(RequestError::invalid("a suffix needs a prompt that is a string")),
        (Value::String(text), None) => Ok(Request::from_raw(text).encode(tokenizer)?.ids),
        (Value::Array(list), None) => match list.as_slice() {
            [] => Err(RequestError::invalid("prompt is an empty list")),
            [one @ (Value::String(_) | Value::Array(_))] => ids(one, None, tokenizer),
            [Value::String(_) | Value::Array(_), ..] => Err(RequestError::invalid(
                "prompt is a list of several prompts; send one request for each of them",
            )),
            numbers => numbers
                .iter()
                .map(|id| {
                    let id = id
                        .as_u64()
                        .and_then(|id| u32::try_from(id).ok())
                        .ok_or_else(|| RequestError::invalid(format!("{id} in prompt is not a token id")))?;
                    tokenizer.token_bytes(id)?;
                    Ok(id)
                })
                .collect(),
        },
        _ => Err(RequestError::invalid("prompt must be a string or a list of token ids")),
    }
}
