//! `hallmark bench engram`.

use std::{path::PathBuf, time::Instant};

use checkpoint::engram::{EngramMode, Generated, TableStats};
use clap::Args;
use engine::plan::gb;
use serde::Serialize;

use crate::{commands::bench_load::drop_cached, failure::Failure, render};

/// Rows that a token takes of one layer's table.
const COLUMNS: usize = 24;
/// Tokens of the prompt that is fetched ahead.
const PROMPT: usize = 4096;
/// Tokens of a prefill step.
const CHUNK: usize = 512;

#[derive(Args)]
pub struct BenchEngram {
    /// Folder for the generated table, twice its size; it is made and removed
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// Size of the table
    #[arg(long, default_value = "3GiB", value_name = "SIZE", value_parser = checkpoint::engram::size_of_text)]
    pub size: u64,
    /// Memory of the cache
    #[arg(long, default_value = "256MiB", value_name = "SIZE", value_parser = checkpoint::engram::size_of_text)]
    pub cache: u64,
    /// Decoded tokens of each case
    #[arg(long, default_value_t = 20_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct Case {
    /// plain, resident, mmap or cache.
    place: &'static str,
    /// Codes and scales side by side.
    packed: bool,
    /// zipf or uniform.
    traffic: &'static str,
    /// Whether the files were dropped from the system's cache before.
    cold: bool,
    /// decode: a token a step; prompt: 4,096 tokens in steps of 512, fetched ahead.
    what: &'static str,
    rows_per_s: f64,
    /// Seconds of taking rows.
    seconds: f64,
    stats: Option<TableStats>,
}

#[derive(Serialize)]
struct Report {
    rows: usize,
    bytes: u64,
    cache_bytes: u64,
    cases: Vec<Case>,
}

pub fn run(args: &BenchEngram) -> Result<(), Failure> {
    if args.dir.exists() {
        return Err(Failure::Usage(format!("{}: exists; name a new folder", args.dir.display())));
    }
    let rows = (args.size / 264).max(1) as usize;
    let table = Generated::write(&args.dir, rows)?;
    let result = cases(args, &table, rows);
    std::fs::remove_dir_all(&args.dir).map_err(|e| Failure::Io(format!("{}: {e}", args.dir.display())))?;
    let report = Report { rows, bytes: rows as u64 * 264, cache_bytes: args.cache, cases: result? };
    if args.json {
        return render::document(&report);
    }
    render::line(&format!("{rows} rows, {:.3} GB, cache {:.3} GB", gb(report.bytes), gb(args.cache)))
}

fn cases(args: &BenchEngram, table: &Generated, rows: usize) -> Result<Vec<Case>, Failure> {
    let mut out = Vec::new();
    for traffic in ["zipf", "uniform"] {
        for packed in [false, true] {
            for cold in [true, false] {
                for place in ["plain", "resident", "mmap", "cache"] {
                    if place == "resident" && cold {
                        continue; // what is resident is not cold
                    }
                    let mut add = |case: Case| -> Result<(), Failure> {
                        if !args.json {
                            render::line(&line(&case))?;
                        }
                        out.push(case);
                        Ok(())
                    };
                    add(decode(args, table, rows, (place, packed, traffic, cold))?)?;
                    if place != "plain" {
                        add(prompt(args, table, rows, (place, packed, traffic, cold))?)?;
                    }
                }
            }
        }
    }
    Ok(out)
}

fn line(c: &Case) -> String {
    let stats = c.stats.as_ref().map_or(String::new(), |s| {
        format!(
            "; a step p50 {:.1} us, p99 {:.1} us, longest {:.0} us; {} hits, {} misses, {} page faults, {:.3} GB read",
            s.latency.p50_us,
            s.latency.p99_us,
            s.latency.max_us,
            s.hits,
            s.misses,
            s.page_faults,
            gb(s.bytes_read)
        )
    });
    format!(
        "{:<8} {:<6} {:<7} {} {:<6}: {:>10.0} rows/s, {:.3} s{stats}",
        c.place,
        if c.packed { "packed" } else { "apart" },
        c.traffic,
        if c.cold { "cold" } else { "warm" },
        c.what,
        c.rows_per_s,
        c.seconds,
    )
}

