//! `hallmark quantize`.

use std::time::Duration;

use checkpoint::Checkpoint;
use exl3::Rate;
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};
use quantize::{Event, Options, Report, Search, Text};

use crate::{
    args::{Dense, Quantize},
    failure::Failure,
    render,
};

pub fn run(args: &Quantize) -> Result<(), Failure> {
    let dense = match args.dense {
        Dense::Keep => None,
        Dense::Bits(rate) => Some(rate),
    };
    // The format's library gives the head 6 bits; a head that has fewer than the rest would waste the rest.
    let six = |rate: Rate| if rate.bits() > 6.0 { rate } else { Rate::from_bits(6.0).unwrap_or(rate) };
    let options = Options {
        rate: args.bits,
        codebook: args.codebook.into(),
        dense,
        head: args.head_bits.or(dense.map(six)),
        search: if args.short_search { Search::Short } else { Search::Full },
        engram: !args.no_engram,
        threads: args.threads,
    };
    options.check().map_err(Failure::Quantize)?;
    let texts: Vec<Text> = match &args.calibration {
        Some(file) => quantize::read_texts(file).map_err(Failure::Quantize)?,
        None => quantize::default_calibration(),
    };
    let ckpt = Checkpoint::open(&args.source)?;
    let bar = ProgressBar::no_length();
    let style = ProgressStyle::with_template("{bar:30} {percent:>3} %  {elapsed} of about {eta} left  {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(250));
    let report = quantize::run(&ckpt, &args.destination, &options, &texts, &|event| match event {
        Event::Start { weights } => bar.set_length(weights),
        Event::Forward { part, parts } => bar.set_message(format!("inputs of layer {part} of {parts}")),
        Event::Layer { name, weights, kept } => {
            bar.set_message(name.to_owned());
            bar.inc(weights);
            if kept {
                bar.reset_eta();
            }
        }
    });
    bar.finish_and_clear();
    let report = report.map_err(Failure::Quantize)?;
    eprintln!("{}", summary(&report));
    if args.json { render::document(&report) } else { render::line(table(&report).trim_end()) }
}

fn summary(r: &Report) -> String {
    let kept = match r.kept {
        0 => String::new(),
        n => format!(", {n} kept from an earlier run"),
    };
    format!(
        "{} EXL3 layers{kept} in {:.0} s, calibrated with {} tokens of {} texts",
        r.tensors.len(),
        r.seconds,
        HumanCount(r.tokens as u64),
        HumanCount(r.documents as u64),
    )
}

/// Layers by kind: what stands after the block's name, expert and group numbers left out.
fn table(r: &Report) -> String {
    let mut kinds: Vec<(String, f64, u64, f64, f64, f64)> = Vec::new();
    for t in &r.tensors {
        let kind: Vec<&str> = t.name.split('.').filter(|p| p.parse::<usize>().is_err()).collect();
        let kind = kind.join(".");
        let n = (t.rows * t.cols) as f64;
        let at = kinds.iter().position(|k| k.0 == kind && k.1 == t.bits).unwrap_or_else(|| {
            kinds.push((kind, t.bits, 0, 0.0, 0.0, 0.0));
            kinds.len() - 1
        });
        let k = &mut kinds[at];
        (k.2, k.3, k.4) = (k.2 + 1, k.3 + n, k.4 + n * t.proxy_error);
        k.5 = k.5.max(t.proxy_error);
    }
    let mut out =
        format!("{:<34}{:>6}{:>8}{:>13}{:>13}\n", "layers", "bits", "count", "proxy error", "worst");
    for (kind, bits, count, weights, sum, worst) in kinds {
        out += &format!("{kind:<34}{bits:>6}{count:>8}{:>13.6}{worst:>13.6}\n", sum / weights);
    }
    out + &format!(
        "{:.3} bits per weight in EXL3 layers, mean proxy error {:.6}; {} where the released form has {}\n",
        r.mean_bits,
        r.mean_proxy_error,
        HumanBytes(r.bytes),
        HumanBytes(r.source_bytes),
    )
}
