//! What a pull has verified in a folder: `.hallmark/pull.json`.

use std::{collections::BTreeMap, fs, path::Path, time::UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::{Error, Hash, Result};

/// The folder of our own files inside a model folder.
pub const OWN_FOLDER: &str = ".hallmark";

/// A file that had the right hash when it was this size and this old.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// Bytes.
    pub size: u64,
    /// Their hash.
    pub hash: Hash,
    /// Time of its last change, nanoseconds since 1970.
    pub changed: u128,
}

/// Where a folder's files come from, and which of them are verified.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// `OWNER/NAME`.
    pub repository: String,
    /// The commit.
    pub commit: String,
    /// By name.
    pub files: BTreeMap<String, Verified>,
}

impl Record {
    /// The record of a model folder; empty where there is none that can be read.
    pub fn read(dir: &Path) -> Self {
        let text = fs::read(dir.join(OWN_FOLDER).join("pull.json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Writes it, whole or not at all.
    ///
    /// # Errors
    /// A failed write.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let path = dir.join(OWN_FOLDER).join("pull.json");
        let text = serde_json::to_string_pretty(self).expect("a record has string keys only");
        Ok(checkpoint::write::replace(&path, |out| writeln!(out, "{text}"))?)
    }

    /// Whether the file is as it was when its hash was checked.
    pub fn is_unchanged(&self, dir: &Path, name: &str) -> bool {
        let now = stamp(&dir.join(name)).ok();
        self.files.get(name).is_some_and(|v| now == Some((v.size, v.changed)))
    }
}

/// Size and time of the last change.
pub(crate) fn stamp(path: &Path) -> Result<(u64, u128)> {
    let meta = fs::metadata(path).map_err(Error::io(path))?;
    let changed = meta.modified().map_err(Error::io(path))?;
    Ok((meta.len(), changed.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos())))
}
