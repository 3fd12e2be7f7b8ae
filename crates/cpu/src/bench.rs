//! Measurements: what the machine can do, and what part of it the kernels reach.
//!
//! Times are wall times of whole calls beside the processor time of the threads, because a shared machine stretches the
//! former; each figure is the median of several runs with the best beside it.

pub mod exl3;

use std::time::{Duration, Instant};

use checkpoint::{Bytes, Form, Weight};
use numerics::generator::Stream;
use serde::Serialize;

use crate::{Engine, Error, Isa, kernels::Kernels};

/// Bytes that a cold measurement walks through before it returns to the first: more than a last-level cache holds.
pub const COLD_BYTES: usize = 640 << 20;

/// Median and best of several runs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rate {
    /// Half the runs were at least this fast.
    pub median: f64,
    /// The fastest run.
    pub best: f64,
}

impl Rate {
    /// `amount` per second, from run times.
    fn of(amount: f64, times: &[Duration]) -> Self {
        let mut seconds: Vec<f64> = times.iter().map(|t| t.as_secs_f64().max(1e-9)).collect();
        seconds.sort_by(f64::total_cmp);
        let middle = seconds.len() / 2;
        Self { median: amount / seconds[middle], best: amount / seconds[0] }
    }

    fn times(self, f: f64) -> Self {
        Self { median: self.median * f, best: self.best * f }
    }
}

/// What a number of threads can do at most.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Limits {
    /// Threads that worked together.
    pub threads: usize,
    /// Instruction set of `fma`.
    pub isa: Isa,
    /// GB (10^9 bytes) read from memory per second of wall time.
    pub read_gb_s: Rate,
    /// The same per second of processor time where one thread works.
    pub read_gb_cpu_s: Rate,
    /// 10^9 f32 multiply-adds in registers per second of wall time.
    pub gfma_s: Rate,
    /// The same per second of processor time where one thread works.
    pub gfma_cpu_s: Rate,
}

/// A linear layer to measure.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Case {
    /// How the weight is stored.
    #[serde(serialize_with = "form_name")]
    pub form: Form,
    /// Output features.
    pub out: usize,
    /// Input features.
    pub cols: usize,
    /// Activation rows.
    pub batch: usize,
    /// Whether weights rotate through [`COLD_BYTES`], so that each run streams them from memory.
    pub cold: bool,
}

fn form_name<S: serde::Serializer>(form: &Form, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(form.name())
}

/// What a case reached.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// The case.
    #[serde(flatten)]
    pub case: Case,
    /// Threads.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
    /// Timed runs.
    pub runs: usize,
    /// 10^9 weights per second of wall time; each weight counts once whatever the batch.
    pub gweights_s: Rate,
    /// The same per second of processor time where one thread works.
    pub gweights_cpu_s: Rate,
    /// GB of stored bytes, scales included, per second of wall time.
    pub gb_s: Rate,
    /// 10^9 multiply-adds per second of wall time.
    pub gfma_s: Rate,
    /// Bytes over the machine's reading, both by their best run in processor time.
    pub of_bandwidth: f64,
    /// Multiply-adds over the machine's, both by their best run in processor time.
    pub of_fma: f64,
}

/// Processor time of this thread so far; wall time where the system does not tell.
fn processor_time(start: Instant) -> Duration {
    #[cfg(unix)]
    {
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call only writes the given structure.
        if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) } == 0 {
            return Duration::new(t.tv_sec as u64, t.tv_nsec as u32);
        }
    }
    start.elapsed()
}

/// Wall and processor times of `runs` calls of `f`, after one call that is not counted. Where `several` threads work,
/// wall time stands for both: the system may run one of them alone, and then their processor time shows nothing.
fn time(runs: usize, several: bool, mut f: impl FnMut(usize)) -> (Vec<Duration>, Vec<Duration>) {
    let start = Instant::now();
    f(0);
    let mut wall = Vec::with_capacity(runs);
    let mut cpu = Vec::with_capacity(runs);
    for i in 1..=runs {
        let (c, w) = (processor_time(start), Instant::now());
        f(i);
        let elapsed = w.elapsed();
        wall.push(elapsed);
        cpu.push(if several { elapsed } else { processor_time(start).saturating_sub(c) });
    }
    (wall, cpu)
}

/// Reads memory and multiplies in registers with all threads of `engine`.
pub fn limits(engine: &Engine) -> Limits {
    let threads = engine.threads();
    let kernels = Kernels::of(engine.isa());
    let data = vec![0x0101_0101_0101_0101_u64; COLD_BYTES / 8];
    let part = data.len() / threads / 2048 * 2048;
    let sums: Vec<std::sync::atomic::AtomicU64> = (0..threads).map(|_| 0.into()).collect();
    let several = threads > 1;
    let both = |amount: f64, (wall, cpu): (Vec<Duration>, Vec<Duration>)| {
        (Rate::of(amount, &wall), Rate::of(amount, &cpu))
    };
    let times = time(7, several, |_| {
        engine.par_rows(threads, |t| {
            // SAFETY: the engine's instruction set is one of this machine's.
            let sum = unsafe { (kernels.read)(&data[t * part..][..part]) };
            sums[t].fetch_add(sum, std::sync::atomic::Ordering::Relaxed);
        });
    });
    let (read_gb_s, read_gb_cpu_s) = both((part * threads * 8) as f64 / 1e9, times);
    const ROUNDS: usize = 400_000;
    let times = time(7, several, |_| {
        engine.par_rows(threads, |t| {
            // SAFETY: as above.
            let sum = unsafe { (kernels.spin)(ROUNDS) };
            sums[t].fetch_add(u64::from(sum.to_bits()), std::sync::atomic::Ordering::Relaxed);
        });
    });
    let (gfma_s, gfma_cpu_s) = both((ROUNDS * kernels.spin_fma * threads) as f64 / 1e9, times);
    Limits { threads, isa: engine.isa(), read_gb_s, read_gb_cpu_s, gfma_s, gfma_cpu_s }
}

