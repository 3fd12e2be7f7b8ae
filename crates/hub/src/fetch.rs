//! Ranges over the network, in parallel.

use std::{
    collections::VecDeque,
    io::Read,
    os::unix::fs::FileExt,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use sha2::{Digest, Sha256};
use ureq::{Body, http::Response};

use crate::{
    Error, RemoteFile, Result,
    client::{Trouble, header},
    hash::hex,
    journal::Journal,
    pull::Job,
};

/// One file of a pull.
pub(crate) struct Item<'a> {
    pub want: &'a RemoteFile,
    /// None where the file is whole and verified.
    pub journal: Option<Journal>,
    state: Mutex<State>,
    /// Bytes that are there, for people.
    have: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Threads that write to it.
    writers: usize,
    /// Bytes that no range has brought.
    missing: u64,
    /// The server sends whole files only: one thread writes all.
    whole: bool,
    /// That thread has written all.
    written: bool,
    /// Its hash is or was being checked; nobody may write any more.
    closed: bool,
}

impl<'a> Item<'a> {
    pub(crate) fn whole(want: &'a RemoteFile) -> Self {
        Self { want, journal: None, state: Mutex::default(), have: AtomicU64::new(want.size) }
    }

    pub(crate) fn new(want: &'a RemoteFile, journal: Journal) -> Self {
        let have: u64 = journal.have.iter().map(|(s, e)| e - s).sum();
        let state = Mutex::new(State { missing: want.size - have, ..State::default() });
        Self { want, journal: Some(journal), state, have: AtomicU64::new(have) }
    }

    /// Bytes that were there before this pull.
    pub(crate) fn present(&self) -> u64 {
        self.journal.as_ref().map_or(self.want.size, |j| j.have.iter().map(|(s, e)| e - s).sum())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A range of a file.
struct Task {
    file: usize,
    start: u64,
    end: u64,
}

struct Fetch<'a, 'b> {
    job: &'a Job<'a>,
    items: &'a [Item<'b>],
    queue: Mutex<VecDeque<Task>>,
    failed: Mutex<Option<Error>>,
    stop: AtomicBool,
    downloaded: AtomicU64,
}

/// Fetches what `items` lack; the bytes that came.
pub(crate) fn all(job: &Job, items: &[Item]) -> Result<u64> {
    let mut queue = VecDeque::new();
    for (file, item) in items.iter().enumerate() {
        let Some(journal) = &item.journal else { continue };
        let missing = journal.missing(item.want.size, job.client.options.range);
        // A file of no bytes, or one that was killed before its hash was checked.
        let missing = if missing.is_empty() { vec![(item.want.size, item.want.size)] } else { missing };
        queue.extend(missing.into_iter().map(|(start, end)| Task { file, start, end }));
    }
    let threads = job.client.options.connections.clamp(1, 64).min(queue.len());
    let fetch = Fetch {
        job,
        items,
        queue: Mutex::new(queue),
        failed: Mutex::new(None),
        stop: AtomicBool::new(false),
        downloaded: AtomicU64::new(0),
    };
    std::thread::scope(|s| {
        for _ in 0..threads {
            s.spawn(|| fetch.work());
        }
    });
    match fetch.failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
        Some(e) => Err(e),
        None => Ok(fetch.downloaded.into_inner()),
    }
}

