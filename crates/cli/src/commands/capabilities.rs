//! `hallmark capabilities`: what is qualified, and what would lift a refusal.

use clap::Args;
use engine::Device;
use qualify::capabilities::{Capabilities, Status};

use crate::{commands::qualify::device_id, failure::Failure, render};

/// Say what this build is qualified for on this machine, and why not for the rest.
#[derive(Args)]
pub struct CapabilitiesArgs {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &CapabilitiesArgs) -> Result<(), Failure> {
    let devices = [Device::Cpu, Device::Metal, Device::Cuda, Device::Emu];
    let present: Vec<_> = devices.into_iter().filter_map(|d| Some(device_id(d, d.about().ok()?))).collect();
    let all = Capabilities::load();
    let table = all.table(&present);
    for warning in &all.warnings {
        eprintln!("warning: {warning}");
    }
    if args.json {
        return render::document(&table);
    }
    for e in table {
        let status = match e.status {
            Status::Qualified => "qualified",
            Status::Experimental => "experimental",
            Status::Refused => "refused",
        };
        let place = if e.family.is_empty() { &e.device } else { &e.family };
        let mut line = format!(
            "{status:<13} {:<16} {place:<12} {:<7} {:<8} {:<24} {}",
            e.feature, e.numerics, e.format, e.checkpoint, e.reason
        );
        if !e.lift.is_empty() {
            line = format!("{line}; {}", e.lift);
        }
        render::line(line.trim_end())?;
    }
    Ok(())
}