/// Measures one case with at least `runs` runs. `limits` are those of the same engine.
pub fn linear(engine: &Engine, case: Case, limits: &Limits, runs: usize) -> Measured {
    let weights = weights(case);
    let s = Stream::new("bench.x", 2);
    let x: Vec<f32> = (0..case.batch * case.cols).map(|i| s.normal(i as u64)).collect();
    let mut y = vec![0.0; case.batch * case.out];
    let one = (case.out * case.cols) as f64;
    // Small weights: several calls to a run, so that a run is long against the clock.
    let repeat = (2e6 / (one * case.batch as f64)).ceil().max(1.0) as usize;
    let several = engine.threads() > 1;
    let (wall, cpu) = time(runs.max(weights.len()), several, |i| {
        for j in 0..repeat {
            engine.linear(&weights[(i * repeat + j) % weights.len()], &x, case.batch, &mut y);
        }
    });
    let amount = one * repeat as f64 / 1e9;
    let gweights_s = Rate::of(amount, &wall);
    let gweights_cpu_s = Rate::of(amount, &cpu);
    let bytes = weights[0].stored_bytes() as f64 / one;
    let batch = case.batch as f64;
    Measured {
        case,
        threads: engine.threads(),
        isa: engine.isa(),
        runs: wall.len(),
        gweights_s,
        gweights_cpu_s,
        gb_s: gweights_s.times(bytes),
        gfma_s: gweights_s.times(batch),
        of_bandwidth: gweights_cpu_s.best * bytes / limits.read_gb_cpu_s.best,
        of_fma: gweights_cpu_s.best * batch / limits.gfma_cpu_s.best,
    }
}

/// The weights that a case rotates through: one where warm.
fn weights(case: Case) -> Vec<Weight> {
    let Case { form, out, cols, .. } = case;
    let len = form.data_len(out, cols).expect("a shape that the form can store").max(1);
    let count = if case.cold { COLD_BYTES.div_ceil(len) } else { 1 };
    let s = Stream::new("bench.w", 1);
    let all: Vec<u8> = match form {
        Form::F32 => (0..count * len / 4).flat_map(|i| s.normal(i as u64).to_le_bytes()).collect(),
        Form::Bf16 => (0..count * len / 2)
            .flat_map(|i| numerics::bf16::to_bits(s.normal(i as u64)).to_le_bytes())
            .collect(),
        // Codes without the two NaNs: those take a slow path.
        Form::Fp8Block32 | Form::Fp8Row32 => (0..(count * len).div_ceil(8))
            .flat_map(|i| s.word(i as u64).to_le_bytes().map(|c| if c & 0x7f == 0x7f { c ^ 1 } else { c }))
            .collect(),
        Form::Exl3 => unreachable!("no case of the list is EXL3"),
        Form::Fp4Row32 => {
            (0..(count * len).div_ceil(8)).flat_map(|i| s.word(i as u64).to_le_bytes()).collect()
        }
    };
    let all = Bytes::copied(&all);
    let scales = form.scale_shape(out, cols).map_or(0, |[r, c]| r * c);
    (0..count)
        .map(|i| {
            let scale: Vec<u8> = (0..scales).map(|j| 118 + (s.word((i + j) as u64) & 3) as u8).collect();
            let data = all.slice(i * len, len).expect("range of the buffer");
            Weight::new("bench", form, out, cols, data, Bytes::copied(&scale))
                .expect("sizes follow the shape")
        })
        .collect()
}

/// Engines with one thread and with all threads of the machine (one entry where it has one).
pub fn engines(isa: Option<Isa>) -> Result<Vec<Engine>, Error> {
    let one = Engine::new(Some(1), isa)?;
    let all = Engine::new(None, isa)?;
    Ok(if all.threads() > 1 { vec![one, all] } else { vec![one] })
}

/// The cases of the standard table: the released model's widths, one row streamed from memory and a prefill block.
pub fn standard() -> Vec<Case> {
    let streamed = |form, out, cols| Case { form, out, cols, batch: 1, cold: true };
    let block = |form, out, cols| Case { form, out, cols, batch: 512, cold: false };
    vec![
        streamed(Form::Fp8Block32, 32768, 5120),
        streamed(Form::Fp8Block32, 5120, 8192),
        streamed(Form::Fp4Row32, 32768, 5120),
        streamed(Form::Fp4Row32, 2304, 5120),
        streamed(Form::Fp4Row32, 5120, 2304),
        streamed(Form::Bf16, 32768, 5120),
        streamed(Form::F32, 24, 20480),
        block(Form::Fp8Block32, 1280, 5120),
        block(Form::Fp4Row32, 2304, 5120),
        block(Form::Bf16, 512, 5120),
        block(Form::Bf16, 256, 256),
    ]
}
