//! Downloads, and how people see them.

use std::{
    io::IsTerminal,
    sync::{Mutex, MutexGuard},
};

use hub::{Client, Options, Progress, Repository, Wanted};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::Pull;
use crate::{failure::Failure, render};

/// Asks the server what `repository` is now.
pub(super) fn resolve(repository: &str, connections: usize) -> Result<(Client, Repository), Failure> {
    let wanted: Wanted = repository.parse().map_err(Failure::Hub)?;
    let client = Client::new(Options { connections, ..Options::from_env() });
    let repo = Repository::resolve(&client, &wanted, &|text| eprintln!("{text}")).map_err(Failure::Hub)?;
    if repo.commit != wanted.revision {
        eprintln!("{} {} is commit {}", repo.name, wanted.revision, repo.commit);
    }
    Ok((client, repo))
}

pub(super) fn run(args: &Pull) -> Result<(), Failure> {
    let (client, repo) = resolve(&args.repository, args.connections.into())?;
    let bars = Bars::new();
    let report = hub::pull(&client, &repo, &args.out, &args.only, &bars).map_err(Failure::Hub)?;
    bars.clear();
    if args.json {
        return render::document(&report);
    }
    if !report.left_out.is_empty() {
        eprintln!("{} shards are left out", report.left_out.len());
    }
    render::line(&format!(
        "{}: {} files of {repo}, {:.3} GB, every hash right; {:.3} GB came, {:.3} GB were there",
        args.out.display(),
        report.files,
        engine::plan::gb(report.bytes),
        engine::plan::gb(report.downloaded),
        engine::plan::gb(report.kept),
    ))
}

/// A bar for all and one for each file that is coming; lines where nobody watches.
struct Bars {
    all: MultiProgress,
    watched: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    total: Option<ProgressBar>,
    files: Vec<FileBar>,
}

struct FileBar {
    name: String,
    size: u64,
    have: u64,
    bar: Option<ProgressBar>,
}

const STYLE: &str = "{bytes:>11} of {total_bytes:11} {binary_bytes_per_sec:>13} {eta:>5} [{wide_bar}] {msg}";

fn bar(size: u64, have: u64, name: &str) -> ProgressBar {
    let bar = ProgressBar::new(size).with_message(name.to_owned());
    if let Ok(style) = ProgressStyle::with_template(STYLE) {
        bar.set_style(style.progress_chars("=> "));
    }
    // What is there already is no part of the rate.
    bar.set_position(have);
    bar.reset_eta();
    bar
}

impl Bars {
    fn new() -> Self {
        let (all, watched) = (MultiProgress::new(), std::io::stderr().is_terminal());
        Self { all, watched, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn clear(&self) {
        let _ = self.all.clear(); // a terminal that is gone needs no clearing
    }

    fn say(&self, text: &str) {
        if self.watched {
            let _ = self.all.println(text); // as above
        } else {
            eprintln!("{text}");
        }
    }
}

impl Progress for Bars {
    fn begin(&self, files: &[(String, u64, u64)]) {
        let (size, have) = files.iter().fold((0, 0), |(s, h), f| (s + f.1, h + f.2));
        let gb = engine::plan::gb;
        self.say(&format!("{} files, {:.3} GB, {:.3} GB are there", files.len(), gb(size), gb(have)));
        let mut state = self.state();
        state.files = files
            .iter()
            .map(|(name, size, have)| FileBar { name: name.clone(), size: *size, have: *have, bar: None })
            .collect();
        if let Some(old) = state.total.take() {
            old.finish_and_clear();
        }
        state.total = Some(self.all.add(bar(size, have, "all")));
    }

    fn have(&self, file: usize, bytes: u64) {
        let mut state = self.state();
        let State { total, files } = &mut *state;
        let Some(f) = files.get_mut(file) else { return };
        if let Some(total) = total {
            // A file that begins anew takes its bytes back.
            total.set_position((total.position() + bytes).saturating_sub(f.have));
        }
        f.have = bytes;
        f.bar.get_or_insert_with(|| self.all.add(bar(f.size, bytes, &f.name))).set_position(bytes);
    }

    fn verified(&self, file: usize) {
        let mut state = self.state();
        let Some(f) = state.files.get_mut(file) else { return };
        if let Some(bar) = f.bar.take() {
            bar.finish_and_clear();
            self.all.remove(&bar);
        }
        if !self.watched {
            eprintln!("{}: {} bytes, verified", f.name, f.size);
        }
    }

    fn note(&self, text: &str) {
        self.say(text);
    }
}
