//! Whole models on the GPU backend over the emulator: what a decode step submits, and greedy tokens of the demo.

mod common;

use common::{Golden, emu, load, root, step};
use model::Input;
use ops::{Mode, linear::argmax};

#[test]
fn a_decode_step_is_one_submission() {
    let golden = Golden::open("nano/golden/float32.safetensors");
    let ids = golden.tokens("decode");
    for mode in [Mode::Source, Mode::Native] {
        let model = load("nano", emu(mode));
        let mut state = model.new_state(ids.len()).unwrap();
        step(&model, &mut state, Input::text(&ids[..33]));
        for (i, id) in ids[33..].iter().enumerate() {
            let before = model.backend().submissions();
            step(&model, &mut state, Input::text(&[*id]));
            let submitted = model.backend().submissions() - before;
            assert_eq!(submitted, 1, "{} token {i}", mode.name());
        }
    }
}

/// Tokens that are compared of each answer: an emulated step takes tenths of a second.
const TOKENS: usize = 6;

#[test]
fn the_demo_answers_as_expected() {
    let text = std::fs::read_to_string(root().join("models/demo/expected.jsonl")).unwrap();
    let entries: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let ids = |v: &serde_json::Value| -> Vec<u32> { serde_json::from_value(v.clone()).unwrap() };
    let mut requests: Vec<(String, Vec<u32>, Vec<u32>)> = entries
        .iter()
        .map(|e| (e["id"].to_string(), ids(&e["prompt_ids"]), ids(&e["float32"]["ids"])))
        .filter(|r| r.2.len() >= TOKENS)
        .collect();
    requests.sort_by_key(|r| r.1.len());
    let model = load("demo", emu(Mode::Exact));
    assert!(requests.len() >= 3, "{} long answers", requests.len());
    for (id, prompt, want) in &requests[..3] {
        let mut state = model.new_state(prompt.len() + TOKENS).unwrap();
        let mut row = step(&model, &mut state, Input::text(prompt)).pop().unwrap();
        for (i, token) in want[..TOKENS].iter().enumerate() {
            assert_eq!(argmax(&row) as u32, *token, "{id}: token {i}");
            row = step(&model, &mut state, Input::text(&[*token])).pop().unwrap();
        }
    }
}
