//! One layer: two sublayers around the hyper-connected streams [§0, §2.2].

use std::sync::Arc;

use checkpoint::engram::EngramTable;
use ops::{
    Backend, Taps,
    blocks::{AttentionWeights, EngramWeights, MoeWeights, SublayerWeights},
};

use crate::{Model, Result, State, Step, compressor::Source, indexer::Indexer};

/// The weights of one layer.
pub(crate) struct Layer<B: Backend> {
    pub engram: Option<Engram<B>>,
    pub attn_in: SublayerWeights<B>,
    pub attention: AttentionWeights<B>,
    pub source: Option<Source<B>>,
    pub indexer: Option<Indexer<B>>,
    pub ffn_in: SublayerWeights<B>,
    pub moe: MoeWeights<B>,
}

/// An Engram layer's weights and its place among the Engram layers.
pub(crate) struct Engram<B: Backend> {
    pub index: usize,
    pub weights: EngramWeights<B>,
    /// Where rows are taken from, if not from the weights' own table.
    pub table: Option<Arc<dyn EngramTable>>,
}

impl<B: Backend> Model<B> {
    /// Attention with the carried `pre`, experts with attention's; hands on the experts' `pre`.
    pub(crate) fn layer(
        &self,
        layer: &Layer<B>,
        l: usize,
        streams: B::Buf,
        pre: B::Buf,
        state: &mut State<B>,
        step: &mut Step<'_, B>,
        taps: &mut Taps<'_, B::Buf>,
    ) -> Result<(B::Buf, B::Buf)> {
        let b = self.backend();
        let (mix, x) = b.sublayer_input(&streams, &pre, &layer.attn_in, taps);
        taps.put("attn_in", &x);
        let y = self.attention(layer, l, &x, state, step, taps)?;
        taps.put("attn_out", &y);
        let streams = b.hc_expand(&streams, &y, &mix);

        let (next, x) = b.sublayer_input(&streams, &mix.pre, &layer.ffn_in, taps);
        taps.put("ffn_in", &x);
        let y = b.moe(&x, &layer.moe, step.image, taps);
        taps.put("ffn_out", &y);
        Ok((b.hc_expand(&streams, &y, &next), next.pre))
    }
}
