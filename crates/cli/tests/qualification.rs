//! The commands of qualification as a user meets them: traces, judge, bisect, receipts, refusals.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use qualify::{
    Verdict,
    inputs::Inputs,
    receipt::{BEGIN, END, Receipt, seal},
};
use serde_json::Value;
use tempfile::TempDir;

fn root() -> PathBuf {
    fs::canonicalize(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).unwrap()
}

/// A user with a checkout and an empty folder for local receipts.
struct User {
    dir: TempDir,
}

impl User {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn hallmark(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_hallmark"))
            .args(args)
            .current_dir(root())
            .env("XDG_DATA_HOME", self.dir.path())
            .output()
            .unwrap()
    }

    /// Standard output and error of a command that ends with `code`.
    fn ends(&self, args: &[&str], code: i32) -> (String, String) {
        let o = self.hallmark(args);
        let text = |b: Vec<u8>| String::from_utf8(b).unwrap();
        let (out, err) = (text(o.stdout), text(o.stderr));
        assert_eq!(o.status.code(), Some(code), "{args:?}: {out}{err}");
        (out, err)
    }

    fn done(&self, args: &[&str]) -> String {
        self.ends(args, 0).0
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.done(args)).unwrap()
    }
}

fn golden(name: &str) -> String {
    format!("fixtures/model/nano/golden/{name}.safetensors")
}

fn pass<'a>(judgement: &'a Value, name: &str) -> &'a Value {
    judgement["passes"].as_array().unwrap().iter().find(|p| p["pass"] == name).unwrap()
}

#[test]
fn traces_are_written_and_judged_relative_to_the_noise() {
    let user = User::new();
    let [exact, moved, source, page] = ["exact", "moved", "source", "page.html"].map(|n| user.path(n));
    let nano = ["trace", "nano", "--prompt-ids", "0,17,5,60,33,9,12,40", "--decode", "2", "--out"];
    user.done(&[&nano[..], &[&exact, "--numerics", "exact"]].concat());
    user.done(&[&nano[..], &[&moved, "--numerics", "exact", "--nudge", "0,7"]].concat());
    user.done(&[&nano[..], &[&source, "--numerics", "source"]].concat());

    // A trace against itself: no difference, and without noise no verdict.
    let same = user.json(&["judge", "--reference", &exact, "--candidate", &exact, "--json"]);
    assert_eq!(same["verdict"], "NOT RUN");
    for pass in same["passes"].as_array().unwrap() {
        assert!(pass["departs"].is_null(), "{pass}");
    }
    let noisy = ["judge", "--reference", &exact, "--noise", &moved, "--candidate"];
    let text = user.done(&[&noisy[..], &[&moved]].concat());
    assert!(text.contains("verdict: PASS"), "{text}");
    // Other numerics are far outside of that noise; the page shows where.
    let (out, err) = user.ends(&[&noisy[..], &[&source, "--tensors", "--html", &page]].concat(), 1);
    assert!(out.contains("verdict: FAIL") && out.contains("layers.3.attn_out"), "{out}");
    assert!(err.contains("more than the reference's noise"), "{err}");
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.contains("layers.0.streams") && html.contains("<html"));
}

/// "official / float32 at 1, 33, 129: 0.055, 0.069, 0.103" and "bf16 / float32: 0.010, 0.035" of the goldens' README.
#[test]
fn traces_of_others_give_the_published_figures() {
    let user = User::new();
    let figures = |candidate: &str| {
        user.json(&["judge", "--reference", &golden("float32"), "--candidate", &golden(candidate), "--json"])
    };
    let nrms = |j: &Value, name: &str| {
        let tensors = pass(j, name)["tensors"].as_array().unwrap();
        let logits = tensors.iter().find(|t| t["name"] == "logits").unwrap();
        format!("{:.3}", logits["values"]["nrms"].as_f64().unwrap())
    };
    let official = figures("official");
    let got = ["prompt1", "prompt33", "prompt129"].map(|p| nrms(&official, p));
    assert_eq!(got, ["0.055", "0.069", "0.103"]);
    let bf16 = figures("bf16");
    assert_eq!(["prompt1", "prompt33"].map(|p| nrms(&bf16, p)), ["0.010", "0.035"]);
}

