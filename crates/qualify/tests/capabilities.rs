//! A receipt qualifies what it names, and nothing else.

mod common;
use common::root;

use qualify::{
    capabilities::{Capabilities, Entry, Status, Wanted},
    inputs::Inputs,
    receipt::{Check, CheckpointId, Context, DeviceId, Gate, Receipt, Rule, seal},
};
use serde_json::Value;

fn tree(blob: &str) -> Inputs {
    Inputs::from_listing(&format!("100644 blob {blob}\tcrates/ops/src/lib.rs\n"), &"c".repeat(40), false)
}

fn device(family: &str) -> DeviceId {
    DeviceId { name: "cpu".into(), family: family.into(), detail: String::new(), driver: String::new() }
}

fn receipt(change: impl Fn(&mut Receipt)) -> Receipt {
    let gate = |name: &str| Gate::new(name, vec![Check::new("x", 0.0, Rule::Zero)]);
    let context = Context {
        kind: "model".into(),
        scope: "A test".into(),
        device: device("cpu-x86_64"),
        numerics: "native".into(),
        checkpoint: Some(CheckpointId {
            name: "mine".into(),
            fingerprint: "f".repeat(64),
            revision: String::new(),
            format: "fp8+fp4".into(),
            files: Vec::new(),
            engram: None,
        }),
        references: Vec::new(),
        command: "hallmark qualify model mine".into(),
        unqualified: false,
    };
    let mut r = context.receipt(["G0", "G1", "G2", "G3"].map(gate).to_vec(), Value::Null);
    r.inputs = tree("aa");
    change(&mut r);
    r.verdict = r.derived();
    r.seals = seal(&r);
    r
}

fn decide(receipts: &[Receipt], numerics: &str, family: &str, fingerprint: &str) -> Entry {
    let mut all = Capabilities::of(tree("aa"));
    receipts.iter().for_each(|r| all.add("r.json", r.clone()));
    assert_eq!(all.warnings, [""; 0]);
    let device = device(family);
    all.decide(Wanted { device: &device, numerics, format: "fp8+fp4", fingerprint, model: "mine" })
}

fn plain(receipts: &[Receipt]) -> Entry {
    decide(receipts, "native", "cpu-x86_64", &"f".repeat(64))
}

#[test]
fn a_current_pass_for_the_same_checkpoint_device_and_numerics_qualifies() {
    let entry = plain(&[receipt(|_| {})]);
    assert_eq!((entry.status, entry.lift.as_str()), (Status::Qualified, ""));
    let r = [receipt(|_| {})];
    let other = "0".repeat(64);
    for entry in [
        decide(&r, "source", "cpu-x86_64", &"f".repeat(64)),
        decide(&r, "native", "cpu-aarch64", &"f".repeat(64)),
        decide(&r, "native", "cpu-x86_64", &other),
        plain(&[]),
    ] {
        assert_eq!(entry.status, Status::Refused);
        assert!(entry.reason.contains("no receipt qualifies"), "{}", entry.reason);
        assert!(entry.lift.contains("hallmark qualify model mine --device cpu"), "{}", entry.lift);
    }
}

#[test]
fn other_contents_missing_gates_and_dirty_trees_do_not_qualify() {
    let old = plain(&[receipt(|r| r.inputs = tree("bb"))]);
    assert_eq!(old.status, Status::Experimental);
    assert!(old.reason.contains("changed since: crates/ops"), "{}", old.reason);
    let partial = plain(&[receipt(|r| r.gates[3] = Gate::not_run("G3", "no time"))]);
    assert_eq!(partial.status, Status::Experimental);
    assert!(partial.reason.contains("does not say PASS for G3"), "{}", partial.reason);
    let dirty = plain(&[receipt(|r| r.inputs.dirty = true)]);
    assert_eq!(dirty.status, Status::Experimental);
    let allowed = plain(&[receipt(|r| r.unqualified = true)]);
    assert_eq!(allowed.status, Status::Experimental);
    let failed = plain(&[receipt(|r| r.gates[2] = Gate::new("G2", vec![Check::new("x", 1.0, Rule::Zero)]))]);
    assert_eq!(failed.status, Status::Refused);
    assert!(failed.reason.contains("FAIL (G2)"), "{}", failed.reason);
}

#[test]
fn the_newest_receipt_of_this_build_speaks() {
    let old = receipt(|r| {
        r.created = "2026-01-01T00:00:00Z".into();
        r.gates[2] = Gate::new("G2", vec![Check::new("x", 1.0, Rule::Zero)]);
    });
    let new = receipt(|r| r.created = "2026-01-02T00:00:00Z".into());
    assert_eq!(plain(&[new.clone(), old.clone()]).status, Status::Qualified);
    let later_failure = receipt(|r| {
        r.created = "2026-01-03T00:00:00Z".into();
        r.gates[2] = Gate::new("G2", vec![Check::new("x", 1.0, Rule::Zero)]);
    });
    assert_eq!(plain(&[new.clone(), later_failure]).status, Status::Refused);
    // A newer one of other contents does not speak for this build.
    let elsewhere = receipt(|r| {
        r.created = "2026-01-04T00:00:00Z".into();
        r.inputs = tree("bb");
    });
    assert_eq!(plain(&[elsewhere, new]).status, Status::Qualified);
}

#[test]
fn an_edited_receipt_is_left_aside() {
    let mut all = Capabilities::of(tree("aa"));
    let mut r = receipt(|r| r.gates[2] = Gate::new("G2", vec![Check::new("x", 1.0, Rule::Zero)]));
    r.gates[2].checks[0].figure = Some(0.0);
    all.add("edited.json", r);
    assert!(all.warnings[0].contains("edited.json is left aside"), "{:?}", all.warnings);
    let table = all.table(&[device("cpu-x86_64")]);
    assert!(table.iter().all(|e| e.status == Status::Refused));
    let json = serde_json::to_string(&table).unwrap();
    for want in ["\"images\"", "\"metal\"", "\"refused\"", "\"operators\""] {
        assert!(json.contains(want), "{want}");
    }
}

#[test]
fn this_build_knows_its_contents() {
    let built = Inputs::built();
    assert!(built.is_consistent() && built.parts.contains_key("crates/qualify"), "{built:?}");
    // The same files give git's own ids: in a clean checkout the built contents are the committed ones.
    if let Some(tree) = Inputs::of_checkout(&root()).filter(|t| !t.dirty && !built.dirty) {
        assert_eq!(tree.changed(&built), [""; 0]);
    }
}
