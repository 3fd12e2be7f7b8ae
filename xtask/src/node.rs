//! Node packages in the cache folder.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{cache, output, root, run, write};
use crate::tools;

/// Oldest Node that the packages run on.
const OLDEST: u32 = 20;

/// A folder with exactly these packages, made when it is missing or differs; none of them may need others.
pub fn packages(name: &str, wanted: &[&str]) -> Result<PathBuf> {
    tools::debian("node", &["nodejs", "npm"])?;
    let version = String::from_utf8_lossy(&output(Command::new("node").arg("--version"))?).trim().to_owned();
    let major = version.trim_start_matches('v').split('.').next().and_then(|n| n.parse::<u32>().ok());
    if major.is_none_or(|n| n < OLDEST) {
        bail!("node is {version}; {OLDEST} or later is needed");
    }
    let folder = cache()?.join("node").join(name);
    let stamp = folder.join("packages.txt");
    let list = wanted.iter().map(|line| format!("{line}\n")).collect::<String>();
    if std::fs::read_to_string(&stamp).is_ok_and(|text| text == list) {
        return Ok(folder);
    }
    println!("making the Node folder {}", folder.display());
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| format!("cannot clear {}", folder.display()))?;
    }
    // A manifest of its own, so that npm looks for none in the folders above.
    write(&folder.join("package.json"), b"{\"private\": true}\n")?;
    let options =
        ["install", "--no-audit", "--no-fund", "--ignore-scripts", "--no-save", "--no-package-lock"];
    tools::debian("npm", &["npm"])?;
    run(Command::new("npm").args(options).args(wanted).current_dir(&folder))?;
    write(&stamp, list.as_bytes())?;
    Ok(folder)
}

/// A process that runs a script of the repository with the packages of `folder`: modules are looked for beside the script,
/// so it is copied there.
pub fn script(folder: &std::path::Path, script: &str) -> Result<Command> {
    let source = root().join(script);
    let name = source.file_name().with_context(|| format!("{script} names no file"))?;
    let copy = folder.join(name);
    std::fs::copy(&source, &copy).with_context(|| format!("cannot copy {script} to {}", copy.display()))?;
    let mut command = Command::new("node");
    command.current_dir(folder).arg("--test-reporter=spec").arg(copy);
    Ok(command)
}
