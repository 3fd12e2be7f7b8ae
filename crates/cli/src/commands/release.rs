//! `hallmark qualify release`: the gates at released size against the model maker's CUDA path.

use std::{fs, ops::Range, path::PathBuf};

use clap::Args;
use cpu::Cpu;
use engine::{About, Device, Visit};
use ops::{Backend, Mode};
use qualify::{
    models::trace_cache,
    release::{
        ReleaseRun, WholeRuns,
        knobs::{Knob, Knobbed},
        plots::plots,
    },
};

use super::qualify::{On, Out, finish};
use crate::failure::Failure;

/// Operators, layers and whole runs of a generated 40-layer model of released width (16 experts) against DeepSeek's CUDA
/// path on an H200 (G0 to G3). Weights are made one layer at a time, so 8 GB of memory are enough.
#[derive(Args)]
pub struct ReleaseArgs {
    #[command(flatten)]
    pub on: On,
    /// Layers to run, such as 0..3; whole runs need all
    #[arg(long, default_value = "0..40", value_name = "A..B", value_parser = layers)]
    pub layers: Range<usize>,
    /// Whole runs: none, short (8 tokens) or all (160 tokens too)
    #[arg(long, default_value = "all", value_name = "none|short|all")]
    pub whole: Whole,
    /// Folder that keeps finished layers, so that an interrupted run goes on (default: a cache folder)
    #[arg(long, value_name = "DIR")]
    pub work: Option<PathBuf>,
    /// Write the plots of the documentation to this folder
    #[arg(long, value_name = "DIR")]
    pub plots: Option<PathBuf>,
    #[command(flatten)]
    pub out: Out,
}

/// What of G3 runs.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Whole {
    /// G0 to G2 alone.
    None,
    /// The prompts of 8 tokens.
    Short,
    /// All prompts.
    All,
}

impl Whole {
    fn word(self) -> (WholeRuns, &'static str) {
        match self {
            Whole::None => (WholeRuns::None, "none"),
            Whole::Short => (WholeRuns::Short, "short"),
            Whole::All => (WholeRuns::All, "all"),
        }
    }
}

fn layers(s: &str) -> Result<Range<usize>, String> {
    let parsed = s.split_once("..").and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
    parsed.ok_or_else(|| "two layer numbers are needed, such as 0..3".into())
}

pub fn run(args: &ReleaseArgs) -> Result<(), Failure> {
    if args.on.numerics != Mode::Source {
        return Err(Failure::Usage(
            "qualify release compares roundings, so it runs in source numerics alone; leave out --numerics"
                .into(),
        ));
    }
    if args.on.device == Device::Cpu {
        let backend = super::qualify::cpu(Mode::Source, args.on.threads)?;
        let about = args.on.device.about()?;
        return release(args, Knobbed::new(backend), Some(Knobbed::<Cpu>::set), about);
    }
    args.on.visit(Release { args })?
}

struct Release<'a> {
    args: &'a ReleaseArgs,
}

impl Visit for Release<'_> {
    type Output = Result<(), Failure>;

    fn visit<B: Backend + 'static>(self, backend: B, about: About) -> Self::Output {
        release(self.args, backend, None, about)
    }
}

fn release<B: Backend>(
    args: &ReleaseArgs,
    backend: B,
    knobs: Option<fn(&B, Knob)>,
    about: About,
) -> Result<(), Failure> {
    let device = args.on.id(about);
    let (whole, word) = args.whole.word();
    let (a, b) = (args.layers.start, args.layers.end);
    let mut command = format!("hallmark qualify release --device {}", device.name);
    if (a, b) != (0, 40) {
        command += &format!(" --layers {a}..{b}");
    }
    if whole != WholeRuns::All {
        command += &format!(" --whole {word}");
    }
    let name = format!("release-{}-source.json", device.family);
    let run = ReleaseRun {
        device,
        layers: args.layers.clone(),
        whole,
        work: args.work.clone().or_else(|| Some(trace_cache()?.parent()?.join("release"))),
        command,
        operators: true,
        stop: None,
    };
    let outcome = run.run(backend, knobs, |what| eprintln!("{what}")).map_err(Failure::Qualify)?;
    if let Some(folder) = &args.plots {
        fs::create_dir_all(folder).map_err(|e| Failure::Io(format!("{}: {e}", folder.display())))?;
        for (name, svg) in plots(&outcome).map_err(Failure::Qualify)? {
            let path = folder.join(name);
            fs::write(&path, svg).map_err(|e| Failure::Io(format!("{}: {e}", path.display())))?;
        }
    }
    let receipt = run.receipt(&outcome, Mode::Source.name()).map_err(Failure::Qualify)?;
    finish(&receipt, &args.out, &name)
}
