//! The macOS half of the code, checked on Linux: Debian builds a Rust whose standard library can be compiled for any
//! target, and objc2's crates need no SDK to be checked.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};

use crate::process::{cache, root, run};
use crate::tools;

const TARGET: &str = "aarch64-apple-darwin";
/// Compiler, cargo, the standard library's source of the same version, and clippy.
const PACKAGES: [&str; 4] = ["rustc-web", "cargo-web", "rust-web-src", "rust-web-clippy"];
/// The workspace's Rust version is 1.95.
const MINOR: u32 = 95;

/// Clippy of the GPU crate for macOS, which type-checks all that it uses. The crate has no C code.
pub fn check() -> Result<()> {
    if !cfg!(target_os = "linux") {
        println!("the cross check is for Linux; on macOS, cargo itself is the check");
        return Ok(());
    }
    toolchain()?;
    let mut cargo = Command::new("/usr/bin/cargo");
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO") || text.starts_with("RUST") {
            cargo.env_remove(&name); // rustup's choice of a toolchain must not reach Debian's
        }
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = [PathBuf::from("/usr/bin")].into_iter().chain(std::env::split_paths(&path));
    cargo
        .args(["clippy", "-Zbuild-std", "--locked", "--target", TARGET, "-p", "gpu", "--no-deps"])
        .args(["--", "-D", "warnings"])
        .current_dir(root())
        .env("PATH", std::env::join_paths(folders)?)
        .env("RUSTC_BOOTSTRAP", "1") // -Zbuild-std
        .env("CARGO_TARGET_DIR", cache()?.join("apple/target"));
    run(&mut cargo)
}

/// Installs Debian's toolchain where it is missing or older than the workspace asks for.
fn toolchain() -> Result<()> {
    let version = || -> Option<String> {
        let clippy = Command::new("/usr/bin/cargo-clippy").arg("--version").output().ok()?;
        let rustc = Command::new("/usr/bin/rustc").arg("-V").output().ok()?;
        (clippy.status.success() && rustc.status.success())
            .then(|| String::from_utf8_lossy(&rustc.stdout).trim().to_owned())
    };
    if !version().is_some_and(|text| new_enough(&text)) {
        tools::install_newest(&PACKAGES)?;
    }
    match version() {
        Some(text) if new_enough(&text) => println!("{text}"),
        other => bail!("Debian's rustc-web must be 1.{MINOR} or later; found {other:?}"),
    }
    Ok(())
}

/// Of what `rustc -V` prints.
fn new_enough(text: &str) -> bool {
    let minor = text.split(['.', ' ']).nth(2).and_then(|minor| minor.parse::<u32>().ok());
    minor.is_some_and(|minor| minor >= MINOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_rustc() {
        assert!(new_enough("rustc 1.96.0 (ac68faa20 2026-01-01) (built from a source tarball)"));
        assert!(new_enough("rustc 1.95.0"));
        assert!(!new_enough("rustc 1.85.0 (4d91de4e4 2025-02-17)") && !new_enough("rustc"));
    }
}
