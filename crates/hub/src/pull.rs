//! A revision into a folder.

use std::{
    fs::{self, File},
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use serde::Serialize;

use crate::{
    Client, Error, OWN_FOLDER, Part, Record, RemoteFile, Repository, Result, Verified,
    fetch::{self, Item},
    journal::Journal,
    record,
};

/// Names where tensors are; its weight map decides which shards a part needs.
const INDEX: &str = "model.safetensors.index.json";

/// Hears how a pull gets on; called from several threads.
pub trait Progress: Sync {
    /// The files that are pulled: name, bytes in all, bytes that are there.
    fn begin(&self, files: &[(String, u64, u64)]);
    /// File number `file` now has `bytes`.
    fn have(&self, file: usize, bytes: u64);
    /// File number `file` is whole and has the right hash.
    fn verified(&self, file: usize);
    /// Something that a person may want to know.
    fn note(&self, text: &str);
}

/// Hears nothing.
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _: &[(String, u64, u64)]) {}
    fn have(&self, _: usize, _: u64) {}
    fn verified(&self, _: usize) {}
    fn note(&self, _: &str) {}
}

/// What a pull did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// `OWNER/NAME`.
    pub repository: String,
    /// The commit.
    pub commit: String,
    /// Files that are there and verified.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that came over the network.
    pub downloaded: u64,
    /// Bytes that an earlier pull had left.
    pub kept: u64,
    /// Shards that were left out.
    pub left_out: Vec<String>,
}

/// Brings the files of `repo` into `out`, or of its shards those that hold a tensor of `only`. What an earlier call
/// brought is not fetched again.
///
/// # Errors
/// Too little space, found before anything is fetched; a server that does not deliver; bytes that are not the
/// revision's; a file in the way.
pub fn pull(
    client: &Client,
    repo: &Repository,
    out: &Path,
    only: &[Part],
    progress: &dyn Progress,
) -> Result<Report> {
    let own = out.join(OWN_FOLDER);
    fs::create_dir_all(&own).map_err(Error::io(&own))?;
    let lock = File::create(own.join("lock")).map_err(Error::io(&own))?;
    lock.try_lock().map_err(|_| Error::Busy(out.to_path_buf()))?;
    let mut job = Job { client, repo, out, progress, record: Mutex::new(Record::read(out)) };
    let report = Report { repository: repo.name.clone(), commit: repo.commit.clone(), ..Report::default() };
    let report = Mutex::new(report);
    let all: Vec<&RemoteFile> = repo.files.iter().collect();
    if only.is_empty() {
        job.files(&all, &report)?;
    } else {
        let (shards, side): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|f| f.name.ends_with(".safetensors"));
        job.files(&side, &report)?;
        let wanted = job.shards_of(only)?;
        let (shards, left): (Vec<_>, Vec<_>) = shards.into_iter().partition(|f| wanted.contains(&f.name));
        report.lock().unwrap_or_else(|e| e.into_inner()).left_out =
            left.iter().map(|f| f.name.clone()).collect();
        job.files(&shards, &report)?;
    }
    Ok(report.into_inner().unwrap_or_else(|e| e.into_inner()))
}

pub(crate) struct Job<'a> {
    pub client: &'a Client,
    pub repo: &'a Repository,
    pub out: &'a Path,
    pub progress: &'a dyn Progress,
    record: Mutex<Record>,
}

