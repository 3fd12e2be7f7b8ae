//! `hallmark bench`: prefill and decode of a model, operators at released width.

use std::{ops::ControlFlow, time::Instant};

use checkpoint::engram::TableStats;

use cpu::{
    Cpu, Isa,
    bench::{self, Limits, Measured, exl3},
};
use engine::{DraftStats, Drafts, Generator, Loaded, Session, SessionOptions, sampler::Sampler};
use serde::Serialize;
use text::{Request, SamplingParams, Think};

use super::synthetic;
use crate::{
    args::{Bench, BenchModel, BenchOps, Forms, IsaName},
    failure::Failure,
    render,
};

pub fn run(args: &Bench) -> Result<(), Failure> {
    match args {
        Bench::Prefill(args) => model(args, "prefill"),
        Bench::Decode(args) => model(args, "decode"),
        Bench::Load(args) => super::bench_load::run(args),
        Bench::Engram(args) => super::bench_engram::run(args),
        Bench::Ops(args) => operators(args),
    }
}

/// Median and spread of several runs.
#[derive(Serialize)]
pub struct Spread {
    /// The middle value.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Of at least one value.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self { median: values[values.len() / 2], min: values[0], max: values[values.len() - 1] }
    }
}

#[derive(Serialize)]
struct Speed {
    what: &'static str,
    device: &'static str,
    numerics: ops::Mode,
    threads: usize,
    isa: &'static str,
    /// Tokens of the prompt.
    prompt_tokens: usize,
    /// Tokens that were timed in one run.
    timed_tokens: usize,
    runs: usize,
    tokens_per_second: Spread,
    /// Multiply-adds with weights of a token that every layer takes.
    weight_macs_per_token: u64,
    /// Share of the machine's multiply-add limit, measured in this run, as if every layer took every token. A prefill leaves
    /// out the rows that nothing reads, so that its share is an equivalent.
    of_fma_limit: f64,
    /// What the Engram tables did in all runs.
    engram: Vec<TableStats>,
    limits: Limits,
}

fn model(args: &BenchModel, what: &'static str) -> Result<(), Failure> {
    if args.synthetic.is_some() {
        return synthetic::run(args, what);
    }
    let loaded = args.model.load()?;
    if what == "decode" && args.drafts != Drafts::Off {
        return drafted(args, &loaded);
    }
    let engine = cpu::Engine::new(args.model.threads, None)?;
    let limits = bench::limits(&engine);
    let c = loaded.lm.config();
    // Ids spread over the vocabulary: text of no meaning costs the same.
    let ids: Vec<u32> = (0..args.tokens).map(|i| (3 + i * 37 % (c.vocab_size - 3)) as u32).collect();
    let timed = if what == "prefill" { args.tokens } else { args.decode };
    let mut rates = Vec::new();
    for run in 0..=args.runs {
        let options = SessionOptions::new(args.tokens + args.decode + 1);
        let mut session = loaded.lm.clone().open(SessionOptions { prefill: args.prefill, ..options })?;
        let seconds = if what == "prefill" {
            seconds(|| feed(&mut *session, &ids))?
        } else {
            feed(&mut *session, &ids)?;
            seconds(|| decode(&mut *session, args.decode))?
        };
        if run > 0 {
            rates.push(timed as f64 / seconds);
        }
    }
    let tokens_per_second = Spread::of(rates);
    let macs = weight_macs(&loaded);
    let speed = Speed {
        what,
        device: loaded.lm.device(),
        numerics: loaded.lm.mode(),
        threads: engine.threads(),
        isa: engine.isa().name(),
        prompt_tokens: args.tokens,
        timed_tokens: timed,
        runs: args.runs,
        weight_macs_per_token: macs,
        of_fma_limit: tokens_per_second.median * macs as f64 / (limits.gfma_s.median * 1e9),
        tokens_per_second,
        engram: loaded.lm.engram(),
        limits,
    };
    if args.json {
        return render::document(&speed);
    }
    render::line(&format!(
        "{what}: {:.0} tok/s (median of {}, {:.0} to {:.0}), prompt {} tokens, {} thread(s), {}; {}{:.2} M multiply-adds a \
         token = {:.1} % of the {:.0} G/s measured in this run",
        speed.tokens_per_second.median,
        speed.runs,
        speed.tokens_per_second.min,
        speed.tokens_per_second.max,
        speed.prompt_tokens,
        speed.threads,
        speed.isa,
        if what == "prefill" { "with no row left out " } else { "" },
        macs as f64 / 1e6,
        100.0 * speed.of_fma_limit,
        speed.limits.gfma_s.median,
    ))
}

