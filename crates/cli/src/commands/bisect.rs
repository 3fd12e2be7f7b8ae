//! `hallmark bisect`: which operator made the logits move.

use std::path::PathBuf;

use clap::Args;
use engine::{About, Visit};
use ops::{Backend, Reference};
use qualify::{
    bisect::{Report, bisect},
    gates::operators::reference_mode,
    models::Subject,
    trace::Trace,
};

use crate::{
    commands::qualify::{On, subject},
    failure::Failure,
    render,
};

/// Run a device beside the scalar reference, operator by operator: own error, accumulated error, amplification and flips;
/// with a trace of another implementation also tensor by tensor on the trace's own inputs.
#[derive(Args)]
pub struct BisectArgs {
    /// Model folder, or nano, micro, wide in a checkout; the built-in demo model by default
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub on: On,
    /// Reference trace
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Pass of the trace (default: the one with the most tensors)
    #[arg(long, value_name = "PASS", requires = "reference")]
    pub pass: Option<String>,
    /// Tokens of the run, where no trace is given
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub tokens: u16,
    /// Print one JSON document, every call of every operator in it
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &BisectArgs) -> Result<(), Failure> {
    let subject = subject(args.model.as_deref(), None)?;
    let report = args.on.visit(Bisection { args, subject: &subject })??;
    if args.json { render::document(&report) } else { render::line(report.text().trim_end()) }
}

struct Bisection<'a> {
    args: &'a BisectArgs,
    subject: &'a Subject,
}

impl Visit for Bisection<'_> {
    type Output = Result<Report, Failure>;

    fn visit<B: Backend + 'static>(self, backend: B, _: About) -> Self::Output {
        report(self.args, self.subject, backend)
    }
}

fn report<B: Backend>(args: &BisectArgs, subject: &Subject, device: B) -> Result<Report, Failure> {
    let reference = Reference::new(reference_mode(args.on.numerics));
    let checkpoint = &subject.checkpoint;
    let Some(path) = &args.reference else {
        let ids = subject.text(args.tokens.into()).map_err(Failure::Qualify)?;
        return bisect(reference, device, checkpoint, &ids, None).map_err(Failure::Qualify);
    };
    let trace = Trace::open(path).map_err(Failure::Qualify)?;
    let pass = match &args.pass {
        Some(pass) => pass.clone(),
        None => trace
            .passes()
            .into_iter()
            .max_by_key(|p| trace.tensors(p).len())
            .ok_or_else(|| Failure::Usage(format!("{} has no pass", path.display())))?,
    };
    let ids = trace.tokens(&pass).map_err(Failure::Qualify)?;
    eprintln!("{pass}: {} tokens", ids.len());
    bisect(reference, device, checkpoint, &ids, Some((&trace, &pass))).map_err(Failure::Qualify)
}
