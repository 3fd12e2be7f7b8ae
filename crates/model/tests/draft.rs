//! The draft head against the goldens: tokens, logits and confidence after every decoded position.

mod common;

use common::{Golden, load, on_backends, step};
use model::{Draft, Input};
use ops::{Backend, Mode, registry::nrms};

on_backends!(drafts_equal_the_goldens, features_are_taken_after_engram);

/// Three implementations agree to 1e-7..3e-7 on these logits; this leaves room for another order of the sums.
const LIMIT: f64 = 1e-6;

/// Drafts after positions 33, 34, … of the decoded text.
fn drafts<B: Backend>(name: &str, backend: B, ids: &[u32]) -> Vec<Draft> {
    let model = load(name, backend);
    let mut state = model.new_state(ids.len()).unwrap();
    step(&model, &mut state, Input::text(&ids[..33]));
    (33..48)
        .map(|p| {
            step(&model, &mut state, Input::text(&ids[p..=p]));
            model.draft(&state, ids[p + 1]).unwrap().unwrap()
        })
        .collect()
}

fn check_logits(drafts: &[Draft], golden: &Golden, what: &str) {
    let want = golden.get("decode/dspark.logits");
    assert_eq!(drafts.len(), want.rows());
    for (i, draft) in drafts.iter().enumerate() {
        let d = nrms(draft.logits.as_f32(), want.row(i));
        assert!(d < LIMIT, "{what}: draft logits after position {}: NRMS {d:.2e}, limit {LIMIT:.0e}", 33 + i);
    }
}

fn drafts_equal_the_goldens<B: Backend>(make: impl Fn(Mode) -> B) {
    for name in ["nano", "micro"] {
        for file in ["float32", "official_float32"] {
            let what = format!("{name} {file}");
            let golden = Golden::open(&format!("{name}/golden/{file}.safetensors"));
            let ids = golden.tokens("decode");
            let drafts = drafts(name, make(Mode::Exact), &ids);
            let tokens = golden.get("decode/dspark.tokens");
            let width = tokens.width();
            for (i, (draft, want)) in drafts.iter().zip(tokens.as_i32().chunks(width)).enumerate() {
                let got: Vec<i32> = [ids[34 + i]].iter().chain(&draft.ids).map(|t| *t as i32).collect();
                assert_eq!(got, want, "{what}: drafted tokens after position {}", 33 + i);
            }
            check_logits(&drafts, &golden, &what);
            if golden.has("decode/dspark.confidence") {
                let want = golden.get("decode/dspark.confidence");
                for (i, draft) in drafts.iter().enumerate() {
                    let d = nrms(&draft.confidence, want.row(i));
                    assert!(d < LIMIT, "{what}: confidence after position {}: NRMS {d:.2e}", 33 + i);
                }
            }
        }
    }
}

/// nano's layer 4 has Engram and is a target of the draft head. Features from before Engram gave logits 1e-2 off.
fn features_are_taken_after_engram<B: Backend>(make: impl Fn(Mode) -> B) {
    let golden = Golden::open("nano/golden/float32.safetensors");
    let model = load("nano", make(Mode::Exact));
    let c = model.config();
    assert!(c.engram.layer_ids.iter().any(|l| c.dspark.target_layer_ids.contains(l)));
    check_logits(&drafts("nano", make(Mode::Exact), &golden.tokens("decode")), &golden, "nano");
}
