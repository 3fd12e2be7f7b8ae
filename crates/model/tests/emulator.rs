//! Whole models on the GPU backend over the emulator: what a decode step submits, and greedy tokens of the demo.

mod common;

use common::{Golden, Tokens, emu, load, prefill, root, step};
use model::Input;
use ops::{Mode, linear::argmax};

/// Tokens that are decoded one by one.
const STEPS: usize = 16;

#[test]
fn a_decode_step_is_one_submission() {
    let golden = Golden::open("nano/golden/float32.safetensors");
    let ids = golden.tokens("decode");
    assert_eq!(ids.len(), 33 + STEPS);
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

/// Requests whose prompt and answer are compared, the shortest first.
const REQUESTS: usize = 10;

/// Every token of an answer is the one that the model prefers after those before it.
#[test]
fn the_demo_answers_as_expected() {
    let text = std::fs::read_to_string(root().join("models/demo/expected.jsonl")).unwrap();
    let ids = |v: &serde_json::Value| -> Vec<u32> { serde_json::from_value(v.clone()).unwrap() };
    let mut requests: Vec<(String, Vec<u32>, Vec<u32>)> = text
        .lines()
        .map(|line| {
            let entry: serde_json::Value = serde_json::from_str(line).unwrap();
            (entry["id"].to_string(), ids(&entry["prompt_ids"]), ids(&entry["float32"]["ids"]))
        })
        .collect();
    requests.sort_by_key(|r| r.1.len() + r.2.len());
    let model = load("demo", emu(Mode::Exact));
    assert!(requests.len() >= REQUESTS, "{} answers", requests.len());
    for (id, prompt, want) in &requests[..REQUESTS] {
        let rows = prefill(&model, &Tokens::text([&prompt[..], &want[..]].concat()));
        let got: Vec<u32> = rows[prompt.len() - 1..][..want.len()].iter().map(|r| argmax(r) as u32).collect();
        assert_eq!(got, *want, "{id}");
    }
    // Token by token, as a session does.
    let (id, prompt, want) = requests.iter().find(|r| r.2.len() >= STEPS).expect("a long answer");
    let mut state = model.new_state(prompt.len() + STEPS).unwrap();
    let mut row = step(&model, &mut state, Input::text(prompt)).pop().unwrap();
    for (i, token) in want[..STEPS].iter().enumerate() {
        assert_eq!(argmax(&row) as u32, *token, "{id}: token {i}");
        let before = model.backend().submissions();
        row = step(&model, &mut state, Input::text(&[*token])).pop().unwrap();
        assert_eq!(model.backend().submissions() - before, 1, "{id}: submissions of token {i}");
    }
}
