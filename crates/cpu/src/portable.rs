//! Kernels in plain Rust. On a machine with fused multiply-add and vectors of its own they compile to these.

use crate::{
    body,
    kernels::{Kernels, Tile, Values},
    order::{self, LANES, View},
};

pub(crate) const KERNELS: Kernels = Kernels {
    tile_rows: [2, 2],
    pack,
    decode,
    tile,
    reduce,
    gemv: None,
    value_rows: [1, 4],
    values,
    load_fp8,
    load_kv,
    load_fp4,
    softmax,
    combine,
    dot,
    axpy,
    read,
    spin,
    spin_fma: SPIN,
};

body::kernels!();

fn decode(v: &View, r: usize, k0: usize, kn: usize, out: &mut [f32]) {
    body::decode(v, r, k0, kn, out);
}

unsafe fn tile(t: &Tile, m: usize, n: usize) {
    // SAFETY: the caller gives `m` and `n` rows of `steps` lines and 16 lanes per output.
    unsafe {
        match (m, n) {
            (2, 2) => tile_mn::<2, 2>(t),
            (1, 2) => tile_mn::<1, 2>(t),
            (2, 1) => tile_mn::<2, 1>(t),
            _ => tile_mn::<1, 1>(t),
        }
    }
}

#[inline(always)]
unsafe fn tile_mn<const M: usize, const N: usize>(t: &Tile) {
    // SAFETY: as for `tile`.
    unsafe {
        let at = |i, j| t.acc.add(i * t.acc_stride + j * LANES).cast::<[f32; LANES]>();
        let mut acc: [[[f32; LANES]; N]; M] =
            std::array::from_fn(|i| std::array::from_fn(|j| if t.first { [0.0; LANES] } else { *at(i, j) }));
        for s in 0..t.steps {
            for i in 0..M {
                let x = &*t.x.add(i * t.x_stride + s * LANES).cast::<[f32; LANES]>();
                for j in 0..N {
                    let w = &*t.w.add(j * t.w_stride + s * LANES).cast::<[f32; LANES]>();
                    for l in 0..LANES {
                        acc[i][j][l] = w[l].mul_add(x[l], acc[i][j][l]);
                    }
                }
            }
        }
        for i in 0..M {
            for j in 0..N {
                *at(i, j) = acc[i][j];
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

unsafe fn values(t: &Values, m: usize, n: usize) {
    // SAFETY: the caller's promise is the same.
    unsafe { body::values(t, m, n) };
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
