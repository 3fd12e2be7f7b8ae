//! G4: drafts on and drafts off give the same tokens and the same state.

use std::{ops::ControlFlow, sync::Arc};

use engine::{Drafts, Generator, Lm, SessionOptions, sampler};
use text::SamplingParams;

use crate::{
    Result,
    receipt::{Check, Gate, Rule},
};

/// Tokens drafted in a round.
const DRAFTED: usize = 3;

/// `count` greedy tokens behind `prompt`, with drafts and without.
///
/// # Errors
/// A device failure, or a text that does not fit the model.
pub fn drafts(lm: &Arc<dyn Lm>, prompt: &[u32], count: usize) -> Result<Gate> {
    if lm.draft_block() == 0 {
        return Ok(Gate::not_run("G4", "the checkpoint has no draft stages"));
    }
    let off = answer(lm, prompt, count, Drafts::Off)?;
    let on = answer(lm, prompt, count, Drafts::Fixed(DRAFTED.min(lm.draft_block())))?;
    let tokens = off.ids.iter().zip(&on.ids).filter(|(a, b)| a != b).count();
    let bytes = off.state.iter().zip(&on.state).filter(|(a, b)| a != b).count()
        + off.state.len().abs_diff(on.state.len());
    Ok(Gate::new(
        "G4",
        vec![
            Check::new("tokens that drafts change", tokens as f64, Rule::Zero).noted(format!(
                "{count} greedy tokens behind {}; {} of {} drafts were right",
                prompt.len(),
                on.right,
                on.drafted
            )),
            Check::new("bytes of the state that drafts change", bytes as f64, Rule::Zero)
                .noted(format!("of {}", off.state.len())),
        ],
    ))
}

struct Answer {
    ids: Vec<u32>,
    state: Vec<u8>,
    drafted: u64,
    right: u64,
}

fn answer(lm: &Arc<dyn Lm>, prompt: &[u32], count: usize, drafts: Drafts) -> Result<Answer> {
    let options = SessionOptions { drafts, ..SessionOptions::new(prompt.len() + count) };
    let mut session = lm.clone().open(options)?;
    // A feed that never asks to stop is never stopped.
    let _ = session.feed(prompt, &mut |_| ControlFlow::Continue(()))?;
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let mut sampler = sampler::Sampler::new(greedy, 0, prompt);
    let mut generator = Generator::new(&*session);
    let mut ids = Vec::new();
    while ids.len() < count {
        ids.push(generator.next(&mut *session, &mut sampler, count - ids.len())?);
    }
    generator.finish(&mut *session)?;
    let stats = session.speculation().map(|s| s.stats()).unwrap_or_default();
    Ok(Answer { ids, state: session.save()?, drafted: stats.drafted, right: stats.accepted })
}
