//! A team of threads for calls of a few microseconds.
//!
//! A forward pass of a small model makes a thousand parallel calls a second and thread; a general pool puts its threads
//! to sleep between them, and waking one costs more than the call. Here the caller works too, and the others spin for
//! a moment before they sleep.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

/// Turns of the waiting loop before a thread sleeps: some 50 µs.
const SPINS: u32 = 4000;
/// Bit of [`Shared::state`] that says that a call takes helpers; the number of the call lies above, that of the helpers
/// inside it below.
const OPEN: u64 = 1 << 32;

type Task<'a> = &'a (dyn Fn(usize) + Sync + 'a);

/// The indices of a call that one member of the team takes first, on a cache line of their own.
#[derive(Default)]
#[repr(align(64))]
struct Share {
    next: AtomicUsize,
    end: AtomicUsize,
}

#[derive(Default)]
struct Shared {
    state: AtomicU64,
    /// The caller's task; valid while a call is open or has helpers inside.
    task: AtomicPtr<()>,
    /// One a member, the caller's first.
    shares: Vec<Share>,
    sleepers: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Shared {
    /// Takes the indices of member `me`, which in call after call are about the same rows and lie in this core's cache,
    /// then what the others have left.
    fn work(&self, me: usize, task: Task<'_>) {
        for k in 0..self.shares.len() {
            let share = &self.shares[(me + k) % self.shares.len()];
            let end = share.end.load(Ordering::Relaxed);
            loop {
                let i = share.next.fetch_add(1, Ordering::Relaxed);
                if i >= end {
                    break;
                }
                task(i);
            }
        }
    }

    /// Waits for a call with another number than `seen`; `None` when the team ends.
    fn wait(&self, seen: u64) -> Option<u64> {
        let fresh = |s: u64| s & OPEN != 0 && s >> 33 != seen;
        let mut spins = 0;
        loop {
            let s = self.state.load(Ordering::Acquire);
            if fresh(s) {
                return Some(s);
            }
            if self.stop.load(Ordering::Acquire) {
                return None;
            }
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            // Whoever opens a call after this sees a sleeper, and whoever opened before is seen here.
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            while !fresh(self.state.load(Ordering::SeqCst)) && !self.stop.load(Ordering::SeqCst) {
                guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            spins = 0;
        }
    }

    fn help(&self, me: usize) {
        let mut seen = 0;
        while let Some(s) = self.wait(seen) {
            if self.state.compare_exchange(s, s + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                continue;
            }
            seen = s >> 33;
            // SAFETY: this thread is inside the call, and the caller leaves only when no helper is.
            let task = unsafe { *self.task.load(Ordering::Relaxed).cast::<Task<'_>>() };
            if catch_unwind(AssertUnwindSafe(|| self.work(me, task))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.state.fetch_sub(1, Ordering::Release);
        }
    }

    fn rouse(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.wake.notify_all();
        }
    }
}

/// Closes a call and waits for its helpers, also when the caller's own part panics.
struct Call<'a>(&'a Shared);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while self.0.state.load(Ordering::Acquire) as u32 != 0 {
            spins += 1;
            if spins.is_multiple_of(SPINS) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

/// The caller and its helpers.
pub(crate) struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    turn: Mutex<()>,
}

impl Team {
    /// A team of `threads`, the caller counted.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let shares = (0..threads.max(1)).map(|_| Share::default()).collect();
        let shared = Arc::new(Shared { shares, ..Shared::default() });
        let mut team = Self { shared, helpers: Vec::new(), turn: Mutex::default() };
        for i in 1..threads {
            let shared = team.shared.clone();
            let name = format!("cpu-{i}");
            team.helpers.push(std::thread::Builder::new().name(name).spawn(move || shared.help(i))?);
        }
        Ok(team)
    }

    /// Calls `task` with each of `0..count`, in no order. A call inside another, or beside one of another thread, runs
    /// on its caller alone.
    pub(crate) fn run(&self, count: usize, task: Task<'_>) {
        let Ok(_turn) = self.turn.try_lock() else {
            (0..count).for_each(task);
            return;
        };
        let s = &*self.shared;
        s.task.store((&raw const task).cast_mut().cast(), Ordering::Relaxed);
        let members = s.shares.len();
        for (m, share) in s.shares.iter().enumerate() {
            share.next.store(m * count / members, Ordering::Relaxed);
            share.end.store((m + 1) * count / members, Ordering::Relaxed);
        }
        let number = (s.state.load(Ordering::Relaxed) >> 33) + 1;
        s.state.store(number << 33 | OPEN, Ordering::SeqCst);
        let call = Call(s);
        s.rouse();
        s.work(0, task);
        drop(call);
        assert!(!s.panicked.swap(false, Ordering::Relaxed), "a helper of a parallel call panicked");
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        let guard = self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.wake.notify_all();
        drop(guard);
        for helper in self.helpers.drain(..) {
            // A helper catches its tasks' panics, so it ends regularly.
            let _ = helper.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(team: &Team, n: usize) -> Vec<usize> {
        let seen: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
        team.run(n, &|i| {
            seen[i].fetch_add(1, Ordering::Relaxed);
        });
        seen.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_index_is_taken_once_by_any_team_however_often_it_is_called() {
        for threads in [1, 2, 3, 8] {
            let team = Team::new(threads).unwrap();
            for n in (0..2000).map(|i| i % 70) {
                assert_eq!(counts(&team, n), vec![1; n], "{threads} threads, {n} indices");
            }
        }
    }

    #[test]
    fn sleeping_helpers_wake() {
        let team = Team::new(3).unwrap();
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let threads = Mutex::new(std::collections::HashSet::new());
            team.run(3, &|_| {
                threads.lock().unwrap().insert(std::thread::current().id());
                std::thread::sleep(std::time::Duration::from_millis(20));
            });
            assert!(threads.into_inner().unwrap().len() > 1, "nobody helped");
        }
    }

    #[test]
    fn nested_and_concurrent_calls_run_on_their_callers() {
        let team = Team::new(2).unwrap();
        let inner = AtomicUsize::new(0);
        team.run(10, &|_| {
            team.run(10, &|_| {
                inner.fetch_add(1, Ordering::Relaxed);
            })
        });
        assert_eq!(inner.into_inner(), 100);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| (0..500).for_each(|_| assert_eq!(counts(&team, 20), vec![1; 20])));
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_goes_on() {
        let team = Team::new(4).unwrap();
        for _ in 0..20 {
            let broken = catch_unwind(AssertUnwindSafe(|| team.run(100, &|i| assert_ne!(i, 57))));
            assert!(broken.is_err());
            assert_eq!(counts(&team, 100), vec![1; 100]);
        }
    }
}
