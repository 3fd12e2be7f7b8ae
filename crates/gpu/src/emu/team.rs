//! Threads that live as long as the program and run threadgroups together: a kernel costs no start of a thread, and the
//! stacks of its fibers are made once.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

/// How often a thread without work looks again before it sleeps: some 10 microseconds.
const SPINS: u32 = 200;

/// The caller's work with its lifetime hidden; valid until `Team::run` returns.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn() + Sync));

// SAFETY: the closure is `Sync`, and `Team::run` keeps it until nobody uses it.
unsafe impl Send for Job {}

#[derive(Default)]
struct State {
    job: Option<Job>,
    /// Threads that may still join the job.
    wanted: usize,
    /// Threads of the team, the callers not counted.
    started: usize,
}

/// The team; one job at a time.
#[derive(Default)]
pub struct Team {
    state: Mutex<State>,
    wake: Condvar,
    /// Counts jobs, so that a thread sees a new one without the lock.
    jobs: AtomicU64,
    /// Threads inside the job.
    active: AtomicUsize,
    one: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Team {
    /// The program's team.
    pub fn get() -> &'static Self {
        static TEAM: OnceLock<Team> = OnceLock::new();
        TEAM.get_or_init(Self::default)
    }

    /// Calls `work` on this thread and on up to `threads - 1` others, and waits for all of them. Each call of `work`
    /// returns when nothing is left to do; threads that come too late do not call it.
    pub fn run(&'static self, threads: usize, work: &(dyn Fn() + Sync)) {
        if threads < 2 {
            return work();
        }
        let _one = lock(&self.one);
        // SAFETY: only the lifetime changes; below, nobody can take the job any more before this returns.
        let job = Job(unsafe {
            std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(work)
        });
        {
            let mut state = lock(&self.state);
            while state.started < threads - 1 {
                let thread = std::thread::Builder::new().name("emu".into());
                if thread.spawn(|| self.serve()).is_err() {
                    break; // fewer threads do the same work
                }
                state.started += 1;
            }
            state.job = Some(job);
            state.wanted = threads - 1;
        }
        self.jobs.fetch_add(1, Ordering::SeqCst);
        self.wake.notify_all();
        work();
        lock(&self.state).job = None;
        let mut spins = 0;
        while self.active.load(Ordering::SeqCst) > 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    fn serve(&self) {
        let mut seen = 0;
        loop {
            let mut spins = 0;
            while self.jobs.load(Ordering::SeqCst) == seen && spins < SPINS {
                std::hint::spin_loop();
                spins += 1;
            }
            let job = {
                let mut state = lock(&self.state);
                while self.jobs.load(Ordering::SeqCst) == seen {
                    state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                seen = self.jobs.load(Ordering::SeqCst);
                let job = if state.wanted > 0 { state.job } else { None };
                if job.is_some() {
                    state.wanted -= 1;
                    // Counted under the lock: the caller takes the job away under it and then waits for the count.
                    self.active.fetch_add(1, Ordering::SeqCst);
                }
                job
            };
            if let Some(job) = job {
                // SAFETY: counted as active, so the caller keeps the closure.
                unsafe { (*job.0)() };
                self.active.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_by_teams_of_any_size() {
        for threads in [1, 2, 5] {
            for items in [1, 3, 1000] {
                let (next, sum) = (AtomicUsize::new(0), AtomicUsize::new(0));
                Team::get().run(threads, &|| {
                    loop {
                        let item = next.fetch_add(1, Ordering::SeqCst);
                        if item >= items {
                            return;
                        }
                        sum.fetch_add(item + 1, Ordering::SeqCst);
                    }
                });
                assert_eq!(sum.into_inner(), items * (items + 1) / 2);
            }
        }
    }
}