#[test]
fn bisect_ranks_operators_and_holds_tensors_of_a_trace_against_ours() {
    let user = User::new();
    let text = user.done(&["bisect", "nano", "--tokens", "5"]);
    for want in ["operator", "sparse_attention", "amplifies", "own flips"] {
        assert!(text.contains(want), "{want} in {text}");
    }
    let reference = golden("official");
    let report = user.json(&["bisect", "nano", "--reference", &reference, "--pass", "prompt3", "--json"]);
    let segments = report["segments"].as_array().unwrap();
    let streams = segments.iter().find(|s| s["name"] == "layers.6.streams").unwrap();
    assert!(streams["own"].as_f64().unwrap() <= streams["limit"].as_f64().unwrap(), "{streams}");
    assert!(report["calls"].as_array().unwrap().len() > 100);
    let (_, err) = user.ends(&["bisect", "nano", "--reference", &reference, "--pass", "prompt4"], 4);
    assert!(err.contains("prompt4/tokens is missing"), "{err}");
}

#[test]
fn a_receipt_is_made_checked_compared_and_shown() {
    let user = User::new();
    let [first, second, readme] = ["a.json", "b.json", "README.md"].map(|n| user.path(n));
    let made = user.json(&["qualify", "model", "nano", "--draws", "4", "--receipt", &first, "--json"]);
    let gates: Vec<&str> =
        made["gates"].as_array().unwrap().iter().map(|g| g["verdict"].as_str().unwrap()).collect();
    assert_eq!(gates, ["PASS"; 5], "{made}");
    assert_eq!(made["references"][0]["name"], golden("official"));
    let (out, _) = user.ends(&["receipt", "verify", &first, "--require-current"], 0);
    assert!(out.contains("current"), "{out}");
    assert!(user.done(&["receipt", "show", &first]).contains("prompt33 NRMS"));

    // An edit is found and said.
    let text = fs::read_to_string(&first).unwrap();
    fs::write(&second, text.replacen("\"g3.factor\":1.2", "\"g3.factor\":2.4", 1)).unwrap();
    let (out, err) = user.ends(&["receipt", "verify", &second], 1);
    assert!(out.contains("thresholds: a limit was changed after sealing"), "{out}");
    assert!(err.contains("1 of 1 receipts are inconsistent"), "{err}");

    // Other contents are historical, which is no failure unless the caller says so.
    let mut old = Receipt::open(Path::new(&first)).unwrap();
    let tree = format!("100644 blob {}\tcrates/ops/src/lib.rs\n", "0".repeat(40));
    old.inputs = Inputs::from_listing(&tree, &"c".repeat(40), false);
    old.verdict = old.derived();
    old.seals = seal(&old);
    old.write(Path::new(&second)).unwrap();
    let (out, _) = user.ends(&["receipt", "verify", &second], 0);
    assert!(out.contains("PASS, historical (changed since: ") && out.contains("crates/ops"), "{out}");
    user.ends(&["receipt", "verify", &second, "--require-current"], 1);
    assert!(user.done(&["receipt", "diff", &first, &second]).contains("inputs: "));

    // The table stands in a document, and a document with another one is found.
    fs::write(&readme, format!("# A\n\n{BEGIN}\n{END}\n")).unwrap();
    let (_, err) = user.ends(&["receipt", "table", &first, &second, "--check", &readme], 1);
    assert!(err.contains("hallmark receipt table --write"), "{err}");
    user.done(&["receipt", "table", &first, &second, "--write", &readme]);
    user.done(&["receipt", "table", &first, &second, "--check", &readme]);
    let table = fs::read_to_string(&readme).unwrap();
    assert!(table.contains("| current |") && table.contains("| historical | cccccccc |"), "{table}");
}

