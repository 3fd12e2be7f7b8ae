//! `cargo xtask test`: everything that a change must pass.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::process::{cargo, run as run_command, target_dir};
use crate::{cross, fixtures, notices, nvrtc, receipts, schemathesis, tokenizer, tools, tree, web};

type Part = (&'static str, fn(bool) -> Result<()>);

/// In this order: what is quick and what later parts need comes first.
const PARTS: [Part; 13] = [
    ("tree", |_| tree::check()),
    ("fixtures", |_| fixtures::run(false)),
    ("notices", |_| notices::run(true)),
    ("tools", |_| tools::clang()),
    ("format", |_| run_command(&mut cargo(&["fmt", "--all", "--check"])?)),
    ("lints", |_| {
        run_command(&mut cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])?)
    }),
    ("macos", |_| cross::check()),
    ("tokenizer", |_| tokenizer::run()),
    ("tests", tests),
    ("browser", |_| web::browser(false)),
    ("clients", |_| web::clients()),
    ("nvrtc", |_| nvrtc::run_tests(false)),
    ("receipts", |_| receipts::check()),
];

/// Runs every part, stops at the first that fails, and prints the time of each.
pub fn run(full: bool) -> Result<()> {
    println!("build folder: {} (CARGO_TARGET_DIR chooses another)", target_dir()?.display());
    let mut times = Vec::new();
    let mut parts = PARTS.to_vec();
    if full {
        parts.push(("schemathesis", |_| schemathesis::check()));
        parts.push(("documentation", |_| documentation()));
    }
    let result = parts.iter().try_for_each(|(name, part)| {
        println!("\n== {name}");
        let start = Instant::now();
        let result = part(full);
        times.push((*name, start.elapsed(), result.is_ok()));
        result.with_context(|| format!("part `{name}`"))
    });
    println!("\n{}", table(&times));
    result
}

fn tests(full: bool) -> Result<()> {
    let mut command = cargo(&["test", "--workspace"])?;
    if full {
        command.env("HALLMARK_FULL", "1");
    }
    run_command(&mut command)
}

fn documentation() -> Result<()> {
    run_command(cargo(&["doc", "--workspace", "--no-deps"])?.env("RUSTDOCFLAGS", "-D warnings"))
}

fn table(times: &[(&str, Duration, bool)]) -> String {
    let mut text = String::new();
    for (name, time, passed) in times {
        text +=
            &format!("{name:<14}{:>8.1} s  {}\n", time.as_secs_f64(), if *passed { "ok" } else { "FAILED" });
    }
    text + &format!(
        "{:<14}{:>8.1} s",
        "total",
        times.iter().map(|(_, time, _)| time.as_secs_f64()).sum::<f64>()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_the_part_that_failed() {
        let text = table(&[("tree", Duration::from_secs(1), true), ("lints", Duration::from_secs(2), false)]);
        assert!(
            text.contains("tree               1.0 s  ok")
                && text.contains("lints              2.0 s  FAILED"),
            "{text}"
        );
        assert!(text.ends_with("3.0 s"), "{text}");
    }
}
