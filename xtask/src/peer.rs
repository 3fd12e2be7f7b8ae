//! `cargo xtask peer torch`: prefill and decode of the torch implementation and of hallmark, taken in turns.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use serde_json::Value;

use crate::process::{cargo, output, read, root, run as run_command, shown, target_dir, write};
use crate::python::environment;

/// Context lengths at which decode is compared.
const CONTEXTS: [u32; 2] = [64, 128];
/// Tokens that hallmark decodes in one run.
const DECODED: u32 = 16;

/// Implementations that can be measured beside hallmark.
#[derive(Subcommand)]
pub enum Peer {
    /// nemo_automodel on torch, CPU, float32
    Torch(Torch),
}

/// Options of `peer torch`.
#[derive(Args)]
pub struct Torch {
    /// The checkpoint folder
    #[arg(long, default_value = "models/demo")]
    model: PathBuf,
    /// Length of the prefill
    #[arg(long, default_value_t = 512)]
    tokens: u32,
    /// How many times both are measured, one after the other
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Measurements of the peer in each round
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Numerics of hallmark; `exact` computes what the peer computes
    #[arg(long, default_value = "native")]
    numerics: String,
    /// Measure the peer alone
    #[arg(long)]
    alone: bool,
}

/// Measures, prints the table and writes everything to `bench/runs/DATE-peer-torch/`.
pub fn run(peer: &Peer) -> Result<()> {
    let Peer::Torch(options) = peer;
    let cores = std::thread::available_parallelism()?.get();
    let machine = machine(cores); // first: the load average must be that of other programs
    let root = root();
    let python = python()?;
    let hallmark = if options.alone { None } else { Some(build()?) };
    let model = root.join(&options.model);
    let folder = root.join("bench/runs").join(format!("{}-peer-torch", date(seconds_since_1970()?)));
    let mut rows = Vec::new();
    for threads in if cores == 1 { vec![1] } else { vec![1, cores] } {
        for round in 1..=options.rounds {
            println!("threads: {threads}, round {round} of {}", options.rounds);
            let keep = |name: &str, bytes: Vec<u8>| -> Result<Value> {
                write(&folder.join(format!("{name}-t{threads}-r{round}.json")), &bytes)?;
                serde_json::from_slice(&bytes).with_context(|| format!("{name}: no JSON document"))
            };
            let document = keep("torch", output(&mut torch(&python, &model, options, threads))?)?;
            take_peer(&document, threads, &mut rows)?;
            if let Some(binary) = &hallmark {
                for (what, args) in measurements(options.tokens) {
                    let mut command = bench(binary, &args, &model, &options.numerics, threads);
                    let document =
                        keep(&format!("hallmark-{}", what.replace(' ', "-")), output(&mut command)?)?;
                    let rate = document["tokens_per_second"]["median"].as_f64().with_context(|| {
                        format!("`{}` gives no tokens_per_second.median", shown(&command))
                    })?;
                    rows.push(Row { what, threads, hallmark: true, rate });
                }
            }
        }
    }
    let text = format!("{machine}\n{}", table(&rows));
    write(&folder.join("table.md"), text.as_bytes())?;
    println!("\n{text}\nraw output: {}", folder.display());
    Ok(())
}

/// The interpreter with torch and nemo_automodel.
pub fn python() -> Result<PathBuf> {
    let requirements = String::from_utf8(read(&root().join("xtask/peer/requirements.txt"))?)?;
    let requirements: Vec<&str> =
        requirements.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    environment("peer-torch", &requirements)
}

fn build() -> Result<PathBuf> {
    run_command(&mut cargo(&["build", "--release", "--bin", "hallmark"])?)?;
    Ok(target_dir()?.join("release").join(format!("hallmark{}", std::env::consts::EXE_SUFFIX)))
}

fn torch(python: &Path, model: &Path, options: &Torch, threads: usize) -> Command {
    let mut command = Command::new(python);
    command.arg(root().join("xtask/peer/torch_demo.py")).arg(model);
    for (name, value) in
        [("--tokens", options.tokens as usize), ("--runs", options.runs as usize), ("--threads", threads)]
    {
        command.arg(name).arg(value.to_string());
    }
    command.arg("--contexts").args(CONTEXTS.map(|context| context.to_string()));
    command
}

/// What hallmark is asked for each row of the table: the row's name and the arguments of `hallmark bench`.
fn measurements(tokens: u32) -> Vec<(String, Vec<String>)> {
    let owned = |args: [&str; 3]| args.map(str::to_owned).to_vec();
    let mut out = vec![("prefill".to_owned(), owned(["prefill", "--tokens", &tokens.to_string()]))];
    for context in CONTEXTS {
        // The mean context of the decoded tokens is the one that the peer is measured at.
        let mut args = owned(["decode", "--tokens", &(context - DECODED / 2).to_string()]);
        args.extend(["--decode".to_owned(), DECODED.to_string()]);
        out.push((decode_at(context), args));
    }
    out
}