impl Job<'_> {
    /// Brings `files`.
    fn files(&mut self, files: &[&RemoteFile], report: &Mutex<Report>) -> Result<()> {
        let items = self.examine(files)?;
        let begin: Vec<_> = items.iter().map(|i| (i.want.name.clone(), i.want.size, i.present())).collect();
        self.progress.begin(&begin);
        let need: u64 = items.iter().map(|i| i.want.size - i.present()).sum();
        let free = free(self.out)?;
        if need > free {
            return Err(Error::Space { dir: self.out.to_path_buf(), need, free });
        }
        items
            .iter()
            .enumerate()
            .filter(|(_, i)| i.journal.is_none())
            .for_each(|(k, _)| self.progress.verified(k));
        let downloaded = fetch::all(self, &items)?;
        let mut report = report.lock().unwrap_or_else(|e| e.into_inner());
        report.files += items.len();
        report.bytes += items.iter().map(|i| i.want.size).sum::<u64>();
        report.kept += items.iter().map(Item::present).sum::<u64>();
        report.downloaded += downloaded;
        Ok(())
    }

    /// What is there of every file; hashes are computed in parallel.
    fn examine<'f>(&self, files: &[&'f RemoteFile]) -> Result<Vec<Item<'f>>> {
        let next = AtomicUsize::new(0);
        let found = Mutex::new(Vec::new());
        let failed = Mutex::new(None);
        std::thread::scope(|s| {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(files.len()) {
                s.spawn(|| {
                    while let Some(want) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                        match self.examine_one(want) {
                            Ok(item) => found.lock().unwrap_or_else(|e| e.into_inner()).push(item),
                            Err(e) => {
                                failed.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(e);
                                return;
                            }
                        }
                    }
                });
            }
        });
        if let Some(e) = failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
            return Err(e);
        }
        let mut items = found.into_inner().unwrap_or_else(|e| e.into_inner());
        items.sort_by(|a, b| a.want.name.cmp(&b.want.name));
        Ok(items)
    }

    fn examine_one<'f>(&self, want: &'f RemoteFile) -> Result<Item<'f>> {
        let path = self.out.join(&want.name);
        if path.exists() {
            let (known, ours) = {
                let record = self.record.lock().unwrap_or_else(|e| e.into_inner());
                let ours = record.is_unchanged(self.out, &want.name);
                (ours && record.files[&want.name].hash == want.hash, ours)
            };
            let right =
                known || (record::stamp(&path)?.0 == want.size && self.hash(want, &path)? == want.hash.hex());
            if right {
                self.remember(want)?;
                let (part, ranges) = Journal::paths(&self.out.join(OWN_FOLDER), &want.name);
                for rest in [part, ranges] {
                    let _ = fs::remove_file(rest); // what a kill left after the rename; mostly not there
                }
                return Ok(Item::whole(want));
            }
            if !ours {
                return Err(Error::Occupied(path));
            }
        }
        Ok(Item::new(want, Journal::open(&self.out.join(OWN_FOLDER), want)?))
    }

    fn hash(&self, want: &RemoteFile, path: &Path) -> Result<String> {
        let file = File::open(path).map_err(Error::io(path))?;
        want.hash.of(file, want.size).map_err(Error::io(path))
    }

    /// Checks the hash of a finished file and puts it in its place, or aside.
    pub(crate) fn accept(&self, item: &Item) -> Result<()> {
        let Some(journal) = &item.journal else { return Ok(()) };
        let (want, part) = (item.want, &journal.part);
        let got = self.hash(want, part)?;
        if got != want.hash.hex() {
            let bad = self.out.join(OWN_FOLDER).join("bad").join(format!("{}.{}", want.name, &got[..8]));
            if let Some(dir) = bad.parent() {
                fs::create_dir_all(dir).map_err(Error::io(dir))?;
            }
            fs::rename(part, &bad).map_err(Error::io(part))?;
            fs::remove_file(&journal.ranges).map_err(Error::io(&journal.ranges))?;
            return Err(Error::Mismatch {
                file: want.name.clone(),
                kind: want.hash.kind(),
                got,
                want: want.hash.hex().into(),
                kept: bad,
            });
        }
        let path = self.out.join(&want.name);
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(Error::io(dir))?;
        }
        journal.file.sync_all().map_err(Error::io(part))?;
        fs::rename(part, &path).map_err(Error::io(&path))?;
        fs::remove_file(&journal.ranges).map_err(Error::io(&journal.ranges))?;
        self.remember(want)
    }

    /// Writes down that a file is verified.
    fn remember(&self, want: &RemoteFile) -> Result<()> {
        let (size, changed) = record::stamp(&self.out.join(&want.name))?;
        let mut record = self.record.lock().unwrap_or_else(|e| e.into_inner());
        (record.repository, record.commit) = (self.repo.name.clone(), self.repo.commit.clone());
        let verified = Verified { size, hash: want.hash.clone(), changed };
        if record.files.get(&want.name) != Some(&verified) {
            record.files.insert(want.name.clone(), verified);
            record.write(self.out)?;
        }
        Ok(())
    }

    /// The shards that hold a tensor of `only`, by the index that has just come.
    fn shards_of(&self, only: &[Part]) -> Result<Vec<String>> {
        let bad = |what: String| Error::Repository { repository: self.repo.to_string(), what };
        if self.repo.file(INDEX).is_none() {
            let what = "has no shard index, so that its parts cannot be told apart; leave --only out";
            return Err(bad(what.into()));
        }
        let mut files: Vec<String> = Vec::new();
        for (tensor, file) in checkpoint::weight_map(&self.out.join(INDEX))? {
            if only.contains(&Part::of(&tensor)) {
                files.push(file);
            }
        }
        files.sort();
        files.dedup();
        if files.is_empty() {
            let names: Vec<_> = only.iter().map(|p| p.name()).collect();
            return Err(bad(format!("has no tensor of {}", names.join(", "))));
        }
        match files.iter().find(|f| self.repo.file(f).is_none()) {
            Some(file) => Err(bad(format!("its index names {file}, which it does not hold"))),
            None => Ok(files),
        }
    }
}

/// Bytes that this user may still write to the disk of `dir`.
fn free(dir: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(dir).map_err(|e| Error::Io { path: dir.into(), source: e.into() })?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}
