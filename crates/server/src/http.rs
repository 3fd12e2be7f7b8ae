//! Paths, keys, limits: from a connection to the queue and back.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    body::{Body, Bytes, to_bytes},
    extract::{MatchedPath, Path, Request as HttpRequest, State},
    http::{HeaderName, HeaderValue, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use engine::{Answer, Miss, Prompt, Reuse};
use futures_util::stream::unfold;
use serde_json::{Value, json};
use subtle::ConstantTimeEq;
use text::{
    Api, Encoded, Part, Request, RequestError, Said, Start, Tokenizer,
    special::{EOS, THINK_END},
};
use tokio::{
    sync::mpsc::{UnboundedReceiver, channel, unbounded_channel},
    time::{Interval, MissedTickBehavior, Sleep},
};
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tower_http::cors::{Any, CorsLayer};

use crate::{
    completion, fields,
    metrics::Metrics,
    page,
    replay::Replay,
    wire::{self, Chat, Completion, Frame, Head, Messages, Responses, Wire},
    worker::{Failure, Job, NotTaken, Queue, TokenLog, Update},
};

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the model.
    pub model: String,
    /// What computes, for `system_fingerprint`.
    pub fingerprint: String,
    /// Tokens that fit.
    pub context: usize,
    /// Keys that are let in; with none, everybody is.
    pub api_keys: Vec<String>,
    /// Longest time of a request, its wait included.
    pub deadline: Duration,
    /// Largest body.
    pub max_body: usize,
    /// Applies the sampling rules of the official API instead of the fields as sent.
    pub official_sampling: bool,
    /// Origins whose pages may use the server; `*` for all.
    pub cors: Vec<String>,
    /// Most sampled tokens that are kept to read earlier answers as they were sampled; with 0 they are read as sent.
    pub replay: usize,
    /// Time between signs of life to a client that waits.
    pub keep_alive: Duration,
    /// An object for the web page: what is qualified (`qualification`), what to ask (`suggestions`).
    pub page: Value,
}

impl Settings {
    /// Settings with the usual limits.
    pub fn new(model: impl Into<String>, context: usize) -> Self {
        Self {
            model: model.into(),
            fingerprint: "hallmark".into(),
            context,
            api_keys: Vec::new(),
            deadline: Duration::from_secs(3600),
            max_body: 64 << 20,
            official_sampling: false,
            cors: Vec::new(),
            replay: 4 << 20,
            keep_alive: Duration::from_secs(5),
            page: Value::Null,
        }
    }
}

/// Names that are accepted beside the served one.
const ALIASES: [&str; 4] =
    ["deepseek-flash", "DeepSeek-V4.1-Flash", "deepseek-v4.1-flash", "deepseek-v4-flash"];
/// Longest wait for a body.
const BODY_TIME: Duration = Duration::from_secs(60);

pub(crate) struct App {
    pub(crate) settings: Settings,
    options: text::Options,
    tokenizer: Arc<Tokenizer>,
    pub(crate) queue: Arc<Queue>,
    metrics: Arc<Metrics>,
    started: u64,
    ids: AtomicU64,
    replay: Replay,
}

#[derive(Clone, Copy, PartialEq)]
enum Endpoint {
    Chat,
    Messages,
    Responses,
    Completions,
}

type Shared = State<Arc<App>>;

