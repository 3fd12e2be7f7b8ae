//! Runs faults through the gates and the bisect, and writes the table of what was seen.

use std::fmt::Write as _;

use checkpoint::Checkpoint;
use ops::{Host, Mode};

use crate::{
    Result, Thresholds, Verdict,
    bisect::{Blame, bisect},
    fault::{FAULTS, FaultSpec, Faulty, Size},
    gates::{
        layers::{TraceTeacher, teacher_forced},
        model::{HostBackend, decode, forward, layer_gate},
        operators::{Cases, operators},
    },
    judge::metrics,
    load,
    noise::{SelfNoise, self_noise},
    receipt::Gate,
    trace::Trace,
};

/// What the gates said about one fault.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The fault.
    pub fault: &'static FaultSpec,
    /// Its size.
    pub size: Size,
    /// Gates that failed.
    pub gates: Vec<&'static str>,
    /// What bisect blames.
    pub blame: Blame,
    /// Operator of the first failed check of G0 or G1.
    pub check: Option<String>,
    /// NRMS of the logits against the run without the fault.
    pub nrms: f64,
    /// KL of the logits against the run without the fault.
    pub kl: f64,
    /// Share of rows with the same best token as without the fault.
    pub greedy: f64,
}

impl Finding {
    /// Whether a gate failed.
    pub fn caught(&self) -> bool {
        !self.gates.is_empty()
    }

    /// The operator that bisect names, else the one whose check of G0 or G1 failed first.
    pub fn operator(&self) -> Option<&str> {
        match &self.blame {
            Blame::Operator { operator, .. } | Blame::Bits { operator, .. } => Some(operator),
            _ => self.check.as_deref(),
        }
    }

    /// Why no gate saw it; empty where one did.
    pub fn reason(&self) -> &'static str {
        let listed = self.fault.missed.iter().find(|(size, _)| *size == self.size);
        listed.map_or("", |(_, reason)| reason)
    }
}

/// The models and texts that faults are run on.
pub struct Suite<'a, F> {
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// Reference trace of another implementation, in `source` numerics.
    pub reference: &'a Trace,
    /// Pass with the streams of every layer.
    pub pass: &'a str,
    /// Key of G2's limits.
    pub key: &'a str,
    /// A second checkpoint, for faults that change no bit of the first: more experts a token, `exact` numerics.
    pub second: &'a Checkpoint,
    /// Makes the backend without a fault.
    pub backend: F,
}

/// The runs without a fault.
pub struct Baseline {
    logits: Host,
    noise: SelfNoise,
    decode_noise: SelfNoise,
}

impl Baseline {
    /// Self-noise of the pass.
    pub fn noise(&self) -> &SelfNoise {
        &self.noise
    }
}

impl<R: HostBackend, F: Fn(Mode) -> R> Suite<'_, F> {
    /// Runs the model without a fault.
    ///
    /// # Errors
    /// What the checkpoint, the model or the trace reports.
    pub fn baseline(&self) -> Result<Baseline> {
        let model = load(self.checkpoint, (self.backend)(Mode::Source))?;
        let ids = self.reference.tokens(self.pass)?;
        let decoded = self.reference.tokens("decode")?;
        let rows = self.reference.floats("decode", "logits")?.rows();
        Ok(Baseline {
            logits: forward(&model, &ids)?,
            noise: self_noise(&model, self.checkpoint, &ids, ids.len(), 8)?,
            decode_noise: self_noise(&model, self.checkpoint, &decoded[..decoded.len() - 1], rows, 8)?,
        })
    }

    fn faulty(&self, fault: &'static FaultSpec, size: Size, mode: Mode) -> Faulty<R> {
        Faulty::new((self.backend)(mode), fault.name, size, self.layer_of(fault))
    }

    /// The middle one of the layers that have the operator.
    fn layer_of(&self, fault: &FaultSpec) -> usize {
        let c = self.checkpoint.config();
        let middle = |list: &[usize]| list.get(list.len() / 2).copied().unwrap_or(0);
        let twos = || -> Vec<usize> {
            c.kv_source_layer_ids.iter().copied().filter(|l| c.compress_ratios[*l] == 2).collect()
        };
        match fault.operator {
            "engram_rows" | "engram_gate" => middle(&c.engram.layer_ids),
            "publish_kv" | "publish_key" => middle(&c.kv_source_layer_ids),
            "pool_pairs" => middle(&twos()),
            "quantise_index_query" | "index_scores" | "topk" => middle(&c.index_source_layer_ids),
            _ => c.num_hidden_layers / 2,
        }
    }

    /// Runs one fault.
    ///
    /// # Errors
    /// What the model or the trace reports.
    pub fn run(&self, fault: &'static FaultSpec, size: Size, base: &Baseline) -> Result<Finding> {
        let t = Thresholds::built_in();
        let (mut gates, mut check) = (Vec::new(), None);
        // A fault of one layer is none of the operator.
        if size != Size::One {
            for mode in [Mode::Source, Mode::Exact] {
                for gate in operators(&self.faulty(fault, size, mode), &[Cases::QUICK], |_| {})? {
                    let name = if gate.gate == "G0" { "G0" } else { "G1" };
                    if gate.verdict == Verdict::Fail && !gates.contains(&name) {
                        gates.push(name);
                        check = check.or(first_failed(&gate));
                    }
                }
            }
            gates.sort_unstable();
        }
        let ids = self.reference.tokens(self.pass)?;
        let model = load(self.checkpoint, self.faulty(fault, size, Mode::Source))?;
        let mut teacher = TraceTeacher { trace: self.reference, pass: self.pass };
        let forced = teacher_forced(&model, self.checkpoint, &ids, &mut teacher, &t.flips, |_| {})?;
        if layer_gate(self.pass, &forced, self.key).verdict == Verdict::Fail {
            gates.push("G2");
        }
        let got = forward(&model, &ids)?;
        let decoded = self.reference.tokens("decode")?;
        let rows = self.reference.floats("decode", "logits")?.rows();
        let steps = decode(&model, &decoded[..decoded.len() - 1], rows)?;
        let far = |pass: &str, got: &Host, noise: &SelfNoise| -> Result<bool> {
            let want = self.reference.floats(pass, "logits")?;
            let (d, l) = distance(got, want.as_float().unwrap_or(&[]));
            Ok(d > t.g3.limit_nrms(noise.nrms()) || l.kl > t.g3.limit_kl(noise.kl()))
        };
        if far(self.pass, &got, &base.noise)? || far("decode", &steps, &base.decode_noise)? {
            gates.push("G3");
        }
        let (nrms, moved) = distance(&got, base.logits.as_f32());
        let faulty = |mode| self.faulty(fault, size, mode).repeated(3);
        let plain = |mode| (self.backend)(mode);
        let mut blame = bisect(plain(Mode::Source), faulty(Mode::Source), self.checkpoint, &ids, None)?.blame;
        if blame == Blame::Nothing && size == Size::All {
            blame = bisect(plain(Mode::Exact), faulty(Mode::Exact), self.second, &ids, None)?.blame;
        }
        Ok(Finding { fault, size, gates, blame, check, nrms, kl: moved.kl, greedy: moved.top1 })
    }
}

