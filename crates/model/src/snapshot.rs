//! States as values in host memory: pages of entries, window tails, whole snapshots.

use ops::{Backend, Host, blocks::OpenGroup, engram::HistoryToken};

use crate::{
    DraftState, Error, Layout, Model, Result, State,
    sealed::{Kind, Parsed, Reader, Unsealed, Writer, seal, unseal},
};

/// The compressed entries and index keys of a run of tokens, as stored. They depend on those tokens and all before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    first: usize,
    tokens: usize,
    /// Entries and then keys of each KV source, in layer order.
    bytes: Vec<u8>,
}

impl Page {
    /// Position of the first token.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes of the entries.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether the tokens complete no entry.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Appends the page's contents.
    pub fn write(&self, out: &mut Writer) {
        out.size(self.first).size(self.tokens).bytes(&self.bytes);
    }

    /// Reads what [`Page::write`] wrote.
    ///
    /// # Errors
    /// Contents that are no page of this layout.
    pub fn read(layout: &Layout, from: &mut Reader<'_>) -> Parsed<Self> {
        let (first, tokens) = (from.size()?, from.size()?);
        let bytes = from.bytes()?;
        let fits = first.is_multiple_of(2) && first.checked_add(tokens).is_some_and(|end| end < 1 << 32);
        if !fits || bytes.len() != layout.entry_bytes(first, tokens) {
            return Err(Unsealed::Field("page"));
        }
        Ok(Self { first, tokens, bytes: bytes.to_vec() })
    }
}

/// What a state holds beside its entries, at one length: the rows of all windows, open groups, the Engram history. Of the
/// same size whatever the length.
#[derive(Clone, Debug, PartialEq)]
pub struct Tail {
    len: usize,
    /// Compressed tokens, oldest first.
    history: Vec<HistoryToken>,
    /// Rows of the last window of positions, ring by ring.
    windows: Vec<u8>,
    /// At an odd length value and gate projections of the open groups, by source.
    open: Vec<f32>,
}

impl Tail {
    /// Tokens of the state.
    pub fn position(&self) -> usize {
        self.len
    }

    /// Bytes in memory, about.
    pub fn len(&self) -> usize {
        self.windows.len() + 4 * self.open.len() + 8 * self.history.len()
    }

    /// Whether the state has no token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends the tail's contents.
    pub fn write(&self, out: &mut Writer) {
        out.size(self.len).size(self.history.len());
        // A token of an image span has no id.
        self.history.iter().for_each(|t| out.word(t.unwrap_or(u32::MAX)));
        out.bytes(&self.windows).size(self.open.len());
        self.open.iter().for_each(|v| out.word(v.to_bits()));
    }

    /// Reads what [`Tail::write`] wrote.
    ///
    /// # Errors
    /// Contents that are no tail of this layout.
    pub fn read(layout: &Layout, from: &mut Reader<'_>) -> Parsed<Self> {
        let len = from.size()?;
        if from.size()? != layout.history.min(len) {
            return Err(Unsealed::Field("history"));
        }
        let token = |w: u32| (w != u32::MAX).then_some(w);
        let history = (0..layout.history.min(len)).map(|_| from.word().map(token)).collect::<Parsed<_>>()?;
        let windows = from.bytes()?;
        if windows.len() != layout.window_bytes(len) {
            return Err(Unsealed::Field("windows"));
        }
        let open = if len % 2 == 1 { layout.open_bytes() / 4 } else { 0 };
        if from.size()? != open {
            return Err(Unsealed::Field("open groups"));
        }
        let windows = windows.to_vec();
        let open = (0..open).map(|_| from.word().map(f32::from_bits)).collect::<Parsed<_>>()?;
        Ok(Self { len, history, windows, open })
    }
}

/// A whole state in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// All entries.
    pub entries: Page,
    /// All else.
    pub tail: Tail,
}

impl Snapshot {
    /// The snapshot as bytes, with a version, the model's `identity` ([`Model::identity`]) and a checksum.
    pub fn to_bytes(&self, identity: &[u8; 32]) -> Vec<u8> {
        let mut out = Writer::default();
        self.tail.write(&mut out);
        self.entries.write(&mut out);
        seal(Kind::State, identity, &out)
    }

    /// Reads a snapshot of the model of this `identity` and `layout`.
    ///
    /// # Errors
    /// Bytes that are damaged, of another version or of another model.
    pub fn from_bytes(bytes: &[u8], identity: &[u8; 32], layout: &Layout) -> Result<Self> {
        let mut from = unseal(bytes, Kind::State, identity)?;
        let tail = Tail::read(layout, &mut from)?;
        let entries = Page::read(layout, &mut from)?;
        from.end()?;
        if entries.first != 0 || entries.tokens != tail.len {
            return Err(Unsealed::Field("page").into());
        }
        Ok(Self { entries, tail })
    }
}

impl<B: Backend> State<B> {
    /// As [`Model::load_page`], for a state of `layout` without a model.
    ///
    /// # Errors
    /// A page beyond the context, or a device failure.
    pub fn load_page(&mut self, b: &B, layout: &Layout, page: &Page, end: usize) -> Result<()> {
        assert!(self.len == 0 && self.published == page.first, "pages follow each other");
        let end = end.min(page.first + page.tokens);
        if end > self.context {
            return Err(Error::Context { need: end, context: self.context });
        }
        let mut bytes = page.bytes.as_slice();
        for (global, ratio) in self.globals.iter_mut().flatten().zip(&layout.ratios) {
            let start = page.first / ratio;
            let (has, take) = ((page.first + page.tokens) / ratio - start, (end / ratio).max(start) - start);
            for (cache, width) in [(&mut global.kv, layout.kv_row), (&mut global.keys, layout.key_row)] {
                let (rows, rest) = bytes.split_at(has * width);
                bytes = rest;
                if take > 0 {
                    // A cache has a row for every entry, so an entry's number is its slot.
                    let entries: Vec<u32> = (start..start + take).map(|j| j as u32).collect();
                    let rows = b.upload(&Host::u8(&[take, width], rows[..take * width].to_vec()))?;
                    b.ring_write(cache, &rows, &entries);
                }
            }
        }
        self.published = end.max(page.first);
        Ok(())
    }
}

