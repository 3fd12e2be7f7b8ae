//! `hallmark receipt`: check, show and compare receipts, and write the table of the README.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand};
use engine::plan::gb;
use qualify::{
    Verdict,
    inputs::{Inputs, checkout},
    receipt::{Receipt, State, diff, replace_table, table, verify},
};
use serde_json::{Value, json};

use crate::{failure::Failure, render};

/// Check, show and compare receipts.
#[derive(Subcommand)]
pub enum ReceiptCommand {
    /// Derive everything again that can be: hashes, seals, limits, verdicts
    Verify(VerifyArgs),
    /// Print a receipt as a table
    Show(ShowArgs),
    /// Print what differs between two receipts
    Diff(DiffArgs),
    /// Print the table of receipts, or write it between the markers of a document
    Table(TableArgs),
}

#[derive(Args)]
pub struct VerifyArgs {
    /// Receipts
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Fail for receipts of other contents too
    #[arg(long)]
    pub require_current: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct ShowArgs {
    /// Receipt
    pub file: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct DiffArgs {
    /// First receipt
    pub a: PathBuf,
    /// Second receipt
    pub b: PathBuf,
}

#[derive(Args)]
pub struct TableArgs {
    /// Receipts (default: those of receipts/)
    pub files: Vec<PathBuf>,
    /// Write the table into this document
    #[arg(long, value_name = "FILE", conflicts_with = "check")]
    pub write: Option<PathBuf>,
    /// Fail unless this document has exactly this table
    #[arg(long, value_name = "FILE")]
    pub check: Option<PathBuf>,
}

pub fn run(args: &ReceiptCommand) -> Result<(), Failure> {
    match args {
        ReceiptCommand::Verify(args) => verify_all(args),
        ReceiptCommand::Show(args) => {
            let receipt = open(&args.file)?;
            if args.json { render::document(&receipt) } else { render::line(summary(&receipt).trim_end()) }
        }
        ReceiptCommand::Diff(args) => {
            let text = diff(&open(&args.a)?, &open(&args.b)?);
            render::line(if text.is_empty() { "no difference" } else { text.trim_end() })
        }
        ReceiptCommand::Table(args) => write_table(args),
    }
}

fn open(path: &Path) -> Result<Receipt, Failure> {
    Receipt::open(path).map_err(Failure::Qualify)
}

fn replaced(document: &str, table: &str, path: &Path) -> Result<String, Failure> {
    replace_table(document, table, &path.display().to_string()).map_err(Failure::Qualify)
}

fn verify_all(args: &VerifyArgs) -> Result<(), Failure> {
    let (present, root) = (Inputs::present(), checkout());
    let (mut faults, mut entries) = (0, Vec::new());
    for file in &args.files {
        let name = file.display().to_string();
        let receipt = open(file)?;
        let verified = verify(&receipt, &present, root.as_deref());
        let (word, changed) = match &verified.state {
            State::Current => ("current", Vec::new()),
            State::Historical(paths) => ("historical", paths.clone()),
        };
        let stale = args.require_current && word != "current";
        faults += usize::from(stale || !verified.problems.is_empty());
        if !args.json {
            let mut text = format!("{name}: {}, {word}", receipt.verdict);
            if !changed.is_empty() {
                let _ = write!(text, " (changed since: {})", changed.join(" "));
            }
            for problem in &verified.problems {
                let _ = write!(text, "\n  {problem}");
            }
            render::line(&text)?;
        }
        entries.push(json!({
            "file": name, "verdict": receipt.verdict, "state": word, "changed": changed,
            "problems": verified.problems,
        }));
    }
    if args.json {
        render::document(&entries)?;
    }
    match faults {
        0 => Ok(()),
        n => Err(Failure::Gate(format!(
            "{n} of {} receipts are inconsistent{}",
            args.files.len(),
            if args.require_current { " or not current" } else { "" }
        ))),
    }
}

fn write_table(args: &TableArgs) -> Result<(), Failure> {
    let files = if args.files.is_empty() { committed()? } else { args.files.clone() };
    let mut receipts = Vec::new();
    for file in &files {
        let name = file.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        receipts.push((name, open(file)?));
    }
    let text = table(&receipts, &Inputs::present());
    let read =
        |path: &Path| fs::read_to_string(path).map_err(|e| Failure::Io(format!("{}: {e}", path.display())));
    if let Some(path) = &args.write {
        let new = replaced(&read(path)?, &text, path)?;
        return fs::write(path, new).map_err(|e| Failure::Io(format!("{}: {e}", path.display())));
    }
    if let Some(path) = &args.check {
        let old = read(path)?;
        if replaced(&old, &text, path)? != old {
            return Err(Failure::Gate(format!(
                "{}: the table is not what the receipts say; run hallmark receipt table --write {0}",
                path.display()
            )));
        }
        return Ok(());
    }
    render::line(text.trim_end())
}

/// Receipts of the checkout.
fn committed() -> Result<Vec<PathBuf>, Failure> {
    let folder = checkout()
        .map(|root| root.join("receipts"))
        .ok_or_else(|| Failure::Usage("name the receipts, or run inside a checkout".into()))?;
    let list = fs::read_dir(&folder).map_err(|e| Failure::Io(format!("{}: {e}", folder.display())))?;
    let mut files: Vec<PathBuf> = list.flatten().map(|e| e.path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "json"));
    files.sort();
    Ok(files)
}

/// The plan of a run's memory beside what was measured; nothing for receipts without.
fn memory(m: &Value) -> String {
    let part = |name: &str| m["planned"][name].as_u64().unwrap_or(0);
    let planned = ["weights", "engram", "state", "step"].map(part).iter().sum::<u64>();
    match (planned, m["measured"]["peak"].as_u64(), m["ratio"].as_f64()) {
        (0, ..) => String::new(),
        (_, Some(peak), Some(ratio)) => {
            format!(
                "memory: {:.3} GB planned, {:.3} GB at most ({ratio:.2} of the plan)\n",
                gb(planned),
                gb(peak)
            )
        }
        _ => format!("memory: {:.3} GB planned\n", gb(planned)),
    }
}

/// A receipt as text: what, where, and every check that says something.
pub fn summary(r: &Receipt) -> String {
    let mut out = format!("{}\n{}: {}\n", r.scope, r.kind, r.verdict);
    let _ = writeln!(
        out,
        "commit {}{}, {}, {} {} ({} cores, {} GiB), device {} {}",
        r.inputs.commit.get(..12).unwrap_or("unknown"),
        if r.inputs.dirty { " with changes" } else { "" },
        r.created,
        r.machine.cpu,
        r.machine.system,
        r.machine.cores,
        r.machine.memory_gib,
        r.device.family,
        r.device.detail
    );
    if r.unqualified {
        out += "ran although unqualified (--allow-unqualified)\n";
    }
    out += &memory(&r.measurements["memory"]);
    for gate in &r.gates {
        let failed = gate.checks.iter().filter(|c| c.verdict == Some(Verdict::Fail)).count();
        let _ =
            writeln!(out, "\n{} {} ({} checks, {failed} failed)", gate.gate, gate.verdict, gate.checks.len());
        // Of long gates only what is not plainly fine.
        let short = gate.checks.len() <= 40;
        for c in gate.checks.iter().filter(|c| short || c.verdict != Some(Verdict::Pass)) {
            let figure = c.figure.map_or("-".into(), |f| format!("{f:.3e}"));
            let verdict = c.verdict.map_or("", Verdict::word);
            let _ = writeln!(out, "  {:<52} {figure:>10} {verdict:<8} {}", c.name, c.note);
        }
    }
    out
}
