//! The one host sampler: from a row of logits to the next token (encoding specification, section 9).
//!
//! A draw depends on seed, choice and position only, never on the batch. With drafts the target's token is drawn at each
//! position with that position's number, so drafts on and drafts off give the same text.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::hash::{BuildHasher, RandomState};

use text::SamplingParams;

/// Temperatures below this take the largest logit.
const GREEDY_BELOW: f32 = 1e-5;

/// The state of one choice: its parameters, and which ids it has seen.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    seed: u64,
    choice: u64,
    position: u64,
    /// Ids in prompt or output; only kept for a repetition penalty.
    seen: HashSet<u32>,
    /// Occurrences in the output.
    counts: HashMap<u32, u32>,
    logits: Vec<f32>,
    ranking: Ranking,
}

/// A row that nothing can be drawn from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SamplerError {
    /// A logit is NaN or positive infinity: the forward pass is broken.
    NotFinite {
        /// The first such id.
        id: u32,
    },
    /// No id is allowed: the mask or the logits leave nothing.
    NothingAllowed,
}

impl fmt::Display for SamplerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFinite { id } => {
                write!(f, "the logit of token {id} is not a number; the forward pass failed")
            }
            Self::NothingAllowed => {
                f.write_str("no token can be sampled: the mask and the logits exclude them all")
            }
        }
    }
}

impl std::error::Error for SamplerError {}

impl Sampler {
    /// A sampler for answer number `choice` of a request. Without a seed in `params` it picks one.
    pub fn new(params: SamplingParams, choice: u64, prompt_ids: &[u32]) -> Self {
        let seed = params.seed.unwrap_or_else(|| RandomState::new().hash_one(choice) >> 1);
        let seen = if params.repetition_penalty == 1.0 {
            HashSet::new()
        } else {
            prompt_ids.iter().copied().collect()
        };
        Self {
            params,
            seed,
            choice,
            position: 0,
            seen,
            counts: HashMap::new(),
            logits: Vec::new(),
            ranking: Ranking::default(),
        }
    }

    /// The seed in use, below 2^63 when it was picked here.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Number of tokens accepted before.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Draws the token for the current position from `logits`, one per id. Bit `i % 32` of `mask[i / 32]` allows id `i`;
    /// ids beyond the mask are not allowed. The draw is repeatable until [`accept`](Self::accept).
    pub fn sample(&mut self, logits: &[f32], mask: Option<&[u32]>) -> Result<u32, SamplerError> {
        self.adjust(logits, mask)?;
        if self.params.temperature < GREEDY_BELOW {
            return Ok(self.arg_max());
        }
        let total = self.rank();
        let u = uniform(self.seed, self.choice, self.position);
        let (kept, sum) = if self.keeps_all() {
            (self.ranking.len(), total)
        } else {
            let kept = self.kept(total);
            (kept, (0..kept).map(|n| self.ranking.weight(n)).sum())
        };
        let mut running = 0.0;
        for n in 0..kept {
            running += self.ranking.weight(n);
            if running > u * sum {
                return Ok(self.ranking.id(n));
            }
        }
        // Rounding left the sum of the parts below the sum of the whole.
        Ok(self.ranking.id(kept - 1))
    }

    /// The ids that can be drawn from `logits` with their probabilities, most probable first.
    pub fn distribution(
        &mut self,
        logits: &[f32],
        mask: Option<&[u32]>,
    ) -> Result<Vec<(u32, f64)>, SamplerError> {
        self.adjust(logits, mask)?;
        if self.params.temperature < GREEDY_BELOW {
            return Ok(vec![(self.arg_max(), 1.0)]);
        }
        let total = self.rank();
        let kept = self.kept(total);
        let sum: f64 = (0..kept).map(|n| self.ranking.weight(n)).sum();
        Ok((0..kept).map(|n| (self.ranking.id(n), self.ranking.weight(n) / sum)).collect())
    }

    /// Takes `id` into the output and goes on to the next position.
    pub fn accept(&mut self, id: u32) {
        self.position += 1;
        *self.counts.entry(id).or_insert(0) += 1;
        if self.params.repetition_penalty != 1.0 {
            self.seen.insert(id);
        }
    }

