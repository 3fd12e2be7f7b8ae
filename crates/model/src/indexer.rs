//! Index sources: which entries a query attends, with the two-level filter [§2.5, §2.6].

use checkpoint::Config;
use ops::{
    Backend, Host, Taps,
    blocks::{Candidates, Entries, IndexerWeights},
};

use crate::{
    Model, Result, State, Step, Weights,
    load::{Loader, mat},
};

/// The weights of an index source.
pub(crate) struct Indexer<B: Backend> {
    weights: IndexerWeights<B>,
}

impl<B: Backend> Indexer<B> {
    pub(crate) fn load(b: &B, ckpt: &dyn Weights, prefix: &str, c: &Config) -> Result<Self> {
        let at = Loader::new(b, ckpt, prefix);
        let weights = IndexerWeights {
            wq_b: mat(&at, "indexer.wq_b")?,
            weights_proj: mat(&at, "indexer.weights_proj")?,
            dim: c.index_head_dim,
        };
        Ok(Self { weights })
    }
}

/// The choices of one step, by index source.
pub(crate) struct Selection<B: Backend> {
    pub(crate) chosen: Vec<(usize, B::Buf)>,
    pub(crate) candidates: Option<B::Buf>,
}

impl<B: Backend> Default for Selection<B> {
    fn default() -> Self {
        Self { chosen: Vec::new(), candidates: None }
    }
}

impl<B: Backend> Selection<B> {
    /// The choice of the index source `layer`.
    pub(crate) fn of(&self, layer: usize) -> Option<&B::Buf> {
        self.chosen.iter().find(|(l, _)| *l == layer).map(|(_, topk)| topk)
    }

    /// Replaces the choices of all rows by those that `rows` takes.
    pub(crate) fn cut(&mut self, rows: impl Fn(&B::Buf) -> B::Buf) {
        self.chosen.iter_mut().map(|(_, x)| x).chain(&mut self.candidates).for_each(|x| *x = rows(x));
    }
}

impl<B: Backend> Model<B> {
    /// Chooses entries for every query of the step.
    pub(crate) fn select(
        &self,
        indexer: &Indexer<B>,
        l: usize,
        x: &B::Buf,
        latent: &B::Buf,
        state: &State<B>,
        step: &mut Step<'_, B>,
        taps: &mut Taps<'_, B::Buf>,
    ) -> Result<()> {
        let (b, c) = (self.backend(), self.config());
        let plan = c.layer(l);
        let Some(global) = plan.kv_source.and_then(|s| state.globals[s].as_ref()) else { return Ok(()) };
        let visible: Vec<u32> = step.positions.iter().map(|p| (p + 1) / plan.ratio as u32).collect();
        let n = visible.last().map_or(0, |v| *v as usize);
        if n == 0 {
            return Ok(());
        }
        if n <= c.index_topk && !taps.enabled() {
            // Every visible entry is chosen and no filter can drop one, so scoring would decide nothing.
            step.selection.chosen.push((l, b.upload(&everything(&visible, n))?));
            return Ok(());
        }
        let table = self.ropes.of(plan.ratio);
        let entries = Entries { keys: &global.keys, n, visible: &visible };
        let scores = b.index_query(x, latent, &indexer.weights, table, step.positions, entries);
        let candidates = match &step.selection.candidates {
            _ if plan.candidate_source => Candidates::Choose(c.candidate_topk_blocks),
            Some(mask) if l > c.candidate_source_layer_id => Candidates::Kept(mask),
            _ => Candidates::All,
        };
        let (mask, topk) =
            b.choose(&scores, &visible, c.candidate_block_size, candidates, c.index_topk, taps);
        if mask.is_some() {
            step.selection.candidates = mask;
        }
        step.selection.chosen.push((l, topk));
        Ok(())
    }
}

/// The choice of all visible entries, ascending, then -1.
fn everything(visible: &[u32], n: usize) -> Host {
    let row = |v: u32| (0..n as i32).map(move |j| if j < v as i32 { j } else { -1 });
    Host::i32(&[visible.len(), n], visible.iter().flat_map(|v| row(*v)).collect())
}
