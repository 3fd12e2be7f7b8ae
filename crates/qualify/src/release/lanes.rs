//! The sequences that go through the layers together, so that each layer's weights are made once.
//!
//! - *forced*: eight tokens, put back on the reference's streams wherever the fixtures hold them (G2);
//! - *blocks*: single layers on generated streams, a prefill of 48 and three decode steps (G2);
//! - *free*: the whole model on 8 and 160 tokens (G3), beside runs whose first embedding element differs by one unit in the
//!   last place: our own self-noise, with its own experts and with those of the plain run.

use model::{Streamed, Walk};
use ops::{Backend, Host, Taps};
use serde::{Deserialize, Serialize};

use super::{
    fixtures::Fixtures,
    generated::{host, ints, values},
    knobs::Knob,
    routes::{Choice, Routes, Slots},
};
use crate::{Result, judge::metrics};

/// Tokens of a block's prefill, and decode steps after it.
const PREFILL: usize = 48;
const STEPS: usize = 3;
/// Rows of the prefill that are kept.
const ROWS: [usize; 2] = [1, 47];

/// Streams behind a layer that the reference's streams before it, or before an earlier one, led to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ForcedFigure {
    /// First layer of the segment.
    pub from: usize,
    /// Last layer.
    pub layer: usize,
    /// NRMS by token.
    pub tokens: Vec<f64>,
    /// NRMS over all tokens, those of `flips` left out.
    pub nrms: f64,
    /// NRMS over all tokens.
    pub all: f64,
    /// Smallest router margin of each token over the segment.
    pub margins: Vec<f64>,
}

/// One row of a block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockFigure {
    /// The layer.
    pub layer: usize,
    /// Position of the row.
    pub position: usize,
    /// NRMS of its streams.
    pub nrms: f64,
    /// Router margin.
    pub margin: f64,
    /// Whether the experts are the reference's; `None` where the fixtures do not say.
    pub same_experts: Option<bool>,
}

/// One layer of a free run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FreeFigure {
    /// The run.
    pub lane: String,
    /// The layer.
    pub layer: usize,
    /// NRMS of 64 sampled stream elements: against the reference, for a perturbed run against the plain one.
    pub sample: f64,
    /// Expert choices that differ from those of the plain run.
    pub changes: Option<usize>,
}

/// What a layer gives.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerFigures {
    /// The layer.
    pub layer: usize,
    /// Teacher-forced.
    pub forced: Option<ForcedFigure>,
    /// The same with another slot list or a departure.
    pub variants: Vec<(Slots, Knob, ForcedFigure)>,
    /// Blocks.
    pub blocks: Vec<BlockFigure>,
    /// Free runs.
    pub free: Vec<FreeFigure>,
}

/// How a lane's router chooses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The reference's streams where there are any.
    Forced(Slots, Knob),
    /// The layers listed, each on generated streams.
    Block(&'static [usize]),
    /// By itself.
    Free,
    /// One unit in the last place of one embedding element more; `true`: with the experts of the lane that it perturbs.
    Perturbed(bool),
    /// With the experts of the forced lane, which stand for the reference's.
    Routed,
}

/// What is gated: the reference's slot list, no departure.
const GATED: Kind = Kind::Forced(Slots::Released, Knob::Off);

/// A teacher-forced lane with a departure.
const fn knob(name: &'static str, knob: Knob) -> Spec {
    Spec { name, tokens: 8, calm: false, kind: Kind::Forced(Slots::Released, knob) }
}

/// What a lane is.
#[derive(Clone, Copy)]
pub struct Spec {
    /// Name in reports.
    pub name: &'static str,
    /// Prompt length; 8 or 160 (blocks: 51).
    pub tokens: usize,
    /// Which weights it takes.
    pub calm: bool,
    /// How it runs.
    pub kind: Kind,
}

