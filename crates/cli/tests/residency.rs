//! What is kept in memory, from the command line.

use std::process::{Command, Output};

use serde_json::Value;

fn hallmark(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hallmark")).args(args).output().unwrap()
}

fn json(args: &[&str]) -> Value {
    let out = hallmark(args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

fn refused(args: &[&str], code: i32, words: &str) {
    let out = hallmark(args);
    let text = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{args:?}: {text}");
    assert!(text.contains(words), "{args:?}: {text}");
}

#[test]
fn row_files_are_made_checked_and_read() {
    let model = checkpoint::generate::cached("nano").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (model, rows) = (model.to_str().unwrap(), dir.path().join("rows"));
    let rows = rows.to_str().unwrap();
    assert!(hallmark(&["engram", "pack", model, rows]).status.success());
    assert!(hallmark(&["engram", "verify", rows]).status.success());
    let run = |more: &[&str]| {
        let args =
            ["run", model, "--allow-unqualified", "--prompt-ids", "3,9,27,81,5,6", "--max-tokens", "8"];
        json(&[&args[..], &["--temperature", "0", "--threads", "1", "--json"], more].concat())
    };
    let plain = run(&[]);
    assert_eq!(plain["engram"][0]["place"], "resident");
    for more in [
        &["--engram", "mmap"][..],
        &["--engram", "cache:64KiB"],
        &["--engram", "cache:1MiB", "--engram-rows", rows],
        &["--prefault", "--engram-rows", rows],
    ] {
        let other = run(more);
        assert_eq!(other["ids"], plain["ids"], "{more:?}");
        assert!(other["engram"][0]["rows"].as_u64().unwrap() > 0, "{more:?}");
        #[cfg(target_os = "linux")]
        assert!(other["memory"]["used"]["peak"].as_u64() > other["memory"]["state"].as_u64(), "{more:?}");
    }
    // A byte that is not the table's is refused.
    let file = std::fs::read_dir(rows).unwrap().map(|e| e.unwrap().path());
    let file = file.into_iter().find(|p| p.extension().is_some_and(|e| e == "safetensors")).unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    refused(&["engram", "verify", rows], 4, "SHA-256");
}

#[test]
fn a_conversation_that_cannot_finish_exits_5() {
    refused(&["run", "-p", "Hello", "--state-memory", "1KiB"], 5, "ask for a shorter --context");
    refused(&["run", "-p", "Hello", "--engram", "ram"], 2, "resident, mmap or cache:SIZE");
}

#[test]
fn loading_is_measured_beside_cat() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("deep");
    let report = json(&[
        "bench",
        "load",
        model.to_str().unwrap(),
        "--generate",
        "4",
        "--runs",
        "1",
        "--threads",
        "1",
        "--json",
    ]);
    let (bytes, planned) = (report["bytes"].as_u64().unwrap(), report["planned"].as_u64().unwrap());
    // Files hold headers beside what is planned.
    assert!(planned > 100_000_000 && bytes > planned && bytes < planned + planned / 100, "{report}");
    assert!(report["ratio"].as_f64().unwrap() > 0.0, "{report}");
    let table = dir.path().join("table");
    let report = json(&[
        "bench",
        "engram",
        "--dir",
        table.to_str().unwrap(),
        "--size",
        "4MiB",
        "--cache",
        "1MiB",
        "--tokens",
        "50",
        "--json",
    ]);
    assert!(report["cases"].as_array().unwrap().iter().all(|c| c["rows_per_s"].as_f64().unwrap() > 0.0));
    assert!(!table.exists());
}

/// Rows of a prompt come on a thread of their own, asked for before the first step; each step takes them within a layer.
#[test]
fn a_timeline_shows_rows_that_come_ahead_of_the_steps() {
    let model = checkpoint::generate::cached("nano").unwrap();
    let dir = tempfile::tempdir().unwrap();
    for place in ["resident", "mmap", "cache:1MiB"] {
        let file = dir.path().join("timeline.json");
        let args =
            ["bench", "prefill", model.to_str().unwrap(), "--tokens", "900", "--runs", "1", "--threads", "1"];
        let report =
            json(&[&args[..], &["--json", "--engram", place, "--timeline", file.to_str().unwrap()]].concat());
        let events: Vec<Value> = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let begun = |name: &str| -> Vec<&Value> {
            events.iter().filter(|e| e["ph"] == "B" && e["name"] == name).collect()
        };
        let (ahead, takes, steps) = (begun("engram ahead"), begun("engram take"), begun("step"));
        let tables = report["engram"].as_array().unwrap();
        // Two runs, the first of which does not count, of two steps.
        assert_eq!((ahead.len(), steps.len()), (2 * tables.len(), 4), "{place}");
        let taken: u64 = tables.iter().map(|t| t["steps"].as_u64().unwrap()).sum();
        assert_eq!(takes.len() as u64, taken, "{place}");
        assert!(begun("layer").len() > steps.len(), "{place}");
        let computes = &steps[0]["tid"];
        assert!(ahead.iter().all(|e| e["tid"] != *computes), "{place}");
        assert!(takes.iter().all(|e| e["tid"] == *computes), "{place}");
        let mut open = Vec::new();
        for e in events.iter().filter(|e| e["tid"] == *computes) {
            match (e["ph"].as_str(), e["name"].as_str()) {
                (Some("B"), Some(name)) => {
                    assert!(name != "engram take" || open.last() == Some(&"layer"), "{place}: {open:?}");
                    open.push(name);
                }
                (Some("E"), Some(name)) => assert_eq!(open.pop(), Some(name), "{place}"),
                _ => {}
            }
        }
        assert!(open.is_empty(), "{place}: {open:?}");
    }
    refused(&["bench", "prefill", "--timeline", "/no/such/folder/t.json"], 6, "/no/such/folder/t.json");
}
