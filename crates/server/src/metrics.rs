//! Figures for Prometheus.

use engine::Answer;
use prometheus::{
    Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder,
};

/// All figures of a server.
pub struct Metrics {
    registry: Registry,
    /// Answered requests by endpoint and status.
    pub requests: IntCounterVec,
    /// Requests that compute.
    pub running: IntGauge,
    /// Requests that wait.
    pub waiting: IntGauge,
    /// Bytes of this process in memory, mapped weights included; 0 where the system does not tell.
    pub memory: IntGauge,
    /// Seconds in the queue.
    pub queue_wait: Histogram,
    /// Seconds from arrival to the first token.
    pub first_token: Histogram,
    /// Seconds between tokens.
    pub inter_token: Histogram,
    /// Seconds of whole requests.
    pub request: Histogram,
    prompt: IntCounter,
    generated: IntCounter,
    cached: IntCounter,
    reasoning: IntCounter,
    recalled: IntCounter,
    drafted: IntCounter,
    accepted: IntCounter,
}

impl Metrics {
    /// New figures, all zero.
    ///
    /// # Errors
    /// Two figures with one name.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new_custom(Some("hallmark".into()), None)?;
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        let histogram = |name: &str, help: &str, first: f64, count: usize| {
            let buckets = prometheus::exponential_buckets(first, 2.0, count)?;
            let histogram = Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets))?;
            registry.register(Box::new(histogram.clone()))?;
            Ok::<_, prometheus::Error>(histogram)
        };
        let requests =
            IntCounterVec::new(Opts::new("requests_total", "Answered requests"), &["endpoint", "status"])?;
        registry.register(Box::new(requests.clone()))?;
        Ok(Self {
            requests,
            running: gauge("requests_running", "Requests that compute")?,
            waiting: gauge("requests_waiting", "Requests that wait")?,
            memory: gauge("resident_memory_bytes", "Memory of the process, mapped weights included")?,
            queue_wait: histogram("queue_wait_seconds", "Time in the queue", 0.001, 18)?,
            first_token: histogram("time_to_first_token_seconds", "Arrival to first token", 0.001, 18)?,
            inter_token: histogram("inter_token_seconds", "Between tokens", 0.0001, 16)?,
            request: histogram("request_seconds", "Whole requests", 0.001, 20)?,
            prompt: counter("prompt_tokens_total", "Tokens of prompts")?,
            generated: counter("generation_tokens_total", "Sampled tokens")?,
            cached: counter("cached_prompt_tokens_total", "Prompt tokens kept from before")?,
            reasoning: counter("reasoning_tokens_total", "Sampled tokens of reasoning")?,
            recalled: counter("recalled_turns_total", "Earlier answers read as they were sampled")?,
            drafted: counter("draft_tokens_total", "Drafted tokens")?,
            accepted: counter("accepted_tokens_total", "Drafted tokens that were right")?,
            registry,
        })
    }

    /// Counts a finished answer.
    pub fn count(&self, answer: &Answer) {
        self.prompt.inc_by(answer.usage.prompt_tokens as u64);
        self.generated.inc_by(answer.usage.completion_tokens as u64);
        self.cached.inc_by(answer.usage.cached_tokens as u64);
        self.reasoning.inc_by(answer.usage.reasoning_tokens as u64);
        self.drafted.inc_by(answer.drafts.drafted);
        self.accepted.inc_by(answer.drafts.accepted);
    }

    /// Counts earlier answers that a prompt has as they were sampled.
    pub fn recalled(&self, turns: usize) {
        self.recalled.inc_by(turns as u64);
    }

    /// The text that Prometheus reads.
    pub fn text(&self) -> String {
        let mut out = Vec::new();
        if let Err(e) = TextEncoder::new().encode(&self.registry.gather(), &mut out) {
            return format!("# {e}\n");
        }
        String::from_utf8_lossy(&out).into_owned()
    }
}