pub fn seconds(f: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed().as_secs_f64())
}

pub fn feed(session: &mut dyn Session, ids: &[u32]) -> Result<(), Failure> {
    // A feed that never asks to stop is never stopped.
    let _ = session.feed(ids, &mut |_| ControlFlow::Continue(()))?;
    Ok(())
}

/// Greedy steps; the end token does not end a measurement.
pub fn decode(session: &mut dyn Session, steps: usize) -> Result<(), Failure> {
    for _ in 0..steps {
        let next = ops::linear::argmax(session.logits()) as u32;
        feed(session, &[next])?;
    }
    Ok(())
}

/// What the demo model has been trained to continue for a while.
const COUNTING: &str = "Count from 1 to 40.";

#[derive(Serialize)]
struct Drafted {
    what: &'static str,
    device: &'static str,
    numerics: ops::Mode,
    /// Drafts of a round: on, or their number.
    drafts: String,
    prompt: &'static str,
    timed_tokens: usize,
    runs: usize,
    tokens_per_second: Spread,
    without_drafts: Spread,
    /// Of the medians.
    gain: f64,
    /// Of the last run.
    figures: DraftStats,
    /// Right drafts a round, of the last run.
    accepted_a_round: f64,
}

/// Decode with drafts beside decode without, run by run, as the machine's other load changes.
fn drafted(args: &BenchModel, loaded: &Loaded) -> Result<(), Failure> {
    let ids = Request::from_text(COUNTING, Think::Off).encode(&loaded.tokenizer)?.ids;
    let (mut with, mut without, mut figures) = (Vec::new(), Vec::new(), DraftStats::default());
    for run in 0..=args.runs {
        for (drafts, rates) in [(Drafts::Off, &mut without), (args.drafts, &mut with)] {
            let options = SessionOptions::new(ids.len() + args.decode + 1);
            let mut session = loaded.lm.clone().open(SessionOptions { drafts, ..options })?;
            feed(&mut *session, &ids)?;
            let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
            let mut sampler = Sampler::new(greedy, 0, &ids);
            let mut generator = Generator::new(&*session);
            let seconds = seconds(|| {
                for left in (1..=args.decode).rev() {
                    generator.next(&mut *session, &mut sampler, left)?;
                }
                Ok(())
            })?;
            figures = session.speculation().map_or(figures, |s| s.stats());
            if run > 0 {
                rates.push(args.decode as f64 / seconds);
            }
        }
    }
    let (with, without) = (Spread::of(with), Spread::of(without));
    let speed = Drafted {
        what: "decode",
        device: loaded.lm.device(),
        numerics: loaded.lm.mode(),
        drafts: args.drafts.to_string(),
        prompt: COUNTING,
        timed_tokens: args.decode,
        runs: args.runs,
        gain: with.median / without.median,
        tokens_per_second: with,
        without_drafts: without,
        accepted_a_round: figures.accepted as f64 / figures.rounds.max(1) as f64,
        figures,
    };
    if args.json {
        return render::document(&speed);
    }
    render::line(&format!(
        "decode with drafts {}: {:.0} tok/s (median of {}, {:.0} to {:.0}), without {:.0} ({:.0} to {:.0}): {:.2} times as \
         fast; {} of {} drafts right, {:.2} a round, {} plain steps, {} pause(s)",
        speed.drafts,
        speed.tokens_per_second.median,
        speed.runs,
        speed.tokens_per_second.min,
        speed.tokens_per_second.max,
        speed.without_drafts.median,
        speed.without_drafts.min,
        speed.without_drafts.max,
        speed.gain,
        figures.accepted,
        figures.drafted,
        speed.accepted_a_round,
        figures.plain,
        figures.pauses,
    ))
}

/// Multiply-adds of one token with the weights it reads [§7.1]: dense layers, its routed experts, the head.
fn weight_macs(loaded: &Loaded) -> u64 {
    let c = loaded.lm.config();
    c.inventory()
        .filter(|t| !t.name.ends_with(".scale") && t.shape.len() == 2)
        .map(|t| {
            // One stored I8 holds two fp4 values.
            let packed = if t.dtype == checkpoint::Dtype::I8 { 2 } else { 1 };
            let values = packed * t.shape.iter().map(|d| *d as u64).product::<u64>();
            let name = t.name.as_str();
            let skipped = ["embed.weight", "mtp.", "vision.", "aligner.", "image_"];
            if skipped.iter().any(|s| name.starts_with(s))
                || name.contains("engram.embed")
                || name.ends_with("_weight")
            {
                0
            } else if name.contains(".experts.") && !name.contains("shared_experts") {
                values * c.num_experts_per_tok as u64 / c.n_routed_experts as u64
            } else {
                values
            }
        })
        .sum()
}

