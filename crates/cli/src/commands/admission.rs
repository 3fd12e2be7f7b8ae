//! Whether a model may run: what the receipts of this build say, and the flag that overrules them.

use checkpoint::Checkpoint;
use clap::Args;
use engine::{Device, Loaded};
use qualify::{
    capabilities::{Capabilities, Status, Wanted},
    identity,
};
use serde::Serialize;

use crate::{args::Model, commands::qualify::device_id, failure::Failure};

/// The flag that overrules a refusal.
#[derive(Args, Clone)]
pub struct Admission {
    /// Run a model that no receipt of this build qualifies, under a banner and with a mark in the answer
    #[arg(long)]
    pub allow_unqualified: bool,
}

/// What the receipts say about the model that runs: part of every JSON answer.
#[derive(Debug, Serialize)]
pub struct Standing {
    /// Whether a sound receipt of this build says PASS.
    pub status: Status,
    /// Why.
    pub reason: String,
    /// The receipt.
    pub receipt: String,
    /// The mark: it runs although it is not qualified.
    pub unqualified: bool,
}

impl Admission {
    /// Opens the checkpoint, asks the receipts and loads it.
    ///
    /// A folder that is not qualified is refused. The model inside the program is a demonstration whose weights are part
    /// of the build, so it runs on the CPU under the same banner without the flag.
    ///
    /// # Errors
    /// The refusal, with what would lift it, or what opening and loading report.
    pub fn load(&self, model: &Model) -> Result<(Loaded, Standing), Failure> {
        let checkpoint = model.open()?;
        let standing = self.standing(model, &checkpoint)?;
        Ok((model.prepare(&checkpoint)?, standing))
    }

    fn standing(&self, model: &Model, checkpoint: &Checkpoint) -> Result<Standing, Failure> {
        let device = device_id(model.device, model.device.about()?);
        let name = model.model.as_ref().map_or_else(|| "demo".into(), |m| m.display().to_string());
        let tables = model.engram_from.as_ref().map(|d| format!(" --engram-from {}", d.display()));
        let with_tables = name.clone() + &tables.unwrap_or_default();
        let all = Capabilities::load();
        for warning in &all.warnings {
            eprintln!("warning: {warning}");
        }
        let entry = all.decide(Wanted {
            device: &device,
            numerics: model.numerics.name(),
            format: &identity::format(checkpoint),
            fingerprint: &identity::fingerprint(checkpoint).map_err(Failure::Qualify)?,
            model: &with_tables,
        });
        let unqualified = entry.status != Status::Qualified;
        let inside = model.model.is_none() && model.device == Device::Cpu;
        if unqualified && !inside && !self.allow_unqualified {
            return Err(Failure::Engine(engine::Error::Refused(format!(
                "{name} is refused as not qualified: {}; {}, or run it as it is with --allow-unqualified",
                entry.reason, entry.lift
            ))));
        }
        if unqualified {
            eprintln!("UNQUALIFIED: {}; {}", entry.reason, entry.lift);
        }
        Ok(Standing { status: entry.status, reason: entry.reason, receipt: entry.receipt, unqualified })
    }
}
