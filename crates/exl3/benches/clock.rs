// Timing on a machine that others use too.

use std::time::{Duration, Instant};

/// Seconds of the fastest call, of at least `calls` in at least `least` seconds: short calls find moments that nothing else
/// disturbs.
pub fn best(calls: usize, least: f64, mut call: impl FnMut()) -> f64 {
    let (mut best, start) = (Duration::MAX, Instant::now());
    let mut done = 0;
    while done < calls || start.elapsed().as_secs_f64() < least {
        let begin = Instant::now();
        call();
        best = best.min(begin.elapsed());
        done += 1;
    }
    best.as_secs_f64()
}
