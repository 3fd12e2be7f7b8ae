//! Self-noise: how far an engine's own logits move under a change that should not matter.
//!
//! The change is one unit in the last place of one element of one token's embedding: of bf16 where the numerics round
//! activations to bf16, of single precision in `exact`. Nothing in the engine is touched, so the same measurement can be
//! made of any engine that takes embeddings, or whose table can be edited.

use checkpoint::{Checkpoint, Weight};
use model::{Input, Model, Rows, State, Walk};
use numerics::bf16;
use ops::{Backend, Host, Mode, Taps};
use serde::{Deserialize, Serialize};

use crate::{Result, judge::metrics};

/// One perturbed run against the plain one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Draw {
    /// Position of the token whose embedding was changed.
    pub position: usize,
    /// The changed element.
    pub element: usize,
    /// NRMS of all logits.
    pub nrms: f64,
    /// Mean KL(plain ‖ perturbed), nats.
    pub kl: f64,
    /// Share of rows with the same best token.
    pub top1: f64,
}

/// The self-noise of one engine on one text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SelfNoise {
    /// Runs whose change reached the logits.
    pub draws: Vec<Draw>,
    /// Runs whose change was rounded away: all logits equal bit for bit. They are not among the draws.
    pub vanished: usize,
}

impl SelfNoise {
    /// Median NRMS of the draws; 0 where every change was rounded away.
    pub fn nrms(&self) -> f64 {
        median(self.draws.iter().map(|d| d.nrms))
    }

    /// Median KL of the draws.
    pub fn kl(&self) -> f64 {
        median(self.draws.iter().map(|d| d.kl))
    }

    /// Mean agreement of the best token.
    pub fn top1(&self) -> f64 {
        let n = self.draws.len().max(1) as f64;
        if self.draws.is_empty() { 1.0 } else { self.draws.iter().map(|d| d.top1).sum::<f64>() / n }
    }
}

/// The upper median; 0 of nothing.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut v: Vec<f64> = values.into_iter().collect();
    v.sort_by(f64::total_cmp);
    v.get(v.len() / 2).copied().unwrap_or(0.0)
}

/// The embedding of token `id` with element `element` moved by one unit in the last place, away from zero.
pub fn nudged_embedding(table: &Weight, id: u32, element: usize, mode: Mode) -> Vec<f32> {
    let mut row = vec![0.0; table.cols()];
    table.decode_row(id as usize, &mut row);
    row[element] = nudged(row[element], mode);
    row
}

/// The next value away from zero that `mode` can hold.
pub fn nudged(v: f32, mode: Mode) -> f32 {
    match mode {
        Mode::Exact => f32::from_bits(v.to_bits() + 1),
        _ => bf16::from_bits(((v.to_bits() >> 16) as u16) + 1),
    }
}

/// Place of the `i`-th change: early tokens, so that most rows can feel it, and elements spread over the embedding.
pub fn place(i: usize, tokens: usize, width: usize) -> (usize, usize) {
    (i % tokens.min(3), (7 + 37 * i) % width)
}

/// The plain run of a text and perturbed ones beside it, layer by layer together, so that a layer's weights are read
/// once for all of them.
pub struct Ensemble<'m, B: Backend> {
    model: &'m Model<B>,
    draws: usize,
    runs: Vec<Run<B>>,
}

struct Run<B: Backend> {
    state: State<B>,
    walk: Walk<B>,
    place: (usize, usize),
}

impl<'m, B: Backend> Ensemble<'m, B> {
    /// A plain run and half as many perturbed ones again as `draws`, since some changes are rounded away.
    ///
    /// # Errors
    /// What the checkpoint, the model or the device reports.
    pub fn new(model: &'m Model<B>, checkpoint: &Checkpoint, ids: &[u32], draws: usize) -> Result<Self> {
        let table = checkpoint.weight("embed")?;
        let mode = model.backend().mode();
        let mut runs = Vec::new();
        for i in 0..=draws + draws / 2 {
            let mut state = model.new_state(ids.len())?;
            let place = place(i, ids.len(), table.cols());
            let row = [(place.0, nudged_embedding(&table, ids[place.0], place.1, mode))];
            // Number 0 is the plain run.
            let embeddings: &[(usize, Vec<f32>)] = if i == 0 { &[] } else { &row };
            let walk = model.start(&mut state, Input { ids, embeddings, ..Input::default() })?;
            runs.push(Run { state, walk, place });
        }
        Ok(Self { model, draws, runs })
    }

    /// The plain run's streams and weights of the next layer's input.
    pub fn plain(&self) -> (&B::Buf, &B::Buf) {
        (&self.runs[0].walk.streams, &self.runs[0].walk.pre)
    }

    /// Runs the next layer of all; `taps` listen to the plain run.
    ///
    /// # Errors
    /// A device failure.
    pub fn advance(&mut self, taps: &mut Taps<'_, B::Buf>) -> Result<bool> {
        let mut more = false;
        for (i, run) in self.runs.iter_mut().enumerate() {
            let mut off = Taps::off();
            let taps = if i == 0 { &mut *taps } else { &mut off };
            more = self.model.advance(&mut run.walk, &mut run.state, taps)?;
        }
        Ok(more)
    }

    /// The plain run's logits, and the noise of its last `rows` rows.
    ///
    /// # Errors
    /// A device failure.
    pub fn finish(self, rows: usize) -> Result<(Host, SelfNoise)> {
        let b = self.model.backend();
        let mut logits = Vec::new();
        for mut run in self.runs {
            let out = self.model.finish(run.walk, &mut run.state, Rows::All, &mut Taps::off())?;
            if let Some(out) = out {
                logits.push((run.place, b.read(&out.logits)?));
            }
        }
        let (_, base) = logits.remove(0);
        let mut noise = SelfNoise { draws: Vec::new(), vanished: 0 };
        for ((position, element), moved) in logits {
            let tail = |x: &Host| x.slice_rows(x.rows() - rows.min(x.rows()), rows.min(x.rows()));
            let (moved, base) = (tail(&moved), tail(&base));
            let values = metrics::values(moved.as_f32(), base.as_f32());
            if values.nrms == 0.0 {
                noise.vanished += 1;
            } else if noise.draws.len() < self.draws {
                let l = metrics::logits(moved.as_f32(), base.as_f32(), base.width());
                noise.draws.push(Draw { position, element, nrms: values.nrms, kl: l.kl, top1: l.top1 });
            }
        }
        Ok((base, noise))
    }
}

/// Measures up to `draws` effective changes on the last `rows` tokens of a prefill of `ids`.
///
/// # Errors
/// What the checkpoint, the model or the device reports.
pub fn self_noise<B: Backend>(
    model: &Model<B>,
    checkpoint: &Checkpoint,
    ids: &[u32],
    rows: usize,
    draws: usize,
) -> Result<SelfNoise> {
    let mut all = Ensemble::new(model, checkpoint, ids, draws)?;
    while all.advance(&mut Taps::off())? {}
    Ok(all.finish(rows)?.1)
}
