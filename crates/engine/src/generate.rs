//! The next token of a session, with drafts or without: the same tokens either way.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use crate::{Result, Session, sampler::Sampler};

/// Draws one token after the other. Between two draws the session may hold verified drafts that are not drawn yet;
/// [`Generator::finish`] takes them back.
#[derive(Debug, Default)]
pub struct Generator {
    /// The token drawn last, which the session has not taken.
    waiting: Option<u32>,
    /// Drafts that the session has taken in its last step.
    drafts: Vec<u32>,
    confidence: Vec<f32>,
    /// How many of them were drawn.
    right: usize,
    /// Tokens of the session before the drafts.
    base: usize,
    /// Times of drafting and verifying, till the round is over.
    times: (Duration, Duration),
}

impl Generator {
    /// For a session whose logits are those of the prompt's last token.
    pub fn new(session: &dyn Session) -> Self {
        Self { base: session.ids().len(), ..Self::default() }
    }

    /// The next token, of which `room` may still be drawn, this one included.
    ///
    /// # Errors
    /// A failure of the model, or logits that nothing can be drawn from.
    pub fn next(&mut self, session: &mut dyn Session, sampler: &mut Sampler, room: usize) -> Result<u32> {
        self.next_drawn(session, sampler, room, &mut |sampler, logits| Ok(sampler.sample(logits, None)?))
    }

    /// As [`Generator::next`]; `draw` draws the token from the logits.
    ///
    /// # Errors
    /// As there.
    pub fn next_drawn(
        &mut self,
        session: &mut dyn Session,
        sampler: &mut Sampler,
        room: usize,
        draw: &mut dyn FnMut(&mut Sampler, &[f32]) -> Result<u32>,
    ) -> Result<u32> {
        if let Some(id) = self.waiting.take() {
            self.feed(session, id, room)?;
        }
        let logits =
            if self.drafts.is_empty() { session.logits() } else { session.row(self.base + self.right) };
        let drawn = draw(sampler, logits)?;
        sampler.accept(drawn);
        if self.drafts.get(self.right) == Some(&drawn) {
            self.right += 1;
            // The last row of the step follows the last draft: one more token comes from it.
            return Ok(drawn);
        }
        self.settle(session, self.right)?;
        self.waiting = Some(drawn);
        Ok(drawn)
    }

    /// Gives the session the token drawn last, and drafts behind it where they pay.
    fn feed(&mut self, session: &mut dyn Session, id: u32, room: usize) -> Result<()> {
        let most = room.saturating_sub(1).min(session.context().saturating_sub(session.ids().len() + 1));
        let ask = session.speculation().map_or(0, |s| s.ask(most));
        let start = Instant::now();
        if ask == 0 {
            // A feed that never asks to stop is never stopped.
            let _ = session.feed(&[id], &mut |_| ControlFlow::Continue(()))?;
            if let Some(s) = session.speculation() {
                s.plain(start.elapsed());
            }
            return Ok(());
        }
        (self.drafts, self.confidence) = draft(session, id, ask)?;
        let drafted = start.elapsed();
        let start = Instant::now();
        session.feed_rows(&[&[id], self.drafts.as_slice()].concat())?;
        self.times = (drafted, start.elapsed());
        self.base = session.ids().len() - self.drafts.len();
        self.right = 0;
        if self.drafts.is_empty() {
            self.report(session, 0);
        }
        Ok(())
    }

    /// Ends a round with `right` drafts of it drawn: the session takes back the others.
    fn settle(&mut self, session: &mut dyn Session, right: usize) -> Result<()> {
        if !self.drafts.is_empty() {
            self.report(session, self.right);
            session.truncate(self.base + right)?;
            self.drafts.clear();
        }
        Ok(())
    }

    fn report(&self, session: &mut dyn Session, right: usize) {
        if let Some(s) = session.speculation() {
            s.round(self.times.0, self.times.1, &self.confidence, right);
        }
    }

    /// Leaves the session as if no draft had been: with every token but the one drawn last.
    ///
    /// # Errors
    /// A failure of the model.
    pub fn finish(mut self, session: &mut dyn Session) -> Result<()> {
        // A draft that was drawn last has been taken already.
        self.settle(session, self.right.saturating_sub(1))
    }
}

/// Drafts behind `id`, at most `ask`, as many as promise to pay.
fn draft(session: &mut dyn Session, id: u32, ask: usize) -> Result<(Vec<u32>, Vec<f32>)> {
    if let Some(mut drafter) = session.speculation().and_then(|s| s.take_drafter()) {
        let mut ids = drafter.draft(&[session.ids(), &[id]].concat(), ask);
        ids.truncate(ask);
        if let Some(s) = session.speculation() {
            s.set_drafter(drafter);
        }
        let confidence = vec![0.0; ids.len()];
        return Ok((ids, confidence));
    }
    let mut drafted = session.draft(id, ask)?;
    let choice = session.speculation().map_or(0, |s| s.choose(&drafted.confidence));
    drafted.ids.truncate(choice);
    drafted.confidence.truncate(choice);
    Ok((drafted.ids, drafted.confidence))
}
