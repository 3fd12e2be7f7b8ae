//! Everything that outlives a step: the caches in their exact stored forms, open groups and the Engram history.

use checkpoint::{Config, Role};
use ops::{Backend, blocks::OpenGroup, engram::HistoryToken};

use crate::{DraftState, Error, Layout, Model, Result, rollback::Opened};

/// The state of one sequence: a value that a session owns.
///
/// A clone is a fork: it shares every buffer until one of the two writes to it. [`Model::truncate`] goes back a few
/// tokens in place; [`crate::Snapshot`] is the state as bytes.
pub struct State<B: Backend> {
    /// Tokens so far.
    pub(crate) len: usize,
    /// Tokens that fit.
    pub(crate) context: usize,
    /// Fewest tokens that a truncation can go back to: what it takes to go on from there is not kept below.
    pub(crate) oldest: usize,
    /// Tokens whose compressed entries are there. More than `len` only while a replay makes window rows anew.
    pub(crate) published: usize,
    /// Position below which no window row was ever made: where a bounded replay began.
    pub(crate) origin: usize,
    /// Tokens that the decoder layers have taken. Less than `len` only within a bounded replay.
    pub(crate) decoded: usize,
    /// End of a prefill that is under way, in tokens; 0 where none is.
    pub(crate) until: usize,
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
    /// Groups closed so lately that a truncation may open them again.
    pub(crate) opened: Vec<Opened<B::Buf>>,
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
        Self {
            kv: self.kv.clone(),
            keys: self.keys.clone(),
            open: self.open.clone(),
            opened: self.opened.clone(),
        }
    }
}

impl<B: Backend> State<B> {
    /// An empty state for at most `context` tokens of a model of configuration `c`, with rings for the draft stages
    /// or without.
    ///
    /// # Errors
    /// A context beyond the model's positions, or too little memory.
    pub fn new(b: &B, c: &Config, draft: bool, context: usize) -> Result<Self> {
        if context > c.max_position_embeddings {
            return Err(Error::Positions { context, max: c.max_position_embeddings });
        }
        let layout = Layout::of(c, draft);
        let ring = || b.cache(ring_slots(c), layout.ring_row);
        let rings = |n: usize| (0..n).map(|_| ring()).collect::<std::result::Result<Vec<_>, _>>();
        let mut globals = Vec::new();
        for l in 0..c.num_hidden_layers {
            let plan = c.layer(l);
            globals.push(match plan.role {
                Role::Full => Some(Global {
                    kv: b.cache(context / plan.ratio, layout.kv_row)?,
                    keys: b.cache(context / plan.ratio, layout.key_row)?,
                    open: None,
                    opened: Vec::new(),
                }),
                _ => None,
            });
        }
        Ok(Self {
            len: 0,
            context,
            oldest: 0,
            published: 0,
            origin: 0,
            decoded: 0,
            until: 0,
            windows: rings(c.num_hidden_layers)?,
            globals,
            history: Vec::new(),
            draft: if draft { Some(DraftState { rings: rings(c.dspark.stages)? }) } else { None },
        })
    }

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

    /// Fewest tokens that [`Model::truncate`] can go back to, other than none.
    pub fn oldest(&self) -> usize {
        self.oldest
    }

    /// Whether the state is that of its tokens, not one within a [`Model::prefill`].
    pub fn is_whole(&self) -> bool {
        self.until == 0
    }

    /// Moves the state behind a step that every layer has taken.
    pub(crate) fn advance_to(&mut self, end: usize, slack: usize) {
        self.len = end;
        self.decoded = end;
        self.published = self.published.max(end);
        self.oldest = self.oldest.max(end.saturating_sub(slack));
    }
}

/// Tokens that can be taken back in place: a block of drafts.
pub(crate) fn slack(config: &Config) -> usize {
    config.dspark.block_size
}

/// Slots of a window ring: the window and room for tokens that may be taken back.
pub(crate) fn ring_slots(config: &Config) -> usize {
    config.sliding_window + slack(config)
}

impl<B: Backend> Model<B> {
    /// An empty state for at most `context` tokens.
    ///
    /// # Errors
    /// A context beyond the model's positions, or too little memory.
    pub fn new_state(&self, context: usize) -> Result<State<B>> {
        State::new(self.backend(), self.config(), self.has_draft(), context)
    }

    /// Sizes of this model's states.
    pub fn layout(&self) -> Layout {
        Layout::of(self.config(), self.has_draft())
    }
}
