//! Receipts: what was run on what, every figure with its limit, and the verdict that follows.
//!
//! The published schema is `docs/receipt.schema.json`. A receipt is plain JSON; its seals catch edits, not forgery.

mod build;
mod diff;
pub mod numbers;
mod table;
mod verify;

pub use build::{Context, seal};
pub use diff::diff;
pub use table::{BEGIN, END, replace_table, table};
pub use verify::{State, Verified, verify};

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Error, Result, inputs::Inputs, verdict::Verdict};

/// Name and version of the schema.
pub const SCHEMA: &str = "hallmark-receipt/1";
/// Largest receipt that is read.
const MAX_BYTES: u64 = 32 << 20;

/// How a check's verdict follows from its figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Rule {
    /// The figure is at most a fixed limit of the thresholds.
    AtMost {
        /// The limit.
        limit: f64,
        /// Its name in the receipt's thresholds.
        threshold: String,
    },
    /// The figure is at most `factor` times the reference's own noise, or at most `floor`.
    Noise {
        /// The noise.
        #[serde(with = "numbers")]
        noise: f64,
        /// The factor.
        factor: f64,
        /// The floor.
        floor: f64,
        /// Names of factor and floor in the receipt's thresholds.
        thresholds: [String; 2],
    },
    /// The figure counts differences, and there must be none.
    Zero,
    /// Printed only.
    Shown,
    /// Did not run.
    NotRun,
}

/// One figure of a gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// What was measured.
    pub name: String,
    /// The figure; `null` where it did not run.
    #[serde(with = "numbers::option")]
    pub figure: Option<f64>,
    /// How the verdict follows.
    pub rule: Rule,
    /// What follows; absent for a figure that is shown only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub verdict: Option<Verdict>,
    /// Why it did not run, or what stands out.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub note: String,
}

impl Check {
    /// A figure with a rule; the verdict is derived.
    pub fn new(name: impl Into<String>, figure: f64, rule: Rule) -> Self {
        let mut check =
            Self { name: name.into(), figure: Some(figure), rule, verdict: None, note: String::new() };
        check.verdict = check.derived();
        check
    }

    /// A check that did not run, with the reason.
    pub fn not_run(name: impl Into<String>, why: impl Into<String>) -> Self {
        let verdict = Some(Verdict::NotRun);
        Self { name: name.into(), figure: None, rule: Rule::NotRun, verdict, note: why.into() }
    }

    /// The same with a note.
    pub fn noted(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }

    /// What follows from figure and rule.
    pub fn derived(&self) -> Option<Verdict> {
        let within = |limit: f64| Some(self.figure.map_or(Verdict::NotRun, |f| Verdict::from(f <= limit)));
        match &self.rule {
            Rule::AtMost { limit, .. } => within(*limit),
            Rule::Noise { noise, factor, floor, .. } => within((factor * noise).max(*floor)),
            Rule::Zero => within(0.0),
            Rule::Shown => None,
            Rule::NotRun => Some(Verdict::NotRun),
        }
    }
}

/// One gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    /// `G0` to `G5`.
    pub gate: String,
    /// What its checks give.
    pub verdict: Verdict,
    /// The checks.
    pub checks: Vec<Check>,
}

impl Gate {
    /// A gate of checks; the verdict is derived.
    pub fn new(gate: &str, checks: Vec<Check>) -> Self {
        let mut gate = Self { gate: gate.into(), verdict: Verdict::NotRun, checks };
        gate.verdict = gate.derived();
        gate
    }

    /// A gate that did not run, with the reason.
    pub fn not_run(gate: &str, why: impl Into<String>) -> Self {
        Self::new(gate, vec![Check::not_run("whole gate", why)])
    }

    /// What follows from the checks.
    pub fn derived(&self) -> Verdict {
        Verdict::all(self.checks.iter().filter_map(Check::derived))
    }
}

/// A file that the run read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileHash {
    /// File name; a path inside the repository where it is committed there.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 of the content.
    pub sha256: String,
}

/// The checkpoint of a model receipt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointId {
    /// Short name.
    pub name: String,
    /// Quick identity: see [`crate::identity::fingerprint`].
    pub fingerprint: String,
    /// Revision, where known.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub revision: String,
    /// `fp8+fp4` (released) or `exl3`.
    pub format: String,
    /// Files; empty where only the fingerprint was taken.
    pub files: Vec<FileHash>,
    /// The Engram tables' own identity, where a second folder holds them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub engram: Option<EngramId>,
}

