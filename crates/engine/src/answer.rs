//! Generation: one request on one session.

use std::{
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

use serde::Serialize;
use text::{
    Encoded, Event, Guide, Message, Parser, ParserOptions, Request, SamplingParams, Start, Stop, Tokenizer,
};

use crate::{DraftStats, Error, Loaded, Result, Reuse, Session, generate::Generator, sampler::Sampler};

/// What the model is to continue, and how.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Token ids.
    pub ids: Vec<u32>,
    /// How the output is read.
    pub parser: ParserOptions,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// What the output must follow.
    pub guide: Option<Guide>,
    /// Most tokens of the answer; lowered to what the context leaves.
    pub max_tokens: usize,
}

impl Prompt {
    /// The prompt of a request, for a context of `context` tokens; `max_tokens` replaces the request's own limit.
    ///
    /// # Errors
    /// Images, and constraints on the output that no grammar can express, are refused; a prompt that does not fit.
    pub fn from_request(
        request: &Request,
        loaded: &Loaded,
        context: usize,
        max_tokens: Option<usize>,
    ) -> Result<Self> {
        Self::with_tokenizer(request, &loaded.tokenizer, context, max_tokens)
    }

    /// As [`Prompt::from_request`], for a model of which only the tokenizer is at hand.
    ///
    /// # Errors
    /// As there.
    pub fn with_tokenizer(
        request: &Request,
        tokenizer: &Tokenizer,
        context: usize,
        max_tokens: Option<usize>,
    ) -> Result<Self> {
        Self::from_encoded(request, &request.encode(tokenizer)?, tokenizer, context, max_tokens)
    }

    /// As [`Prompt::with_tokenizer`], of a request that was encoded before.
    ///
    /// # Errors
    /// As there.
    pub fn from_encoded(
        request: &Request,
        encoded: &Encoded,
        tokenizer: &Tokenizer,
        context: usize,
        max_tokens: Option<usize>,
    ) -> Result<Self> {
        if !encoded.images.is_empty() {
            return Err(Error::Refused("images are refused: the vision tower is not built".into()));
        }
        let prompt = encoded.ids.len();
        if prompt >= context {
            return Err(Error::TooLong { prompt, context });
        }
        let max_tokens = match max_tokens {
            Some(n) => n,
            None => request.max_tokens(prompt, context)?,
        };
        Ok(Self {
            ids: encoded.ids.clone(),
            parser: request.parser.clone(),
            sampling: request.sampling.clone(),
            guide: Guide::new(request, tokenizer)?,
            max_tokens,
        })
    }

    /// Ids as they are; the output is not parsed.
    pub fn from_ids(ids: Vec<u32>, sampling: SamplingParams, max_tokens: usize) -> Self {
        Self { ids, parser: ParserOptions::new(Start::Raw), sampling, guide: None, max_tokens }
    }
}

/// Tokens that an answer took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Sampled tokens, reasoning and markers included, the end token not.
    pub completion_tokens: usize,
    /// Their sum.
    pub total_tokens: usize,
    /// Prompt tokens whose state was kept from an earlier turn.
    pub cached_tokens: usize,
    /// Sampled tokens of the reasoning.
    pub reasoning_tokens: usize,
}

/// Where the time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timing {
    /// Seconds from the request to the first sampled token.
    pub first_token_s: f64,
    /// Seconds of the prefill.
    pub prefill_s: f64,
    /// Seconds of the decode.
    pub decode_s: f64,
    /// Prompt tokens a second, kept ones not counted.
    pub prefill_tokens_per_s: f64,
    /// Sampled tokens a second.
    pub decode_tokens_per_s: f64,
}

/// A finished answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Ids of the prompt.
    pub prompt_ids: Vec<u32>,
    /// Sampled ids, the end token included where one was sampled.
    pub ids: Vec<u32>,
    /// The sampled ids as text, special tokens as spelled.
    pub text: String,
    /// Reasoning, content, tool calls and why the answer ends.
    pub message: Message,
    /// Tokens.
    pub usage: Usage,
    /// Times.
    pub timing: Timing,
    /// What of the prompt was kept from before.
    pub reuse: Reuse,
    /// Drafts of this answer.
    pub drafts: DraftStats,
    /// The seed that drew.
    pub seed: u64,
    /// The stop string that ended it.
    pub stopped_by: Option<String>,
}

/// Who follows an answer as it is made.
pub trait Watch {
    /// Before the first step: what of the prompt was kept from before.
    fn begin(&mut self, _reuse: &Reuse) {}

    /// A drawn token, the end token included, with the logits it was drawn from. Its events come after it.
    fn token(&mut self, _id: u32, _logits: &[f32]) {}

    /// A piece of the answer.
    fn event(&mut self, _event: &Event) {}

    /// Asked before every step; an answer that it ends has finish reason `stop`.
    fn stop(&self) -> bool {
        false
    }
}

struct Closures<'a> {
    on_event: &'a mut dyn FnMut(&Event),
    stop: &'a dyn Fn() -> bool,
}

impl Watch for Closures<'_> {
    fn event(&mut self, event: &Event) {
        (self.on_event)(event);
    }

    fn stop(&self) -> bool {
        (self.stop)()
    }
}