/// The paths of a server whose requests go to `queue`.
///
/// # Errors
/// A CORS origin that is none.
pub fn router(
    settings: Settings,
    tokenizer: Arc<Tokenizer>,
    queue: Arc<Queue>,
    metrics: Arc<Metrics>,
) -> Result<Router, String> {
    let mut models = vec![settings.model.clone()];
    models.extend(ALIASES.iter().filter(|name| **name != settings.model).map(|name| (*name).to_owned()));
    let cors = cors(&settings.cors)?;
    let replay = Replay::new(settings.replay);
    let app = Arc::new(App {
        options: text::Options { models, ..text::Options::default() },
        settings,
        tokenizer,
        queue,
        metrics,
        started: now(),
        ids: AtomicU64::new(0),
        replay,
    });
    let chat = |s: Shared, r: HttpRequest| answer(s.0, r, Endpoint::Chat);
    let messages = |s: Shared, r: HttpRequest| answer(s.0, r, Endpoint::Messages);
    let responses = |s: Shared, r: HttpRequest| answer(s.0, r, Endpoint::Responses);
    let completions = |s: Shared, r: HttpRequest| answer(s.0, r, Endpoint::Completions);
    let api = Router::new()
        .route("/chat/completions", post(chat))
        .route("/completions", post(completions))
        .route("/responses", post(responses))
        .route("/messages", post(messages))
        .route("/messages/count_tokens", post(count_tokens))
        .route("/models", get(models_list))
        .route("/models/{id}", get(model));
    let mut router = Router::new()
        .nest("/v1", api.clone())
        .merge(api)
        .route("/anthropic/v1/messages", post(messages))
        .route("/anthropic/v1/messages/count_tokens", post(count_tokens))
        .route("/beta/completions", post(completions))
        .route("/web/server.json", get(page::about))
        .layer(middleware::from_fn_with_state(app.clone(), check_key))
        .route("/", get(page::index))
        .route("/web/{file}", get(page::file))
        .route("/health", get(health))
        .route("/metrics", get(metrics_text))
        .route(
            "/openapi.json",
            get(|State(app): Shared| async move { Json(fields::openapi(&app.settings.model)) }),
        )
        .fallback(
            |r: HttpRequest| async move { refuse(404, &format!("there is no {}", r.uri().path()), false) },
        )
        .method_not_allowed_fallback(|r: HttpRequest| async move {
            refuse(405, &format!("{} does not take {}", r.uri().path(), r.method()), false)
        })
        .layer(middleware::from_fn_with_state(app.clone(), count));
    if let Some(cors) = cors {
        router = router.layer(cors);
    }
    Ok(router.with_state(app))
}

fn cors(origins: &[String]) -> Result<Option<CorsLayer>, String> {
    if origins.is_empty() {
        return Ok(None);
    }
    let layer = CorsLayer::new().allow_methods(Any).allow_headers(Any);
    if origins.iter().any(|origin| origin == "*") {
        return Ok(Some(layer.allow_origin(Any)));
    }
    let origins = origins.iter().map(|origin| {
        HeaderValue::from_str(origin).map_err(|_| format!("the CORS origin {origin:?} is not one"))
    });
    Ok(Some(layer.allow_origin(origins.collect::<Result<Vec<_>, _>>()?)))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

pub(crate) fn refuse(status: u16, message: &str, anthropic: bool) -> Response {
    let body = if anthropic { wire::anthropic_error(status, message) } else { wire::error(status, message) };
    (StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), Json(body)).into_response()
}

/// Counts every answer by path and status.
async fn count(State(app): Shared, request: HttpRequest, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).to_owned();
    let response = next.run(request).await;
    app.metrics.requests.with_label_values(&[path.as_str(), response.status().as_str()]).inc();
    response
}

/// Which key a request shows.
#[derive(Clone, Copy)]
struct Key(usize);

async fn check_key(State(app): Shared, mut request: HttpRequest, next: Next) -> Response {
    let headers = request.headers();
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, key)| key.trim().as_bytes());
    let sent = bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes)).unwrap_or_default();
    // All keys are compared, each in constant time, so that the time tells nothing but a length.
    let mut found = None;
    for (i, key) in app.settings.api_keys.iter().enumerate() {
        if bool::from(key.as_bytes().ct_eq(sent)) {
            found = Some(i);
        }
    }
    if found.is_none() && !app.settings.api_keys.is_empty() {
        let anthropic = request.uri().path().contains("/messages");
        return refuse(
            401,
            "the API key is missing or wrong; send it as Authorization: Bearer KEY",
            anthropic,
        );
    }
    request.extensions_mut().insert(Key(found.unwrap_or(0)));
    next.run(request).await
}

async fn health(State(app): Shared) -> Response {
    match app.queue.broken() {
        false => Json(json!({"status": "ok"})).into_response(),
        true => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "failed"}))).into_response(),
    }
}

async fn metrics_text(State(app): Shared) -> Response {
    app.metrics.waiting.set(app.queue.len() as i64);
    app.metrics.running.set(app.queue.running() as i64);
    if let Some(used) = engine::memory::used() {
        app.metrics.memory.set(i64::try_from(used.resident).unwrap_or(i64::MAX));
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], app.metrics.text()).into_response()
}

