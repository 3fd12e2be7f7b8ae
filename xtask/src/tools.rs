//! Programs that the build and the tests need besides Rust.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::process::{output, run};

/// Whether `program --version` runs.
fn has(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Installs Debian packages unless `program` is there already.
pub fn debian(program: &str, packages: &[&str]) -> Result<()> {
    if has(program) {
        return Ok(());
    }
    println!("{program} is missing");
    let install = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        run(command.args(["install", "-y", "--no-install-recommends"]).args(packages))
    };
    let list = packages.join(" ");
    install()
        .or_else(|_| run(Command::new("apt-get").arg("update")).and_then(|()| install()))
        .with_context(|| format!("install {program} by hand (Debian: apt-get install {list})"))
}

/// Installs the newest versions of Debian packages.
pub fn install_newest(packages: &[&str]) -> Result<()> {
    run(Command::new("apt-get").arg("update"))?;
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    let list = packages.join(" ");
    run(command.args(["install", "-y", "--no-install-recommends"]).args(packages))
        .with_context(|| format!("install them by hand (Debian: apt-get install {list})"))
}

/// The compiler of the emulator's kernels and its sanitizers.
pub fn clang() -> Result<()> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Ok(());
    }
    debian("clang++-19", &["clang-19", "libclang-rt-19-dev"])?;
    let folder = output(Command::new("clang++-19").arg("-print-resource-dir"))?;
    let folder = PathBuf::from(String::from_utf8_lossy(&folder).trim());
    if !folder.join("include/sanitizer/tsan_interface.h").exists() {
        install_newest(&["libclang-rt-19-dev"])?;
    }
    Ok(())
}
