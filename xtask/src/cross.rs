//! The macOS half of the code, checked on Linux: Debian builds a Rust whose standard library can be compiled for any
//! target, and objc2's crates need no SDK to be checked.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{cache, output, root, run, write};
use crate::{python, tools};

const TARGET: &str = "aarch64-apple-darwin";
/// Compiler, cargo, the standard library's source of the same version, and clippy.
const PACKAGES: [&str; 4] = ["rustc-web", "cargo-web", "rust-web-src", "rust-web-clippy"];
/// The workspace's Rust version is 1.95.
const MINOR: u32 = 95;
/// A C compiler for macOS with its headers and libSystem, for crates with C code.
const ZIG: &str = "ziglang==0.17.1";
/// The oldest system that the program runs on.
const SYSTEM: &str = "15.0";

/// `cargo check` and clippy of the workspace for macOS; `link` also links the tests of `gpu`.
pub fn run_cross(link: bool) -> Result<()> {
    if !cfg!(target_os = "linux") {
        println!("the cross check is for Linux; on macOS, cargo itself is the check");
        return Ok(());
    }
    toolchain()?;
    let cross = Cross::new()?;
    run(cross.cargo("clippy").args(["--workspace", "--exclude", "xtask", "--", "-D", "warnings"]))?;
    if link {
        link_tests(&cross)?;
    }
    Ok(())
}

/// Installs Debian's toolchain where it is missing or older than the workspace asks for.
fn toolchain() -> Result<()> {
    let version = || -> Option<String> {
        let shown = Command::new("/usr/bin/cargo-clippy").arg("--version").output().ok()?;
        let rustc = Command::new("/usr/bin/rustc").arg("-V").output().ok()?;
        (shown.status.success() && rustc.status.success())
            .then(|| String::from_utf8_lossy(&rustc.stdout).trim().to_owned())
    };
    let new_enough = |text: &str| {
        let minor = text.split(['.', ' ']).nth(2).and_then(|minor| minor.parse::<u32>().ok());
        minor.is_some_and(|minor| minor >= MINOR)
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

/// A cargo that compiles for macOS, and the C compiler that it hands to build scripts.
struct Cross {
    folder: PathBuf,
    compiler: PathBuf,
}

impl Cross {
    fn new() -> Result<Self> {
        let folder = cache()?.join("apple");
        let python = python::environment("zig", &[ZIG])?;
        let compiler = folder.join("zigcc");
        // zig names targets in its own way, so what cc and rustc say about target and system is dropped.
        let script = format!(
            "#!/bin/sh\nfor a; do shift; case \"$a\" in --target=*|-mmacosx-version-min=*) continue;; esac; \
             set -- \"$@\" \"$a\"; done\nexec {} -m ziglang cc -target aarch64-macos.{SYSTEM} \"$@\"\n",
            python.display()
        );
        executable(&compiler, &script)?;
        Ok(Self { folder, compiler })
    }

    fn cargo(&self, command: &str) -> Command {
        let mut cargo = Command::new("/usr/bin/cargo");
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("CARGO") || text.starts_with("RUST") {
                cargo.env_remove(&name); // rustup's choice of a toolchain must not reach Debian's
            }
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut folders = vec![PathBuf::from("/usr/bin")];
        folders.extend(std::env::split_paths(&path));
        if let Ok(path) = std::env::join_paths(folders) {
            cargo.env("PATH", path);
        }
        cargo
            .args([command, "-Zbuild-std", "--locked", "--target", TARGET])
            .current_dir(root())
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_TARGET_DIR", self.folder.join("target"))
            .env("CC_aarch64_apple_darwin", &self.compiler)
            .env("AR_aarch64_apple_darwin", "ar")
            .env("SDKROOT", &self.folder)
            .env("MACOSX_DEPLOYMENT_TARGET", SYSTEM);
        cargo
    }
}

fn executable(path: &Path, text: &str) -> Result<()> {
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    write(path, text.as_bytes())?;
    let fault = || format!("cannot make {} executable", path.display());
    run(Command::new("chmod").arg("+x").arg(path)).with_context(fault)
}

/// Text stubs of the frameworks: what the linker must know of a library that only macOS has.
const STUBS: [(&str, &str); 6] = [
    ("usr/lib/libobjc.tbd", "/usr/lib/libobjc.A.dylib"),
    ("usr/lib/libiconv.tbd", "/usr/lib/libiconv.2.dylib"),
    ("Metal.framework/Metal.tbd", "/System/Library/Frameworks/Metal.framework/Versions/A/Metal"),
    (
        "Foundation.framework/Foundation.tbd",
        "/System/Library/Frameworks/Foundation.framework/Versions/C/Foundation",
    ),
    (
        "CoreFoundation.framework/CoreFoundation.tbd",
        "/System/Library/Frameworks/CoreFoundation.framework/Versions/A/CoreFoundation",
    ),
    (
        "CoreGraphics.framework/CoreGraphics.tbd",
        "/System/Library/Frameworks/CoreGraphics.framework/Versions/A/CoreGraphics",
    ),
];

fn link_tests(cross: &Cross) -> Result<()> {
    let sdk = cross.folder.join("sdk");
    for (path, install) in STUBS {
        // Without a list of symbols the linker would look for them elsewhere; it is told to leave them to the system.
        let text = format!(
            "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: '{install}'\nexports: []\n...\n"
        );
        write(&sdk.join(path), text.as_bytes())?;
    }
    let linker = cross.folder.join("ziglink");
    let script = format!(
        "#!/bin/sh\nexec {} -F {} -L {} -Wl,-undefined,dynamic_lookup \"$@\"\n",
        cross.compiler.display(),
        sdk.display(),
        sdk.join("usr/lib").display()
    );
    executable(&linker, &script)?;
    let mut command = cross.cargo("test");
    command.args(["-p", "gpu", "--lib", "--no-run", "--message-format", "json"]);
    let messages = output(command.env("CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER", &linker))?;
    let text = String::from_utf8_lossy(&messages);
    let binary = text
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|m| m["executable"].as_str().map(PathBuf::from))
        .next_back()
        .context("cargo names no test binary")?;
    let start = std::fs::read(&binary).with_context(|| format!("cannot read {}", binary.display()))?;
    // Mach-O of 64 bits, processor type ARM64.
    if !start.starts_with(&[0xcf, 0xfa, 0xed, 0xfe, 0x0c, 0x00, 0x00, 0x01]) {
        bail!("{} is no Mach-O program for ARM64", binary.display());
    }
    println!("Mach-O test binary of {} bytes: {}", start.len(), binary.display());
    Ok(())
}
