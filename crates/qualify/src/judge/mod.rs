//! The judge: two traces of any engines, tensor by tensor, with a verdict relative to the reference's own noise.

mod html;
pub mod metrics;
mod report;

pub use html::page;
pub use report::text;

use serde::Serialize;

use crate::{
    Error, Result,
    thresholds::Thresholds,
    trace::{Elements, Kind, Tensor, Trace, place},
    verdict::Verdict,
};
use metrics::{ChoiceError, LogitError, ValueError};

/// What a comparison of one tensor gives.
#[derive(Clone, Debug, Serialize)]
pub struct TensorResult {
    /// Name without the pass.
    pub name: String,
    /// Its layer.
    pub layer: Option<usize>,
    /// Name without the layer.
    pub stage: String,
    /// How it was compared.
    pub kind: Kind,
    /// Rows compared.
    pub rows: usize,
    /// Error of values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub values: Option<ValueError>,
    /// Figures of logits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits: Option<LogitError>,
    /// Agreement of choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub choices: Option<ChoiceError>,
    /// Margins of the rows that chose differently, where the reference says them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub margins: Vec<f64>,
    /// Elements that differ: cached values in another bin, flags, ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub differing: Option<usize>,
    /// NRMS of each row, for values.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub row_nrms: Vec<f64>,
    /// NRMS of the second reference against the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub noise: Option<f64>,
}

impl TensorResult {
    /// One number for maps and rankings: NRMS, or the share of choices, flags or ids that differ.
    pub fn error(&self) -> f64 {
        match (&self.values, &self.choices, self.differing) {
            (Some(v), _, _) => v.nrms,
            (_, Some(c), _) => c.differing.len() as f64 / c.rows.max(1) as f64,
            (_, _, Some(n)) => n as f64 / self.rows.max(1) as f64,
            _ => 0.0,
        }
    }
}

/// The noise-relative verdict of one pass.
#[derive(Clone, Debug, Serialize)]
pub struct Floor {
    /// NRMS of the candidate's logits.
    pub nrms: f64,
    /// NRMS of the second reference's logits: N.
    pub noise_nrms: f64,
    /// Mean KL of the candidate.
    pub kl: f64,
    /// Mean KL of the second reference.
    pub noise_kl: f64,
    /// NRMS that would still pass.
    pub limit_nrms: f64,
    /// KL that would still pass.
    pub limit_kl: f64,
    /// Both under their limits.
    pub verdict: Verdict,
}

/// What a comparison of one pass gives.
#[derive(Clone, Debug, Serialize)]
pub struct PassResult {
    /// Name of the pass.
    pub pass: String,
    /// Token ids in the reference.
    pub tokens: usize,
    /// Ids before the first that differs; equal to `tokens` where all agree.
    pub equal_tokens: usize,
    /// Tensors in the order of the forward pass.
    pub tensors: Vec<TensorResult>,
    /// Names that only one of the traces has.
    pub unmatched: Vec<String>,
    /// Names whose shapes do not fit, with both shapes.
    pub misshapen: Vec<String>,
    /// The verdict where a second reference was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor: Option<Floor>,
    /// First tensor of the forward pass that departs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub departs: Option<String>,
}

impl PassResult {
    /// The result of the tensor `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorResult> {
        self.tensors.iter().find(|t| t.name == name)
    }
}

/// The judgement of a candidate.
#[derive(Clone, Debug, Serialize)]
pub struct Judgement {
    /// The reference.
    pub reference: String,
    /// The candidate.
    pub candidate: String,
    /// The second trace of the reference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub noise: Option<String>,
    /// Passes that both have.
    pub passes: Vec<PassResult>,
    /// PASS or FAIL where a second reference gave a floor, PARTIAL where it lacks a pass, NOT RUN without one.
    pub verdict: Verdict,
}

