//! The DSpark draft head: features of three layers, three stages, a Markov bias [§4].

use checkpoint::Config;
use ops::{
    Backend, Host, Io, Taps,
    blocks::{AttentionWeights, MoeWeights, SublayerWeights},
};

use crate::{
    Model, Result, State, Weights, attention, hyper,
    load::{Loader, mat, vector},
    moe,
};

/// The weights of the draft head.
pub(crate) struct DraftWeights<B: Backend> {
    main_proj: B::Mat,
    main_norm: B::Buf,
    stages: Vec<Stage<B>>,
    norm: B::Buf,
    markov_embed: B::Mat,
    markov_head: B::Mat,
    confidence: B::Mat,
}

struct Stage<B: Backend> {
    attn_in: SublayerWeights<B>,
    attention: AttentionWeights<B>,
    ffn_in: SublayerWeights<B>,
    moe: MoeWeights<B>,
}

/// Window rings of the draft stages.
pub struct DraftState<B: Backend> {
    pub(crate) rings: Vec<B::Buf>,
}

impl<B: Backend> Clone for DraftState<B> {
    fn clone(&self) -> Self {
        Self { rings: self.rings.clone() }
    }
}

/// A drafted block.
#[derive(Clone, Debug)]
pub struct Draft {
    /// Drafted tokens, for the positions after the one that follows the state.
    pub ids: Vec<u32>,
    /// Logits `[drafted, V]`, Markov bias included.
    pub logits: Host,
    /// Raw confidence of each token; its sigmoid estimates the chance of acceptance.
    pub confidence: Vec<f32>,
}

pub(crate) fn load<B: Backend>(b: &B, ckpt: &dyn Weights, c: &Config) -> Result<DraftWeights<B>> {
    let last = c.dspark.stages - 1;
    let mut stages = Vec::with_capacity(c.dspark.stages);
    for s in 0..c.dspark.stages {
        let prefix = format!("mtp.{s}.");
        stages.push(Stage {
            attn_in: hyper::load(b, ckpt, &prefix, "attn", c)?,
            attention: attention::load(b, ckpt, &format!("{prefix}attn."), c)?,
            ffn_in: hyper::load(b, ckpt, &prefix, "ffn", c)?,
            moe: moe::load(
                b,
                ckpt,
                &format!("{prefix}ffn."),
                c,
                c.dspark.n_routed_experts,
                c.dspark.num_experts_per_tok,
            )?,
        });
    }
    let end = format!("mtp.{last}.");
    let (first, end) = (Loader::new(b, ckpt, "mtp.0."), Loader::new(b, ckpt, &end));
    Ok(DraftWeights {
        main_proj: mat(&first, "main_proj")?,
        main_norm: vector(&first, "main_norm")?,
        stages,
        norm: vector(&end, "norm")?,
        markov_embed: mat(&end, "markov_head.embed")?,
        markov_head: mat(&end, "markov_head.head")?,
        confidence: mat(&end, "confidence_head.proj")?,
    })
}

impl<B: Backend> Model<B> {
    /// Writes the stages' window rows of a step from the features of the target layers.
    pub(crate) fn seed_draft(
        &self,
        w: &DraftWeights<B>,
        state: &mut DraftState<B>,
        features: &[B::Buf],
        positions: &[u32],
    ) {
        let (b, c) = (self.backend(), self.config());
        let joined = b.concat_cols(&features.iter().collect::<Vec<_>>());
        let x = b.rmsnorm(&b.linear(&joined, &w.main_proj, Io::Fp8), &w.main_norm, c.rms_norm_eps);
        for (stage, ring) in w.stages.iter().zip(&mut state.rings) {
            let a = &stage.attention;
            let kv = b.rmsnorm(&b.linear(&x, &a.wkv, Io::Fp8), &a.kv_norm, a.eps);
            let codes = b.store_window(&b.rope(&kv, c.head_dim, &self.ropes.plain, positions, false));
            self.remember(ring, &codes, positions);
        }
    }

    /// Drafts a block of tokens after `next`, which follows the state's last token. `None` where the checkpoint has no
    /// draft stages or the state is empty.
    ///
    /// # Errors
    /// A device failure.
    pub fn draft(&self, state: &State<B>, next: u32) -> Result<Option<Draft>> {
        self.draft_tokens(state, next, self.config().dspark.block_size)
    }

    /// The first `count` tokens of [`Model::draft`], for less work.
    ///
    /// # Errors
    /// A device failure.
    pub fn draft_tokens(&self, state: &State<B>, next: u32, count: usize) -> Result<Option<Draft>> {
        let (Some(w), Some(rings), Some(last)) = (&self.draft, &state.draft, state.len().checked_sub(1))
        else {
            return Ok(None);
        };
        assert!(state.decoded == state.len && state.is_whole(), "a replay or a prefill ends before drafts");
        let (b, c) = (self.backend(), self.config());
        // All queries of a block see each other, so that its size is not free.
        let block = c.dspark.block_size;
        assert!((1..=block).contains(&count), "{count} tokens of a block of {block}");
        let mut ids = vec![c.dspark.noise_token_id; block];
        ids[0] = next;
        let positions: Vec<u32> = (1..=block).map(|i| (last + i) as u32).collect();
        let mut streams = b.replicate(&b.embed(&self.embed, &ids), c.hc_mult);
        let mut pre = b.upload(&Host::f32(&[block, 4], [1.0, 0.0, 0.0, 0.0].repeat(block)))?;
        let mut taps = Taps::off();
        for (stage, ring) in w.stages.iter().zip(&rings.rings) {
            let table = &self.ropes.plain;
            let (mix, x) = b.sublayer_input(&streams, &pre, &stage.attn_in, &mut taps);
            let own = b.attention_input(&x, &stage.attention, table, &positions);
            let (window, sinks) = (c.sliding_window, &stage.attention.sinks);
            let o = b.draft_attention(&own.q, ring, window, &own.codes, sinks, last as u32);
            let y = b.attention_output(&o, &stage.attention, table, &positions);
            streams = b.hc_expand(&streams, &y, &mix);
            let (next, x) = b.sublayer_input(&streams, &mix.pre, &stage.ffn_in, &mut taps);
            let y = b.moe(&x, &stage.moe, &vec![false; block], &mut taps);
            streams = b.hc_expand(&streams, &y, &next);
            pre = next.pre;
        }
        let x = b.slice_rows(&b.hc_collapse(&streams, &pre), 0, count);
        let base = b.linear(&b.rmsnorm(&x, &w.norm, c.rms_norm_eps), &self.head.head, Io::F32);
        let mut draft =
            Draft { ids: Vec::new(), logits: Host::f32(&[0], Vec::new()), confidence: Vec::new() };
        let mut logits = Vec::new();
        let mut previous = next;
        for i in 0..count {
            let me = b.embed(&w.markov_embed, &[previous]);
            let row = b.markov_bias(&b.slice_rows(&base, i, 1), &b.linear(&me, &w.markov_head, Io::F32));
            previous = b.read(&b.argmax(&row))?.as_i32()[0] as u32;
            let joined = b.concat_cols(&[&b.slice_rows(&x, i, 1), &me]);
            draft.confidence.push(b.read(&b.linear(&joined, &w.confidence, Io::F32))?.as_f32()[0]);
            draft.ids.push(previous);
            logits.extend_from_slice(b.read(&row)?.as_f32());
        }
        draft.logits = Host::f32(&[count, c.vocab_size], logits);
        Ok(Some(draft))
    }
}
