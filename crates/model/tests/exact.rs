//! Mode `exact` against the float32 goldens of nano and micro: logits of every group, greedy tokens, and the
//! quantisation bin behind every row that departs.

mod common;

use common::{
    Golden, Tokens, load, load_dense, median, on_backends, prefill,
    probe::{Bin, Probe, departed_bins},
    row_nrms, step,
    trace::trace,
};
use model::{Input, Model};
use ops::{Backend, Host, Mode};

/// A row further away than this has a quantised value in another bin: without one, implementations agree to 4e-7 on
/// average and 1.5e-6 at worst (orders of fp32 sums through ten layers).
const SAME_BINS: f64 = 2e-6;
/// Rows above this are rare, since a bin moves a logit row by 1e-6 to 2e-3 (fixtures/model/README.md).
const ONE_BIN: f64 = 1e-4;
/// A bin that also changes a top-k choice moves a row by up to this (fixtures/model/README.md).
const CHOICE: f64 = 4e-2;

const MODELS: [&str; 2] = ["nano", "micro"];

/// One golden group's rows under test.
struct Group {
    name: String,
    tokens: Tokens,
    /// Row of the prefill that the golden's first row stands for.
    first: usize,
    want: Host,
    dense: bool,
    /// Whether the rows are text of the float32 golden that no other group holds (decode_full begins with prompt33).
    text: bool,
}

/// The float32 golden's groups, and those that the released code gives in single precision.
fn groups(model: &str) -> Vec<Group> {
    let golden = |file: &str| Golden::open(&format!("{model}/golden/{file}.safetensors"));
    let float32 = golden("float32");
    let mut names = float32.prompts();
    names.extend(["decode_full", "image", "dense33", "dense129"].map(String::from));
    let mut list = Vec::new();
    for file in ["float32", "official_float32"] {
        let golden = golden(file);
        for name in names.iter().filter(|name| golden.has(&format!("{name}/logits"))) {
            list.push(Group {
                tokens: Tokens::of(&float32, model, name),
                first: 0,
                want: golden.get(&format!("{name}/logits")),
                dense: name.starts_with("dense"),
                text: file == "float32"
                    && (name == "decode_full" || name.starts_with("prompt"))
                    && name != "prompt33",
                name: if file == "float32" { name.clone() } else { format!("{file} {name}") },
            });
        }
    }
    list
}

/// The bins behind the group's departing rows.
fn bins<B: Backend>(probe: &Model<Probe<B>>, group: &Group) -> Vec<Bin> {
    let run = || {
        // Traces score every index source, so that calls count alike at any length.
        let trace = trace(probe, group.tokens.input());
        let logits = &trace.last().unwrap().1;
        let rows: Vec<Vec<f32>> =
            (0..group.want.rows()).map(|r| logits.row(group.first + r).to_vec()).collect();
        row_nrms(&rows, &group.want)
    };
    departed_bins(probe, group.first, SAME_BINS, run).unwrap_or_else(|e| panic!("{}: {e}", group.name))
}

/// Ascending numbers as ranges.
fn ranges(rows: &[usize]) -> String {
    let runs: Vec<String> = rows
        .chunk_by(|a, b| a + 1 == *b)
        .map(|run| match run {
            [one] => one.to_string(),
            _ => format!("{}-{}", run[0], run[run.len() - 1]),
        })
        .collect();
    if runs.is_empty() { "none".into() } else { runs.join(" ") }
}

/// The bars of `exact`: median, share of rows above [`ONE_BIN`], worst row.
fn check_bars(rows: &[f64], share: f64, what: &str) {
    let (m, n) = (median(rows), rows.len());
    let above = rows.iter().filter(|d| **d >= ONE_BIN).count();
    let worst = rows.iter().copied().fold(0.0, f64::max);
    eprintln!("{what}: {n} rows, median {m:.2e}, {above} above {ONE_BIN:.0e}, worst {worst:.2e}");
    assert!(m < SAME_BINS, "{what}: median {m:.2e}, limit {SAME_BINS:.0e}");
    assert!(above as f64 <= share * n as f64, "{what}: {above} of {n} rows above {ONE_BIN:.0e}");
    assert!(worst <= CHOICE, "{what}: worst row {worst:.2e}, limit {CHOICE:.0e}");
}

