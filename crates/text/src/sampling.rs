//! What the sampler is told (spec section 9).

/// Sampling parameters, resolved: nothing is optional but the seed.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; below 1e-5 the largest logit wins.
    pub temperature: f32,
    /// Tokens are kept while the probability before them is below this; 0 < `top_p` <= 1.
    pub top_p: f32,
    /// Most tokens kept; 0 is off.
    pub top_k: u32,
    /// Least probability kept, as a share of the largest.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of ids in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from ids in the output.
    pub presence_penalty: f32,
    /// Subtracted per occurrence from ids in the output.
    pub frequency_penalty: f32,
    /// Added to the logits of single ids.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws; without it the engine picks one.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    /// The values of a request that sets nothing.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

impl SamplingParams {
    /// The parameters as the official API applies them (spec section 9.1): with thinking the temperature is 1 and `top_p`
    /// at least 0.95, without it `top_p` is 1; presence and frequency penalties are ignored.
    pub fn official(&self, thinking: bool) -> Self {
        Self {
            temperature: if thinking { 1.0 } else { self.temperature },
            top_p: if thinking { self.top_p.max(0.95) } else { 1.0 },
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            ..self.clone()
        }
    }
}
