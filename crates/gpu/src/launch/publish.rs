//! What a KV source publishes.

use numerics::quantise::{fp4_row_bytes, kv_row_bytes};
use ops::{
    Io, RopeTable,
    blocks::{self, CompressorWeights, KeyWeights, OpenGroup},
};

use super::norm::norm_threads;
use crate::{Buf, Device, Gpu, record::u32_of};

/// Most values of a row, as in publish.metal.
const DIM: usize = 512;
/// Threads of a row.
const THREADS: usize = 256;

#[repr(C)]
struct PairsParams {
    width: u32,
    open: u32,
    part: f32,
    eps: f32,
}

#[repr(C)]
struct PublishParams {
    width: u32,
    key_width: u32,
    turned: u32,
    first: u32,
    key_part: f32,
    eps: f32,
}

impl<D: Device> Gpu<D> {
    /// Latents of the groups that `x` completes: of pairs in two launches, the open row where it lies.
    pub(crate) fn compressed(
        &self,
        x: &Buf<D>,
        w: &CompressorWeights<Self>,
        open: &mut Option<OpenGroup<Buf<D>>>,
    ) -> Option<Buf<D>> {
        let width = w.norm.len();
        let Some(gate) = w.wgate.as_ref().filter(|_| norm_threads(width) == THREADS) else {
            return blocks::compress(self, x, w, open);
        };
        let [kv, score] = self.linear_both(x, [&w.wkv, gate], Io::F32);
        let before = open.take();
        let rows = x.rows() + usize::from(before.is_some());
        if rows % 2 == 1 {
            let last = |t: &Buf<D>| t.rows_at(x.rows() - 1, 1);
            *open = Some(OpenGroup { kv: last(&kv), score: last(&score) });
        }
        if rows < 2 {
            return None;
        }
        let latent = self.values(&[rows / 2, width]);
        let params = PairsParams {
            width: u32_of(width),
            open: before.is_some().into(),
            part: 1.0 / width as f32,
            eps: w.eps,
        };
        let (open_kv, open_score) = before.as_ref().map_or((&kv, &score), |o| (&o.kv, &o.score));
        let bindings = [open_kv, open_score, &kv, &score, &w.norm, &latent].map(Buf::binding);
        let grid = [rows / 2, 1, 1];
        self.launch("pool_normed", &[self.rounding()], &bindings, &params, grid, [THREADS, 1, 1]);
        Some(latent)
    }

    /// Index key and entry of every latent, from `first` on: two launches.
    pub(crate) fn published(
        &self,
        latent: &Buf<D>,
        w: &KeyWeights<Self>,
        table: &RopeTable,
        positions: &[u32],
        [keys, entries]: [&mut Buf<D>; 2],
        first: usize,
    ) {
        let (rows, width, key_width) = (latent.rows(), latent.width(), w.k_norm.len());
        let fits = |n: usize| n <= DIM && n >= table.dim() && n.is_multiple_of(2);
        if !fits(width) || !fits(key_width) {
            return blocks::publish(self, latent, w, table, positions, [keys, entries], first);
        }
        assert_eq!(positions.len(), rows, "positions of latents");
        for (cache, row) in [(&*keys, fp4_row_bytes(key_width)), (&*entries, kv_row_bytes(width))] {
            let all = cache.rows();
            assert!(first + rows <= all, "entries {first}+{rows} of a cache of {all}");
            assert_eq!(cache.width(), row, "bytes of an entry");
        }
        let key = self.linear_any(latent, &w.wk, Io::Bf16);
        self.own(keys);
        self.own(entries);
        let params = PublishParams {
            width: u32_of(width),
            key_width: u32_of(key_width),
            turned: u32_of(table.dim() / 2),
            first: u32_of(first),
            key_part: 1.0 / key_width as f32,
            eps: w.eps,
        };
        let turns = self.turns(table, positions);
        let bindings = [latent, &key, &w.k_norm, &turns, entries, keys].map(|b: &Buf<D>| b.binding());
        self.launch("publish_rows", &[self.rounding()], &bindings, &params, [2, rows, 1], [THREADS, 1, 1]);
    }
}
