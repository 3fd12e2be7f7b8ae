//! `hallmark qualify`: gates to receipts.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use cpu::Cpu;
use engine::{About, Device, Visit};
use ops::{Backend, Mode, Reference};
use qualify::{
    Verdict,
    capabilities::local_folder,
    gates::{model::HostBackend, operators::reference_mode},
    models::{self, Subject},
    receipt::{DeviceId, Receipt},
    run::{ModelRun, qualify_ops},
};

use crate::{demo, failure::Failure, render};

/// Run gates on a device and write a receipt.
#[derive(Subcommand)]
pub enum Qualify {
    /// Every registered operator at tiny and released width against the scalar reference (G0, G1)
    Ops(OpsArgs),
    /// A checkpoint: operators, teacher-forced layers, whole model, drafts (G0 to G4)
    Model(ModelArgs),
    /// Operators, layers and whole runs at released size against the model maker's CUDA path, on generated weights (G0 to G3)
    Release(super::release::ReleaseArgs),
}

/// What runs.
#[derive(Args, Clone)]
pub struct On {
    /// Where to compute: cpu, metal, cuda or emu
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,
    /// Where values are rounded: exact, source or native
    #[arg(long, default_value = "source", value_name = "MODE")]
    pub numerics: Mode,
    /// Threads; all cores by default
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

impl On {
    /// Hands the device's backend to `work`.
    ///
    /// # Errors
    /// A device that this build or this machine does not have.
    pub fn visit<V: Visit>(&self, work: V) -> Result<V::Output, Failure> {
        Ok(self.device.visit(self.numerics, self.threads, work)?)
    }

    /// How receipts describe the device.
    pub fn id(&self, about: About) -> DeviceId {
        device_id(self.device, about)
    }
}

/// How receipts describe a device.
pub fn device_id(device: Device, about: About) -> DeviceId {
    DeviceId { name: device.name().into(), family: about.family, detail: about.detail, driver: about.driver }
}

/// A CPU backend.
pub fn cpu(mode: Mode, threads: Option<usize>) -> Result<Cpu, Failure> {
    Cpu::new(mode, threads, None).map_err(|e| Failure::Io(e.to_string()))
}

#[derive(Args)]
pub struct OpsArgs {
    #[command(flatten)]
    pub on: On,
    #[command(flatten)]
    pub out: Out,
}

#[derive(Args)]
pub struct ModelArgs {
    /// Model folder, or nano, micro, wide in a checkout; the built-in demo model by default
    pub model: Option<PathBuf>,
    /// Folder that holds the Engram tables, for a pack without them: the released model, or just the shards they are in
    #[arg(long, value_name = "DIR", requires = "model")]
    pub engram_from: Option<PathBuf>,
    #[command(flatten)]
    pub on: On,
    /// Reference where no trace is known: cpu (the CPU backend), or scalar (the readable reference, slow); by default cpu
    /// for other devices and scalar for the CPU itself
    #[arg(long, value_name = "cpu|scalar")]
    pub against: Option<Against>,
    /// A trace of another implementation as the reference of layers and logits
    #[arg(long, value_name = "FILE", conflicts_with = "against")]
    pub reference: Option<PathBuf>,
    /// Tokens of the run, where no trace is the reference
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub tokens: u16,
    /// One-ulp changes from which the reference's own noise is taken
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=64))]
    pub draws: u16,
    /// What to hash of the checkpoint: every file, or samples of every tensor (quick, for hundreds of gigabytes)
    #[arg(long, default_value = "files", value_name = "files|samples")]
    pub hash: Hash,
    /// Run layers and logits although an operator failed, and mark the receipt
    #[arg(long)]
    pub allow_unqualified: bool,
    #[command(flatten)]
    pub out: Out,
}

/// Where the receipt goes.
#[derive(Args)]
pub struct Out {
    /// Receipt to write (default: the local folder, where it lifts the refusal for this checkpoint, build and device)
    #[arg(long, value_name = "FILE")]
    pub receipt: Option<PathBuf>,
    /// Print the receipt as one JSON document
    #[arg(long)]
    pub json: bool,
}

/// The live reference.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Against {
    /// The CPU backend.
    Cpu,
    /// The scalar reference.
    Scalar,
}

/// What is hashed.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Hash {
    /// Every byte.
    Files,
    /// Samples.
    Samples,
}

pub fn run(args: &Qualify) -> Result<(), Failure> {
    match args {
        Qualify::Ops(args) => operators(args),
        Qualify::Model(args) => model(args),
        Qualify::Release(args) => super::release::run(args),
    }
}

fn operators(args: &OpsArgs) -> Result<(), Failure> {
    args.on.visit(Operators { args })?
}

struct Operators<'a> {
    args: &'a OpsArgs,
}

impl Visit for Operators<'_> {
    type Output = Result<(), Failure>;

    fn visit<B: Backend + 'static>(self, backend: B, about: About) -> Self::Output {
        let args = self.args;
        let (device, numerics) = (args.on.id(about), args.on.numerics.name());
        let command = format!("hallmark qualify ops --device {} --numerics {numerics}", device.name);
        let name = format!("ops-{}-{numerics}.json", device.family);
        let receipt = qualify_ops(&backend, device, command, |p| {
            eprintln!(
                "{:>3}/{} {:<22} {:<9} reference {:>7.2?}, total {:>7.2?}, NRMS {:.1e}",
                p.number.0, p.number.1, p.operator, p.geometry, p.reference, p.total, p.worst
            );
        })
        .map_err(Failure::Qualify)?;
        finish(&receipt, &args.out, &name)
    }
}

