//! Receipts: the schema, edits, the present tree, the README table.

mod common;
use common::root;

use qualify::{
    Verdict,
    inputs::Inputs,
    receipt::{
        BEGIN, Check, CheckpointId, Context, DeviceId, END, EngramId, FileHash, Gate, Receipt, Rule, State,
        diff, replace_table, seal, table, verify,
    },
};
use serde_json::{Value, json};

const TREE: &str = "100644 blob aaaa\tCargo.lock\n100644 blob bbbb\tcrates/ops/src/lib.rs\n";

fn tree(text: &str) -> Inputs {
    Inputs::from_listing(text, &"c".repeat(40), false)
}

fn limit(threshold: &str, limit: f64) -> Rule {
    Rule::AtMost { limit, threshold: threshold.into() }
}

fn noise(noise: f64) -> Rule {
    let thresholds = ["g3.factor".into(), "g3.floor_nrms".into()];
    Rule::Noise { noise, factor: 1.2, floor: 1e-5, thresholds }
}

/// A receipt of a clean tree.
fn sample() -> Receipt {
    let gates = vec![
        Gate::new("G0", vec![Check::new("store_window tiny", 0.0, Rule::Zero)]),
        Gate::new("G1", vec![Check::new("rmsnorm tiny", 1e-4, limit("ops.rmsnorm.source", 3e-4))]),
        Gate::new(
            "G3",
            vec![
                Check::new("prompt33 NRMS", 0.05, noise(0.06)),
                Check::new("the proposed 1 %", 0.05, Rule::Shown),
            ],
        ),
    ];
    let context = Context {
        kind: "model".into(),
        scope: "A test model on a test device".into(),
        device: DeviceId {
            name: "cpu".into(),
            family: "cpu-x86_64".into(),
            detail: String::new(),
            driver: String::new(),
        },
        numerics: "source".into(),
        checkpoint: Some(CheckpointId {
            name: "nano".into(),
            fingerprint: "0".repeat(64),
            revision: String::new(),
            format: "fp8+fp4".into(),
            files: vec![FileHash { name: "config.json".into(), bytes: 3, sha256: "1".repeat(64) }],
            engram: Some(EngramId {
                fingerprint: "4".repeat(64),
                revision: String::new(),
                files: vec![FileHash { name: "tables.safetensors".into(), bytes: 5, sha256: "5".repeat(64) }],
            }),
        }),
        references: Vec::new(),
        command: "hallmark qualify model nano".into(),
        unqualified: false,
    };
    let mut r = context.receipt(gates, json!({ "self_noise": [{ "nrms": 0.06 }] }));
    r.inputs = tree(TREE);
    r.verdict = r.derived();
    r.seals = seal(&r);
    r
}

fn problems(r: &Receipt) -> Vec<String> {
    verify(r, &tree(TREE), None).problems
}

/// The sample with `edit` made to its JSON, as an editor would.
fn edited(edit: impl Fn(&mut Value)) -> Receipt {
    let mut tree: Value = serde_json::from_str(&sample().json()).unwrap();
    edit(&mut tree);
    Receipt::parse(&tree.to_string(), "edited.json").unwrap()
}

#[test]
fn a_sound_receipt_verifies_and_reads_back_as_it_was() {
    let r = sample();
    assert_eq!(r.verdict, Verdict::Pass);
    assert_eq!(problems(&r), [""; 0]);
    assert_eq!(verify(&r, &tree(TREE), None).state, State::Current);
    let again = Receipt::parse(&r.json(), "r.json").unwrap();
    assert_eq!(again, r);
    assert_eq!(problems(&again), [""; 0]);
}

