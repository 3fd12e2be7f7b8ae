//! `cargo xtask fixtures`: every committed data file has the SHA-256 that `fixtures/SHA256SUMS` lists.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::process::{read, root, sha256, write};

const SUMS: &str = "fixtures/SHA256SUMS";
/// The folders whose files are listed; paths are relative to the root, as `sha256sum -c` wants them.
const FOLDERS: [&str; 2] = ["fixtures", "models"];

/// Checks the list, or writes it.
pub fn run(rewrite: bool) -> Result<()> {
    let root = root();
    let found = digests(&root)?;
    if rewrite {
        let mut text = String::new();
        for (path, digest) in &found {
            writeln!(text, "{digest}  {path}")?;
        }
        write(&root.join(SUMS), text.as_bytes())?;
        println!("{SUMS}: {} files written", found.len());
        return Ok(());
    }
    let text = String::from_utf8(read(&root.join(SUMS))?).with_context(|| format!("{SUMS} is not UTF-8"))?;
    let faults = compare(&parse(&text)?, &found);
    if !faults.is_empty() {
        bail!(
            "{}\nrestore the files, or run `cargo xtask fixtures --write` if the change is meant",
            faults.join("\n")
        );
    }
    println!("{} data files have their listed SHA-256", found.len());
    Ok(())
}

fn digests(root: &Path) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for folder in FOLDERS {
        walk(root, folder, &mut found)?;
    }
    found.remove(SUMS);
    Ok(found)
}

fn walk(root: &Path, folder: &str, found: &mut BTreeMap<String, String>) -> Result<()> {
    let path = root.join(folder);
    for entry in std::fs::read_dir(&path).with_context(|| format!("cannot read {}", path.display()))? {
        let entry = entry?;
        let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            walk(root, &name, found)?;
        } else {
            found.insert(name, sha256(&read(&entry.path())?));
        }
    }
    Ok(())
}

fn parse(text: &str) -> Result<BTreeMap<String, String>> {
    text.lines()
        .enumerate()
        .map(|(number, line)| {
            let (digest, path) = line
                .split_once("  ")
                .with_context(|| format!("{SUMS}:{}: not `digest  path`", number + 1))?;
            Ok((path.to_owned(), digest.to_owned()))
        })
        .collect()
}

fn compare(listed: &BTreeMap<String, String>, found: &BTreeMap<String, String>) -> Vec<String> {
    let mut faults = Vec::new();
    for (path, digest) in listed {
        match found.get(path) {
            None => faults.push(format!("{path} is listed in {SUMS} and missing")),
            Some(other) if other != digest => {
                faults.push(format!("{path} has SHA-256 {other}, {SUMS} lists {digest}"))
            }
            Some(_) => {}
        }
    }
    faults.extend(
        found
            .keys()
            .filter(|path| !listed.contains_key(*path))
            .map(|path| format!("{path} is not listed in {SUMS}")),
    );
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_changed_missing_and_unlisted_files() {
        let listed = parse("aa  fixtures/a\nbb  fixtures/b\ncc  fixtures/c\n").unwrap();
        let found = parse("aa  fixtures/a\nb0  fixtures/b\ndd  fixtures/d\n").unwrap();
        let faults = compare(&listed, &found);
        assert_eq!(faults.len(), 3, "{faults:?}");
        assert!(faults[0].contains("fixtures/b has SHA-256 b0"));
        assert!(faults[1].contains("fixtures/c is listed"));
        assert!(faults[2].contains("fixtures/d is not listed"));
        assert!(compare(&listed, &listed).is_empty());
    }

    #[test]
    fn a_line_without_two_fields_is_named_by_number() {
        assert!(parse("aa  x\nbroken\n").unwrap_err().to_string().contains(":2:"));
    }
}
