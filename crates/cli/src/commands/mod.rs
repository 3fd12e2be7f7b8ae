//! One file a command.

mod bench;
mod chat;
mod inspect;
mod run;

use crate::{
    args::{Cli, Command},
    failure::Failure,
};

/// Runs the command that the line names.
///
/// # Errors
/// Why it ended early.
pub fn run(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Bench(args) => bench::run(&args),
    }
}
