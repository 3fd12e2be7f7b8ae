//! Row invariance of the whole model: however a text is cut into steps, traced or not, on one thread or two, every
//! row of the logits and the draft that follows have the same bits.

mod common;

use common::{Golden, load, root, step};
use cpu::{Cpu, Isa};
use model::{Input, Model, Rows, State};
use ops::{Backend, Mode, Reference, Taps};

/// Texts: nano's and micro's longest golden prompts twice over, and of the demo its longest request. All wrap the
/// windows of 16, 24 and 32 several times, and pass `index_topk` and the candidate blocks.
fn text(name: &str) -> Vec<u32> {
    if name == "demo" {
        let lines = std::fs::read_to_string(root().join("models/demo/expected.jsonl")).unwrap();
        let requests = lines.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
        let ids =
            |r: serde_json::Value| -> Vec<u32> { serde_json::from_value(r["prompt_ids"].clone()).unwrap() };
        let longest = requests.map(ids).max_by_key(Vec::len).unwrap();
        return longest[..longest.len().min(160)].to_vec();
    }
    let ids = Golden::open(&format!("{name}/golden/float32.safetensors")).tokens("prompt129");
    [&ids[..], &ids[1..32]].concat()
}

/// Bits of the logits of every row, fed in steps of `chunk`, and of the draft after the last.
fn bits<B: Backend>(model: &Model<B>, ids: &[u32], chunk: usize) -> Vec<Vec<u32>> {
    let mut state = model.new_state(ids.len()).unwrap();
    let mut rows: Vec<Vec<u32>> = Vec::new();
    for c in ids.chunks(chunk) {
        rows.extend(step(model, &mut state, Input::text(c)).iter().map(|row| to_bits(row)));
    }
    rows.push(draft(model, &state));
    rows
}

fn to_bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|v| v.to_bits()).collect()
}

fn draft<B: Backend>(model: &Model<B>, state: &State<B>) -> Vec<u32> {
    let draft = model.draft(state, 17).unwrap().unwrap();
    to_bits(&[draft.logits.as_f32(), &draft.confidence].concat())
}

/// The same with every tap read.
fn traced<B: Backend>(model: &Model<B>, ids: &[u32], chunk: usize) -> Vec<Vec<u32>> {
    let mut state = model.new_state(ids.len()).unwrap();
    let mut rows: Vec<Vec<u32>> = Vec::new();
    for c in ids.chunks(chunk) {
        let mut sink = |name: &str, value: &B::Buf| {
            let value = model.backend().read(value).unwrap();
            if name == "logits" {
                rows.extend((0..value.rows()).map(|r| to_bits(value.row(r))));
            }
        };
        model.forward(&mut state, Input::text(c), Rows::All, &mut Taps::new(&mut sink)).unwrap();
    }
    rows.push(draft(model, &state));
    rows
}

fn assert_same(got: &[Vec<u32>], want: &[Vec<u32>], what: &str) {
    let row = got.iter().zip(want).position(|(a, b)| a != b);
    assert!(got.len() == want.len() && row.is_none(), "{what}: the bits of row {row:?} differ");
}

/// How the text is cut.
struct Cuts {
    plain: &'static [usize],
    traced: &'static [usize],
}

const ALL: Cuts = Cuts { plain: &[1, 2, 3, 7, 16], traced: &[1, 7, 1000] };
const TWO: Cuts = Cuts { plain: &[7], traced: &[16] };

/// `more` are backends that must give the bits of `backend`.
fn check<B: Backend>(name: &str, ids: &[u32], cuts: &Cuts, backend: B, more: Vec<B>) {
    let model = load(name, backend);
    let mode = model.backend().mode().name();
    assert!(ids.len() > 4 * model.config().sliding_window, "{name}: the text wraps its windows");
    let whole = bits(&model, ids, ids.len());
    for chunk in cuts.plain {
        assert_same(&bits(&model, ids, *chunk), &whole, &format!("{name} {mode} in steps of {chunk}"));
    }
    for chunk in cuts.traced {
        assert_same(
            &traced(&model, ids, *chunk),
            &whole,
            &format!("{name} {mode} traced in steps of {chunk}"),
        );
    }
    for (i, backend) in more.into_iter().enumerate() {
        let got = bits(&load(name, backend), ids, 16);
        assert_same(&got, &whole, &format!("{name} {mode}, backend {i}, in steps of 16"));
    }
}

/// The reference is slow, so that only nano's text is cut in all ways; `HALLMARK_FULL=1` cuts all texts in all ways.
#[test]
fn steps_give_the_same_bits_on_the_reference() {
    let full = std::env::var_os("HALLMARK_FULL").is_some();
    eprintln!(
        "all cuts of {}",
        if full { "every text" } else { "nano's text; two of micro's and the demo's" }
    );
    for mode in [Mode::Exact, Mode::Source] {
        for name in ["nano", "micro", "demo"] {
            let cuts = if full || name == "nano" { &ALL } else { &TWO };
            let ids = text(name);
            let ids = if full { &ids[..] } else { &ids[..ids.len().min(130)] };
            check(name, ids, cuts, Reference::new(mode), Vec::new());
        }
    }
}

/// Steps of any length, one thread and two, every instruction set.
fn check_cpu(name: &str) {
    let ids = text(name);
    assert!(ids.len() >= 150);
    for mode in [Mode::Exact, Mode::Source, Mode::Native] {
        let mut more = vec![Cpu::new(mode, Some(2), None).unwrap()];
        let others = Isa::available().into_iter().filter(|isa| *isa != Isa::best());
        more.extend(others.map(|isa| Cpu::new(mode, Some(1), Some(isa)).unwrap()));
        check(name, &ids, &ALL, Cpu::new(mode, Some(1), None).unwrap(), more);
    }
}

#[test]
fn steps_threads_and_instructions_give_the_same_bits_on_the_cpu_nano() {
    check_cpu("nano");
}

#[test]
fn steps_threads_and_instructions_give_the_same_bits_on_the_cpu_micro() {
    check_cpu("micro");
}

#[test]
fn steps_threads_and_instructions_give_the_same_bits_on_the_cpu_demo() {
    check_cpu("demo");
}
