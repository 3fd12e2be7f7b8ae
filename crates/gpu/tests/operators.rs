//! Every registered operator on the emulator, through the registry: within its tolerance of the scalar reference, and no
//! row that depends on others.
#![cfg(emulator)]

use std::time::Instant;

use gpu::{Gpu, emu::Emu};
use ops::{
    Backend, Host, Mode, Reference,
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

/// More entries than the registry's cases have, so that the largest threadgroup chooses; few distinct values, so that
/// ties decide.
#[test]
fn choices_among_many_entries_equal_the_reference() {
    let (rows, n, k) = (2, 70_001, 512);
    let score = |i: usize| if i % 13 == 5 { f32::NEG_INFINITY } else { ((i * 7919) % 1009) as f32 - 400.0 };
    let scores = Host::f32(&[rows, n], (0..rows * n).map(score).collect());
    let (b, plain) = (emu(Mode::Exact), Reference::new(Mode::Exact));
    let on_device = b.upload(&scores).unwrap();
    assert_eq!(b.read(&b.topk(&on_device, k)).unwrap(), plain.topk(&scores, k));
    let visible = [n as u32, 33_333];
    let mask = b.candidates(&on_device, &visible, 8, 2048);
    assert_eq!(b.read(&mask).unwrap(), plain.candidates(&scores, &visible, 8, 2048));
}

/// A clone of a cache keeps its rows when the cache is written again.
#[test]
fn a_snapshot_of_a_cache_does_not_see_later_writes() {
    let b = emu(Mode::Exact);
    let mut ring = b.cache(5, 6).unwrap();
    let codes = |v: u8| b.upload(&Host::u8(&[1, 6], vec![v; 6])).unwrap();
    b.ring_write(&mut ring, &codes(7), &[3]);
    let (snapshot, row) = (ring.clone(), b.slice_rows(&ring, 3, 1));
    b.ring_write(&mut ring, &codes(9), &[8]);
    let read = |x| b.read(x).unwrap().as_u8().to_vec();
    assert_eq!((read(&snapshot)[18..24].to_vec(), read(&row)), (vec![7; 6], vec![7; 6]));
    assert_eq!((read(&ring)[18..24].to_vec(), read(&ring)[..18].to_vec()), (vec![9; 6], vec![0; 18]));
}
