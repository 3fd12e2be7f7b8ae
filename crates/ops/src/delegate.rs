//! Backends that wrap another one and change a few operators.

/// Implements methods of [`Backend`](crate::Backend) by calling the same method of a field: for wrappers whose `Buf`,
/// `Mat` and `Experts` are the inner backend's.
///
/// ```text
/// impl<B: Backend> Backend for Wrapper<B> {
///     type Buf = B::Buf;
///     type Mat = B::Mat;
///     type Experts = B::Experts;
///     ops::delegate_backend!(inner: plumbing embed replicate);
///     fn rmsnorm(…) { … } // and the others
/// }
/// ```
/// `plumbing` stands for everything that is no operator. Blocks are not delegated: their default bodies run the
/// wrapper's operators one by one.
#[macro_export]
macro_rules! delegate_backend {
    ($inner:ident:) => {};
    ($inner:ident: plumbing $($rest:ident)*) => {
        fn name(&self) -> &'static str {
            self.$inner.name()
        }
        fn mode(&self) -> $crate::Mode {
            self.$inner.mode()
        }
        fn upload(&self, host: &$crate::Host) -> Result<Self::Buf, $crate::DeviceError> {
            self.$inner.upload(host)
        }
        fn read(&self, buf: &Self::Buf) -> Result<$crate::Host, $crate::DeviceError> {
            self.$inner.read(buf)
        }
        fn shape(&self, buf: &Self::Buf) -> Vec<usize> {
            self.$inner.shape(buf)
        }
        fn cache(&self, rows: usize, width: usize) -> Result<Self::Buf, $crate::DeviceError> {
            self.$inner.cache(rows, width)
        }
        fn load(&self, weight: &$crate::Weight) -> Result<Self::Mat, $crate::DeviceError> {
            self.$inner.load(weight)
        }
        fn load_experts(
            &self,
            experts: Vec<$crate::ExpertWeights>,
        ) -> Result<Self::Experts, $crate::DeviceError> {
            self.$inner.load_experts(experts)
        }
        fn concat_rows(&self, a: &Self::Buf, b: &Self::Buf) -> Self::Buf {
            self.$inner.concat_rows(a, b)
        }
        fn slice_rows(&self, x: &Self::Buf, start: usize, count: usize) -> Self::Buf {
            self.$inner.slice_rows(x, start, count)
        }
        fn reshape(&self, x: &Self::Buf, shape: &[usize]) -> Self::Buf {
            self.$inner.reshape(x, shape)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: embed $($rest:ident)*) => {
        fn embed(&self, table: &Self::Mat, ids: &[u32]) -> Self::Buf {
            self.$inner.embed(table, ids)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: replicate $($rest:ident)*) => {
        fn replicate(&self, x: &Self::Buf, streams: usize) -> Self::Buf {
            self.$inner.replicate(x, streams)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: rmsnorm $($rest:ident)*) => {
        fn rmsnorm(&self, x: &Self::Buf, weight: &Self::Buf, eps: f32) -> Self::Buf {
            self.$inner.rmsnorm(x, weight, eps)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: linear $($rest:ident)*) => {
        fn linear(&self, x: &Self::Buf, weight: &Self::Mat, io: $crate::Io) -> Self::Buf {
            self.$inner.linear(x, weight, io)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: grouped_linear $($rest:ident)*) => {
        fn grouped_linear(&self, x: &Self::Buf, weight: &Self::Mat, groups: usize) -> Self::Buf {
            self.$inner.grouped_linear(x, weight, groups)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: argmax $($rest:ident)*) => {
        fn argmax(&self, logits: &Self::Buf) -> Self::Buf {
            self.$inner.argmax(logits)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: rope $($rest:ident)*) => {
        fn rope(
            &self,
            x: &Self::Buf,
            head_dim: usize,
            table: &$crate::RopeTable,
            positions: &[u32],
            inverse: bool,
        ) -> Self::Buf {
            self.$inner.rope(x, head_dim, table, positions, inverse)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: store_window $($rest:ident)*) => {
        fn store_window(&self, kv: &Self::Buf) -> Self::Buf {
            self.$inner.store_window(kv)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: ring_write $($rest:ident)*) => {
        fn ring_write(&self, ring: &mut Self::Buf, codes: &Self::Buf, positions: &[u32]) {
            self.$inner.ring_write(ring, codes, positions)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: publish_kv $($rest:ident)*) => {
        fn publish_kv(&self, cache: &mut Self::Buf, latent: &Self::Buf, first: usize) {
            self.$inner.publish_kv(cache, latent, first)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: publish_key $($rest:ident)*) => {
        fn publish_key(&self, cache: &mut Self::Buf, key: &Self::Buf, first: usize) {
            self.$inner.publish_key(cache, key, first)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: quantise_index_query $($rest:ident)*) => {
        fn quantise_index_query(&self, q: &Self::Buf) -> Self::Buf {
            self.$inner.quantise_index_query(q)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: pool_pairs $($rest:ident)*) => {
        fn pool_pairs(&self, kv: &Self::Buf, score: &Self::Buf) -> Self::Buf {
            self.$inner.pool_pairs(kv, score)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: index_scores $($rest:ident)*) => {
        fn index_scores(
            &self,
            q: &Self::Buf,
            w: &Self::Buf,
            keys: &Self::Buf,
            n: usize,
            visible: &[u32],
        ) -> Self::Buf {
            self.$inner.index_scores(q, w, keys, n, visible)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: candidates $($rest:ident)*) => {
        fn candidates(&self, scores: &Self::Buf, visible: &[u32], block: usize, keep: usize) -> Self::Buf {
            self.$inner.candidates(scores, visible, block, keep)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: mask_scores $($rest:ident)*) => {
        fn mask_scores(&self, scores: &Self::Buf, mask: &Self::Buf, block: usize) -> Self::Buf {
            self.$inner.mask_scores(scores, mask, block)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: topk $($rest:ident)*) => {
        fn topk(&self, scores: &Self::Buf, k: usize) -> Self::Buf {
            self.$inner.topk(scores, k)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: sparse_attention $($rest:ident)*) => {
        fn sparse_attention(
            &self,
            q: &Self::Buf,
            window: &$crate::Window<'_, Self::Buf>,
            compressed: Option<&$crate::Compressed<'_, Self::Buf>>,
            sinks: &Self::Buf,
            positions: &[u32],
        ) -> Self::Buf {
            self.$inner.sparse_attention(q, window, compressed, sinks, positions)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: router $($rest:ident)*) => {
        fn router(
            &self,
            logits: &Self::Buf,
            bias: &Self::Buf,
            image: Option<(&Self::Buf, &[bool])>,
            k: usize,
            scale: f32,
        ) -> $crate::Routing<Self::Buf> {
            self.$inner.router(logits, bias, image, k, scale)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: routed_experts $($rest:ident)*) => {
        fn routed_experts(
            &self,
            x: &Self::Buf,
            routing: &$crate::Routing<Self::Buf>,
            experts: &Self::Experts,
            limit: f32,
        ) -> Self::Buf {
            self.$inner.routed_experts(x, routing, experts, limit)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: shared_expert $($rest:ident)*) => {
        fn shared_expert(&self, x: &Self::Buf, weights: [&Self::Mat; 3], limit: f32) -> Self::Buf {
            self.$inner.shared_expert(x, weights, limit)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: moe_sum $($rest:ident)*) => {
        fn moe_sum(&self, routed: &Self::Buf, shared: &Self::Buf) -> Self::Buf {
            self.$inner.moe_sum(routed, shared)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: hc_mix $($rest:ident)*) => {
        fn hc_mix(
            &self,
            streams: &Self::Buf,
            fun: &Self::Mat,
            scale: &Self::Buf,
            base: &Self::Buf,
            constants: $crate::hyper::MixConstants,
        ) -> $crate::Mix<Self::Buf> {
            self.$inner.hc_mix(streams, fun, scale, base, constants)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: hc_collapse $($rest:ident)*) => {
        fn hc_collapse(&self, streams: &Self::Buf, pre: &Self::Buf) -> Self::Buf {
            self.$inner.hc_collapse(streams, pre)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: hc_expand $($rest:ident)*) => {
        fn hc_expand(&self, streams: &Self::Buf, y: &Self::Buf, mix: &$crate::Mix<Self::Buf>) -> Self::Buf {
            self.$inner.hc_expand(streams, y, mix)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: engram_rows $($rest:ident)*) => {
        fn engram_rows(&self, table: &$crate::Weight, rows: &[u64], columns: usize) -> Self::Buf {
            self.$inner.engram_rows(table, rows, columns)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: engram_gate $($rest:ident)*) => {
        fn engram_gate(
            &self,
            streams: &Self::Buf,
            kv: &Self::Buf,
            q_weight: &Self::Buf,
            k_weight: &Self::Buf,
            alive: &[bool],
        ) -> (Self::Buf, Self::Buf) {
            self.$inner.engram_gate(streams, kv, q_weight, k_weight, alive)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: stream_mean $($rest:ident)*) => {
        fn stream_mean(&self, streams: &Self::Buf) -> Self::Buf {
            self.$inner.stream_mean(streams)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: draft_attention $($rest:ident)*) => {
        fn draft_attention(
            &self,
            q: &Self::Buf,
            ring: &Self::Buf,
            window: usize,
            block: &Self::Buf,
            sinks: &Self::Buf,
            position: u32,
        ) -> Self::Buf {
            self.$inner.draft_attention(q, ring, window, block, sinks, position)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: markov_bias $($rest:ident)*) => {
        fn markov_bias(&self, base: &Self::Buf, bias: &Self::Buf) -> Self::Buf {
            self.$inner.markov_bias(base, bias)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
    ($inner:ident: concat_cols $($rest:ident)*) => {
        fn concat_cols(&self, parts: &[&Self::Buf]) -> Self::Buf {
            self.$inner.concat_cols(parts)
        }
        $crate::delegate_backend!($inner: $($rest)*);
    };
}

#[cfg(test)]
mod tests {
    use crate::{Backend, Host, Mode, Reference, Weight, registry};

    struct Wrapper {
        inner: Reference,
    }

    impl Backend for Wrapper {
        type Buf = Host;
        type Mat = Weight;
        type Experts = Vec<crate::ExpertWeights>;

        crate::delegate_backend!(inner: plumbing embed replicate rmsnorm linear grouped_linear argmax rope
            store_window ring_write publish_kv publish_key quantise_index_query pool_pairs index_scores candidates
            mask_scores topk sparse_attention router routed_experts shared_expert moe_sum hc_mix hc_collapse hc_expand
            engram_rows engram_gate stream_mean draft_attention markov_bias concat_cols);
    }

    #[test]
    fn a_wrapper_that_delegates_everything_is_the_inner_backend() {
        let inner = Reference::new(Mode::Source);
        let wrapper = Wrapper { inner };
        for s in registry::SPECS {
            let c = registry::case(s.name, &registry::Geometry::TINY, 3, 5).unwrap();
            let a = registry::run(s.name, &wrapper, &c).unwrap().unwrap();
            let b = registry::run(s.name, &inner, &c).unwrap().unwrap();
            assert!(registry::compare(&a, &b).iter().all(|c| c.equal), "{}", s.name);
        }
    }
}