/// Checks every group of at most `longest` tokens against the bars; returns the groups with departing rows, and the bins that explain them.
fn departures<B: Backend>(make: impl Fn(Mode) -> B, longest: usize) -> Vec<String> {
    let mut named = Vec::new();
    let (mut text, mut all) = (Vec::new(), Vec::new());
    for name in MODELS {
        let (model, dense) = (load(name, make(Mode::Exact)), load_dense(name, make(Mode::Exact)));
        for group in groups(name).into_iter().filter(|group| group.tokens.ids.len() <= longest) {
            let rows =
                row_nrms(&prefill(if group.dense { &dense } else { &model }, &group.tokens), &group.want);
            let worst = rows.iter().copied().fold(0.0, f64::max);
            eprintln!(
                "{name} {:24} {:3} rows, median {:.2e}, worst {worst:.2e}",
                group.name,
                rows.len(),
                median(&rows)
            );
            if worst >= SAME_BINS {
                let probe = Probe::new(make(Mode::Exact));
                let probed = if group.dense { load_dense(name, probe) } else { load(name, probe) };
                let bins = bins(&probed, &group);
                let above: Vec<usize> = (0..rows.len()).filter(|r| rows[*r] >= 1e-5).collect();
                let distances: Vec<String> = bins.iter().map(|b| format!("{:.1e}", b.distance)).collect();
                let bins: Vec<String> = bins.iter().map(|b| b.name(probed.config())).collect();
                named.push(format!(
                    "{name} {}: {}; rows above 1e-5: {}",
                    group.name,
                    bins.join(", "),
                    ranges(&above)
                ));
                let distances = distances.join(", ");
                eprintln!("    {}; {distances} of the row's RMS from the boundary", named.last().unwrap());
            }
            all.extend(&rows);
            if group.text {
                text.extend(rows);
            }
        }
    }
    check_bars(&text, 0.05, "prompts and decoded text, each position once");
    // One bin at the start of an image moves the whole group, so no share is asked of these.
    check_bars(&all, 1.0, "image and dense groups too");
    named
}

/// Logits of the rows that chose tokens 33, 34, …, one token a step, and the greedy tokens.
fn decoded<B: Backend>(model: &Model<B>, golden: &Golden) -> (Vec<Vec<f32>>, Vec<u32>) {
    let want = golden.tokens("decode");
    let mut state = model.new_state(want.len()).unwrap();
    let mut ids = want[..33].to_vec();
    let mut rows = vec![step(model, &mut state, Input::text(&ids)).pop().unwrap()];
    loop {
        ids.push(ops::linear::argmax(rows.last().unwrap()) as u32);
        if ids.len() == want.len() {
            return (rows, ids);
        }
        rows.extend(step(model, &mut state, Input::text(&ids[ids.len() - 1..])));
    }
}

/// The reference's departures. One more or one less means that an operator's order of sums changed, or a function of
/// the C library (`exp`) on this machine; then look at the rows that are printed, and name it here.
const REFERENCE: [&str; 4] = [
    "nano prompt3: layers.4.window_kv row 1 element 0; rows above 1e-5: none",
    "nano dense129: layers.3.window_kv row 88 element 36; rows above 1e-5: 88-106 108",
    "micro prompt65: layers.7.window_kv row 49 element 55; rows above 1e-5: 58-60 64",
    "micro image: layers.7.window_kv row 2 element 17; rows above 1e-5: 2-28",
];

#[test]
fn departures_of_the_reference_are_known_bins() {
    assert_eq!(departures(ops::Reference::new, usize::MAX), REFERENCE);
}

#[test]
fn departures_of_the_cpu_are_bins() {
    departures(common::cpu, usize::MAX);
}

on_backends!(greedy_decode_equals_the_goldens);

/// Without `HALLMARK_FULL` the emulator takes groups of up to 33 tokens.
mod emu {
    use crate::common::{emu, full};

    #[test]
    fn greedy_decode_equals_the_goldens() {
        super::greedy_decode_equals_the_goldens(emu);
    }

    #[test]
    fn departures_are_bins() {
        super::departures(emu, if full() { usize::MAX } else { 33 });
    }
}

fn greedy_decode_equals_the_goldens<B: Backend>(make: impl Fn(Mode) -> B) {
    for name in MODELS {
        let model = load(name, make(Mode::Exact));
        for file in ["float32", "official_float32"] {
            let golden = Golden::open(&format!("{name}/golden/{file}.safetensors"));
            let (rows, ids) = decoded(&model, &golden);
            assert_eq!(ids, golden.tokens("decode"), "{name} {file}: greedy tokens");
            let group = Group {
                name: format!("{name} {file} decode"),
                tokens: Tokens::text(ids[..48].to_vec()),
                first: 32,
                want: golden.get("decode/logits"),
                dense: false,
                text: false,
            };
            let rows = row_nrms(&rows, &group.want);
            let worst = rows.iter().copied().fold(0.0, f64::max);
            eprintln!("{}: median {:.2e}, worst {worst:.2e}", group.name, median(&rows));
            assert!(worst <= CHOICE, "{}: worst row {worst:.2e}", group.name);
            if worst >= SAME_BINS {
                // The rows of a prefill have the bits of decoded rows (tests/invariance.rs).
                let probe = load(name, Probe::new(make(Mode::Exact)));
                for bin in bins(&probe, &group) {
                    eprintln!("    {}", bin.name(probe.config()));
                }
            }
        }
    }
}