/// The owner's own checkpoint: refused, run under a banner, qualified, served.
#[test]
fn a_local_receipt_lifts_the_refusal_of_its_checkpoint() {
    let user = User::new();
    let model = user.path("mine");
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(root().join("models/demo")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), Path::new(&model).join(entry.file_name())).unwrap();
    }
    // Another tokenizer file makes it another checkpoint than the one whose receipts are committed.
    let tokenizer = Path::new(&model).join("tokenizer.json");
    let text = fs::read_to_string(&tokenizer).unwrap();
    fs::write(&tokenizer, format!("{text}\n")).unwrap();

    let run = ["run", &model, "-p", "Hello!", "--no-think", "--max-tokens", "3"];
    let (out, err) = user.ends(&run, 3);
    assert_eq!(out, "");
    assert!(err.contains("refused as not qualified: no receipt qualifies checkpoint"), "{err}");
    assert!(err.contains(&format!("hallmark qualify model {model} --device cpu --numerics native")), "{err}");
    let (out, err) = user.ends(&[&run[..], &["--allow-unqualified", "--json"]].concat(), 0);
    let answer: Value = serde_json::from_str(&out).unwrap();
    assert!(err.contains("UNQUALIFIED: no receipt"), "{err}");
    assert_eq!(
        (&answer["qualification"]["unqualified"], &answer["qualification"]["status"]),
        (&true.into(), &"refused".into())
    );

    let qualify =
        ["qualify", "model", &model, "--numerics", "native", "--against", "scalar", "--tokens", "8"];
    let (out, err) = user.ends(&qualify, 0);
    assert!(err.contains("layer 8 of 8") && out.contains("8 tokens NRMS"), "{out}{err}");
    let path =
        fs::read_dir(user.dir.path().join("hallmark/receipts")).unwrap().next().unwrap().unwrap().path();
    assert!(path.file_name().unwrap().to_string_lossy().starts_with("mine-cpu-"));
    // A tree with uncommitted changes gives PARTIAL; here it is taken as committed.
    let mut receipt = Receipt::open(&path).unwrap();
    assert!(receipt.gates.iter().all(|g| g.verdict == Verdict::Pass));
    receipt.inputs.dirty = false;
    receipt.verdict = receipt.derived();
    receipt.seals = seal(&receipt);
    receipt.write(&path).unwrap();

    let (out, err) = user.ends(&[&run[..], &["--json"]].concat(), 0);
    let answer: Value = serde_json::from_str(&out).unwrap();
    assert!(!err.contains("UNQUALIFIED"), "{err}");
    assert_eq!(answer["qualification"]["status"], "qualified");
    let table = user.json(&["capabilities", "--json"]);
    let mine = |e: &&Value| e["checkpoint"].as_str().is_some_and(|c| c.starts_with("mine "));
    let entry = table.as_array().unwrap().iter().find(mine).unwrap();
    assert_eq!((&entry["status"], &entry["numerics"]), (&"qualified".into(), &"native".into()));
    // Other numerics are another thing.
    let (_, err) = user.ends(&[&run[..], &["--numerics", "source"]].concat(), 3);
    assert!(err.contains("in source numerics"), "{err}");
}