/// Every lane, in an order in which plain runs come before those that take their experts.
pub const SPECS: [Spec; 20] = [
    Spec { name: "forced8", tokens: 8, calm: false, kind: GATED },
    Spec { name: "served8", tokens: 8, calm: false, kind: Kind::Forced(Slots::RowInvariant, Knob::Off) },
    knob("plain_p8", Knob::PlainProbabilities),
    knob("short8", Knob::ShortSums),
    knob("fast_exp8", Knob::FastExp),
    knob("rotation8", Knob::CudaRotation),
    knob("ties8", Knob::HighestTies),
    Spec { name: "block0", tokens: 51, calm: false, kind: Kind::Block(&[0]) },
    Spec { name: "block1", tokens: 51, calm: false, kind: Kind::Block(&[1]) },
    Spec { name: "block2", tokens: 51, calm: false, kind: Kind::Block(&[2, 3]) },
    Spec { name: "block20", tokens: 51, calm: false, kind: Kind::Block(&[20, 24]) },
    Spec { name: "free8", tokens: 8, calm: false, kind: Kind::Free },
    Spec { name: "routed8", tokens: 8, calm: false, kind: Kind::Routed },
    Spec { name: "ulp8", tokens: 8, calm: false, kind: Kind::Perturbed(false) },
    Spec { name: "ulp8.routed", tokens: 8, calm: false, kind: Kind::Perturbed(true) },
    Spec { name: "free160", tokens: 160, calm: false, kind: Kind::Free },
    Spec { name: "ulp160", tokens: 160, calm: false, kind: Kind::Perturbed(false) },
    Spec { name: "calm8", tokens: 8, calm: true, kind: Kind::Free },
    Spec { name: "calm.ulp8", tokens: 8, calm: true, kind: Kind::Perturbed(false) },
    Spec { name: "calm.ulp8.routed", tokens: 8, calm: true, kind: Kind::Perturbed(true) },
];

/// A sequence on its way.
pub struct Lane<B: Backend> {
    /// What it is.
    pub spec: Spec,
    pub(super) state: model::State<Routes<B>>,
    pub(super) walks: Vec<Walk<Routes<B>>>,
    /// First layer whose input was the reference's, and margins since.
    segment: Option<(usize, Vec<f64>)>,
    /// First layer that this lane ran.
    start: usize,
    /// The experts of the last layer.
    choice: Choice,
    /// The sampled elements of the last layer.
    sample: Vec<f32>,
}

impl<B: Backend> Lane<B> {
    /// A lane that begins with layer `start`.
    ///
    /// # Errors
    /// A device failure.
    pub fn new(spec: Spec, m: &Streamed<Routes<B>>, start: usize) -> Result<Self> {
        let mut state = m.new_state(spec.tokens)?;
        let (ids, steps) = match spec.kind {
            Kind::Block(_) => (ints("block.ids", PREFILL + STEPS, 1024), vec![PREFILL, 1, 1, 1]),
            _ => (ints(&format!("whole.prompt.{}", spec.tokens), spec.tokens, 1024), vec![spec.tokens]),
        };
        let (mut walks, mut at) = (Vec::new(), 0);
        for n in steps {
            walks.push(m.start(&mut state, model::Input::text(&ids[at..at + n]))?);
            at += n;
        }
        if let Kind::Perturbed(_) = spec.kind {
            perturb(m.backend(), &mut walks[0], &ids)?;
        }
        Ok(Self { spec, state, walks, segment: None, start, choice: Choice::default(), sample: Vec::new() })
    }

    /// What stands before the name of this lane's tensors in the fixtures.
    fn prefix(&self) -> String {
        let model = if self.spec.calm { "calm" } else { "whole" };
        format!("{model}.{}", self.spec.tokens)
    }

    /// Whether the entries that layer `l` reads come from this lane.
    fn has_sources(&self, m: &Streamed<Routes<B>>, l: usize) -> bool {
        let plan = m.config().layer(l);
        [plan.kv_source, plan.index_source].into_iter().flatten().all(|s| s >= self.start)
    }
}

/// One more in the bits of element 0 of the first token's embedding, wherever that token stands.
fn perturb<B: Backend>(b: &Routes<B>, walk: &mut Walk<Routes<B>>, ids: &[u32]) -> Result<()> {
    let x = b.read(&walk.streams)?;
    let mut v = x.as_f32().to_vec();
    let (width, d) = (x.width(), x.shape()[2]);
    for (t, _) in ids.iter().enumerate().filter(|(_, id)| **id == ids[0]) {
        for s in 0..x.shape()[1] {
            let v = &mut v[t * width + s * d];
            *v = numerics::bf16::from_bits(numerics::bf16::to_bits(*v) + 1);
        }
    }
    walk.streams = b.upload(&Host::f32(x.shape(), v))?;
    Ok(())
}

/// The lanes with what they share.
pub struct Lanes<'f, B: Backend> {
    /// The model; one layer of it.
    pub model: Streamed<Routes<B>>,
    /// Those that take part.
    pub lanes: Vec<Lane<B>>,
    set: Option<fn(&B, Knob)>,
    fixtures: &'f Fixtures,
}

