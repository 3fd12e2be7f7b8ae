//! Replay: prefill with less than every layer on every token, and window rows made anew from kept entries [§6].
//!
//! The decoder (the candidate source's layer and all after it) reads long-range entries that its first layer makes from
//! its input alone. *Bounded replay* therefore runs the encoder on all tokens and the decoder on the last window of them
//! only, where a token sees no window row from before: exact up to one window of tokens, an approximation beyond.
//!
//! Entries without window rows, as a prefix cache keeps them, are continued in one of two ways. The exact one recomputes
//! the tokens that the window rows depend on through all layers, [`Model::cone`] of them at most: bit for bit the state
//! of a whole prefill. The bounded one runs one window of tokens through the encoder.

use ops::{Backend, Taps, engram::HistoryToken};

use crate::{Error, Input, Model, Output, Result, Rows, State, engram::Tokens, forced::Walk};

/// Rows of a bounded replay that wait for the decoder.
pub struct Waiting<B: Backend> {
    /// Position of the first row.
    first: usize,
    /// What the decoder's first layer reads, and the weights of its input.
    rows: Option<(B::Buf, B::Buf)>,
    image: Vec<bool>,
    /// Compressed tokens of the rows, after those that their n-grams reach.
    tokens: Vec<HistoryToken>,
}

impl<B: Backend> Default for Waiting<B> {
    fn default() -> Self {
        Self { first: 0, rows: None, image: Vec::new(), tokens: Vec::new() }
    }
}

impl<B: Backend> Model<B> {
    /// First layer of the decoder.
    fn decoder(&self) -> usize {
        self.config().candidate_source_layer_id
    }

    /// Refuses bounded replay where the decoder does not stand on its first layer's entries alone.
    ///
    /// # Errors
    /// The reason.
    pub fn check_replay(&self) -> Result<()> {
        let (c, first) = (self.config(), self.decoder());
        let refuse = |why: String| Err(Error::Replay(why));
        if c.layer(first).ratio != 1 {
            return refuse(format!("compress_ratios[{first}] of the candidate source is not 1"));
        }
        if let Some(l) = c.kv_source_layer_ids.iter().find(|l| **l > first) {
            return refuse(format!(
                "kv_source_layer_ids names layer {l} behind the candidate source {first}"
            ));
        }
        match c.dspark.target_layer_ids.iter().find(|l| self.has_draft() && **l < first) {
            Some(l) => refuse(format!("dspark_target_layer_ids names layer {l} of the encoder")),
            None => Ok(()),
        }
    }

    /// Takes `input` through the encoder and publishes its decoder's entries; the last window of rows waits.
    /// [`Model::decode`] ends the replay; until then nothing else may be done with the state.
    ///
    /// # Errors
    /// Those of [`Model::forward`] and of [`Model::check_replay`].
    pub fn encode(&self, state: &mut State<B>, waiting: &mut Waiting<B>, input: Input<'_>) -> Result<()> {
        self.check_replay()?;
        let (b, decoder, window) = (self.backend(), self.decoder(), self.config().sliding_window);
        let mut walk = self.start(state, input)?;
        let taps = &mut Taps::off();
        while walk.layer() < decoder {
            self.advance(&mut walk, state, taps)?;
        }
        self.publish_ahead(&self.layers[decoder], decoder, &walk, state)?;

        let t = input.ids.len();
        let (mut streams, mut pre) = (walk.streams, walk.pre);
        if let Some((s, p)) = waiting.rows.take() {
            (streams, pre) = (b.concat_rows(&s, &streams), b.concat_rows(&p, &pre));
        } else {
            waiting.first = state.len;
            waiting.tokens = walk.tokens.before().to_vec();
        }
        waiting.image.extend(walk.image);
        waiting.tokens.extend(walk.tokens.step());
        let drop = waiting.image.len().saturating_sub(window);
        if drop > 0 {
            streams = b.slice_rows(&streams, drop, window);
            pre = b.slice_rows(&pre, drop, window);
            waiting.image.drain(..drop);
            let reach = waiting.image.len() + self.config().engram.max_ngram_size - 1;
            waiting.tokens.drain(..waiting.tokens.len().saturating_sub(reach));
            waiting.first += drop;
        }
        waiting.rows = Some((streams, pre));
        state.len += t;
        state.published = state.published.max(state.len);
        Ok(())
    }

    /// Takes the waiting rows through the decoder, those apart that it has taken before, and gives the head for the
    /// wanted ones. With nothing waiting there is nothing to do.
    ///
    /// # Errors
    /// A device failure; the state is then unusable.
    pub fn decode(&self, state: &mut State<B>, waiting: Waiting<B>, rows: Rows) -> Result<Option<Output<B>>> {
        let Some((mut streams, mut pre)) = waiting.rows else { return Ok(None) };
        let b = self.backend();
        let end = state.len;
        let start = state.decoded.max(waiting.first);
        let skip = start - waiting.first;
        if skip > 0 {
            streams = b.slice_rows(&streams, skip, end - start);
            pre = b.slice_rows(&pre, skip, end - start);
        }
        // Where tokens were left out before, the decoder's windows begin at the first row.
        let cut = start > state.decoded;
        let tokens = Tokens::new(waiting.tokens, end - start);
        let origin = if cut { start as u32 } else { 0 };
        let image = waiting.image[skip..].to_vec();
        let mut walk = Walk::at(self.decoder(), start, streams, pre, image, tokens, origin);
        let taps = &mut Taps::off();
        while self.advance(&mut walk, state, taps)? {}
        let out = self.finish(walk, state, rows, taps)?;
        if cut {
            state.oldest = end;
        }
        Ok(out)
    }

    /// Tokens before a position that its window rows depend on through all layers, as far as kept entries do not stand
    /// for them. Even, so that ratio-2 groups stay whole.
    pub fn cone(&self) -> usize {
        let c = self.config();
        let window = c.sliding_window;
        (window + (c.num_hidden_layers - 1) * (window - 1)).next_multiple_of(2)
    }

    /// Puts a state that has entries but no window rows ([`Model::load_page`]) at token `from`, an even number, behind
    /// the tokens `before` (those that n-grams reach at least, or all). The tokens from there to the last entry are to be
    /// taken again; they find their entries in place and make window rows only.
    ///
    /// With `exact` they go through [`Model::forward`], [`Model::cone`] of them at least or all; without it through
    /// [`Model::encode`], a window of them in one step, which sees no window row from before.
    pub fn resume(&self, state: &mut State<B>, before: &[u32], exact: bool) {
        let from = before.len();
        assert!(
            state.len == 0 && from <= state.published && from.is_multiple_of(2),
            "entries without window rows"
        );
        self.hasher.push(&mut state.history, before, &vec![false; from]);
        (state.len, state.decoded) = (from, from);
        state.origin = if exact { 0 } else { from };
        state.oldest = state.published;
    }
}
