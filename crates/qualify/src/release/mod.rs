//! `qualify release`: the gates at released size against the model maker's CUDA path, on generated weights.
//!
//! DeepSeek's released `model.py` with its TileLang kernels ran on an NVIDIA H200; `fixtures/source-cuda` holds what came
//! out. Weights and inputs come from a generator, so nothing but outputs is stored, and one layer's weights are made at a
//! time.

pub mod fixtures;
pub mod generated;
pub mod hosted;
pub mod knobs;
pub mod lanes;
pub mod limits;
pub mod operators;
pub mod plots;
pub mod report;
pub mod routes;
mod work;

use std::{
    ops::Range,
    path::PathBuf,
    time::{Duration, Instant},
};

use model::Streamed;
use ops::Backend;
use serde_json::{Value, json};

use crate::{
    Error, Result,
    inputs::Inputs,
    receipt::{CheckpointId, Context, DeviceId, Gate, Receipt},
};
use fixtures::Fixtures;
use generated::Generated;
use knobs::Knob;
use lanes::{Kind, Lanes, LayerFigures, Spec};
use operators::operators;
use report::{Flip, Whole};
use routes::{Routes, Slots};
use work::Progress;

/// What of G3 runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WholeRuns {
    /// None: G0 to G2.
    None,
    /// The prompts of 8 tokens.
    Short,
    /// Those and the prompt of 160 tokens.
    All,
}

/// How the release gates run.
pub struct ReleaseRun {
    /// The device.
    pub device: DeviceId,
    /// Layers to run.
    pub layers: Range<usize>,
    /// Whole runs; they need every layer.
    pub whole: WholeRuns,
    /// Where finished layers are kept.
    pub work: Option<PathBuf>,
    /// The command line, folders left out.
    pub command: String,
    /// Whether the operators run; without them G0 and G1 say NOT RUN.
    pub operators: bool,
    /// Layer before which the run breaks off with an error, as if interrupted.
    pub stop: Option<usize>,
}

/// What the gates gave.
pub struct Outcome {
    /// G0 to G3.
    pub gates: Vec<Gate>,
    /// Figures of the layers.
    pub layers: Vec<LayerFigures>,
    /// Flips.
    pub flips: Vec<Flip>,
    /// Figures of the whole runs.
    pub wholes: Vec<Whole>,
    /// For the receipt.
    pub measurements: Value,
}

impl ReleaseRun {
    /// Lanes that run; those with a departure where the backend has `knobs`.
    fn wanted(&self, layers: usize, knobs: bool) -> impl Fn(&Spec) -> bool + use<> {
        let (all, whole) = (self.layers == (0..layers), self.whole);
        move |s: &Spec| match s.kind {
            Kind::Forced(Slots::Released, Knob::Off) | Kind::Block(_) => true,
            Kind::Forced(_, Knob::Off) => all,
            Kind::Forced(..) => all && knobs,
            _ => all && (whole == WholeRuns::All || whole == WholeRuns::Short && s.tokens == 8),
        }
    }

