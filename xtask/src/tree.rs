//! Limits on the tracked tree: sizes, length of source files, unfinished marks, paths of one machine.

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::process::{root, tracked};

const TREE_LIMIT: u64 = 48_000_000;
const FIXTURES_LIMIT: u64 = 30_000_000;
const LINES_LIMIT: usize = 900;
const SOURCES: [&str; 12] =
    [".rs", ".metal", ".cu", ".cuh", ".cpp", ".h", ".py", ".js", ".mjs", ".css", ".html", ".sh"];
/// Written in two parts, so that this file does not hold them.
const MARKS: [&str; 5] = [
    concat!("to", "do!("),
    concat!("unimpl", "emented!("),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("#[ign", "ore"),
];
const MACHINE: [&str; 4] =
    [concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/Us", "ers/"), concat!("/wo", "rk/")];
/// Data and generated files, whose text is not ours.
const DATA: [&str; 4] = ["fixtures/", "models/", "bench/runs/", "Cargo.lock"];

/// Checks every tracked file.
pub fn check() -> Result<()> {
    let root = root();
    let files = tracked()?;
    let mut faults = Vec::new();
    let (mut total, mut fixtures) = (0, 0);
    for file in &files {
        let path = root.join(file);
        let size = match path.symlink_metadata() {
            Ok(metadata) => metadata.len(),
            Err(error) => {
                faults.push(format!("{file} is tracked and cannot be read: {error}"));
                continue;
            }
        };
        total += size;
        fixtures += if file.starts_with("fixtures/") { size } else { 0 };
        if !DATA.iter().any(|data| file.starts_with(data)) {
            faults.extend(faults_of(file, &path)?);
        }
    }
    if total > TREE_LIMIT {
        faults.push(format!("the tracked tree has {total} bytes, the limit is {TREE_LIMIT}"));
    }
    if fixtures > FIXTURES_LIMIT {
        faults.push(format!("fixtures/ has {fixtures} bytes, the limit is {FIXTURES_LIMIT}"));
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    println!(
        "{} tracked files, {:.1} MB, of which fixtures {:.1} MB",
        files.len(),
        total as f64 / 1e6,
        fixtures as f64 / 1e6
    );
    Ok(())
}

fn faults_of(file: &str, path: &Path) -> Result<Vec<String>> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {file}"))?;
    Ok(String::from_utf8(bytes).map_or_else(|_| Vec::new(), |text| faults_in(file, &text)))
}

fn faults_in(file: &str, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let lines = text.lines().count();
    if lines > LINES_LIMIT && SOURCES.iter().any(|end| file.ends_with(end)) {
        faults.push(format!("{file} has {lines} lines, the limit is {LINES_LIMIT}"));
    }
    for (number, line) in text.lines().enumerate() {
        for mark in MARKS.iter().filter(|mark| line.contains(**mark)) {
            faults.push(format!("{file}:{}: unfinished mark {mark}", number + 1));
        }
        for start in MACHINE.iter().filter(|start| holds_path(line, start)) {
            faults.push(format!("{file}:{}: a path of one machine ({start}...)", number + 1));
        }
    }
    faults
}

/// Whether an absolute path that begins with `start` stands in the line.
fn holds_path(line: &str, start: &str) -> bool {
    line.match_indices(start).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || "_.-~/}*".contains(c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_and_paths_are_found_where_they_stand() {
        let text = format!("fine\n{}\nsee {}x\n", MARKS[0], MACHINE[3]);
        let faults = faults_in("a.md", &text);
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(
            faults[0].starts_with("a.md:2: unfinished") && faults[1].starts_with("a.md:3: a path"),
            "{faults:?}"
        );
    }

    #[test]
    fn relative_paths_are_no_machine_paths() {
        for line in ["a/work/b", "$HOME/home/x", "./work/x", "${X}/work/y"] {
            assert!(MACHINE.iter().all(|start| !holds_path(line, start)), "{line}");
        }
        assert!(holds_path(&format!("(\"{}x\")", MACHINE[0]), MACHINE[0]));
    }

    #[test]
    fn only_sources_have_a_limit_of_lines() {
        let text = "x\n".repeat(LINES_LIMIT + 1);
        assert_eq!(faults_in("a.rs", &text).len(), 1);
        assert!(faults_in("a.json", &text).is_empty());
        assert!(faults_in("a.rs", &"x\n".repeat(LINES_LIMIT)).is_empty());
    }
}