fn model_object(app: &App) -> Value {
    json!({
        "id": app.settings.model,
        "object": "model",
        "created": app.started,
        "owned_by": "deepseek",
        "name": "DeepSeek-V4.1-Flash",
        "context_window": app.settings.context,
        "max_output_tokens": (text::LARGEST_MAX_TOKENS as usize).min(app.settings.context),
        "input_modalities": ["text"],
        "output_modalities": ["text"],
        "effort": {"supported_levels": ["low", "high", "max"], "default_level": "high"},
    })
}

async fn models_list(State(app): Shared) -> Response {
    Json(json!({"object": "list", "data": [model_object(&app)]})).into_response()
}

async fn model(State(app): Shared, Path(id): Path<String>) -> Response {
    if app.options.models.contains(&id) {
        return Json(model_object(&app)).into_response();
    }
    refuse(404, &format!("model {id:?} is not served here; served: {}", app.options.models.join(", ")), false)
}

/// The whole body, or the refusal.
async fn body(app: &App, request: HttpRequest, anthropic: bool) -> Result<Bytes, Response> {
    let limit = app.settings.max_body;
    let too_big = || refuse(413, &format!("the body is larger than the limit of {limit} bytes"), anthropic);
    match tokio::time::timeout(BODY_TIME, to_bytes(request.into_body(), limit)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(_)) => Err(too_big()),
        Err(_) => Err(refuse(408, "the body did not come in time", anthropic)),
    }
}

async fn count_tokens(State(app): Shared, request: HttpRequest) -> Response {
    let bytes = match body(&app, request, true).await {
        Ok(bytes) => bytes,
        Err(response) => return response,
    };
    let work = tokio::task::spawn_blocking(move || {
        let request = Request::from_json(Api::Messages, &bytes, &app.options)?;
        Ok::<_, RequestError>(request.encode(&app.tokenizer)?.ids.len())
    });
    match work.await {
        Ok(Ok(tokens)) => Json(json!({"input_tokens": tokens})).into_response(),
        Ok(Err(e)) => refuse(e.status, &e.message, true),
        Err(_) => refuse(500, "reading the request failed", true),
    }
}

/// A request that is ready for the queue.
struct Ready {
    prompt: Prompt,
    log_probs: Option<usize>,
    wire: Box<dyn Wire>,
    stream: bool,
    parts: Vec<(usize, Part)>,
    /// Tokens before the turn that the answer becomes, where it becomes one.
    turn: Option<usize>,
}

impl App {
    fn read(&self, endpoint: Endpoint, body: &[u8]) -> Result<Ready, RequestError> {
        let head = |request: &Request, prompt: &Prompt, prefix: &str, log_probs: bool| Head {
            id: self.new_id(prefix),
            created: now(),
            model: request.model.clone().unwrap_or_else(|| self.settings.model.clone()),
            fingerprint: self.settings.fingerprint.clone(),
            prompt_tokens: prompt.ids.len(),
            thinking: request.think().is_on(),
            tokenizer: self.tokenizer.clone(),
            log_probs,
        };
        let api = match endpoint {
            Endpoint::Chat => Api::Chat,
            Endpoint::Messages => Api::Messages,
            Endpoint::Responses => Api::Responses,
            Endpoint::Completions => {
                let c = completion::read(body, &self.options, &self.tokenizer, self.settings.context)?;
                let head = head(&c.request, &c.prompt, "cmpl-", c.log_probs.is_some());
                let wire = Box::new(Completion::new(head, c.echo, c.request.include_usage));
                return Ok(Ready {
                    prompt: c.prompt,
                    log_probs: c.log_probs,
                    wire,
                    stream: c.request.stream,
                    parts: vec![(0, Part::Given)],
                    turn: None,
                });
            }
        };
        let request = Request::from_json(api, body, &self.options)?;
        let mut recall = |before: &[u32], said: &Said| self.replay.recall(before, said);
        let encoded = request.encode_recalling(&self.tokenizer, &mut recall)?;
        self.metrics.recalled(encoded.recalled);
        let mut prompt = self.prompt(&request, &encoded, api)?;
        if self.settings.official_sampling {
            prompt.sampling = prompt.sampling.official(request.think().is_on());
        }
        let log_probs = request.logprobs.then(|| request.top_logprobs.unwrap_or(0).into());
        let wire: Box<dyn Wire> = match endpoint {
            Endpoint::Messages => Box::new(Messages::new(head(&request, &prompt, "msg_", false))),
            Endpoint::Responses => {
                let sent = serde_json::from_slice(body).unwrap_or(Value::Null);
                let head = head(&request, &prompt, "resp_", request.logprobs);
                Box::new(Responses::new(head, &sent, request.namespaces.clone()))
            }
            Endpoint::Chat | Endpoint::Completions => {
                let starts_reasoning = !request.parser.starts_in_tool_calls
                    && matches!(request.parser.start, Start::Reasoning | Start::ReasoningContinued);
                let head = head(&request, &prompt, "chatcmpl-", request.logprobs);
                Box::new(Chat::new(head, starts_reasoning, request.include_usage))
            }
        };
        let (parts, turn) = (encoded.parts, encoded.answer);
        Ok(Ready { prompt, log_probs, wire, stream: request.stream, parts, turn })
    }