impl<'f, B: Backend> Lanes<'f, B> {
    /// The lanes of `wanted`, which begin with layer `start`; `set` turns a knob of the backend.
    ///
    /// # Errors
    /// A device failure.
    pub fn new(
        model: Streamed<Routes<B>>,
        set: Option<fn(&B, Knob)>,
        fixtures: &'f Fixtures,
        wanted: impl Fn(&Spec) -> bool,
        start: usize,
    ) -> Result<Self> {
        let specs = SPECS.into_iter().filter(|s| wanted(s));
        let lanes = specs.map(|s| Lane::new(s, &model, start)).collect::<Result<_>>()?;
        Ok(Self { model, lanes, set, fixtures })
    }

    /// Whether a lane takes the calm weights.
    pub fn any_calm(&self) -> bool {
        self.lanes.iter().any(|l| l.spec.calm)
    }

    /// Runs layer `l`, which is in memory with the plain or the calm weights, on every lane of these.
    ///
    /// # Errors
    /// Fixtures that can't be read, or a device failure.
    pub fn advance(&mut self, l: usize, calm: bool, out: &mut LayerFigures) -> Result<()> {
        for i in 0..self.lanes.len() {
            if self.lanes[i].spec.calm == calm {
                match self.lanes[i].spec.kind {
                    Kind::Forced(slots, knob) => {
                        self.turn(slots, knob);
                        let figure = self.forced(i, l);
                        self.turn(Slots::Released, Knob::Off);
                        match self.lanes[i].spec.kind {
                            GATED => out.forced = figure?,
                            _ => out.variants.extend(figure?.map(|f| (slots, knob, f))),
                        }
                    }
                    Kind::Block(layers) if layers.contains(&l) => self.block(i, l, &mut out.blocks)?,
                    Kind::Block(_) => {}
                    _ => out.free.push(self.free(i, l)?),
                }
            }
        }
        Ok(())
    }

    fn turn(&self, slots: Slots, knob: Knob) {
        let b = self.model.backend();
        b.set_slots(slots);
        if let Some(set) = self.set {
            set(b.inner(), knob);
        }
    }

    fn step(&mut self, i: usize, walk: usize) -> Result<Choice> {
        let lane = &mut self.lanes[i];
        self.model.advance(&mut lane.walks[walk], &mut lane.state, &mut Taps::off())?;
        Ok(self.model.backend().take()?.unwrap_or_default())
    }

    fn streams(&self, i: usize, walk: usize) -> Result<Host> {
        Ok(self.model.backend().read(&self.lanes[i].walks[walk].streams)?)
    }

    fn forced(&mut self, i: usize, l: usize) -> Result<Option<ForcedFigure>> {
        let f = self.fixtures;
        let before = l.checked_sub(1).map(|p| format!("whole.8.streams.{p}"));
        let given = before.as_ref().is_none_or(|name| f.streams.has(name));
        if given {
            self.lanes[i].segment = Some((l, vec![f64::INFINITY; 8]));
        }
        if self.lanes[i].segment.is_none() || !self.lanes[i].has_sources(&self.model, l) {
            self.lanes[i].segment = None;
            return Ok(None);
        }
        if let (true, Some(name), Some(p)) = (given, &before, l.checked_sub(1)) {
            let pre = f.whole.values("whole.8.pre")?[p * 32..][..32].to_vec();
            let b = self.model.backend();
            let walk = &mut self.lanes[i].walks[0];
            walk.streams = b.upload(&Host::f32(&[8, 4, 5120], f.streams.values(name)?))?;
            walk.pre = b.upload(&Host::f32(&[8, 4], pre))?;
        }
        let choice = self.step(i, 0)?;
        let lane = &mut self.lanes[i];
        let Some((from, margins)) = &mut lane.segment else { return Ok(None) };
        margins.iter_mut().zip(&choice.margins).for_each(|(m, c)| *m = m.min(*c));
        let (from, margins) = (*from, margins.clone());
        lane.choice = choice;
        let name = format!("whole.8.streams.{l}");
        if !f.streams.has(&name) {
            return Ok(None);
        }
        let (got, want) = (self.streams(i, 0)?, f.streams.values(&name)?);
        let tokens =
            (0..8).map(|t| metrics::values(got.row(t), &want[t * 20_480..][..20_480]).nrms).collect();
        let all = metrics::values(got.as_f32(), &want).nrms;
        let mut figure = ForcedFigure { from, layer: l, tokens, nrms: all, all, margins };
        let apart = super::report::flipped(&figure);
        if !apart.is_empty() {
            let rows = |x: &[f32]| -> Vec<f32> {
                let kept = x.chunks(20_480).enumerate().filter(|(t, _)| !apart.contains(t));
                kept.flat_map(|(_, row)| row.to_vec()).collect()
            };
            figure.nrms = metrics::values(&rows(got.as_f32()), &rows(&want)).nrms;
        }
        Ok(Some(figure))
    }

