//! Bisect: which operator made the logits move.
//!
//! Own errors do not add up: fp8 and fp4 re-quantisation and expert flips amplify any last-bit change. So the report
//! keeps apart what an operator does to the reference's inputs (own error), what has gathered by then (accumulated
//! error), how much the operator enlarges a last-bit change (amplification), and choices that fell the other way.

use std::{collections::BTreeMap, fmt::Write as _};

use checkpoint::Checkpoint;
use model::{Input, Model, Rows};
use numerics::quantise;
use ops::{Backend, Host, Mode, Taps, registry::SPECS};
use serde::Serialize;

use crate::{
    Error, Result,
    gates::{model::HostBackend, operators::reference_mode},
    judge::{self, TensorResult},
    load,
    trace::{Kind, Recorder, Tensor, Trace, place},
    twin::{CallError, Pair, Twin},
};

/// One tensor of a reference trace.
#[derive(Clone, Debug, Serialize)]
pub struct Segment {
    /// Its name.
    pub name: String,
    /// Device on the trace's own tensors before it, against the trace.
    pub own: f64,
    /// The scalar reference on the same inputs, against the trace: what is not the device's doing.
    pub reference: f64,
    /// Device running freely, against the trace.
    pub accumulated: f64,
    /// Own error from which the segment counts as departing.
    pub limit: f64,
    /// Operators between the tensors before it and this one.
    pub operators: &'static [&'static str],
}

/// Where the first departure is, and how sure that is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "blame", rename_all = "kebab-case")]
pub enum Blame {
    /// An operator is past its tolerance on the reference's inputs.
    Operator {
        /// The operator.
        operator: String,
        /// Its layer.
        layer: usize,
    },
    /// All operators are within tolerance; this one is the first whose bits differ.
    Bits {
        /// The operator.
        operator: String,
        /// Its layer.
        layer: usize,
    },
    /// A tensor of the trace is not reproduced although every operator agrees with its scalar reference: the graph, the
    /// reference, or the trace's own numerics differ there.
    Graph {
        /// The tensor.
        tensor: String,
    },
    /// Nothing departs.
    Nothing,
}

/// The result of a bisect.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Numerics of the device.
    pub numerics: &'static str,
    /// The first departure.
    #[serde(flatten)]
    pub blame: Blame,
    /// Every call, in the order of the forward pass.
    pub calls: Vec<CallError>,
    /// Every tensor of the trace, in the order of the forward pass; empty without a trace.
    pub segments: Vec<Segment>,
}

/// Runs `device` and `reference` side by side on `ids` and, where a trace is given, on the tensors of its `pass`.
///
/// # Errors
/// What the checkpoint, the model, the trace or a device reports.
pub fn bisect<R: HostBackend, D: Backend>(
    reference: R,
    device: D,
    checkpoint: &Checkpoint,
    ids: &[u32],
    trace: Option<(&Trace, &str)>,
) -> Result<Report> {
    let mode = device.mode();
    let model = load(checkpoint, Twin::new(reference, device, true))?;
    let free = run(&model, ids, trace, false)?;
    let (calls, segments) = match trace {
        None => (free.calls, Vec::new()),
        Some(_) => {
            let forced = run(&model, ids, trace, true)?;
            let segments = segments(&free.device, &forced, mode);
            (forced.calls, segments)
        }
    };
    let blame = blame(&calls, &segments, mode);
    Ok(Report { numerics: mode.name(), blame, calls, segments })
}

struct Run {
    calls: Vec<CallError>,
    device: BTreeMap<String, TensorResult>,
    reference: BTreeMap<String, TensorResult>,
}

