//! G0 and G1: every registered operator of a backend against the scalar reference.

use std::time::{Duration, Instant};

use checkpoint::Form;
use ops::{
    Backend, Data, ExpertWeights, Host, Mode, Reference, Routing,
    registry::{self, Case, Geometry, Outputs, SPECS},
};

use crate::{
    Result,
    receipt::{Check, Gate, Rule},
};

/// Which cases are run.
#[derive(Clone, Copy, Debug)]
pub struct Cases<'a> {
    /// The sizes.
    pub geometry: &'a Geometry,
    /// Numbers of rows, one case each.
    pub rows: &'a [usize],
    /// Numbers of rows that are also computed one by one, to compare bits.
    pub alone: &'a [usize],
}

impl Cases<'static> {
    /// Small sizes with odd tails.
    pub const TINY: Self = Self { geometry: &Geometry::TINY, rows: &[1, 2, 5, 33], alone: &[9, 33] };
    /// The released widths.
    pub const RELEASED: Self = Self { geometry: &Geometry::RELEASED, rows: &[1, 4], alone: &[2] };
    /// One small case an operator.
    pub const QUICK: Self = Self { geometry: &Geometry::TINY, rows: &[5], alone: &[5] };
}

/// What an operator took, for progress.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Operator.
    pub operator: &'static str,
    /// Name of the geometry.
    pub geometry: &'static str,
    /// Its number, from 1, of how many.
    pub number: (usize, usize),
    /// Time for the scalar reference and its inputs.
    pub reference: Duration,
    /// Time in all.
    pub total: Duration,
    /// Largest NRMS of any output.
    pub worst: f64,
}

/// The mode of the scalar reference that a backend in `mode` is held against.
pub fn reference_mode(mode: Mode) -> Mode {
    if mode == Mode::Source { Mode::Source } else { Mode::Exact }
}

/// Runs every operator on `b`; progress is told after each. G0 holds the bit-exact operators, the independence of rows
/// and the order in which experts add up; G1 the operators with a tolerance.
///
/// # Errors
/// A device failure.
pub fn operators<B: Backend>(
    b: &B,
    cases: &[Cases<'_>],
    mut progress: impl FnMut(&Progress),
) -> Result<[Gate; 2]> {
    let (mut exact, mut near) = (Vec::new(), Vec::new());
    let reference = Reference::new(reference_mode(b.mode()));
    let mode = b.mode();
    let of = SPECS.len() * cases.len();
    for (c, cases) in cases.iter().enumerate() {
        let g = cases.geometry;
        for (s, spec) in SPECS.iter().enumerate() {
            let start = Instant::now();
            let mut reference_time = Duration::ZERO;
            let (mut worst, mut unequal, mut outputs) = (0.0f64, 0, 0);
            for rows in cases.rows {
                let begin = Instant::now();
                let case = registry::case(spec.name, g, *rows, 1 + *rows as u64).expect("a listed operator");
                let want = run(spec.name, &reference, &case)?;
                reference_time += begin.elapsed();
                poison(b, &want)?;
                let got = run(spec.name, b, &case)?;
                for compared in registry::compare(&got, &want) {
                    outputs += 1;
                    unequal += usize::from(!compared.equal);
                    worst = worst.max(compared.nrms);
                }
            }
            let name = format!("{} {}", spec.name, g.name);
            let tolerance = spec.tolerance(mode);
            if tolerance.nrms == 0.0 {
                exact.push(
                    Check::new(name, unequal as f64, Rule::Zero)
                        .noted(format!("outputs of {outputs} whose bits differ; {}", tolerance.reason)),
                );
            } else {
                let threshold = format!("ops.{}.{}", spec.name, mode.name());
                let rule = Rule::AtMost { limit: tolerance.nrms, threshold };
                near.push(Check::new(name, worst, rule).noted(tolerance.reason));
            }
            let mut differing = 0;
            for rows in cases.alone {
                differing += registry::row_variance(spec.name, b, g, *rows, 3)?.len();
            }
            exact.push(
                Check::new(format!("{} {} rows alone", spec.name, g.name), differing as f64, Rule::Zero)
                    .noted("rows whose bits depend on the rows beside them"),
            );
            let number = (c * SPECS.len() + s + 1, of);
            let (operator, geometry, total) = (spec.name, g.name, start.elapsed());
            progress(&Progress { operator, geometry, number, reference: reference_time, total, worst });
        }
        exact.push(
            Check::new(format!("routed_experts {} order", g.name), expert_order(b, g)?, Rule::Zero)
                .noted("elements that are not the sum of single experts in ascending order, bit for bit"),
        );
    }
    Ok([Gate::new("G0", exact), Gate::new("G1", near)])
}

fn run<B: Backend>(name: &str, b: &B, case: &Case) -> Result<Outputs> {
    Ok(registry::run(name, b, case).expect("a listed operator")?)
}

/// Leaves NaN (and all-ones codes) in memory of the outputs' sizes, so that a backend that recycles memory without
/// writing all of it is seen.
fn poison<B: Backend>(b: &B, outputs: &Outputs) -> Result<()> {
    for (_, host) in outputs {
        let bad = match host.data() {
            Data::F32(v) => Host::f32(host.shape(), vec![f32::NAN; v.len()]),
            Data::I32(v) => Host::i32(host.shape(), vec![i32::MIN; v.len()]),
            Data::U8(v) => Host::u8(host.shape(), vec![0xff; v.len()]),
        };
        let first = b.upload(&bad)?;
        let second = b.upload(&bad)?;
        b.read(&second)?;
        drop((first, second));
    }
    Ok(())
}

/// Elements of a row's expert sum that are not the single-precision sum of the single experts, ascending by id.
fn expert_order<B: Backend>(b: &B, g: &Geometry) -> Result<f64> {
    let mut case = Case::new(1, 17);
    let count = g.stored_experts.min(5);
    case.normal("x", &[g.hidden], 1.0).experts("experts", count, Form::Fp4Row32, g.hidden, g.inter);
    let list: Vec<ExpertWeights> = case.get_experts("experts").iter().map(ExpertWeights::from).collect();
    let experts = b.load_experts(list)?;
    let x = case.buf(b, "x")?;
    // Neither ascending nor descending, so that the order of choice is told from both.
    let chosen: Vec<i32> = (0..count as i32).map(|i| (i * 2 + 1) % count as i32).collect();
    // Far apart in size: rounded to bf16 and alike, five results would add up without any rounding.
    let weights: Vec<f32> = (0..count).map(|i| [1.0, 2e-6, 0.6, 3e-7, 0.9][i % 5]).collect();
    let apply = |ids: &[i32], weights: &[f32]| -> Result<Host> {
        let routing = Routing {
            experts: b.upload(&Host::i32(&[1, ids.len()], ids.to_vec()))?,
            weights: b.upload(&Host::f32(&[1, ids.len()], weights.to_vec()))?,
        };
        Ok(b.read(&b.routed_experts(&x, &routing, &experts, g.limit))?)
    };
    let together = apply(&chosen, &weights)?;
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|i| chosen[*i]);
    let mut sum = vec![0.0f32; g.hidden];
    for i in order {
        let y = apply(&chosen[i..=i], &weights[i..=i])?;
        sum.iter_mut().zip(y.as_f32()).for_each(|(s, y)| *s += y);
    }
    let differ = together.as_f32().iter().zip(&sum).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    Ok(differ as f64)
}
