//! The rows that each layer leaves out of a prefill because nothing depends on them.
//!
//! Behind the last KV source a layer passes on no more than its window rows: the last layer's query of the last token
//! reaches one window back, the layer before two windows, and so on. What lies before these rows in such a layer is
//! never read, neither by the rest of the prefill nor by what comes after it, so it isn't computed. By row invariance all
//! bits of what is computed stay as they are.

use ops::{Backend, Taps};

use crate::{Input, Model, Output, Result, Rows, State, forced::Walk, layer::Layer};

impl<B: Backend> Model<B> {
    /// One step of a prefill that ends when the state has `end` tokens: [`Model::forward`] without the rows that nothing
    /// reads from there on. Until the end the state may be used for further steps to this end and for its entries
    /// ([`Model::page`]), for nothing else.
    ///
    /// # Errors
    /// Those of [`Model::forward`].
    pub fn prefill(
        &self,
        state: &mut State<B>,
        input: Input<'_>,
        end: usize,
        rows: Rows,
    ) -> Result<Option<Output<B>>> {
        let step = state.len..state.len + input.ids.len();
        assert!(step.end <= end && (state.until == end || state.is_whole()), "a prefill to {end} tokens");
        assert!(
            rows == Rows::None || (rows == Rows::Last && step.end == end),
            "a prefill's last row at most"
        );
        assert_eq!(state.decoded, state.len, "a bounded replay ends before other steps");
        let mut walk = self.start(state, input)?;
        walk.lows = self.lows(step.start, end, state.published);
        let taps = &mut Taps::off();
        while self.advance(&mut walk, state, taps)? {}
        let out = self.finish(walk, state, rows, taps)?;
        state.until = if step.end < end { end } else { 0 };
        Ok(out)
    }

    /// The first position that each layer takes on the way from `start` to `end` tokens, where the entries of the first
    /// `published` are there.
    pub(crate) fn lows(&self, start: usize, end: usize, published: usize) -> Vec<usize> {
        let window = self.config().sliding_window;
        // Rings hold a slack more than a window, so that tokens can be taken back.
        let mut low = end.saturating_sub(window + self.slack());
        let mut lows = vec![0; self.layers.len()];
        for (l, layer) in self.layers.iter().enumerate().rev() {
            // Groups of two begin at even positions.
            let mut own = low / 2 * 2;
            // The rows that must be right in the input: for the windows, and for entries that are not there yet.
            let mut exact = own;
            if layer.source.is_some() && published < own {
                let first = published / 2 * 2;
                if self.config().layer(l).ratio == 2 {
                    own = first;
                }
                exact = first;
            }
            lows[l] = own.max(start);
            low = exact.saturating_sub(window - 1);
        }
        lows
    }

    /// Drops the rows of a step before the first that the next layer takes, after their entries are published; `false`
    /// where no row is left.
    pub(crate) fn trim(&self, walk: &mut Walk<B>, state: &mut State<B>, l: usize) -> Result<bool> {
        let Some(low) = walk.lows.get(l) else { return Ok(true) };
        let first = walk.positions()[0] as usize;
        let skip = low.saturating_sub(first).min(walk.positions().len());
        if skip == 0 {
            return Ok(true);
        }
        let layer = &self.layers[l];
        let end = first + walk.positions().len();
        // A ratio-2 source drops rows whose entries are there, no others.
        if layer.source.is_some() && self.config().layer(l).ratio == 1 && state.published < end {
            self.publish_ahead(layer, l, walk, state)?;
            state.published = end;
        }
        walk.cut(self.backend(), skip);
        Ok(!walk.positions().is_empty())
    }

    /// The entries of a KV source, which need the rows of its input and nothing else of the layer.
    pub(crate) fn publish_ahead(
        &self,
        layer: &Layer<B>,
        l: usize,
        walk: &Walk<B>,
        state: &mut State<B>,
    ) -> Result<()> {
        let (b, taps) = (self.backend(), &mut Taps::off());
        let streams = match &layer.engram {
            Some(engram) => self.engram(engram, &walk.streams, &walk.tokens, &walk.image, taps)?,
            None => walk.streams.clone(),
        };
        let (_, x) = b.sublayer_input(&streams, &walk.pre, &layer.attn_in, taps);
        if let (Some(source), Some(global)) = (&layer.source, &mut state.globals[l]) {
            let ratio = self.config().layer(l).ratio;
            self.publish(source, global, ratio, &x, walk.positions(), state.published, taps);
        }
        Ok(())
    }
}
