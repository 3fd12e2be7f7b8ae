//! Mode `exact`: every intermediate of the float32 goldens in forward order. The first that departs is reported with
//! its operator, row and distance; only a quantised value at a rounding boundary may depart, and with it nudged all
//! later intermediates agree.

mod common;

use std::collections::BTreeSet;

use common::{
    Golden, Tokens, load, on_backends,
    probe::{Bin, Cache, Probe},
    trace::{Kind, Row, compare, kind, limit, trace},
};
use model::{Input, Model, Rows};
use ops::{Backend, Data, Host, Mode, Taps};

on_backends!(intermediates_equal_the_goldens, decode_selects_what_the_goldens_select);

/// Without `HALLMARK_FULL` the emulator takes prompts of up to 33 tokens.
mod emu {
    use crate::common::{emu, full};

    #[test]
    fn intermediates_equal_the_goldens() {
        super::intermediates_equal(emu, if full() { usize::MAX } else { 33 });
    }

    #[test]
    fn decode_selects_what_the_goldens_select() {
        super::decode_selects_what_the_goldens_select(emu);
    }
}

/// Choices whose golden margin is smaller are ties in single precision. The goldens have none (README: 6.8e-5).
const TIE: f32 = 1e-5;

fn intermediates_equal_the_goldens<B: Backend>(make: impl Fn(Mode) -> B) {
    intermediates_equal(make, usize::MAX);
}

/// The same of groups of at most `longest` tokens.
fn intermediates_equal<B: Backend>(make: impl Fn(Mode) -> B, longest: usize) {
    for name in ["nano", "micro"] {
        let golden = Golden::open(&format!("{name}/golden/float32.safetensors"));
        let model = load(name, make(Mode::Exact));
        let probe = load(name, Probe::new(make(Mode::Exact)));
        let mut groups = golden.prompts();
        groups.extend(["decode_full".into(), "image".into()]);
        groups.retain(|group| golden.tokens(group).len() <= longest);
        for group in groups {
            check_group(&model, &probe, &golden, name, &group);
        }
    }
}

fn check_group<B: Backend>(
    model: &Model<B>,
    probe: &Model<Probe<B>>,
    golden: &Golden,
    name: &str,
    group: &str,
) {
    let tokens = Tokens::of(golden, name, group);
    let margins = ties(golden, group);
    assert_eq!(margins, 0, "{name} {group}: the golden has choices of a margin below {TIE:.0e}");
    let caches = golden.has(&format!("{group}/layers.0.window_kv"));
    let mut bins = Vec::new();
    let mut trace_of = trace(model, tokens.input());
    complete(&trace_of, golden, group);
    // The golden's gate of an image row is the one before it is switched off.
    let compare = |trace: &[(String, Host)]| -> Vec<Row> {
        let off = |r: &Row| r.name.ends_with("engram.gate") && tokens.image.get(r.row) == Some(&true);
        for (_, gate) in trace.iter().filter(|(name, _)| name.ends_with("engram.gate")) {
            for row in (0..gate.rows()).filter(|r| tokens.image.get(*r) == Some(&true)) {
                assert_eq!(gate.row(row), [0.0; 4], "{name} {group}: gate of image row {row}");
            }
        }
        compare(trace, golden, group).into_iter().filter(|r| !off(r)).collect()
    };
    let mut rows = compare(&trace_of);
    let tensors: BTreeSet<&str> = rows.iter().map(|r| r.name.as_str()).collect();
    eprintln!("{name} {group}: {} tensors", tensors.len());
    while let Some(first) = rows.iter().find(|r| r.distance > limit(&r.name)).cloned() {
        let before = rows.len();
        probe.backend().start(&bins);
        trace(probe, tokens.input());
        let found = candidates(probe, &first, caches).into_iter().find(|bin| {
            probe.backend().start(&[bins.as_slice(), &[*bin]].concat());
            trace_of = trace(probe, tokens.input());
            rows = compare(&trace_of);
            let again = rows.iter().find(|r| r.distance > limit(&r.name));
            again.is_none_or(|r| order(&trace_of, r) > order(&trace_of, &first))
        });
        let Some(bin) = found else {
            let what = match kind(&first.name) {
                Kind::Values => format!("NRMS {:.2e}, limit {:.0e}", first.distance, limit(&first.name)),
                Kind::Stored => format!("{:.1} % of the stored values differ", first.distance * 100.0),
                Kind::Choice => "another choice".into(),
            };
            panic!("{name} {group}: first departure {} row {}: {what}", first.name, first.row);
        };
        assert_eq!(rows.len(), before);
        eprintln!(
            "{name} {group}: {} row {} departs by one bin: {}",
            first.name,
            first.row,
            bin.name(probe.config())
        );
        bins.push(bin);
    }
}

