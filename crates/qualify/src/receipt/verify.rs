//! Checking a receipt: everything that can be derived again is.

use std::path::Path;

use crate::{
    Thresholds,
    inputs::Inputs,
    receipt::{Receipt, Rule, seal},
    sha256_file,
};

/// Whether a receipt is about the present tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Its inputs are the present ones.
    Current,
    /// Its inputs have changed: the parts that differ.
    Historical(Vec<String>),
}

/// What a check of a receipt gives.
#[derive(Clone, Debug)]
pub struct Verified {
    /// Every inconsistency, a sentence each; none for a sound receipt.
    pub problems: Vec<String>,
    /// Whether it is about the present tree.
    pub state: State,
}

/// Checks `receipt` against itself, against `present` and, in a checkout at `root`, against the files it names.
pub fn verify(receipt: &Receipt, present: &Inputs, root: Option<&Path>) -> Verified {
    let mut problems = Vec::new();
    if !receipt.inputs.is_consistent() {
        problems.push("inputs: the hash is not that of the listed parts".to_owned());
    }
    let seals = seal(receipt);
    for (part, digest) in &seals {
        match receipt.seals.get(part) {
            Some(s) if s == digest => {}
            Some(_) => problems.push(broken_seal(part)),
            None => problems.push(format!("{part}: the receipt has no seal for it")),
        }
    }
    for part in receipt.seals.keys().filter(|p| !seals.contains_key(*p)) {
        problems.push(format!("{part}: is sealed, but the receipt does not hold it"));
    }
    rules(receipt, &mut problems);
    for gate in &receipt.gates {
        for check in &gate.checks {
            if check.verdict != check.derived() {
                let (says, gives) = (words(check.verdict), words(check.derived()));
                problems.push(format!("{}: {} says {says}, its figure gives {gives}", gate.gate, check.name));
            }
        }
        if gate.verdict != gate.derived() {
            let gives = gate.derived();
            problems.push(format!("{}: the gate says {}, its checks give {gives}", gate.gate, gate.verdict));
        }
    }
    if receipt.verdict != receipt.derived() {
        let gives = receipt.derived();
        problems.push(format!("verdict: the receipt says {}, its gates give {gives}", receipt.verdict));
    }
    let state = if receipt.inputs.hash == present.hash {
        State::Current
    } else {
        State::Historical(present.changed(&receipt.inputs).into_iter().map(String::from).collect())
    };
    if state == State::Current {
        thresholds_of_the_build(receipt, &mut problems);
        if let Some(root) = root {
            files(receipt, root, &mut problems);
        }
    }
    Verified { problems, state }
}

fn broken_seal(part: &str) -> String {
    match part {
        "inputs" => "inputs: a hash, the commit or the dirty mark was changed after sealing".into(),
        "thresholds" => "thresholds: a limit was changed after sealing".into(),
        "checkpoint" => {
            "checkpoint: a hash of the checkpoint or of a reference was changed after sealing".into()
        }
        "measurements" => "measurements: a figure was changed after sealing".into(),
        "origin" => "origin: scope, date, build, machine, device or command was changed after sealing".into(),
        gate => format!("{gate}: a figure or a rule was changed after sealing"),
    }
}

/// Every limit that a rule uses is the one that the receipt lists.
fn rules(receipt: &Receipt, problems: &mut Vec<String>) {
    for gate in &receipt.gates {
        for check in &gate.checks {
            let used: Vec<(&String, f64)> = match &check.rule {
                Rule::AtMost { limit, threshold } => vec![(threshold, *limit)],
                Rule::Noise { factor, floor, thresholds, .. } => {
                    vec![(&thresholds[0], *factor), (&thresholds[1], *floor)]
                }
                Rule::Zero | Rule::Shown | Rule::NotRun => Vec::new(),
            };
            for (name, limit) in used {
                match receipt.thresholds.get(name) {
                    Some(l) if *l == limit => {}
                    Some(l) => problems.push(format!(
                        "{}: {} uses {limit} for threshold {name}, which is {l}",
                        gate.gate, check.name
                    )),
                    None => problems.push(format!(
                        "{}: {} uses threshold {name}, which nothing lists",
                        gate.gate, check.name
                    )),
                }
            }
        }
    }
}

/// `ops.NAME.MODE`: the tolerance of a registered operator.
fn registered(name: &str) -> Option<f64> {
    let (operator, mode) = name.strip_prefix("ops.")?.rsplit_once('.')?;
    let spec = ops::registry::SPECS.iter().find(|s| s.name == operator)?;
    Some(spec.tolerance(mode.parse().ok()?).nrms)
}

fn thresholds_of_the_build(receipt: &Receipt, problems: &mut Vec<String>) {
    if receipt.thresholds_sha256 != Thresholds::digest() {
        problems.push("thresholds: the hash is not that of the thresholds file of these inputs".into());
    }
    let listed = Thresholds::built_in().named();
    for (name, limit) in &receipt.thresholds {
        let (place, listed) = match name.strip_prefix("ops.") {
            Some(_) => ("the registry", registered(name)),
            None => ("the thresholds file", listed.get(name).copied()),
        };
        match listed {
            Some(l) if l == *limit => {}
            Some(l) => problems.push(format!("thresholds: {name} is {limit}, {place} says {l}")),
            None => problems.push(format!("thresholds: {name} is not in {place}")),
        }
    }
}

/// Files of the repository have the hashes that the receipt says.
fn files(receipt: &Receipt, root: &Path, problems: &mut Vec<String>) {
    let checkpoint = receipt.checkpoint.iter().flat_map(|c| &c.files);
    for file in checkpoint.chain(&receipt.references) {
        let path = root.join(&file.name);
        let inside =
            file.name.contains('/') && !file.name.split('/').any(|part| part == ".." || part.is_empty());
        if !inside || !path.is_file() {
            continue;
        }
        match sha256_file(&path) {
            Ok(digest) if digest == file.sha256 => {}
            Ok(digest) => problems.push(format!("{}: has SHA-256 {digest}, not {}", file.name, file.sha256)),
            Err(e) => problems.push(format!("{}: can't be hashed: {e}", file.name)),
        }
    }
}

fn words(v: Option<crate::Verdict>) -> &'static str {
    v.map_or("nothing", crate::Verdict::word)
}
