//! A model on a device whose operators fail.

mod common;
use common::{cpu, folder};

use ops::Mode;
use qualify::{
    Verdict,
    fault::{Faulty, Size},
    models::Subject,
    receipt::{DeviceId, Receipt, verify},
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
}
