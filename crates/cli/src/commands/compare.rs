//! `hallmark compare`.

use std::time::Duration;

use checkpoint::Checkpoint;
use indicatif::{ProgressBar, ProgressStyle};
use quantize::{Comparison, Losses};

use crate::{args::Compare, demo, failure::Failure, render};

pub fn run(args: &Compare) -> Result<(), Failure> {
    let texts = quantize::read_texts(&args.texts).map_err(Failure::Quantize)?;
    let open = |path: &std::path::PathBuf| -> Result<Checkpoint, Failure> {
        Ok(match path.as_os_str() == "demo" && !path.exists() {
            true => demo::open()?,
            false => Checkpoint::open_with(path, args.engram_from.as_deref().filter(|_| needs_tables(path)))?,
        })
    };
    let (a, b) = (open(&args.a)?, open(&args.b)?);
    let bar = ProgressBar::new(texts.len() as u64);
    let style = ProgressStyle::with_template("{bar:30} {pos} of {len} texts, about {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(250));
    let done = |n: usize| bar.set_position(n as u64);
    let result = quantize::compare(&a, &b, &texts, args.numerics, args.threads, &done);
    bar.finish_and_clear();
    let result = result.map_err(Failure::Quantize)?;
    if args.json { render::document(&result) } else { render::line(table(&result).trim_end()) }
}

/// Whether a folder's index names no Engram table: only such a pack takes them from elsewhere.
fn needs_tables(folder: &std::path::Path) -> bool {
    let index = std::fs::read_to_string(folder.join("model.safetensors.index.json"));
    index.is_ok_and(|text| !text.contains(".engram.embed."))
}

fn table(c: &Comparison) -> String {
    let mut out = format!("a: {}\nb: {}\nnumerics {}\n\n", c.a, c.b, c.numerics.name());
    let head = |title: &str, rest: &str| {
        format!(
            "{title:<14}{:>7}{:>9}{:>10}{:>10}{:>12}{:>12}{:>9}{rest}\n",
            "texts", "tokens", "NLL a", "NLL b", "KL(a|b)", "KL(b|a)", "top-1"
        )
    };
    let row = |name: &str, texts: usize, l: &Losses, rest: &str| {
        format!(
            "{name:<14}{texts:>7}{:>9}{:>10.5}{:>10.5}{:>12.3e}{:>12.3e}{:>9}{rest}\n",
            l.tokens,
            l.nll_a,
            l.nll_b,
            l.kl,
            l.kl_back,
            format!("{:.2} %", 100.0 * l.top1),
        )
    };
    let several = c.categories.len() > 1;
    let names =
        || c.categories.iter().filter(move |_| several).map(|(n, f)| (if n.is_empty() { "-" } else { n }, f));
    let every = || names().chain(std::iter::once(("all", &c.all)));
    out += &head("every token", "");
    every().for_each(|(name, f)| out += &row(name, f.texts, &f.every, ""));
    if c.all.answers > 0 {
        out += &format!("\n{}", head("answers", &format!("{:>10}{:>10}", "right a", "right b")));
        for (name, f) in every().filter(|(_, f)| f.answers > 0) {
            let share = |v: f64| format!("{:.2} %", 100.0 * v);
            out += &row(
                name,
                f.answers,
                &f.answer,
                &format!("{:>10}{:>10}", share(f.right_a), share(f.right_b)),
            );
        }
    }
    if let Some(w) = c.worst.first().filter(|w| w.kl > 0.0) {
        let sum: f64 = c.worst.iter().map(|w| w.share).sum();
        out += &format!(
            "\n{:.0} % of KL(a|b) comes from {} tokens; the most, {:.3} nats, from text {}, token {}\n",
            100.0 * sum,
            c.worst.len(),
            w.kl,
            w.text,
            w.position
        );
    }
    out
}
