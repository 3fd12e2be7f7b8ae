//! Every fault in every size: caught by a gate and named, or listed as missed with the reason.

mod common;
use common::*;

use qualify::fault::{
    FAULTS,
    suite::{Finding, Suite, document},
};
use rayon::prelude::*;

/// Fault, size, gates and name of the rows of the first table.
fn rows(document: &str) -> Vec<String> {
    let table = document.split("| --- |").nth(1).and_then(|_| document.split("## What each").next()).unwrap();
    let rows =
        table.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| fault") && !l.starts_with("| ---"));
    rows.map(|l| l.splitn(6, '|').take(5).collect::<Vec<_>>().join("|")).collect()
}

#[test]
fn every_fault_is_caught_and_named_or_missed_for_a_stated_reason() {
    let (checkpoint, second, reference) = (opened("nano"), opened("micro"), golden("nano", "official"));
    let backend = |mode| cpu::Cpu::new(mode, Some(1), None).unwrap();
    let suite = Suite {
        checkpoint: &checkpoint,
        reference: &reference,
        pass: "prompt33",
        key: "nano-source",
        second: &second,
        backend,
    };
    let base = suite.baseline().unwrap();
    let all: Vec<_> = FAULTS.iter().flat_map(|f| f.sizes.iter().map(move |s| (f, *s))).collect();
    let findings: Vec<Finding> =
        all.into_par_iter().map(|(fault, size)| suite.run(fault, size, &base).unwrap()).collect();
    for f in &findings {
        let what = format!("{} {}: gates {:?}, blame {:?}", f.fault.name, f.size.word(), f.gates, f.blame);
        assert_eq!(f.caught(), f.reason().is_empty(), "{what}");
        if f.caught() {
            assert_eq!(f.operator(), Some(f.fault.operator), "{what}");
        }
    }
    // The nine of the qualification's definition, whole: none may ever be missed.
    for name in [
        "inverse-rope-sign",
        "stale-index-keys",
        "probabilities-unrounded",
        "comb-transposed",
        "expert-order",
        "window-one-short",
        "missing-sink",
        "engram-wrong-head",
        "fp8-activation-scale-x2",
    ] {
        let f = findings.iter().find(|f| f.fault.name == name).unwrap();
        assert!(f.caught() && f.operator() == Some(f.fault.operator), "{name}");
    }
    let kinds =
        FAULTS.iter().filter(|k| findings.iter().any(|f| f.fault.name == k.name && f.caught())).count();
    assert!(kinds >= 20, "{kinds} kinds of faults caught");
    // Figures may differ between machines; what was seen and named may not.
    let written = std::fs::read_to_string(root().join("docs/faults.md")).unwrap();
    assert_eq!(
        rows(&written),
        rows(&document(&findings, &base)),
        "run `cargo run -p qualify --example faults`"
    );
}