/// Compares `candidate` with `reference`; `noise` is a second trace of the reference engine (perturbed, reordered or
/// batched otherwise), from which the floor is taken.
///
/// # Errors
/// Traces without a pass in common.
pub fn judge(
    reference: &Trace,
    candidate: &Trace,
    noise: Option<&Trace>,
    thresholds: &Thresholds,
) -> Result<Judgement> {
    let theirs = candidate.passes();
    let mut passes = Vec::new();
    for pass in reference.passes().into_iter().filter(|p| theirs.contains(p)) {
        let mut result = compare(reference, candidate, &pass)?;
        if let Some(noise) = noise.filter(|n| n.passes().contains(&pass)) {
            let second = compare(reference, noise, &pass)?;
            for t in &mut result.tensors {
                t.noise = second.tensor(&t.name).map(TensorResult::error);
            }
            result.floor = floor(&result, &second, thresholds);
        }
        result.departs = departure(&result, thresholds);
        passes.push(result);
    }
    if passes.is_empty() {
        return Err(Error::Usage(format!(
            "{} and {} have no pass in common: {} against {}",
            reference.file(),
            candidate.file(),
            reference.passes().join(" "),
            theirs.join(" ")
        )));
    }
    let verdict = match noise {
        None => Verdict::NotRun,
        Some(_) => {
            Verdict::all(passes.iter().map(|p| p.floor.as_ref().map_or(Verdict::NotRun, |f| f.verdict)))
        }
    };
    Ok(Judgement {
        reference: reference.title(),
        candidate: candidate.title(),
        noise: noise.map(Trace::title),
        passes,
        verdict,
    })
}

fn floor(candidate: &PassResult, second: &PassResult, thresholds: &Thresholds) -> Option<Floor> {
    let figures = |p: &PassResult| {
        let t = p.tensor("logits")?;
        Some((t.values?.nrms, t.logits?.kl))
    };
    let ((nrms, kl), (noise_nrms, noise_kl)) = (figures(candidate)?, figures(second)?);
    let limit_nrms = thresholds.g3.limit_nrms(noise_nrms);
    let limit_kl = thresholds.g3.limit_kl(noise_kl);
    let verdict = Verdict::from(nrms <= limit_nrms && kl <= limit_kl);
    Some(Floor { nrms, noise_nrms, kl, noise_kl, limit_nrms, limit_kl, verdict })
}

/// The first tensor past its noise, or past the fixed limit where no noise is known.
fn departure(pass: &PassResult, thresholds: &Thresholds) -> Option<String> {
    let compared = pass.tensors.iter().filter(|t| t.kind != Kind::Margin);
    compared
        .filter(|t| match t.noise {
            Some(n) => t.error() > thresholds.g3.limit_nrms(n),
            None => t.error() > *thresholds.judge.departure,
        })
        .map(|t| t.name.clone())
        .next()
}

/// Compares one pass.
///
/// # Errors
/// A pass without tokens.
pub fn compare(reference: &Trace, candidate: &Trace, pass: &str) -> Result<PassResult> {
    let (ids, other) = (reference.tokens(pass)?, candidate.tokens(pass)?);
    let equal = ids.iter().zip(&other).take_while(|(a, b)| a == b).count();
    let mut out = PassResult {
        pass: pass.to_owned(),
        tokens: ids.len(),
        equal_tokens: if ids.len() == other.len() { equal } else { equal.min(ids.len() - 1) },
        tensors: Vec::new(),
        unmatched: Vec::new(),
        misshapen: Vec::new(),
        floor: None,
        departs: None,
    };
    let names = reference.tensors(pass);
    for name in names.iter().filter(|n| *n != "tokens") {
        let Some(b) = reference.get(pass, name) else { continue };
        let Some(a) = counterpart(candidate, pass, name) else {
            out.unmatched.push(name.clone());
            continue;
        };
        let at = place(name);
        if at.kind == Kind::Margin {
            continue;
        }
        let context = Context { tokens: ids.len(), equal: out.equal_tokens };
        let margin = reference.get(pass, &format!("{}.margin", margin_of(name)));
        match tensor(name, &a, &b, context, margin.as_ref()) {
            Some(result) => out.tensors.push(result),
            None => out.misshapen.push(format!("{name}: {:?} against {:?}", a.shape, b.shape)),
        }
    }
    let part = |n: &str, mark: &str| names.contains(&format!("{n}{mark}"));
    let known = |n: &String| names.contains(n) || part(n, ".tail") || part(n, ".rms");
    out.unmatched.extend(candidate.tensors(pass).into_iter().filter(|n| !known(n)));
    // Routing weights are compared under the experts that they belong to.
    align_routing(reference, candidate, pass, &mut out);
    Ok(out)
}

