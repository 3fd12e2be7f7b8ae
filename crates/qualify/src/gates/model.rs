//! G2 and G3 of a model on a device, against a reference trace or against the CPU's own reference run.

use checkpoint::Checkpoint;
use model::{Input, Model, Rows};
use ops::{Backend, ExpertWeights, Host, Mode, Taps, Weight};
use serde_json::{Value, json};

use crate::{
    Error, Result, Thresholds,
    bins::{Bins, Element},
    fault::Faulty,
    gates::layers::{Forced, LiveTeacher, TraceTeacher, teacher_forced},
    judge::metrics,
    load,
    noise::{SelfNoise, self_noise},
    receipt::{Check, Gate, Rule},
    thresholds::Layers,
    trace::Trace,
};

/// What G2 and G3 give, with measurements for the receipt.
pub struct Outcome {
    /// Teacher-forced layers.
    pub g2: Gate,
    /// Whole model.
    pub g3: Gate,
    /// Self-noise and flips.
    pub measurements: Value,
}

/// Backends that compute on host tensors, as the reference run needs.
pub trait HostBackend: Backend<Buf = Host, Mat = Weight, Experts = Vec<ExpertWeights>> {}

impl<B: Backend<Buf = Host, Mat = Weight, Experts = Vec<ExpertWeights>>> HostBackend for B {}

/// G2 of one pass as checks.
fn layer_checks(pass: &str, forced: &Forced, key: &str, limits: &Layers, t: &Thresholds) -> Vec<Check> {
    let figures = forced.figures();
    let quantile = |q: f64| {
        let last = figures.len().saturating_sub(1) as f64;
        figures.get((last * q).ceil() as usize).copied().unwrap_or(f64::INFINITY)
    };
    let at_most = |name: &str, limit: f64| Rule::AtMost { limit, threshold: format!("g2.{key}.{name}") };
    let allowed = *t.flips.base + *t.flips.share * forced.token_layers() as f64;
    let apart = forced.apart().len() as f64;
    vec![
        Check::new(format!("{pass} median"), quantile(0.5), at_most("median", *limits.median))
            .noted(format!("NRMS of {} token-layers", forced.token_layers())),
        Check::new(format!("{pass} 95th percentile"), quantile(0.95), at_most("p95", *limits.p95)),
        Check::new(format!("{pass} largest"), quantile(1.0), at_most("max", *limits.max)),
        Check::new(format!("{pass} unexplained flips"), forced.unexcused() as f64, Rule::Zero).noted(
            "choices that differ although the margin is above the allowed multiple of the score error",
        ),
        Check::new(
            format!("{pass} flips set apart beyond the allowance"),
            (apart - allowed).max(0.0),
            Rule::Zero,
        )
        .noted(format!("{apart} set apart, {allowed:.1} allowed")),
    ]
}

/// G2 of one pass, with the limits of `key`.
pub fn layer_gate(pass: &str, forced: &Forced, key: &str) -> Gate {
    let t = Thresholds::built_in();
    let (key, limits) = t.layers(key);
    Gate::new("G2", layer_checks(pass, forced, key, limits, t))
}

/// G3 of one pass as checks.
fn whole_checks(pass: &str, got: &Host, want: &[f32], noise: &SelfNoise, t: &Thresholds) -> Vec<Check> {
    let values = metrics::values(got.as_f32(), want);
    let logits = metrics::logits(got.as_f32(), want, got.width());
    let rule = |noise: f64, floor: f64, name: &str| Rule::Noise {
        noise,
        factor: *t.g3.factor,
        floor,
        thresholds: ["g3.factor".into(), name.into()],
    };
    vec![
        Check::new(
            format!("{pass} NRMS"),
            values.nrms,
            rule(noise.nrms(), *t.g3.floor_nrms, "g3.floor_nrms"),
        )
        .noted(format!(
            "median of {} one-ulp changes of the reference, {} rounded away; the proposed 1 % would {}",
            noise.draws.len(),
            noise.vanished,
            if values.nrms <= *t.g3.proposal { "pass" } else { "fail" }
        )),
        Check::new(format!("{pass} KL"), logits.kl, rule(noise.kl(), *t.g3.floor_kl, "g3.floor_kl")),
        Check::new(format!("{pass} top-1 agreement"), logits.top1, Rule::Shown),
        Check::new(format!("{pass} top-1 agreement of the noise"), noise.top1(), Rule::Shown),
    ]
}

