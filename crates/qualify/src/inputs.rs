//! What a receipt's figures depend on: the committed contents of the code, the fixtures and the locked dependencies.

use std::{
    collections::BTreeMap,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde::{Deserialize, Serialize};

use crate::sha256_hex;

/// Paths whose contents count. Not documentation, receipts or benches.
pub const COUNTED: [&str; 4] = ["crates", "kernels", "fixtures", "Cargo.lock"];

/// Listing of the files that this build was made from.
const BUILT_TREE: &str = include_str!(concat!(env!("OUT_DIR"), "/tree.txt"));
const BUILT_COMMIT: &str = env!("HALLMARK_COMMIT");
const BUILT_DIRTY: &str = env!("HALLMARK_DIRTY");

/// The counted contents of a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inputs {
    /// SHA-256 over the parts.
    pub hash: String,
    /// SHA-256 of each part (a crate, a fixture folder, `Cargo.lock`) over its files' blob ids and paths.
    pub parts: BTreeMap<String, String>,
    /// Commit of the tree.
    pub commit: String,
    /// Whether the contents differ from the commit, or no commit is known.
    pub dirty: bool,
}

impl Inputs {
    /// From `git ls-tree -r` lines: mode, type, blob id, tab, path.
    pub fn from_listing(listing: &str, commit: &str, dirty: bool) -> Self {
        let mut lines: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for line in listing.lines() {
            let Some((head, path)) = line.split_once('\t') else { continue };
            let Some(blob) = head.split(' ').nth(2) else { continue };
            lines.entry(part(path)).or_default().push(format!("{blob} {path}\n"));
        }
        let parts: BTreeMap<String, String> = lines
            .into_iter()
            .map(|(part, mut files)| {
                files.sort();
                (part, sha256_hex(files.concat().as_bytes()))
            })
            .collect();
        Self { hash: hash_of(&parts), parts, commit: commit.to_owned(), dirty }
    }

    /// The contents that this program was built from, committed or not. This is what its receipts are about, and what
    /// receipts must be about to qualify it.
    pub fn built() -> Self {
        Self::from_listing(BUILT_TREE, BUILT_COMMIT, BUILT_DIRTY != "0")
    }

    /// The contents of the checkout at `root` as its files lie there, committed or not; `None` where git can't tell.
    pub fn of_checkout(root: &Path) -> Option<Self> {
        let commit = git(root, &["rev-parse", "HEAD"])?;
        let committed = git(root, &[&["ls-tree", "-r", "HEAD", "--"][..], &COUNTED].concat())?;
        let list = ["ls-files", "-c", "-o", "--exclude-standard", "--"];
        let mut files: Vec<String> =
            git(root, &[&list[..], &COUNTED].concat())?.lines().map(String::from).collect();
        files.sort();
        files.dedup();
        // A deleted file is still in the index.
        files.retain(|f| root.join(f).is_file());
        let ids = blob_ids(root, &files)?;
        let listing: String =
            ids.iter().zip(&files).map(|(id, file)| format!("100644 blob {id}\t{file}\n")).collect();
        let mut present = Self::from_listing(&listing, commit.trim(), false);
        present.dirty = present.hash != Self::from_listing(&committed, "", false).hash;
        Some(present)
    }

    /// The contents that a receipt is held against: those of the checkout around the working directory, else those that
    /// were built.
    pub fn present() -> Self {
        checkout().and_then(|root| Self::of_checkout(&root)).unwrap_or_else(Self::built)
    }

    /// Parts that differ between two trees.
    pub fn changed<'a>(&'a self, other: &'a Self) -> Vec<&'a str> {
        let mut changed: Vec<&str> = self
            .parts
            .iter()
            .filter(|(p, h)| other.parts.get(*p) != Some(h))
            .map(|(p, _)| p.as_str())
            .chain(other.parts.keys().filter(|p| !self.parts.contains_key(*p)).map(String::as_str))
            .collect();
        changed.sort_unstable();
        changed
    }

    /// Whether the hash is that of the parts.
    pub fn is_consistent(&self) -> bool {
        self.hash == hash_of(&self.parts)
    }
}

fn git(root: &Path, args: &[&str]) -> Option<String> {
    let out = Command::new("git").arg("-C").arg(root).args(args).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Blob ids of `files` as git gives them, in one run of git.
fn blob_ids(root: &Path, files: &[String]) -> Option<Vec<String>> {
    let mut child = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(["hash-object", "--no-filters", "--stdin-paths"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .ok()?;
    let (mut input, list) = (child.stdin.take()?, files.join("\n") + "\n");
    let writer = std::thread::spawn(move || input.write_all(list.as_bytes()));
    let out = child.wait_with_output().ok()?;
    writer.join().ok()?.ok()?;
    let ids: Vec<String> = String::from_utf8_lossy(&out.stdout).lines().map(String::from).collect();
    (out.status.success() && ids.len() == files.len()).then_some(ids)
}

/// The first two components: a crate, a fixture folder; a file at the top is its own part.
fn part(path: &str) -> String {
    path.splitn(3, '/').take(2).collect::<Vec<_>>().join("/")
}

fn hash_of(parts: &BTreeMap<String, String>) -> String {
    let lines: String = parts.iter().map(|(p, h)| format!("{h} {p}\n")).collect();
    sha256_hex(lines.as_bytes())
}

/// Root of the hallmark checkout around the working directory.
pub fn checkout() -> Option<PathBuf> {
    let here = std::env::current_dir().ok()?;
    here.ancestors()
        .find(|d| d.join("crates/qualify/thresholds.json").is_file() && d.join(".git").exists())
        .map(Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "100644 blob aaaa\tCargo.lock\n100644 blob bbbb\tcrates/ops/src/lib.rs\n\
                        100644 blob cccc\tcrates/ops/src/rope.rs\n100644 blob dddd\tfixtures/model/nano/config.json\n";

    #[test]
    fn parts_are_crates_and_fixture_folders() {
        let a = Inputs::from_listing(TREE, "c0", false);
        assert_eq!(a.parts.keys().collect::<Vec<_>>(), ["Cargo.lock", "crates/ops", "fixtures/model"]);
        assert!(a.is_consistent());
        let b = Inputs::from_listing(&TREE.replace("cccc", "c000"), "c1", false);
        assert_eq!(a.changed(&b), ["crates/ops"]);
        assert_ne!(a.hash, b.hash);
        let c = Inputs::from_listing(&format!("{TREE}100644 blob eeee\tkernels/a.metal\n"), "c1", false);
        assert_eq!(a.changed(&c), ["kernels/a.metal"]);
        // The order of the listing and the commit's name say nothing about contents.
        let mut lines: Vec<&str> = TREE.lines().collect();
        lines.reverse();
        assert_eq!(Inputs::from_listing(&lines.join("\n"), "c2", false).hash, a.hash);
    }

    #[test]
    fn an_edited_hash_is_inconsistent() {
        let mut a = Inputs::from_listing(TREE, "c0", false);
        a.parts.insert("crates/ops".into(), "0".into());
        assert!(!a.is_consistent());
    }
}