    /// Steps 1 to 4: mask, bias, penalties.
    fn adjust(&mut self, logits: &[f32], mask: Option<&[u32]>) -> Result<(), SamplerError> {
        if let Some(id) = logits.iter().position(|l| l.is_nan() || *l == f32::INFINITY) {
            return Err(SamplerError::NotFinite { id: id as u32 });
        }
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        if let Some(mask) = mask {
            for (i, logit) in self.logits.iter_mut().enumerate() {
                if mask.get(i / 32).is_none_or(|word| word >> (i % 32) & 1 == 0) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        let SamplingParams { repetition_penalty, presence_penalty, frequency_penalty, .. } = self.params;
        for &(id, bias) in &self.params.logit_bias {
            if let Some(logit) = self.logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        for &id in &self.seen {
            if let Some(logit) = self.logits.get_mut(id as usize) {
                *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            }
        }
        if presence_penalty != 0.0 || frequency_penalty != 0.0 {
            for (&id, &count) in &self.counts {
                if let Some(logit) = self.logits.get_mut(id as usize) {
                    *logit -= presence_penalty + frequency_penalty * count as f32;
                }
            }
        }
        if self.logits.iter().all(|l| *l == f32::NEG_INFINITY) {
            return Err(SamplerError::NothingAllowed);
        }
        Ok(())
    }

    /// Step 5: the largest logit, the lowest id on ties.
    fn arg_max(&self) -> u32 {
        let mut best = 0;
        for (id, logit) in self.logits.iter().enumerate() {
            if *logit > self.logits[best] {
                best = id;
            }
        }
        best as u32
    }

    /// Step 6: ranks the ids; returns the sum of all weights.
    fn rank(&mut self) -> f64 {
        self.ranking.fill(&self.logits, self.params.temperature)
    }

    /// Whether step 7 drops at most ids whose probability vanishes beside 1, so that a draw need not look for its end.
    fn keeps_all(&self) -> bool {
        self.params.top_k == 0 && self.params.top_p >= 1.0 && self.params.min_p <= 0.0
    }

    /// Step 7: how many of the ranked ids are kept; all three tests look at the full softmax.
    fn kept(&mut self, total: f64) -> usize {
        let SamplingParams { top_k, top_p, min_p, .. } = self.params;
        let most = if top_k == 0 { self.ranking.len() } else { self.ranking.len().min(top_k as usize) };
        let least = f64::from(min_p) * self.ranking.weight(0);
        let mut before = 0.0;
        let mut kept = 0;
        while kept < most {
            let weight = self.ranking.weight(kept);
            let ends = before >= f64::from(top_p) || weight < least;
            if ends && kept > 0 {
                break;
            }
            before += weight / total;
            kept += 1;
        }
        kept
    }
}

/// Ids by falling logit, then rising id. Only as many are sorted as are looked at: mostly a few hundred of 129,280.
#[derive(Debug, Clone, Default)]
struct Ranking {
    /// Logit and id as one number that sorts as wanted; the first `sorted` are in order.
    keys: Vec<u64>,
    sorted: usize,
    largest: f64,
    temperature: f64,
}

impl Ranking {
    fn fill(&mut self, logits: &[f32], temperature: f32) -> f64 {
        self.keys.clear();
        self.keys.extend(
            (0u32..).zip(logits).filter(|(_, l)| **l != f32::NEG_INFINITY).map(|(id, l)| key(*l, id)),
        );
        self.sorted = 0;
        self.largest = logits.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b)).into();
        self.temperature = temperature.into();
        // Summed in the order of ids, so that the sum does not depend on how much has been sorted.
        self.keys.iter().map(|&key| self.weight_of(key)).sum()
    }

    fn len(&self) -> usize {
        self.keys.len()
    }

    fn id(&mut self, n: usize) -> u32 {
        self.sort_to(n);
        self.keys[n] as u32
    }

    /// Probability of the `n`th id, times a factor that is the same for all.
    fn weight(&mut self, n: usize) -> f64 {
        self.sort_to(n);
        self.weight_of(self.keys[n])
    }

    fn weight_of(&self, key: u64) -> f64 {
        ((f64::from(logit_of(key)) - self.largest) / self.temperature).exp()
    }

    fn sort_to(&mut self, n: usize) {
        while n >= self.sorted {
            let rest = &mut self.keys[self.sorted..];
            let next = (3 * self.sorted).max(64).min(rest.len());
            if next < rest.len() {
                rest.select_nth_unstable(next - 1);
            }
            rest[..next].sort_unstable();
            self.sorted += next;
        }
    }
}

/// Sorts a larger logit first and a lower id first; both zeros are one.
fn key(logit: f32, id: u32) -> u64 {
    let bits = (logit + 0.0).to_bits();
    let rising = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!rising) << 32 | u64::from(id)
}

fn logit_of(key: u64) -> f32 {
    let rising = !((key >> 32) as u32);
    f32::from_bits(if rising >> 31 == 1 { rising & !(1 << 31) } else { !rising })
}

/// The number in [0, 1) that decides a draw (section 9.4).
pub fn uniform(seed: u64, choice: u64, position: u64) -> f64 {
    let bits = mix(mix(mix(seed) ^ choice) ^ position) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// Reported log-probabilities of one position.
#[derive(Debug, Clone, PartialEq)]
pub struct LogProbs {
    /// That of the sampled token.
    pub sampled: f32,
    /// The best tokens with theirs, best first; the sampled one is only among them if it is one of the best.
    pub top: Vec<(u32, f32)>,
}

/// Reported in place of minus infinity.
pub const LEAST_LOG_PROB: f32 = -9999.0;

/// Log-probabilities of the raw logits, before mask, bias and penalties (section 9.3): of `sampled`, and of the `top` best.
pub fn log_probs(logits: &[f32], sampled: u32, top: usize) -> LogProbs {
    let largest = logits.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    let sum: f64 = logits.iter().map(|l| f64::from(l - largest).exp()).sum();
    let normaliser = sum.ln() as f32;
    let log_prob = |id: u32| match logits.get(id as usize) {
        Some(logit) if logit.is_finite() => logit - largest - normaliser,
        _ => LEAST_LOG_PROB,
    };
    let mut ranking = Ranking::default();
    let mut best = Vec::new();
    if top > 0 {
        ranking.fill(logits, 1.0);
        best.extend((0..top.min(ranking.len())).map(|n| ranking.id(n)));
        // Ids that cannot occur come last, the lowest first.
        let never = (0u32..).zip(logits).filter(|(_, l)| **l == f32::NEG_INFINITY).map(|(id, _)| id);
        best.extend(never.take(top - best.len()));
    }
    LogProbs { sampled: log_prob(sampled), top: best.into_iter().map(|id| (id, log_prob(id))).collect() }
}