fn first_failed(gate: &Gate) -> Option<String> {
    let failed = gate.checks.iter().find(|c| c.verdict == Some(Verdict::Fail))?;
    failed.name.split(' ').next().map(String::from)
}

fn distance(got: &Host, want: &[f32]) -> (f64, metrics::LogitError) {
    let values = metrics::values(got.as_f32(), want);
    (values.nrms, metrics::logits(got.as_f32(), want, got.width()))
}

/// The table of findings, with what was missed and why, as `docs/faults.md` holds it.
pub fn document(findings: &[Finding], base: &Baseline) -> String {
    let caught = findings.iter().filter(|f| f.caught()).count();
    let named = findings.iter().filter(|f| f.caught() && f.operator() == Some(f.fault.operator)).count();
    let level = base.noise.top1();
    let unseen = |f: &&Finding| f.caught() && f.greedy >= level;
    let mut out = format!(
        "# What the gates see\n\n\
         One operator at a time is made wrong on purpose (`qualify::fault`), in up to three sizes: *all* (every layer, \
         the whole\ntensor), *part* (every layer, one head, one block of 32, one entry), *one layer* (that part in one \
         layer alone). The\nmodel is `nano` in `source` numerics on the CPU; its reference is `official`, a run of the \
         released code by others.\n\n\
         - G0 and G1 run every registered operator in both numerics at tiny geometry; a fault of one layer is none of \
         the\n  operator, so they are not asked.\n\
         - G2 feeds every layer the reference's streams ({} tokens); G3 compares the logits of that prefill and of 16 \
         decode\n  steps with the reference.\n\
         - \"Named\" is the operator that `bisect` blames, or, where the fault changes no bit of the run, the operator \
         whose check\n  of G0 or G1 failed.\n\
         - NRMS and KL are against the same run without the fault. One ulp in one embedding element gives {:.3} and \
         {:.4}.\n\
         - Greedy agreement is the share of tokens with the same best successor. The harmless one-ulp change has \
         {level:.3}, so a\n  fault at or above that (**bold**) is invisible to greedy agreement alone: {} of the {caught} \
         caught ones.\n\n\
         {} faults in {} sizes: {caught} caught, {named} of them named, {} MISSED.\n\n\
         Written by `cargo run -p qualify --example faults`; a test runs all of it again.\n\n\
         | fault | size | gates that fail | named | NRMS | KL | greedy agreement |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
        base.logits.rows(),
        base.noise.nrms(),
        base.noise.kl(),
        findings.iter().filter(unseen).count(),
        FAULTS.len(),
        findings.len(),
        findings.len() - caught,
    );
    for f in findings {
        let gates = if f.caught() { f.gates.join(" ") } else { "MISSED".into() };
        let greedy = format!("{:.3}", f.greedy);
        let greedy = if unseen(&f) { format!("**{greedy}**") } else { greedy };
        let _ = writeln!(
            out,
            "| {} | {} | {gates} | {} | {:.4} | {:.1e} | {greedy} |",
            f.fault.name,
            f.size.word(),
            f.operator().unwrap_or("-"),
            f.nrms,
            f.kl
        );
    }
    out += "\n## What each fault does\n\n| fault | operator | what is wrong |\n| --- | --- | --- |\n";
    for f in FAULTS {
        let _ = writeln!(out, "| {} | {} | {} |", f.name, f.operator, f.what);
    }
    out += "\n## Missed, and why\n\n| fault | size | why no gate sees it |\n| --- | --- | --- |\n";
    for f in findings.iter().filter(|f| !f.caught()) {
        let _ = writeln!(out, "| {} | {} | {} |", f.fault.name, f.size.word(), f.reason());
    }
    out
}
