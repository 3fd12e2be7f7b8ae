//! `hallmark`: DeepSeek-V4.1-Flash on your own machine, with proven numerics.

mod args;
mod commands;
mod demo;
mod failure;
mod interrupt;
mod memory;
mod render;
mod timeline;

use std::process::ExitCode;

use clap::Parser;

use crate::{args::Cli, failure::Failure};

fn main() -> ExitCode {
    memory::keep_freed();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // clap prints help and version through the same path; only a wrong command line is a failure.
            let code = if e.use_stderr() { 2 } else { 0 };
            let _ = e.print();
            return ExitCode::from(code);
        }
    };
    match commands::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::ClosedPipe) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("hallmark: {failure}");
            ExitCode::from(failure.exit_code())
        }
    }
}
