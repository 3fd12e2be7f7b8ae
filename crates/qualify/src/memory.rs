//! The plan of a run beside what the process came to use.

use checkpoint::Checkpoint;
use engine::{
    memory::{self, Used},
    plan::{self, Parts},
};
use model::Layout;
use serde_json::{Value, json};

/// Watches the process's memory from the moment it is made.
pub struct Watch {
    before: Option<Used>,
    /// Memory when the device's model was loaded.
    loaded: Option<Used>,
}

impl Watch {
    /// Begins, before anything is loaded.
    pub fn begin() -> Self {
        Self { before: memory::used(), loaded: None }
    }

    /// Notes that the device's model is loaded.
    pub fn loaded(&mut self) {
        self.loaded = memory::used();
    }

    /// For a receipt: planned bytes of `checkpoint`, of a state of `layout` at `tokens` and of a step; what the process had in
    /// memory at most and right after loading, less its own pages before; and that peak over the plan, to three decimals.
    /// The program's code and what the reference takes, which runs in the same process, are in the peak: they are much
    /// beside a small model and nothing beside a large one. Where the system does not tell, the plan alone.
    pub fn report(&self, checkpoint: &Checkpoint, layout: &Layout, tokens: usize) -> Value {
        let parts = Parts::of_checkpoint(checkpoint);
        let (weights, engram) = (parts.text() + parts.dspark, parts.engram);
        let (state, step) = (plan::state_bytes(layout, tokens), plan::transient(checkpoint.config()));
        let planned =
            json!({ "weights": weights, "engram": engram, "state": state, "step": step, "tokens": tokens });
        let (Some(before), Some(loaded), Some(now)) = (self.before, self.loaded, memory::used()) else {
            return json!({ "planned": planned });
        };
        // Pages of mapped weights that were looked at when the checkpoint was opened are the model's.
        let peak = now.peak.saturating_sub(before.own);
        let ratio = peak as f64 / (weights + engram + state + step).max(1) as f64;
        json!({
            "planned": planned,
            "measured": { "peak": peak, "loaded": loaded.resident.saturating_sub(before.own) },
            "ratio": (ratio * 1e3).round() / 1e3,
        })
    }
}