type What = (&'static str, bool, &'static str, bool);

fn mode(args: &BenchEngram, place: &str) -> EngramMode {
    match place {
        "resident" => EngramMode::Resident,
        "cache" => EngramMode::Cache(args.cache),
        _ => EngramMode::Mmap,
    }
}

fn forget(table: &Generated, packed: bool, cold: bool) -> Result<(), Failure> {
    let files = table.files(packed);
    if cold {
        return files.iter().try_for_each(|f| drop_cached(f));
    }
    // Warm: read once.
    for file in files {
        let mut from =
            std::fs::File::open(&file).map_err(|e| Failure::Io(format!("{}: {e}", file.display())))?;
        std::io::copy(&mut from, &mut std::io::sink())
            .map_err(|e| Failure::Io(format!("{}: {e}", file.display())))?;
    }
    Ok(())
}

/// A token a step, nothing known ahead. Cold cases take a tenth of the tokens.
fn decode(args: &BenchEngram, table: &Generated, rows: usize, what: What) -> Result<Case, Failure> {
    let (place, packed, traffic, cold) = what;
    forget(table, packed, cold)?;
    let tokens = if cold { args.tokens.div_ceil(10) } else { args.tokens } as usize;
    let mut ids = Traffic::new(traffic, rows as u64);
    let steps: Vec<Vec<u64>> = (0..tokens).map(|_| ids.take(COLUMNS)).collect();
    let (seconds, stats) = if place == "plain" {
        let mut copy = table.plain(packed)?;
        let start = Instant::now();
        let sum = steps.iter().fold(0, |sum, step| sum ^ copy(step));
        std::hint::black_box(sum);
        (start.elapsed().as_secs_f64(), None)
    } else {
        let kept = table.table(mode(args, place), packed)?;
        for step in &steps {
            std::hint::black_box(kept.take(step)?);
        }
        let stats = kept.stats();
        (stats.seconds, Some(stats))
    };
    let rows_per_s = (tokens * COLUMNS) as f64 / seconds;
    Ok(Case { place, packed, traffic, cold, what: "decode", rows_per_s, seconds, stats })
}

/// A prompt that is fetched ahead while something else computes: 20 ms before each step.
fn prompt(args: &BenchEngram, table: &Generated, rows: usize, what: What) -> Result<Case, Failure> {
    let (place, packed, traffic, cold) = what;
    forget(table, packed, cold)?;
    let all = Traffic::new(traffic, rows as u64).take(PROMPT * COLUMNS);
    let kept = table.table(mode(args, place), packed)?;
    kept.prefetch(all.clone());
    for step in all.chunks(CHUNK * COLUMNS) {
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::hint::black_box(kept.take(step)?);
    }
    let stats = kept.stats();
    let rows_per_s = all.len() as f64 / stats.seconds;
    Ok(Case {
        place,
        packed,
        traffic,
        cold,
        what: "prompt",
        rows_per_s,
        seconds: stats.seconds,
        stats: Some(stats),
    })
}

/// Row numbers.
struct Traffic {
    zipf: bool,
    rows: u64,
    state: u64,
}

impl Traffic {
    fn new(name: &str, rows: u64) -> Self {
        Self { zipf: name == "zipf", rows, state: 0x2545_F491_4F6C_DD1D }
    }

    fn take(&mut self, n: usize) -> Vec<u64> {
        (0..n).map(|_| self.next()).collect()
    }

    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        if !self.zipf {
            return self.state % self.rows;
        }
        // Ranks whose logarithm is uniform have Zipf's law with exponent 1; hashing spreads them over the table.
        let u = (self.state >> 11) as f64 / (1u64 << 53) as f64;
        let rank = ((self.rows as f64).powf(u) as u64 - 1).min(self.rows - 1);
        rank.wrapping_mul(0x9E37_79B9_7F4A_7C15) % self.rows
    }
}
