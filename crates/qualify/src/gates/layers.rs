//! G2: every layer alone, fed the reference's own streams.

use std::collections::{BTreeMap, BTreeSet};

use checkpoint::Checkpoint;
use model::{Input, Model};
use ops::{Backend, Host, Mode, Taps};
use serde::{Deserialize, Serialize};

use crate::{
    Error, Result,
    judge::metrics,
    noise::{Ensemble, SelfNoise},
    scores::{RouterScores, choice_margin, deviation, score_error},
    thresholds::Flips,
    trace::{Recorder, Tensor, Trace},
};

/// A choice that differs from the reference's in one token of one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Flip {
    /// Layer that chose.
    pub layer: usize,
    /// Token.
    pub token: usize,
    /// `topk`, `candidates` or `router.experts`.
    pub choice: String,
    /// (last kept - first dropped) / deviation of the row's scores.
    pub margin: f64,
    /// Distance of our scores from the reference's, in the same unit.
    pub score_error: f64,
    /// Whether the margin lies under the allowed multiple of the error.
    pub excused: bool,
}

/// What the teacher-forced layers of one pass give.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Forced {
    /// NRMS of the streams behind the layer, by layer and token; infinite where a flip sets the token apart.
    #[serde(skip)]
    pub nrms: Vec<Vec<f64>>,
    /// Choices that differ.
    pub flips: Vec<Flip>,
}

impl Forced {
    /// Figures of all token-layers that no flip sets apart, ascending.
    pub fn figures(&self) -> Vec<f64> {
        let apart = self.apart();
        let mut all: Vec<f64> = self
            .nrms
            .iter()
            .enumerate()
            .flat_map(|(l, row)| row.iter().enumerate().map(move |(t, v)| ((l, t), *v)))
            .filter(|(at, _)| !apart.contains(at))
            .map(|(_, v)| v)
            .collect();
        all.sort_by(f64::total_cmp);
        all
    }

    /// Layer and token of every excused flip.
    pub fn apart(&self) -> BTreeSet<(usize, usize)> {
        self.flips.iter().filter(|f| f.excused).map(|f| (f.layer, f.token)).collect()
    }

    /// Token-layers in all.
    pub fn token_layers(&self) -> usize {
        self.nrms.iter().map(Vec::len).sum()
    }

    /// Flips that nothing excuses.
    pub fn unexcused(&self) -> usize {
        self.flips.iter().filter(|f| !f.excused).count()
    }
}

/// What the reference says about one layer.
pub struct Lesson {
    /// Streams and input weights that the layer reads; `None` for the embedding, which is exact.
    pub before: Option<(Host, Host)>,
    /// The layer's tensors by full name; `layers.L.streams` must be there.
    pub after: BTreeMap<String, Tensor>,
}

/// A reference that is asked for one layer after the other.
pub trait Teacher {
    /// The lesson of layer `l`.
    ///
    /// # Errors
    /// What reading or running the reference reports.
    fn lesson(&mut self, l: usize) -> Result<Lesson>;
}

/// A reference trace as a teacher.
pub struct TraceTeacher<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// Its pass.
    pub pass: &'a str,
}

impl Teacher for TraceTeacher<'_> {
    fn lesson(&mut self, l: usize) -> Result<Lesson> {
        let host = |name: String| -> Result<Host> {
            let t = self.trace.floats(self.pass, &name)?;
            Ok(Host::f32(&t.shape, t.as_float().unwrap_or(&[]).to_vec()))
        };
        let before = match l.checked_sub(1) {
            None => None,
            Some(p) => Some((host(format!("layers.{p}.streams"))?, host(format!("layers.{p}.pre_mix"))?)),
        };
        let prefix = format!("layers.{l}.");
        let names = self.trace.tensors(self.pass).into_iter().filter(|n| n.starts_with(&prefix));
        let after = names.filter_map(|n| Some((n.clone(), self.trace.get(self.pass, &n)?))).collect();
        Ok(Lesson { before, after })
    }
}