/// Values at a rounding boundary that can be behind `row`: those of its own stored row, or of its index query. Where
/// the golden has no caches, every value up to the row's position, the latest first.
fn candidates<B: Backend>(probe: &Model<Probe<B>>, row: &Row, caches: bool) -> Vec<Bin> {
    let c = probe.config();
    let mut near = probe.backend().near();
    if !caches {
        near.retain(|b| b.position(c) <= row.row);
        near.sort_by_key(|b| std::cmp::Reverse(b.position(c)));
        return near;
    }
    near.retain(|b| {
        let tap = if b.cache == Cache::Query { "index_scores" } else { b.cache.tap() };
        row.name == format!("layers.{}.{tap}", b.layer(c)) && b.row == row.row
    });
    near
}

/// Place of a row in the forward pass.
fn order(trace: &[(String, Host)], row: &Row) -> (usize, usize) {
    (trace.iter().position(|(name, _)| *name == row.name).unwrap(), row.row)
}

/// Choices of the group whose margin is below [`TIE`].
fn ties(golden: &Golden, group: &str) -> usize {
    let prefix = format!("{group}/");
    let names = golden.names().into_iter().filter(|n| n.starts_with(&prefix) && n.ends_with(".margin"));
    names.map(|n| golden.get(&n).as_f32().iter().filter(|m| **m < TIE).count()).sum()
}

/// Checks that no intermediate of the golden is left out.
fn complete(trace: &[(String, Host)], golden: &Golden, group: &str) {
    let given = ["tokens", "types", "aligned", "patches", "grid", "vit"];
    let find = |name: &str| trace.iter().find(|(n, _)| n == name).map(|(_, v)| v);
    for key in golden.names() {
        let Some(name) = key.strip_prefix(&format!("{group}/")) else { continue };
        if given.contains(&name) || name.ends_with(".margin") || find(name).is_some() {
            continue;
        }
        let want = golden.get(&key);
        match name.rsplit('.').next() {
            // A ratio-2 layer before its first entry makes no choice.
            Some("topk") => assert_eq!(want.width(), 0, "{key} has no tap"),
            // Later layers read the source's candidates.
            Some("candidates") => {
                let (_, source) = trace.iter().find(|(n, _)| n.ends_with(".candidates")).unwrap();
                assert_eq!(source, &want, "{key}");
            }
            _ => panic!("{key} has no tap"),
        }
    }
}

/// Choices of the index sources while decoding; the golden's released code decodes one token a step.
fn decode_selects_what_the_goldens_select<B: Backend>(make: impl Fn(Mode) -> B) {
    for name in ["nano", "micro"] {
        let golden = Golden::open(&format!("{name}/golden/official_float32.safetensors"));
        let model = load(name, make(Mode::Exact));
        let ids = golden.tokens("decode");
        let mut state = model.new_state(ids.len()).unwrap();
        model.forward(&mut state, Input::text(&ids[..33]), Rows::None, &mut Taps::off()).unwrap();
        for (i, id) in ids[33..48].iter().enumerate() {
            let mut found = Vec::new();
            let mut sink = |tap: &str, value: &B::Buf| {
                if tap.ends_with(".topk") {
                    found.push((format!("decode/{tap}"), model.backend().read(value).unwrap()));
                }
            };
            let mut taps = Taps::new(&mut sink);
            model.forward(&mut state, Input::text(&[*id]), Rows::None, &mut taps).unwrap();
            let mut compared = 0;
            for (key, got) in found.into_iter().filter(|(key, _)| golden.has(key)) {
                let want = golden.get(&key);
                let width = want.width();
                let Data::I32(want) = want.data() else { panic!("{key} is no choice") };
                let mut got = got.as_i32().to_vec();
                got.resize(width, -1);
                assert_eq!(got, want[i * width..][..width], "{name} {key} at position {}", 33 + i);
                compared += 1;
            }
            assert_eq!(compared, model.config().index_source_layer_ids.len(), "{name}");
        }
    }
}
