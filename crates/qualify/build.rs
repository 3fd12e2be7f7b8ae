//! Records what the program is built from: the committed contents, and the receipts that were committed for them.

use std::{
    env,
    fmt::Write as _,
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use sha1::{Digest, Sha1};

const COUNTED: [&str; 4] = ["crates", "kernels", "fixtures", "Cargo.lock"];

fn main() {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../..");
    let out = env::var("OUT_DIR").expect("cargo sets it");
    let out = Path::new(&out);
    println!("cargo:rerun-if-changed=build.rs");
    let git = |args: &[&str]| {
        let result = Command::new("git").arg("-C").arg(&root).args(args).output().ok()?;
        result.status.success().then(|| String::from_utf8_lossy(&result.stdout).trim_end().to_owned())
    };
    // A checkout of another repository around an unpacked source archive must not be taken for ours.
    let ours = git(&["rev-parse", "--show-toplevel"])
        .is_some_and(|top| fs::canonicalize(top).ok() == fs::canonicalize(&root).ok());
    let (mut files, mut commit, mut committed) = (Vec::new(), String::new(), String::new());
    if ours {
        if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
            println!("cargo:rerun-if-changed={}", root.join(log).display());
        }
        let list = ["ls-files", "-c", "-o", "--exclude-standard", "--"];
        files = git(&[&list[..], &COUNTED].concat()).unwrap_or_default().lines().map(String::from).collect();
        commit = git(&["rev-parse", "HEAD"]).unwrap_or_default();
        committed = git(&[&["ls-tree", "-r", "HEAD", "--"][..], &COUNTED].concat()).unwrap_or_default();
    } else {
        COUNTED.iter().for_each(|p| walk(&root, p, &mut files));
    }
    // A missing path would count as changed at every build.
    for path in COUNTED.iter().chain(&["receipts"]).map(|p| root.join(p)).filter(|p| p.exists()) {
        println!("cargo:rerun-if-changed={}", path.display());
    }
    // What is built is what lies in the files, committed or not.
    files.sort();
    files.dedup();
    files.retain(|f| root.join(f).is_file());
    let ids = if ours { hashed_by_git(&root, &files) } else { None };
    let ids = ids.unwrap_or_else(|| files.iter().map(|f| blob(&root.join(f))).collect());
    let listing: String =
        ids.iter().zip(&files).map(|(id, file)| format!("100644 blob {id}\t{file}\n")).collect();
    let sorted = |listing: &str| -> Vec<String> {
        let mut lines: Vec<String> =
            listing.lines().filter_map(|l| l.split_once(" blob ").map(|(_, rest)| rest.to_owned())).collect();
        lines.sort();
        lines
    };
    let dirty = commit.is_empty() || sorted(&listing) != sorted(&committed);
    fs::write(out.join("tree.txt"), listing).expect("OUT_DIR can be written");
    println!("cargo:rustc-env=HALLMARK_COMMIT={commit}");
    println!("cargo:rustc-env=HALLMARK_DIRTY={}", u8::from(dirty));
    println!("cargo:rustc-env=HALLMARK_TARGET={}", env::var("TARGET").unwrap_or_default());
    println!("cargo:rustc-env=HALLMARK_PROFILE={}", env::var("PROFILE").unwrap_or_default());

    let receipts = root.join("receipts");
    let mut list = String::from("&[");
    let mut names: Vec<_> =
        fs::read_dir(&receipts).into_iter().flatten().flatten().map(|e| e.path()).collect();
    names.sort();
    for path in names.iter().filter(|p| p.extension().is_some_and(|e| e == "json")) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
        let _ = write!(list, "({name:?}, include_str!({:?})),", path.display().to_string());
    }
    fs::write(out.join("receipts.rs"), list + "]").expect("OUT_DIR can be written");
}

/// Files below `path`, relative to `root`.
fn walk(root: &Path, path: &str, files: &mut Vec<String>) {
    let full = root.join(path);
    if full.is_dir() {
        for name in fs::read_dir(&full).into_iter().flatten().flatten() {
            walk(root, &format!("{path}/{}", name.file_name().to_string_lossy()), files);
        }
    } else if full.is_file() {
        files.push(path.to_owned());
    }
}

/// Blob ids of all files in one run of git, which is many times faster than an unoptimised build script.
fn hashed_by_git(root: &Path, files: &[String]) -> Option<Vec<String>> {
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

/// A file's blob id as git would give it; an unreadable file counts as empty.
fn blob(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", bytes.len()));
    hash.update(&bytes);
    hash.finalize().iter().fold(String::new(), |mut text, b| {
        let _ = write!(text, "{b:02x}"); // writing to a String can't fail
        text
    })
}
