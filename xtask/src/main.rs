//! Developer commands of hallmark: `cargo xtask NAME`.

mod cross;
mod fixtures;
mod kernels;
mod node;
mod notices;
mod nvrtc;
mod oracle;
mod peer;
mod process;
mod python;
mod receipts;
mod recipe;
mod schemathesis;
mod test;
mod tokenizer;
mod tools;
mod tree;
mod trim;
mod web;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Developer commands of hallmark", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check the tree, fixtures, notices, format and lints, then run every test (what CI runs)
    Test {
        /// Also run what is slow: tests that read HALLMARK_FULL, and the documentation build
        #[arg(long)]
        full: bool,
    },
    /// Check every committed data file against fixtures/SHA256SUMS
    Fixtures {
        /// Write fixtures/SHA256SUMS anew from the files that are there
        #[arg(long)]
        write: bool,
    },
    /// Copy the golden files from SRC to DST, keeping what tests read
    TrimFixtures {
        /// Folder with the whole files (nano/golden/float32.safetensors and so on)
        src: PathBuf,
        /// Folder to write to
        dst: PathBuf,
    },
    /// Compare a checkpoint folder with the digests of a weights.json, tensor by tensor
    Recipe {
        /// The recipe, for example fixtures/model/nano/weights.json
        recipe: PathBuf,
        /// The checkpoint folder
        folder: PathBuf,
    },
    /// Build the released tokenizer.json in the cache folder, unless it is there
    Tokenizer,
    /// Measure another implementation beside hallmark on this machine
    Peer {
        #[command(subcommand)]
        peer: peer::Peer,
    },
    /// Make a reference trace by another implementation (needs its Python environment, 4 GB)
    Oracle {
        #[command(subcommand)]
        oracle: oracle::Oracle,
    },
    /// Run every gate again, for the committed contents: receipts/ and the README's table of them
    Receipts {
        /// Only write the table: which receipts are about the present tree, and which are historical
        #[arg(long)]
        table: bool,
    },
    /// Compile the GPU kernels for CUDA without a GPU, and compare their register counts
    Nvrtc {
        /// Record the register counts anew
        #[arg(long)]
        write: bool,
    },
    /// Try the server as its users meet it: the page in a browser, the examples, OpenAI's and Anthropic's clients
    Web {
        /// Write the pictures of docs/ anew
        #[arg(long)]
        shots: bool,
    },
    /// Compare docs/kernels.md, the table of the GPU kernels, with the code
    Kernels {
        /// Write it anew
        #[arg(long)]
        write: bool,
    },
    /// Check the code for macOS on Linux (installs Debian's cross toolchain and zig)
    Cross {
        /// Link the tests of the Metal device as a program for macOS instead
        #[arg(long)]
        link: bool,
    },
    /// Rewrite the crate table of THIRD_PARTY_NOTICES.md
    Notices {
        /// Change nothing; fail when the table is out of date
        #[arg(long)]
        check: bool,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Test { full } => test::run(full),
        Command::Fixtures { write } => fixtures::run(write),
        Command::TrimFixtures { src, dst } => trim::run(&src, &dst),
        Command::Recipe { recipe, folder } => recipe::run(&recipe, &folder),
        Command::Tokenizer => tokenizer::run(),
        Command::Peer { peer } => peer::run(&peer),
        Command::Oracle { oracle } => oracle::run(&oracle),
        Command::Receipts { table } => receipts::run(table),
        Command::Nvrtc { write } => nvrtc::run_tests(write),
        Command::Web { shots } => web::run_all(shots),
        Command::Kernels { write } => kernels::run(write),
        Command::Cross { link: false } => cross::check(),
        Command::Cross { link: true } => cross::link(),
        Command::Notices { check } => notices::run(check),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