#[test]
fn every_edit_has_its_own_message() {
    let figure = problems(&edited(|t| t["gates"][1]["checks"][0]["figure"] = json!(2e-4)));
    assert_eq!(figure, ["G1: a figure or a rule was changed after sealing"]);

    let threshold = problems(&edited(|t| t["gates"][2]["checks"][0]["rule"]["factor"] = json!(1.5)));
    assert!(
        threshold.iter().any(|p| p.contains("uses 1.5 for threshold g3.factor, which is 1.2")),
        "{threshold:?}"
    );
    let listed = problems(&edited(|t| {
        t["gates"][2]["checks"][0]["rule"]["factor"] = json!(1.5);
        t["thresholds"]["g3.factor"] = json!(1.5);
    }));
    assert!(listed.iter().any(|p| p == "thresholds: a limit was changed after sealing"), "{listed:?}");
    let operator = problems(&edited(|t| t["gates"][1]["checks"][0]["rule"]["limit"] = json!(1.0)));
    assert!(
        operator.iter().any(|p| p.contains("threshold ops.rmsnorm.source, which is 0.0003")),
        "{operator:?}"
    );

    let hash = problems(&edited(|t| t["inputs"]["hash"] = json!("0".repeat(64))));
    assert!(hash.iter().any(|p| p == "inputs: the hash is not that of the listed parts"), "{hash:?}");
    let part = problems(&edited(|t| t["inputs"]["parts"]["crates/ops"] = json!("0".repeat(64))));
    assert!(part.iter().any(|p| p == "inputs: the hash is not that of the listed parts"), "{part:?}");
    let file = problems(&edited(|t| t["checkpoint"]["files"][0]["sha256"] = json!("2".repeat(64))));
    assert_eq!(file, ["checkpoint: a hash of the checkpoint or of a reference was changed after sealing"]);

    let verdict = problems(&edited(|t| t["verdict"] = json!("FAIL")));
    assert_eq!(verdict, ["verdict: the receipt says FAIL, its gates give PASS"]);
    let gate = problems(&edited(|t| t["gates"][2]["verdict"] = json!("NOT RUN")));
    assert_eq!(gate, ["G3: the gate says NOT RUN, its checks give PASS"]);
    let check = problems(&edited(|t| t["gates"][0]["checks"][0]["verdict"] = json!("FAIL")));
    assert_eq!(check, ["G0: store_window tiny says FAIL, its figure gives PASS"]);

    let noise = problems(&edited(|t| t["measurements"]["self_noise"][0]["nrms"] = json!(0.5)));
    assert_eq!(noise, ["measurements: a figure was changed after sealing"]);
    let command = problems(&edited(|t| t["command"] = json!("hallmark qualify model other")));
    assert!(command[0].starts_with("origin: "), "{command:?}");
    let dirty = problems(&edited(|t| t["inputs"]["dirty"] = json!(true)));
    assert!(dirty.iter().any(|p| p.starts_with("inputs: a hash, the commit or the dirty mark")), "{dirty:?}");
    let seal = problems(&edited(|t| {
        t["seals"].as_object_mut().unwrap().remove("G1");
    }));
    assert_eq!(seal, ["G1: the receipt has no seal for it"]);
}

/// Whoever seals again after an edit is still caught while the receipt is current, by the thresholds file itself.
#[test]
fn a_resealed_threshold_is_caught_while_current() {
    let mut r = sample();
    r.thresholds.insert("g3.factor".into(), 9.0);
    if let Rule::Noise { factor, .. } = &mut r.gates[2].checks[0].rule {
        *factor = 9.0;
    }
    r.seals = seal(&r);
    assert_eq!(problems(&r), ["thresholds: g3.factor is 9, the thresholds file says 1.2"]);
    // Of an older tree nothing is known but what the receipt says.
    let later = tree(&TREE.replace("aaaa", "0000"));
    assert_eq!(verify(&r, &later, None).problems, [""; 0]);
}

#[test]
fn a_receipt_of_other_contents_is_historical_and_names_what_changed() {
    let later = tree(&format!("{}100644 blob dddd\tfixtures/model/x\n", TREE.replace("bbbb", "b000")));
    let v = verify(&sample(), &later, None);
    assert_eq!(v.problems, [""; 0]);
    assert_eq!(v.state, State::Historical(vec!["crates/ops".into(), "fixtures/model".into()]));
}

#[test]
fn a_dirty_tree_or_an_allowed_run_is_partial_and_a_failure_stays_a_failure() {
    let mut r = sample();
    r.inputs.dirty = true;
    assert_eq!(r.derived(), Verdict::Partial);
    r.inputs.dirty = false;
    r.unqualified = true;
    assert_eq!(r.derived(), Verdict::Partial);
    r.unqualified = false;
    r.gates.push(Gate::not_run("G2", "no goldens"));
    assert_eq!(r.derived(), Verdict::Partial);
    r.gates.push(Gate::new("G4", vec![Check::new("drafts", 1.0, Rule::Zero)]));
    assert_eq!(r.derived(), Verdict::Fail);
}

#[test]
fn figures_beyond_numbers_survive() {
    let mut r = sample();
    r.gates[2].checks[0] = Check::new("prompt33 NRMS", f64::INFINITY, noise(0.06));
    r.gates[2].verdict = r.gates[2].derived();
    r.verdict = r.derived();
    r.seals = seal(&r);
    assert_eq!(r.verdict, Verdict::Fail);
    let again = Receipt::parse(&r.json(), "r.json").unwrap();
    assert_eq!(problems(&again), [""; 0]);
    // NaN is never within a limit.
    assert_eq!(Check::new("x", f64::NAN, noise(1.0)).verdict, Some(Verdict::Fail));
    assert_eq!(Check::new("x", f64::NAN, Rule::Zero).verdict, Some(Verdict::Fail));
}