    fn block(&mut self, i: usize, l: usize, out: &mut Vec<BlockFigure>) -> Result<()> {
        if !self.lanes[i].has_sources(&self.model, l) {
            return Ok(());
        }
        let f = self.fixtures;
        let x = host(&format!("block.{l}.x"), &[PREFILL + STEPS, 4, 5120], 1.5, 0.0);
        let pre = Host::f32(
            &[PREFILL + STEPS, 4],
            values(&format!("block.{l}.pre"), 4 * (PREFILL + STEPS), 0.15, 0.5),
        );
        let mut at = 0;
        for step in 0..=STEPS {
            let n = if step == 0 { PREFILL } else { 1 };
            let b = self.model.backend();
            let walk = &mut self.lanes[i].walks[step];
            (walk.streams, walk.pre) = (b.upload(&x.slice_rows(at, n))?, b.upload(&pre.slice_rows(at, n))?);
            let choice = self.step(i, step)?;
            let got = self.streams(i, step)?;
            let name =
                format!("block.{l}.{}", if step == 0 { "prefill".into() } else { format!("step{step}") });
            let want = f.blocks.values(&format!("{name}.streams"))?;
            let mut theirs: Vec<i32> =
                f.blocks.ints(&format!("{name}.router_indices"))?.into_iter().map(|e| e as i32).collect();
            theirs.sort_unstable();
            let rows: &[usize] = if step == 0 { &ROWS } else { &[0] };
            for (row, want) in rows.iter().zip(want.chunks(20_480)) {
                out.push(BlockFigure {
                    layer: l,
                    position: at + row,
                    nrms: metrics::values(got.row(*row), want).nrms,
                    margin: choice.margins[*row],
                    same_experts: (row + 1 == n).then(|| choice.sorted(*row) == theirs),
                });
            }
            at += n;
        }
        Ok(())
    }

    fn free(&mut self, i: usize, l: usize) -> Result<FreeFigure> {
        let spec = self.lanes[i].spec;
        let plain = self.lanes.iter().position(|p| {
            p.spec.kind == Kind::Free && (p.spec.tokens, p.spec.calm) == (spec.tokens, spec.calm)
        });
        let forced = self.lanes.iter().position(|p| p.spec.kind == GATED);
        let teacher = match spec.kind {
            Kind::Perturbed(true) => plain,
            Kind::Routed => forced,
            _ => None,
        };
        if let Some(t) = teacher {
            self.model.backend().replay(Some(self.lanes[t].choice.experts.clone()));
        }
        let choice = self.step(i, 0)?;
        let streams = self.streams(i, 0)?;
        let at = ints(&format!("whole.sample.{}", spec.tokens), 64, (spec.tokens * 20_480) as u64);
        let sample: Vec<f32> = at.iter().map(|j| streams.as_f32()[*j as usize]).collect();
        let other = plain.filter(|p| *p != i);
        let want = match (spec.kind, other) {
            (Kind::Perturbed(_), Some(p)) => self.lanes[p].sample.clone(),
            _ => self.fixtures.whole.values(&format!("{}.samples", self.lanes[i].prefix()))?[l * 64..][..64]
                .to_vec(),
        };
        let changes = other.map(|p| choice.changes(&self.lanes[p].choice));
        let figure = FreeFigure {
            lane: spec.name.into(),
            layer: l,
            sample: metrics::values(&sample, &want).nrms,
            changes,
        };
        (self.lanes[i].choice, self.lanes[i].sample) = (choice, sample);
        Ok(figure)
    }

    /// The logits of every lane that all layers have taken, free runs alone, by name.
    ///
    /// # Errors
    /// A device failure.
    pub fn finish(mut self) -> Result<Vec<(Spec, Host)>> {
        let mut out = Vec::new();
        for lane in &mut self.lanes {
            if let (Kind::Free | Kind::Routed | Kind::Perturbed(_), Some(walk)) =
                (lane.spec.kind, lane.walks.pop())
            {
                let logits = self.model.finish(walk, &mut lane.state)?.logits;
                out.push((lane.spec, self.model.backend().read(&logits)?));
            }
        }
        Ok(out)
    }

    /// Where the forced lanes stand within a segment.
    pub fn segment(&self) -> Option<(usize, Vec<f64>)> {
        self.lanes.iter().find(|l| l.spec.kind == GATED)?.segment.clone()
    }

    /// Puts the forced lanes into a segment.
    pub fn set_segment(&mut self, segment: Option<(usize, Vec<f64>)>) {
        for lane in self.lanes.iter_mut().filter(|l| matches!(l.spec.kind, Kind::Forced(..))) {
            lane.segment.clone_from(&segment);
        }
    }
}
