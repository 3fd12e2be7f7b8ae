//! The session of one backend: a state, its tokens, and the ways to get from one to another.

use std::{ops::ControlFlow, sync::Arc};

use checkpoint::{Config, engram::TableStats};
use model::{
    Input, Layout, Model, Rows, Snapshot, State, Waiting,
    sealed::{Kind, Writer, seal, unseal},
};
use ops::{Backend, Mode, Taps};

use crate::{
    CacheOptions, Drafted, Error, Lm, Miss, Prefill, PrefixCache, Result, Reuse, Session, SessionOptions,
    Speculation, Stopped,
    cache::{Offer, PAGE},
    memory::Promise,
    plan,
    plan::state_bytes,
};

/// Tokens of one prefill step. Bounds the memory of activations; by row invariance it changes no bit.
pub(crate) const CHUNK: usize = 512;

/// Kept states tried for one prompt.
const ATTEMPTS: usize = 16;

/// Bytes that a session without a shared cache keeps.
const OWN_CACHE: u64 = 256 << 20;

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

    fn identity(&self) -> [u8; 32] {
        *Model::identity(self)
    }

    fn layout(&self) -> Layout {
        Model::layout(self)
    }

    fn draft_block(&self) -> usize {
        if self.has_draft() { Model::config(self).dspark.block_size } else { 0 }
    }

    fn engram(&self) -> Vec<TableStats> {
        self.engram_stats()
    }

    fn open(self: Arc<Self>, options: SessionOptions) -> Result<Box<dyn Session>> {
        Ok(Box::new(Sequence::new(self, options)?))
    }

    fn reopen(self: Arc<Self>, bytes: &[u8], options: SessionOptions) -> Result<Box<dyn Session>> {
        let mut from = unseal(bytes, Kind::Session, Model::identity(&self)).map_err(model::Error::from)?;
        let inner = (|| {
            let ids = from.bytes()?;
            let snapshot = from.bytes()?;
            from.end()?;
            Ok::<_, model::sealed::Unsealed>((ids, snapshot))
        })();
        let (ids, snapshot) = inner.map_err(model::Error::from)?;
        let snapshot = Snapshot::from_bytes(snapshot, Model::identity(&self), &Model::layout(&self))?;
        let mut sequence = Sequence::new(self, options)?;
        sequence.ids = ids.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        if sequence.ids.len() != snapshot.tail.position() {
            return Err(model::Error::from(model::sealed::Unsealed::Field("tokens")).into());
        }
        let (model, state) = (&sequence.model, &mut sequence.state);
        model.load_page(state, &snapshot.entries, snapshot.tail.position())?;
        model.load_tail(state, &snapshot.tail)?;
        Ok(Box::new(sequence))
    }
}

/// The session of one backend. Where `state` is shorter than `ids`, the tokens between have their entries and are taken
/// again for their window rows before anything else.
struct Sequence<B: Backend> {
    model: Arc<Model<B>>,
    context: usize,
    prefill: Prefill,
    cache: Arc<PrefixCache>,
    state: State<B>,
    ids: Vec<u32>,
    /// Logits of the last step's rows, the first after `rows_from` tokens.
    rows: Vec<f32>,
    rows_from: usize,
    reuse: Reuse,
    speculation: Speculation,
    /// Memory that the state may come to use.
    promise: Promise,
}

/// A state to go on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// Nothing.
    New,
    /// The present one, taken back.
    Here(usize),
    /// A window tail of the cache.
    Tail(usize),
    /// Entries, here or in the cache.
    Entries(usize),
}

