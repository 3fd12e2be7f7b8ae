//! Everything that outlives a step: the caches in their exact stored forms, open groups and the Engram history.

use checkpoint::{Config, Role};
use numerics::quantise::{fp4_row_bytes, fp8_row_bytes, kv_row_bytes};
use ops::{Backend, blocks::OpenGroup, engram::HistoryToken};

use crate::{DraftState, Error, Model, Result};

/// The state of one sequence. Owned by a session; cloning makes an independent copy.
pub struct State<B: Backend> {
    /// Tokens so far.
    pub(crate) len: usize,
    /// Tokens that fit.
    pub(crate) context: usize,
    /// One window ring a layer, slot = position mod slots.
    pub(crate) windows: Vec<B::Buf>,
    /// One compressed cache a KV source, by layer.
    pub(crate) globals: Vec<Option<Global<B>>>,
    /// The last compressed token ids, oldest first.
    pub(crate) history: Vec<HistoryToken>,
    /// Rings of the draft stages.
    pub(crate) draft: Option<DraftState<B>>,
}

/// The long-range cache that a KV source owns.
pub struct Global<B: Backend> {
    /// Entries as E2M1 with E4M3 scales.
    pub(crate) kv: B::Buf,
    /// Index keys as E2M1 with E8M0 scales.
    pub(crate) keys: B::Buf,
    /// A ratio-2 token that waits for its partner.
    pub(crate) open: Option<OpenGroup<B::Buf>>,
}

// Derived impls would ask for `B: Clone`, which a device is not.
impl<B: Backend> Clone for State<B> {
    fn clone(&self) -> Self {
        Self {
            windows: self.windows.clone(),
            globals: self.globals.clone(),
            history: self.history.clone(),
            draft: self.draft.clone(),
            ..*self
        }
    }
}

impl<B: Backend> Clone for Global<B> {
    fn clone(&self) -> Self {
        Self { kv: self.kv.clone(), keys: self.keys.clone(), open: self.open.clone() }
    }
}

impl<B: Backend> State<B> {
    /// Tokens so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token was taken yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that fit.
    pub fn context(&self) -> usize {
        self.context
    }
}

/// Slots of a window ring: the window and room for a block of drafts that may be taken back.
pub(crate) fn ring_slots(config: &Config) -> usize {
    config.sliding_window + config.dspark.block_size
}

impl<B: Backend> Model<B> {
    /// An empty state for at most `context` tokens.
    ///
    /// # Errors
    /// A context beyond the model's positions, or too little memory.
    pub fn new_state(&self, context: usize) -> Result<State<B>> {
        let (b, c) = (self.backend(), self.config());
        if context > c.max_position_embeddings {
            return Err(Error::Positions { context, max: c.max_position_embeddings });
        }
        let ring = || b.cache(ring_slots(c), fp8_row_bytes(c.head_dim));
        let mut globals = Vec::new();
        for l in 0..c.num_hidden_layers {
            let plan = c.layer(l);
            globals.push(match plan.role {
                Role::Full => Some(Global {
                    kv: b.cache(context / plan.ratio, kv_row_bytes(c.head_dim))?,
                    keys: b.cache(context / plan.ratio, fp4_row_bytes(c.index_head_dim))?,
                    open: None,
                }),
                _ => None,
            });
        }
        let windows = (0..c.num_hidden_layers).map(|_| ring()).collect::<std::result::Result<_, _>>()?;
        let draft = if self.has_draft() {
            let rings = (0..c.dspark.stages).map(|_| ring()).collect::<std::result::Result<_, _>>()?;
            Some(DraftState { rings })
        } else {
            None
        };
        Ok(State { len: 0, context, windows, globals, history: Vec::new(), draft })
    }
}
