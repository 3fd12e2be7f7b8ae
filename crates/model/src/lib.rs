//! The DeepSeek-V4.1-Flash graph [§0]: one file a part, generic over the backend.
//!
//! [`Model`] holds the weights and never changes; everything that outlives a step lives in [`State`]. Images are not
//! built: [`Input::image`] and [`Input::embeddings`] exist so that the text model's handling of image spans (the other
//! routing bias, dead n-grams) can be tested against goldens.

mod attention;
mod compressor;
mod dspark;
mod engram;
mod error;
mod forced;
mod head;
mod hyper;
mod identity;
mod indexer;
mod layer;
mod layout;
mod load;
mod moe;
mod prefill;
mod replay;
mod rollback;
pub mod sealed;
mod snapshot;
mod state;
mod streamed;
#[cfg(test)]
mod tests;

pub use dspark::{Draft, DraftState};
pub use error::Error;
pub use forced::Walk;
pub use layout::Layout;
pub use load::Weights;
pub use replay::Waiting;
pub use snapshot::{Page, Snapshot, Tail};
pub use state::{Global, State};
pub use streamed::{Saved, Streamed};

use checkpoint::Config;
use ops::{Backend, Host, RopeTable, Taps, blocks::HeadWeights};

use crate::{engram::Hasher, indexer::Selection, layer::Layer};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The weights and constants of a model on a backend.
pub struct Model<B: Backend> {
    backend: B,
    config: Config,
    embed: B::Mat,
    layers: Vec<Layer<B>>,
    head: HeadWeights<B>,
    ropes: Ropes,
    hasher: Hasher,
    draft: Option<dspark::DraftWeights<B>>,
    identity: [u8; 32],
}

/// The two rotary tables: ratio-0 layers take the plain one.
struct Ropes {
    plain: RopeTable,
    yarn: RopeTable,
}

impl Ropes {
    fn of(&self, ratio: usize) -> &RopeTable {
        if ratio == 0 { &self.plain } else { &self.yarn }
    }
}

/// The tokens of one step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Input<'a> {
    /// Token ids, at least one.
    pub ids: &'a [u32],
    /// Rows inside an image span; empty for text.
    pub image: &'a [bool],
    /// Rows that replace the embedding of a token, by row.
    pub embeddings: &'a [(usize, Vec<f32>)],
}

impl<'a> Input<'a> {
    /// Text tokens.
    pub fn text(ids: &'a [u32]) -> Self {
        Self { ids, ..Self::default() }
    }
}

/// Rows of a step whose logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// None: the step fills the caches.
    None,
    /// The last row.
    Last,
    /// Every row.
    All,
}

/// What a step gives.
pub struct Output<B: Backend> {
    /// Final hidden state after the norm, `[rows, d]`.
    pub hidden: B::Buf,
    /// Logits, `[rows, V]`.
    pub logits: B::Buf,
}

/// What the layers of one step share.
struct Step<'a, B: Backend> {
    positions: &'a [u32],
    /// Position below which no window row exists for the step; above 0 only where the step begins there.
    origin: u32,
    image: &'a [bool],
    selection: Selection<B>,
}

impl<B: Backend> Model<B> {
    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Hash of everything that a state's bytes depend on: kept states of another identity are refused.
    pub fn identity(&self) -> &[u8; 32] {
        &self.identity
    }

    /// Whether the checkpoint has the DSpark draft stages.
    pub fn has_draft(&self) -> bool {
        self.draft.is_some()
    }

    /// Runs all layers on `input` at the state's position and moves the state behind it.
    ///
    /// # Errors
    /// A token id outside the vocabulary, a step that does not fit the state's context (the state is unchanged), or a
    /// device failure (the state is then unusable).
    pub fn forward(
        &self,
        state: &mut State<B>,
        input: Input<'_>,
        rows: Rows,
        taps: &mut Taps<'_, B::Buf>,
    ) -> Result<Option<Output<B>>> {
        assert_eq!(state.decoded, state.len, "a bounded replay ends before other steps");
        assert!(state.is_whole(), "a prefill ends before other steps");
        let mut walk = self.start(state, input)?;
        while self.advance(&mut walk, state, taps)? {}
        self.finish(walk, state, rows, taps)
    }

    fn check(&self, state: &State<B>, input: Input<'_>) -> Result<()> {
        let vocab = self.config.vocab_size;
        if let Some(id) = input.ids.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::Token { id: *id, vocab });
        }
        let need = state.len + input.ids.len();
        if need > state.context {
            return Err(Error::Context { need, context: state.context });
        }
        assert!(!input.ids.is_empty(), "a step has at least one token");
        assert!(input.image.is_empty() || input.image.len() == input.ids.len(), "one image flag a token");
        Ok(())
    }

    fn embedded(&self, input: Input<'_>) -> Result<B::Buf> {
        let x = self.backend.embed(&self.embed, input.ids);
        if input.embeddings.is_empty() {
            return Ok(x);
        }
        let host = self.backend.read(&x)?;
        let mut values = host.as_f32().to_vec();
        let d = host.width();
        for (row, embedding) in input.embeddings {
            values[row * d..][..d].copy_from_slice(embedding);
        }
        Ok(self.backend.upload(&Host::f32(host.shape(), values))?)
    }
}
