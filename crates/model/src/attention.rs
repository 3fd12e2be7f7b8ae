//! Attention of a layer: own query and window, the KV source's entries, the index source's choice [§2.3–2.7].

use checkpoint::Config;
use ops::{Backend, Compressed, Taps, Window, blocks::AttentionWeights};

use crate::{
    Model, Result, State, Step, Weights,
    layer::Layer,
    load::{Loader, mat, vector},
};

pub(crate) fn load<B: Backend>(
    b: &B,
    ckpt: &dyn Weights,
    prefix: &str,
    c: &Config,
) -> Result<AttentionWeights<B>> {
    let at = Loader::new(b, ckpt, prefix);
    Ok(AttentionWeights {
        wq_a: mat(&at, "wq_a")?,
        q_norm: vector(&at, "q_norm")?,
        wq_b: mat(&at, "wq_b")?,
        wkv: mat(&at, "wkv")?,
        kv_norm: vector(&at, "kv_norm")?,
        sinks: vector(&at, "attn_sink")?,
        wo_a: mat(&at, "wo_a")?,
        wo_b: mat(&at, "wo_b")?,
        head_dim: c.head_dim,
        groups: c.o_groups,
        eps: c.rms_norm_eps,
    })
}

impl<B: Backend> Model<B> {
    pub(crate) fn attention(
        &self,
        layer: &Layer<B>,
        l: usize,
        x: &B::Buf,
        state: &mut State<B>,
        step: &mut Step<'_, B>,
        taps: &mut Taps<'_, B::Buf>,
    ) -> Result<B::Buf> {
        let b = self.backend();
        let plan = self.config().layer(l);
        let table = self.ropes.of(plan.ratio);
        let positions = step.positions;
        let own = b.attention_input(x, &layer.attention, table, positions);
        taps.put("window_kv", &own.codes);
        if let (Some(source), Some(global)) = (&layer.source, &mut state.globals[l]) {
            self.publish(source, global, plan.ratio, x, positions, state.published, taps);
        }
        if let Some(indexer) = &layer.indexer {
            self.select(indexer, l, x, &own.latent, state, step, taps)?;
        }
        let topk = plan.index_source.and_then(|s| step.selection.of(s));
        if let Some(topk) = topk {
            taps.put("topk", topk);
        }
        let global = plan.kv_source.and_then(|s| state.globals[s].as_ref());
        let compressed = match (global, topk) {
            (Some(global), Some(topk)) => Some(Compressed { cache: &global.kv, topk }),
            _ => None,
        };
        // Positions decide here which rows a window has, nothing else; counted from the first that exists for the step.
        let columns: Vec<u32> = positions.iter().map(|p| p - step.origin).collect();
        let window = Window {
            ring: &state.windows[l],
            fresh: &own.codes,
            base: columns[0],
            size: self.config().sliding_window,
        };
        let o = b.sparse_attention(&own.q, &window, compressed.as_ref(), &layer.attention.sinks, &columns);
        self.remember(&mut state.windows[l], &own.codes, positions);
        Ok(b.attention_output(&o, &layer.attention, table, positions))
    }

    /// Writes the rows that the ring still has room for: of a long step only the last.
    pub(crate) fn remember(&self, ring: &mut B::Buf, codes: &B::Buf, positions: &[u32]) {
        let b = self.backend();
        let slots = b.shape(ring)[0];
        let skip = positions.len().saturating_sub(slots);
        if skip == 0 {
            b.ring_write(ring, codes, positions);
        } else {
            b.ring_write(ring, &b.slice_rows(codes, skip, slots), &positions[skip..]);
        }
    }
}
