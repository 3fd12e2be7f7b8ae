//! Gate G4: drafts on and drafts off give the same tokens and the same state.

mod common;

use common::*;
use engine::{Drafter, Drafts, Loaded, SessionOptions};
use text::SamplingParams;

/// Whether the drafts of a round are right.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pattern {
    /// The model's own stages draft.
    Own,
    All,
    None,
    Alternating,
    Random,
}

const FORCED: [Pattern; 4] = [Pattern::All, Pattern::None, Pattern::Alternating, Pattern::Random];

/// Drafts by a pattern, knowing the right tokens.
struct Oracle {
    text: Vec<u32>,
    vocab: u32,
    pattern: Pattern,
    random: Random,
}

impl Drafter for Oracle {
    fn draft(&mut self, ids: &[u32], count: usize) -> Vec<u32> {
        (ids.len()..ids.len() + count)
            .map(|at| {
                let right = match self.pattern {
                    Pattern::Own | Pattern::All => true,
                    Pattern::None => false,
                    Pattern::Alternating => at % 2 == 0,
                    Pattern::Random => self.random.below(2) == 0,
                };
                let id = self.text.get(at).copied().unwrap_or(0);
                if right { id } else { (id + 1 + self.random.below(5) as u32) % self.vocab }
            })
            .collect()
    }
}

/// One answer without drafts, to compare others with.
struct Plain {
    prompt: Vec<u32>,
    sampling: SamplingParams,
    n: usize,
    ids: Vec<u32>,
    state: Vec<u8>,
}

fn plain(loaded: &Loaded, prompt: &[u32], sampling: SamplingParams, n: usize) -> Plain {
    let mut session = open(loaded, SessionOptions::new(prompt.len() + n));
    let answer = answer(loaded, &mut *session, prompt, sampling.clone(), n);
    Plain { prompt: prompt.to_vec(), sampling, n, ids: answer.ids, state: session.save().unwrap() }
}

/// The same with `drafts` drafts a round: the tokens, the state that is left, and how many drafts were right.
fn check(loaded: &Loaded, want: &Plain, drafts: usize, pattern: Pattern, seed: u64) -> (u64, u64) {
    let most = drafts as u64;
    let drafts = if drafts == 0 { Drafts::Off } else { Drafts::Fixed(drafts) };
    let options = SessionOptions { drafts, ..SessionOptions::new(want.prompt.len() + want.n) };
    let mut session = open(loaded, options);
    if pattern != Pattern::Own {
        let text = [want.prompt.as_slice(), &want.ids].concat();
        let (vocab, random) = (loaded.lm.config().vocab_size as u32, Random(seed));
        session.speculation().unwrap().set_drafter(Box::new(Oracle { text, vocab, pattern, random }));
    }
    let got = answer(loaded, &mut *session, &want.prompt, want.sampling.clone(), want.n);
    let what = || format!("{drafts:?} {pattern:?} after {:?}", want.prompt);
    assert_eq!(got.ids, want.ids, "{}", what());
    assert!(session.save().unwrap() == want.state, "the state after {}", what());
    match pattern {
        // Drafts past the end of the answer are wrong, and only those of the last round reach it.
        Pattern::All => {
            let wrong = got.drafts.drafted - got.drafts.accepted;
            assert!(wrong <= most, "{wrong} wrong: {}", what())
        }
        Pattern::None => assert_eq!(got.drafts.accepted, 0, "{}", what()),
        _ => {}
    }
    (got.drafts.drafted, got.drafts.accepted)
}

/// A prompt of 4 to 40 tokens: a piece of meaning for the demo, which was trained, and of none for the others.
fn prompt(loaded: &Loaded, texts: &[Vec<u32>], seed: u64) -> Vec<u32> {
    let mut random = Random(seed);
    let n = 4 + random.below(37);
    if loaded.lm.config().vocab_size == 2048 {
        let text = &texts[random.below(texts.len())];
        // With its beginning, as the model has never seen a text without.
        return text[..n.min(text.len() - 1)].to_vec();
    }
    random_ids(loaded, n, random.next())
}

fn sampling(random: &mut Random) -> SamplingParams {
    match random.below(4) {
        0 | 1 => greedy(),
        2 => sampled(random.next()),
        _ => SamplingParams {
            top_p: 0.9,
            top_k: 40,
            repetition_penalty: 1.1,
            frequency_penalty: 0.2,
            ..sampled(random.next())
        },
    }
}