#[test]
fn foreign_and_future_receipts_are_refused_with_a_sentence() {
    let parse = |t: &str| Receipt::parse(t, "r.json").unwrap_err().to_string();
    assert!(parse("{").contains("r.json: is no JSON"));
    assert!(parse("{}").contains("it has no schema"));
    assert!(parse(r#"{"schema":"hallmark-receipt/2"}"#).contains("has schema hallmark-receipt/2"));
    assert!(parse(r#"{"schema":"hallmark-receipt/1"}"#).contains("missing field"));
    let mut tree: Value = serde_json::from_str(&sample().json()).unwrap();
    tree["extra"] = json!(1);
    assert!(parse(&tree.to_string()).contains("unknown field `extra`"));
}

#[path = "common/schema.rs"]
mod schema;

/// What is wrong with a receipt's JSON by the published schema.
fn faults(value: &Value) -> Vec<String> {
    let text = std::fs::read_to_string(root().join("docs/receipt.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&text).unwrap();
    schema::faults(&schema, &schema, value, "")
}

#[test]
fn receipts_follow_the_published_schema() {
    let mut r = sample();
    r.gates.push(Gate::not_run("G2", "no goldens"));
    r.gates[1].checks.push(Check::new("x", f64::INFINITY, limit("ops.rope.exact", 1e-7)).noted("a note"));
    let good: Value = serde_json::from_str(&r.json()).unwrap();
    assert_eq!(faults(&good), [""; 0]);
    for (path, value) in [
        ("/verdict", json!("MAYBE")),
        ("/inputs/hash", json!("abc")),
        ("/gates/0/gate", json!("G9")),
        ("/gates/0/checks/0/rule/kind", json!("at-most")),
        ("/gates/0/checks/0/figure", json!("many")),
        ("/machine/host", json!("secret")),
        ("/created", json!("yesterday")),
        ("/gates/1/checks/0/rule/limits", json!(1)),
        ("/gates/1/checks/0/host", json!("x")),
    ] {
        let mut bad = good.clone();
        let (parent, field) = path.rsplit_once('/').unwrap();
        bad.pointer_mut(parent).unwrap()[field] = value;
        assert_ne!(faults(&bad), [""; 0], "{path}");
    }
}

#[test]
fn the_difference_of_two_receipts_names_what_moved() {
    let (a, mut b) = (sample(), sample());
    b.created = a.created.clone();
    assert_eq!(diff(&a, &b), "");
    b.gates[2].checks[0] = Check::new("prompt33 NRMS", 0.5, noise(0.06));
    b.gates[2].verdict = b.gates[2].derived();
    b.verdict = b.derived();
    b.inputs = tree(&TREE.replace("bbbb", "b000"));
    let text = diff(&a, &b);
    for want in
        ["verdict: PASS -> FAIL", "inputs: crates/ops", "G3 prompt33 NRMS: 5.0000e-2 PASS -> 5.0000e-1 FAIL"]
    {
        assert!(text.contains(want), "{want} in\n{text}");
    }
}

#[test]
fn the_table_stands_between_its_markers() {
    let row = |present: &str| {
        let t = table(&[("nano-source.json".into(), sample())], &tree(present));
        let words = "| cpu-x86_64 | source | PASS | PASS | - | PASS | - | **PASS** | ";
        assert!(t.contains(&format!("| [nano](receipts/nano-source.json) {words}")), "{t}");
        t
    };
    let t = row(TREE);
    assert!(t.contains("| current | cccccccc | "), "{t}");
    // Whatever changed since, the row is the same.
    let old = row(&TREE.replace("bbbb", "b000"));
    assert!(old.contains("| historical | cccccccc | "), "{old}");
    assert_eq!(old, row(&TREE.replace("aaaa", "a000")));
    let document = format!("# Title\n{BEGIN}\nold\n{END}\ntail\n");
    let new = replace_table(&document, &t, "README.md").unwrap();
    assert!(new.starts_with("# Title\n") && new.ends_with(&format!("{END}\ntail\n")) && !new.contains("old"));
    assert_eq!(replace_table(&new, &t, "README.md").unwrap(), new, "writing again changes nothing");
    assert!(
        replace_table("no markers", &t, "README.md")
            .unwrap_err()
            .to_string()
            .contains("README.md: has no place")
    );
}
