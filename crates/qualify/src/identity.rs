//! Which checkpoint: a quick fingerprint for serving, full hashes for receipts.

use std::path::Path;

use checkpoint::{Checkpoint, Group};
use sha2::{Digest, Sha256};

use crate::{
    Error, Result,
    digest::hex,
    receipt::{CheckpointId, EngramId, FileHash},
    sha256_file,
};

/// Bytes of each sample.
const SAMPLE: usize = 4096;
/// Samples of a tensor: at its first, middle and last bytes.
const SAMPLES: usize = 3;

/// SHA-256 over `config.json`, `tokenizer.json` and every tensor's name, type, shape and samples of its bytes (first,
/// middle and last 4 KiB). It names a checkpoint in seconds at any size, where hashing 500 GB takes minutes; a receipt's
/// file hashes say more. Where the files put the tensors does not matter, so that an aligned copy keeps its name.
///
/// # Errors
/// A file that can't be read.
pub fn fingerprint(checkpoint: &Checkpoint) -> Result<String> {
    let mut hash = Sha256::new();
    for name in ["config.json", "tokenizer.json"] {
        let bytes = checkpoint.file(name)?;
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(&*bytes);
    }
    sample(&mut hash, checkpoint, |_| true)?;
    Ok(hex(&hash.finalize()))
}

/// Adds name, type, shape and samples of the tensors that `wanted` takes.
fn sample(hash: &mut Sha256, checkpoint: &Checkpoint, wanted: impl Fn(Group) -> bool) -> Result<()> {
    for t in checkpoint.tensors().into_iter().filter(|t| wanted(t.group)) {
        hash.update(t.name.as_bytes());
        hash.update([0]);
        hash.update(format!("{} {:?}", t.dtype.name(), t.shape));
        let bytes = checkpoint.tensor(t.name)?;
        let last = bytes.len().saturating_sub(SAMPLE);
        for i in 0..SAMPLES {
            let at = last * i / (SAMPLES - 1);
            hash.update(&bytes[at..(at + SAMPLE).min(bytes.len())]);
        }
    }
    Ok(())
}

/// Identity of the Engram tables where a second folder holds them; `full` hashes the files.
fn engram(checkpoint: &Checkpoint, full: bool) -> Result<Option<EngramId>> {
    let Some(folder) = checkpoint.engram_location() else { return Ok(None) };
    let mut hash = Sha256::new();
    sample(&mut hash, checkpoint, |g| g == Group::EngramTable)?;
    let mut files = Vec::new();
    for file in checkpoint.files().into_iter().filter(|f| f.engram && full) {
        let path = file.path.unwrap_or_default();
        files.push(hashed(&path, file.name.to_owned())?);
    }
    let revision = revision(Path::new(&folder)).unwrap_or_default();
    Ok(Some(EngramId { fingerprint: hex(&hash.finalize()), revision, files }))
}

fn hashed(path: &Path, name: String) -> Result<FileHash> {
    let bytes = std::fs::metadata(path).map_err(Error::io(path))?.len();
    Ok(FileHash { name, bytes, sha256: sha256_file(path)? })
}

/// `exl3` where a tensor of that format is present, `fp8+fp4` for the released form.
pub fn format(checkpoint: &Checkpoint) -> String {
    let exl3 = checkpoint.tensors().iter().any(|t| t.name.ends_with(".trellis"));
    if exl3 { "exl3".into() } else { "fp8+fp4".into() }
}

/// Identity of the checkpoint in `folder` under a short `name`; `full` hashes every file. `prefix` is the folder inside
/// the repository, where it is committed there.
///
/// # Errors
/// A file that can't be read.
pub fn identify(
    checkpoint: &Checkpoint,
    name: &str,
    folder: Option<&Path>,
    prefix: Option<&str>,
    full: bool,
) -> Result<CheckpointId> {
    let mut files = Vec::new();
    if let Some(folder) = folder.filter(|_| full) {
        let own = checkpoint.files().into_iter().filter(|f| !f.engram);
        let mut names: Vec<String> = own.map(|f| f.name.to_owned()).collect();
        names.sort();
        names.extend(["config.json".into(), "tokenizer.json".into()]);
        for file in names {
            let name = prefix.map_or(file.clone(), |p| format!("{p}/{file}"));
            files.push(hashed(&folder.join(&file), name)?);
        }
    }
    Ok(CheckpointId {
        name: name.to_owned(),
        fingerprint: fingerprint(checkpoint)?,
        revision: folder.and_then(revision).unwrap_or_default(),
        format: format(checkpoint),
        files,
        engram: engram(checkpoint, full)?,
    })
}

/// The revision of a folder inside a Hugging Face cache: `snapshots/REVISION`.
fn revision(folder: &Path) -> Option<String> {
    let folder = std::fs::canonicalize(folder).unwrap_or_else(|_| folder.to_path_buf());
    let name = folder.file_name()?.to_str()?;
    let cached = folder.parent()?.file_name()? == "snapshots";
    (cached && name.len() == 40 && name.bytes().all(|b| b.is_ascii_hexdigit())).then(|| name.to_owned())
}
