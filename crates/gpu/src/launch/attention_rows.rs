//! What attention needs of its own rows, behind the first two projections.

use numerics::quantise::fp8_row_bytes;
use ops::{
    Io, RopeTable,
    blocks::{AttentionInput, AttentionWeights},
};

use super::norm::norm_threads;
use crate::{Buf, Device, Gpu, record::u32_of};

/// Most values of a window row, as in attention_rows.metal.
const DIM: usize = 512;
/// Threads of a row.
const THREADS: usize = 256;

#[repr(C)]
struct Params {
    rank: u32,
    width: u32,
    turned: u32,
    rank_part: f32,
    width_part: f32,
    eps: f32,
}

impl<D: Device> Gpu<D> {
    /// Query, query latent and stored window rows: three launches where the forms of the weights allow it.
    pub(crate) fn attention_entered(
        &self,
        x: &Buf<D>,
        w: &AttentionWeights<Self>,
        table: &RopeTable,
        positions: &[u32],
    ) -> AttentionInput<Buf<D>> {
        let [raw, kv] = self.linear_both(x, [&w.wq_a, &w.wkv], Io::Fp8);
        let (rows, rank, width) = (x.rows(), raw.width(), kv.width());
        let alike = [rank, width].iter().all(|n| norm_threads(*n) == THREADS);
        let (latent, codes) = if alike && width <= DIM && table.dim() <= width {
            let (latent, codes) = (self.values(raw.shape()), self.codes(&[rows, fp8_row_bytes(width)]));
            let params = Params {
                rank: u32_of(rank),
                width: u32_of(width),
                turned: u32_of(table.dim() / 2),
                rank_part: 1.0 / rank as f32,
                width_part: 1.0 / width as f32,
                eps: w.eps,
            };
            let turns = self.turns(table, positions);
            let bindings = [&raw, &w.q_norm, &latent, &kv, &w.kv_norm, &turns, &codes].map(Buf::binding);
            let grid = [2, rows, 1];
            self.launch("attention_rows", &[self.rounding()], &bindings, &params, grid, [THREADS, 1, 1]);
            (latent, codes)
        } else {
            let latent = self.rmsnorm_rows(&raw, &w.q_norm, w.eps);
            let kv = self.rmsnorm_rows(&kv, &w.kv_norm, w.eps);
            (latent, self.window_codes(&self.rope_rows(&kv, w.head_dim, table, positions, false)))
        };
        let q = self.linear_turned(&latent, &w.wq_b, Io::Fp8, w.head_dim, table, positions);
        AttentionInput { latent, q, codes }
    }
}
