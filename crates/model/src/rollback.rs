//! Taking back tokens in place, bit for bit: what a rejected block of drafts leaves behind.
//!
//! Compressed entries and index keys are addressed by entry: the next tokens write over them, and nothing reads an entry
//! that is not yet visible. Window rings have more slots than a window, so that taking back as many tokens as the slack
//! finds every row of the window in place. The Engram history and the first tokens of ratio-2 groups are kept a slack
//! longer than forward needs them. Candidate blocks and selections live for one step only.

use ops::{Backend, Io, blocks::OpenGroup};

use crate::{Error, Global, Model, Result, State, compressor::Source, state};

/// The first token of a ratio-2 group that has been closed.
#[derive(Clone)]
pub(crate) struct Opened<T> {
    pub position: usize,
    pub group: OpenGroup<T>,
}

impl<B: Backend> Model<B> {
    /// Tokens that [`Model::truncate`] can take back at any time.
    pub fn slack(&self) -> usize {
        state::slack(self.config())
    }

    /// Goes back to `len` tokens, as if the later ones had never been: every step from there gives the same bits.
    ///
    /// Within [`Model::slack`] tokens this is always possible, and to no token at all. Further back only where
    /// [`State::oldest`] says so; what lies before needs a kept state ([`crate::Tail`]) or its tokens again.
    ///
    /// # Errors
    /// A length that the state cannot go back to.
    pub fn truncate(&self, state: &mut State<B>, len: usize) -> Result<()> {
        assert!(len <= state.len, "{len} tokens of {}", state.len);
        assert_eq!(state.decoded, state.len, "a replay ends before its tokens are taken back");
        assert!(state.is_whole() || len == 0, "a prefill ends before its tokens are taken back");
        if len == state.len {
            return Ok(());
        }
        if len < state.oldest && len > 0 {
            return Err(Error::Truncate { len, oldest: state.oldest });
        }
        if len == 0 {
            self.strip(state, 0);
            return Ok(());
        }
        state.history.truncate(state.history.len().saturating_sub(state.len - len));
        for global in state.globals.iter_mut().flatten() {
            global.open = None;
            if let Some(i) = global.opened.iter().position(|o| o.position + 1 >= len) {
                let opened = global.opened.split_off(i);
                global.open = opened.into_iter().next().filter(|o| o.position + 1 == len).map(|o| o.group);
            }
        }
        (state.len, state.decoded, state.published) = (len, len, len);
        Ok(())
    }

    /// Forgets everything but the entries of the first `entries` tokens, whatever the state went through: what
    /// [`Model::load_page`], [`Model::load_tail`] and [`Model::resume`] go on from. With none it is a new state.
    pub fn strip(&self, state: &mut State<B>, entries: usize) {
        assert!(entries <= state.published, "entries of {entries} tokens of {}", state.published);
        (state.len, state.decoded, state.oldest, state.origin, state.until) = (0, 0, 0, 0, 0);
        state.published = entries;
        state.history.clear();
        for global in state.globals.iter_mut().flatten() {
            global.open = None;
            global.opened.clear();
        }
    }

    /// Keeps the first tokens of the groups that a step closes, as far as a truncation can reach. `before` was open
    /// before the step.
    pub(crate) fn keep_opened(
        &self,
        source: &Source<B>,
        global: &mut Global<B>,
        before: Option<OpenGroup<B::Buf>>,
        x: &B::Buf,
        positions: &[u32],
    ) {
        let b = self.backend();
        let (start, end) = (positions[0] as usize, positions[0] as usize + positions.len());
        let oldest = end.saturating_sub(self.slack() + 1);
        global.opened.retain(|o| o.position >= oldest && o.position < start);
        if let Some(group) = before.filter(|_| start > oldest) {
            global.opened.push(Opened { position: start - 1, group });
        }
        // A row's projection does not depend on the rows beside it, so this gives the bits of the step itself.
        let first = start.max(oldest).next_multiple_of(2);
        let closed = (end - 1).saturating_sub(first);
        if closed > 0 {
            let rows = b.slice_rows(x, first - start, closed);
            let (kv, score) = source.project(b, &rows, Io::F32);
            for position in (first..first + closed).step_by(2) {
                let row = |t: &B::Buf| b.slice_rows(t, position - first, 1);
                let group = OpenGroup { kv: row(&kv), score: row(&score) };
                global.opened.push(Opened { position, group });
            }
        }
    }
}