/// One run; with `force` every tensor that the trace has replaces the run's own after it was compared.
fn run<R: HostBackend, D: Backend>(
    model: &Model<Twin<R, D>>,
    ids: &[u32],
    trace: Option<(&Trace, &str)>,
    force: bool,
) -> Result<Run> {
    let twin = model.backend();
    twin.take()?;
    let mut ours = Recorder::new(model.config(), None)?;
    let mut theirs = Recorder::new(model.config(), None)?;
    let positions: Vec<u32> = (0..ids.len() as u32).collect();
    ours.begin(positions.clone(), &[]);
    theirs.begin(positions, &[]);
    let (mut device, mut reference) = (BTreeMap::new(), BTreeMap::new());
    let mut failure: Option<Error> = None;
    let mut sink = |name: &str, value: &Pair<D::Buf>| {
        let Some((trace, pass)) = trace else { return };
        let mut listen = || -> Result<()> {
            ours.tap(name, &twin.device().read(&value.device())?);
            theirs.tap(name, &value.reference());
            for (recorder, out) in [(&mut ours, &mut device), (&mut theirs, &mut reference)] {
                for (name, tensor) in recorder.take() {
                    if let Some(want) = trace.get(pass, &name)
                        && let Some(result) = judge::compare_tensors(&name, &tensor, &want)
                    {
                        out.insert(name, result);
                    }
                }
            }
            if force
                && let Some(want) = trace.get(pass, name)
                && let Some(host) = forcing(name, &want, value.reference().shape())
            {
                let buffer = twin.device().upload(&host)?;
                value.force(host, buffer);
            }
            Ok(())
        };
        if let Err(e) = listen() {
            failure.get_or_insert(e);
        }
    };
    let mut state = model.new_state(ids.len())?;
    model.forward(&mut state, Input::text(ids), Rows::All, &mut Taps::new(&mut sink))?;
    match failure {
        Some(e) => Err(e),
        None => Ok(Run { calls: twin.take()?, device, reference }),
    }
}

/// The trace's tensor in the form that the tapped place holds; `None` where it can't be put there.
fn forcing(name: &str, want: &Tensor, shape: &[usize]) -> Option<Host> {
    let at = place(name);
    match at.kind {
        Kind::Cached if at.stage == "window_kv" => {
            let values = want.as_float()?;
            if shape.first() != Some(&want.rows()) {
                return None;
            }
            let mut codes = vec![0; shape.iter().product()];
            let width: usize = shape[1..].iter().product();
            if width != quantise::fp8_row_bytes(want.width()) {
                return None;
            }
            for (row, out) in values.chunks(want.width()).zip(codes.chunks_mut(width)) {
                quantise::store_fp8(row, out);
            }
            Some(Host::u8(shape, codes))
        }
        Kind::Values | Kind::Scores | Kind::RoutingWeights if want.shape == shape => {
            Some(Host::f32(shape, want.as_float()?.to_vec()))
        }
        Kind::Selection | Kind::Experts if want.shape == shape => {
            Some(Host::i32(shape, want.as_int()?.iter().map(|v| *v as i32).collect()))
        }
        _ => None,
    }
}

fn tolerance(operator: &str, mode: Mode) -> f64 {
    SPECS.iter().find(|s| s.name == operator).map_or(0.0, |s| s.tolerance(mode).nrms)
}

fn segments(free: &BTreeMap<String, TensorResult>, forced: &Run, mode: Mode) -> Vec<Segment> {
    let mut names: Vec<&String> = forced.device.keys().collect();
    names.sort_by_key(|n| place(n).order);
    names
        .into_iter()
        .filter(|n| place(n).kind != Kind::Margin)
        .map(|name| {
            let error = |of: &BTreeMap<String, TensorResult>| of.get(name).map_or(0.0, TensorResult::error);
            let operators = place(name).row().map_or(&[][..], |r| r.operators);
            // Three operators' worth: errors of a chain add up at most, and each may sit at its tolerance.
            let sum: f64 = operators.iter().map(|o| tolerance(o, reference_mode(mode))).sum();
            Segment {
                name: name.clone(),
                own: error(&forced.device),
                reference: error(&forced.reference),
                accumulated: error(free),
                limit: (3.0 * sum).max(1e-6),
                operators,
            }
        })
        .collect()
}

fn past(c: &CallError, mode: Mode) -> bool {
    let t = tolerance(c.operator, mode);
    if t == 0.0 { !c.equal } else { c.own > t || c.own_flips > 0 }
}

fn blame(calls: &[CallError], segments: &[Segment], mode: Mode) -> Blame {
    if let Some(c) = calls.iter().find(|c| past(c, mode)) {
        return Blame::Operator { operator: c.operator.into(), layer: c.layer };
    }
    if let Some(s) = segments.iter().find(|s| s.own > s.limit) {
        return Blame::Graph { tensor: s.name.clone() };
    }
    match calls.iter().find(|c| !c.equal) {
        Some(c) => Blame::Bits { operator: c.operator.into(), layer: c.layer },
        None => Blame::Nothing,
    }
}

