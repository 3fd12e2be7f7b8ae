//! Mapped weights into memory before they are needed: in the order of the files, by several threads, without a copy.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::{
    Bytes, Checkpoint, Group,
    error::{Error, Result},
};

/// Bytes that a thread brings at a time.
const STEP: usize = 8 << 20;
/// Steps that are announced to the system before they are waited for.
const AHEAD: usize = 8;

/// What to bring.
#[derive(Clone, Copy, Debug)]
pub struct PageIn {
    /// All tensors but the Engram tables and what is never loaded (the vision tower).
    pub weights: bool,
    /// The Engram tables.
    pub engram: bool,
    /// Whether the pages are locked too.
    pub lock: bool,
    /// Threads.
    pub threads: usize,
}

/// What was brought.
#[derive(Clone, Debug, Default)]
pub struct PagedIn {
    /// Bytes.
    pub bytes: u64,
    /// Bytes that are locked.
    pub locked: u64,
    /// Why not all of them are.
    pub not_locked: Option<String>,
    /// Time.
    pub time: Duration,
}

impl Checkpoint {
    /// The bytes that [`Checkpoint::page_in`] would bring.
    pub fn page_in_bytes(&self, what: PageIn) -> u64 {
        self.runs(what).iter().map(|b| b.len() as u64).sum()
    }

    /// Brings mapped tensors into memory. `progress` hears bytes done and bytes in all.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn page_in(&self, what: PageIn, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<PagedIn> {
        let start = Instant::now();
        let runs = self.runs(what);
        let steps: Vec<(&Bytes, usize, usize)> = runs
            .iter()
            .flat_map(|run| (0..run.len()).step_by(STEP).map(move |at| (run, at, STEP.min(run.len() - at))))
            .collect();
        let total: u64 = steps.iter().map(|s| s.2 as u64).sum();
        let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
        let failed = Mutex::new(None);
        std::thread::scope(|s| {
            for _ in 0..what.threads.max(1) {
                s.spawn(|| {
                    loop {
                        let k = next.fetch_add(1, Relaxed);
                        let Some((bytes, at, len)) = steps.get(k) else { return };
                        if let Some((bytes, at, len)) = steps.get(k + AHEAD) {
                            bytes.will_need(*at, *len);
                        }
                        if let Err(e) = bytes.populate(*at, *len) {
                            failed.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(e);
                            return;
                        }
                        progress(done.fetch_add(*len as u64, Relaxed) + *len as u64, total);
                    }
                });
            }
        });
        if let Some(e) = failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
            return Err(Error::io(self.location().as_ref())(e));
        }
        let mut paged = PagedIn { bytes: total, ..PagedIn::default() };
        for run in runs.iter().filter(|_| what.lock) {
            match run.lock() {
                Ok(()) => paged.locked += run.len() as u64,
                Err(e) => {
                    paged.not_locked = Some(e.to_string());
                    break;
                }
            }
        }
        paged.time = start.elapsed();
        Ok(paged)
    }

    /// Runs of neighbouring tensors in the order of the files.
    fn runs(&self, what: PageIn) -> Vec<Bytes> {
        let wanted = |group: Group| match group {
            Group::EngramTable => what.engram,
            Group::Vision | Group::ImageMarks => false,
            _ => what.weights,
        };
        let mut places: Vec<(usize, usize, usize)> = self
            .tensors
            .values()
            .filter(|e| wanted(e.group) && e.len > 0)
            .map(|e| (e.shard, e.offset, e.offset + e.len))
            .collect();
        places.sort_unstable();
        let mut runs: Vec<(usize, usize, usize)> = Vec::new();
        for (shard, start, end) in places {
            match runs.last_mut() {
                Some(last) if (last.0, last.2) == (shard, start) => last.2 = end,
                _ => runs.push((shard, start, end)),
            }
        }
        let bytes =
            |(shard, start, end): (usize, usize, usize)| self.shards[shard].bytes.slice(start, end - start);
        runs.into_iter().filter_map(bytes).filter(Bytes::is_mapped).collect()
    }
}
