//! What is qualified: from the operators' registry and the receipts, for exactly this build.
//!
//! A receipt qualifies what it names: contents of the build, family of the device, numerics, format and fingerprint of
//! the checkpoint. Everything else is refused with a reason and with what would lift the refusal.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{
    inputs::Inputs,
    receipt::{DeviceId, Receipt, verify},
    verdict::Verdict,
};

/// Receipts that were committed when this program was built.
const COMMITTED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/receipts.rs"));

/// Gates that a model must have passed to be served.
const REQUIRED: [&str; 4] = ["G0", "G1", "G2", "G3"];

/// What may be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// A sound receipt of this build says PASS.
    Qualified,
    /// A sound receipt says PASS, but of other contents or only in part: runs with `--allow-unqualified`.
    Experimental,
    /// Nothing says that it works: runs with `--allow-unqualified` where it runs at all.
    Refused,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// What is done.
    pub feature: String,
    /// Name of the device.
    pub device: String,
    /// Family of the device, where one is known.
    pub family: String,
    /// `exact`, `source` or `native`.
    pub numerics: String,
    /// Format of the weights.
    pub format: String,
    /// Checkpoint, by name and fingerprint; empty where none is meant.
    pub checkpoint: String,
    /// Whether it may be done.
    pub status: Status,
    /// Why.
    pub reason: String,
    /// What would lift a refusal; empty for what is qualified.
    pub lift: String,
    /// File name of the receipt that the status rests on.
    pub receipt: String,
}

/// What somebody wants to run.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The device.
    pub device: &'a DeviceId,
    /// `exact`, `source` or `native`.
    pub numerics: &'a str,
    /// Format of the checkpoint.
    pub format: &'a str,
    /// Its fingerprint.
    pub fingerprint: &'a str,
    /// How the command line names it.
    pub model: &'a str,
}

/// The receipts that count for this build.
#[derive(Clone, Debug)]
pub struct Capabilities {
    inputs: Inputs,
    receipts: Vec<(String, Receipt)>,
    /// Receipts that were left aside, and why: one sentence each.
    pub warnings: Vec<String>,
}

impl Capabilities {
    /// Committed receipts and those of the local folder, held against this build.
    pub fn load() -> Self {
        let mut out = Self { inputs: Inputs::built(), receipts: Vec::new(), warnings: Vec::new() };
        for (name, text) in COMMITTED {
            match Receipt::parse(text, name) {
                Ok(r) => out.add(name, r),
                Err(e) => out.warnings.push(e.to_string()),
            }
        }
        if let Some(folder) = local_folder() {
            out.add_folder(&folder);
        }
        out
    }

    /// No receipts but those that are added, held against `inputs`.
    pub fn of(inputs: Inputs) -> Self {
        Self { inputs, receipts: Vec::new(), warnings: Vec::new() }
    }

    /// Adds a receipt if it is sound.
    pub fn add(&mut self, name: &str, receipt: Receipt) {
        match verify(&receipt, &self.inputs, None).problems.first() {
            None => self.receipts.push((name.to_owned(), receipt)),
            Some(problem) => self.warnings.push(format!("{name} is left aside: {problem}")),
        }
    }

    /// The sound receipts with their file names.
    pub fn receipts(&self) -> &[(String, Receipt)] {
        &self.receipts
    }

    /// The contents that receipts are held against.
    pub fn inputs(&self) -> &Inputs {
        &self.inputs
    }

    /// Adds the receipts of a folder; those that cannot be read or are not sound become warnings.
    pub fn add_folder(&mut self, folder: &Path) {
        let mut paths: Vec<PathBuf> =
            fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
        paths.sort();
        for path in paths.iter().filter(|p| p.extension().is_some_and(|e| e == "json")) {
            match Receipt::open(path) {
                Ok(r) => {
                    let name = path.file_name().unwrap_or_default().to_string_lossy();
                    self.add(&name, r);
                }
                Err(e) => self.warnings.push(e.to_string()),
            }
        }
    }

    /// Whether `wanted` may be served, with the reason and what would lift a refusal.
    pub fn decide(&self, wanted: Wanted<'_>) -> Entry {
        let mut entry = Entry {
            feature: "text generation".into(),
            device: wanted.device.name.clone(),
            family: wanted.device.family.clone(),
            numerics: wanted.numerics.into(),
            format: wanted.format.into(),
            checkpoint: format!("{} {}", wanted.model, short(wanted.fingerprint)),
            status: Status::Refused,
            reason: String::new(),
            lift: format!(
                "qualify it: hallmark qualify model {} --device {} --numerics {} --against {}",
                wanted.model,
                wanted.device.name,
                wanted.numerics,
                // The CPU is never held against itself.
                if wanted.device.name == "cpu" { "scalar" } else { "cpu" }
            ),
            receipt: String::new(),
        };
        let fits = |r: &&(String, Receipt)| {
            r.1.checkpoint.as_ref().is_some_and(|c| c.fingerprint == wanted.fingerprint)
                && r.1.device.family == wanted.device.family
                && r.1.numerics == wanted.numerics
        };
        // Of several receipts the newest of this build speaks; without one, the newest of another.
        let mut fitting: Vec<&(String, Receipt)> = self.receipts.iter().filter(fits).collect();
        fitting.sort_by_key(|(_, r)| (r.inputs.hash == self.inputs.hash, r.created.clone()));
        let Some((name, r)) = fitting.last() else {
            entry.reason = format!(
                "no receipt qualifies checkpoint {} in {} numerics on {}",
                short(wanted.fingerprint),
                wanted.numerics,
                wanted.device.family
            );
            return entry;
        };
        entry.receipt.clone_from(name);
        let missing: Vec<&str> =
            REQUIRED.into_iter().filter(|g| r.gate(g).is_none_or(|g| g.verdict != Verdict::Pass)).collect();
        if r.verdict == Verdict::Fail {
            let failed = r.gates.iter().filter(|g| g.verdict == Verdict::Fail).map(|g| g.gate.as_str());
            let failed = failed.collect::<Vec<_>>().join(" ");
            entry.reason = format!("{name} says FAIL ({failed})");
        } else if !missing.is_empty() {
            entry.status = Status::Experimental;
            entry.reason = format!("{name} does not say PASS for {}", missing.join(" "));
        } else if r.inputs.hash != self.inputs.hash {
            entry.status = Status::Experimental;
            let changed = self.inputs.changed(&r.inputs).join(" ");
            entry.reason = format!("{name} says PASS for other contents; changed since: {changed}");
        } else if r.verdict != Verdict::Pass {
            entry.status = Status::Experimental;
            entry.reason =
                format!("{name} says {}: the tree was not clean, or the run only allowed", r.verdict);
        } else {
            entry.status = Status::Qualified;
            entry.reason = format!("{name} says PASS");
            entry.lift.clear();
        }
        entry
    }