/// One operator over all its calls.
#[derive(Clone, Debug, Serialize)]
pub struct Ranked {
    /// The operator.
    pub operator: &'static str,
    /// Layer of its largest own error.
    pub layer: usize,
    /// Largest own error.
    pub own: f64,
    /// Its tolerance.
    pub tolerance: f64,
    /// Largest accumulated error.
    pub accumulated: f64,
    /// Median amplification of a last-bit change.
    pub amplification: Option<f64>,
    /// Rows whose choice differs on the reference's inputs, over all calls.
    pub own_flips: usize,
    /// The same on the device's inputs.
    pub flips: usize,
}

impl Report {
    /// Operators by own error over tolerance, largest first.
    pub fn ranking(&self) -> Vec<Ranked> {
        let mode = self.numerics.parse().unwrap_or(Mode::Exact);
        let mut by: BTreeMap<&'static str, Vec<&CallError>> = BTreeMap::new();
        self.calls.iter().for_each(|c| by.entry(c.operator).or_default().push(c));
        let mut all: Vec<Ranked> = by
            .into_iter()
            .filter_map(|(operator, calls)| {
                let worst = calls.iter().max_by(|a, b| a.own.total_cmp(&b.own))?;
                let mut amplification: Vec<f64> = calls.iter().filter_map(|c| c.amplification).collect();
                amplification.sort_by(f64::total_cmp);
                Some(Ranked {
                    operator,
                    layer: worst.layer,
                    own: worst.own,
                    tolerance: tolerance(operator, mode),
                    accumulated: calls.iter().map(|c| c.accumulated).fold(0.0, f64::max),
                    amplification: amplification.get(amplification.len() / 2).copied(),
                    own_flips: calls.iter().map(|c| c.own_flips).sum(),
                    flips: calls.iter().map(|c| c.flips).sum(),
                })
            })
            .collect();
        let weight = |r: &Ranked| {
            if r.own == 0.0 { 0.0 } else { r.own / r.tolerance.max(f64::MIN_POSITIVE) }
        };
        all.sort_by(|a, b| weight(b).total_cmp(&weight(a)).then(b.accumulated.total_cmp(&a.accumulated)));
        all
    }

    /// The report as text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let _ = match &self.blame {
            Blame::Operator { operator, layer } => {
                writeln!(
                    out,
                    "first departure: {operator} at layer {layer}, past its tolerance on exact inputs"
                )
            }
            Blame::Bits { operator, layer } => writeln!(
                out,
                "every operator is within its tolerance; the first whose bits differ is {operator} at layer {layer}"
            ),
            Blame::Graph { tensor } => writeln!(
                out,
                "{tensor} is not reproduced, yet every operator agrees with its scalar reference: graph, reference or \
                 the trace's numerics differ there"
            ),
            Blame::Nothing => writeln!(out, "no operator departs: all bits are equal"),
        };
        let _ = writeln!(
            out,
            "\n{:<22} {:>6} {:>10} {:>10} {:>12} {:>10} {:>10} {:>8}",
            "operator", "layer", "own", "tolerance", "accumulated", "amplifies", "own flips", "flips"
        );
        for r in self.ranking() {
            let _ = writeln!(
                out,
                "{:<22} {:>6} {:>10} {:>10} {:>12} {:>10} {:>10} {:>8}",
                r.operator,
                r.layer,
                short(r.own),
                short(r.tolerance),
                short(r.accumulated),
                r.amplification.map_or("-".into(), |a| format!("{a:.2}")),
                r.own_flips,
                r.flips
            );
        }
        if !self.segments.is_empty() {
            let _ = writeln!(
                out,
                "\n{:<28} {:>10} {:>10} {:>10} {:>12}",
                "tensor of the trace", "own", "limit", "reference", "accumulated"
            );
            for s in &self.segments {
                let mark = if s.own > s.limit { " <" } else { "" };
                let _ = writeln!(
                    out,
                    "{:<28} {:>10} {:>10} {:>10} {:>12}{mark}",
                    s.name,
                    short(s.own),
                    short(s.limit),
                    short(s.reference),
                    short(s.accumulated)
                );
            }
        }
        out
    }
}

fn short(v: f64) -> String {
    if v == 0.0 { "0".into() } else { format!("{v:.1e}") }
}