/// Logits of the last `rows` tokens of `ids`: the first by a prefill, the others one step each.
///
/// # Errors
/// What the model or the device reports.
pub fn decode<B: Backend>(model: &Model<B>, ids: &[u32], rows: usize) -> Result<Host> {
    let mut state = model.new_state(ids.len())?;
    let prompt = ids.len() + 1 - rows.clamp(1, ids.len());
    let mut step = |ids: &[u32]| -> Result<Host> {
        let out = model.forward(&mut state, Input::text(ids), Rows::Last, &mut Taps::off())?;
        let out = out.ok_or_else(|| Error::Usage("a pass has no tokens".into()))?;
        Ok(model.backend().read(&out.logits)?)
    };
    let mut all = step(&ids[..prompt])?;
    for id in &ids[prompt..] {
        all = all.concat_rows(&step(&[*id])?);
    }
    Ok(all)
}

/// Logits of every token of a prefill.
///
/// # Errors
/// What the model or the device reports.
pub fn forward<B: Backend>(model: &Model<B>, ids: &[u32]) -> Result<Host> {
    let mut state = model.new_state(ids.len())?;
    let out = model.forward(&mut state, Input::text(ids), Rows::All, &mut Taps::off())?;
    let out = out.ok_or_else(|| Error::Usage("a pass has no tokens".into()))?;
    Ok(model.backend().read(&out.logits)?)
}

/// What a run against a trace needs.
pub struct AgainstTrace<'a, B: Backend, R: HostBackend> {
    /// The model on the device.
    pub model: &'a Model<B>,
    /// The same model on the CPU in the reference's numerics: it gives the noise, and names bin flips.
    pub own: &'a Model<Bins<R>>,
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// Key of the limits: `nano-source`.
    pub key: &'a str,
    /// Perturbed runs a pass.
    pub draws: usize,
    /// Makes the CPU backend of `own` once more, for the smallest fault that G3 sees.
    pub make: &'a dyn Fn() -> Result<R>,
}

impl<B: Backend, R: HostBackend> AgainstTrace<'_, B, R> {
    /// Runs G2 on the passes that have streams, G3 on all prefills of the trace; `progress` is told the pass.
    ///
    /// # Errors
    /// A trace that does not fit the model, or a device failure.
    pub fn run(&self, trace: &Trace, mut progress: impl FnMut(&str)) -> Result<Outcome> {
        let t = Thresholds::built_in();
        let limits = t.layers(self.key);
        let layers = self.model.config().num_hidden_layers;
        let (mut g2, mut g3, mut noises, mut flips, mut bins) = (vec![], vec![], vec![], vec![], vec![]);
        let mut longest: Option<(String, Vec<u32>, SelfNoise)> = None;
        for pass in trace.passes() {
            let complete = trace.has(&pass, "logits") && trace.has(&pass, "tokens");
            let ids = if complete { trace.tokens(&pass)? } else { continue };
            let want = trace.floats(&pass, "logits")?;
            // An image span carries embeddings that the trace lacks; the dense passes were made with other selection
            // sizes than the checkpoint's.
            if is_image(self.model, &ids) || pass.starts_with("dense") {
                continue;
            }
            progress(&pass);
            let decoded = want.rows() < ids.len();
            // The last token of a decode pass was chosen and never read.
            let ids = if decoded { ids[..ids.len() - 1].to_vec() } else { ids };
            let has = |l: usize, n: &str| trace.has(&pass, &format!("layers.{l}.{n}"));
            if (0..layers).all(|l| has(l, "streams") && has(l, "pre_mix")) {
                let mut teacher = TraceTeacher { trace, pass: &pass };
                let forced =
                    teacher_forced(self.model, self.checkpoint, &ids, &mut teacher, &t.flips, |_| {})?;
                g2.extend(layer_checks(&pass, &forced, limits.0, limits.1, t));
                flips.extend(forced.flips.iter().map(|f| json!({ "pass": pass, "flip": f })));
            }
            self.own.backend().reset(Vec::new());
            let noise = self_noise(self.own, self.checkpoint, &ids, want.rows(), self.draws)?;
            let got =
                if decoded { decode(self.model, &ids, want.rows())? } else { forward(self.model, &ids)? };
            let want = want.as_float().unwrap_or(&[]);
            if want.len() != got.as_f32().len() {
                let what = format!("tensor {pass}/logits does not have the model's vocabulary");
                return Err(Error::file(trace.file(), what));
            }
            let mut checks = whole_checks(&pass, &got, want, &noise, t);
            if let Some((resolved, crossed)) =
                explained(self.own, &ids, &checks[0], want, got.rows(), &noise)?
            {
                let raw = metrics::values(got.as_f32(), want).nrms;
                bins.push(json!({ "pass": pass, "nrms": raw, "elements": crossed }));
                checks = whole_checks(&pass, &resolved, want, &noise, t);
                checks[0].note = flipped(raw, &crossed);
            }
            g3.extend(checks);
            if !decoded && longest.as_ref().is_none_or(|(_, old, _)| old.len() < ids.len()) {
                longest = Some((pass.clone(), ids.clone(), noise.clone()));
            }
            noises.push(json!({
                "pass": pass, "tokens": ids.len(), "nrms": noise.nrms(), "kl": noise.kl(), "top1": noise.top1(),
                "vanished": noise.vanished, "draws": noise.draws,
            }));
        }
        if let Some((pass, ids, noise)) = &longest {
            g3.push(sensitivity(self.checkpoint, self.make, pass, ids, noise)?);
        }
        let or_not_run = |name: &str, checks: Vec<Check>, why: &str| match checks.is_empty() {
            true => Gate::not_run(name, why),
            false => Gate::new(name, checks),
        };
        Ok(Outcome {
            g2: or_not_run("G2", g2, "the reference trace has no streams of every layer"),
            g3: or_not_run("G3", g3, "the reference trace has no prefill with logits of every token"),
            measurements: json!({ "self_noise": noises, "flips": flips, "bin_flips": bins }),
        })
    }
}

