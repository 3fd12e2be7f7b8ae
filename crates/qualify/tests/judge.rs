//! The judge on traces of which neither is ours: the figures that were published with the goldens, to their digits.

mod common;
use common::*;

use qualify::{
    Thresholds, Verdict,
    judge::{Judgement, judge, page, text},
    trace::{Draft, Header, Tensor, Trace},
};

fn nrms(j: &Judgement, pass: &str) -> f64 {
    let p = j.passes.iter().find(|p| p.pass == pass).unwrap_or_else(|| panic!("no pass {pass}"));
    p.tensor("logits").unwrap().values.unwrap().nrms
}

/// Asserts a figure as printed: that table was rounded from figures of three digits, so those are what must round to it.
fn printed(j: &Judgement, pass: &str, want: &str) {
    let three: f64 = format!("{:.2e}", nrms(j, pass)).parse().unwrap();
    let digits = want.split('e').next().unwrap().split_once('.').unwrap().1.len() as i32;
    let exponent: i32 = want.split_once('e').map_or(0, |(_, e)| e.parse().unwrap());
    let half = 0.5 * 10f64.powi(exponent - digits) * (1.0 + 1e-9);
    let want: f64 = want.parse().unwrap();
    assert!(
        (three - want).abs() <= half,
        "{three:e} for {want:e}: {pass} of {} to {}",
        j.candidate,
        j.reference
    );
}

#[test]
fn figures_of_the_goldens_are_those_published_with_them() {
    let rows = [
        ("nano", "bf16", "float32", "prompt1", "0.010"),
        ("nano", "bf16", "float32", "prompt33", "0.035"),
        ("nano", "official", "float32", "prompt1", "0.055"),
        ("nano", "official", "float32", "prompt33", "0.069"),
        ("nano", "official", "float32", "prompt129", "0.103"),
        ("nano", "official", "float32", "dense33", "0.044"),
        ("nano", "official", "float32", "dense129", "0.052"),
        ("nano", "official_float32", "float32", "decode", "4.0e-7"),
        ("nano", "official_float32", "float32", "image", "4.0e-7"),
        ("micro", "bf16", "float32", "prompt1", "0.024"),
        ("micro", "bf16", "float32", "prompt33", "0.048"),
        ("micro", "official", "float32", "prompt1", "0.061"),
        ("micro", "official", "float32", "prompt33", "0.077"),
        ("micro", "official", "float32", "prompt129", "0.097"),
        ("micro", "official", "float32", "dense33", "0.072"),
        ("micro", "official_float32", "float32", "decode", "5.8e-7"),
    ];
    for (model, candidate, reference, pass, want) in rows {
        printed(&judged(model, candidate, reference), pass, want);
    }
    // "every prompt: 2.9e-7 .. 3.7e-7"; one of the prompts is committed.
    let got = nrms(&judged("nano", "official_float32", "float32"), "prompt33");
    assert!((2.85e-7..3.75e-7).contains(&got), "{got:e}");
}

/// "greedy tokens equal to float32 before the first difference"
#[test]
fn decoded_tokens_are_compared_up_to_the_first_that_differs() {
    for (model, candidate, want) in
        [("nano", "bf16", 16), ("nano", "official", 16), ("micro", "bf16", 16), ("micro", "official", 5)]
    {
        let j = judged(model, candidate, "float32");
        let decode = j.passes.iter().find(|p| p.pass == "decode").unwrap();
        assert_eq!(decode.equal_tokens - 33, want, "{model} {candidate}");
        // The row that chose the first differing token saw the same text.
        let rows = decode.tensor("logits").unwrap().rows;
        assert_eq!(rows, (want + 1).min(16), "{model} {candidate}");
    }
}

#[test]
fn a_second_trace_of_the_reference_makes_the_verdict_relative() {
    let (reference, official, exact) =
        (golden("nano", "float32"), golden("nano", "official"), golden("nano", "official_float32"));
    let limits = Thresholds::built_in();
    // The official run against float32, with the official run's own distance as the floor: within it, though 7 %.
    let j = judge(&reference, &official, Some(&official), limits).unwrap();
    assert_eq!(j.verdict, Verdict::Pass);
    let floor = j.passes.iter().find(|p| p.pass == "prompt33").unwrap().floor.as_ref().unwrap();
    assert!(floor.nrms > 0.06 && (floor.limit_nrms / floor.noise_nrms - 1.2).abs() < 1e-9);
    // The same candidate against the noise of single precision: far past it.
    let j = judge(&reference, &official, Some(&exact), limits).unwrap();
    assert_eq!(j.verdict, Verdict::Fail);
    let pass = j.passes.iter().find(|p| p.pass == "prompt33").unwrap();
    assert_eq!(pass.floor.as_ref().unwrap().verdict, Verdict::Fail);
    // Passes without a second run are not taken as passed.
    let j = judge(&reference, &exact, Some(&golden("nano", "bf16")), limits).unwrap();
    assert_eq!(j.verdict, Verdict::Pass);
    let j = judge(&reference, &official, Some(&trace_of(&official, "prompt33")), limits).unwrap();
    assert_eq!(j.verdict, Verdict::Partial);
    // Without a second trace there is no verdict.
    assert_eq!(judged("nano", "official", "float32").verdict, Verdict::NotRun);
}

/// Tokens and logits of one pass.
fn trace_of(trace: &Trace, pass: &str) -> Trace {
    let mut draft = Draft::new(Header::default());
    for name in ["tokens", "logits"] {
        draft.put(pass, name, trace.get(pass, name).unwrap());
    }
    draft.finish("part")
}

