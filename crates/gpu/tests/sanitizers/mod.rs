//! Every kernel under ThreadSanitizer and under AddressSanitizer with UndefinedBehaviorSanitizer: what a device was told to
//! do is written down on the emulator and done again by an instrumented program.
#![allow(dead_code)] // each test binary uses its part

pub mod build;
pub mod capture;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use build::{Build, Source, program};
use gpu::{kernels, rewrite::rewrite};

/// The kernels' files and what replays a record on them.
pub fn replayer(build: Build) -> PathBuf {
    let mut sources: Vec<Source> = kernels::FILES
        .iter()
        .map(|f| Source { name: f.name.into(), text: rewrite(f.name, f.metal).unwrap().cpp, kernels: true })
        .collect();
    let mut table = String::new();
    for k in kernels::KERNELS {
        write!(table, "KERNEL({}, {}) ", k.name, k.waits).unwrap();
    }
    let constants: BTreeSet<(&str, u32)> =
        kernels::KERNELS.iter().flat_map(|k| k.constants.iter().map(|c| (k.file, c.0))).collect();
    for (file, id) in constants {
        write!(table, "CONSTANT({file}, {id}) ").unwrap();
    }
    let replay = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gpu/tests/sanitizers/replay.cpp");
    let text = std::fs::read_to_string(replay).unwrap();
    let waits = build == Build::Thread;
    let text = format!("#define TABLE {table}\n#define WAITS {waits}\n{text}");
    sources.push(Source { name: "replay".into(), text, kernels: false });
    program(build, "replay", sources)
}

/// Whether `program` did all of `record` without a report, and what it said.
pub fn replay(program: &Path, record: &[u8]) -> (bool, String) {
    let mut child = Command::new(program)
        .env("TSAN_OPTIONS", "halt_on_error=1")
        .env("ASAN_OPTIONS", "detect_leaks=0")
        .env("UBSAN_OPTIONS", "halt_on_error=1:print_stacktrace=1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        // The program may end before it has read everything.
        scope.spawn(move || drop(input.write_all(record)));
        let output = child.wait_with_output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    })
}

/// Runs `record` in both builds and fails on a report; how many dispatches it has.
pub fn run_both(record: &[u8]) -> u64 {
    let dispatches = [Build::Thread, Build::Address].map(|build| {
        let start = Instant::now();
        let program = replayer(build);
        let built = start.elapsed().as_secs_f64();
        let (done, text) = replay(&program, record);
        std::fs::remove_file(program).unwrap();
        let seconds = start.elapsed().as_secs_f64() - built;
        eprintln!("{}: {} in {seconds:.1} s, built in {built:.1} s", build.name(), text.trim_end());
        let count = text.strip_suffix(" dispatches\n").and_then(|n| n.parse().ok());
        count.filter(|_| done).unwrap_or_else(|| panic!("{}: {text}", build.name()))
    });
    assert_eq!(dispatches[0], dispatches[1]);
    dispatches[0]
}