/// `layers.3.router` for `layers.3.router.experts`, the name itself otherwise.
fn margin_of(name: &str) -> &str {
    name.strip_suffix(".experts").unwrap_or(name)
}

/// The candidate's tensor, cut down where the reference keeps a part: `.tail` the last rows, `.rms` of every row.
fn counterpart(candidate: &Trace, pass: &str, name: &str) -> Option<Tensor> {
    if let Some(t) = candidate.get(pass, name) {
        return Some(t);
    }
    if let Some(base) = name.strip_suffix(".tail") {
        return candidate.get(pass, base);
    }
    let t = candidate.get(pass, name.strip_suffix(".rms")?)?;
    let (w, values) = (t.width(), t.as_float()?);
    let rms = |row: &[f32]| {
        let sum: f64 = row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        (sum / w as f64).sqrt() as f32
    };
    Some(Tensor::float(&[t.rows()], values.chunks(w).map(rms).collect()))
}

/// Compares one tensor of a prefill; `None` where the shapes do not fit.
pub fn compare_tensors(name: &str, a: &Tensor, b: &Tensor) -> Option<TensorResult> {
    let tokens = b.rows();
    tensor(name, a, b, Context { tokens, equal: tokens }, None)
}

#[derive(Clone, Copy)]
struct Context {
    tokens: usize,
    equal: usize,
}

impl Context {
    /// Position of row 0: a tensor with a row a token begins at 0, rows of decode steps end one before the last token.
    fn first(self, rows: usize) -> usize {
        if rows == self.tokens { 0 } else { self.tokens.saturating_sub(rows + 1) }
    }

    /// Rows whose whole text is equal in both traces.
    fn comparable(self, stage: &str, rows: usize) -> usize {
        if self.equal == self.tokens {
            rows
        } else if matches!(stage, "compress_kv" | "index_k") {
            rows * self.equal / self.tokens.max(1) // a row an entry, not a token
        } else {
            self.equal.saturating_sub(self.first(rows)).min(rows)
        }
    }
}

