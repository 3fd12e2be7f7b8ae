// Time of the calling thread on a core, so that other work on the machine does not count.

/// Seconds that this thread has run; Linux counts them in steps of a few milliseconds, elsewhere wall time is used.
pub fn seconds() -> f64 {
    static START: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    let run = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let run = run.and_then(|s| s.split(' ').next().and_then(|n| n.parse::<f64>().ok()));
    run.map_or_else(|| START.elapsed().as_secs_f64(), |nanoseconds| nanoseconds * 1e-9)
}

/// Least seconds per call over `trials` trials that each last at least `least` seconds.
pub fn best(trials: usize, least: f64, mut call: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..trials {
        let (start, mut calls) = (seconds(), 0.0);
        let elapsed = loop {
            call();
            calls += 1.0;
            let elapsed = seconds() - start;
            if elapsed >= least {
                break elapsed;
            }
        };
        best = best.min(elapsed / calls);
    }
    best
}
