//! `cargo xtask oracle`: reference traces that other implementations make of models of this repository.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use serde_json::{Value, json};

use crate::peer;
use crate::process::{cache, cargo, output, read, root, run as run_command, sha256, target_dir, write};

/// Hashes of the traces, by file name.
const LIST: &str = "crates/qualify/oracles.json";
/// The trace of the demo model.
const DEMO: &str = "demo-float32.safetensors";
/// Lines of `models/demo/expected.jsonl` that are read: small talk, arithmetic with reasoning, a tale, a far memory.
const LINES: [&str; 4] = ["0", "17", "31", "41"];

/// Which trace.
#[derive(Subcommand)]
pub enum Oracle {
    /// The demo model by nemo_automodel on torch, CPU, float32; its hash must be a committed one
    Demo {
        /// Add the hash of what comes out, with this processor's vectors, to the committed ones
        #[arg(long)]
        write: bool,
    },
    /// The model nano by DeepSeek's released inference code, through tools/trace_official.py
    Official {
        /// Folder with the released model.py and what it imports; without it a stand-in of the same names, which tests
        /// the tool alone
        #[arg(long)]
        code: Option<PathBuf>,
    },
}

/// Makes the trace.
pub fn run(oracle: &Oracle) -> Result<()> {
    match oracle {
        Oracle::Demo { write } => demo(*write),
        Oracle::Official { code } => official(code.clone()),
    }
}

/// Where `hallmark qualify` looks for traces.
fn folder() -> Result<PathBuf> {
    match std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()) {
        Some(dir) => Ok(PathBuf::from(dir).join("hallmark/traces")),
        None => Ok(cache()?.join("traces")),
    }
}

/// Fails where the trace of the demo model is not in the cache.
pub fn require_demo() -> Result<()> {
    let path = folder()?.join(DEMO);
    if !path.is_file() {
        bail!("{} is not there: `cargo xtask oracle demo` makes it", path.display());
    }
    Ok(())
}

fn demo(write_hash: bool) -> Result<()> {
    let python = peer::python()?;
    let out = folder()?.join(DEMO);
    let mut command = Command::new(python);
    command.arg(root().join("xtask/peer/oracle.py"));
    for path in ["models/demo", "models/demo/expected.jsonl"] {
        command.arg(root().join(path));
    }
    run_command(command.arg(&out).arg("--lines").args(LINES))?;
    let got = sha256(&read(&out)?);
    let list = root().join(LIST);
    let mut known: Value = serde_json::from_slice(&read(&list)?).context(LIST)?;
    let all = known.as_array_mut().with_context(|| format!("{LIST} is no list"))?;
    if !all.iter().any(|o| o["file"] == DEMO && o["sha256"] == got.as_str()) {
        if !write_hash {
            bail!(
                "{DEMO} has SHA-256 {got}, which {LIST} does not hold: torch on this processor rounds elsewhere; \
                 `--write` adds it"
            );
        }
        all.push(json!({ "file": DEMO, "sha256": got, "processor": processor() }));
        return write(&list, (serde_json::to_string_pretty(&known)? + "\n").as_bytes());
    }
    println!("{}: as committed", out.display());
    Ok(())
}

/// Family and widest vectors of this processor, which decide how torch rounds.
fn processor() -> String {
    #[cfg(target_arch = "x86_64")]
    let vectors = if is_x86_feature_detected!("avx512f") {
        " with AVX-512"
    } else if is_x86_feature_detected!("avx2") {
        " with AVX2"
    } else {
        ""
    };
    #[cfg(not(target_arch = "x86_64"))]
    let vectors = "";
    format!("{}{vectors}", std::env::consts::ARCH)
}

fn official(code: Option<PathBuf>) -> Result<()> {
    let python = peer::python()?;
    run_command(&mut cargo(&["build", "--release", "--bin", "hallmark"])?)?;
    let hallmark = target_dir()?.join("release").join(format!("hallmark{}", std::env::consts::EXE_SUFFIX));
    // Any command on nano generates its weights in the cache.
    let scratch = target_dir()?.join("trace-official");
    let own = scratch.join("hallmark.safetensors");
    std::fs::create_dir_all(&scratch)?;
    let ids = "0,17,5,60,33,9,12,40,7";
    let mut command = Command::new(&hallmark);
    command.args(["trace", "nano", "--prompt-ids", ids, "--out"]).arg(&own).current_dir(root());
    run_command(&mut command)?;
    let model = std::fs::read_dir(cache()?.join("models"))?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("nano-")))
        .context("the generated model nano is not in the cache")?;
    let standin = code.is_none();
    let code = code.unwrap_or_else(|| root().join("xtask/peer/standin"));
    let trace = |name: &str, more: &[&str]| -> Result<PathBuf> {
        let out = scratch.join(name);
        let mut command = Command::new(&python);
        command
            .arg(root().join("tools/trace_official.py"))
            .arg("--code")
            .arg(&code)
            .arg("--model")
            .arg(&model);
        run_command(command.arg("--out").arg(&out).args(["--ids", ids, "--decode", "4"]).args(more))?;
        Ok(out)
    };
    let plain = trace("plain.safetensors", &[])?;
    let moved = trace("moved.safetensors", &["--nudge", "0,7"])?;
    let candidate = if standin { &plain } else { &own };
    let mut judge = Command::new(&hallmark);
    judge.arg("judge").arg("--reference").arg(&plain).arg("--candidate").arg(candidate);
    let text = String::from_utf8(output(judge.arg("--noise").arg(&moved).current_dir(root()))?)?;
    println!("{text}");
    if !text.contains("verdict: PASS") {
        bail!("the traces of tools/trace_official.py do not judge to PASS");
    }
    Ok(())
}