/// A live reference as a teacher: the plain run of an ensemble.
pub struct LiveTeacher<'m, B: Backend> {
    model: &'m Model<B>,
    ensemble: Ensemble<'m, B>,
    recorder: Recorder<'m>,
    positions: Vec<u32>,
}

impl<'m, B: Backend> LiveTeacher<'m, B> {
    /// The reference on `ids`, with `draws` perturbed runs beside it.
    ///
    /// # Errors
    /// What the checkpoint, the model or the device reports.
    pub fn new(model: &'m Model<B>, checkpoint: &Checkpoint, ids: &[u32], draws: usize) -> Result<Self> {
        let ensemble = Ensemble::new(model, checkpoint, ids, draws)?;
        let recorder = Recorder::new(model.config(), None)?;
        Ok(Self { model, ensemble, recorder, positions: (0..ids.len() as u32).collect() })
    }

    /// The reference's logits and its self-noise, after the last layer.
    ///
    /// # Errors
    /// A device failure.
    pub fn finish(self) -> Result<(Host, SelfNoise)> {
        self.ensemble.finish(self.positions.len())
    }
}

impl<B: Backend> Teacher for LiveTeacher<'_, B> {
    fn lesson(&mut self, l: usize) -> Result<Lesson> {
        let b = self.model.backend();
        let (streams, pre) = self.ensemble.plain();
        let before = if l == 0 { None } else { Some((b.read(streams)?, b.read(pre)?)) };
        self.recorder.begin(self.positions.clone(), &[]);
        let mut failure = None;
        let mut sink = |name: &str, value: &B::Buf| match b.read(value) {
            Ok(host) => self.recorder.tap(name, &host),
            Err(e) => failure = Some(e),
        };
        self.ensemble.advance(&mut Taps::new(&mut sink))?;
        match failure {
            Some(e) => Err(e.into()),
            None => Ok(Lesson { before, after: self.recorder.take() }),
        }
    }
}

/// Runs every layer on the reference's streams and compares what comes out; `progress` is told the layer.
///
/// # Errors
/// A reference without the streams of every layer or with other shapes, or a device failure.
pub fn teacher_forced<B: Backend>(
    model: &Model<B>,
    checkpoint: &Checkpoint,
    ids: &[u32],
    teacher: &mut impl Teacher,
    limits: &Flips,
    mut progress: impl FnMut(usize),
) -> Result<Forced> {
    let b = model.backend();
    let mut recorder = Recorder::new(model.config(), None)?;
    let mut state = model.new_state(ids.len())?;
    let mut walk = model.start(&mut state, Input::text(ids))?;
    let mut out = Forced::default();
    for l in 0..model.config().num_hidden_layers {
        progress(l);
        let lesson = teacher.lesson(l)?;
        let fits = |name: &str, got: &[usize], want: Vec<usize>| {
            if got == want { Ok(()) } else { Err(misfit(l, name, got, &want)) }
        };
        if let Some((streams, pre)) = &lesson.before {
            fits("streams", streams.shape(), b.shape(&walk.streams))?;
            fits("pre_mix", pre.shape(), b.shape(&walk.pre))?;
            walk.streams = b.upload(streams)?;
            walk.pre = b.upload(pre)?;
        }
        recorder.begin(walk.positions().to_vec(), &[]);
        let mut failure = None;
        let mut sink = |name: &str, value: &B::Buf| match b.read(value) {
            Ok(host) => recorder.tap(name, &host),
            Err(e) => failure = Some(e),
        };
        model.advance(&mut walk, &mut state, &mut Taps::new(&mut sink))?;
        if let Some(e) = failure {
            return Err(e.into());
        }
        let own = recorder.take();
        let name = format!("layers.{l}.streams");
        let (Some(got), Some(want)) = (own.get(&name), lesson.after.get(&name)) else {
            return Err(Error::Usage(format!("the reference has no {name}, which teacher forcing needs")));
        };
        fits("streams", &want.shape, got.shape.clone())?;
        let rows = |t: &Tensor| t.as_float().unwrap_or(&[]).to_vec();
        let (got, want, width) = (rows(got), rows(want), want.width());
        if got.len() != want.len() {
            return Err(Error::Usage(format!("{name} of the reference holds no values")));
        }
        let pairs = got.chunks(width).zip(want.chunks(width));
        out.nrms.push(pairs.map(|(a, b)| metrics::values(a, b).nrms).collect());
        let view = View { theirs: &lesson.after, own: &own, l, mode: b.mode(), limits };
        if !view.differing("router.experts").is_empty() {
            let router = RouterScores::load(checkpoint, l)?;
            view.expert_flips(&router, model.config().num_experts_per_tok, &mut out.flips);
        }
        if model.config().layer(l).index_source == Some(l) {
            view.selection_flips(model.config().index_topk, &mut out.flips);
        }
    }
    Ok(out)
}

