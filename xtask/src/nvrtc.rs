//! The GPU kernels through NVIDIA's compiler, without a GPU.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::process::{cargo, run};
use crate::python;

/// The compiler whose register counts are recorded.
const NVRTC: &str = "nvidia-cuda-nvrtc==13.0.88";

/// The folder with libnvrtc, installed when it is missing.
fn library() -> Result<PathBuf> {
    let python = python::environment("nvrtc", &[NVRTC])?;
    let lib = python.parent().and_then(|bin| bin.parent()).map(|root| root.join("lib"));
    let versions = lib.iter().filter_map(|lib| std::fs::read_dir(lib).ok()).flatten().flatten();
    let found = versions.map(|entry| entry.path().join("site-packages/nvidia/cu13/lib")).find(|p| p.is_dir());
    match found {
        Some(folder) => Ok(folder),
        None => bail!("{NVRTC} holds no library where it is expected"),
    }
}

/// Compiles every kernel in every variant that the operators ask for, and compares register counts; `write` records them.
pub fn run_tests(write: bool) -> Result<()> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        println!("NVRTC is checked on Linux on x86-64 only");
        return Ok(());
    }
    run(&mut cargo(&[
        "clippy",
        "-p",
        "gpu",
        "--features",
        "cuda",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ])?)?;
    let mut command = cargo(&["test", "-p", "gpu", "--features", "cuda", "--test", "nvrtc"])?;
    if write {
        command.env("HALLMARK_WRITE", "1");
    }
    run(command.env("LD_LIBRARY_PATH", library()?))
}