#[test]
fn selections_are_compared_as_sets_and_margins_say_how_sure_they_were() {
    let j = judged("nano", "official", "float32");
    let p = j.passes.iter().find(|p| p.pass == "prompt33").unwrap();
    let choices = |name: &str| p.tensor(name).unwrap().choices.clone().unwrap();
    // Rows that see no more entries than are kept can't differ.
    let topk = choices("layers.4.topk");
    assert!(topk.rows == 33 && topk.overlap > 0.8 && topk.differing.iter().all(|r| *r >= 8), "{topk:?}");
    let experts = p.tensor("layers.6.router.experts").unwrap();
    let differing = &experts.choices.as_ref().unwrap().differing;
    assert_eq!(experts.margins.len(), differing.len());
    assert!(experts.margins.iter().all(|m| *m < 0.6), "a sure choice flipped: {:?}", experts.margins);
    assert!(p.tensor("layers.4.candidates").unwrap().differing.is_some());
    assert_eq!(p.tensor("layers.1.engram.hash_ids").unwrap().differing, Some(0));
}

#[test]
fn the_first_departure_follows_the_order_of_the_forward_pass() {
    let reference = golden("nano", "float32");
    let mut draft = Draft::new(Header::default());
    for name in reference.tensors("prompt33") {
        let mut t = reference.get("prompt33", &name).unwrap();
        if ["layers.3.attn_out", "layers.2.streams", "logits"].contains(&name.as_str()) {
            let doubled = t.as_float().unwrap().iter().map(|v| v * 1.5).collect();
            t = Tensor::float(&t.shape, doubled);
        }
        draft.put("prompt33", &name, t);
    }
    let j = judge(&reference, &draft.finish("changed"), None, Thresholds::built_in()).unwrap();
    let p = &j.passes[0];
    assert_eq!(p.departs.as_deref(), Some("layers.2.streams"));
    let page = page(&j);
    assert!(
        page.contains("\"departs\":\"layers.2.streams\"") && !page.contains("http://www.w3.org/1999/xhtml")
    );
    for part in ["src=", "href=", "fetch(", "import "] {
        assert!(!page.contains(part), "the page is self-contained: {part}");
    }
    let text = text(&j, true);
    assert!(text.contains("prompt33: first departure at layers.2.streams"), "{text}");
    assert!(text.contains("verdict: NOT RUN"), "{text}");
}

#[test]
fn a_written_trace_reads_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.safetensors");
    let header = Header { engine: "test 1".into(), numerics: "exact".into(), ..Header::default() };
    let mut draft = Draft::new(header);
    draft.put("prompt2", "tokens", Tensor::int(&[2], vec![0, 1]));
    draft.put("prompt2", "logits", Tensor::float(&[2, 2], vec![0.5, f32::NEG_INFINITY, 1e-30, -0.0]));
    draft.put("prompt2", "layers.0.candidates", Tensor::int(&[2, 2], vec![1, 0, 1, 1]));
    draft.put("prompt2", "layers.0.topk", Tensor::int(&[2, 2], vec![0, -1, 0, 1]));
    let written = draft.write(&path).unwrap();
    let read = Trace::open(&path).unwrap();
    assert_eq!(read.header().unwrap().version, 1);
    assert_eq!(read.header(), written.header());
    assert_eq!(read.names(), written.names());
    for name in read.names() {
        let name = name.strip_prefix("prompt2/").unwrap();
        assert_eq!(read.get("prompt2", name), written.get("prompt2", name), "{name}");
    }
    assert_eq!(read.tokens("prompt2").unwrap(), [0, 1]);
    assert!(read.tokens("prompt3").unwrap_err().to_string().contains("prompt3/tokens is missing"));
}

#[test]
fn damaged_and_foreign_files_are_refused_with_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let open = |bytes: &[u8]| {
        let path = dir.path().join("bad.safetensors");
        std::fs::write(&path, bytes).unwrap();
        Trace::open(&path).unwrap_err().to_string()
    };
    assert!(open(b"abc").contains("shorter than"));
    assert!(open(&[255; 64]).contains("no valid safetensors file"));
    let file = |header: &str, data: &[u8]| {
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
    };
    let short = file(r#"{"a/x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#, &[0; 8]);
    assert!(open(&short).contains("no valid safetensors file"));
    let lies = file(r#"{"a/x":{"dtype":"F32","shape":[9],"data_offsets":[0,16]}}"#, &[0; 16]);
    assert!(open(&lies).contains("no valid safetensors file"));
    let dtype = file(r#"{"a/x":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}"#, &[0; 4]);
    assert!(open(&dtype).contains("tensor a/x is F8_E4M3"), "{}", open(&dtype));
    let version = file(
        r#"{"__metadata__":{"hallmark.trace":"{\"version\":9,\"engine\":\"e\",\"model\":\"m\",\"numerics\":\"n\"}"}}"#,
        &[],
    );
    assert!(open(&version).contains("version 9"));
    let field = file(r#"{"__metadata__":{"hallmark.trace":"{\"version\":1}"}}"#, &[]);
    assert!(open(&field).contains("engine"), "{}", open(&field));
}

#[test]
fn passes_come_in_the_order_of_their_numbers() {
    let passes = golden("nano", "float32").passes();
    let prompts: Vec<&str> = passes.iter().map(String::as_str).filter(|p| p.starts_with("prompt")).collect();
    assert_eq!(prompts, ["prompt1", "prompt2", "prompt3", "prompt17", "prompt33", "prompt64", "prompt129"]);
}
