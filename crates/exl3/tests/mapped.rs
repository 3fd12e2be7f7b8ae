//! Weights that end where a mapping ends: nothing may be read past a trellis.

#![cfg(unix)]

use exl3::{Arithmetic, BLOCK, Codebook, Isa, Linear, Rate, Rows, Trellis, reference, row_major};
use std::io::Write;

/// The file ends one page before its mapping does: touching that page is a bus error.
#[test]
fn nothing_is_read_past_the_end_of_the_file() {
    const PAGE: usize = 16_384; // covers 4 KiB and 16 KiB systems
    let suh = [0x00, 0x3C].repeat(128);
    for rate in Rate::ALL {
        let shape = [8, 8, rate.words16()];
        let size = 64 * rate.tile_bytes();
        let mut file = tempfile::tempfile().unwrap();
        let pages = size.next_multiple_of(PAGE);
        let bytes: Vec<u8> = (0..pages).map(|i| (i * 167 + i / 251) as u8).collect();
        file.write_all(&bytes).unwrap();
        // SAFETY: nobody else has the file.
        let map = unsafe { memmap2::MmapOptions::new().len(pages + PAGE).map(&file) }.unwrap();
        let trellis = Trellis::new("mapped", &shape, &map[pages - size..pages]).unwrap();
        let layer = Linear::new("mapped", trellis, &suh, &suh, Codebook::Mul1).unwrap();
        for count in [1, 2, 9, 33] {
            let x: Vec<f32> = (0..128 * count).map(|i| (i % 13) as f32 - 6.0).collect();
            let want = reference::linear(&layer, &x, Arithmetic::Exact).unwrap();
            let mut xh = vec![0.0; x.len()];
            exl3::rotate_input(&x, &suh, Arithmetic::Exact, &mut xh).unwrap();
            for isa in Isa::available() {
                let rows = Rows::with_isa(isa, &xh, BLOCK, rate, Codebook::Mul1).unwrap();
                let mut y = vec![0.0; want.len()];
                layer.multiply(&rows, 0..1, &mut y).unwrap();
                let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
                let near = |(got, want): (&f32, &f32)| (got - want).abs() < 2e-6 * largest; // f32 sums of 128 products
                assert!(row_major(&y, count).iter().zip(&want).all(near), "{rate} {isa:?} {count}");
            }
        }
    }
}