impl<B: Backend + 'static> Sequence<B> {
    fn new(model: Arc<Model<B>>, options: SessionOptions) -> Result<Self> {
        if options.prefill == Prefill::Replay {
            if model.backend().mode() == Mode::Source {
                return Err(Error::Refused(
                    "--prefill replay is refused with --numerics source: it is an approximation; use --prefill full"
                        .into(),
                ));
            }
            model.check_replay()?;
        }
        let speculation = Speculation::new(options.drafts, model.draft_block())?;
        let cache = match options.cache {
            Some(cache) if !cache.serves(&*model, options.prefill) => {
                return Err(Error::Refused("the prefix cache is another model's".into()));
            }
            Some(cache) => cache,
            None => {
                let own = CacheOptions { memory: OWN_CACHE, ..CacheOptions::default() };
                Arc::new(PrefixCache::open(&own, &*model, options.prefill)?)
            }
        };
        let layout = Model::layout(&model);
        let context = options.context.min(Model::config(&model).max_position_embeddings);
        let promise = Promise::new(state_bytes(&layout, context), plan::transient(Model::config(&model)))?;
        let state = model.new_state(options.context)?;
        Ok(Self {
            model,
            context: options.context,
            prefill: options.prefill,
            cache,
            state,
            ids: Vec::new(),
            rows: Vec::new(),
            rows_from: 0,
            reuse: Reuse::default(),
            speculation,
            promise,
        })
    }

    /// Whether no token is to be taken again.
    fn ready(&self) -> bool {
        self.state.len() == self.ids.len()
    }

    /// Tokens to be taken again for the windows at `len`.
    fn again(&self, len: usize) -> usize {
        match self.prefill {
            Prefill::Full => len.min(self.model.cone()),
            Prefill::Replay => len.min(self.window()),
        }
    }

    /// A window, even, as groups of two share an entry.
    fn window(&self) -> usize {
        self.model.config().sliding_window.next_multiple_of(2)
    }

    /// The start that leaves least to compute of the first `limit` tokens, of which the present tokens are the first `own`.
    fn plan(&self, limit: usize, own: usize, offer: &Offer) -> Start {
        let mut best = (limit, Start::New);
        // Of equal ones the first: what is here costs nothing to load.
        let mut consider = |cost: usize, start: Start| {
            if cost < best.0 {
                best = (cost, start);
            }
        };
        if self.ready() && own > 0 && (own == self.state.len() || own >= self.state.oldest()) {
            consider(limit - own, Start::Here(own));
        }
        consider(limit - offer.tail, Start::Tail(offer.tail));
        let entries = own.max(offer.entries) / 2 * 2;
        if entries > 0 {
            consider(limit - entries + self.again(entries), Start::Entries(entries));
        }
        best.1
    }

    /// Loads `start`; `false` where the cache turns out not to have it.
    fn load(&mut self, ids: &[u32], start: Start, own: usize) -> Result<bool> {
        let (len, tail) = match start {
            Start::New => {
                self.model.strip(&mut self.state, 0);
                self.ids.clear();
                return Ok(true);
            }
            Start::Here(len) => {
                self.model.truncate(&mut self.state, len)?;
                self.ids.truncate(len);
                return Ok(true);
            }
            Start::Tail(len) => (len, true),
            Start::Entries(len) => (len, false),
        };
        // What the present state has of the entries stays where it is.
        let here = if own >= len { len } else { own / PAGE * PAGE };
        let fetched = if tail || here < len {
            match self.cache.fetch(ids, len, tail) {
                Some(fetched) => Some(fetched),
                None => return Ok(false),
            }
        } else {
            None
        };
        self.model.strip(&mut self.state, here);
        self.ids.clear();
        if let Some(fetched) = &fetched {
            for page in fetched.pages(here) {
                if here < len {
                    self.model.load_page(&mut self.state, page, len)?;
                }
            }
        }
        match fetched.as_ref().and_then(|f| f.tail()) {
            Some(tail) => self.model.load_tail(&mut self.state, tail)?,
            None => {
                let from = (len - self.again(len)) / 2 * 2;
                self.model.resume(&mut self.state, &ids[..from], self.prefill == Prefill::Full);
            }
        }
        self.ids.extend_from_slice(&ids[..len]);
        Ok(true)
    }

    /// Runs one step of the whole model.
    fn step(&mut self, ids: &[u32], rows: Rows) -> Result<()> {
        let from = self.state.len();
        let out = self.model.forward(&mut self.state, Input::text(ids), rows, &mut Taps::off())?;
        self.keep_logits(out, if rows == Rows::All { from + 1 } else { from + ids.len() })
    }

    fn keep_logits(&mut self, out: Option<model::Output<B>>, from: usize) -> Result<()> {
        self.rows.clear();
        if let Some(out) = out {
            let host = self.model.backend().read(&out.logits).map_err(model::Error::from)?;
            self.rows.extend_from_slice(host.as_f32());
            self.rows_from = from;
        }
        Ok(())
    }

    /// Every layer on every token that anything reads.
    fn feed_full(
        &mut self,
        ids: &[u32],
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<std::result::Result<(), Stopped>> {
        // The first were taken before and are taken again for their window rows.
        let all = [&self.ids[self.state.len()..], ids].concat();
        let (start, known) = (self.state.len(), self.ids.len());
        let goal = start + all.len();
        let mut kept = known;
        while self.state.len() < goal {
            // The state is whole at the end of a prefill, and only there it can be kept.
            let end = kept.saturating_add(self.cache.tail_every()).min(goal);
            let from = self.state.len();
            let to = end.min(from + CHUNK);
            let rows = if to == goal { Rows::Last } else { Rows::None };
            let _span = tracing::info_span!("step", from, tokens = to - from).entered();
            let input = Input::text(&all[from - start..to - start]);
            let out = self.model.prefill(&mut self.state, input, end, rows)?;
            self.keep_logits(out, to)?;
            let have = self.ids.len() - start;
            self.ids.extend_from_slice(&all[have..have.max(to - start)]);
            if progress(to.saturating_sub(known)).is_break() && to < goal {
                self.leave();
                return Ok(Err(Stopped));
            }
            if to == end && end < goal {
                self.keep(&self.state)?;
                kept = end;
            }
        }
        Ok(Ok(()))
    }

    /// Ends a prefill before its end. Its windows are not whole, so that its entries are what is left of it.
    fn leave(&mut self) {
        if self.state.is_whole() {
            return;
        }
        let len = self.ids.len() / 2 * 2;
        self.model.strip(&mut self.state, len);
        let from = (len - self.again(len)) / 2 * 2;
        self.model.resume(&mut self.state, &self.ids[..from], true);
        self.ids.truncate(len);
    }

    /// The decoder layers on the last window only.
    fn feed_replay(
        &mut self,
        ids: &[u32],
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<std::result::Result<(), Stopped>> {
        let mut waiting = Waiting::default();
        if !self.ready() {
            let again = self.ids[self.state.len()..].to_vec();
            self.model.encode(&mut self.state, &mut waiting, Input::text(&again))?;
        }
        let mut done = 0;
        for chunk in ids.chunks(CHUNK) {
            self.model.encode(&mut self.state, &mut waiting, Input::text(chunk))?;
            self.ids.extend_from_slice(chunk);
            done += chunk.len();
            let last = done == ids.len();
            if last || progress(done).is_break() {
                let rows = if last { Rows::Last } else { Rows::None };
                let out = self.model.decode(&mut self.state, waiting, rows)?;
                self.keep_logits(out, self.state.len())?;
                if last {
                    // Nothing is left to stop.
                    let _ = progress(done);
                    return Ok(Ok(()));
                }
                return Ok(Err(Stopped));
            }
        }
        Ok(Ok(()))
    }

    /// Gives the cache what it lacks of `state`, which has taken the first of the present tokens.
    fn keep(&self, state: &State<B>) -> Result<()> {
        if !self.ready() || state.is_empty() {
            // Tokens that are still to be taken again came from the cache.
            return Ok(());
        }
        let ids = &self.ids[..state.len()];
        let (from, has_tail) = self.cache.missing(ids);
        let whole = ids.len() / PAGE * PAGE;
        let pages = (from..whole).step_by(PAGE).map(|first| self.model.page(state, first, PAGE));
        let pages = pages.collect::<std::result::Result<_, _>>()?;
        let tail = if has_tail {
            None
        } else {
            Some((self.model.page(state, whole, ids.len() - whole)?, self.model.tail(state)?))
        };
        self.cache.insert(ids, pages, tail);
        Ok(())
    }

    /// That `more` tokens fit, before work starts.
    fn check_room(&self, more: usize) -> Result<()> {
        let need = self.ids.len() + more;
        if need > self.context {
            return Err(model::Error::Context { need, context: self.context }.into());
        }
        Ok(())
    }

    /// After a failure the state is of no use: the next prompt starts anew.
    fn or_reset<T>(&mut self, result: Result<T>) -> Result<T> {
        if result.is_err() {
            self.model.strip(&mut self.state, 0);
            self.ids.clear();
            self.rows.clear();
        }
        result
    }
}

impl<B: Backend + 'static> Session for Sequence<B> {
    fn ids(&self) -> &[u32] {
        &self.ids
    }

    fn context(&self) -> usize {
        self.context
    }

    fn rewind(&mut self, ids: &[u32]) -> Result<usize> {
        self.rows.clear();
        let limit = ids.len().saturating_sub(1);
        let own = self.ids.iter().zip(&ids[..limit]).take_while(|(a, b)| a == b).count();
        let next = self.ids.get(own).copied();
        for attempt in 0.. {
            let offer = self.cache.find(ids, limit);
            // What is found may turn out not to be usable, and is gone then.
            let start = if attempt < ATTEMPTS { self.plan(limit, own, &offer) } else { Start::New };
            let loaded = self.load(ids, start, own);
            if !self.or_reset(loaded)? {
                continue;
            }
            let found = own.max(offer.entries);
            let miss = match (offer.miss, next) {
                _ if found >= limit => Miss::None,
                (_, Some(kept)) if own > offer.entries => Miss::Differs { at: own, asked: ids[own], kept },
                (_, None) if own > offer.entries => Miss::Ends { at: own },
                (miss, _) => miss,
            };
            let recomputed = self.ids.len() - self.state.len();
            self.reuse = Reuse { prompt: ids.len(), kept: self.ids.len(), recomputed, found, miss };
            self.cache.count(!self.ids.is_empty());
            break;
        }
        Ok(self.ids.len())
    }

    fn reuse(&self) -> Reuse {
        self.reuse.clone()
    }

    fn feed(
        &mut self,
        ids: &[u32],
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<std::result::Result<(), Stopped>> {
        self.check_room(ids.len())?;
        self.rows.clear();
        if ids.len() > 1 {
            // Rows of the whole prompt are on their way before its first step.
            self.model.prefetch(&self.state, ids);
        }
        let short = self.ready() && ids.len() <= self.model.config().sliding_window;
        let fed = match self.prefill {
            Prefill::Replay if !short => self.feed_replay(ids, progress),
            _ => self.feed_full(ids, progress),
        };
        self.or_reset(fed)
    }

    fn feed_rows(&mut self, ids: &[u32]) -> Result<()> {
        self.check_room(ids.len())?;
        assert!(self.ready(), "drafts come after a prefill");
        let fed = self.step(ids, Rows::All);
        self.ids.extend_from_slice(ids);
        self.or_reset(fed)
    }

    fn logits(&self) -> &[f32] {
        self.row(self.ids.len())
    }

    fn row(&self, len: usize) -> &[f32] {
        let vocab = self.model.config().vocab_size;
        let row = len.checked_sub(self.rows_from).map_or(usize::MAX, |r| r.saturating_mul(vocab));
        self.rows.get(row..).and_then(|rest| rest.get(..vocab)).unwrap_or(&[])
    }

    fn mark(&mut self) -> Result<()> {
        // One token before the end: the same prompt again needs the logits of its last token.
        let before = self.ids.len().saturating_sub(1);
        if self.ready() && before > 0 && before >= self.state.oldest() {
            let mut state = self.state.clone();
            self.model.truncate(&mut state, before)?;
            return self.keep(&state);
        }
        self.keep(&self.state)
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        assert!(len <= self.ids.len(), "{len} tokens of {}", self.ids.len());
        if len == 0 {
            self.model.strip(&mut self.state, 0);
            self.ids.clear();
            self.rows.clear();
            return Ok(());
        }
        if self.ready() && len >= self.state.oldest() {
            self.model.truncate(&mut self.state, len)?;
            self.ids.truncate(len);
            if !self.logits().is_empty() {
                return Ok(());
            }
        }
        let ids = self.ids[..len].to_vec();
        let kept = self.rewind(&ids)?;
        // A feed that never asks to stop is never stopped.
        let _ = self.feed(&ids[kept..], &mut |_| ControlFlow::Continue(()))?;
        Ok(())
    }

    fn draft(&mut self, next: u32, count: usize) -> Result<Drafted> {
        if count == 0 || !self.ready() {
            return Ok(Drafted::default());
        }
        let draft = self.model.draft_tokens(&self.state, next, count)?;
        Ok(draft.map_or_else(Drafted::default, |d| Drafted { ids: d.ids, confidence: d.confidence }))
    }

    fn speculation(&mut self) -> Option<&mut Speculation> {
        Some(&mut self.speculation)
    }

    fn fork(&self) -> Result<Box<dyn Session>> {
        Ok(Box::new(Self {
            model: self.model.clone(),
            cache: self.cache.clone(),
            state: self.state.clone(),
            ids: self.ids.clone(),
            rows: self.rows.clone(),
            reuse: self.reuse.clone(),
            speculation: self.speculation.again(),
            promise: self.promise.clone(),
            ..*self
        }))
    }

    fn save(&self) -> Result<Vec<u8>> {
        if !self.ready() {
            return Err(Error::Refused("a session is saved after its prompt is taken, not before".into()));
        }
        let mut out = Writer::default();
        out.bytes(&self.ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>());
        let identity = self.model.identity();
        out.bytes(&self.model.snapshot(&self.state)?.to_bytes(identity));
        Ok(seal(Kind::Session, identity, &out))
    }
}
