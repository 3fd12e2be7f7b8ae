//! Every registered operator on the emulator, through the registry: within its tolerance of the scalar reference, and no
//! row that depends on others.
#![cfg(emulator)]

use std::time::Instant;

use gpu::{Gpu, emu::Emu};
use ops::{
    Backend, Mode, Reference,
    registry::{self, Case, Geometry, Outputs, SPECS, Spec, compare},
};

const MODES: [Mode; 3] = [Mode::Exact, Mode::Source, Mode::Native];

fn full() -> bool {
    std::env::var_os("HALLMARK_FULL").is_some()
}

/// The released widths. Generating an expert takes seconds, so that a token has two of three instead of six of eight.
fn released() -> Geometry {
    let few = Geometry { top: 2, stored_experts: 3, ..Geometry::RELEASED };
    if full() { Geometry::RELEASED } else { few }
}

fn emu(mode: Mode) -> Gpu<Emu> {
    Gpu::new(mode, Emu::open().expect("the emulator"))
}

fn run(name: &str, b: &impl Backend, case: &Case) -> Outputs {
    registry::run(name, b, case).expect("a known operator").unwrap()
}

/// Prints the worst NRMS by mode, and seconds.
fn agree_with_the_reference(spec: &Spec, g: &Geometry, rows: &[usize], modes: &[Mode]) {
    let mut wrong = Vec::new();
    let start = Instant::now();
    let worst: Vec<f64> = modes
        .iter()
        .map(|mode| {
            // `native` computes what `exact` does.
            let oracle = Reference::new(if *mode == Mode::Source { Mode::Source } else { Mode::Exact });
            let b = emu(*mode);
            let mut worst = 0.0f64;
            for n in rows {
                let case = registry::case(spec.name, g, *n, 5).unwrap();
                let limit = spec.tolerance(*mode);
                for c in compare(&run(spec.name, &b, &case), &run(spec.name, &oracle, &case)) {
                    if !(c.equal || c.nrms <= limit.nrms && limit.nrms > 0.0) {
                        wrong.push(format!(
                            "{} {}, {n} rows: {} is off by {:.2e}; limit {:.0e}: {}",
                            spec.name,
                            mode.name(),
                            c.output,
                            c.nrms,
                            limit.nrms,
                            limit.reason
                        ));
                    }
                    worst = worst.max(c.nrms);
                }
            }
            worst
        })
        .collect();
    let worst: String = worst.iter().map(|w| format!(" {w:8.1e}")).collect();
    eprintln!("  {:20}{worst} {:6.1}", spec.name, start.elapsed().as_secs_f64());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn operators_agree_with_the_reference_at_tiny_widths() {
    SPECS.iter().for_each(|s| agree_with_the_reference(s, &Geometry::TINY, &[1, 2, 5, 9], &MODES));
}

#[test]
fn operators_agree_with_the_reference_at_released_widths() {
    for spec in SPECS {
        // Products of released widths take the emulator seconds a row.
        let heavy = ["linear", "expert"].iter().any(|n| spec.name.contains(n));
        let rows: &[usize] = match (full(), heavy) {
            (true, _) => &[1, 2, 5, 9],
            (false, true) => &[1],
            (false, false) => &[1, 3],
        };
        let modes = match (full(), spec.name.contains("expert")) {
            (true, _) => &MODES[..],
            (false, true) => &MODES[1..2],
            (false, false) => &MODES[..2],
        };
        agree_with_the_reference(spec, &released(), rows, modes);
    }
}

/// Every row alone has the bits that it has among others.
fn rows_do_not_depend_on_others(g: &Geometry, rows: &[usize], modes: &[Mode]) {
    for mode in modes {
        let b = emu(*mode);
        for spec in SPECS {
            for n in rows {
                let differing = registry::row_variance(spec.name, &b, g, *n, 3).unwrap();
                assert_eq!(differing, [], "{} {} of {n} rows, {}", spec.name, mode.name(), g.name);
            }
        }
    }
}

#[test]
fn rows_do_not_depend_on_others_at_tiny_widths() {
    let rows: &[usize] = if full() { &[2, 3, 5, 8, 9, 16, 33] } else { &[3, 9] };
    rows_do_not_depend_on_others(&Geometry::TINY, rows, &MODES[..2]);
}
