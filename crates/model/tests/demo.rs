//! The demo model in mode `exact`: greedy continuations of all requests of `expected.jsonl`, and the largest logits.

mod common;

use common::{Tokens, load, prefill, root, step};
use model::{Input, Model};
use ops::{Backend, Mode, Reference, linear::argmax};
use serde_json::Value;

struct Request {
    id: String,
    prompt: Vec<u32>,
    ids: Vec<u32>,
    min_margin: f64,
    min_margin_at: usize,
    /// At every position of prompt and continuation the five largest logits of what follows.
    top5: Option<Vec<Vec<(u32, f32)>>>,
}

fn requests() -> Vec<Request> {
    let text = std::fs::read_to_string(root().join("models/demo/expected.jsonl")).unwrap();
    let parse = |line: &str| {
        let entry: Value = serde_json::from_str(line).unwrap();
        let expected = &entry["float32"];
        let ids = |v: &Value| -> Vec<u32> { serde_json::from_value(v.clone()).unwrap() };
        Request {
            id: entry["id"].as_str().unwrap().to_owned(),
            prompt: ids(&entry["prompt_ids"]),
            ids: ids(&expected["ids"]),
            min_margin: expected["min_margin"].as_f64().unwrap(),
            min_margin_at: expected["min_margin_at"].as_u64().unwrap() as usize,
            top5: expected.get("top5").map(|v| serde_json::from_value(v.clone()).unwrap()),
        }
    };
    text.lines().map(parse).collect()
}

/// A gap between the two largest logits that quantisation bins can turn over.
const TIE: f64 = 0.05;

/// Tokens that the model prefers after every position of prompt and continuation. A continuation is the greedy one
/// exactly if each of its tokens is preferred after those before it.
fn check_greedy<B: Backend>(model: &Model<B>, request: &Request) {
    let Request { id, prompt, ids, .. } = request;
    let rows = prefill(model, &Tokens::text([&prompt[..], &ids[..]].concat()));
    let preferred = |i: usize| argmax(&rows[prompt.len() - 1 + i]) as u32;
    if let Some(i) = (0..ids.len()).find(|i| preferred(*i) != ids[*i]) {
        let (min, at) = (request.min_margin, request.min_margin_at);
        assert!(
            min < TIE && at == i,
            "{id}: token {i} is {} not {}; margin {min} at {at}",
            preferred(i),
            ids[i]
        );
        eprintln!("{id}: departs at token {i}, a tie of {min}");
    } else if request.min_margin < TIE {
        eprintln!("{id}: equal, through a tie of {} at token {}", request.min_margin, request.min_margin_at);
    }
}

/// Steps token by token, as a session does.
fn check_stepped<B: Backend>(model: &Model<B>, request: &Request) {
    let Request { id, prompt, ids, .. } = request;
    let mut state = model.new_state(prompt.len() + ids.len()).unwrap();
    let mut row = step(model, &mut state, Input::text(prompt)).pop().unwrap();
    for (i, want) in ids.iter().enumerate() {
        let got = argmax(&row) as u32;
        assert_eq!(got, *want, "{id}: token {i}");
        row = step(model, &mut state, Input::text(&[got])).pop().unwrap();
    }
}

/// Logits are printed with four digits: half of the last and what fp32 sums differ by.
const PRINTED: f32 = 6e-5;
/// A quantisation bin moves a logit row by up to 2e-3 of its RMS (fixtures/model/README.md), which is about 5 here.
const BIN: f32 = 1e-2;

fn check_top5<B: Backend>(model: &Model<B>, requests: &[Request]) {
    let mut differences = Vec::new();
    for request in requests {
        let Some(top5) = &request.top5 else { continue };
        let ids = [&request.prompt[..], &request.ids[..]].concat();
        assert_eq!(top5.len(), ids.len());
        let rows = prefill(model, &Tokens::text(ids));
        let pairs =
            rows.iter().zip(top5).flat_map(|(row, top)| top.iter().map(|(t, l)| (row[*t as usize], *l)));
        let here: Vec<f32> = pairs.map(|(a, b)| (a - b).abs()).collect();
        let worst = here.iter().copied().fold(0.0, f32::max);
        eprintln!("{}: top-5 logits differ by at most {worst:.1e}", request.id);
        assert!(worst <= BIN, "{}: a top-5 logit differs by {worst:.1e}, limit {BIN:.0e}", request.id);
        differences.extend(here);
    }
    let (n, above) = (differences.len(), differences.iter().filter(|d| **d > PRINTED).count());
    eprintln!("{above} of {n} top-5 logits differ by more than the printed digits");
    assert!(n == 740 && above * 20 <= n, "{above} of {n} top-5 logits differ by more than {PRINTED:.0e}");
}

/// All requests, and three of them token by token.
#[test]
fn greedy_continuations_equal_on_the_cpu() {
    let model = load("demo", common::cpu(Mode::Exact));
    let requests = requests();
    assert_eq!(requests.len(), 50);
    requests.iter().for_each(|r| check_greedy(&model, r));
    requests.iter().take(3).for_each(|r| check_stepped(&model, r));
}

/// The reference is slow: short requests, with `HALLMARK_FULL=1` all.
#[test]
fn greedy_continuations_equal_on_the_reference() {
    let model = load("demo", Reference::new(Mode::Exact));
    let most = if std::env::var_os("HALLMARK_FULL").is_some() { usize::MAX } else { 26 };
    let requests = requests();
    let short: Vec<&Request> = requests.iter().filter(|r| r.prompt.len() + r.ids.len() <= most).collect();
    eprintln!("{} of {} requests", short.len(), requests.len());
    assert!(short.len() >= 10);
    short.iter().for_each(|r| check_greedy(&model, r));
    check_stepped(&model, short[0]);
}

#[test]
fn largest_logits_equal() {
    let requests = requests();
    check_top5(&load("demo", common::cpu(Mode::Exact)), &requests);
    check_top5(&load("demo", Reference::new(Mode::Exact)), &requests);
}