/// Every prompt with one drawn combination.
#[test]
fn drafts_change_nothing() {
    let prompts = if full() { 500 } else { 14 };
    let texts = demo_texts();
    for name in MODELS {
        for mode in MODES {
            let loaded = load(name, mode);
            let block = loaded.lm.draft_block();
            let (mut drafted, mut accepted) = (0, 0);
            for seed in 0..prompts {
                let mut random = Random(7 * seed + 1);
                let want = plain(&loaded, &prompt(&loaded, &texts, seed), sampling(&mut random), 16);
                let pattern = [FORCED.as_slice(), &[Pattern::Own]].concat()[random.below(5)];
                let (d, a) = check(&loaded, &want, random.below(block + 1), pattern, seed);
                (drafted, accepted) = (drafted + d, accepted + a);
            }
            println!("{name} {}: {prompts} prompts, {accepted} of {drafted} drafts right", mode.name());
            assert!(drafted > prompts && accepted > 0 && accepted < drafted, "{accepted} of {drafted}");
        }
    }
}

/// Few prompts with every combination.
#[test]
fn drafts_change_nothing_in_any_combination() {
    let prompts = if full() { 10 } else { 1 };
    let texts = demo_texts();
    let mut runs = 0;
    for name in MODELS {
        for mode in MODES {
            let loaded = load(name, mode);
            for seed in 0..prompts {
                let mut ids = prompt(&loaded, &texts, 1000 + seed);
                ids.truncate(24);
                for sampling in [greedy(), sampled(seed)] {
                    let want = plain(&loaded, &ids, sampling, 16);
                    for drafts in 0..=loaded.lm.draft_block() {
                        for pattern in FORCED {
                            check(&loaded, &want, drafts, pattern, seed);
                            runs += 1;
                        }
                    }
                }
            }
        }
    }
    println!("{runs} runs");
}

/// An answer ends where it must, within a block too.
#[test]
fn no_draft_outlives_the_end() {
    let loaded = load("demo", ops::Mode::Native);
    for text in demo_texts().iter().take(4) {
        // The recorded answer ends with the end token; more room than that, and less.
        for n in [1, 2, 3, 5, 40] {
            let cut = text.len() - 4;
            let want = plain(&loaded, &text[..cut], greedy(), n);
            for drafts in [1, 4] {
                check(&loaded, &want, drafts, Pattern::All, 0);
                check(&loaded, &want, drafts, Pattern::Own, 0);
            }
        }
    }
}

/// The choice of how many to draft depends on the clock, the tokens do not.
#[test]
fn a_schedule_changes_nothing() {
    for name in MODELS {
        let loaded = load(name, ops::Mode::Native);
        let ids = prompt(&loaded, &demo_texts(), 3);
        let want = plain(&loaded, &ids, sampled(5), 60);
        let options = SessionOptions { drafts: Drafts::On, ..SessionOptions::new(ids.len() + 60) };
        let mut session = open(&loaded, options);
        let got = answer(&loaded, &mut *session, &ids, sampled(5), 60);
        assert_eq!(got.ids, want.ids, "{name}");
        assert!(session.save().unwrap() == want.state, "{name}");
        println!("{name}: {:?}", got.drafts);
    }
}

/// What the model card says of greedy blocks: 3.73 of 4.
#[test]
fn the_demo_accepts_most_drafts() {
    let loaded = load("demo", ops::Mode::Native);
    let texts = demo_texts();
    let (mut drafted, mut accepted, mut rounds) = (0, 0, 0);
    for line in texts.iter().take(if full() { 50 } else { 12 }) {
        // The answer alone, from behind the marker that ends a prompt.
        let start = line.iter().rposition(|id| *id == 2011).unwrap() + 2;
        let options = SessionOptions { drafts: Drafts::Fixed(4), ..SessionOptions::new(line.len() + 80) };
        let mut session = open(&loaded, options);
        let a = answer(&loaded, &mut *session, &line[..start], greedy(), 64);
        (drafted, accepted) = (drafted + a.drafts.drafted, accepted + a.drafts.accepted);
        rounds += a.drafts.rounds;
    }
    let mean = accepted as f64 / rounds as f64;
    println!("{accepted} of {drafted} drafts right, {mean:.2} a round of 4");
    // Ends of short answers cut blocks short; the card's texts are other ones.
    assert!(mean > 2.5, "{mean:.2} a round");
}
