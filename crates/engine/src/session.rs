//! Sequences of tokens and their state, behind object-safe traits.

use std::{ops::ControlFlow, sync::Arc};

use checkpoint::Config;
use model::{Input, Model, Rows, State};
use ops::{Backend, Mode, Taps};

use crate::Result;

/// Tokens of one prefill step. Bounds the memory of activations; by row invariance it changes no bit.
const CHUNK: usize = 512;

/// Turn ends whose state a session keeps.
const MARKS: usize = 4;

/// A loaded language model on some device.
pub trait Lm: Send + Sync {
    /// The configuration.
    fn config(&self) -> &Config;
    /// Name of the device.
    fn device(&self) -> &'static str;
    /// The numerics that it was loaded with.
    fn mode(&self) -> Mode;
    /// An empty sequence of at most `context` tokens.
    fn session(self: Arc<Self>, context: usize) -> Result<Box<dyn Session>>;
}

/// A prefill that was asked to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped;

/// One sequence.
pub trait Session: Send {
    /// Tokens so far.
    fn ids(&self) -> &[u32];
    /// Tokens that fit.
    fn context(&self) -> usize;
    /// Goes back to the longest kept state that is a beginning of `ids`, shorter than all of them; returns its length.
    fn rewind(&mut self, ids: &[u32]) -> Result<usize>;
    /// Appends tokens, at least one. `progress` hears how many are done after every step and may stop; a stopped
    /// session has taken the tokens that are done.
    fn feed(
        &mut self,
        ids: &[u32],
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<std::result::Result<(), Stopped>>;
    /// Logits after the last token; empty before the first and after a stopped feed.
    fn logits(&self) -> &[f32];
    /// Keeps the present state for [`Session::rewind`].
    fn mark(&mut self);
}

impl<B: Backend + 'static> Lm for Model<B> {
    fn config(&self) -> &Config {
        Model::config(self)
    }

    fn device(&self) -> &'static str {
        self.backend().name()
    }

    fn mode(&self) -> Mode {
        self.backend().mode()
    }

    fn session(self: Arc<Self>, context: usize) -> Result<Box<dyn Session>> {
        let state = self.new_state(context)?;
        Ok(Box::new(Sequence { state, ids: Vec::new(), logits: Vec::new(), marks: Vec::new(), model: self }))
    }
}

/// The session of one backend.
struct Sequence<B: Backend> {
    model: Arc<Model<B>>,
    state: State<B>,
    ids: Vec<u32>,
    logits: Vec<f32>,
    /// States at turn ends, shortest first.
    marks: Vec<State<B>>,
}

impl<B: Backend> Session for Sequence<B> {
    fn ids(&self) -> &[u32] {
        &self.ids
    }

    fn context(&self) -> usize {
        self.state.context()
    }

    fn rewind(&mut self, ids: &[u32]) -> Result<usize> {
        let common = self.ids.iter().zip(ids).take_while(|(a, b)| a == b).count();
        self.logits.clear();
        if common == self.ids.len() && common < ids.len() {
            return Ok(common);
        }
        self.marks.retain(|m| m.len() <= common);
        let kept = self.marks.iter().rev().find(|m| m.len() < ids.len());
        self.state = match kept {
            Some(state) => state.clone(),
            None => self.model.new_state(self.state.context())?,
        };
        self.ids.truncate(self.state.len());
        Ok(self.ids.len())
    }

    fn feed(
        &mut self,
        ids: &[u32],
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<std::result::Result<(), Stopped>> {
        self.logits.clear();
        let mut done = 0;
        for chunk in ids.chunks(CHUNK) {
            let last = done + chunk.len() == ids.len();
            let rows = if last { Rows::Last } else { Rows::None };
            let out = self.model.forward(&mut self.state, Input::text(chunk), rows, &mut Taps::off())?;
            self.ids.extend_from_slice(chunk);
            done += chunk.len();
            if let Some(out) = out {
                let host = self.model.backend().read(&out.logits).map_err(model::Error::from)?;
                self.logits = host.as_f32().to_vec();
            }
            if progress(done).is_break() && !last {
                return Ok(Err(Stopped));
            }
        }
        Ok(Ok(()))
    }

    fn logits(&self) -> &[f32] {
        &self.logits
    }

    fn mark(&mut self) {
        if self.marks.len() == MARKS {
            self.marks.remove(0);
        }
        self.marks.push(self.state.clone());
    }
}