    /// Runs the gates on `backend`, which computes in mode `source`; `knobs` turns its knobs, where it has any; `progress` is
    /// told what was done.
    ///
    /// # Errors
    /// Fixtures or a work folder that can't be read, layers that do not exist, or a device failure.
    pub fn run<B: Backend>(
        &self,
        backend: B,
        knobs: Option<fn(&B, Knob)>,
        mut progress: impl FnMut(&str),
    ) -> Result<Outcome> {
        let f = Fixtures::open()?;
        let config = generated::config();
        let layers = config.num_hidden_layers;
        if self.layers.is_empty() || self.layers.end > layers {
            let (a, b) = (self.layers.start, self.layers.end);
            return Err(Error::Usage(format!("--layers {a}..{b} names no layers of 0..{layers}")));
        }
        let began = Instant::now();
        let g01 = if self.operators {
            operators(&backend, &f, |what| progress(&format!("operators: {what}")))?
        } else {
            ["G0", "G1"].map(|g| Gate::not_run(g, "the operators were left out"))
        };
        let operators_took = began.elapsed();

        let (plain, calm) = (Generated::new(&config, false), Generated::new(&config, true));
        let map = (0..config.vocab_size as u32).collect();
        let wanted = self.wanted(layers, knobs.is_some());
        let streamed = Streamed::new(Routes::new(backend), config, &plain, map)?;
        let mut lanes = Lanes::new(streamed, knobs, &f, wanted, self.layers.start)?;
        let names: Vec<&str> = lanes.lanes.iter().map(|l| l.spec.name).collect();
        let device = &self.device.family;
        let key = format!("{} {device} {:?} {}", Inputs::built().hash, self.layers, names.join(" "));
        let mut done = Progress { key, next: self.layers.start, figures: Vec::new(), segment: None };
        if let Some(folder) = &self.work
            && let Some(found) = work::load(folder, &done.key)?
        {
            progress(&format!("going on behind layer {} from {}", found.next - 1, folder.display()));
            work::restore(folder, found.next, &mut lanes)?;
            lanes.set_segment(found.segment.clone());
            done = found;
        }
        let (first, began) = (done.next, Instant::now());
        for l in done.next..self.layers.end {
            if self.stop == Some(l) {
                return Err(Error::Usage(format!("stopped before layer {l}")));
            }
            let mut figures = LayerFigures { layer: l, ..LayerFigures::default() };
            lanes.model.load(&plain, l)?;
            lanes.advance(l, false, &mut figures)?;
            if lanes.any_calm() {
                lanes.model.load(&calm, l)?;
                lanes.advance(l, true, &mut figures)?;
            }
            progress(&line(&figures, began.elapsed(), l + 1 - first, self.layers.end - l - 1));
            done.figures.push(figures);
            (done.next, done.segment) = (l + 1, lanes.segment());
            if let Some(folder) = &self.work {
                work::save(folder, &done, &lanes)?;
            }
        }
        let (g2, flips) = report::layers(&done.figures);
        let whole = self.layers == (0..layers) && self.whole != WholeRuns::None;
        let logits = if whole { lanes.finish()? } else { Vec::new() };
        let wholes = report::wholes(&logits, &done.figures, &f)?;
        let g3 = report::whole_gate(&wholes, &f)?;
        let mut measurements = report::measurements(&done.figures, &flips, &wholes, &f)?;
        measurements["seconds"] = json!({
            "operators": operators_took.as_secs_f64(),
            "layers": began.elapsed().as_secs_f64(),
            "layers_run": self.layers.end - first,
        });
        if let Some(folder) = &self.work {
            work::clear(folder);
        }
        let gates = g01.into_iter().chain([g2, g3]).collect();
        Ok(Outcome { gates, layers: done.figures, flips, wholes, measurements })
    }

    /// The receipt of an outcome.
    ///
    /// # Errors
    /// Fixtures that can't be read.
    pub fn receipt(&self, outcome: &Outcome, numerics: &str) -> Result<Receipt> {
        let scope = format!(
            "DeepSeek's CUDA path on an H200 (V4's kernel.py with the documented V4.1 changes) against {} in {numerics} \
             numerics: operators at released size, layers {} to {} of a 40-layer model of released width with 16 experts and \
             random weights, in the slot order of the released prefill{}; not the released weights{}",
            self.device.family,
            self.layers.start,
            self.layers.end - 1,
            if outcome.wholes.is_empty() { "" } else { ", and whole runs of it" },
            match self.device.name.as_str() {
                "cpu" => "",
                _ =>
                    ", and of SwiGLU and the unary functions only what those layers show: here they lie inside kernels",
            },
        );
        let context = Context {
            kind: "release".into(),
            scope,
            device: self.device.clone(),
            numerics: numerics.into(),
            checkpoint: None::<CheckpointId>,
            references: Fixtures::open()?.files(),
            command: self.command.clone(),
            unqualified: false,
        };
        Ok(context.receipt(outcome.gates.clone(), outcome.measurements.clone()))
    }
}

/// One line of progress.
fn line(f: &LayerFigures, elapsed: Duration, done: usize, left: usize) -> String {
    let mut parts = vec![format!("layer {:>2}", f.layer)];
    if let Some(forced) = &f.forced {
        let what =
            if forced.from == forced.layer { "forced".into() } else { format!("from {}", forced.from) };
        parts.push(format!("{what} {:.5}", forced.all));
    }
    if let Some(worst) = f.blocks.iter().map(|b| b.nrms).max_by(f64::total_cmp) {
        parts.push(format!("block rows up to {worst:.5}"));
    }
    for free in f.free.iter().filter(|f| !f.lane.contains('.') && !f.lane.starts_with("ulp")) {
        parts.push(format!("{} {:.4}", free.lane, free.sample));
    }
    let rest = elapsed.as_secs_f64() / done as f64 * left as f64;
    parts.push(format!("{:.0} s, about {rest:.0} s left", elapsed.as_secs_f64()));
    parts.join(", ")
}
