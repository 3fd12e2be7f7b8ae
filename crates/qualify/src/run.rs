//! `qualify ops` and `qualify model`: gates to receipts.

use std::sync::Arc;

use engine::Lm;
use model::Model;
use ops::{Backend, Mode};
use serde_json::Value;

use crate::{
    Result, Verdict,
    bins::Bins,
    gates::{
        drafts::drafts,
        model::{AgainstLive, AgainstTrace, BIN_REACH, HostBackend},
        operators::{Cases, Progress, operators, reference_mode},
    },
    load,
    memory::Watch,
    models::{Reference, Subject},
    receipt::{Context, DeviceId, Gate, Receipt},
};

/// Runs every registered operator of `backend` at tiny and released geometry.
///
/// # Errors
/// A device failure.
pub fn qualify_ops<B: Backend>(
    backend: &B,
    device: DeviceId,
    command: String,
    progress: impl FnMut(&Progress),
) -> Result<Receipt> {
    let numerics = backend.mode().name().to_owned();
    let gates = operators(backend, &[Cases::TINY, Cases::RELEASED], progress)?;
    let scope = format!(
        "Every registered operator of {} in {numerics} numerics, at tiny and at released geometry, against the scalar \
         reference; no model",
        device.family
    );
    let context = Context {
        kind: "ops".into(),
        scope,
        device,
        numerics,
        checkpoint: None,
        references: Vec::new(),
        command,
        unqualified: false,
    };
    Ok(context.receipt(gates.to_vec(), Value::Null))
}

/// How a model is qualified.
pub struct ModelRun<'a, B: Backend, R: HostBackend> {
    /// The model.
    pub subject: &'a Subject,
    /// The device's backend.
    pub backend: B,
    /// The device.
    pub device: DeviceId,
    /// Makes the CPU backend that stands for the reference, in the numerics of [`reference_mode`].
    pub make: &'a dyn Fn() -> Result<R>,
    /// A reference trace; without one the CPU's own run is the reference.
    pub reference: Option<Reference>,
    /// Tokens of the live run.
    pub tokens: usize,
    /// Perturbed runs.
    pub draws: usize,
    /// Whether every file of the checkpoint is hashed.
    pub full_hash: bool,
    /// Whether layers and logits are run although operators failed; the receipt then bears the mark.
    pub allow: bool,
    /// Whether to look for the smallest fault that G3 sees.
    pub sensitivity: bool,
    /// The command line, folders left out.
    pub command: String,
}

/// Greedy tokens of G4, and how long the text before them is.
const DRAFTED: (usize, usize) = (24, 16);

impl<B: Backend + 'static, R: HostBackend> ModelRun<'_, B, R> {
    /// Runs G0 to G4; `progress` is told what is being done. Where an operator fails, layers and logits are NOT RUN: what
    /// they would say is known.
    ///
    /// # Errors
    /// What the checkpoint, the reference or the device reports.
    pub fn run(self, mut progress: impl FnMut(&str)) -> Result<Receipt> {
        let mut watch = Watch::begin();
        let mode = self.backend.mode();
        let against = reference_mode(mode);
        let checkpoint = &self.subject.checkpoint;
        let key = format!("{}-{}", self.subject.name, mode.name());
        progress("operators");
        let [g0, g1] = operators(&self.backend, &[Cases::TINY], |_| {})?;
        let failed = g0.verdict == Verdict::Fail || g1.verdict == Verdict::Fail;
        progress("loading");
        let identity = self.subject.identity(self.full_hash)?;
        if failed && !self.allow {
            let why = "an operator failed; --allow-unqualified runs it all the same";
            let context = Context {
                kind: "model".into(),
                scope: format!(
                    "{} on {} in {} numerics: operators at tiny geometry alone, since one of them failed",
                    self.subject.name,
                    self.device.family,
                    mode.name()
                ),
                device: self.device,
                numerics: mode.name().into(),
                checkpoint: Some(identity),
                references: Vec::new(),
                command: self.command,
                unqualified: false,
            };
            let rest = ["G2", "G3", "G4"].map(|g| Gate::not_run(g, why));
            return Ok(context.receipt([g0, g1].into_iter().chain(rest).collect(), Value::Null));
        }
        let model = load(checkpoint, self.backend)?;
        watch.loaded();
        let (mut outcome, references, what) = match &self.reference {
            Some(reference) => {
                let own: Model<Bins<R>> = load(checkpoint, Bins::new((self.make)()?, BIN_REACH))?;
                let run = AgainstTrace {
                    model: &model,
                    own: &own,
                    checkpoint,
                    key: &key,
                    draws: self.draws,
                    make: self.make,
                };
                let outcome = run.run(&reference.trace, |pass| progress(pass))?;
                (outcome, vec![reference.file.clone()], format!("the trace {}", reference.file.name))
            }
            None => {
                let ids = self.subject.text(self.tokens)?;
                let run = AgainstLive {
                    model: &model,
                    make: self.make,
                    checkpoint,
                    ids: &ids,
                    key: &key,
                    draws: self.draws,
                    sensitivity: self.sensitivity,
                };
                let layers = checkpoint.config().num_hidden_layers;
                let outcome = run.run(|l| progress(&format!("layer {} of {layers}", l + 1)))?;
                let engine = (self.make)()?.name();
                let what = format!("the {engine} run in {} numerics, {} tokens", against.name(), ids.len());
                (outcome, Vec::new(), what)
            }
        };
        progress("drafts");
        let (count, prompt) = DRAFTED;
        let lm: Arc<dyn Lm> = Arc::new(model);
        let g4 = drafts(&lm, &self.subject.text(prompt)?, count)?;
        let passes = outcome.measurements["self_noise"].as_array().into_iter().flatten();
        let longest = passes.filter_map(|pass| pass["tokens"].as_u64()).max().unwrap_or(0);
        let tokens = (prompt + count).max(longest as usize);
        outcome.measurements["memory"] = watch.report(checkpoint, &lm.layout(), tokens);
        let mut scope = format!(
            "{} on {} in {} numerics: operators at tiny geometry, layers and logits against {what}, drafts against none",
            self.subject.name,
            self.device.family,
            mode.name()
        );
        let skipped: Vec<&Gate> =
            [&outcome.g2, &outcome.g3, &g4].into_iter().filter(|g| g.verdict == Verdict::NotRun).collect();
        for gate in skipped {
            let why = gate.checks.first().map_or("", |c| c.note.as_str());
            scope = format!("{scope}; {} NOT RUN: {why}", gate.gate);
        }
        if mode == Mode::Native {
            scope += "; native is held against exact, whose arithmetic it approximates, not against the reference's \
                      roundings";
        }
        let context = Context {
            kind: "model".into(),
            scope,
            device: self.device,
            numerics: mode.name().into(),
            checkpoint: Some(identity),
            references,
            command: self.command,
            unqualified: failed,
        };
        Ok(context.receipt(vec![g0, g1, outcome.g2, outcome.g3, g4], outcome.measurements))
    }
}