/// The model that the command line names, with the folder of its Engram tables where it lacks them.
pub fn subject(model: Option<&Path>, engram_from: Option<&Path>) -> Result<Subject, Failure> {
    Ok(match model.filter(|m| m.exists() || *m != Path::new("demo")) {
        Some(folder) => Subject::open_with(folder, engram_from).map_err(Failure::Qualify)?,
        None => Subject::demo(demo::open()?),
    })
}

fn model(args: &ModelArgs) -> Result<(), Failure> {
    let subject = subject(args.model.as_deref(), args.engram_from.as_deref())?;
    let against = args.against.unwrap_or(match args.on.device {
        Device::Cpu => Against::Scalar,
        _ => Against::Cpu,
    });
    let mode = reference_mode(args.on.numerics);
    // The noise of a trace's reference is measured on the CPU backend; a live reference is what was asked for.
    let traced = args.against.is_none();
    match against {
        Against::Cpu if args.on.device == Device::Cpu => Err(Failure::Usage(
            "--against cpu would compare the CPU with itself; use --against scalar".into(),
        )),
        Against::Scalar if !traced || no_trace(args, &subject)? => args.on.visit(RunModel {
            args,
            subject: &subject,
            make: &|| Ok(Reference::new(mode)),
            traced: false,
        })?,
        _ => {
            let threads = args.on.threads;
            let make =
                || cpu(mode, threads).map_err(|e| qualify::Error::Usage(format!("the CPU reference: {e}")));
            args.on.visit(RunModel { args, subject: &subject, make: &make, traced })?
        }
    }
}

fn no_trace(args: &ModelArgs, subject: &Subject) -> Result<bool, Failure> {
    let known = subject.reference(args.on.numerics).map_err(Failure::Qualify)?;
    Ok(args.reference.is_none() && known.is_none())
}

/// The gates of a model against a reference that `make` makes.
struct RunModel<'a, R> {
    args: &'a ModelArgs,
    subject: &'a Subject,
    make: &'a dyn Fn() -> qualify::Result<R>,
    traced: bool,
}

impl<R: HostBackend> Visit for RunModel<'_, R> {
    type Output = Result<(), Failure>;

    fn visit<B: Backend + 'static>(self, backend: B, about: About) -> Self::Output {
        run_model(&self, backend, about)
    }
}

fn run_model<R: HostBackend, B: Backend + 'static>(
    what: &RunModel<'_, R>,
    backend: B,
    about: About,
) -> Result<(), Failure> {
    let &RunModel { args, subject, make, traced } = what;
    let reference = match &args.reference {
        Some(file) => {
            let name = file.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
            Some(models::reference(file, name).map_err(Failure::Qualify)?)
        }
        None if traced => subject.reference(args.on.numerics).map_err(Failure::Qualify)?,
        None => None,
    };
    let (device, numerics) = (args.on.id(about), args.on.numerics.name());
    let name = format!("{}-{}-{numerics}.json", subject.name, device.family);
    let mut command =
        format!("hallmark qualify model {} --device {} --numerics {numerics}", subject.name, device.name);
    if let Some(folder) = args.engram_from.as_deref().and_then(Path::file_name) {
        command = format!("{command} --engram-from {}", folder.to_string_lossy());
    }
    if let Some(r) = &reference {
        command = format!("{command} (reference {})", r.file.name);
    } else {
        let against = make().map_err(Failure::Qualify)?.name();
        command = format!("{command} --against {against} --tokens {}", args.tokens);
    }
    let weights: u64 = subject.checkpoint.tensors().iter().map(|t| t.len).sum();
    let run = ModelRun {
        subject,
        backend,
        device,
        make,
        reference,
        tokens: args.tokens.into(),
        draws: args.draws.into(),
        allow: args.allow_unqualified,
        full_hash: args.hash == Hash::Files,
        // Nine more runs of the reference are nothing for a small model and hours for a large one.
        sensitivity: weights < 1 << 30,
        command,
    };
    let receipt = run.run(|what| eprintln!("{what}")).map_err(Failure::Qualify)?;
    finish(&receipt, &args.out, &name)
}

/// Writes the receipt, prints it, and fails where it says FAIL.
pub fn finish(receipt: &Receipt, out: &Out, name: &str) -> Result<(), Failure> {
    let path = match &out.receipt {
        Some(path) => path.clone(),
        None => local_folder()
            .ok_or_else(|| {
                Failure::Usage("there is no home folder for the receipt; use --receipt FILE".into())
            })?
            .join(name),
    };
    receipt.write(&path).map_err(Failure::Qualify)?;
    if out.json {
        render::document(receipt)?;
    } else {
        render::line(super::receipt::summary(receipt).trim_end())?;
    }
    eprintln!("receipt: {}", path.display());
    match receipt.verdict {
        Verdict::Fail => Err(Failure::Gate(format!("{}: the receipt says FAIL", receipt.scope))),
        _ => Ok(()),
    }
}