fn decode_at(context: u32) -> String {
    format!("decode at {context}")
}

fn bench(binary: &Path, args: &[String], model: &Path, numerics: &str, threads: usize) -> Command {
    let mut command = Command::new(binary);
    command.arg("bench").args(args).args(["--json", "--device", "cpu", "--numerics", numerics]);
    command.arg("--threads").arg(threads.to_string()).arg(model);
    command
}

/// One median: of a round's runs.
struct Row {
    what: String,
    threads: usize,
    hallmark: bool,
    rate: f64,
}

fn take_peer(document: &Value, threads: usize, rows: &mut Vec<Row>) -> Result<()> {
    let result = &document["results"][0];
    let median =
        |value: &Value| value["tokens_per_second"]["median"].as_f64().context("the peer gives no median");
    let mut push = |what: String, rate: f64| rows.push(Row { what, threads, hallmark: false, rate });
    push("prefill".to_owned(), median(&result["prefill"])?);
    for (context, entry) in
        CONTEXTS.iter().zip(result["decode"].as_array().context("the peer gives no decode")?)
    {
        push(decode_at(*context), median(entry)?);
    }
    Ok(())
}

/// Tokens per second: the median of the rounds, and hallmark's ratio to the peer.
fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "| | threads | torch tok/s | hallmark tok/s | ratio |\n| --- | --- | --- | --- | --- |\n",
    );
    let rates = |what: &str, threads: usize, hallmark: bool| {
        let chosen =
            rows.iter().filter(|row| row.what == what && row.threads == threads && row.hallmark == hallmark);
        median(chosen.map(|row| row.rate).collect())
    };
    let mut seen = Vec::new();
    for row in rows.iter().filter(|row| !row.hallmark) {
        if seen.contains(&(row.what.as_str(), row.threads)) {
            continue;
        }
        seen.push((row.what.as_str(), row.threads));
        let peer = rates(&row.what, row.threads, false);
        let ours = rates(&row.what, row.threads, true);
        let show =
            |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |v| format!("{v:.digits$}"));
        let ratio = ours.zip(peer).map(|(a, b)| a / b);
        let (name, threads) = (&row.what, row.threads);
        text +=
            &format!("| {name} | {threads} | {} | {} | {} |\n", show(peer, 1), show(ours, 1), show(ratio, 2));
    }
    text
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[half]),
        _ => Some((values[half - 1] + values[half]) / 2.0),
    }
}

fn machine(cores: usize) -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split(':').nth(1)).map_or("unknown", str::trim).to_owned()
    };
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    format!(
        "{}, {} (family {}, model {}), {cores} cores, {}; load average before: {}\n",
        std::env::consts::ARCH,
        field("model name"),
        field("cpu family"),
        field("model\t"),
        std::env::consts::OS,
        load.split(' ').next().filter(|text| !text.is_empty()).unwrap_or("unknown")
    )
}

fn seconds_since_1970() -> Result<u64> {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(time) => Ok(time.as_secs()),
        Err(_) => bail!("the clock stands before 1970"),
    }
}

/// The day (UTC) as YYYY-MM-DD.
fn date(seconds: u64) -> String {
    // Days are counted from 0000-03-01, so that the leap day ends a year; 400 years have 146,097 days.
    let days = seconds / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year + carry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (seconds, text) in [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (1_709_251_199, "2024-02-29"),
            (1_709_251_200, "2024-03-01"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }

    #[test]
    fn the_table_compares_the_same_measurement_and_thread_count() {
        let row =
            |what: &str, threads, hallmark, rate| Row { what: what.to_owned(), threads, hallmark, rate };
        let rows = [
            row("prefill", 2, false, 100.0),
            row("prefill", 2, false, 300.0),
            row("decode at 64", 2, false, 10.0),
            row("prefill", 2, true, 600.0),
            row("prefill", 1, true, 50.0),
            row("decode at 64", 2, true, 50.0),
            row("decode at 128", 2, true, 50.0),
        ];
        let text = table(&rows);
        assert!(text.contains("| prefill | 2 | 200.0 | 600.0 | 3.00 |"), "{text}");
        assert!(text.contains("| decode at 64 | 2 | 10.0 | 50.0 | 5.00 |"), "{text}");
        assert!(table(&rows[..3]).contains("| prefill | 2 | 200.0 | - | - |"));
        assert_eq!(text.lines().count(), 4, "{text}");
    }

    #[test]
    fn decode_is_centred_on_the_context() {
        let asked = measurements(512);
        assert_eq!(asked[0].1, ["prefill", "--tokens", "512"]);
        assert_eq!(asked[1].1, ["decode", "--tokens", "56", "--decode", "16"]);
        assert_eq!(asked[2].0, "decode at 128");
    }
}