impl<B: Backend> Model<B> {
    /// Copies the entries of tokens `first..first + tokens`, `first` being even, to host memory.
    ///
    /// # Errors
    /// A device failure.
    pub fn page(&self, state: &State<B>, first: usize, tokens: usize) -> Result<Page> {
        assert!(first.is_multiple_of(2) && first + tokens <= state.published, "{first}+{tokens}");
        let b = self.backend();
        let mut bytes = Vec::with_capacity(self.layout().entry_bytes(first, tokens));
        for (global, ratio) in state.globals.iter().flatten().zip(&self.layout().ratios) {
            let (start, end) = (first / ratio, (first + tokens) / ratio);
            if end > start {
                for cache in [&global.kv, &global.keys] {
                    bytes.extend_from_slice(b.read(&b.slice_rows(cache, start, end - start))?.as_u8());
                }
            }
        }
        Ok(Page { first, tokens, bytes })
    }

    /// Copies what the state holds beside its entries to host memory.
    ///
    /// # Errors
    /// A device failure.
    pub fn tail(&self, state: &State<B>) -> Result<Tail> {
        let whole = state.published == state.len && state.decoded == state.len && state.is_whole();
        assert!(whole, "a replay or a prefill is not over");
        let (b, layout, len) = (self.backend(), self.layout(), state.len);
        let mut windows = Vec::with_capacity(layout.window_bytes(len));
        for ring in rings(state) {
            let host = b.read(ring)?;
            for p in len.saturating_sub(layout.window)..len {
                windows.extend_from_slice(host.code_row(p % host.rows()));
            }
        }
        let mut open = Vec::new();
        for group in state.globals.iter().flatten().filter_map(|g| g.open.as_ref()) {
            for part in [&group.kv, &group.score] {
                open.extend_from_slice(b.read(part)?.as_f32());
            }
        }
        let drop = state.history.len().saturating_sub(layout.history);
        Ok(Tail { len, history: state.history[drop..].to_vec(), windows, open })
    }

    /// Copies the whole state to host memory.
    ///
    /// # Errors
    /// A device failure.
    pub fn snapshot(&self, state: &State<B>) -> Result<Snapshot> {
        Ok(Snapshot { entries: self.page(state, 0, state.len)?, tail: self.tail(state)? })
    }

    /// A state for at most `context` tokens from a snapshot of this model.
    ///
    /// # Errors
    /// A snapshot longer than the context, or a device failure.
    pub fn restore(&self, snapshot: &Snapshot, context: usize) -> Result<State<B>> {
        let mut state = self.new_state(context)?;
        self.load_page(&mut state, &snapshot.entries, snapshot.tail.len)?;
        self.load_tail(&mut state, &snapshot.tail)?;
        Ok(state)
    }

    /// Puts the entries of a page, those of tokens before `end`, behind the entries of a state without window rows.
    ///
    /// # Errors
    /// A page beyond the context, or a device failure.
    pub fn load_page(&self, state: &mut State<B>, page: &Page, end: usize) -> Result<()> {
        state.load_page(self.backend(), &self.layout(), page, end)
    }

    /// Completes a state that has the entries of all the tail's tokens.
    ///
    /// # Errors
    /// A device failure.
    pub fn load_tail(&self, state: &mut State<B>, tail: &Tail) -> Result<()> {
        assert!(state.len == 0 && state.published == tail.len, "a tail of {} tokens", tail.len);
        let (b, layout, len) = (self.backend(), self.layout(), tail.len);
        let positions: Vec<u32> = (len.saturating_sub(layout.window)..len).map(|p| p as u32).collect();
        let bytes = positions.len() * layout.ring_row;
        if bytes > 0 {
            for (ring, rows) in rings_mut(state).zip(tail.windows.chunks(bytes)) {
                let rows = b.upload(&Host::u8(&[positions.len(), layout.ring_row], rows.to_vec()))?;
                b.ring_write(ring, &rows, &positions);
            }
        }
        let d = layout.open_values;
        let mut parts = tail.open.chunks(d);
        for (global, _) in state.globals.iter_mut().flatten().zip(&layout.ratios).filter(|(_, r)| **r == 2) {
            if let (Some(kv), Some(score)) = (parts.next(), parts.next()) {
                let row = |v: &[f32]| b.upload(&Host::f32(&[1, d], v.to_vec()));
                global.open = Some(OpenGroup { kv: row(kv)?, score: row(score)? });
            }
        }
        state.history = tail.history.clone();
        (state.len, state.decoded, state.oldest) = (len, len, len);
        Ok(())
    }
}

/// All rings: the backbone's by layer, then the draft stages'.
fn rings<B: Backend>(state: &State<B>) -> impl Iterator<Item = &B::Buf> {
    let stages: &[B::Buf] = state.draft.as_ref().map_or(&[], |d| &d.rings);
    state.windows.iter().chain(stages)
}

fn rings_mut<B: Backend>(state: &mut State<B>) -> impl Iterator<Item = &mut B::Buf> {
    let stages: &mut [B::Buf] = match &mut state.draft {
        Some(DraftState { rings }) => rings,
        None => &mut [],
    };
    state.windows.iter_mut().chain(stages)
}
