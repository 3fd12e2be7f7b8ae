//! `hallmark inspect`.

use checkpoint::{Checkpoint, Config, Summary};

use crate::{args::Inspect, demo, failure::Failure, render};

pub fn run(args: &Inspect) -> Result<(), Failure> {
    let summary = match (&args.config, &args.model) {
        (Some(file), _) => Summary::from_config(&Config::load_file(file)?, &file.display().to_string()),
        (None, Some(dir)) => report(&Checkpoint::open_with(dir, args.engram_from.as_deref())?, args.verify)?,
        (None, None) => report(&demo::open()?, args.verify)?,
    };
    if args.json { render::document(&summary) } else { render::line(summary.to_string().trim_end()) }
}

fn report(ckpt: &Checkpoint, verify: bool) -> Result<Summary, Failure> {
    if verify {
        ckpt.verify()?;
        eprintln!("every byte was read and is valid");
    }
    Ok(ckpt.summary())
}
