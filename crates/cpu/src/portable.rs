//! Kernels in plain Rust. On a machine with fused multiply-add and vectors of its own they compile to these.

use crate::{
    kernels::{Kernels, Tile},
    order::{self, LANES, Layout, View},
};

pub(crate) const KERNELS: Kernels =
    Kernels { tile_rows: [2, 2], pack, decode, tile, reduce, gemv: None, read, spin, spin_fma: SPIN };

fn pack(x: &[f32], layout: Layout, out: &mut [f32]) -> bool {
    order::pack_row(x, layout, out)
}

fn decode(v: &View, r: usize, k0: usize, out: &mut [f32]) {
    v.decode(r, k0, out);
}

unsafe fn tile(t: &Tile, m: usize, n: usize) {
    for i in 0..m {
        for j in 0..n {
            // SAFETY: the caller gives `m` and `n` rows of `steps` lines and 16 lanes per output.
            unsafe {
                let lanes = &mut *t.acc.add(i * t.acc_stride + j * LANES).cast::<[f32; LANES]>();
                let mut acc = if t.first { [0.0; LANES] } else { *lanes };
                for s in 0..t.steps {
                    let x = &*t.x.add(i * t.x_stride + s * LANES).cast::<[f32; LANES]>();
                    let w = &*t.w.add(j * t.w_stride + s * LANES).cast::<[f32; LANES]>();
                    for l in 0..LANES {
                        acc[l] = w[l].mul_add(x[l], acc[l]);
                    }
                }
                *lanes = acc;
            }
        }
    }
}

unsafe fn reduce(acc: *const f32, out: &mut [f32]) {
    for (j, y) in out.iter_mut().enumerate() {
        // SAFETY: the caller gives 16 lanes per output.
        *y = order::reduce(unsafe { &*acc.add(j * LANES).cast::<[f32; LANES]>() });
    }
}

/// Sum of all words, in eight independent parts.
#[inline(always)]
pub(crate) fn read(data: &[u64]) -> u64 {
    let mut sums = [0u64; 32];
    for chunk in data.chunks_exact(32) {
        for (s, v) in sums.iter_mut().zip(chunk) {
            *s = s.wrapping_add(*v);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

const SPIN: usize = 64;

fn spin(rounds: usize) -> f32 {
    let mut sums = [1.0f32; SPIN];
    let (a, b) = std::hint::black_box((0.999_f32, 0.001_f32));
    for _ in 0..rounds {
        for s in &mut sums {
            *s = s.mul_add(a, b);
        }
    }
    sums.iter().sum()
}