/// Identity of Engram tables that a second folder holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngramId {
    /// Quick identity of the tables alone: see [`crate::identity::fingerprint`].
    pub fingerprint: String,
    /// Revision of the folder, where known.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub revision: String,
    /// Files of the tables; empty where only the fingerprint was taken.
    pub files: Vec<FileHash>,
}

/// The machine, without its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Model of the processor.
    pub cpu: String,
    /// Logical cores.
    pub cores: usize,
    /// Memory, GiB, rounded.
    pub memory_gib: u64,
    /// Operating system and architecture.
    pub system: String,
}

/// The device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceId {
    /// `cpu`, `metal`, `cuda`, `emu`.
    pub name: String,
    /// Devices that a receipt stands for: `cpu-x86_64`, `cuda-sm_90`, ….
    pub family: String,
    /// Model or instruction set.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub detail: String,
    /// Driver version.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub driver: String,
}

/// The program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Build {
    /// Version of hallmark.
    pub version: String,
    /// Target triple.
    pub target: String,
    /// `release` or `debug`.
    pub profile: String,
}

/// A receipt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    /// [`SCHEMA`].
    pub schema: String,
    /// `ops`, `model` or `release`.
    pub kind: String,
    /// One sentence: what was qualified, and what not.
    pub scope: String,
    /// What the gates give; PARTIAL at best for a tree that was not clean.
    pub verdict: Verdict,
    /// When, UTC.
    pub created: String,
    /// Contents of the tree.
    pub inputs: Inputs,
    /// The program.
    pub build: Build,
    /// The machine.
    pub machine: Machine,
    /// The device.
    pub device: DeviceId,
    /// `exact`, `source` or `native`.
    pub numerics: String,
    /// The checkpoint, for a model.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub checkpoint: Option<CheckpointId>,
    /// Reference traces.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub references: Vec<FileHash>,
    /// The command line, folders left out.
    pub command: String,
    /// Whether the run was allowed although unqualified.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub unqualified: bool,
    /// Limits by name, as they were.
    pub thresholds: BTreeMap<String, f64>,
    /// SHA-256 of the thresholds file.
    pub thresholds_sha256: String,
    /// The gates.
    pub gates: Vec<Gate>,
    /// Measurements that no gate uses, such as the table of self-noise.
    #[serde(skip_serializing_if = "Value::is_null", default)]
    pub measurements: Value,
    /// SHA-256 of each part, so that an edit is told by the part.
    pub seals: BTreeMap<String, String>,
}

impl Receipt {
    /// Reads a receipt.
    ///
    /// # Errors
    /// A file that can't be read or is no receipt of this schema.
    pub fn open(path: &Path) -> Result<Self> {
        let label = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        let size = std::fs::metadata(path).map_err(Error::io(path))?.len();
        if size > MAX_BYTES {
            return Err(Error::file(label, format!("has {size} bytes; a receipt has at most {MAX_BYTES}")));
        }
        let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
        Self::parse(&text, &label)
    }

    /// Reads a receipt's text; `file` names it in errors.
    ///
    /// # Errors
    /// Text that is no receipt of this schema.
    pub fn parse(text: &str, file: &str) -> Result<Self> {
        let bad = |e: String| Error::file(file, e);
        let tree: Value = serde_json::from_str(text).map_err(|e| bad(format!("is no JSON: {e}")))?;
        match tree.get("schema").and_then(Value::as_str) {
            Some(SCHEMA) => {}
            Some(other) => return Err(bad(format!("has schema {other}; {SCHEMA} is read"))),
            None => return Err(bad("is no receipt: it has no schema".into())),
        }
        serde_json::from_value(tree).map_err(|e| bad(format!("is no {SCHEMA}: {e}")))
    }

    /// The JSON text.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("a receipt is plain data") + "\n"
    }

    /// Writes the receipt.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn write(&self, path: &Path) -> Result<()> {
        if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
        }
        std::fs::write(path, self.json()).map_err(Error::io(path))
    }

    /// The gate of this name.
    pub fn gate(&self, name: &str) -> Option<&Gate> {
        self.gates.iter().find(|g| g.gate == name)
    }

    /// What follows from the gates, the tree and the mark.
    pub fn derived(&self) -> Verdict {
        let v = Verdict::all(self.gates.iter().map(Gate::derived));
        if v == Verdict::Pass && (self.inputs.dirty || self.unqualified) { Verdict::Partial } else { v }
    }
}
