//! `hallmark pull`.

#[cfg(feature = "pull")]
mod fetch;

use std::path::PathBuf;

use clap::Args;
use hub::Part;

use crate::failure::Failure;

/// Download a model: one commit of a repository, every file checked by its hash.
///
/// Files come in ranges, several at a time. A download that was stopped or killed goes on where it was when called again;
/// nothing that has come is fetched twice. HF_TOKEN is sent to the server named by HF_ENDPOINT (default
/// https://huggingface.co) and to no other.
#[derive(Args)]
#[cfg_attr(not(feature = "pull"), allow(dead_code))]
pub struct Pull {
    /// Repository and revision (a branch, a tag or a commit)
    #[arg(value_name = "OWNER/NAME@REVISION")]
    pub repository: String,
    /// Folder for the files
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Only the shards that hold tensors of these parts: text, engram, dspark, vision (default: all)
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    pub only: Vec<Part>,
    /// Requests at a time
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub connections: u8,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Pulls what `args` say.
#[cfg(feature = "pull")]
pub fn run(args: &Pull) -> Result<(), Failure> {
    fetch::run(args)
}

/// Refuses: there is nothing in this build that asks a server.
#[cfg(not(feature = "pull"))]
pub fn run(args: &Pull) -> Result<(), Failure> {
    Err(refusal(&args.repository))
}

/// Makes in `dir` a folder of the repository's configuration and headers alone.
#[cfg(feature = "pull")]
pub fn headers(repository: &str, dir: &std::path::Path) -> Result<(), Failure> {
    let (client, repo) = fetch::resolve(repository, 1)?;
    hub::headers(&client, &repo, dir, &|text| eprintln!("{text}")).map_err(Failure::Hub)
}

/// As [`run`].
#[cfg(not(feature = "pull"))]
pub fn headers(repository: &str, _: &std::path::Path) -> Result<(), Failure> {
    Err(refusal(repository))
}

#[cfg(not(feature = "pull"))]
fn refusal(repository: &str) -> Failure {
    let what = format!("{repository}: this build has no downloads: build with --features pull");
    Failure::Engine(engine::Error::Refused(what))
}