    fn prompt(&self, request: &Request, encoded: &Encoded, api: Api) -> Result<Prompt, RequestError> {
        let context = self.settings.context;
        let made = |limit| Prompt::from_encoded(request, encoded, &self.tokenizer, context, limit);
        let make = |limit| match made(limit) {
            Ok(prompt) => Ok(prompt),
            Err(engine::Error::Request(e)) => Err(e),
            Err(engine::Error::Text(e)) => Err(e.into()),
            Err(e) => Err(RequestError::invalid(e.to_string())),
        };
        if api != Api::Messages {
            return make(None);
        }
        // Anthropic's clients ask for more than there is as a matter of course: lowered, not refused (spec section 7.4).
        let mut prompt = make(Some(1))?;
        let room = context - prompt.ids.len();
        let mut lowered = request.clone();
        lowered.requested_max_tokens = request.requested_max_tokens.map(|n| n.min(room as u32));
        prompt.max_tokens = lowered.max_tokens(prompt.ids.len(), context)?;
        Ok(prompt)
    }

    /// Keeps an answer that ended by itself for the requests that give it back.
    fn keep(&self, turn: usize, answer: &Answer) {
        let eos = self.tokenizer.special_id(EOS);
        let think_end = self.tokenizer.special_id(THINK_END);
        let message = &answer.message;
        // An answer that breaks off is not rendered as it was sampled: what it lacks is put behind it.
        let whole = answer.ids.last().copied() == eos && answer.stopped_by.is_none();
        let thought = message.reasoning.is_empty()
            || !message.tool_calls.is_empty()
            || answer.ids.iter().any(|id| Some(*id) == think_end);
        if whole && thought && turn <= answer.prompt_ids.len() {
            let (before, opened) = answer.prompt_ids.split_at(turn);
            self.replay.keep(before, [opened, &answer.ids].concat(), message);
        }
    }

    fn new_id(&self, prefix: &str) -> String {
        use std::hash::{BuildHasher, RandomState};
        let number = self.ids.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}{:016x}{number:08x}", RandomState::new().hash_one(number))
    }

    /// Seconds after which a refused client may try again.
    fn retry_after(&self) -> u64 {
        let (sum, count) =
            (self.metrics.request.get_sample_sum(), self.metrics.request.get_sample_count().max(1));
        let wait = sum / count as f64 * (self.queue.len() + self.queue.running()) as f64;
        (wait.ceil() as u64).clamp(1, 600)
    }
}

