//! Where things are, and how child processes run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

/// The repository's root folder.
pub fn root() -> PathBuf {
    // Cargo sets the variable for `cargo run`; the compiled-in value serves a binary that is started by hand.
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    manifest.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// `$HOME/.cache/hallmark`: what commands and tests may keep outside the clone.
pub fn cache() -> Result<PathBuf> {
    let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
    let home = home.context("HOME is not set: set it to a folder that may hold .cache/hallmark")?;
    Ok(PathBuf::from(home).join(".cache/hallmark"))
}

/// The target directory of child cargo processes: the caller's own, else one in the cache folder.
pub fn target_dir() -> Result<PathBuf> {
    match std::env::var_os("CARGO_TARGET_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => Ok(root().join(dir)),
        None => Ok(cache()?.join("target")),
    }
}

/// A cargo process in the repository's root, without what `cargo run` set for this one.
pub fn cargo(args: &[&str]) -> Result<Command> {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name); // build scripts of dependencies would run again for them
        }
    }
    command.args(args).current_dir(root()).env("CARGO_TARGET_DIR", target_dir()?);
    Ok(command)
}

/// The command as a person would type it.
pub fn shown(command: &Command) -> String {
    let mut text =
        Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    text
}

/// Prints the command, runs it with the terminal's output, and fails unless it succeeds.
pub fn run(command: &mut Command) -> Result<()> {
    println!("$ {}", shown(command));
    let status = command.status().with_context(|| format!("cannot start `{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", shown(command));
    }
    Ok(())
}

/// Runs the command and returns its standard output; its standard error goes to the terminal.
pub fn output(command: &mut Command) -> Result<Vec<u8>> {
    command.stderr(Stdio::inherit());
    let out = command.output().with_context(|| format!("cannot start `{}`", shown(command)))?;
    if !out.status.success() {
        bail!("`{}` failed ({})", shown(command), out.status);
    }
    Ok(out.stdout)
}

/// The file's content, or an error that names the file.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes the file and the folders above it, or gives an error that names the file.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// SHA-256 as 64 hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The files that git tracks, relative to the root, with `/` between folders.
pub fn tracked() -> Result<Vec<String>> {
    let out = output(Command::new("git").args(["ls-files", "-z"]).current_dir(root()))?;
    let text = String::from_utf8(out).context("git ls-files gave a name that is not UTF-8")?;
    Ok(text.split('\0').filter(|name| !name.is_empty()).map(str::to_owned).collect())
}