fn tensor(
    name: &str,
    a: &Tensor,
    b: &Tensor,
    context: Context,
    margin: Option<&Tensor>,
) -> Option<TensorResult> {
    let at = place(name);
    let (mut rows, tail) = (b.rows(), name.ends_with(".tail"));
    let skip = if tail { a.rows().checked_sub(rows)? } else { 0 };
    if !tail && a.rows() != b.rows() {
        return None;
    }
    let same_width = a.width() == b.width();
    let sets = matches!(at.kind, Kind::Selection | Kind::Experts);
    if !same_width && !sets {
        return None;
    }
    // A draft's rows hold several logits each.
    let per_row = if at.kind == Kind::Logits { b.shape.last().copied().unwrap_or(1) } else { b.width() };
    if !tail {
        rows = context.comparable(&at.stage, rows);
    }
    let mut out = TensorResult {
        name: name.to_owned(),
        layer: at.layer,
        stage: at.stage,
        kind: at.kind,
        rows,
        values: None,
        logits: None,
        choices: None,
        margins: Vec::new(),
        differing: None,
        row_nrms: Vec::new(),
        noise: None,
    };
    match (&a.elements, &b.elements) {
        (Elements::Float(x), Elements::Float(y)) => {
            let w = b.width();
            let (x, y) = (&x[skip * w..][..rows * w], &y[..rows * w]);
            if at.kind == Kind::Scores {
                let (x, y): (Vec<f32>, Vec<f32>) = x
                    .iter()
                    .zip(y)
                    .filter(|(x, y)| x.is_finite() && y.is_finite())
                    .map(|(x, y)| (*x, *y))
                    .unzip();
                out.values = Some(metrics::values(&x, &y));
                let (x, y) = (a.as_float()?, b.as_float()?);
                out.differing = Some(x.iter().zip(y).filter(|(x, y)| x.is_finite() != y.is_finite()).count());
            } else {
                out.values = Some(metrics::values(x, y));
                out.row_nrms = x
                    .chunks(w.max(1))
                    .zip(y.chunks(w.max(1)))
                    .map(|(x, y)| metrics::values(x, y).nrms)
                    .collect();
            }
            match at.kind {
                Kind::Logits => out.logits = Some(metrics::logits(x, y, per_row)),
                Kind::Cached => out.differing = Some(x.iter().zip(y).filter(|(x, y)| x != y).count()),
                _ => {}
            }
        }
        (Elements::Int(x), Elements::Int(y)) if sets => {
            let x = &x[skip * a.width()..];
            let choices = metrics::choices(x, a.width(), y, b.width(), rows);
            let margin = margin.and_then(Tensor::as_float).unwrap_or(&[]);
            out.margins =
                choices.differing.iter().filter_map(|r| margin.get(*r)).map(|m| f64::from(*m)).collect();
            out.choices = Some(choices);
        }
        (Elements::Int(x), Elements::Int(y)) => {
            let w = b.width();
            let first = context.first(b.rows());
            // Compressed entries hold one token or two.
            let ratio = if w >= first + b.rows() { 1 } else { 2 };
            let mask = at.kind == Kind::Mask;
            let seen = |i: usize| !mask || i % w < (first + i / w + 1) / ratio;
            let x = &x[skip * w..];
            out.differing = Some((0..rows * w).filter(|i| seen(*i) && x[*i] != y[*i]).count());
        }
        _ => return None,
    }
    Some(out)
}

/// Replaces the figures of `router.weights` by those of the rows that chose the same experts, expert by expert.
fn align_routing(reference: &Trace, candidate: &Trace, pass: &str, out: &mut PassResult) {
    for t in out.tensors.iter_mut().filter(|t| t.kind == Kind::RoutingWeights) {
        let experts = t.name.replace(".weights", ".experts");
        let rows = |trace: &Trace| -> Option<Vec<Vec<(i64, f32)>>> {
            let (ids, weights) = (trace.get(pass, &experts)?, trace.get(pass, &t.name)?);
            let k = ids.width().max(1);
            let (ids, w) = (ids.as_int()?.to_vec(), weights.as_float()?.to_vec());
            let pairs = ids.chunks(k).zip(w.chunks(k)).map(|(ids, w)| {
                let mut row: Vec<(i64, f32)> = ids.iter().copied().zip(w.iter().copied()).collect();
                row.sort_by_key(|p| p.0);
                row
            });
            Some(pairs.take(t.rows).collect())
        };
        let (Some(a), Some(b)) = (rows(candidate), rows(reference)) else { continue };
        let (mut x, mut y) = (Vec::new(), Vec::new());
        t.row_nrms.clear();
        for (a, b) in a.iter().zip(&b) {
            let same = a.iter().map(|p| p.0).eq(b.iter().map(|p| p.0));
            let (a, b): (Vec<f32>, Vec<f32>) = a.iter().zip(b).map(|(a, b)| (a.1, b.1)).unzip();
            t.row_nrms.push(if same { metrics::values(&a, &b).nrms } else { f64::NAN });
            if same {
                x.extend(a);
                y.extend(b);
            }
        }
        t.values = Some(metrics::values(&x, &y));
    }
}
