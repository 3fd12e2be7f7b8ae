//! Where a step's time goes, kernel by kernel. Timing every launch by events makes a step slower, so that the sum is more
//! than an untimed step takes.

use std::collections::BTreeMap;
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

static ENABLED: AtomicBool = AtomicBool::new(false);
static TIMES: Mutex<BTreeMap<&'static str, (u64, f64)>> = Mutex::new(BTreeMap::new());

/// Time of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Time {
    /// Its name.
    pub kernel: &'static str,
    /// Launches.
    pub launches: u64,
    /// Seconds in all.
    pub seconds: f64,
}

/// Begins to time every launch.
pub fn begin() {
    TIMES.lock().unwrap_or_else(PoisonError::into_inner).clear();
    ENABLED.store(true, Relaxed);
}

/// Stops, and gives the kernels' times, the longest first.
pub fn end() -> Vec<Time> {
    ENABLED.store(false, Relaxed);
    let times = std::mem::take(&mut *TIMES.lock().unwrap_or_else(PoisonError::into_inner));
    let one = |(kernel, (launches, seconds))| Time { kernel, launches, seconds };
    let mut all: Vec<Time> = times.into_iter().map(one).collect();
    all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    all
}

pub(super) fn enabled() -> bool {
    ENABLED.load(Relaxed)
}

pub(super) fn add(kernel: &'static str, seconds: f64) {
    let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
    let entry = times.entry(kernel).or_default();
    entry.0 += 1;
    entry.1 += seconds;
}

#[cfg(test)]
mod tests {
    #[test]
    fn times_add_up_by_kernel_and_the_longest_comes_first() {
        super::begin();
        for (kernel, seconds) in [("a", 1.0), ("b", 2.5), ("a", 0.5)] {
            super::add(kernel, seconds);
        }
        let all: Vec<_> = super::end().iter().map(|t| (t.kernel, t.launches, t.seconds)).collect();
        assert_eq!(all, [("b", 1, 2.5), ("a", 2, 1.5)]);
        assert!(!super::enabled() && super::end().is_empty());
    }
}
