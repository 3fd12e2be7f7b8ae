//! The weights of single layers, to run blocks on given inputs.

use checkpoint::{Checkpoint, Config, Role};
use ops::{
    Backend, ExpertWeights, Host, RopeTable,
    blocks::{
        AttentionWeights, CompressorWeights, EngramWeights, HeadWeights, IndexerWeights, KeyWeights,
        MoeWeights, SublayerWeights,
    },
    hyper::MixConstants,
    rope::Yarn,
};

/// Weights of a checkpoint on a backend.
pub struct Layers<'a, B: Backend> {
    pub b: &'a B,
    pub ckpt: &'a Checkpoint,
}

impl<B: Backend> Layers<'_, B> {
    pub fn config(&self) -> &Config {
        self.ckpt.config()
    }

    pub fn mat(&self, name: &str) -> B::Mat {
        self.b.load(&self.ckpt.weight(name).unwrap()).unwrap()
    }

    fn values(&self, name: &str) -> B::Buf {
        let w = self.ckpt.weight(name).unwrap();
        self.b.upload(&Host::f32(&[w.rows(), w.cols()], w.to_f32())).unwrap()
    }

    pub fn sublayer(&self, l: usize, part: &'static str) -> SublayerWeights<B> {
        let c = self.config();
        SublayerWeights {
            fun: self.mat(&format!("layers.{l}.hc_{part}_fn")),
            scale: self.values(&format!("layers.{l}.hc_{part}_scale")),
            base: self.values(&format!("layers.{l}.hc_{part}_base")),
            constants: MixConstants {
                iterations: c.hc_sinkhorn_iters,
                eps: c.hc_eps,
                norm_eps: c.rms_norm_eps,
            },
            norm: self.values(&format!("layers.{l}.{part}_norm")),
            tap: part,
        }
    }

    pub fn attention(&self, l: usize) -> AttentionWeights<B> {
        let c = self.config();
        let at = |name: &str| format!("layers.{l}.attn.{name}");
        AttentionWeights {
            wq_a: self.mat(&at("wq_a")),
            q_norm: self.values(&at("q_norm")),
            wq_b: self.mat(&at("wq_b")),
            wkv: self.mat(&at("wkv")),
            kv_norm: self.values(&at("kv_norm")),
            sinks: self.values(&at("attn_sink")),
            wo_a: self.mat(&at("wo_a")),
            wo_b: self.mat(&at("wo_b")),
            head_dim: c.head_dim,
            groups: c.o_groups,
            eps: c.rms_norm_eps,
        }
    }

    /// Of a KV source.
    pub fn source(&self, l: usize) -> (CompressorWeights<B>, KeyWeights<B>) {
        let c = self.config();
        assert!(c.layer(l).role == Role::Full);
        let at = |name: &str| format!("layers.{l}.attn.{name}");
        let eps = c.rms_norm_eps;
        let wgate = (c.layer(l).ratio == 2).then(|| self.mat(&at("compressor.wgate")));
        let norm = self.values(&at("compressor.norm"));
        (
            CompressorWeights { wkv: self.mat(&at("compressor.wkv")), wgate, norm, eps },
            KeyWeights { wk: self.mat(&at("indexer.wk")), k_norm: self.values(&at("indexer.k_norm")), eps },
        )
    }

    /// Of an index source.
    pub fn indexer(&self, l: usize) -> IndexerWeights<B> {
        let at = |name: &str| format!("layers.{l}.attn.indexer.{name}");
        IndexerWeights {
            wq_b: self.mat(&at("wq_b")),
            weights_proj: self.mat(&at("weights_proj")),
            dim: self.config().index_head_dim,
        }
    }

    pub fn moe(&self, l: usize) -> MoeWeights<B> {
        let c = self.config();
        let at = |name: &str| format!("layers.{l}.ffn.{name}");
        let experts = (0..c.n_routed_experts).map(|e| {
            let part = |w: &str| self.ckpt.weight(&at(&format!("experts.{e}.{w}"))).unwrap();
            ExpertWeights { gate: part("w1"), up: part("w3"), down: part("w2") }
        });
        MoeWeights {
            gate: self.mat(&at("gate")),
            bias: self.values(&at("gate.bias")),
            bias_vl: self.values(&at("gate.bias_vl")),
            experts: self.b.load_experts(experts.collect()).unwrap(),
            shared: ["w1", "w3", "w2"].map(|w| self.mat(&at(&format!("shared_experts.{w}")))),
            top: c.num_experts_per_tok,
            scale: c.routed_scaling_factor,
            limit: c.swiglu_limit,
        }
    }

    pub fn engram(&self, l: usize) -> EngramWeights<B> {
        let at = |name: &str| format!("layers.{l}.engram.{name}");
        EngramWeights {
            table: self.ckpt.weight(&at("embed")).unwrap(),
            wkv: self.mat(&at("wkv")),
            q_weight: self.values(&at("q_weight")),
            k_weight: self.values(&at("k_weight")),
            columns: self.config().engram_columns(),
        }
    }

    pub fn head(&self) -> HeadWeights<B> {
        HeadWeights { norm: self.values("norm"), head: self.mat("head"), eps: self.config().rms_norm_eps }
    }

    /// The rotary table of layer `l`.
    pub fn rope(&self, l: usize) -> RopeTable {
        let c = self.config();
        if c.layer(l).ratio == 0 {
            return RopeTable::plain(c.rope_theta, c.qk_rope_head_dim);
        }
        let yarn = Yarn {
            factor: c.yarn.factor,
            beta_fast: c.yarn.beta_fast,
            beta_slow: c.yarn.beta_slow,
            original: c.yarn.original_max_position_embeddings,
        };
        RopeTable::yarn(c.compress_rope_theta, c.qk_rope_head_dim, yarn)
    }
}
