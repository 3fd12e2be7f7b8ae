//! A long conversation of an agent, with the prefix cache and without: the same answers, and how much is not computed.

mod common;

use std::{path::Path, sync::Arc};

use common::*;
use engine::{Answer, CacheOptions, Loaded, Prefill, PrefixCache, Prompt, Session, SessionOptions};
use ops::Mode;
use text::{Content, ConversationMessage, Input, Request, Think};

const CONTEXT: usize = 4096;
/// A conversation that has become this long is ended; a new one begins with the same instructions.
const LONGEST: usize = 3000;

/// One request of the trace.
struct Turn {
    ids: Vec<u32>,
    /// Which of the agent's sessions asks.
    session: usize,
    seed: u64,
}

/// What an agent's conversations look like: mostly one message more; now and then the last answer again, an earlier
/// message changed, another task with the same instructions.
struct Agent {
    random: Random,
    messages: Vec<ConversationMessage>,
    parked: Vec<ConversationMessage>,
    session: usize,
    /// Conversations begun: with their instructions alone, which are too few tokens to go on from.
    begun: usize,
}

impl Agent {
    fn new() -> Self {
        Self { random: Random(11), messages: instructions(), parked: instructions(), session: 0, begun: 2 }
    }

    fn next(&mut self, loaded: &Loaded) -> Turn {
        match self.random.below(20) {
            0 | 1 if self.messages.len() > 1 => {
                // The last answer again: the conversation ends with its question.
                self.messages.pop();
            }
            2 if self.messages.len() > 8 => {
                let back = 2 * (1 + self.random.below(3));
                self.messages.truncate(self.messages.len() - back);
                self.ask();
            }
            3 => {
                std::mem::swap(&mut self.messages, &mut self.parked);
                self.session ^= 1;
                self.ask();
            }
            _ => self.ask(),
        }
        let mut ids = self.prompt(loaded);
        if ids.len() > LONGEST {
            self.messages = instructions();
            self.begun += 1;
            self.ask();
            ids = self.prompt(loaded);
        }
        Turn { ids, session: self.session, seed: self.random.next() >> 1 }
    }

    fn ask(&mut self) {
        let (a, b) = (self.random.below(60), self.random.below(60));
        let names = ["Sophie", "Marlo", "Quentin", "Ada", "Tilda"];
        let text = match self.random.below(7) {
            0 => format!("What is {a} + {b}?"),
            1 => format!("What is {} - {}?", a.max(b), a.min(b)),
            2 => format!("My name is {}.", names[a % 5]),
            3 => "What is my name?".into(),
            4 => "What is the capital of France?".into(),
            5 => format!("Count from {} to {}.", a, a + 5),
            _ => "What is a hammer?".into(),
        };
        self.messages.push(ConversationMessage::User { content: Content::text(text) });
    }

    fn prompt(&self, loaded: &Loaded) -> Vec<u32> {
        let mut request = Request::from_text("", Think::Off);
        if let Input::Conversation(conversation) = &mut request.input {
            conversation.messages = self.messages.clone();
        }
        request.encode(&loaded.tokenizer).unwrap().ids
    }

    fn hear(&mut self, answer: &Answer) {
        self.messages.push(ConversationMessage::Assistant {
            text: answer.text.trim_end_matches("<｜end▁of▁sentence｜>").to_owned(),
            reasoning: None,
            calls: Vec::new(),
            prefix: false,
        });
    }
}

fn instructions() -> Vec<ConversationMessage> {
    let text = "Today is Thursday. The user lives in Rome. You answer in one sentence.";
    vec![ConversationMessage::System { content: Content::text(text), tools: Vec::new() }]
}

fn ask(loaded: &Loaded, session: &mut dyn Session, turn: &Turn) -> Answer {
    // Warm, so that a wrong bit has a chance to show in the tokens.
    let prompt = Prompt::from_ids(turn.ids.clone(), sampled(turn.seed), 24);
    engine::answer(loaded, session, &prompt, &mut |_| {}, &|| false).unwrap()
}