    /// The table: every receipt's checkpoint, the operators of every device, and what is not built. `present` are the
    /// devices of this build on this machine.
    pub fn table(&self, present: &[DeviceId]) -> Vec<Entry> {
        let mut entries = Vec::new();
        for device in ["cpu", "metal", "cuda", "emu"] {
            let here = present.iter().find(|d| d.name == device);
            match here {
                None => entries.push(absent(device)),
                Some(d) => ["exact", "source", "native"]
                    .iter()
                    .for_each(|numerics| entries.push(self.operators(d, numerics))),
            }
        }
        let mut seen: Vec<(String, String, String)> = Vec::new();
        for (_, r) in &self.receipts {
            let Some(c) = &r.checkpoint else { continue };
            let key = (c.fingerprint.clone(), r.device.family.clone(), r.numerics.clone());
            if seen.contains(&key) {
                continue;
            }
            seen.push(key);
            entries.push(self.decide(Wanted {
                device: &r.device,
                numerics: &r.numerics,
                format: &c.format,
                fingerprint: &c.fingerprint,
                model: &c.name,
            }));
        }
        entries.push(Entry {
            feature: "images".into(),
            device: "any".into(),
            family: String::new(),
            numerics: "any".into(),
            format: "any".into(),
            checkpoint: String::new(),
            status: Status::Refused,
            reason: "the vision tower is not built".into(),
            lift: "send text; nothing else lifts this in this version".into(),
            receipt: String::new(),
        });
        entries
    }

    /// Operators of a device: its newest receipt of this build.
    fn operators(&self, device: &DeviceId, numerics: &str) -> Entry {
        let fits = |r: &&(String, Receipt)| {
            r.1.kind == "ops" && r.1.device.family == device.family && r.1.numerics == numerics
        };
        let mut fitting: Vec<&(String, Receipt)> = self.receipts.iter().filter(fits).collect();
        fitting.sort_by_key(|(_, r)| (r.inputs.hash == self.inputs.hash, r.created.clone()));
        let mut entry = Entry {
            feature: "operators".into(),
            device: device.name.clone(),
            family: device.family.clone(),
            numerics: numerics.into(),
            format: "all".into(),
            checkpoint: String::new(),
            status: Status::Refused,
            reason: "no receipt of this device's operators".into(),
            lift: format!("hallmark qualify ops --device {} --numerics {numerics}", device.name),
            receipt: String::new(),
        };
        if let Some((name, r)) = fitting.last() {
            entry.receipt.clone_from(name);
            let current = r.inputs.hash == self.inputs.hash;
            (entry.status, entry.reason) = match (r.verdict, current) {
                (Verdict::Pass, true) => (Status::Qualified, format!("{name} says PASS")),
                (Verdict::Pass, false) => (Status::Experimental, format!("{name} is of other contents")),
                (Verdict::Fail, _) => (Status::Refused, format!("{name} says FAIL")),
                (v, _) => (Status::Experimental, format!("{name} says {v}")),
            };
            if entry.status == Status::Qualified {
                entry.lift.clear();
            }
        }
        entry
    }
}

fn absent(device: &str) -> Entry {
    Entry {
        feature: "all".into(),
        device: device.into(),
        family: String::new(),
        numerics: "any".into(),
        format: "any".into(),
        checkpoint: String::new(),
        status: Status::Refused,
        reason: format!("this build has no {device} backend, or the machine has no such device"),
        lift: "use --device cpu".into(),
        receipt: String::new(),
    }
}

fn short(fingerprint: &str) -> &str {
    fingerprint.get(..12).unwrap_or(fingerprint)
}

/// Where a machine's own receipts lie: `$XDG_DATA_HOME/hallmark/receipts`, else `~/.local/share/hallmark/receipts`.
pub fn local_folder() -> Option<PathBuf> {
    let data = env::var_os("XDG_DATA_HOME").filter(|d| !d.is_empty()).map(PathBuf::from);
    let data = data.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".local/share")))?;
    Some(data.join("hallmark/receipts"))
}
