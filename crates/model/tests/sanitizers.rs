//! A whole model under the sanitizers: fused blocks, caches that are written and read step after step, drafts.

mod common;
#[path = "../../gpu/tests/sanitizers/mod.rs"]
mod sanitizers;

use std::sync::{Arc, Mutex};

use common::{Golden, full, load, step};
use gpu::Gpu;
use model::Input;
use ops::Mode;
use sanitizers::{capture::Capture, run_both};

#[test]
fn a_model_runs_without_a_report() {
    let ids = Golden::open("nano/golden/float32.safetensors").tokens("decode");
    let modes: &[Mode] = if full() { &[Mode::Exact, Mode::Source, Mode::Native] } else { &[Mode::Native] };
    // More than eight rows go other ways than a few do.
    let (prefill, decode) = if full() { (33, 3) } else { (9, 1) };
    let record = Arc::new(Mutex::new(Vec::new()));
    for mode in modes {
        let capture = Capture::new(record.clone());
        capture.label(&format!("nano, {}", mode.name()));
        let model = load("nano", Gpu::new(*mode, capture));
        let mut state = model.new_state(ids.len()).unwrap();
        step(&model, &mut state, Input::text(&ids[..prefill]));
        for p in prefill..prefill + decode {
            step(&model, &mut state, Input::text(&ids[p..=p]));
        }
        model.draft(&state, ids[prefill + decode]).unwrap().unwrap();
    }
    let record = std::mem::take(&mut *record.lock().unwrap());
    assert!(run_both(&record) > 400);
}
