//! Engram layers: n-gram history, hashes and the gated memory [§2.9].

use std::sync::Arc;

use checkpoint::{
    Config,
    engram::{EngramTable, TableStats},
};
use ops::{
    Backend, Host, Taps,
    blocks::{self, EngramWeights},
    engram::{HashPlan, HistoryToken},
};

use crate::{
    Error, Model, Result, State, Weights,
    layer::Engram,
    load::{Loader, mat, matrix},
    state::slack,
};

/// The token map and one hash plan an Engram layer.
pub(crate) struct Hasher {
    /// The compressed id of every token.
    pub(crate) map: Vec<u32>,
    plans: Vec<HashPlan>,
    /// Tokens of the history: those that n-grams reach, and as many more as can be taken back.
    keep: usize,
}

/// The compressed tokens of a step with those before it.
pub(crate) struct Tokens {
    all: Vec<HistoryToken>,
    before: usize,
}

impl Tokens {
    /// The last `step` of `all` are the step's.
    pub(crate) fn new(all: Vec<HistoryToken>, step: usize) -> Self {
        Self { before: all.len() - step, all }
    }

    /// Those before the step.
    pub(crate) fn before(&self) -> &[HistoryToken] {
        &self.all[..self.before]
    }

    /// Makes the first `skip` of the step's those before it.
    pub(crate) fn cut(&mut self, skip: usize) {
        self.before += skip;
    }

    /// Those of the step.
    pub(crate) fn step(&self) -> &[HistoryToken] {
        &self.all[self.before..]
    }
}

impl Hasher {
    /// `map` gives the compressed id of every token.
    pub(crate) fn new(c: &Config, map: Vec<u32>) -> Result<Self> {
        if map.len() != c.vocab_size {
            return Err(Error::TokenMap { got: map.len(), vocab: c.vocab_size });
        }
        let pad = map[c.engram.pad_token_id as usize];
        let plan = |k: usize| HashPlan {
            multipliers: c.engram_multipliers(k).into_iter().map(|m| m as u64).collect(),
            primes: c.engram_primes(k),
            heads: c.engram.n_heads,
            pad,
        };
        let plans = (0..c.engram.layer_ids.len()).map(plan).collect();
        Ok(Self { map, plans, keep: c.engram.max_ngram_size - 1 + slack(c) })
    }

    /// Appends a step's tokens to the history.
    pub(crate) fn push(&self, history: &mut Vec<HistoryToken>, ids: &[u32], image: &[bool]) -> Tokens {
        let before = history.len();
        let mut all = history.clone();
        all.extend(ids.iter().zip(image).map(|(id, image)| (!image).then(|| self.map[*id as usize])));
        *history = all[all.len().saturating_sub(self.keep)..].to_vec();
        Tokens { all, before }
    }

    /// Table rows of every token of the step, for Engram layer number `index`.
    fn rows(&self, index: usize, tokens: &Tokens) -> Vec<u64> {
        let plan = &self.plans[index];
        (tokens.before..tokens.all.len()).flat_map(|i| plan.rows(&tokens.all[..=i])).collect()
    }
}

pub(crate) fn load<B: Backend>(
    b: &B,
    ckpt: &dyn Weights,
    prefix: &str,
    c: &Config,
    index: usize,
) -> Result<Engram<B>> {
    let at = Loader::new(b, ckpt, prefix);
    let weights = EngramWeights {
        table: ckpt.weight(&format!("{prefix}embed"))?,
        wkv: mat(&at, "wkv")?,
        q_weight: matrix(&at, "q_weight")?,
        k_weight: matrix(&at, "k_weight")?,
        columns: c.engram_columns(),
    };
    Ok(Engram { index, weights, table: None })
}

impl<B: Backend> Model<B> {
    pub(crate) fn engram(
        &self,
        engram: &Engram<B>,
        streams: &B::Buf,
        tokens: &Tokens,
        image: &[bool],
        taps: &mut Taps<'_, B::Buf>,
    ) -> Result<B::Buf> {
        let b = self.backend();
        let rows = self.hasher.rows(engram.index, tokens);
        if taps.enabled() {
            let columns = engram.weights.columns;
            let ids = rows.iter().map(|r| *r as i32).collect();
            taps.put("engram.hash_ids", &b.upload(&Host::i32(&[rows.len() / columns, columns], ids))?);
        }
        let alive: Vec<bool> = image.iter().map(|image| !image).collect();
        let Some(table) = &engram.table else {
            return Ok(b.engram(streams, &engram.weights, &rows, &alive, taps));
        };
        let taken = table.take(&rows)?;
        Ok(if taken.in_place {
            b.engram(streams, &engram.weights, &taken.rows, &alive, taps)
        } else {
            blocks::engram(b, streams, &engram.weights, &taken.table, &taken.rows, &alive, taps)
        })
    }

    /// Takes the rows of the Engram layers from `tables`, one a layer in their order.
    ///
    /// # Panics
    /// On another number of tables than Engram layers.
    pub fn set_engram(&mut self, tables: Vec<Arc<dyn EngramTable>>) {
        let layers: Vec<_> = self.layers.iter_mut().filter_map(|l| l.engram.as_mut()).collect();
        assert_eq!(layers.len(), tables.len(), "a table an Engram layer");
        layers.into_iter().zip(tables).for_each(|(layer, table)| layer.table = Some(table));
    }

    /// What the Engram tables did so far.
    pub fn engram_stats(&self) -> Vec<TableStats> {
        self.tables().map(|(_, table)| table.stats()).collect()
    }

    /// Begins to bring the table rows of `ids`, which will be fed to `state`, and returns at once.
    pub fn prefetch(&self, state: &State<B>, ids: &[u32]) {
        if ids.iter().any(|id| *id as usize >= self.config().vocab_size) {
            return; // the step refuses it
        }
        let mut history = state.history.clone();
        let tokens = self.hasher.push(&mut history, ids, &vec![false; ids.len()]);
        self.tables().for_each(|(index, table)| table.prefetch(self.hasher.rows(index, &tokens)));
    }

    fn tables(&self) -> impl Iterator<Item = (usize, &Arc<dyn EngramTable>)> {
        let engrams = self.layers.iter().filter_map(|l| l.engram.as_ref());
        engrams.filter_map(|e| e.table.as_ref().map(|t| (e.index, t)))
    }
}