fn misfit(l: usize, name: &str, got: &[usize], want: &[usize]) -> Error {
    Error::Usage(format!("{name} of the reference at layer {l} has shape {got:?}, the model's is {want:?}"))
}

struct View<'a> {
    theirs: &'a BTreeMap<String, Tensor>,
    own: &'a BTreeMap<String, Tensor>,
    l: usize,
    mode: Mode,
    limits: &'a Flips,
}

impl View<'_> {
    fn differing(&self, stage: &str) -> Vec<usize> {
        let name = format!("layers.{}.{stage}", self.l);
        let (Some(a), Some(b)) = (self.own.get(&name), self.theirs.get(&name)) else {
            return Vec::new();
        };
        match (a.as_int(), b.as_int()) {
            (Some(x), Some(y)) if a.rows() == b.rows() => {
                metrics::choices(x, a.width(), y, b.width(), a.rows()).differing
            }
            _ => Vec::new(),
        }
    }

    fn push(&self, flips: &mut Vec<Flip>, stage: &str, token: usize, margin: f64, error: f64) {
        let excused = margin <= *self.limits.margin_factor * error;
        let choice = stage.to_owned();
        flips.push(Flip { layer: self.l, token, choice, margin, score_error: error, excused });
    }

    /// Router scores are recomputed from both sides' `ffn_in`, so error and margin are those of the choice itself.
    fn expert_flips(&self, router: &RouterScores, k: usize, flips: &mut Vec<Flip>) {
        let differing = self.differing("router.experts");
        let name = format!("layers.{}.ffn_in", self.l);
        let Some(own) = self.own.get(&name) else { return };
        let theirs = self.theirs.get(&name);
        for t in differing {
            let row =
                |x: &Tensor| x.as_float().map(|v| router.biased(&v[t * x.width()..][..x.width()], false));
            let Some(ours) = row(own) else { continue };
            let (margin, error) = match theirs.and_then(row) {
                Some(r) => (choice_margin(&r, k), score_error(&ours, &r)),
                None => (choice_margin(&ours, k), 0.0),
            };
            self.push(flips, "router.experts", t, margin, error);
        }
    }

    fn selection_flips(&self, k: usize, flips: &mut Vec<Flip>) {
        let name = format!("layers.{}.index_scores", self.l);
        let Some(own) = self.own.get(&name) else { return };
        let theirs = self.theirs.get(&name);
        for t in self.differing("topk") {
            let row = |x: &Tensor| -> Option<Vec<f64>> {
                x.as_float().map(|v| v[t * x.width()..][..x.width()].iter().map(|v| f64::from(*v)).collect())
            };
            let Some(ours) = row(own) else { continue };
            // Without the reference's scores the least that can be said is the grid of the scores themselves.
            let cut = ours.iter().copied().filter(|s| s.is_finite()).fold(0.0, |a: f64, s| a.max(s.abs()));
            let grid = if self.mode == Mode::Source { cut / 256.0 } else { cut * 1e-6 } / deviation(&ours);
            let (margin, error) = match theirs.and_then(row) {
                Some(r) => (choice_margin(&r, k), score_error(&ours, &r).max(grid)),
                None => (choice_margin(&ours, k), grid),
            };
            self.push(flips, "topk", t, margin, error);
        }
    }
}