#[derive(Serialize)]
struct Operators {
    limits: Vec<Limits>,
    cases: Vec<Measured>,
    exl3: Vec<exl3::Measured>,
    exl3_encoder: Vec<exl3::Encoding>,
}

fn operators(args: &BenchOps) -> Result<(), Failure> {
    let isa = args.isa.map(|i| match i {
        IsaName::Portable => Isa::Portable,
        IsaName::Avx2 => Isa::Avx2,
        IsaName::Avx512 => Isa::Avx512,
    });
    let mut all =
        Operators { limits: Vec::new(), cases: Vec::new(), exl3: Vec::new(), exl3_encoder: Vec::new() };
    let store = (args.only != Some(Forms::Released)).then(exl3::Store::new);
    for cpu in exl3::backends(isa)? {
        let engine = cpu.engine();
        let limits = bench::limits(engine);
        if !args.json {
            render::line(&format!(
                "{} with {} thread(s): reads {:.1} GB/s, {:.1} G multiply-adds/s",
                engine.isa().name(),
                limits.threads,
                limits.read_gb_s.median,
                limits.gfma_s.median
            ))?;
        }
        let released = if args.only == Some(Forms::Exl3) { Vec::new() } else { bench::standard() };
        for case in released {
            let m = bench::linear(engine, case, &limits, args.runs);
            if !args.json {
                render::line(&operator_line(&m))?;
            }
            all.cases.push(m);
        }
        if let Some(store) = &store {
            trellis(&cpu, store, &limits, args, &mut all)?;
        }
        all.limits.push(limits);
    }
    if args.json { render::document(&all) } else { Ok(()) }
}

/// The EXL3 cases on one backend.
fn trellis(
    cpu: &Cpu,
    store: &exl3::Store,
    limits: &Limits,
    args: &BenchOps,
    all: &mut Operators,
) -> Result<(), Failure> {
    for case in exl3::standard() {
        let m = exl3::measure(cpu, store, case, limits, args.runs).map_err(model::Error::Device)?;
        if !args.json {
            render::line(&trellis_line(&m))?;
        }
        all.exl3.push(m);
    }
    for (codebook, bits) in exl3::encoders() {
        let e = exl3::encoder(cpu, codebook, bits, args.runs);
        if !args.json {
            let hours = e.hours.iter().map(|(cores, h)| format!("{cores} core(s) {h:.0} h"));
            render::line(&format!(
                "  exl3 encoder, {} {bits} bits, {} thread(s): {:.0} tiles/s; all routed experts: {}",
                codebook.name(),
                e.threads,
                e.tiles_s.median,
                hours.collect::<Vec<_>>().join(", ")
            ))?;
        }
        all.exl3_encoder.push(e);
    }
    Ok(())
}

fn trellis_line(m: &exl3::Measured) -> String {
    let what = match m.case.what {
        exl3::What::Layer { out, cols } => format!("{out:>6} x {cols:<5}"),
        exl3::What::Experts => "6 of 16 experts".into(),
    };
    format!(
        "  exl3 {:4} {} bits, {what:15} {} row(s): {:6.2} Gweights/s, {:6.2} GB/s = {:3.0} % of bandwidth, {:6.1} G \
         multiply-adds/s = {:3.0} % of the limit",
        m.case.codebook.name(),
        m.case.bits,
        m.case.rows,
        m.gweights_s.median,
        m.gb_s.median,
        100.0 * m.of_bandwidth,
        m.gfma_s.median,
        100.0 * m.of_fma,
    )
}

fn operator_line(m: &Measured) -> String {
    format!(
        "  {:9} {:>6} x {:<5} {:>3} row(s), {}: {:6.2} Gweights/s, {:6.2} GB/s = {:3.0} % of bandwidth, {:6.1} G \
         multiply-adds/s = {:3.0} % of the limit",
        m.case.form.name(),
        m.case.out,
        m.case.cols,
        m.case.batch,
        if m.case.cold { "from memory" } else { "from cache " },
        m.gweights_s.median,
        m.gb_s.median,
        100.0 * m.of_bandwidth,
        m.gfma_s.median,
        100.0 * m.of_fma,
    )
}
