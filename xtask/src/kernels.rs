//! docs/kernels.md, the table of kernels.

use anyhow::Result;

use crate::process::{cargo, run as run_command};

/// Compares the table with the code; `write` writes it anew.
pub fn run(write: bool) -> Result<()> {
    let mut command = cargo(&["test", "-p", "model", "--test", "kernels"])?;
    if write {
        command.env("HALLMARK_WRITE", "1");
    }
    run_command(&mut command)
}