/// Most cached elements that are pushed across a boundary to explain a difference.
const MOST_CROSSED: usize = 8;
/// Distance to a boundary, as a share of the block's largest element, under which single precision may fall on either
/// side: a few of its units, summed up over the layers.
pub const BIN_REACH: f64 = 1e-6;

/// The bin flips that explain why a pass is past its limit, with the logits of `own` behind them; `None` where nothing is
/// to be explained or no flip does. In `source` nearly every value is rounded, so that no single element can be named.
fn explained<R: HostBackend>(
    own: &Model<Bins<R>>,
    ids: &[u32],
    nrms: &Check,
    want: &[f32],
    rows: usize,
    noise: &SelfNoise,
) -> Result<Option<(Host, Vec<Element>)>> {
    let limit = Thresholds::built_in().g3.limit_nrms(noise.nrms());
    if own.backend().mode() == Mode::Source || nrms.figure.is_none_or(|d| d <= limit) {
        return Ok(None);
    }
    let (logits, crossed) = resolve(own, ids, want, rows)?;
    Ok((!crossed.is_empty()).then_some((logits, crossed)))
}

/// Pushes cached elements that lie at a rounding boundary across it, one after the other in the order of the forward pass, and
/// keeps those that bring the logits of `own` nearer to `want`. What is left after that is not the cache's doing. `own` is
/// the CPU in the same numerics as the device.
fn resolve<R: HostBackend>(
    own: &Model<Bins<R>>,
    ids: &[u32],
    want: &[f32],
    rows: usize,
) -> Result<(Host, Vec<Element>)> {
    let bins = own.backend();
    // Rows do not depend on how a text is cut into steps, so decode steps too are explained by a prefill.
    let run = || Ok::<_, Error>(forward(own, ids)?.slice_rows(ids.len() - rows, rows));
    bins.reset(Vec::new());
    let mut best = run()?;
    let mut distance = metrics::values(best.as_f32(), want).nrms;
    let near = bins.near();
    let mut crossed: Vec<Element> = Vec::new();
    for e in near {
        if distance <= *Thresholds::built_in().g3.floor_nrms || crossed.len() == MOST_CROSSED {
            break;
        }
        let tried: Vec<Element> = crossed.iter().cloned().chain([e]).collect();
        bins.reset(tried.clone());
        let moved = run()?;
        let d = metrics::values(moved.as_f32(), want).nrms;
        // What explains a difference takes most of it away; one that is none may happen to take a third.
        if d < 0.5 * distance {
            (best, distance, crossed) = (moved, d, tried);
        }
    }
    bins.reset(Vec::new());
    Ok((best, crossed))
}

/// Gains that are tried, smallest first.
const GAINS: [f32; 8] = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3];

