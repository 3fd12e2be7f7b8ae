//! Models and sequences behind object-safe traits.

use std::{fmt, ops::ControlFlow, str::FromStr, sync::Arc};

use checkpoint::{Config, engram::TableStats};
use model::Layout;
use ops::Mode;
use serde::Serialize;

use crate::{Drafts, Error, Miss, PrefixCache, Result, Speculation};

/// How a prompt is taken in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Prefill {
    /// Every layer on every token.
    #[default]
    Full,
    /// The decoder layers on the last window of tokens only: about half the work, an approximation [§6.2].
    Replay,
}

impl Prefill {
    /// The name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Prefill::Full => "full",
            Prefill::Replay => "replay",
        }
    }
}

impl fmt::Display for Prefill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Prefill {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        match s {
            "full" => Ok(Prefill::Full),
            "replay" => Ok(Prefill::Replay),
            _ => Err(format!("unknown prefill '{s}': use full or replay")),
        }
    }
}

/// What a session is to be.
#[derive(Clone)]
pub struct SessionOptions {
    /// Most tokens.
    pub context: usize,
    /// How prompts are taken in.
    pub prefill: Prefill,
    /// Whether tokens are drafted.
    pub drafts: Drafts,
    /// Where states are kept; without one the session keeps its own in memory.
    pub cache: Option<Arc<PrefixCache>>,
}

impl SessionOptions {
    /// Full prefill, no drafts, an own cache.
    pub fn new(context: usize) -> Self {
        Self { context, prefill: Prefill::default(), drafts: Drafts::Off, cache: None }
    }
}

/// A loaded language model on some device.
pub trait Lm: Send + Sync {
    /// The configuration.
    fn config(&self) -> &Config;
    /// Name of the device.
    fn device(&self) -> &'static str;
    /// The numerics that it was loaded with.
    fn mode(&self) -> Mode;
    /// Hash of all that the bytes of a kept state depend on.
    fn identity(&self) -> [u8; 32];
    /// Sizes of a state.
    fn layout(&self) -> Layout;
    /// Tokens of a drafted block; 0 where nothing can be drafted.
    fn draft_block(&self) -> usize;
    /// What the Engram tables did so far, one entry an Engram layer.
    fn engram(&self) -> Vec<TableStats> {
        Vec::new()
    }
    /// An empty sequence.
    ///
    /// # Errors
    /// A context that does not fit, options that the model cannot fulfil.
    fn open(self: Arc<Self>, options: SessionOptions) -> Result<Box<dyn Session>>;

    /// An empty sequence of at most `context` tokens: full prefill, no drafts.
    ///
    /// # Errors
    /// A context that does not fit.
    fn session(self: Arc<Self>, context: usize) -> Result<Box<dyn Session>> {
        self.open(SessionOptions::new(context))
    }

    /// The sequence that [`Session::save`] wrote; a longer context than then is possible.
    ///
    /// # Errors
    /// Bytes that are damaged or another model's, or that do not fit the context.
    fn reopen(self: Arc<Self>, bytes: &[u8], options: SessionOptions) -> Result<Box<dyn Session>>;
}

/// A prefill that was asked to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped;

/// What a session could go on from, for its last prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reuse {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens whose state was kept, here or in the cache.
    pub kept: usize,
    /// Kept tokens whose windows were made anew from kept entries.
    pub recomputed: usize,
    /// Tokens that were found at the beginning of the prompt, whether or not it went on from there.
    pub found: usize,
    /// Why not more was found.
    pub miss: Miss,
}

impl Default for Reuse {
    fn default() -> Self {
        Self { prompt: 0, kept: 0, recomputed: 0, found: 0, miss: Miss::Empty }
    }
}

/// Drafted tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Drafted {
    /// Ids, for the positions after the token that follows the session.
    pub ids: Vec<u32>,
    /// Raw confidence of each; its sigmoid estimates the chance of acceptance.
    pub confidence: Vec<f32>,
}

/// One sequence.
///
/// A scripted one needs the methods without a body only; it has no drafts and keeps nothing.
pub trait Session: Send {
    /// Tokens so far.
    fn ids(&self) -> &[u32];
    /// Tokens that fit.
    fn context(&self) -> usize;
    /// Goes to the kept state from which `ids` takes least to compute, shorter than all of them; returns its length.
    fn rewind(&mut self, ids: &[u32]) -> Result<usize>;
    /// Appends tokens, at least one. `progress` hears how many are done after every step and may stop; a stopped
    /// session has taken those that [`Session::ids`] then gives.
    fn feed(
        &mut self,
        ids: &[u32],
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<std::result::Result<(), Stopped>>;
    /// Logits after the last token; empty before the first and after a stopped feed.
    fn logits(&self) -> &[f32];

    /// Keeps the present state, less its last token, for [`Session::rewind`] of this session and of others with the same
    /// cache.
    ///
    /// # Errors
    /// A device failure.
    fn mark(&mut self) -> Result<()> {
        Ok(())
    }

    /// What the last [`Session::rewind`] found.
    fn reuse(&self) -> Reuse {
        Reuse::default()
    }

    /// Appends tokens in one step and keeps the logits after each, for [`Session::row`].
    ///
    /// # Errors
    /// Tokens that do not fit, or a device failure.
    fn feed_rows(&mut self, _ids: &[u32]) -> Result<()> {
        Err(Error::Refused("this session cannot verify drafts".into()))
    }

    /// Logits after the first `len` tokens, of the last step.
    fn row(&self, _len: usize) -> &[f32] {
        &[]
    }

    /// Goes back to `len` tokens, whatever their number: in place after drafts, else from a kept state. Logits are there
    /// afterwards.
    ///
    /// # Errors
    /// A device failure.
    fn truncate(&mut self, _len: usize) -> Result<()> {
        Err(Error::Refused("this session cannot go back".into()))
    }

    /// Drafts `count` tokens behind `next`, which has not been fed; none where nothing can be drafted.
    ///
    /// # Errors
    /// A device failure.
    fn draft(&mut self, _next: u32, _count: usize) -> Result<Drafted> {
        Ok(Drafted::default())
    }

    /// How drafts are used, if they are.
    fn speculation(&mut self) -> Option<&mut Speculation> {
        None
    }

    /// An independent copy; buffers are shared until one of the two writes.
    ///
    /// # Errors
    /// A session that has no state to copy.
    fn fork(&self) -> Result<Box<dyn Session>> {
        Err(Error::Refused("this session cannot be copied".into()))
    }

    /// Tokens and state as bytes, for [`Lm::reopen`].
    ///
    /// # Errors
    /// A device failure.
    fn save(&self) -> Result<Vec<u8>> {
        Err(Error::Refused("this session cannot be saved".into()))
    }
}
