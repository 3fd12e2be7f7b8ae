//! Grammars that an answer must follow (spec section 10), over `llguidance`.
//!
//! A [`Guide`] is compiled from a request, a [`Steering`] follows one answer. Reasoning is free; what follows it is held to
//! the response format, and a block of calls to the form of calls from where it opens.

mod calls;

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    panic_utils,
    toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie},
};
use serde_json::{Value, json};

use crate::conversation::Message;
use crate::special::{DSML, EOS};
use crate::{Constraint, Input, Phase, Request, RequestError, Tokenizer};

/// Compiled grammars that are kept for requests with the same tools or format.
const KEPT: usize = 32;
/// What may stand between two parts of JSON, once: a model that may go on with white space sometimes does so for ever.
const WHITE_SPACE: &str = r"\x20|\n[\x20\t]{0,40}";
/// Longest part of the library's reason that is passed on.
const LONGEST_REASON: usize = 600;

/// What all grammars of a tokenizer share.
pub(crate) struct Grammars {
    factory: ParserFactory,
    eos: u32,
    dsml: Option<u32>,
    /// Every id but the end token.
    goes_on: Arc<[u32]>,
    /// The most recently used last.
    kept: Mutex<Vec<(String, Matcher)>>,
}

impl Grammars {
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, String> {
        let size = tokenizer.vocab_size();
        let eos = tokenizer.require_special(EOS).map_err(|e| e.to_string())?;
        let words: Vec<Vec<u8>> = (0..size as u32)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id).unwrap_or_default();
                match tokenizer.is_added(id) {
                    true => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
                    false => bytes.to_vec(),
                }
            })
            .collect();
        let trie = TokTrie::from(&TokRxInfo::new(size as u32, eos), &words);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
            .map_err(|e| e.to_string())?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        let mut goes_on = vec![u32::MAX; size.div_ceil(32)];
        goes_on[eos as usize / 32] &= !(1 << (eos % 32));
        Ok(Self {
            factory,
            eos,
            dsml: tokenizer.special_id(DSML),
            goes_on: goes_on.into(),
            kept: Mutex::default(),
        })
    }

    /// A matcher at the beginning of `grammar`, or the library's reason.
    fn matcher(&self, grammar: String) -> Result<Matcher, String> {
        // A matcher that was asked for earlier answers a deep copy: what one answer computes, no other waits for or keeps.
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let mut kept = kept();
            if let Some(at) = kept.iter().position(|(known, _)| *known == grammar) {
                let entry = kept.remove(at);
                let matcher = entry.1.deep_clone();
                kept.push(entry);
                return Ok(matcher);
            }
        }
        let top = TopLevelGrammar::from_lark(grammar.clone());
        let parser =
            panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| self.factory.create_parser(top)));
        let matcher = Matcher::new(parser);
        if let Some(reason) = matcher.get_error() {
            return Err(one_line(&reason));
        }
        let mut kept = kept();
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push((grammar, matcher.deep_clone()));
        Ok(matcher)
    }
}

/// A reason of the library without line ends and backtraces.
fn one_line(reason: &str) -> String {
    let reason = reason.split("<backtrace>").next().unwrap_or_default();
    let mut line = reason.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.len() > LONGEST_REASON {
        let mut end = LONGEST_REASON;
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        line.truncate(end);
        line.push('…');
    }
    line
}

/// What an answer must follow, compiled.
#[derive(Clone)]
pub struct Guide {
    /// From the end of the reasoning on.
    answer: Option<Matcher>,
    /// From where the model opens a block of calls.
    calls: Option<Matcher>,
    eos: u32,
    goes_on: Arc<[u32]>,
}

impl std::fmt::Debug for Guide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Guide(answer: {}, calls: {})", self.answer.is_some(), self.calls.is_some())
    }
}