/// Continues `prompt` on `session`, which keeps the conversation for the next turn. `on_event` hears every piece as it
/// comes; `stop` is asked before every step, and an answer that it ends has finish reason `stop`. A prompt that does not
/// fit the context is refused before any work; nothing is ever dropped from it to make room.
///
/// # Errors
/// A prompt that is empty or does not fit, or a failure of the model.
pub fn answer(
    loaded: &Loaded,
    session: &mut dyn Session,
    prompt: &Prompt,
    on_event: &mut dyn FnMut(&Event),
    stop: &dyn Fn() -> bool,
) -> Result<Answer> {
    let eos = loaded.lm.config().eos_token_id;
    watched(&loaded.tokenizer, eos, session, prompt, &mut Closures { on_event, stop })
}

/// As [`answer`], with only what it needs of the model and for any [`Watch`]: the one loop that answers.
///
/// # Errors
/// As there.
pub fn watched(
    tokenizer: &Arc<Tokenizer>,
    eos: u32,
    session: &mut dyn Session,
    prompt: &Prompt,
    watch: &mut dyn Watch,
) -> Result<Answer> {
    let start = Instant::now();
    let (length, context) = (prompt.ids.len(), session.context());
    if length == 0 {
        return Err(Error::EmptyPrompt);
    }
    if length >= context {
        return Err(Error::TooLong { prompt: length, context });
    }
    let max_tokens = prompt.max_tokens.min(context - length);
    let cached = session.rewind(&prompt.ids)?;
    let reuse = session.reuse();
    watch.begin(&reuse);
    let mut progress = |_| if watch.stop() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let fed = session.feed(&prompt.ids[cached..], &mut progress)?;
    if fed.is_ok() {
        session.mark()?;
    }
    let prefill = start.elapsed();
    let mut parser = Parser::new(tokenizer.clone(), prompt.parser.clone());
    let mut message = Message::default();
    let mut events = Vec::new();
    let hear = |events: &mut Vec<Event>, message: &mut Message, watch: &mut dyn Watch| {
        for event in events.drain(..) {
            message.apply(&event);
            watch.event(&event);
        }
    };
    let mut sampler = Sampler::new(prompt.sampling.clone(), 0, &prompt.ids);
    let (mut ids, mut first) = (Vec::new(), Duration::ZERO);
    let mut steering = prompt.guide.as_ref().map(Guide::follow);
    let mut end = if max_tokens == 0 { Stop::Length } else { Stop::End };
    let before = session.speculation().map_or_else(DraftStats::default, |s| s.stats());
    if fed.is_ok() {
        let mut generator = Generator::new(session);
        while ids.len() < max_tokens {
            let phase = parser.phase();
            let mut draw = |sampler: &mut Sampler, row: &[f32]| {
                let id = match &mut steering {
                    None => sampler.sample(row, None)?,
                    Some(steering) => {
                        let mut id = sampler.sample(row, steering.mask(phase)?)?;
                        if let Some(others) = steering.instead_of(id, phase) {
                            id = sampler.sample(row, Some(others))?;
                        }
                        steering.accept(id)?;
                        id
                    }
                };
                watch.token(id, row);
                Ok(id)
            };
            let id = generator.next_drawn(session, &mut sampler, max_tokens - ids.len(), &mut draw)?;
            if ids.is_empty() {
                first = start.elapsed();
            }
            ids.push(id);
            if id == eos {
                break;
            }
            parser.push(id, &mut events)?;
            hear(&mut events, &mut message, watch);
            if parser.stopped_by().is_some() || watch.stop() {
                break;
            }
            if ids.len() == max_tokens {
                end = Stop::Length;
            }
        }
        generator.finish(session)?;
    }
    message.finish_reason = Some(parser.finish(end, &mut events));
    hear(&mut events, &mut message, watch);
    let decode = start.elapsed() - prefill;
    if fed.is_ok() {
        session.mark()?;
    }
    let drafts = session.speculation().map_or_else(DraftStats::default, |s| s.stats().since(&before));
    let computed = length - cached + reuse.recomputed;
    let completion = ids.len() - usize::from(ids.last() == Some(&eos));
    let rate = |n: usize, d: Duration| if n == 0 { 0.0 } else { n as f64 / d.as_secs_f64().max(1e-9) };
    Ok(Answer {
        text: tokenizer.decode(&ids)?,
        usage: Usage {
            prompt_tokens: length,
            completion_tokens: completion,
            total_tokens: length + completion,
            cached_tokens: cached,
            reasoning_tokens: parser.reasoning_tokens(),
        },
        timing: Timing {
            first_token_s: first.as_secs_f64(),
            prefill_s: prefill.as_secs_f64(),
            decode_s: decode.as_secs_f64(),
            prefill_tokens_per_s: rate(computed, prefill),
            decode_tokens_per_s: rate(ids.len(), decode),
        },
        reuse,
        drafts,
        prompt_ids: prompt.ids.clone(),
        ids,
        message,
        seed: sampler.seed(),
        stopped_by: parser.stopped_by().map(str::to_owned),
    })
}
