//! EXL3: layers and experts of the released widths straight from the trellis, and the speed of the encoder.

use std::cell::Cell;

use checkpoint::{Bytes, Exl3, Weight};
use exl3::{Arithmetic, Codebook, Rate as Bits, encode::Encoder};
use numerics::generator::Stream;
use ops::{Backend, DeviceError, ExpertWeights, Host, Mode, Routing};
use serde::Serialize;

use super::{COLD_BYTES, Limits, Rate, time};
use crate::{Cpu, Error, Isa, Job};

/// Model width and width of an expert.
const WIDTHS: [usize; 2] = [5120, 2304];
/// Experts of a measured layer, and how many of them a token takes.
const EXPERTS: [usize; 2] = [16, 6];
/// Weights of the released model's routed experts: 40 layers of 384 with three matrices.
pub const ROUTED_WEIGHTS: u64 = 40 * 384 * 3 * (WIDTHS[0] * WIDTHS[1]) as u64;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// A layer of so many outputs and inputs.
    Layer {
        /// Output features.
        out: usize,
        /// Input features.
        cols: usize,
    },
    /// A token's 6 of 16 experts with all that lies between their products.
    Experts,
}

/// One measurement.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Case {
    /// Layer or experts.
    pub what: What,
    /// Codebook.
    #[serde(serialize_with = "codebook_name")]
    pub codebook: Codebook,
    /// Bits per weight.
    pub bits: f64,
    /// Activation rows, which share the decoding.
    pub rows: usize,
}

