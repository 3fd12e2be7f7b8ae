//! Traces of our own engine beside those of others.

mod common;
use common::*;

use model::Input;
use ops::{Mode, Reference};
use qualify::{
    Thresholds,
    judge::{compare, judge},
    trace::{Decode, Draft, Header, Kind, Recorder, TABLE, place, record_decode, record_prefill},
};

fn header(numerics: &str) -> Header {
    Header { engine: "hallmark".into(), model: "nano".into(), numerics: numerics.into(), ..Header::default() }
}

#[test]
fn every_intermediate_of_the_goldens_is_written_and_agrees() {
    let golden = golden("nano", "float32");
    let ckpt = opened("nano");
    let model = load(&ckpt, Reference::new(Mode::Exact));
    let mut recorder = Recorder::new(model.config(), Some(&ckpt)).unwrap();
    let mut draft = Draft::new(header("exact"));
    for pass in ["prompt17", "prompt33"] {
        let ids = golden.tokens(pass).unwrap();
        record_prefill(&model, &mut recorder, Input::text(&ids), pass, &mut draft).unwrap();
    }
    let own = draft.finish("own");
    let j = judge(&golden, &own, None, Thresholds::built_in()).unwrap();
    for p in &j.passes {
        assert!(p.misshapen.is_empty(), "{:?}", p.misshapen);
        // The golden repeats the candidates of layer 4 at the layers that use them.
        let unmatched: Vec<&String> = p.unmatched.iter().filter(|n| !n.ends_with(".candidates")).collect();
        assert!(unmatched.is_empty(), "{}: names that one of the two lacks: {unmatched:?}", p.pass);
        for t in &p.tensors {
            match t.kind {
                // Single precision on both sides; a cached element next to a rounding boundary would show as a bin.
                Kind::Values | Kind::Cached | Kind::Scores | Kind::Logits | Kind::RoutingWeights => {
                    assert!(t.error() < 5e-6, "{} {}: {:e}", p.pass, t.name, t.error());
                }
                _ => assert_eq!(t.error(), 0.0, "{} {}", p.pass, t.name),
            }
        }
        for name in golden.tensors(&p.pass).iter().filter(|n| place(n).kind == Kind::Margin) {
            let (a, b) = (own.floats(&p.pass, name).unwrap(), golden.floats(&p.pass, name).unwrap());
            for (a, b) in a.as_float().unwrap().iter().zip(b.as_float().unwrap()) {
                assert!(a == b || (a - b).abs() < 2e-5, "{name}: {a} {b}");
            }
        }
    }
}

#[test]
fn decode_steps_are_written_as_the_goldens_have_them() {
    let golden = golden("nano", "official_float32");
    let ckpt = opened("nano");
    let model = load(&ckpt, Reference::new(Mode::Exact));
    let mut recorder = Recorder::new(model.config(), None).unwrap();
    let mut draft = Draft::new(header("exact"));
    let ids = golden.tokens("decode").unwrap();
    let run = Decode { prompt: &ids[..33], steps: 16, follow: &[] };
    record_decode(&model, &mut recorder, run, &mut draft).unwrap();
    let p = compare(&golden, &draft.finish("own"), "decode").unwrap();
    assert_eq!(p.equal_tokens, 49);
    assert!(p.misshapen.is_empty(), "{:?}", p.misshapen);
    for t in &p.tensors {
        assert!(t.error() < 5e-6, "{}: {:e}", t.name, t.error());
    }
    for name in ["dspark.logits", "dspark.tokens", "dspark.confidence", "layers.4.topk", "logits"] {
        assert!(p.tensor(name).is_some(), "{name}");
    }
}

/// `docs/trace.md` lists exactly the names of the table, with shape and rounding.
#[test]
fn the_documentation_lists_every_name() {
    let doc = std::fs::read_to_string(root().join("docs/trace.md")).unwrap();
    let rows: Vec<&str> = doc.lines().filter(|l| l.starts_with("| `")).collect();
    let want: Vec<String> = TABLE
        .iter()
        .map(|r| {
            let name = if r.layered { format!("layers.L.{}", r.name) } else { r.name.to_owned() };
            let operators = if r.operators.is_empty() { "-".to_owned() } else { r.operators.join(", ") };
            format!("| `{name}` | {} | {} | {operators} | {} |", r.shape, r.rounding, r.meaning)
        })
        .collect();
    assert_eq!(rows, want, "docs/trace.md should hold:\n{}", want.join("\n"));
}
