//! Records what the program is built from: the committed contents, and the receipts that were committed for them.

use std::{env, fmt::Write as _, fs, path::Path, process::Command};

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
    let (listing, commit) = if ours {
        if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
            println!("cargo:rerun-if-changed={}", root.join(log).display());
        }
        let listing = git(&[&["ls-tree", "-r", "HEAD", "--"][..], &COUNTED].concat());
        (listing.unwrap_or_default(), git(&["rev-parse", "HEAD"]).unwrap_or_default())
    } else {
        let mut listing = String::new();
        COUNTED.iter().for_each(|p| walk(&root, p, &mut listing));
        (listing, String::new())
    };
    fs::write(out.join("tree.txt"), listing).expect("OUT_DIR can be written");
    println!("cargo:rustc-env=HALLMARK_COMMIT={commit}");
    println!("cargo:rustc-env=HALLMARK_TARGET={}", env::var("TARGET").unwrap_or_default());
    println!("cargo:rustc-env=HALLMARK_PROFILE={}", env::var("PROFILE").unwrap_or_default());

    let receipts = root.join("receipts");
    println!("cargo:rerun-if-changed={}", receipts.display());
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

/// Lists files as `git ls-tree -r` does.
fn walk(root: &Path, path: &str, listing: &mut String) {
    let full = root.join(path);
    if full.is_dir() {
        println!("cargo:rerun-if-changed={}", full.display());
        let mut names: Vec<String> = fs::read_dir(&full)
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names.iter().for_each(|n| walk(root, &format!("{path}/{n}"), listing));
    } else if let Ok(bytes) = fs::read(&full) {
        let mut hash = Sha1::new();
        hash.update(format!("blob {}\0", bytes.len()));
        hash.update(&bytes);
        let id = hash.finalize().iter().fold(String::new(), |mut text, b| {
            let _ = write!(text, "{b:02x}");
            text
        });
        let _ = writeln!(listing, "100644 blob {id}\t{path}");
    }
}
