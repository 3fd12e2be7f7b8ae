//! Which ranges of a file in work are there: one line each, with the hash of its bytes.
//!
//! A range counts after a restart only if the bytes on disk still have that hash, so neither a kill nor a power failure
//! can make it lie, and no write has to wait for the disk.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Mutex,
};

use sha2::{Digest, Sha256};

use crate::{Error, RemoteFile, Result, hash::hex};

/// A file in work and its journal.
pub(crate) struct Journal {
    pub part: PathBuf,
    pub ranges: PathBuf,
    pub file: File,
    log: Mutex<File>,
    /// Ranges that were there at the start: disjoint, in order.
    pub have: Vec<(u64, u64)>,
}

impl Journal {
    /// The two files of a file in work.
    pub(crate) fn paths(own: &Path, name: &str) -> (PathBuf, PathBuf) {
        let base = own.join("parts");
        (base.join(format!("{name}.part")), base.join(format!("{name}.ranges")))
    }

    /// Opens what an earlier pull left of `want`, or begins anew.
    pub(crate) fn open(own: &Path, want: &RemoteFile) -> Result<Self> {
        let (part, ranges) = Self::paths(own, &want.name);
        if let Some(dir) = part.parent() {
            fs::create_dir_all(dir).map_err(Error::io(dir))?;
        }
        let open = |path: &Path| {
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
            file.map_err(Error::io(path))
        };
        let title = format!("hallmark-ranges {} {}\n", want.size, want.hash.hex());
        let text = fs::read(&ranges).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let file = open(&part)?;
        let length = file.metadata().map_err(Error::io(&part))?.len();
        let same = text.starts_with(&title) && length <= want.size;
        let mut have = Vec::new();
        let mut lines = Vec::new();
        if same {
            // Without its line end a line was cut by a kill.
            for line in text[title.len()..].split_inclusive('\n').filter(|l| l.ends_with('\n')) {
                let Some((start, end, hash)) = range(line) else { continue };
                let fits = start < end && end <= want.size;
                let fresh = !have.iter().any(|(s, e)| start < *e && *s < end);
                if fits
                    && fresh
                    && end <= length
                    && hash_of(&file, start, end).map_err(Error::io(&part))? == hash
                {
                    have.push((start, end));
                    lines.push(line.to_owned());
                }
            }
        } else {
            file.set_len(0).map_err(Error::io(&part))?;
        }
        have.sort_unstable();
        let text = format!("{title}{}", lines.concat());
        checkpoint::write::replace(&ranges, |out| out.write_all(text.as_bytes()))?;
        let log = OpenOptions::new().append(true).open(&ranges).map_err(Error::io(&ranges))?;
        Ok(Self { part, ranges, file, log: Mutex::new(log), have })
    }

    /// Notes that `start..end` is written and has this hash.
    pub(crate) fn add(&self, start: u64, end: u64, hash: &str) -> Result<()> {
        let line = format!("{start} {end} {hash}\n");
        let mut log = self.log.lock().unwrap_or_else(|e| e.into_inner());
        log.write_all(line.as_bytes()).map_err(Error::io(&self.ranges))
    }

    /// What is missing, in pieces of at most `most` bytes that end at multiples of it.
    pub(crate) fn missing(&self, size: u64, most: u64) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        let mut at = 0;
        for (start, end) in self.have.iter().copied().chain([(size, size)]) {
            while at < start {
                let next = ((at / most + 1) * most).min(start);
                out.push((at, next));
                at = next;
            }
            at = end;
        }
        out
    }
}

fn range(line: &str) -> Option<(u64, u64, &str)> {
    let mut words = line.trim_end().split(' ');
    let (start, end, hash) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?, words.next()?);
    (words.next().is_none() && hash.len() == 64).then_some((start, end, hash))
}

fn hash_of(file: &File, start: u64, end: u64) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; (end - start).min(1 << 20) as usize];
    let mut at = start;
    while at < end {
        let n = (end - at).min(buffer.len() as u64) as usize;
        file.read_exact_at(&mut buffer[..n], at)?;
        hasher.update(&buffer[..n]);
        at += n as u64;
    }
    Ok(hex(&hasher.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Hash;

    fn want() -> RemoteFile {
        RemoteFile { name: "sub/a".into(), size: 100, hash: Hash::Sha256("ab".repeat(32)) }
    }

    fn sha(bytes: &[u8]) -> String {
        hex(&Sha256::digest(bytes))
    }

    #[test]
    fn what_was_noted_is_there_after_a_restart_and_what_was_torn_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path(), &want()).unwrap();
        assert_eq!(journal.missing(100, 40), [(0, 40), (40, 80), (80, 100)]);
        for (start, end) in [(0, 40), (50, 60), (80, 100)] {
            let bytes = vec![start as u8; end - start];
            journal.file.write_all_at(&bytes, start as u64).unwrap();
            journal.add(start as u64, end as u64, &sha(&bytes)).unwrap();
        }
        // Bytes that never reached the disk, a line cut short, lines of no meaning.
        journal.file.write_all_at(&[1], 85).unwrap();
        let mut log = OpenOptions::new().append(true).open(&journal.ranges).unwrap();
        write!(log, "x y z\n60 200 {0}\n70 60 {0}\n60 80 {0}", sha(&[0; 20])).unwrap();
        let again = Journal::open(dir.path(), &want()).unwrap();
        assert_eq!(again.have, [(0, 40), (50, 60)]);
        assert_eq!(again.missing(100, 40), [(40, 50), (60, 80), (80, 100)]);
    }

    #[test]
    fn the_journal_of_another_file_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path(), &want()).unwrap();
        journal.file.write_all_at(&[0; 40], 0).unwrap();
        journal.add(0, 40, &sha(&[0; 40])).unwrap();
        assert_eq!(Journal::open(dir.path(), &want()).unwrap().have, [(0, 40)]);
        let other = RemoteFile { hash: Hash::Sha256("cd".repeat(32)), ..want() };
        assert_eq!(Journal::open(dir.path(), &other).unwrap().have, []);
    }
}