fn codebook_name<S: serde::Serializer>(codebook: &Codebook, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(codebook.name())
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
    /// 10^9 weights per second of wall time; each weight counts once whatever the rows.
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

/// Random bytes, which are a valid trellis; measurements walk on through them, so that each streams from memory.
pub struct Store {
    bytes: Bytes,
    scales: Bytes,
    next: Cell<usize>,
}

impl Store {
    /// [`COLD_BYTES`] of them.
    #[allow(clippy::new_without_default)] // half a gigabyte is no default
    pub fn new() -> Self {
        let s = Stream::new("bench.exl3", 1);
        let bytes: Vec<u8> = (0..COLD_BYTES as u64 / 8).flat_map(|i| s.word(i).to_le_bytes()).collect();
        // fp16 numbers of magnitude 0.5 to 1 / 64 and random sign.
        let half =
            |i: u64| ((s.word(i) % 0x1400 + 0x2400) as u16 | (s.word(i) >> 48) as u16 & 0x8000).to_le_bytes();
        let scales: Vec<u8> = (0..WIDTHS[0] as u64).flat_map(half).collect();
        Self { bytes: Bytes::copied(&bytes), scales: Bytes::copied(&scales), next: Cell::new(0) }
    }

    fn weight(&self, out: usize, cols: usize, bits: Bits, codebook: Codebook) -> Weight {
        let size = out * cols / 256 * bits.tile_bytes();
        let start = if self.next.get() + size > self.bytes.len() { 0 } else { self.next.get() };
        self.next.set(start + size);
        let take =
            |bytes: &Bytes, start, len| bytes.slice(start, len).expect("a layer is smaller than the store");
        let (trellis, suh, svh) =
            (take(&self.bytes, start, size), take(&self.scales, 0, 2 * cols), take(&self.scales, 0, 2 * out));
        let shape = [cols / 16, out / 16, bits.words16()];
        let layer = Exl3::new("bench", out, cols, shape, codebook, trellis, suh, svh).expect("whole blocks");
        Weight::exl3("bench", vec![layer]).expect("one layer")
    }
}

/// Backends with one thread and with all threads of the machine (one entry where it has one).
///
/// # Errors
/// An instruction set that the machine lacks.
pub fn backends(isa: Option<Isa>) -> Result<Vec<Cpu>, Error> {
    let one = Cpu::new(Mode::Native, Some(1), isa)?;
    let all = Cpu::new(Mode::Native, None, isa)?;
    Ok(if all.engine().threads() > 1 { vec![one, all] } else { vec![one] })
}

/// The cases of the standard table.
pub fn standard() -> Vec<Case> {
    let [d, inter] = WIDTHS;
    let shapes = [
        (What::Layer { out: inter, cols: d }, &[1, 2, 3, 4, 5, 6, 7, 8][..]),
        (What::Layer { out: d, cols: inter }, &[1, 2, 4, 8]),
        (What::Experts, &[1, 2, 4, 8]),
    ];
    let mut cases = Vec::new();
    for codebook in [Codebook::Mcg, Codebook::Mul1] {
        for bits in [2.0, 3.0, 4.0] {
            for (what, rows) in shapes {
                cases.extend(rows.iter().map(|rows| Case { what, codebook, bits, rows: *rows }));
            }
        }
    }
    cases
}

/// Measures one case with at least `runs` runs. `limits` are those of the same instruction set and threads.
///
/// # Errors
/// What the backend reports.
pub fn measure(
    cpu: &Cpu,
    store: &Store,
    case: Case,
    limits: &Limits,
    runs: usize,
) -> Result<Measured, DeviceError> {
    let Case { what, codebook, bits, rows } = case;
    let bits = Bits::from_bits(bits).expect("a rate of the format");
    let engine = cpu.engine();
    let s = Stream::new("bench.x", 2);
    let several = engine.threads() > 1;
    let width = if let What::Layer { cols, .. } = what { cols } else { WIDTHS[0] };
    let x: Vec<f32> = (0..rows * width).map(|i| s.normal(i as u64)).collect();
    let (weights, stored, (wall, cpu_time)) = match what {
        What::Layer { out, cols } => {
            // Short runs: more of them.
            let runs = 4 * runs;
            let weights: Vec<Weight> = (0..=runs).map(|_| store.weight(out, cols, bits, codebook)).collect();
            let mut y = vec![0.0; rows * out];
            let times = time(runs, several, |i| {
                engine.run_any(vec![Job { weight: &weights[i], x: &x, rows, y: &mut y }], Arithmetic::Exact);
            });
            (out * cols, weights[0].stored_bytes(), times)
        }
        What::Experts => {
            let [stored, top] = EXPERTS;
            let [d, inter] = WIDTHS;
            let expert = || ExpertWeights {
                gate: store.weight(inter, d, bits, codebook),
                up: store.weight(inter, d, bits, codebook),
                down: store.weight(d, inter, bits, codebook),
            };
            let one = expert();
            let one = [&one.gate, &one.up, &one.down].map(Weight::stored_bytes).iter().sum::<u64>();
            let layers = COLD_BYTES / (stored * one as usize);
            let layers: Vec<_> = (0..layers.max(1))
                .map(|_| cpu.load_experts((0..stored).map(|_| expert()).collect()))
                .collect::<Result<_, _>>()?;
            let x = Host::f32(&[rows, d], x);
            let times = time(runs, several, |i| {
                // Every token takes others, and every run again others.
                let first = top * (i / layers.len());
                let ids = (0..rows * top).map(|c| ((first + c) % stored) as i32).collect();
                let routing = Routing {
                    experts: Host::i32(&[rows, top], ids),
                    weights: Host::f32(&[rows, top], vec![0.25; rows * top]),
                };
                cpu.routed_experts(&x, &routing, &layers[i % layers.len()], 10.0);
            });
            let taken = stored.min(rows * top);
            (taken * 3 * d * inter, taken as u64 * one, times)
        }
    };
    let amount = weights as f64 / 1e9;
    let (gweights_s, gweights_cpu_s) = (Rate::of(amount, &wall), Rate::of(amount, &cpu_time));
    let bytes = stored as f64 / weights as f64;
    // Of the experts every token multiplies its six.
    let products = match what {
        What::Layer { .. } => rows as f64,
        What::Experts => (rows * EXPERTS[1] * 3 * WIDTHS[0] * WIDTHS[1]) as f64 / weights as f64,
    };
    Ok(Measured {
        case,
        threads: engine.threads(),
        isa: engine.isa(),
        runs: wall.len(),
        gweights_s,
        gweights_cpu_s,
        gb_s: gweights_s.times(bytes),
        gfma_s: gweights_s.times(products),
        of_bandwidth: gweights_cpu_s.best * bytes / limits.read_gb_cpu_s.best,
        of_fma: gweights_cpu_s.best * products / limits.gfma_cpu_s.best,
    })
}

/// Speed of the encoder's trellis search.
#[derive(Clone, Debug, Serialize)]
pub struct Encoding {
    /// Codebook.
    #[serde(serialize_with = "codebook_name")]
    pub codebook: Codebook,
    /// Bits per weight.
    pub bits: f64,
    /// Threads.
    pub threads: usize,
    /// Tiles of 256 weights per second of wall time, of all threads together.
    pub tiles_s: Rate,
    /// Hours for the released model's routed experts by cores, at this speed a core: the search alone, nearly all of the
    /// time of an encoder.
    pub hours: Vec<(usize, f64)>,
}

/// The encoder settings of the standard table.
pub fn encoders() -> Vec<(Codebook, f64)> {
    [Codebook::Mcg, Codebook::Mul1].into_iter().flat_map(|c| [2.0, 3.0, 4.0].map(|bits| (c, bits))).collect()
}

/// Measures the trellis search with the settings of `quantize` on all threads of `cpu`. It takes the machine's best
/// instruction set, whatever `cpu` has.
pub fn encoder(cpu: &Cpu, codebook: Codebook, bits: f64, runs: usize) -> Encoding {
    let rate = Bits::from_bits(bits).expect("a rate of the format");
    let search = Encoder::new(rate, codebook).search();
    let s = Stream::new("bench.tiles", 3);
    let tiles: Vec<[f32; 256]> =
        (0..2).map(|t| std::array::from_fn(|i| s.normal((256 * t + i) as u64))).collect();
    let threads = cpu.engine().threads();
    // Pairs of tiles a thread searches in one run.
    const PAIRS: usize = 8;
    let (wall, _) = time(runs, threads > 1, |_| {
        cpu.engine().par_rows(threads, |_| {
            let mut scratch = search.scratch();
            for _ in 0..PAIRS {
                std::hint::black_box(search.pair([&tiles[0], &tiles[1]], &mut scratch));
            }
        });
    });
    let tiles_s = Rate::of((2 * PAIRS * threads) as f64, &wall);
    let a_core = tiles_s.median / threads as f64;
    let hours = |cores: usize| ROUTED_WEIGHTS as f64 / 256.0 / a_core / cores as f64 / 3600.0;
    let hours = [1, 2, 8, 16, 32, 64, 128].map(|cores| (cores, hours(cores))).to_vec();
    Encoding { codebook, bits, threads, tiles_s, hours }
}
