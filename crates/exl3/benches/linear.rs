//! Matrix times rows, one core, weights in the cache and streamed from memory: median Gweights/s and GB/s beside the read
//! bandwidth of the same run.
//!
//! `cargo bench -p exl3 --bench linear [-- FILTER]`, for example `-- mcg` or `-- Avx2`

#[path = "clock.rs"]
mod clock;

use exl3::{Arithmetic, Codebook, Isa, Linear, Rate, Rows, Trellis, rotate_input};
use std::hint::black_box;

/// More than a last-level cache's share of one virtual machine.
const STREAM: usize = 600 << 20;

fn main() {
    let filter: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let mut state = 88_172_645_463_325_252u64;
    let mut bytes = vec![0u8; STREAM];
    for word in bytes.as_chunks_mut::<8>().0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *word = state.to_le_bytes();
    }
    println!("instruction sets here: {:?}", Isa::available());
    println!("read bandwidth, one core: {:.1} GB/s", bandwidth(&bytes));
    inputs();
    for (features, columns) in [(5120, 2304), (2304, 5120)] {
        for codebook in [Codebook::Mcg, Codebook::Mul1, Codebook::ThreeInst] {
            for isa in Isa::available() {
                for bits in [2.0, 3.0, 4.0, 2.5, 6.0, 8.0] {
                    let name = format!("{features}x{columns} {} {bits} {isa:?} ", codebook.name());
                    let valid = bits != 2.5 || codebook == Codebook::Mul1;
                    if valid && filter.iter().all(|f| name.contains(f)) {
                        run(&name, &bytes, features, columns, bits, codebook, isa);
                    }
                }
            }
        }
    }
    println!("read bandwidth, one core: {:.1} GB/s", bandwidth(&bytes));
}

/// What comes before the first weight: rotation and arrangement of one row of 5120.
fn inputs() {
    let (suh, x) = (vec![0x3Cu8; 10_240], vec![0.37f32; 5120]);
    let mut xh = vec![0.0; 5120];
    let Ok(rate) = Rate::from_bits(2.0) else { return };
    let time = [Arithmetic::Exact, Arithmetic::Source].map(|arithmetic| {
        clock::best(1000, 0.1, || {
            let _ = black_box(rotate_input(black_box(&x), &suh, arithmetic, &mut xh));
        })
    });
    let arrange = clock::best(1000, 0.1, || {
        let _ = black_box(Rows::new(black_box(&xh), 5120, rate, Codebook::Mcg));
    });
    let [exact, source, arrange] = [time[0], time[1], arrange].map(|t| t * 1e6);
    println!(
        "one row of 5120: rotation {exact:.1} us (exact), {source:.1} us (source), arrangement {arrange:.1} us"
    );
}

fn bandwidth(bytes: &[u8]) -> f64 {
    let words: &[[u8; 64]] = bytes.as_chunks::<64>().0;
    let sum = |lines: &[[u8; 64]]| {
        let mut sums = [0u64; 8];
        for line in lines {
            for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*word));
            }
        }
        sums
    };
    let part = 1 << 18; // 16 MiB at a time, always another
    let mut parts = words.chunks_exact(part).cycle();
    let time = clock::best(50, 0.2, || {
        black_box(parts.next().map(sum));
    });
    (64 * part) as f64 / time * 1e-9
}

fn run(name: &str, stream: &[u8], features: usize, columns: usize, bits: f64, codebook: Codebook, isa: Isa) {
    let Ok(rate) = Rate::from_bits(bits) else { return };
    let size = features * columns / 256 * rate.tile_bytes();
    let suh = vec![0x3Cu8; 2 * features];
    let svh = vec![0x3Cu8; 2 * columns];
    let layer = |at: usize| {
        let shape = [features / 16, columns / 16, rate.words16()];
        let trellis = Trellis::new("trellis", &shape, &stream[at * size..(at + 1) * size])?;
        Linear::new("layer", trellis, &suh, &svh, codebook)
    };
    print!("{name:24}");
    let mut next = 0;
    for (count, streamed) in [(1, false), (1, true), (2, true), (4, true), (8, true), (32, true)] {
        let x: Vec<f32> = (0..count * features).map(|i| (i * 37 % 101) as f32 * 0.01 - 0.5).collect();
        let mut xh = vec![0.0; x.len()];
        let Ok(()) = rotate_input(&x, &suh, Arithmetic::Source, &mut xh) else { return };
        let Ok(rows) = Rows::with_isa(isa, &xh, features, rate, codebook) else { return };
        // Streamed: whole layers, one behind the other in memory.
        let part = if streamed { columns / 128 } else { 2 };
        let mut y = vec![0.0; count * part * 128];
        let mut times: Vec<f64> = (0..if streamed { 40 } else { 400 })
            .map(|_| {
                let Ok(layer) = layer(next) else { return f64::INFINITY };
                next = if streamed { (next + 1) % (STREAM / size) } else { 0 };
                let start = std::time::Instant::now();
                let _ = black_box(layer.multiply(&rows, 0..part, &mut y));
                start.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let time = times[times.len() / 2];
        let speed = (features * part * 128) as f64 / time * 1e-9;
        if streamed {
            print!("  {count:2} rows {speed:5.2} Gw/s");
            if count == 1 {
                print!(" {:4.2} GB/s", speed * bits / 8.0);
            } else {
                print!(" {:5.1} GMAC/s", speed * count as f64);
            }
        } else {
            print!("  {count} cached {speed:5.2}");
        }
    }
    println!();
}
