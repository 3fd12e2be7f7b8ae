//! The models of this repository by name, with the reference traces that other implementations made of them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use checkpoint::{Checkpoint, generate};
use ops::Mode;
use serde::Deserialize;
use text::Tokenizer;

use crate::{
    Error, Result, identity,
    inputs::checkout,
    receipt::{CheckpointId, FileHash},
    sha256_file,
    trace::Trace,
};

/// Hashes of the traces that `cargo xtask oracle` makes, by file name; torch rounds differently on different processors.
const ORACLES: &str = include_str!("../oracles.json");

#[derive(Deserialize)]
struct Oracle {
    file: String,
    sha256: String,
}

/// A model to qualify.
pub struct Subject {
    /// Short name in receipts and limits.
    pub name: String,
    /// The opened checkpoint.
    pub checkpoint: Checkpoint,
    /// Its folder; `None` for the model inside the program.
    folder: Option<PathBuf>,
    /// Folder inside the repository where its files are committed.
    prefix: Option<&'static str>,
}

/// A reference trace with what a receipt says about it.
pub struct Reference {
    /// The trace.
    pub trace: Trace,
    /// Its file.
    pub file: FileHash,
}

impl Subject {
    /// The model in `folder`, or the test model `nano`, `micro` or `wide` of this checkout.
    ///
    /// # Errors
    /// A folder that is no checkpoint, or a test model outside a checkout.
    pub fn open(folder: &Path) -> Result<Self> {
        Self::open_with(folder, None)
    }

    /// As [`Subject::open`]; a pack without Engram tables takes them from the model in `engram_from`.
    ///
    /// # Errors
    /// A folder that is no checkpoint, or a test model outside a checkout.
    pub fn open_with(folder: &Path, engram_from: Option<&Path>) -> Result<Self> {
        let word = folder.to_string_lossy().into_owned();
        if ["nano", "micro", "wide"].contains(&word.as_str()) && !folder.exists() {
            if checkout().is_none() {
                return Err(Error::Usage(format!(
                    "{word} is a test model of hallmark's repository: run inside a checkout, or name a folder"
                )));
            }
            let folder = generate::cached(&word)?;
            let checkpoint = Checkpoint::open(&folder)?;
            return Ok(Self { name: word, checkpoint, folder: Some(folder), prefix: None });
        }
        let name = folder.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned());
        let demo = checkout().map(|root| root.join("models/demo")).and_then(|d| fs::canonicalize(d).ok());
        let prefix = (demo.is_some() && fs::canonicalize(folder).ok() == demo).then_some("models/demo");
        let checkpoint = Checkpoint::open_with(folder, engram_from)?;
        Ok(Self { name, checkpoint, folder: Some(folder.to_path_buf()), prefix })
    }

    /// The demo model inside the program; its files are hashed where a checkout has them.
    pub fn demo(checkpoint: Checkpoint) -> Self {
        let folder = checkout().map(|root| root.join("models/demo")).filter(|d| d.is_dir());
        let prefix = folder.is_some().then_some("models/demo");
        Self { name: "demo".into(), checkpoint, folder, prefix }
    }

    /// Its identity; `full` hashes every file.
    ///
    /// # Errors
    /// A file that can't be read.
    pub fn identity(&self, full: bool) -> Result<CheckpointId> {
        identity::identify(&self.checkpoint, &self.name, self.folder.as_deref(), self.prefix, full)
    }

    /// The reference that belongs to a model of this repository in `mode`, where it is there.
    ///
    /// # Errors
    /// A reference that can't be read, or a made trace whose hash is not a committed one.
    pub fn reference(&self, mode: Mode) -> Result<Option<Reference>> {
        let exact = mode != Mode::Source;
        let kind = if exact { "float32" } else { "official" };
        let committed = match self.name.as_str() {
            "nano" | "micro" => Some(format!("fixtures/model/{}/golden/{kind}.safetensors", self.name)),
            "wide" if exact => Some("fixtures/model/wide/golden.safetensors".to_owned()),
            _ => None,
        };
        if let (Some(name), Some(root)) = (committed, checkout()) {
            return Ok(Some(reference(&root.join(&name), name)?));
        }
        let oracles: Vec<Oracle> = serde_json::from_str(ORACLES).expect("the list is checked by a test");
        let file = format!("{}-{kind}.safetensors", self.name);
        let known: Vec<&str> = oracles.iter().filter(|o| o.file == file).map(|o| o.sha256.as_str()).collect();
        if known.is_empty() {
            return Ok(None);
        }
        let Some(path) = trace_cache().map(|c| c.join(&file)).filter(|p| p.is_file()) else {
            return Ok(None);
        };
        let found = reference(&path, file)?;
        if !known.contains(&found.file.sha256.as_str()) {
            let what = format!(
                "has SHA-256 {}, not {}; make it again: cargo xtask oracle",
                found.file.sha256,
                known.join(" or ")
            );
            return Err(Error::File { file: path.display().to_string(), what });
        }
        Ok(Some(found))
    }

    /// `count` token ids of a plain text, from the checkpoint's own tokenizer.
    ///
    /// # Errors
    /// A tokenizer that can't be read, or a text that is too short.
    pub fn text(&self, count: usize) -> Result<Vec<u32>> {
        let name = "tokenizer.json";
        let tokenizer = Tokenizer::from_bytes(&self.checkpoint.file(name)?, name)?;
        let mut ids = vec![self.checkpoint.config().bos_token_id];
        let paragraph = tokenizer.encode(TEXT);
        while ids.len() < count {
            ids.extend(&paragraph);
        }
        ids.truncate(count);
        Ok(ids)
    }
}

/// What the live runs read.
const TEXT: &str = "An assay office tests metal before it is sold. A small sample is scraped from the piece, weighed, \
    wrapped in lead and melted in a cupel of bone ash; what remains is weighed again, and the difference says how much \
    of it was gold. Only then is the piece struck with a mark: the maker, the fineness, the office, the year. ";

/// A trace with its hash, named `name` in receipts.
///
/// # Errors
/// A file that can't be read or is no trace.
pub fn reference(path: &Path, name: String) -> Result<Reference> {
    let bytes = fs::metadata(path).map_err(|source| Error::Io { path: path.to_path_buf(), source })?.len();
    Ok(Reference { trace: Trace::open(path)?, file: FileHash { name, bytes, sha256: sha256_file(path)? } })
}

/// Where `cargo xtask oracle` puts its traces: `$XDG_CACHE_HOME/hallmark/traces`, else `~/.cache/hallmark/traces`.
pub fn trace_cache() -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|d| !d.is_empty()).map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    Some(cache.join("hallmark/traces"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_oracles_is_well_formed() {
        let oracles: Vec<Oracle> = serde_json::from_str(ORACLES).unwrap();
        assert!(oracles.iter().all(|o| o.sha256.len() == 64 && o.file.ends_with(".safetensors")));
    }
}
