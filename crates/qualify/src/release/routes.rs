//! A backend that tells what the router chose and how sure it was, or takes another run's choice.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ops::{Backend, Compressed, DeviceError, Host, Routing, Window, moe::softplus};

use crate::scores::choice_margin;

/// Which columns of the window attention lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Slots {
    /// The released code's list for a prefill: as many window columns as tokens, up to a whole window. The borders of its
    /// blocks of 64 slots then depend on the length of the prompt, and with them roundings of the probabilities.
    #[default]
    Released,
    /// The list that serves: a whole window always, so that a row's bits do not depend on the rows beside it.
    RowInvariant,
}

/// What the router of one layer chose.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// Experts `[T, k]` in the order of choice.
    pub experts: Vec<i32>,
    /// Experts of a token.
    pub k: usize,
    /// (last kept - first dropped) / deviation of the row's scores, by token.
    pub margins: Vec<f64>,
}

impl Choice {
    /// The experts of token `t`, ascending.
    pub fn sorted(&self, t: usize) -> Vec<i32> {
        let mut ids = self.experts[t * self.k..][..self.k].to_vec();
        ids.sort_unstable();
        ids
    }

    /// Experts of this choice that `other` lacks, over all tokens.
    pub fn changes(&self, other: &Self) -> usize {
        let rows = self.experts.chunks(self.k).zip(other.experts.chunks(self.k));
        rows.map(|(a, b)| a.iter().filter(|e| !b.contains(e)).count()).sum()
    }
}

#[derive(Default)]
struct Log {
    last: Option<Choice>,
    replay: Option<Vec<i32>>,
    slots: Slots,
    failed: Option<DeviceError>,
}

/// The wrapper.
pub struct Routes<B> {
    inner: B,
    log: Mutex<Log>,
}

impl<B> Routes<B> {
    /// Around `inner`.
    pub fn new(inner: B) -> Self {
        Self { inner, log: Mutex::default() }
    }

    /// The backend inside.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// What the last router call chose by itself, whether or not another choice was taken.
    ///
    /// # Errors
    /// A device failure since the last call.
    pub fn take(&self) -> Result<Option<Choice>, DeviceError> {
        let mut log = self.log();
        log.failed.take().map_or(Ok(()), Err)?;
        Ok(log.last.take())
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The result of `f`; a failure is kept for [`Routes::take`].
    fn caught<T>(&self, f: impl FnOnce() -> Result<T, DeviceError>) -> Option<T> {
        f().map_err(|e| self.log().failed = Some(e)).ok()
    }

    /// Which list attention takes from now on.
    pub fn set_slots(&self, slots: Slots) {
        self.log().slots = slots;
    }

    /// Makes the next router call take `experts`, with weights from its own scores.
    pub fn replay(&self, experts: Option<Vec<i32>>) {
        self.log().replay = experts;
    }
}

impl<B: Backend> Routes<B> {
    /// Keeps what the router chose and how sure it was; the routing of the experts to be replayed, if any are.
    fn chosen(
        &self,
        logits: &B::Buf,
        bias: &B::Buf,
        routing: &Routing<B::Buf>,
        k: usize,
        scale: f32,
    ) -> Result<Option<Routing<B::Buf>>, DeviceError> {
        let b = &self.inner;
        let (logits, bias, experts) = (b.read(logits)?, b.read(bias)?, b.read(&routing.experts)?);
        let margin = |row: &[f32]| {
            let scores: Vec<f64> =
                row.iter().zip(bias.as_f32()).map(|(x, b)| f64::from(softplus(*x).sqrt() + b)).collect();
            choice_margin(&scores, k)
        };
        let margins = (0..logits.rows()).map(|t| margin(logits.row(t))).collect();
        let mut log = self.log();
        log.last = Some(Choice { experts: experts.as_i32().to_vec(), k, margins });
        let Some(experts) = log.replay.take() else { return Ok(None) };
        let mut weights = Vec::with_capacity(experts.len());
        for (t, ids) in experts.chunks(k).enumerate() {
            let scores: Vec<f32> = ids.iter().map(|e| softplus(logits.row(t)[*e as usize]).sqrt()).collect();
            let sum: f32 = scores.iter().sum();
            weights.extend(scores.iter().map(|s| s / (sum + 1e-20) * scale));
        }
        let shape = [logits.rows(), k];
        let (experts, weights) = (Host::i32(&shape, experts), Host::f32(&shape, weights));
        Ok(Some(Routing { experts: b.upload(&experts)?, weights: b.upload(&weights)? }))
    }
}

impl<B: Backend> Backend for Routes<B> {
    type Buf = B::Buf;
    type Mat = B::Mat;
    type Experts = B::Experts;

    ops::delegate_backend!(inner: plumbing embed replicate rmsnorm linear grouped_linear argmax rope store_window
        ring_write publish_kv publish_key quantise_index_query pool_pairs index_scores candidates mask_scores topk
        routed_experts shared_expert moe_sum hc_mix hc_collapse hc_expand engram_rows engram_gate
        stream_mean draft_attention markov_bias concat_cols);

    fn sparse_attention(
        &self,
        q: &B::Buf,
        window: &Window<'_, B::Buf>,
        compressed: Option<&Compressed<'_, B::Buf>>,
        sinks: &B::Buf,
        positions: &[u32],
    ) -> B::Buf {
        let slots = self.log().slots;
        let (ring, fresh, base) = (window.ring, window.fresh, window.base);
        let columns = if base == 0 && slots != Slots::RowInvariant {
            window.size.min(self.inner.shape(fresh)[0])
        } else {
            window.size
        };
        let window = Window { ring, fresh, base, size: columns };
        self.inner.sparse_attention(q, &window, compressed, sinks, positions)
    }

    fn router(
        &self,
        logits: &B::Buf,
        bias: &B::Buf,
        image: Option<(&B::Buf, &[bool])>,
        k: usize,
        scale: f32,
    ) -> Routing<B::Buf> {
        let routing = self.inner.router(logits, bias, image, k, scale);
        self.caught(|| self.chosen(logits, bias, &routing, k, scale)).flatten().unwrap_or(routing)
    }
}
