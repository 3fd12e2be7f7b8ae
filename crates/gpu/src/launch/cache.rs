//! The caches.

use numerics::quantise::{fp4_row_bytes, fp8_row_bytes, kv_row_bytes};

use crate::{Buf, Device, Gpu, pool::Writer, record::u32_of};

#[repr(C)]
struct Params {
    width: u32,
    first: u32,
    slots: u32,
}

/// Threads of a threadgroup that quantises: few, because a thread takes a whole block.
const QUANTISERS: usize = 32;

impl<D: Device> Gpu<D> {
    /// Window rows of `kv`.
    pub(crate) fn window_codes(&self, kv: &Buf<D>) -> Buf<D> {
        let codes = self.codes(&[kv.rows(), fp8_row_bytes(kv.width())]);
        self.quantise_rows("store_window", kv, &codes, 0, 32);
        codes
    }

    /// The index queries through their format.
    pub(crate) fn quantised_query(&self, q: &Buf<D>) -> Buf<D> {
        let y = self.values(q.shape());
        self.quantise_rows("quantise_query", q, &y, 0, 32);
        y
    }

    fn quantise_rows(&self, kernel: &'static str, x: &Buf<D>, to: &Buf<D>, first: usize, block: usize) {
        let params = Params { width: u32_of(x.width()), first: u32_of(first), slots: 0 };
        let grid = [x.width().div_ceil(block).div_ceil(QUANTISERS), x.rows(), 1];
        self.launch(kernel, &[], &[x.binding(), to.binding()], &params, grid, [QUANTISERS, 1, 1]);
    }

    /// Makes sure that nobody else sees what is written to `cache` next.
    pub(crate) fn own(&self, cache: &mut Buf<D>) {
        if std::sync::Arc::strong_count(&cache.storage) > 1 || cache.storage.writer == Writer::Host {
            let own = self.cache_like(cache);
            self.copy_all(cache, &own);
            *cache = own;
        }
    }

    /// Row t of `codes` to slot positions[t] mod slots.
    pub(crate) fn write_ring(&self, ring: &mut Buf<D>, codes: &Buf<D>, positions: &[u32]) {
        let width = ring.width();
        assert_eq!((codes.width(), codes.rows()), (width, positions.len()), "rows of a ring");
        self.own(ring);
        let words = self.words(positions);
        if self.keep_with_values(ring, codes, &words) {
            return;
        }
        let params = Params { width: u32_of(width), first: 0, slots: u32_of(ring.rows()) };
        let bindings = [codes.binding(), words.binding(), ring.binding()];
        let grid = [width.div_ceil(256), positions.len(), 1];
        self.launch("ring_write", &[], &bindings, &params, grid, [256, 1, 1]);
    }

    fn publish(
        &self,
        kernel: &'static str,
        cache: &mut Buf<D>,
        x: &Buf<D>,
        first: usize,
        [row, block]: [usize; 2],
    ) {
        let (rows, all) = (x.rows(), cache.rows());
        assert!(first + rows <= all, "entries {first}+{rows} of a cache of {all}");
        assert_eq!(cache.width(), row, "bytes of an entry");
        self.own(cache);
        self.quantise_rows(kernel, x, cache, first, block);
    }

    /// Compressed entries first...
    pub(crate) fn publish_entries(&self, cache: &mut Buf<D>, latent: &Buf<D>, first: usize) {
        self.publish("publish_kv", cache, latent, first, [kv_row_bytes(latent.width()), 16]);
    }

    /// Index keys first...
    pub(crate) fn publish_keys(&self, cache: &mut Buf<D>, key: &Buf<D>, first: usize) {
        self.publish("publish_key", cache, key, first, [fp4_row_bytes(key.width()), 32]);
    }

    /// Rows of a tensor; those of a cache are copied, so that later writes need not copy the cache.
    pub(crate) fn sliced(&self, x: &Buf<D>, start: usize, count: usize) -> Buf<D> {
        let part = x.rows_at(start, count);
        if x.storage.writer != Writer::Cache {
            return part;
        }
        let own = self.codes(part.shape());
        self.copy_all(&part, &own);
        own
    }
}
