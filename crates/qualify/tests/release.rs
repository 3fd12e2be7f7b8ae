//! The gates at released size: a part that every run of the tests does.

use cpu::Cpu;
use ops::{Mode, Reference};
use qualify::{
    Verdict,
    receipt::{DeviceId, Gate},
    release::{ReleaseRun, WholeRuns, fixtures::Fixtures, operators::operators},
};

fn show(gates: &[Gate]) -> String {
    let checks = gates.iter().flat_map(|g| &g.checks);
    checks.map(|c| format!("{:?} {} {:?} {}\n", c.verdict, c.name, c.figure, c.note)).collect()
}

#[test]
fn cpu_operators_agree_with_cuda() {
    let f = Fixtures::open().unwrap();
    let b = Cpu::new(Mode::Source, None, None).unwrap();
    let gates = operators(&b, &f, |_| {}).unwrap();
    println!("{}", show(&gates));
    assert!(gates.iter().all(|g| g.verdict == Verdict::Pass), "{}", show(&gates));
}

/// The scalar reference takes half a minute, so it runs with the slow tests only.
#[test]
fn reference_operators_agree_with_cuda() {
    if std::env::var_os("HALLMARK_FULL").is_none() {
        return;
    }
    let f = Fixtures::open().unwrap();
    let b = Reference::new(Mode::Source);
    let gates = operators(&b, &f, |_| {}).unwrap();
    println!("{}", show(&gates));
    assert!(gates.iter().all(|g| g.verdict == Verdict::Pass), "{}", show(&gates));
}

/// The first four layers teacher-forced and as blocks, interrupted once: block 3 reads what layer 2 published before the
/// interruption. Every layer and the whole runs are `hallmark qualify release`.
#[test]
fn first_layers_agree_with_cuda_and_a_run_goes_on() {
    let work = tempfile::tempdir().unwrap();
    let device =
        DeviceId { name: "cpu".into(), family: "cpu".into(), detail: String::new(), driver: String::new() };
    let run = |stop: Option<usize>| {
        let run = ReleaseRun {
            device: device.clone(),
            layers: 0..4,
            whole: WholeRuns::None,
            work: Some(work.path().into()),
            command: "test".into(),
            operators: false,
            stop,
        };
        run.run(Cpu::new(Mode::Source, None, None).unwrap(), None, |what| println!("{what}"))
    };
    assert!(run(Some(3)).is_err());
    let outcome = run(None).unwrap();
    assert_eq!(outcome.layers.iter().map(|l| l.layer).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let g2 = &outcome.gates[2];
    let count = |v: Verdict| g2.checks.iter().filter(|c| c.verdict == Some(v)).count();
    // Layers 0, 1, 2; blocks 0 to 3; the two checks of flips.
    assert_eq!((count(Verdict::Pass), count(Verdict::Fail)), (9, 0), "{}", show(&outcome.gates));
    assert_eq!(g2.verdict, Verdict::Partial);
}
