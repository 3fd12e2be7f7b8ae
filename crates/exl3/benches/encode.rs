//! Encoder: tiles per second of the trellis search on one core, and the whole pipeline on all.
//!
//! `cargo bench -p exl3 --bench encode`

#[path = "clock.rs"]
mod clock;

use exl3::encode::{Calibration, Encoder, Search, SearchCosts, signs};
use exl3::{Codebook, Isa, Rate};
use std::time::Instant;

/// Roughly normal numbers.
fn noise(count: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count).map(|_| 2.0 * (next() + next() + next())).collect()
}

fn main() {
    println!("instruction sets here: {:?}", Isa::available());
    println!("trellis search, one core, tiles/s (hours per 1e9 weights)");
    let data = noise(512);
    let (tiles, _) = data.as_chunks::<256>();
    for (costs, name) in [(SearchCosts::Single, "f32"), (SearchCosts::Half, "fp16")] {
        for bits in [1.0, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0] {
            for context in [128, 32] {
                let Ok(rate) = Rate::from_bits(bits) else { continue };
                let search = Search::new(rate, Codebook::Mul1, costs, context);
                let mut scratch = search.scratch();
                let time = clock::best(10, 0.2, || {
                    std::hint::black_box(search.pair([&tiles[0], &tiles[1]], &mut scratch));
                });
                let rate = 2.0 / time;
                println!(
                    "  {name:5} {bits:3} bits, context {context:3}: {rate:6.0}  ({:.2})",
                    1e9 / 256.0 / rate / 3600.0
                );
            }
        }
    }
    let (rows, columns) = (1024, 1024);
    let w = noise(rows * columns);
    // A covariance with correlated neighbours.
    let hessian: Vec<f32> =
        (0..rows * rows).map(|i| 0.9f32.powi((i / rows).abs_diff(i % rows) as i32)).collect();
    let start = Instant::now();
    let Ok(calibration) = Calibration::new(&hessian, rows, 1) else { return };
    println!("factor of a {rows} x {rows} Hessian: {:.2} s wall", start.elapsed().as_secs_f64());
    if let Ok(rate) = Rate::from_bits(2.0) {
        let encoder = Encoder::new(rate, Codebook::Mul1);
        let start = Instant::now();
        if let Ok(encoded) = encoder.encode(&w, &calibration, &signs(1, columns)) {
            println!(
                "{rows} x {columns} at 2 bits: {:.2} s wall on {} threads, proxy error {:.5}",
                start.elapsed().as_secs_f64(),
                std::thread::available_parallelism().map_or(1, |n| n.get()),
                encoded.proxy_error
            );
        }
    }
}
