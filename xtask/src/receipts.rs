//! `cargo xtask receipts`: every committed receipt made again for the present tree, and the README's table of them.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::process::{cargo, output, root, run as run_command, shown, target_dir};

/// What is qualified: arguments of `hallmark qualify`, and the receipt's name.
const RUNS: [(&str, &[&str]); 15] = [
    ("ops-source", &["ops", "--numerics", "source"]),
    ("ops-exact", &["ops", "--numerics", "exact"]),
    ("ops-native", &["ops", "--numerics", "native"]),
    ("nano-source", &["model", "nano", "--numerics", "source"]),
    ("nano-exact", &["model", "nano", "--numerics", "exact"]),
    ("nano-native", &["model", "nano", "--numerics", "native"]),
    ("micro-source", &["model", "micro", "--numerics", "source"]),
    ("micro-exact", &["model", "micro", "--numerics", "exact"]),
    ("micro-native", &["model", "micro", "--numerics", "native"]),
    ("wide-exact", &["model", "wide", "--numerics", "exact"]),
    ("wide-native", &["model", "wide", "--numerics", "native"]),
    // No other implementation of these numerics is at hand for the demo model: the scalar reference stands for it.
    ("demo-source", &["model", "demo", "--numerics", "source", "--against", "scalar", "--tokens", "64"]),
    ("demo-exact", &["model", "demo", "--numerics", "exact"]),
    ("demo-native", &["model", "demo", "--numerics", "native"]),
    ("release-source", &["release", "--plots", "docs/plots"]),
];

/// Paths that the receipts are about.
const COUNTED: [&str; 4] = ["crates", "kernels", "fixtures", "Cargo.lock"];

/// Runs every gate and writes receipts and table; only the table with `table_only`.
pub fn run(table_only: bool) -> Result<()> {
    if !table_only {
        remake()?;
    }
    let hallmark = build(!table_only)?;
    run_command(
        Command::new(&hallmark).args(["receipt", "table", "--write", "README.md"]).current_dir(root()),
    )?;
    let mut verify = Command::new(&hallmark);
    verify.args(["receipt", "verify"]).args(if table_only { &[][..] } else { &["--require-current"] });
    run_command(verify.args(receipts()?).current_dir(root()))
}

/// Every receipt is sound, and the README's table says of each what is so.
pub fn check() -> Result<()> {
    let hallmark = build(false)?;
    run_command(Command::new(&hallmark).args(["receipt", "verify"]).args(receipts()?).current_dir(root()))?;
    let mut table = Command::new(&hallmark);
    run_command(table.args(["receipt", "table", "--check", "README.md"]).current_dir(root())).context(
        "the README claims of a receipt what is not so: `cargo xtask receipts --table` writes it anew",
    )
}

fn remake() -> Result<()> {
    let mut status = Command::new("git");
    status.args(["status", "--porcelain", "--"]).args(COUNTED).current_dir(root());
    let changes = String::from_utf8(output(&mut status)?)?;
    if !changes.trim().is_empty() {
        bail!("commit first, receipts are about committed contents; these differ:\n{}", changes.trim_end());
    }
    crate::oracle::require_demo()?;
    let hallmark = build(true)?;
    let family = format!("cpu-{}", std::env::consts::ARCH);
    let (start, mut failed) = (Instant::now(), Vec::new());
    for (name, args) in RUNS {
        let (what, numerics) = name.split_once('-').context("a receipt is named WHAT-NUMERICS")?;
        let file = format!("receipts/{what}-{family}-{numerics}.json");
        let mut command = Command::new(&hallmark);
        command.arg("qualify").args(args).args(["--receipt", &file]).current_dir(root());
        println!("$ {}", shown(&command));
        let begin = Instant::now();
        let code = command.stdout(std::process::Stdio::null()).status()?.code();
        println!("{file}: {:.1} s", begin.elapsed().as_secs_f64());
        match code {
            Some(0) => {}
            Some(1) => failed.push(file), // a receipt that says FAIL is kept
            _ => bail!("`{}` ended with {code:?}", shown(&command)),
        }
    }
    println!("{} receipts in {:.0} s", RUNS.len(), start.elapsed().as_secs_f64());
    if !failed.is_empty() {
        println!("FAIL in {}", failed.join(", "));
    }
    Ok(())
}

fn build(release: bool) -> Result<PathBuf> {
    let mut command = cargo(&["build", "--bin", "hallmark"])?;
    run_command(if release { command.arg("--release") } else { &mut command })?;
    let profile = if release { "release" } else { "debug" };
    Ok(target_dir()?.join(profile).join(format!("hallmark{}", std::env::consts::EXE_SUFFIX)))
}

/// Committed receipts, relative to the root.
fn receipts() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(root().join("receipts")).context("cannot read receipts/")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".json") {
            names.push(format!("receipts/{name}"));
        }
    }
    if names.is_empty() {
        bail!("receipts/ is empty: `cargo xtask receipts` makes them");
    }
    names.sort();
    Ok(names)
}
