//! A step taken layer by layer, so that a caller can look at the streams between layers or replace them.
//!
//! [`Model::forward`] is this walk without stops. Qualification feeds each layer the reference's streams
//! (teacher forcing) and advances several sequences together, so that only one layer's weights are read at a time.

use ops::{Backend, Host, Taps};

use crate::{
    Input, Model, Output, Result, Rows, State, Step, engram::Tokens, indexer::Selection, layer::Layer,
};

/// A step between two layers.
pub struct Walk<B: Backend> {
    /// What the next layer reads, `[T, 4, d]`.
    pub streams: B::Buf,
    /// Weights of the next layer's input, `[T, 4]`.
    pub pre: B::Buf,
    positions: Vec<u32>,
    pub(crate) image: Vec<bool>,
    pub(crate) tokens: Tokens,
    pub(crate) selection: Selection<B>,
    features: Vec<B::Buf>,
    pub(crate) layer: usize,
    origin: u32,
    /// Tokens of the state behind the step.
    pub(crate) end: usize,
    /// The first position that each layer takes; empty where all take all.
    pub(crate) lows: Vec<usize>,
}

impl<B: Backend> Walk<B> {
    /// Rows at `first` that have come as far as layer `layer`.
    pub(crate) fn at(
        layer: usize,
        first: usize,
        streams: B::Buf,
        pre: B::Buf,
        image: Vec<bool>,
        tokens: Tokens,
        origin: u32,
    ) -> Self {
        let end = first + image.len();
        let positions = (first..end).map(|p| p as u32).collect();
        let (selection, features, lows) = (Selection::default(), Vec::new(), Vec::new());
        Self { streams, pre, positions, image, tokens, selection, features, layer, origin, end, lows }
    }

    /// Drops the first `skip` rows. No window row exists before the first that stays.
    pub(crate) fn cut(&mut self, b: &B, skip: usize) {
        self.positions.drain(..skip);
        self.image.drain(..skip);
        let Some(first) = self.positions.first() else { return };
        self.origin = *first;
        let left = self.positions.len();
        let rows = |x: &B::Buf| b.slice_rows(x, skip, left);
        (self.streams, self.pre) = (rows(&self.streams), rows(&self.pre));
        self.tokens.cut(skip);
        self.selection.cut(rows);
    }

    /// The layer that comes next; the number of layers when all are done.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Positions of the rows.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }
}

impl<B: Backend> Model<B> {
    /// Embeds the tokens of a step at the state's position.
    ///
    /// # Errors
    /// Those of [`Model::forward`].
    pub fn start(&self, state: &mut State<B>, input: Input<'_>) -> Result<Walk<B>> {
        self.check(state, input)?;
        let b = self.backend();
        let t = input.ids.len();
        let image = if input.image.is_empty() { vec![false; t] } else { input.image.to_vec() };
        let tokens = self.hasher.push(&mut state.history, input.ids, &image);
        let streams = b.replicate(&self.embedded(input)?, self.config.hc_mult);
        let pre = b.upload(&Host::f32(&[t, 4], [1.0, 0.0, 0.0, 0.0].repeat(t)))?;
        let origin = if state.len == state.origin { state.len as u32 } else { 0 };
        Ok(Walk::at(0, state.len, streams, pre, image, tokens, origin))
    }

    /// Runs the next layer; `false` when none is left.
    ///
    /// # Errors
    /// A device failure; the state is then unusable.
    pub fn advance(
        &self,
        walk: &mut Walk<B>,
        state: &mut State<B>,
        taps: &mut Taps<'_, B::Buf>,
    ) -> Result<bool> {
        let l = walk.layer;
        let Some(layer) = self.layers.get(l) else { return Ok(false) };
        let _span = tracing::info_span!("layer", layer = l, rows = walk.positions.len()).entered();
        if !self.trim(walk, state, l)? {
            walk.layer = self.layers.len();
            return Ok(false);
        }
        self.take(layer, l, walk, state, taps)?;
        Ok(true)
    }

    /// Runs `layer`, which is number `l`, on the walk.
    pub(crate) fn take(
        &self,
        layer: &Layer<B>,
        l: usize,
        walk: &mut Walk<B>,
        state: &mut State<B>,
        taps: &mut Taps<'_, B::Buf>,
    ) -> Result<()> {
        taps.set_prefix(format!("layers.{l}."));
        let selection = std::mem::take(&mut walk.selection);
        let mut step =
            Step { positions: &walk.positions, origin: walk.origin, image: &walk.image, selection };
        let streams = match &layer.engram {
            Some(engram) => self.engram(engram, &walk.streams, &walk.tokens, &walk.image, taps)?,
            None => walk.streams.clone(),
        };
        // The input of the block: where a target layer has Engram, its memory is in already.
        if self.draft.is_some() && self.config.dspark.target_layer_ids.contains(&l) {
            walk.features.push(self.backend.stream_mean(&streams));
        }
        (walk.streams, walk.pre) = self.layer(layer, l, streams, walk.pre.clone(), state, &mut step, taps)?;
        walk.selection = step.selection;
        walk.layer = l + 1;
        taps.put("streams", &walk.streams);
        taps.put("pre_mix", &walk.pre);
        taps.set_prefix(String::new());
        Ok(())
    }

    /// Moves the state behind the step and computes the head for the wanted rows.
    ///
    /// # Errors
    /// A device failure; the state is then unusable.
    pub fn finish(
        &self,
        walk: Walk<B>,
        state: &mut State<B>,
        rows: Rows,
        taps: &mut Taps<'_, B::Buf>,
    ) -> Result<Option<Output<B>>> {
        assert_eq!(walk.layer, self.config.num_hidden_layers, "all layers come before the head");
        let b = self.backend();
        let t = walk.positions.len();
        state.advance_to(walk.end, self.slack());
        if t == 0 {
            return Ok(None);
        }
        if let (Some(draft), Some(ring)) = (&self.draft, &mut state.draft) {
            let last = |f: &B::Buf| b.slice_rows(f, b.shape(f)[0] - t, t);
            let features: Vec<B::Buf> = walk.features.iter().map(last).collect();
            self.seed_draft(draft, ring, &features, &walk.positions);
        }
        let (first, count) = match rows {
            Rows::None => return Ok(None),
            Rows::Last => (t - 1, 1),
            Rows::All => (0, t),
        };
        let cut = |x: &B::Buf| if count == t { x.clone() } else { b.slice_rows(x, first, count) };
        let (hidden, logits) = b.head(&cut(&walk.streams), &cut(&walk.pre), &self.head);
        taps.put("final_hidden", &hidden);
        taps.put("logits", &logits);
        Ok(Some(Output { hidden, logits }))
    }
}
