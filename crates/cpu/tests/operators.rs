//! Every registered operator on the CPU backend: within its tolerance of the scalar reference, the same bits on every
//! instruction set and number of threads, and no row that depends on others.
//!
//! `HALLMARK_FULL=1` runs every row count at the released widths too, and all experts; each test prints what it ran.

use cpu::{Cpu, Isa};
use ops::{
    Backend, Mode, Reference,
    registry::{self, Case, Geometry, Outputs, SPECS, compare},
};

/// Row counts of the contract: around the kernels' tiles, and beyond.
const ROWS: [usize; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 129];
const MODES: [Mode; 3] = [Mode::Exact, Mode::Source, Mode::Native];

fn full() -> bool {
    std::env::var_os("HALLMARK_FULL").is_some()
}

/// The released widths. Generating an expert takes seconds, so that a token has two of three instead of six of eight.
fn released() -> Geometry {
    let few = Geometry { top: 2, stored_experts: 3, ..Geometry::RELEASED };
    if full() { Geometry::RELEASED } else { few }
}

fn cpu(mode: Mode, threads: usize, isa: Isa) -> Cpu {
    Cpu::new(mode, Some(threads), Some(isa)).unwrap()
}

fn run(name: &str, b: &impl Backend, case: &Case) -> Outputs {
    registry::run(name, b, case).unwrap().unwrap()
}

fn agree_with_the_reference(g: &Geometry, rows: usize) {
    eprintln!("{} widths, {rows} rows, {:?}; worst NRMS of exact, source, native:", g.name, Isa::available());
    for spec in SPECS {
        let case = registry::case(spec.name, g, rows, 5).unwrap();
        let worst = MODES.map(|mode| {
            // `native` computes what `exact` does.
            let oracle = Reference::new(if mode == Mode::Source { Mode::Source } else { Mode::Exact });
            let want = run(spec.name, &oracle, &case);
            let all = Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]);
            let mut first: Option<Outputs> = None;
            let mut worst = 0.0f64;
            for (isa, threads) in all {
                let what = format!("{} {}, {}, {threads} threads", spec.name, mode.name(), isa.name());
                let got = run(spec.name, &cpu(mode, threads, isa), &case);
                let limit = spec.tolerance(mode);
                for c in compare(&got, &want) {
                    let within = c.equal || c.nrms <= limit.nrms && limit.nrms > 0.0;
                    assert!(
                        within,
                        "{what}: {} is off by {:.2e}; limit {:.0e}: {}",
                        c.output, c.nrms, limit.nrms, limit.reason
                    );
                    worst = worst.max(c.nrms);
                }
                for c in first.iter().flat_map(|first| compare(&got, first)) {
                    assert!(
                        c.equal,
                        "{what}: {} has other bits than the portable kernels on one thread",
                        c.output
                    );
                }
                first.get_or_insert(got);
            }
            worst
        });
        eprintln!("  {:20} {}", spec.name, worst.map(|w| format!("{w:8.1e}")).join(" "));
    }
}

#[test]
fn operators_agree_with_the_reference_at_tiny_widths() {
    agree_with_the_reference(&Geometry::TINY, 7);
}

#[test]
fn operators_agree_with_the_reference_at_released_widths() {
    agree_with_the_reference(&released(), 2);
}

/// Every row alone has the bits that it has among others.
fn rows_do_not_depend_on_others(name: &str, g: &Geometry, rows: &[usize], modes: &[Mode]) {
    for mode in modes {
        let b = cpu(*mode, 2, Isa::best());
        for n in rows {
            let differing = registry::row_variance(name, &b, g, *n, 3).unwrap();
            assert_eq!(differing, [], "{name} {} of {n} rows, {}", mode.name(), g.name);
        }
    }
}

#[test]
fn rows_do_not_depend_on_others_at_tiny_widths() {
    eprintln!("{ROWS:?} rows, {MODES:?}");
    SPECS.iter().for_each(|s| rows_do_not_depend_on_others(s.name, &Geometry::TINY, &ROWS, &MODES));
}

#[test]
fn rows_do_not_depend_on_others_at_released_widths() {
    let (g, few) = (released(), &[Mode::Source][..]);
    let (rows, modes) = if full() { (&ROWS[..], &MODES[..]) } else { (&[3][..], few) };
    eprintln!(
        "{rows:?} rows, {modes:?}; of routed_experts 3 rows in source, whose weights are generated for each"
    );
    for spec in SPECS {
        let (rows, modes) = if spec.name.contains("experts") { (&[3][..], few) } else { (rows, modes) };
        rows_do_not_depend_on_others(spec.name, &g, rows, modes);
    }
}
