//! One file a command.

pub mod admission;
mod bench;
pub mod bench_engram;
pub mod bench_load;
pub mod bisect;
pub mod capabilities;
mod chat;
mod compare;
pub mod engram;
mod inspect;
pub mod judge;
pub mod load;
mod plan;
pub mod pull;
pub mod qualify;
mod quantize;
pub mod receipt;
mod release;
mod run;
#[cfg(feature = "server")]
mod serve;
#[cfg(feature = "server")]
mod serve_page;
mod synthetic;
pub mod trace;

use crate::{
    args::{Cli, Command},
    failure::Failure,
    timeline,
};

/// Runs the command that the line names.
///
/// # Errors
/// Why it ended early.
pub fn run(cli: Cli) -> Result<(), Failure> {
    // Written to its end when this is dropped.
    let _timeline = cli.command.timeline().map(timeline::begin).transpose()?;
    match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Chat(args) => chat::run(&args),
        #[cfg(feature = "server")]
        Command::Serve(args) => serve::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Engram(args) => engram::run(&args),
        Command::Pull(args) => pull::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Qualify(args) => qualify::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Judge(args) => judge::run(&args),
        Command::Bisect(args) => bisect::run(&args),
        Command::Receipt(args) => receipt::run(&args),
        Command::Capabilities(args) => capabilities::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Compare(args) => compare::run(&args),
    }
}
