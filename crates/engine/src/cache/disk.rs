//! The disk tier: one sealed file an item, written whole and then named, readable by its owner only.

use std::{
    collections::HashMap,
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use super::item::Item;

/// Held by the process that uses the folder.
const LOCK: &str = "lock";
/// Times that a lock is tried again, and the pause between: a second in all.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(50);
/// Beginning of the name of a file that is being written.
const PARTIAL: &str = "partial-";

/// A folder of sealed items.
pub(crate) struct Disk {
    dir: PathBuf,
    /// Locked as long as it is open.
    _lock: File,
    sizes: HashMap<Item, u64>,
    bytes: u64,
    written: u64,
}

impl Disk {
    /// Opens or makes the folder and lists what it holds, least recently used first.
    pub fn open(dir: &Path) -> Result<(Self, Vec<Item>), String> {
        let failed = |what: &str, e: io::Error| format!("--cache-dir {}: {what}: {e}", dir.display());
        make_folder(dir).map_err(|e| failed("cannot be made", e))?;
        let lock = private().write(true).create(true).truncate(false).open(dir.join(LOCK));
        let lock = lock.map_err(|e| failed("cannot be written", e))?;
        // A process that is just ending, or a child that has not yet dropped what it inherited, is waited for.
        let mut tries = 0;
        let locked = loop {
            match lock.try_lock() {
                Err(TryLockError::WouldBlock) if tries < LOCK_TRIES => tries += 1,
                other => break other,
            }
            std::thread::sleep(LOCK_PAUSE);
        };
        match locked {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let what = "is in use by another hallmark; give another folder or stop that one";
                return Err(format!("--cache-dir {} {what}", dir.display()));
            }
            Err(TryLockError::Error(e)) => return Err(failed("cannot be locked", e)),
        }
        let mut found = Vec::new();
        for entry in fs::read_dir(dir).map_err(|e| failed("cannot be read", e))? {
            let entry = entry.map_err(|e| failed("cannot be read", e))?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.starts_with(PARTIAL) && !entry.file_type().is_ok_and(|t| t.is_dir()) {
                // Left by a process that was killed; a folder is nobody's of ours.
                fs::remove_file(entry.path()).map_err(|e| failed("cannot be cleaned", e))?;
                continue;
            }
            let (Some(item), Ok(meta)) = (Item::parse(name), entry.path().symlink_metadata()) else {
                continue;
            };
            if meta.is_file() {
                found.push((meta.modified().unwrap_or(SystemTime::UNIX_EPOCH), item, meta.len()));
            }
        }
        found.sort_unstable();
        let sizes: HashMap<Item, u64> = found.iter().map(|(_, item, len)| (*item, *len)).collect();
        let bytes = sizes.values().sum();
        let disk = Self { dir: dir.to_owned(), _lock: lock, sizes, bytes, written: 0 };
        Ok((disk, found.into_iter().map(|(_, item, _)| item).collect()))
    }

    /// Bytes of all items.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the folder should have the item.
    pub fn has(&self, item: &Item) -> bool {
        self.sizes.contains_key(item)
    }

    /// Writes an item beside and then names it: whoever is killed in between leaves no half item.
    pub fn write(&mut self, item: Item, sealed: &[u8]) -> io::Result<()> {
        self.written += 1;
        let partial = self.dir.join(format!("{PARTIAL}{}-{}", std::process::id(), self.written));
        let done = private()
            .write(true)
            .create_new(true)
            .open(&partial)
            .and_then(|mut file| file.write_all(sealed))
            .and_then(|()| fs::rename(&partial, self.path(&item)));
        if let Err(e) = done {
            let _ = fs::remove_file(&partial);
            return Err(e);
        }
        let before = self.sizes.insert(item, sealed.len() as u64).unwrap_or(0);
        self.bytes = self.bytes - before + sealed.len() as u64;
        Ok(())
    }

    /// The bytes of an item, at most `most` of them.
    pub fn read(&self, item: &Item, most: u64) -> io::Result<Vec<u8>> {
        let file = File::open(self.path(item))?;
        let len = file.metadata()?.len();
        if len > most {
            return Err(io::Error::other(format!("{len} bytes, at most {most} are right")));
        }
        let mut bytes = Vec::with_capacity(len as usize);
        file.take(most).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Marks an item as used, for the order after the next start.
    pub fn touch(&self, item: &Item) {
        if !self.has(item) {
            return;
        }
        if let Ok(file) = File::options().write(true).open(self.path(item)) {
            // An order that is off evicts something else first; nothing depends on it.
            let _ = file.set_modified(SystemTime::now());
        }
    }

    /// Removes an item.
    pub fn remove(&mut self, item: &Item) {
        self.bytes -= self.sizes.remove(item).unwrap_or(0);
        // A file that cannot be removed is found and checked again at the next start.
        let _ = fs::remove_file(self.path(item));
    }

    fn path(&self, item: &Item) -> PathBuf {
        self.dir.join(item.to_string())
    }
}

/// What is said in a prompt is nobody else's business.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

fn make_folder(dir: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)
}