fn sessions(loaded: &Loaded, dir: &Path, prefill: Prefill) -> (Arc<PrefixCache>, Vec<Box<dyn Session>>) {
    let options = CacheOptions { dir: Some(dir.to_owned()), ..CacheOptions::default() };
    let cache = Arc::new(PrefixCache::open(&options, &*loaded.lm, prefill).unwrap());
    let one = || SessionOptions { prefill, cache: Some(cache.clone()), ..SessionOptions::new(CONTEXT) };
    (cache.clone(), vec![open(loaded, one()), open(loaded, one())])
}

/// Kullback-Leibler divergence of `q` from `p`, both as logits, in nats; and the distance relative to `p`.
fn divergence(p: &[f32], q: &[f32]) -> (f64, f64) {
    let log_softmax = |l: &[f32]| -> Vec<f64> {
        let max = l.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = l.iter().map(|l| f64::from(l - max).exp()).sum();
        l.iter().map(|l| f64::from(l - max) - sum.ln()).collect()
    };
    let (lp, lq) = (log_softmax(p), log_softmax(q));
    let kl = lp.iter().zip(&lq).map(|(a, b)| a.exp() * (a - b)).sum();
    let square = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>();
    let apart = square(&mut p.iter().zip(q).map(|(a, b)| f64::from(a - b)));
    (kl, (apart / square(&mut p.iter().map(|a| f64::from(*a)))).sqrt())
}

#[test]
fn an_agents_trace_is_answered_alike_with_the_cache() {
    let turns = if full() { 200 } else { 16 };
    let loaded = load("demo", Mode::Native);
    let dir = tempfile::tempdir().unwrap();
    let (mut cache, mut kept) = sessions(&loaded, dir.path(), Prefill::Full);
    let replay_dir = tempfile::tempdir().unwrap();
    let (_, mut replayed) = sessions(&loaded, replay_dir.path(), Prefill::Replay);
    let mut agent = Agent::new();
    let (mut asked, mut computed, mut hits, mut after_restart) = (0, 0, 0, 0);
    let (mut kl, mut worst, mut nrms, mut same) = (0.0, 0.0f64, 0.0, 0);
    for n in 0..turns {
        if n == turns / 2 {
            drop((cache, kept));
            (cache, kept) = sessions(&loaded, dir.path(), Prefill::Full);
        }
        let turn = agent.next(&loaded);
        let with = ask(&loaded, &mut *kept[turn.session], &turn);
        let mut alone = open(&loaded, SessionOptions::new(CONTEXT));
        let without = ask(&loaded, &mut *alone, &turn);
        assert_eq!(with.ids, without.ids, "turn {n}: {:?}", with.reuse);
        asked += turn.ids.len();
        computed += turn.ids.len() - with.reuse.kept + with.reuse.recomputed;
        hits += usize::from(with.reuse.kept > 0);
        if n == turns / 2 {
            after_restart = with.reuse.kept;
        }
        // The same prompt by bounded replay, with its own cache.
        let mut reference = open(&loaded, SessionOptions::new(CONTEXT));
        feed(&mut *reference, &turn.ids);
        let session = &mut replayed[turn.session];
        let at = session.rewind(&turn.ids).unwrap();
        feed(&mut **session, &turn.ids[at..]);
        session.mark().unwrap();
        let (d, r) = divergence(reference.logits(), session.logits());
        let top = |l: &[f32]| ops::linear::argmax(l);
        same += usize::from(top(reference.logits()) == top(session.logits()));
        (kl, worst, nrms) = (kl + d, worst.max(d), nrms + r);
        agent.hear(&with);
    }
    let stats = cache.stats();
    println!(
        "{turns} turns, {asked} prompt tokens: {computed} computed with the cache ({:.1} %), {hits} turns hit; {} kept \
         right after the restart; {stats:?}",
        100.0 * computed as f64 / asked as f64,
        after_restart,
    );
    println!(
        "bounded replay: mean KL {:.2e}, worst {worst:.2e}, mean NRMS {:.2e}, top-1 equal in {same} of {turns}",
        kl / turns as f64,
        nrms / turns as f64,
    );
    assert!(hits + agent.begun >= turns && after_restart > 0, "{hits} of {turns}, {} begun", agent.begun);
    // What an agent adds at a time is little beside what it repeats.
    assert!(4 * computed < asked, "{computed} of {asked}");
}
