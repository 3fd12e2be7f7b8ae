//! `hallmark engram`.

use std::path::PathBuf;

use checkpoint::{Checkpoint, engram};
use clap::Subcommand;
use engine::plan::gb;
use indicatif::ProgressBar;

use crate::{failure::Failure, render};

#[derive(Subcommand)]
pub enum EngramCommand {
    /// Write row files of a model's Engram tables: codes and scales of a row side by side, so that a row is one read
    Pack {
        /// Model folder with the tables
        #[arg(value_name = "SRC")]
        source: PathBuf,
        /// Folder for the row files; they take as much space as the tables
        #[arg(value_name = "DST")]
        destination: PathBuf,
    },
    /// Read row files whole and compare their hashes
    Verify {
        /// Folder with the row files
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

pub fn run(command: &EngramCommand) -> Result<(), Failure> {
    let bar = ProgressBar::new(0);
    match command {
        EngramCommand::Pack { source, destination } => {
            let ckpt = Checkpoint::open_headers(source)?;
            let packed = engram::pack(&ckpt, destination, &|done, total| {
                bar.set_length(total);
                bar.set_position(done);
            })?;
            bar.finish_and_clear();
            for layer in packed {
                let bytes = layer.rows * layer.width as u64;
                let (file, rows) = (destination.join(&layer.file), layer.rows);
                render::line(&format!(
                    "{}: layer {}, {rows} rows, {:.3} GB, SHA-256 {}",
                    file.display(),
                    layer.layer,
                    gb(bytes),
                    layer.sha256
                ))?;
            }
            Ok(())
        }
        EngramCommand::Verify { folder } => {
            engram::verify_pack(folder, &mut |done| bar.set_position(done))?;
            bar.finish_and_clear();
            render::line(&format!("{}: every hash is right", folder.display()))
        }
    }
}
