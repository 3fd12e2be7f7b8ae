//! `hallmark bench load`.

use std::{
    fs::File,
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use checkpoint::{
    Checkpoint, generate,
    write::{self, Item},
};
use clap::Args;
use engine::{
    LoadOptions, Loaded, Residency,
    memory::{self, Used},
    plan::{Parts, gb},
};
use serde::Serialize;

use crate::{commands::load, failure::Failure, render};

#[derive(Args)]
pub struct BenchLoad {
    /// Model folder
    pub model: PathBuf,
    /// First make the folder: a model of the test geometry with so many layers (27 MB each)
    #[arg(long, value_name = "LAYERS", value_parser = clap::value_parser!(u16).range(4..=1000))]
    pub generate: Option<u16>,
    /// Drop the files from the system's cache before each reading (Linux)
    #[arg(long)]
    pub cold: bool,
    /// Runs
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub runs: u8,
    /// Threads; all cores by default
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Serialize)]
struct Run {
    /// Seconds of `cat FILES > /dev/null`.
    cat_s: f64,
    /// Seconds until all pages are mapped and in memory.
    page_in_s: f64,
    /// Seconds until the model is ready: headers, pages, values checked, backend.
    load_s: f64,
    /// Seconds until its first token is computed.
    first_token_s: f64,
    /// Memory before, and when the first token is there.
    before: Used,
    after: Used,
}

#[derive(Serialize)]
struct Report {
    files: usize,
    bytes: u64,
    /// Stored bytes that the plan says are loaded.
    planned: u64,
    cold: bool,
    threads: usize,
    runs: Vec<Run>,
    /// Median of loading over cat, run by run.
    ratio: f64,
    gb_s: f64,
    cat_gb_s: f64,
}

pub fn run(args: &BenchLoad) -> Result<(), Failure> {
    if let Some(layers) = args.generate {
        if args.model.exists() {
            return Err(Failure::Usage(format!(
                "{}: exists; --generate makes a new folder",
                args.model.display()
            )));
        }
        generate::deepened(&args.model, layers.into())?;
        align(&args.model)?;
    }
    let (files, parts) = {
        let ckpt = Checkpoint::open_headers(&args.model)?;
        let files: Vec<PathBuf> = ckpt.files().into_iter().filter_map(|f| f.path).collect();
        (files, Parts::of_checkpoint(&ckpt))
    };
    let bytes = files.iter().filter_map(|f| f.metadata().ok()).map(|m| m.len()).sum();
    let threads = args.threads.map_or_else(cores, usize::from);
    let mut runs = Vec::new();
    for _ in 0..args.runs {
        runs.push(once(args, &files, threads)?);
    }
    let median = |of: fn(&Run) -> f64| {
        let mut all: Vec<f64> = runs.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let report = Report {
        files: files.len(),
        bytes,
        planned: parts.text() + parts.dspark + parts.engram,
        cold: args.cold,
        threads,
        ratio: median(|r| r.load_s / r.cat_s),
        gb_s: gb(bytes) / median(|r| r.load_s),
        cat_gb_s: gb(bytes) / median(|r| r.cat_s),
        runs,
    };
    if args.json {
        return render::document(&report);
    }
    for r in &report.runs {
        render::line(&format!(
            "cat {:.2} s; pages in memory {:.2} s, ready {:.2} s ({:.2} of cat), first token {:.2} s; memory of files {:.3} GB, \
             own {:.3} GB more",
            r.cat_s,
            r.page_in_s,
            r.load_s,
            r.load_s / r.cat_s,
            r.first_token_s,
            gb((r.after.resident - r.after.own).saturating_sub(r.before.resident - r.before.own)),
            gb(r.after.own.saturating_sub(r.before.own)),
        ))?;
    }
    render::line(&format!(
        "{} files, {:.3} GB, {}, {threads} thread(s): ready at {:.2} GB/s, cat {:.2} GB/s, median ratio of times {:.2}",
        report.files,
        gb(report.bytes),
        if report.cold { "cold" } else { "warm" },
        report.gb_s,
        report.cat_gb_s,
        report.ratio,
    ))
}

/// Puts tensors whose bytes are no multiple of 16 last in their shards, so that none has to be copied at load.
fn align(dir: &Path) -> Result<(), Failure> {
    let paths: Vec<PathBuf> =
        Checkpoint::open_headers(dir)?.files().into_iter().filter_map(|f| f.path).collect();
    for path in paths {
        let mut tensors = write::read_shard_file(&path)?;
        tensors.sort_by_key(|(_, _, _, data)| !data.len().is_multiple_of(16));
        let items: Vec<Item> = tensors
            .iter()
            .map(|(name, dtype, shape, data)| Item { name, dtype: *dtype, shape, data })
            .collect();
        write::write_shard(&path, &items)?;
    }
    Ok(())
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn once(args: &BenchLoad, files: &[PathBuf], threads: usize) -> Result<Run, Failure> {
    forget(args, files)?;
    let start = Instant::now();
    let cat = Command::new("cat").args(files).stdout(Stdio::null()).status();
    let cat_s = start.elapsed().as_secs_f64();
    if !cat.map_err(|e| Failure::Io(format!("cat: {e}")))?.success() {
        return Err(Failure::Io("cat could not read the files".into()));
    }
    forget(args, files)?;
    let before = memory::used().unwrap_or_default();
    let start = Instant::now();
    let ckpt = Checkpoint::open_unscanned(&args.model, None)?;
    let residency = Residency { prefault: true, ..Residency::default() };
    let paged = load::page_in(&ckpt, &residency, Some(threads))?;
    ckpt.scan_quick()?;
    let loaded =
        Loaded::new(&ckpt, LoadOptions { threads: Some(threads), residency, ..LoadOptions::default() })?;
    let load_s = start.elapsed().as_secs_f64();
    let mut session = loaded.lm.clone().session(16)?;
    // A feed that never asks to stop is never stopped.
    let _ = session.feed(&[3], &mut |_| ControlFlow::Continue(()))?;
    let first_token_s = start.elapsed().as_secs_f64();
    let after = memory::used().unwrap_or_default();
    Ok(Run { cat_s, page_in_s: paged.time.as_secs_f64(), load_s, first_token_s, before, after })
}

fn forget(args: &BenchLoad, files: &[PathBuf]) -> Result<(), Failure> {
    if args.cold { files.iter().try_for_each(|f| drop_cached(f)) } else { Ok(()) }
}

/// Drops a file's pages from the system's cache.
///
/// # Errors
/// A file that cannot be opened, or a system that has no such call.
pub fn drop_cached(path: &Path) -> Result<(), Failure> {
    let file = File::open(path).map_err(|e| Failure::Io(format!("{}: {e}", path.display())))?;
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        // SAFETY: the descriptor is open; the call changes no byte of the file.
        let code = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        if code != 0 {
            let e = std::io::Error::from_raw_os_error(code);
            return Err(Failure::Io(format!("{}: {e}", path.display())));
        }
        Ok(())
    }
    #[cfg(not(target_os = "linux"))]
    {
        drop(file);
        Err(Failure::Usage("--cold needs Linux".into()))
    }
}
