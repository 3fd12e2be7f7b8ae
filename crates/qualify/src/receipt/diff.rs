//! Two receipts side by side.

use std::{collections::BTreeMap, fmt::Write as _};

use crate::receipt::{Check, Receipt};

/// What differs between `a` and `b`: contents, machine, limits, verdicts and figures.
pub fn diff(a: &Receipt, b: &Receipt) -> String {
    let mut out = String::new();
    let mut line = |name: &str, x: &str, y: &str| {
        if x != y {
            let _ = writeln!(out, "{name}: {x} -> {y}");
        }
    };
    line("scope", &a.scope, &b.scope);
    line("verdict", a.verdict.word(), b.verdict.word());
    line("created", &a.created, &b.created);
    line("commit", &a.inputs.commit, &b.inputs.commit);
    line("inputs", &b.inputs.changed(&a.inputs).join(" "), "");
    line("build", &format!("{:?}", a.build), &format!("{:?}", b.build));
    line("machine", &format!("{:?}", a.machine), &format!("{:?}", b.machine));
    line("device", &format!("{:?}", a.device), &format!("{:?}", b.device));
    line("numerics", &a.numerics, &b.numerics);
    let fingerprint = |r: &Receipt| r.checkpoint.as_ref().map_or_else(String::new, |c| c.fingerprint.clone());
    line("checkpoint", &fingerprint(a), &fingerprint(b));
    let names: std::collections::BTreeSet<&String> = a.thresholds.keys().chain(b.thresholds.keys()).collect();
    for name in names {
        let show = |r: &Receipt| r.thresholds.get(name).map_or("absent".to_owned(), f64::to_string);
        line(&format!("threshold {name}"), &show(a), &show(b));
    }
    for (gate, checks) in figures(a, b) {
        for (name, [x, y]) in checks {
            line(&format!("{gate} {name}"), &shown(x), &shown(y));
        }
    }
    out
}

type Pairs<'a> = BTreeMap<&'a str, BTreeMap<&'a str, [Option<&'a Check>; 2]>>;

fn figures<'a>(a: &'a Receipt, b: &'a Receipt) -> Pairs<'a> {
    let mut pairs = Pairs::new();
    for (side, receipt) in [a, b].into_iter().enumerate() {
        for gate in &receipt.gates {
            for check in &gate.checks {
                pairs.entry(&gate.gate).or_default().entry(&check.name).or_default()[side] = Some(check);
            }
        }
    }
    pairs
}

fn shown(check: Option<&Check>) -> String {
    match check {
        None => "absent".into(),
        Some(c) => {
            let figure = c.figure.map_or("-".into(), |f| format!("{f:.4e}"));
            c.verdict.map_or(figure.clone(), |v| format!("{figure} {v}"))
        }
    }
}