async fn answer(app: Arc<App>, request: HttpRequest, endpoint: Endpoint) -> Response {
    let came = Instant::now();
    let anthropic = endpoint == Endpoint::Messages;
    let Key(key) = request.extensions().get::<Key>().copied().unwrap_or(Key(0));
    let bytes = match body(&app, request, anthropic).await {
        Ok(bytes) => bytes,
        Err(response) => return response,
    };
    let reader = app.clone();
    let ready = match tokio::task::spawn_blocking(move || reader.read(endpoint, &bytes)).await {
        Ok(Ok(ready)) => ready,
        Ok(Err(e)) => return refuse(e.status, &e.message, anthropic),
        Err(_) => return refuse(500, "reading the request failed", anthropic),
    };
    let (sender, receiver) = unbounded_channel();
    let deadline = came + app.settings.deadline;
    let job = Job { prompt: ready.prompt, log_probs: ready.log_probs, key, deadline, came, sender };
    let before = match app.queue.push(job) {
        Ok(before) => before,
        Err(NotTaken::Full) => {
            let mut response = refuse(429, "too many requests wait; try again later", anthropic);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(app.retry_after()));
            return response;
        }
        Err(NotTaken::Ending) => return refuse(503, "the server is not taking requests", anthropic),
    };
    let listener = Listener {
        app: app.clone(),
        parts: ready.parts,
        turn: ready.turn,
        updates: receiver,
        wire: ready.wire,
        logs: Vec::new(),
        until: Box::pin(tokio::time::sleep_until(deadline.into())),
        deadline,
        begun: false,
        cache: None,
    };
    let keep_alive = app.settings.keep_alive;
    let mut response = match ready.stream {
        true => stream(listener, keep_alive, anthropic).await,
        false => whole(listener, keep_alive, anthropic).await,
    };
    let position = HeaderName::from_static("x-hallmark-queue-position");
    response.headers_mut().insert(position, HeaderValue::from(before));
    response
}

/// Hears one answer.
struct Listener {
    app: Arc<App>,
    parts: Vec<(usize, Part)>,
    turn: Option<usize>,
    updates: UnboundedReceiver<Update>,
    wire: Box<dyn Wire>,
    logs: Vec<TokenLog>,
    deadline: Instant,
    /// When to wait no longer; set once, not for every token.
    until: Pin<Box<Sleep>>,
    begun: bool,
    /// The header that says what was kept, once it is known.
    cache: Option<HeaderValue>,
}

/// How an answer ended.
type End = Result<(), Failure>;

impl Listener {
    /// Waits for the next updates; `None` where the answer goes on.
    async fn next(&mut self, frames: &mut Vec<Frame>) -> Option<End> {
        let mut updates = Vec::new();
        let gone = tokio::select! {
            biased;
            count = self.updates.recv_many(&mut updates, 64) =>
                (count == 0).then_some("the engine is gone; the answer was ended"),
            () = &mut self.until => Some("the request's time is over before an answer; try again later"),
        };
        if let Some(message) = gone {
            return Some(self.fail(Failure { status: 503, message: message.into() }, frames));
        }
        for update in updates {
            match update {
                Update::Begin(reuse) => {
                    self.begun = true;
                    // A running answer is ended by the worker; the time beyond is for one long step.
                    self.until.as_mut().reset((self.deadline + Duration::from_secs(60)).into());
                    self.wire.begin(&reuse, frames);
                    self.cache = cache_header(&reuse, &self.parts);
                }
                Update::Token(log) => self.logs.push(log),
                Update::Event(event) => self.wire.event(&event, &self.logs, frames),
                Update::Done(answer) => {
                    if let Some(turn) = self.turn {
                        self.app.keep(turn, &answer);
                    }
                    self.wire.done(&answer, &self.logs, frames);
                    return Some(Ok(()));
                }
                Update::Failed(failure) => return Some(self.fail(failure, frames)),
            }
        }
        None
    }

    fn fail(&mut self, failure: Failure, frames: &mut Vec<Frame>) -> End {
        self.wire.failed(&failure, frames);
        Err(failure)
    }
}

/// What was kept, and why not more.
fn cache_header(reuse: &Reuse, parts: &[(usize, Part)]) -> Option<HeaderValue> {
    let because = |at: usize, why: &str| format!("; miss=token {at}: {why} ({})", Part::at(parts, at));
    let miss = match &reuse.miss {
        Miss::None => String::new(),
        Miss::Empty => "; miss=token 0: nothing kept".into(),
        Miss::Differs { at, .. } => because(*at, "differs"),
        Miss::Ends { at } => because(*at, "new"),
        Miss::Evicted { at } => because(*at, "evicted"),
        Miss::Rejected { at, .. } => because(*at, "bad file"),
    };
    HeaderValue::from_str(&format!("hit={}{miss}", reuse.kept)).ok()
}

fn with_cache(mut response: Response, cache: Option<HeaderValue>) -> Response {
    if let Some(value) = cache {
        response.headers_mut().insert(HeaderName::from_static("x-hallmark-cache"), value);
    }
    response
}

fn streamed(content_type: &'static str, pieces: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let body = Body::from_stream(pieces.map(Ok::<_, Infallible>));
    ([(header::CONTENT_TYPE, content_type), (header::CACHE_CONTROL, "no-cache")], body).into_response()
}

