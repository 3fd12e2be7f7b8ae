//! Counts and times of one table.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Instant,
};

use serde::Serialize;

/// Time of a step's rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// Half of the steps took at most this many microseconds (to the next power of two of nanoseconds).
    pub p50_us: f64,
    /// 99 of 100 did.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
}

/// What a table did so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TableStats {
    /// The Engram layer.
    pub layer: usize,
    /// Where rows are kept: resident, mmap or cache.
    pub place: &'static str,
    /// Rows that steps took.
    pub rows: u64,
    /// Rows that were in memory.
    pub hits: u64,
    /// Rows that a step waited for.
    pub misses: u64,
    /// Rows that were asked for ahead.
    pub prefetched: u64,
    /// Page faults that waited for the disk, of the threads that took rows.
    pub page_faults: u64,
    /// Bytes read from files, ahead or not; 0 where the system pages.
    pub bytes_read: u64,
    /// Steps.
    pub steps: u64,
    /// Seconds that steps spent taking rows.
    pub seconds: f64,
    /// The same by step.
    pub latency: Latency,
}

/// Counts of one table; buckets are powers of two of nanoseconds.
pub(crate) struct Meter {
    layer: usize,
    place: &'static str,
    rows: AtomicU64,
    misses: AtomicU64,
    pub prefetched: AtomicU64,
    faults: AtomicU64,
    pub bytes: AtomicU64,
    nanos: AtomicU64,
    longest: AtomicU64,
    buckets: [AtomicU64; 48],
}

impl Meter {
    pub(crate) fn new(layer: usize, place: &'static str) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            layer,
            place,
            rows: zero(),
            misses: zero(),
            prefetched: zero(),
            faults: zero(),
            bytes: zero(),
            nanos: zero(),
            longest: zero(),
            buckets: std::array::from_fn(|_| zero()),
        }
    }

    /// Times a step; `work` gives its result and the rows that it had to wait for.
    pub(crate) fn step<T>(&self, rows: usize, work: impl FnOnce() -> (T, u64)) -> T {
        let _span = tracing::info_span!("engram take", layer = self.layer, rows).entered();
        let (start, before) = (Instant::now(), page_faults());
        let (result, misses) = work();
        let nanos = start.elapsed().as_nanos() as u64;
        let faults = page_faults().saturating_sub(before);
        self.rows.fetch_add(rows as u64, Relaxed);
        self.misses.fetch_add(misses, Relaxed);
        self.faults.fetch_add(faults, Relaxed);
        self.nanos.fetch_add(nanos, Relaxed);
        self.longest.fetch_max(nanos, Relaxed);
        let bucket = (64 - nanos.leading_zeros() as usize).min(self.buckets.len() - 1);
        self.buckets[bucket].fetch_add(1, Relaxed);
        result
    }

    /// Runs `work`, which brings `rows` rows that steps will take, on a thread of its own.
    pub(crate) fn ahead(&self, rows: usize, work: impl FnOnce() + Send + 'static) {
        let layer = self.layer;
        let work = move || {
            let _span = tracing::info_span!("engram ahead", layer, rows).entered();
            work();
        };
        // Where the system gives no thread, steps bring their rows themselves.
        let _ = std::thread::Builder::new().name("engram ahead".into()).spawn(work);
    }

    pub(crate) fn stats(&self) -> TableStats {
        let counts: Vec<u64> = self.buckets.iter().map(|b| b.load(Relaxed)).collect();
        let steps: u64 = counts.iter().sum();
        let quantile = |q: f64| {
            let mut seen = 0;
            let at = counts.iter().position(|n| {
                seen += n;
                seen as f64 >= q * steps as f64
            });
            if steps == 0 { 0.0 } else { at.map_or(0.0, |k| (1u64 << k) as f64 / 1e3) }
        };
        let (rows, misses) = (self.rows.load(Relaxed), self.misses.load(Relaxed));
        let max_us = self.longest.load(Relaxed) as f64 / 1e3;
        TableStats {
            layer: self.layer,
            place: self.place,
            rows,
            hits: rows - misses.min(rows),
            misses,
            prefetched: self.prefetched.load(Relaxed),
            page_faults: self.faults.load(Relaxed),
            bytes_read: self.bytes.load(Relaxed),
            steps,
            seconds: self.nanos.load(Relaxed) as f64 / 1e9,
            latency: Latency {
                p50_us: quantile(0.5).min(max_us),
                p99_us: quantile(0.99).min(max_us),
                max_us,
            },
        }
    }
}

/// Page faults so far that waited for the disk: of this thread where the system counts by thread, else of the process.
pub(crate) fn page_faults() -> u64 {
    #[cfg(target_os = "linux")]
    let who = libc::RUSAGE_THREAD;
    #[cfg(not(target_os = "linux"))]
    let who = libc::RUSAGE_SELF;
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the struct is as large as the system expects, and all-zero bytes are a valid one.
    let usage = unsafe {
        libc::getrusage(who, usage.as_mut_ptr());
        usage.assume_init()
    };
    usage.ru_majflt as u64
}
