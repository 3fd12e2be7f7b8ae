//! Drafts, replay and kept prompts from the command line.

use std::{path::Path, process::Command};

use serde_json::Value;

/// The JSON document of a run, or what it says and its exit code.
fn run(args: &[&str]) -> Result<Value, (String, Option<i32>)> {
    let all = [&["run", "--json", "--no-think", "--threads", "1", "--seed", "7"], args].concat();
    let o = Command::new(env!("CARGO_BIN_EXE_hallmark")).args(all).output().unwrap();
    if o.status.success() {
        Ok(serde_json::from_slice(&o.stdout).unwrap())
    } else {
        Err((String::from_utf8(o.stderr).unwrap(), o.status.code()))
    }
}

const COUNT: [&str; 4] = ["-p", "Count from 1 to 12.", "--max-tokens", "40"];

#[test]
fn drafts_save_steps_and_change_nothing() {
    for temperature in ["0", "1"] {
        let base = [&COUNT[..], &["--temperature", temperature]].concat();
        let off = run(&[&base[..], &["--drafts", "off"]].concat()).unwrap();
        assert_eq!(off["drafts"]["rounds"], 0);
        for drafts in ["on", "1", "4"] {
            let on = run(&[&base[..], &["--drafts", drafts]].concat()).unwrap();
            assert_eq!(on["ids"], off["ids"], "--drafts {drafts} at temperature {temperature}");
            assert!(drafts == "on" || on["drafts"]["accepted"].as_u64().unwrap() > 10, "{}", on["drafts"]);
        }
        assert_eq!(run(&base).unwrap()["ids"], off["ids"], "by default");
    }
    let (why, code) = run(&[&COUNT[..], &["--drafts", "5"]].concat()).unwrap_err();
    assert!(code == Some(3) && why.contains("at most 4 tokens"), "{why}");
}

#[test]
fn a_folder_keeps_prompts_for_later_runs() {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("kept");
    let base = [&COUNT[..], &["--temperature", "0", "--cache-dir", cache.to_str().unwrap()]].concat();
    let first = run(&base).unwrap();
    assert_eq!(first["reuse"]["kept"], 0);
    let second = run(&base).unwrap();
    assert_eq!(second["ids"], first["ids"]);
    let prompt = first["usage"]["prompt_tokens"].as_u64().unwrap();
    // All but the last token, whose logits are needed; its state was kept behind it.
    assert_eq!(second["reuse"]["found"].as_u64().unwrap(), prompt - 1, "{}", second["reuse"]);
    private(&cache);
    // Another numerics mode shares nothing.
    let other = run(&[&base[..], &["--numerics", "exact"]].concat()).unwrap();
    assert_eq!((&other["reuse"]["kept"], &other["ids"]), (&0.into(), &first["ids"]));
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let (why, code) = run(&[&COUNT[..], &["--cache-dir", file.to_str().unwrap()]].concat()).unwrap_err();
    assert!(code == Some(6) && why.contains("--cache-dir"), "{why}");
}

#[cfg(unix)]
fn private(dir: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let mode = |p: &Path| p.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(dir), 0o700);
    let files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(files.len() > 1);
    files.iter().for_each(|f| assert_eq!(mode(f), 0o600, "{}", f.display()));
}

#[cfg(not(unix))]
fn private(_: &Path) {}

#[test]
fn replay_is_an_option_and_refused_in_source() {
    let d = run(&[&COUNT[..], &["--prefill", "replay", "--temperature", "0"]].concat()).unwrap();
    assert!(d["usage"]["completion_tokens"].as_u64().unwrap() > 0);
    let args = [&COUNT[..], &["--prefill", "replay", "--numerics", "source"]].concat();
    let (why, code) = run(&args).unwrap_err();
    assert!(code == Some(3) && why.contains("--prefill full"), "{why}");
    assert_eq!(run(&[&COUNT[..], &["--prefill", "half"]].concat()).unwrap_err().1, Some(2));
}

#[test]
fn sizes_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let with = |size: &str| {
        run(&[
            "--prompt-ids",
            "0,5,9",
            "--max-tokens",
            "1",
            "--cache-size",
            size,
            "--cache-dir",
            dir.path().to_str().unwrap(),
        ])
    };
    with("3MiB").unwrap();
    with("1000000").unwrap();
    for bad in ["3MB", "-1", "x", "99999999999TiB", ""] {
        assert_eq!(with(bad).unwrap_err().1, Some(2), "{bad}");
    }
}
