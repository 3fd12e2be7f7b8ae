//! KV sources: latents of complete groups, published as main entries and index keys [§2.4, §2.5].

use checkpoint::Config;
use ops::{
    Backend, Io, Taps,
    blocks::{CompressorWeights, KeyWeights},
};

use crate::{
    Global, Model, Result, Weights,
    load::{Loader, mat, vector},
};

/// The weights of a KV source.
pub(crate) struct Source<B: Backend> {
    compressor: CompressorWeights<B>,
    keys: KeyWeights<B>,
}

impl<B: Backend> Source<B> {
    pub(crate) fn load(b: &B, ckpt: &dyn Weights, prefix: &str, c: &Config, ratio: usize) -> Result<Self> {
        let at = Loader::new(b, ckpt, prefix);
        let eps = c.rms_norm_eps;
        Ok(Self {
            compressor: CompressorWeights {
                wkv: mat(&at, "compressor.wkv")?,
                wgate: if ratio == 2 { Some(mat(&at, "compressor.wgate")?) } else { None },
                norm: vector(&at, "compressor.norm")?,
                eps,
            },
            keys: KeyWeights { wk: mat(&at, "indexer.wk")?, k_norm: vector(&at, "indexer.k_norm")?, eps },
        })
    }

    /// Value and gate projections of the rows of a ratio-2 source.
    pub(crate) fn project(&self, b: &B, x: &B::Buf, io: Io) -> (B::Buf, B::Buf) {
        let w = &self.compressor;
        let gate = w.wgate.as_ref().expect("a ratio-2 source has a gate");
        let [kv, score] = b.linear_pair(x, [&w.wkv, gate], io);
        (kv, score)
    }
}

impl<B: Backend> Model<B> {
    /// Publishes the groups that the step completes. Both forms come from the same unrotated latent; the rotation is
    /// that of the group's first token. Entries of the first `published` tokens are there already and stay as they are:
    /// the step replays those tokens for their window rows.
    pub(crate) fn publish(
        &self,
        source: &Source<B>,
        global: &mut Global<B>,
        ratio: usize,
        x: &B::Buf,
        positions: &[u32],
        published: usize,
        taps: &mut Taps<'_, B::Buf>,
    ) {
        let b = self.backend();
        let before = global.open.clone();
        let latent = b.compress(x, &source.compressor, &mut global.open);
        if ratio == 2 {
            self.keep_opened(source, global, before, x, positions);
        }
        let Some(mut latent) = latent else { return };
        let mut first = positions[0] as usize / ratio;
        let mut count = b.shape(&latent)[0];
        let known = (published / ratio).saturating_sub(first).min(count);
        if known == count {
            return;
        }
        if known > 0 {
            latent = b.slice_rows(&latent, known, count - known);
            (first, count) = (first + known, count - known);
        }
        let starts: Vec<u32> = (first..first + count).map(|j| (j * ratio) as u32).collect();
        let table = self.ropes.of(ratio);
        let caches = [&mut global.keys, &mut global.kv];
        b.publish(&latent, &source.keys, table, &starts, caches, first);
        if taps.enabled() {
            taps.put("compress_kv", &b.slice_rows(&global.kv, first, count));
            taps.put("index_k", &b.slice_rows(&global.keys, first, count));
        }
    }
}