impl Guide {
    /// The guide of a request; none where the output is free.
    ///
    /// # Errors
    /// What the grammar library cannot express, with its reason.
    pub fn new(request: &Request, tokenizer: &Tokenizer) -> Result<Option<Self>, RequestError> {
        let Some(constraint) = &request.constraint else { return Ok(None) };
        let grammars = tokenizer.grammars().map_err(RequestError::internal)?;
        let compile = |grammar: String, what: &str| {
            grammars.matcher(grammar).map_err(|reason| {
                RequestError::invalid(format!("{what} cannot be enforced on the output: {reason}"))
            })
        };
        const FORMAT: &str = "the response format";
        const TOOLS: &str = "the form of the tool calls";
        let (mut answer, mut calls) = (None, None);
        match constraint {
            Constraint::ToolCalls { tools, answer: format, .. } => {
                let Some(dsml) = grammars.dsml else { return Ok(None) };
                let rules = calls::rules(tools, dsml, request.parallel_calls).map_err(|reason| {
                    RequestError::invalid(format!("{TOOLS} cannot be enforced: {reason}"))
                })?;
                let begin = if request.parser.starts_in_tool_calls { calls::INSIDE } else { calls::OPENED };
                calls = Some(compile(format!("{begin}{rules}"), TOOLS)?);
                let block = format!("{}{rules}", calls::block(dsml));
                if request.forced_call {
                    answer = Some(compile(format!("start: block\n{block}"), TOOLS)?);
                } else if let Some(format) = format {
                    let rule = answer_rule(format);
                    answer = Some(compile(format!("start: answer | block\n{rule}{block}"), FORMAT)?);
                }
            }
            format => answer = Some(compile(format!("start: answer\n{}", answer_rule(format)), FORMAT)?),
        }
        if let (Some(matcher), Some(given)) = (&mut answer, given(request)) {
            let ids = tokenizer.encode(given);
            if !matches!(matcher.try_consume_tokens(&ids), Ok(n) if n == ids.len()) {
                return Err(RequestError::invalid(
                    "the prefix does not begin an answer that the response format allows",
                ));
            }
        }
        Ok(Some(Self { answer, calls, eos: grammars.eos, goes_on: grammars.goes_on.clone() }))
    }

    /// Follows one answer.
    pub fn follow(&self) -> Steering {
        Steering { guide: self.clone(), running: None, mask: Vec::new() }
    }
}

/// Text of the answer that the prompt holds already.
fn given(request: &Request) -> Option<&str> {
    let Input::Conversation(conversation) = &request.input else { return None };
    match conversation.messages.last()? {
        Message::Assistant { text, prefix: true, .. } if !text.is_empty() => Some(text),
        _ => None,
    }
}

/// The rule `answer` for a response format.
fn answer_rule(format: &Constraint) -> String {
    match format {
        Constraint::Json(schema) => {
            let object = json!({"type": "object"});
            format!("answer: {}\n", json_rule(schema.as_ref().unwrap_or(&object)))
        }
        Constraint::Regex(regex) => format!("answer: /{}/\n", llguidance::regex_to_lark(regex, "")),
        Constraint::ToolCalls { .. } => String::new(),
    }
}

/// JSON of a schema, as an atom of a rule.
fn json_rule(schema: &Value) -> String {
    match schema {
        Value::Object(members) => {
            let mut members = members.clone();
            members.insert("x-guidance".into(), json!({"whitespace_pattern": WHITE_SPACE}));
            format!("%json {}", Value::Object(members))
        }
        // The library reads objects only.
        Value::Bool(false) => json_rule(&json!({"not": {}})),
        _ => json_rule(&json!({})),
    }
}

/// A grammar that failed while an answer was made, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the answer's grammar failed, ask for a simpler schema: {0}")]
pub struct GuideError(String);

/// One answer on its way through a [`Guide`].
pub struct Steering {
    guide: Guide,
    running: Option<Matcher>,
    mask: Vec<u32>,
}

impl Steering {
    /// The ids that may come next in a phase, bit `i % 32` of word `i / 32` for id `i`; none while all may.
    ///
    /// # Errors
    /// A grammar that is too complex to go on with.
    pub fn mask(&mut self, phase: Phase) -> Result<Option<&[u32]>, GuideError> {
        if self.running.is_none() {
            let begin = match phase {
                Phase::Reasoning | Phase::Done => None,
                Phase::Answer => self.guide.answer.as_ref(),
                Phase::Calls => self.guide.calls.as_ref(),
            };
            let Some(begin) = begin else { return Ok(None) };
            self.running = Some(begin.deep_clone());
        }
        let Some(matcher) = &mut self.running else { return Ok(None) };
        let mask = matcher.compute_mask_or_eos().map_err(|e| GuideError(one_line(&e.to_string())))?;
        self.mask.clear();
        self.mask.extend_from_slice(mask.as_slice());
        Ok(Some(&self.mask))
    }

    /// The ids to draw from anew if `id` was drawn in a phase that it may not end: an answer of a fixed form does not end
    /// with its reasoning.
    pub fn instead_of(&self, id: u32, phase: Phase) -> Option<&[u32]> {
        let ends_early = phase == Phase::Reasoning && id == self.guide.eos && self.guide.answer.is_some();
        ends_early.then_some(&*self.guide.goes_on)
    }

    /// Takes the drawn id.
    ///
    /// # Errors
    /// An id that [`Steering::mask`] did not allow, or a grammar that is too complex.
    pub fn accept(&mut self, id: u32) -> Result<(), GuideError> {
        match &mut self.running {
            Some(matcher) if id != self.guide.eos => {
                matcher.consume_token(id).map_err(|e| GuideError(one_line(&e.to_string())))
            }
            _ => Ok(()),
        }
    }
}