impl Fetch<'_, '_> {
    fn work(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let Some(task) = self.queue.lock().unwrap_or_else(|e| e.into_inner()).pop_front() else { return };
            if let Err(e) = self.task(&task) {
                self.stop.store(true, Ordering::Relaxed);
                self.failed.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(e);
            }
        }
    }

    fn task(&self, task: &Task) -> Result<()> {
        let item = &self.items[task.file];
        {
            let mut state = item.state();
            if state.whole || state.closed {
                return Ok(());
            }
            state.writers += 1;
        }
        let result = self.range(task, item);
        let close = {
            let mut state = item.state();
            state.writers -= 1;
            let complete = if state.whole { state.written } else { state.missing == 0 };
            let close = complete && state.writers == 0 && !state.closed;
            state.closed |= close;
            close
        };
        result?;
        if close {
            self.job.accept(item)?;
            self.job.progress.verified(task.file);
        }
        Ok(())
    }

    /// Brings one range, in as many pieces as the connection breaks it into.
    fn range(&self, task: &Task, item: &Item) -> Result<()> {
        let url = self.job.repo.url(self.job.client, &item.want.name);
        let (mut at, mut tries) = (task.start, 0);
        while at < task.end && !self.stop.load(Ordering::Relaxed) {
            let (came, trouble) = match self.job.client.get(&url, Some((at, task.end))) {
                Ok(response) if response.status() == 200 => match self.claim(item) {
                    true => return self.whole(task.file, item, &url, response),
                    false => return Ok(()),
                },
                Ok(response) => self.piece(task.file, item, response, (at, task.end)),
                Err(trouble) => (Ok(0), Some(trouble)),
            };
            let came = came?;
            at += came;
            item.state().missing -= came;
            if came > 0 {
                tries = 0;
            }
            if let Some(trouble) = trouble {
                self.pause(&url, trouble, &mut tries)?;
            }
        }
        Ok(())
    }

    fn pause(&self, url: &str, trouble: Trouble, tries: &mut u32) -> Result<()> {
        let stop = || self.stop.load(Ordering::Relaxed);
        self.job.client.pause_until(url, trouble, tries, &|n| self.job.progress.note(n), &stop)
    }

    /// Whether this thread is the one that takes the whole file.
    fn claim(&self, item: &Item) -> bool {
        !std::mem::replace(&mut item.state().whole, true)
    }

    /// Writes the answer to a request for `want`, and notes as much of it as came. The bytes, and why not all.
    fn piece(
        &self,
        file: usize,
        item: &Item,
        response: Response<Body>,
        want: (u64, u64),
    ) -> (Result<u64>, Option<Trouble>) {
        let Some(journal) = &item.journal else { return (Ok(0), None) };
        let range = format!("bytes {}-{}/{}", want.0, want.1 - 1, item.want.size);
        match header(&response, "content-range") {
            Some(got) if got.trim() == range => {}
            got => {
                let what = format!("asked for {range}, the answer is {}", got.unwrap_or("without a range"));
                return (Ok(0), Some(Trouble::again(what)));
            }
        }
        if let Some(length) = response.body().content_length()
            && length != want.1 - want.0
        {
            let what = format!("the answer to {range} claims {length} bytes");
            return (Ok(0), Some(Trouble::again(what)));
        }
        let mut body = response.into_body().into_reader();
        let (came, hash, trouble) = match self.copy(file, item, journal, &mut body, want) {
            Ok(done) => done,
            Err(e) => return (Err(e), None),
        };
        if came == want.1 - want.0 && matches!(body.read(&mut [0]), Ok(1..)) {
            self.took_back(file, item, came);
            return (Ok(0), Some(Trouble::again(format!("the answer to {range} is longer than asked for"))));
        }
        let noted = if came > 0 { journal.add(want.0, want.0 + came, &hash) } else { Ok(()) };
        (noted.map(|()| came), trouble)
    }

    /// Copies up to `want` to the file: bytes that came, their hash, and why not all.
    fn copy(
        &self,
        file: usize,
        item: &Item,
        journal: &Journal,
        body: &mut impl Read,
        want: (u64, u64),
    ) -> Result<(u64, String, Option<Trouble>)> {
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; (want.1 - want.0).min(256 << 10) as usize];
        let mut at = want.0;
        let mut trouble = None;
        while at < want.1 {
            if self.stop.load(Ordering::Relaxed) {
                trouble = Some(Trouble::again("stopped"));
                break;
            }
            let most = (want.1 - at).min(buffer.len() as u64) as usize;
            match body.read(&mut buffer[..most]) {
                Ok(0) => {
                    trouble =
                        Some(Trouble::again(format!("the connection ended at byte {at} of {}", want.1)));
                    break;
                }
                Ok(n) => {
                    journal.file.write_all_at(&buffer[..n], at).map_err(Error::io(&journal.part))?;
                    hasher.update(&buffer[..n]);
                    at += n as u64;
                    self.downloaded.fetch_add(n as u64, Ordering::Relaxed);
                    let have = item.have.fetch_add(n as u64, Ordering::Relaxed) + n as u64;
                    self.job.progress.have(file, have.min(item.want.size));
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => {
                    trouble = Some(Trouble::again(format!("the connection broke at byte {at} ({e})")));
                    break;
                }
            }
        }
        Ok((at - want.0, hex(&hasher.finalize()), trouble))
    }

    fn took_back(&self, file: usize, item: &Item, bytes: u64) {
        let have = item.have.fetch_sub(bytes, Ordering::Relaxed) - bytes;
        self.job.progress.have(file, have.min(item.want.size));
    }

    /// Takes a whole file from a server that sends no ranges: from the beginning at every try.
    fn whole(&self, file: usize, item: &Item, url: &str, first: Response<Body>) -> Result<()> {
        let Some(journal) = &item.journal else { return Ok(()) };
        self.job.progress.note(&format!("{url}: the server sends no ranges; the file is taken in one piece"));
        let (size, mut tries, mut response) = (item.want.size, 0, Some(first));
        while !self.stop.load(Ordering::Relaxed) {
            let next = response.take().map_or_else(|| self.job.client.get(url, None), Ok);
            let trouble = match next {
                Err(trouble) => trouble,
                Ok(r) if r.body().content_length().is_some_and(|n| n != size) => Trouble::again(format!(
                    "the answer claims {} bytes, the revision says {size}",
                    r.body().content_length().unwrap_or_default()
                )),
                Ok(r) => {
                    item.have.store(0, Ordering::Relaxed);
                    let mut body = r.into_body().into_reader();
                    let (came, hash, trouble) = self.copy(file, item, journal, &mut body, (0, size))?;
                    let longer = came == size && matches!(body.read(&mut [0]), Ok(1..));
                    match trouble {
                        None if longer => Trouble::again(format!("more than {size} bytes came")),
                        None => {
                            journal.add(0, came, &hash)?;
                            item.state().written = true;
                            return Ok(());
                        }
                        Some(trouble) => trouble,
                    }
                }
            };
            self.pause(url, trouble, &mut tries)?;
        }
        Ok(())
    }
}