/// An answer on its way to its client. The connection asks for the pieces; where it is gone, dropping this cancels the request.
struct Flow {
    listener: Listener,
    frames: Vec<Frame>,
    end: Option<End>,
    finished: bool,
    /// Twice in the time after which a silent stream says that it lives: a timer for every token would cost more.
    ticks: Interval,
    silent: bool,
    /// When the next piece may be written.
    next: Instant,
}

/// Events that come closer together than this are written as one piece: a model that gives a thousand tokens a second would
/// spend more on waking the connection than on all else here, and nobody sees the difference.
const GATHER: Duration = Duration::from_millis(4);

impl Flow {
    async fn piece(mut self) -> Option<(Bytes, Self)> {
        loop {
            let mut bytes = Vec::new();
            self.frames.drain(..).for_each(|frame| frame.write(&mut bytes));
            if self.end.is_some() && !self.finished {
                self.finished = true;
                if self.end == Some(Ok(())) && self.listener.wire.marks_end() {
                    bytes.extend_from_slice(b"data: [DONE]\n\n");
                }
            }
            if !bytes.is_empty() {
                (self.silent, self.next) = (false, Instant::now() + GATHER);
                return Some((bytes.into(), self));
            }
            if self.finished {
                return None;
            }
            tokio::time::sleep_until(self.next.into()).await;
            tokio::select! {
                biased;
                end = self.listener.next(&mut self.frames) => self.end = end,
                _ = self.ticks.tick() => {
                    self.silent = !self.silent;
                    if !self.silent {
                        return Some((Bytes::from_static(b": keep-alive\n\n"), self));
                    }
                }
            }
        }
    }
}

/// An answer as a stream of events. What the first update says becomes status and headers if it comes soon.
async fn stream(mut listener: Listener, keep_alive: Duration, anthropic: bool) -> Response {
    let mut frames = Vec::new();
    let first = tokio::time::timeout(keep_alive, listener.next(&mut frames)).await;
    if let (Ok(Some(Err(failure))), false) = (&first, listener.begun) {
        return refuse(failure.status, &failure.message, anthropic);
    }
    let cache = listener.cache.clone();
    // A client that has heard nothing so far hears at once.
    let (silent, end) = (first.is_err(), first.unwrap_or_default());
    let mut ticks = tokio::time::interval(keep_alive.max(Duration::from_millis(2)) / 2);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let flow = Flow { listener, frames, end, finished: false, ticks, silent, next: Instant::now() };
    with_cache(streamed("text/event-stream", unfold(flow, Flow::piece)), cache)
}

type Outcome = (Result<Value, Failure>, Option<HeaderValue>);

/// An answer as one document. One that takes long begins with empty lines, its status is 200 then.
async fn whole(mut listener: Listener, keep_alive: Duration, anthropic: bool) -> Response {
    let mut outcome: Pin<Box<dyn Future<Output = Outcome> + Send>> = Box::pin(async move {
        let mut frames = Vec::new();
        loop {
            let end = listener.next(&mut frames).await;
            frames.clear();
            if let Some(end) = end {
                return (end.map(|()| listener.wire.whole()), listener.cache);
            }
        }
    });
    if let Ok((result, cache)) = tokio::time::timeout(keep_alive, &mut outcome).await {
        let response = match result {
            Ok(value) => Json(value).into_response(),
            Err(failure) => refuse(failure.status, &failure.message, anthropic),
        };
        return with_cache(response, cache);
    }
    let (sender, receiver) = channel(16);
    tokio::spawn(async move {
        let mut bytes = Bytes::from_static(b"\n");
        loop {
            if sender.send(bytes).await.is_err() {
                return;
            }
            bytes = Bytes::from_static(b"\n");
            tokio::select! {
                () = sender.closed() => return,
                ended = tokio::time::timeout(keep_alive, &mut outcome) => if let Ok((result, _)) = ended {
                    let value = result.unwrap_or_else(|f| match anthropic {
                        true => wire::anthropic_error(f.status, &f.message),
                        false => wire::error(f.status, &f.message),
                    });
                    let _ = sender.send(value.to_string().into()).await;
                    return;
                },
            }
        }
    });
    streamed("application/json", ReceiverStream::new(receiver))
}
