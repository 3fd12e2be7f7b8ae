//! Hashes of a pulled folder once more, a file at a time, to be stopped and taken up again.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use serde::{Deserialize, Serialize};

use crate::{Error, OWN_FOLDER, Record, Result, record::stamp};

/// What a verification did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Files with the right hash, those of earlier calls included.
    pub files: usize,
    /// Files that are still to be checked: more than none where it was stopped.
    pub left: usize,
    /// Bytes that this call read.
    pub bytes: u64,
}

/// Size and time of the last change of the files that are checked.
#[derive(Default, Serialize, Deserialize)]
struct Done(BTreeMap<String, (u64, u128)>);

/// A reader that ends with an error when it is told to.
struct Until<'a> {
    file: File,
    stop: &'a AtomicBool,
    bytes: &'a mut u64,
}

impl Read for Until<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(io::Error::other("stopped"));
        }
        let n = self.file.read(out)?;
        *self.bytes += n as u64;
        Ok(n)
    }
}

/// Compares every file that a pull has verified with its hash again. Files that were compared since they last changed are
/// not read again, so that a call that was stopped or killed is taken up by the next one.
///
/// # Errors
/// A folder without a record of a pull, a file that is absent or has another hash.
pub fn verify(dir: &Path, stop: &AtomicBool) -> Result<Checked> {
    let record = Record::read(dir);
    if record.files.is_empty() {
        let what = "no pull has left a record of its hashes here; pull it, or use inspect --verify".into();
        return Err(Error::Repository { repository: dir.display().to_string(), what });
    }
    let path = dir.join(OWN_FOLDER).join("checked.json");
    let mut done: Done = serde_json::from_slice(&fs::read(&path).unwrap_or_default()).unwrap_or_default();
    let mut checked = Checked::default();
    for (name, want) in &record.files {
        let file = dir.join(name);
        let now = stamp(&file)?;
        if done.0.get(name) == Some(&now) {
            checked.files += 1;
            continue;
        }
        if stop.load(Ordering::Relaxed) {
            checked.left += 1;
            continue;
        }
        let open = File::open(&file).map_err(Error::io(&file))?;
        let got = want.hash.of(Until { file: open, stop, bytes: &mut checked.bytes }, want.size);
        match got {
            Err(_) if stop.load(Ordering::Relaxed) => checked.left += 1,
            Err(e) => return Err(Error::io(&file)(e)),
            Ok(got) if got != want.hash.hex() => {
                let (kind, want) = (want.hash.kind(), want.hash.hex().to_owned());
                return Err(Error::Mismatch { file: name.clone(), kind, got, want, kept: file });
            }
            Ok(_) => {
                checked.files += 1;
                done.0.insert(name.clone(), now);
                let text = serde_json::to_string(&done).expect("a list has string keys only");
                checkpoint::write::replace(&path, |out| out.write_all(text.as_bytes()))?;
            }
        }
    }
    Ok(checked)
}
