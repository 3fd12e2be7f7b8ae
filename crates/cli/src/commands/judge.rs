//! `hallmark judge`: two traces of any engines.

use std::{fs, path::PathBuf};

use clap::Args;
use qualify::{
    Thresholds, Verdict,
    judge::{judge, page, text},
    trace::Trace,
};

use crate::{failure::Failure, render};

/// Compare two traces, whoever made them: error, KL, agreement, choices, and a verdict relative to the reference's own
/// noise.
#[derive(Args)]
pub struct JudgeArgs {
    /// The reference's trace
    #[arg(long, value_name = "FILE")]
    pub reference: PathBuf,
    /// The trace that is judged
    #[arg(long, value_name = "FILE")]
    pub candidate: PathBuf,
    /// A second trace of the reference, after a change that should not matter: its distance is the floor
    #[arg(long, value_name = "FILE")]
    pub noise: Option<PathBuf>,
    /// Print every tensor
    #[arg(long)]
    pub tensors: bool,
    /// Write a page with a heat map, layer by tensor
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &JudgeArgs) -> Result<(), Failure> {
    let reference = Trace::open(&args.reference).map_err(Failure::Qualify)?;
    let candidate = Trace::open(&args.candidate).map_err(Failure::Qualify)?;
    let noise = args.noise.as_deref().map(Trace::open).transpose().map_err(Failure::Qualify)?;
    let judgement =
        judge(&reference, &candidate, noise.as_ref(), Thresholds::built_in()).map_err(Failure::Qualify)?;
    if let Some(path) = &args.html {
        fs::write(path, page(&judgement)).map_err(|e| Failure::Io(format!("{}: {e}", path.display())))?;
        eprintln!("page: {}", path.display());
    }
    if args.json {
        render::document(&judgement)?;
    } else {
        render::line(text(&judgement, args.tensors).trim_end())?;
    }
    match judgement.verdict {
        Verdict::Fail => {
            Err(Failure::Gate("the candidate departs by more than the reference's noise".into()))
        }
        _ => Ok(()),
    }
}
