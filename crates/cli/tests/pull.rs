//! `hallmark pull` and `plan` of a repository, over a server of the test.

#[path = "../../hub/tests/server/mod.rs"]
mod server;

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    time::Duration,
};

use server::{COMMIT, FileOf, REPOSITORY, Server, noise};

fn hallmark(server: &Server, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hallmark"));
    command.args(args).env("HF_ENDPOINT", &server.address).env_remove("HF_TOKEN");
    command
}

fn done(mut command: Command) -> Output {
    command.output().unwrap()
}

/// Ranges in the journals of a folder.
fn noted(out: &Path, files: &[FileOf]) -> Vec<(String, u64, u64)> {
    let mut all = Vec::new();
    for f in files {
        let path = out.join(".hallmark/parts").join(format!("{}.ranges", f.name));
        let text = fs::read_to_string(path).unwrap_or_default();
        for line in text.split_inclusive('\n').skip(1).filter(|l| l.ends_with('\n')) {
            let words: Vec<&str> = line.split(' ').collect();
            all.push((f.name.clone(), words[0].parse().unwrap(), words[1].parse().unwrap()));
        }
    }
    all
}

/// Killed again and again after times that grow a little, it comes to its end, and what a journal says is never asked for
/// again.
#[test]
fn a_kill_at_any_point_loses_nothing() {
    // Cut connections make many short ranges, so that kills meet the journal at many points.
    let mut files = server::files();
    files[0].bytes = noise(11, 1_500_000);
    files[1].bytes = noise(12, 500_000);
    let server = Server::start(
        files.clone(),
        Box::new(|r, a| {
            if !r.is_list() {
                a.cut = Some(20_000 + r.number * 7919 % 30_000);
                a.silence = Duration::from_millis(2);
            }
        }),
    );
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("model");
    let name = format!("{REPOSITORY}@main");
    let mut kills = 0;
    let mut held: Vec<(String, u64, u64)> = Vec::new();
    loop {
        let from = server.requests().len();
        let mut command = hallmark(&server, &["pull", &name, "--connections", "3", "--out"]);
        let mut child = command.arg(&out).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(15 + 9 * kills));
        let ended = child.try_wait().unwrap();
        if ended.is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        for r in &server.requests()[from..] {
            let Some((start, end)) = r.range else { continue };
            let again = held.iter().find(|(f, s, e)| r.is_file(f) && start < *e && *s < end);
            assert!(again.is_none(), "after {kills} kills: {again:?} was asked for again by {r:?}");
        }
        for f in &files {
            if let Ok(bytes) = fs::read(out.join(&f.name)) {
                assert!(bytes == f.bytes, "after {kills} kills: {} is wrong", f.name);
            }
        }
        if let Some(status) = ended {
            assert!(status.success(), "{status}");
            break;
        }
        held = noted(&out, &files);
        // A file that is in its place is not asked for again either.
        held.extend(
            files
                .iter()
                .filter(|f| out.join(&f.name).exists())
                .map(|f| (f.name.clone(), 0, f.bytes.len() as u64)),
        );
        kills += 1;
        assert!(kills < 200, "it never ends");
    }
    assert!(kills >= 3, "only {kills} kills");
    files.iter().for_each(|f| assert!(out.join(&f.name).exists(), "{}", f.name));
}

#[test]
fn a_branch_is_pinned_and_a_wrong_byte_is_exit_4() {
    let files = server::files();
    let server = Server::start(
        files.clone(),
        Box::new(|r, a| {
            if r.is_file("b.safetensors") && r.before == 0 {
                a.body[7] ^= 1;
            }
        }),
    );
    let dir = tempfile::tempdir().unwrap();
    let (out, name) = (dir.path().to_str().unwrap(), format!("{REPOSITORY}@main"));
    let bad = done(hallmark(&server, &["pull", &name, "--out", out]));
    let text = String::from_utf8_lossy(&bad.stderr).into_owned();
    assert_eq!(bad.status.code(), Some(4), "{text}");
    assert!(text.contains(&format!("main is commit {COMMIT}")) && text.contains("bad file is"), "{text}");
    let good = done(hallmark(&server, &["pull", &name, "--out", out, "--json"]));
    assert!(good.status.success(), "{}", String::from_utf8_lossy(&good.stderr));
    let report: serde_json::Value = serde_json::from_slice(&good.stdout).unwrap();
    assert_eq!((&report["commit"], &report["files"]), (&COMMIT.into(), &5.into()));
    let usage = done(hallmark(&server, &["pull", REPOSITORY, "--out", out]));
    assert_eq!(usage.status.code(), Some(2));
}

/// The plan of a repository is the plan of its folder, and no weight is asked for.
#[test]
fn a_repository_is_planned_before_it_is_pulled() {
    let folder = checkpoint::generate::cached("wide").unwrap();
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_file()) {
        let name = entry.file_name().unwrap().to_str().unwrap().to_owned();
        files.push(FileOf { large: name.ends_with(".safetensors"), bytes: fs::read(&entry).unwrap(), name });
    }
    let total: u64 = files.iter().map(|f| f.bytes.len() as u64).sum();
    let server = Server::start(files, Box::new(|_, _| {}));
    let name = format!("{REPOSITORY}@{COMMIT}");
    let plan = |model: &str| {
        let out = done(hallmark(&server, &["plan", model, "--context", "1024", "--json"]));
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    assert_eq!(plan(&name), plan(folder.to_str().unwrap()));
    let asked: u64 = server.requests().iter().filter_map(|r| r.range).map(|(s, e)| e - s).sum();
    assert!(asked < total / 4, "{asked} of {total} bytes were asked for");
}
