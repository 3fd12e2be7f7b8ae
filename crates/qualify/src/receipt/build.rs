//! Making a receipt.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use crate::{
    Thresholds,
    inputs::Inputs,
    machine,
    receipt::{Build, CheckpointId, DeviceId, FileHash, Gate, Receipt, Rule, SCHEMA},
    sha256_hex,
    verdict::Verdict,
};

/// What a receipt says beside its gates.
#[derive(Clone, Debug)]
pub struct Context {
    /// `ops`, `model` or `release`.
    pub kind: String,
    /// What was qualified, and what not, in one sentence.
    pub scope: String,
    /// The device.
    pub device: DeviceId,
    /// The numerics.
    pub numerics: String,
    /// The checkpoint.
    pub checkpoint: Option<CheckpointId>,
    /// Reference traces.
    pub references: Vec<FileHash>,
    /// The command line, folders left out.
    pub command: String,
    /// Whether the run was allowed although unqualified.
    pub unqualified: bool,
}

impl Context {
    /// The sealed receipt of these gates, for this build and this machine.
    pub fn receipt(self, gates: Vec<Gate>, measurements: Value) -> Receipt {
        let mut thresholds = Thresholds::built_in().named();
        for check in gates.iter().flat_map(|g| &g.checks) {
            // Tolerances of operators stand in the registry, which a later build may change.
            if let Rule::AtMost { limit, threshold } = &check.rule {
                thresholds.entry(threshold.clone()).or_insert(*limit);
            }
        }
        let mut receipt = Receipt {
            schema: SCHEMA.into(),
            kind: self.kind,
            scope: self.scope,
            verdict: Verdict::NotRun,
            created: machine::now(),
            inputs: Inputs::built(),
            build: Build {
                version: env!("CARGO_PKG_VERSION").into(),
                target: env!("HALLMARK_TARGET").into(),
                profile: env!("HALLMARK_PROFILE").into(),
            },
            machine: machine::describe(),
            device: self.device,
            numerics: self.numerics,
            checkpoint: self.checkpoint,
            references: self.references,
            command: self.command,
            unqualified: self.unqualified,
            thresholds,
            thresholds_sha256: Thresholds::digest(),
            gates,
            measurements,
            seals: BTreeMap::new(),
        };
        receipt.verdict = receipt.derived();
        receipt.seals = seal(&receipt);
        receipt
    }
}

/// SHA-256 of each part of a receipt. Verdicts are not sealed: they are derived again.
pub fn seal(r: &Receipt) -> BTreeMap<String, String> {
    fn of(v: &impl Serialize) -> String {
        sha256_hex(&serde_json::to_vec(v).expect("a receipt is plain data"))
    }
    let mut seals = BTreeMap::new();
    let mut put = |name: &str, digest: String| seals.insert(name.to_owned(), digest);
    put("inputs", of(&r.inputs));
    put("thresholds", of(&(&r.thresholds, &r.thresholds_sha256)));
    put("checkpoint", of(&(&r.checkpoint, &r.references)));
    put("measurements", of(&r.measurements));
    let origin = (&r.kind, &r.scope, &r.created, &r.build, &r.machine, &r.device, &r.numerics);
    put("origin", of(&(origin, &r.command, r.unqualified)));
    for g in &r.gates {
        let figures: Vec<_> =
            g.checks.iter().map(|c| (&c.name, c.figure.map(f64::to_bits), &c.rule, &c.note)).collect();
        put(&g.gate, of(&figures));
    }
    seals
}