/// The smallest error of every attention output that moves the reference's own logits past G3's limits: how blunt the
/// gate is on this model.
fn sensitivity<R: HostBackend>(
    checkpoint: &Checkpoint,
    make: &dyn Fn() -> Result<R>,
    pass: &str,
    ids: &[u32],
    noise: &SelfNoise,
) -> Result<Check> {
    let t = Thresholds::built_in();
    let base = forward(&load(checkpoint, make()?)?, ids)?;
    let name = format!("{pass} smallest caught error of attention outputs");
    for gain in GAINS {
        let got = forward(&load(checkpoint, Faulty::with_gain(make()?, gain))?, ids)?;
        let d = metrics::values(got.as_f32(), base.as_f32()).nrms;
        let kl = metrics::logits(got.as_f32(), base.as_f32(), got.width()).kl;
        if d > t.g3.limit_nrms(noise.nrms()) || kl > t.g3.limit_kl(noise.kl()) {
            let note = format!(
                "a relative error of {gain} in every layer moves the logits by NRMS {d:.1e}, KL {kl:.1e}"
            );
            return Ok(Check::new(name, f64::from(gain), Rule::Shown).noted(note));
        }
    }
    Ok(Check::new(name, f64::INFINITY, Rule::Shown).noted(format!("not even {}", GAINS[GAINS.len() - 1])))
}

/// A live reference.
pub struct AgainstLive<'a, B: Backend, R: HostBackend> {
    /// The model on the device.
    pub model: &'a Model<B>,
    /// Makes the reference's backend.
    pub make: &'a dyn Fn() -> Result<R>,
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// Tokens of the run.
    pub ids: &'a [u32],
    /// Key of the limits.
    pub key: &'a str,
    /// Perturbed runs.
    pub draws: usize,
    /// Whether the reference may run many times more: to look for the smallest fault that G3 sees, and to name bin flips.
    pub sensitivity: bool,
}

impl<B: Backend, R: HostBackend> AgainstLive<'_, B, R> {
    /// G2 and G3 for any checkpoint: layer by layer, so that only one layer's weights are in use at a time; `progress` is
    /// told the layer.
    ///
    /// # Errors
    /// What the checkpoint, the model or a device reports.
    pub fn run(&self, progress: impl FnMut(usize)) -> Result<Outcome> {
        let t = Thresholds::built_in();
        let limits = t.layers(self.key);
        let reference = load(self.checkpoint, (self.make)()?)?;
        let mut teacher = LiveTeacher::new(&reference, self.checkpoint, self.ids, self.draws)?;
        let forced = teacher_forced(self.model, self.checkpoint, self.ids, &mut teacher, &t.flips, progress)?;
        let (want, noise) = teacher.finish()?;
        let got = forward(self.model, self.ids)?;
        let pass = format!("{} tokens", self.ids.len());
        let mut g3 = whole_checks(&pass, &got, want.as_f32(), &noise, t);
        let mut bins = Vec::new();
        if self.sensitivity {
            // The reference is this very run, so it is the one to take the device's side of a boundary.
            let own = load(self.checkpoint, Bins::new((self.make)()?, BIN_REACH))?;
            let found = explained(&own, self.ids, &g3[0], got.as_f32(), got.rows(), &noise)?;
            if let Some((replayed, crossed)) = found {
                let raw = metrics::values(got.as_f32(), want.as_f32()).nrms;
                g3 = whole_checks(&pass, &got, replayed.as_f32(), &noise, t);
                g3[0].note = flipped(raw, &crossed);
                bins.push(json!({ "pass": pass, "nrms": raw, "elements": crossed }));
            }
            g3.push(sensitivity(self.checkpoint, self.make, &pass, self.ids, &noise)?);
        }
        Ok(Outcome {
            g2: Gate::new("G2", layer_checks(&pass, &forced, limits.0, limits.1, t)),
            g3: Gate::new("G3", g3),
            measurements: json!({
                "self_noise": [{
                    "pass": pass, "tokens": self.ids.len(), "nrms": noise.nrms(), "kl": noise.kl(),
                    "top1": noise.top1(), "vanished": noise.vanished, "draws": noise.draws,
                }],
                "flips": forced.flips,
                "bin_flips": bins,
            }),
        })
    }
}

/// Whether a text has image tokens, whose embeddings a trace does not carry.
fn is_image<B: Backend>(model: &Model<B>, ids: &[u32]) -> bool {
    ids.contains(&model.config().image_token_id)
}

/// What a check says of the flips that were taken over.
fn flipped(raw: f64, crossed: &[Element]) -> String {
    let names: Vec<String> = crossed.iter().map(named).collect();
    format!("{raw:.2e} before the named bin flips: {}", names.join("; "))
}

fn named(e: &Element) -> String {
    format!("{} call {} row {} element {}", e.operator, e.call, e.row, e.column)
}
