//! A model on a device whose operators fail.

mod common;
use common::{cpu, folder};

use engine::plan::Parts;
use ops::Mode;
use qualify::{
    Thresholds, Verdict,
    bins::{Bins, Element},
    fault::{Faulty, Size},
    gates::model::{AgainstLive, BIN_REACH, forward},
    judge::metrics,
    load,
    models::Subject,
    receipt::{DeviceId, Receipt, seal, verify},
    run::ModelRun,
};

/// nano on a CPU whose products depend on the rows beside them.
fn qualified(allow: bool) -> Receipt {
    let subject = Subject::open(&folder("nano")).unwrap();
    let device = DeviceId {
        name: "cpu".into(),
        family: "cpu-x86_64".into(),
        detail: String::new(),
        driver: String::new(),
    };
    let run = ModelRun {
        subject: &subject,
        backend: Faulty::new(cpu(Mode::Source), "batch-dependent", Size::All, 0),
        device,
        make: &|| Ok(cpu(Mode::Source)),
        reference: None,
        tokens: 8,
        draws: 2,
        allow,
        full_hash: false,
        sensitivity: false,
        command: "a test".into(),
    };
    run.run(|_| {}).unwrap()
}

fn verdicts(r: &Receipt) -> Vec<(&str, Verdict)> {
    assert!(verify(r, &r.inputs, None).problems.is_empty());
    r.gates.iter().map(|g| (g.gate.as_str(), g.verdict)).collect()
}

#[test]
fn failing_operators_end_the_run_before_layers_and_logits() {
    let r = qualified(false);
    let got = verdicts(&r);
    assert_eq!(got[0], ("G0", Verdict::Fail));
    assert_eq!(got[2..], [("G2", Verdict::NotRun), ("G3", Verdict::NotRun), ("G4", Verdict::NotRun)]);
    assert_eq!((r.verdict, r.unqualified), (Verdict::Fail, false));
    assert!(r.scope.contains("since one of them failed"), "{}", r.scope);
}

/// Verified drafts are computed in rows side by side, plain steps alone: G4 sees the difference in the state.
#[test]
fn an_allowed_run_bears_the_mark_and_g4_sees_rows_that_depend_on_each_other() {
    let r = qualified(true);
    assert!(r.unqualified);
    let g4 = r.gate("G4").unwrap();
    assert_eq!(g4.verdict, Verdict::Fail);
    assert!(g4.checks[1].figure.unwrap() > 0.0, "{:?}", g4.checks);
    assert_ne!(r.gate("G3").unwrap().verdict, Verdict::NotRun);
    // The plan of the run and the observed peak are sealed in the receipt.
    let (m, parts) = (
        &r.measurements["memory"],
        Parts::of_checkpoint(&Subject::open(&folder("nano")).unwrap().checkpoint),
    );
    assert_eq!(m["planned"]["weights"], parts.text() + parts.dspark);
    assert_eq!((&m["planned"]["engram"], &m["planned"]["tokens"]), (&parts.engram.into(), &40.into()));
    #[cfg(target_os = "linux")]
    {
        let planned: u64 =
            ["weights", "engram", "state", "step"].map(|n| m["planned"][n].as_u64().unwrap()).iter().sum();
        let ratio = m["measured"]["peak"].as_u64().unwrap() as f64 / planned as f64;
        assert!(ratio > 0.0 && (m["ratio"].as_f64().unwrap() - ratio).abs() <= 5e-4, "{m}");
    }
    let mut edited = r.clone();
    edited.measurements["memory"]["planned"]["weights"] = 1.into();
    assert_eq!(
        verify(&edited, &r.inputs, None).problems,
        ["measurements: a figure was changed after sealing"]
    );
    // A receipt from before has no such figures and stays what it is.
    let mut before = r.clone();
    before.measurements.as_object_mut().unwrap().remove("memory");
    before.seals = seal(&before);
    assert!(verify(&before, &r.inputs, None).problems.is_empty());
}

/// `exact` on a device failed against a live CPU run where a cache element fell into another bin, which was named for traces
/// alone: the flip is named, and the reference takes the device's side of that boundary.
#[test]
fn a_bin_flip_against_a_live_reference_is_named() {
    let subject = Subject::open(&folder("nano")).unwrap();
    let checkpoint = &subject.checkpoint;
    let device = load(checkpoint, Bins::new(cpu(Mode::Exact), BIN_REACH)).unwrap();
    let bins = device.backend();
    let layers = checkpoint.config().num_hidden_layers;
    for tokens in [16, 32, 64, 128] {
        let ids = subject.text(tokens).unwrap();
        bins.reset(Vec::new());
        let plain = forward(&device, &ids).unwrap();
        let matters = |e: &Element| {
            bins.reset(vec![e.clone()]);
            let moved = forward(&device, &ids).unwrap();
            metrics::values(moved.as_f32(), plain.as_f32()).nrms > 1e-4
        };
        let rows = |e: &Element| e.operator == "store_window" && e.call < layers;
        let Some(e) = bins.near().into_iter().filter(rows).find(matters) else { continue };
        // The gates run the device layer by layer for G2, then freely for G3, which is to have the flip.
        let second = Element { call: e.call + layers, ..e };
        bins.reset(vec![second.clone()]);
        let run = AgainstLive {
            model: &device,
            make: &|| Ok(cpu(Mode::Exact)),
            checkpoint,
            ids: &ids,
            key: "nano-exact",
            draws: 4,
            sensitivity: true,
        };
        let outcome = run.run(|_| {}).unwrap();
        let nrms = &outcome.g3.checks[0];
        let flips = outcome.measurements["bin_flips"][0].clone();
        assert_eq!(flips["elements"].as_array().map(Vec::len), Some(1), "{flips}");
        let named: Element = serde_json::from_value(flips["elements"][0].clone()).unwrap();
        assert_eq!((named.operator, named.row, named.column), (second.operator, second.row, second.column));
        let raw = flips["nrms"].as_f64().unwrap();
        assert!(
            raw > 1e-4 && nrms.figure.unwrap() <= *Thresholds::built_in().g3.floor_nrms,
            "{raw} {nrms:?}"
        );
        assert!(nrms.note.contains("before the named bin flips"), "{}", nrms.note);
        assert_eq!(outcome.g3.verdict, Verdict::Pass);
        return;
    }
    panic!("no cached element lies at a boundary");
}