/// A pack without Engram tables is qualified with those of a second folder, which the receipt names by their own hashes.
#[test]
fn a_receipt_names_the_engram_tables_of_a_second_folder() {
    let user = User::new();
    let whole = checkpoint::generate::cached("nano").unwrap();
    let source = checkpoint::Checkpoint::open(&whole).unwrap();
    let pack = user.path("pack");
    fs::create_dir(&pack).unwrap();
    for file in ["config.json", "tokenizer.json"] {
        fs::write(Path::new(&pack).join(file), &*source.file(file).unwrap()).unwrap();
    }
    let tensors = source.tensors();
    let kept = tensors.iter().filter(|t| t.group != checkpoint::Group::EngramTable);
    let kept: Vec<_> = kept.map(|t| (t, source.tensor(t.name).unwrap())).collect();
    let items: Vec<_> = kept
        .iter()
        .map(|(t, data)| checkpoint::write::Item { name: t.name, dtype: t.dtype, shape: t.shape, data })
        .collect();
    assert!(items.len() < tensors.len());
    checkpoint::write::write_shard(&Path::new(&pack).join("model.safetensors"), &items).unwrap();

    let receipt = user.path("receipt.json");
    let alone = ["qualify", "model", &pack, "--tokens", "2", "--draws", "2", "--receipt", &receipt];
    let (_, err) = user.ends(&alone, 4);
    assert!(err.contains("--engram-from"), "{err}");
    let from = whole.display().to_string();
    user.done(&[&alone[..], &["--engram-from", &from]].concat());
    let made = Receipt::open(Path::new(&receipt)).unwrap();
    let id = made.checkpoint.as_ref().unwrap();
    let engram = id.engram.as_ref().unwrap();
    let shards: Vec<&str> = engram.files.iter().map(|f| f.name.as_str()).collect();
    assert!(!shards.is_empty() && engram.fingerprint != id.fingerprint, "{shards:?}");
    let bytes = fs::read(whole.join(shards[0])).unwrap();
    assert_eq!(engram.files[0].sha256, qualify::sha256_hex(&bytes));
    assert!(made.gates.iter().all(|g| g.verdict != Verdict::Fail), "{:?}", made.gates);
}

#[test]
fn capabilities_name_every_device_and_what_lifts_a_refusal() {
    let user = User::new();
    let table = user.json(&["capabilities", "--json"]);
    // The emulator is there, without a receipt.
    let qualify = "hallmark qualify ops --device emu --numerics exact";
    for (device, lift) in [("metal", "use --device cpu"), ("cuda", "use --device cpu"), ("emu", qualify)] {
        let entry = table.as_array().unwrap().iter().find(|e| e["device"] == device).unwrap();
        assert_eq!((&entry["status"], &entry["lift"]), (&"refused".into(), &lift.into()));
    }
    let text = user.done(&["capabilities"]);
    assert!(text.contains("operators") && text.contains("the vision tower is not built"), "{text}");
}

#[test]
fn wrong_uses_end_with_their_code_and_a_sentence() {
    let user = User::new();
    let out = user.path("t.safetensors");
    for (args, code, needle) in [
        (&["qualify", "ops", "--device", "metal"][..], 3, "use --device cpu"),
        (&["qualify", "model", "--device", "cuda", "--against", "cpu"], 3, "use --device cpu"),
        (&["trace", "--device", "metal", "--out", &out], 3, "use --device cpu"),
        (&["qualify", "model", "--against", "cpu"], 2, "--against scalar"),
        (&["qualify", "model", "/no/such/model"], 4, "/no/such/model"),
        (&["trace", "nano", "--out", &out, "--nudge", "0"], 2, "a position and an element"),
        (&["trace", "nano", "--out", &out, "--nudge", "0,999"], 2, "128 elements"),
        (&["trace", "nano", "--out", &out, "--like", "/no/such/trace"], 4, "/no/such/trace"),
        (&["judge", "--reference", "/no/such/trace", "--candidate", "x"], 4, "/no/such/trace"),
        (&["judge", "--reference", "Cargo.toml", "--candidate", "x"], 4, "Cargo.toml"),
        (&["receipt", "verify", "/no/such/receipt"], 4, "/no/such/receipt"),
        (&["receipt", "show", "Cargo.toml"], 4, "Cargo.toml: is no JSON"),
        (&["receipt", "frobnicate"], 2, "unrecognized"),
        (&["bisect", "nano", "--tokens", "0"], 2, "0 is not in 1..=512"),
    ] {
        let (stdout, err) = user.ends(args, code);
        assert!(err.contains(needle), "{args:?}: {err:?} does not say {needle:?}");
        assert_eq!(stdout, "", "{args:?}");
    }
}
