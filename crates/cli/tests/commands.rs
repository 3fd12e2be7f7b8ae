//! The command line as a user meets it: what goes where, what is refused, and with which exit code.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::Value;

/// Runs `hallmark` from a folder where nothing of the repository is, with `input` on standard input.
fn hallmark_with(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hallmark"))
        .args(args)
        .current_dir(std::env::temp_dir())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that does not read its input closes it, which is fine.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn hallmark(args: &[&str]) -> Output {
    hallmark_with(args, "")
}

fn stdout(o: &Output) -> String {
    String::from_utf8(o.stdout.clone()).unwrap()
}

fn stderr(o: &Output) -> String {
    String::from_utf8(o.stderr.clone()).unwrap()
}

/// Standard output of a command that succeeds.
fn done(args: &[&str]) -> String {
    let o = hallmark(args);
    assert_eq!(o.status.code(), Some(0), "{args:?}: {}", stderr(&o));
    stdout(&o)
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&done(args)).unwrap()
}

/// A command that fails with `code` and one sentence that holds `needle`, and prints no result.
fn refused(args: &[&str], code: i32, needle: &str) {
    let o = hallmark(args);
    let err = stderr(&o);
    assert_eq!(o.status.code(), Some(code), "{args:?}: {err}");
    assert!(err.contains(needle), "{args:?}: {err:?} does not say {needle:?}");
    assert_eq!(stdout(&o), "", "{args:?}");
}

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

fn file(dir: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path = dir.path().join(name);
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn the_first_command_reasons_and_answers() {
    let o = hallmark(&["run", "-p", "What is 12 * 13?", "--think", "high", "--temperature", "0"]);
    assert_eq!(o.status.code(), Some(0));
    assert_eq!(stdout(&o), "12 * 13 = 156\n");
    let err = stderr(&o);
    assert!(err.contains("12 * 10 = 120. 12 * 3 = 36. Sum: 120 + 36 = 156."), "{err}");
    assert!(err.contains("seed ") && err.contains("tok/s"), "{err}");
}

#[test]
fn a_tool_call_prints_as_json() {
    let dir = tempfile::tempdir().unwrap();
    let body = r#"{"messages": [{"role": "user", "content": "What is the weather in Paris?"}], "temperature": 0,
        "tools": [{"type": "function", "function": {"name": "get_weather",
            "description": "Get the current weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, "required": ["city"]}}}]}"#;
    let messages = file(&dir, "weather.json", body);
    let call: Value = serde_json::from_str(&done(&["run", "--messages", &messages])).unwrap();
    assert_eq!(call["name"], "get_weather");
    assert_eq!(call["arguments"]["city"], "Paris");
    let whole = json(&["run", "--messages", &messages, "--json"]);
    assert_eq!(whole["finish_reason"], "tool_calls");
    assert_eq!(whole["tool_calls"][0]["arguments"]["city"], "Paris");
}

#[test]
fn the_json_document_has_every_field() {
    let d = json(&["run", "-p", "What is 45 + 37?", "--temperature", "0", "--seed", "7", "--json"]);
    for key in ["prompt_ids", "ids", "text", "reasoning", "tool_calls", "finish_reason", "usage", "timing"] {
        assert!(!d[key].is_null(), "{key}");
    }
    assert_eq!((&d["device"], &d["numerics"], &d["seed"]), (&"cpu".into(), &"native".into(), &7.into()));
    assert_eq!(d["finish_reason"], "stop");
    assert!(d["content"].as_str().unwrap().contains("82"));
    assert_eq!(
        d["usage"]["completion_tokens"].as_u64().unwrap() + 1,
        d["ids"].as_array().unwrap().len() as u64
    );
    assert_eq!(d["usage"]["prompt_tokens"], d["prompt_ids"].as_array().unwrap().len());
}

#[test]
fn every_way_to_give_the_prompt_gives_the_same_tokens() {
    let by_text = json(&["run", "-p", "Hello!", "--no-think", "--temperature", "0", "--json"]);
    let ids: Vec<String> =
        by_text["prompt_ids"].as_array().unwrap().iter().map(ToString::to_string).collect();
    let by_ids = json(&["run", "--prompt-ids", &ids.join(","), "--temperature", "0", "--json"]);
    let rendered = "<｜begin▁of▁sentence｜><｜User｜>Hello!<｜Assistant｜></think>";
    let raw = json(&["run", "--raw", "-p", rendered, "--temperature", "0", "--json"]);
    let dir = tempfile::tempdir().unwrap();
    let body = r#"{"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}"#;
    let messages = file(&dir, "hello.json", body);
    let by_messages = json(&["run", "--messages", &messages, "--no-think", "--json"]);
    for other in [&by_ids, &raw, &by_messages] {
        assert_eq!(other["prompt_ids"], by_text["prompt_ids"]);
        assert_eq!(other["ids"], by_text["ids"]);
    }
}

#[test]
fn a_seed_repeats_a_sampled_answer_in_any_mode_and_with_any_threads() {
    let prompt = ["run", "--raw", "-p", "Once upon a time there was a", "--max-tokens", "40", "--json"];
    for mode in ["native", "exact", "source"] {
        let ids = |threads: &str| {
            let args = [&prompt[..], &["--seed", "11", "--numerics", mode, "--threads", threads]].concat();
            json(&args)["ids"].clone()
        };
        assert_eq!(ids("1"), ids("2"), "{mode}");
    }
    let other = json(&[&prompt[..], &["--seed", "12"]].concat());
    assert_ne!(other["ids"], json(&[&prompt[..], &["--seed", "11"]].concat())["ids"]);
}

#[test]
fn special_tokens_in_user_text_stay_text() {
    let d = json(&["run", "-p", "<｜Assistant｜></think>", "--no-think", "--temperature", "0", "--json"]);
    let ids: Vec<u64> = d["prompt_ids"].as_array().unwrap().iter().map(|i| i.as_u64().unwrap()).collect();
    let count = |id| ids.iter().filter(|i| **i == id).count();
    assert_eq!((count(2011), count(2023)), (1, 1), "only the template's own markers");
}

#[test]
fn the_token_limit_ends_the_answer() {
    let d = json(&["run", "-p", "Count from 1 to 40.", "--no-think", "--max-tokens", "5", "--json"]);
    assert_eq!(d["finish_reason"], "length");
    assert_eq!(d["ids"].as_array().unwrap().len(), 5);
}

#[test]
fn chat_keeps_the_conversation() {
    let input = "My name is Sophie.\nWhat is 3 + 4?\nWhat is my name?\n/stats\n/quit\nnever read\n";
    let o = hallmark_with(&["chat", "--temperature", "0", "--no-think"], input);
    assert_eq!(o.status.code(), Some(0), "{}", stderr(&o));
    let out = stdout(&o);
    assert!(out.contains("3 + 4 = 7"), "{out}");
    assert!(out.contains("Your name is Sophie."), "{out}");
    assert!(out.contains("6 messages") && !out.contains("never read"), "{out}");
}

#[test]
fn chat_commands_answer_and_do_not_reach_the_model() {
    let input = "/help\n/think nonsense\n/nonsense\n/system Today is Thursday.\nWhat day is it today?\n/clear\n/stats\n";
    let o = hallmark_with(&["chat", "--temperature", "0", "--no-think"], input);
    let (out, err) = (stdout(&o), stderr(&o));
    assert!(out.contains("/clear") && out.contains("Thursday"), "{out}");
    assert!(err.contains("unknown reasoning effort") && err.contains("unknown command /nonsense"), "{err}");
    assert!(out.trim_end().ends_with("1 messages"), "the system message stays: {out}");
}

#[test]
fn inspect_counts_the_released_model() {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/released/config.json");
    let config = config.display().to_string();
    let text = done(&["inspect", "--config", &config]);
    assert!(text.contains("96,085 tensors, 510,286,023,000 bytes"), "{text}");
    let d = json(&["inspect", "--config", &config, "--json"]);
    assert_eq!((&d["tensors"], &d["bytes"]), (&96_085.into(), &510_286_023_000u64.into()));
    let own = done(&["inspect", "--verify"]);
    assert!(own.contains("780 tensors"), "{own}");
}

#[test]
fn plan_says_what_fits_and_how_fast_it_can_be() {
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/released/config.json");
    for (bits, text) in [("3", 214_374_118_848_u64), ("2.5", 180_400_256_448), ("2", 146_426_394_048)] {
        let p = json(&["plan", "--config", config, "--bits", bits, "--drafts", "off", "--json"]);
        let part = |name: &str| p["parts"][name].as_u64().unwrap();
        assert_eq!(
            ["embedding", "head", "dense", "experts"].map(part).iter().sum::<u64>(),
            text,
            "{bits} bits"
        );
        assert_eq!(p["machines"].as_array().unwrap().len(), 5);
    }
    let p = json(&["plan", "--config", config, "--machine", "h200", "--bandwidth", "1000", "--json"]);
    let (read, machines) = (p["read"].as_u64().unwrap(), p["machines"].as_array().unwrap());
    let roof = machines[0]["roof"].as_f64().unwrap();
    assert!(machines.len() == 1 && (roof * read as f64 / 1e12 - 1.0).abs() < 1e-12, "{p}");
    let told = done(&["plan", "--config", config, "--bits", "3"]);
    let want = [
        "m3-ultra-512     FITS (",
        "in memory beside the GPU's share; at most",
        "m3-ultra-256     FITS AFTER (",
        "sudo sysctl iogpu.wired_limit_mb=",
        "m5-max-128       DOES NOT FIT (",
        "tok/s at 819 GB/s",
        "more than one GPU is not supported yet",
    ];
    want.iter().for_each(|w| assert!(told.contains(w), "{w}: {told}"));
    refused(&["plan", "--config", config, "--machine", "toaster"], 2, "known are m3-ultra-512");
    refused(&["plan", "--config", config, "--memory", "1GiB"], 2, "--bandwidth");
}

#[test]
fn bench_reports_rates_and_limits() {
    for what in ["prefill", "decode"] {
        let args =
            ["bench", what, "--tokens", "40", "--decode", "4", "--runs", "1", "--threads", "1", "--json"];
        let d = json(&args);
        assert!(d["tokens_per_second"]["median"].as_f64().unwrap() > 0.0);
        assert!(d["limits"]["gfma_s"]["median"].as_f64().unwrap() > 0.0);
        assert_eq!(d["weight_macs_per_token"], 7_639_040, "dense, routed and head multiply-adds of the demo");
    }
}

#[test]
fn a_wrong_command_line_exits_2() {
    for args in [
        &["run"][..],
        &["frobnicate"],
        &["run", "-p", "x", "--temperature", "3"],
        &["run", "-p", "x", "--device", "tpu"],
        &["run", "-p", "x", "--numerics", "fast"],
        &["run", "-p", "x", "--think", "very"],
        &["run", "-p", "x", "--drafts", "maybe"],
        &["run", "-p", "x", "--max-tokens", "0"],
        &["run", "--raw", "--messages", "x"],
    ] {
        let o = hallmark(args);
        assert_eq!(o.status.code(), Some(2), "{args:?}: {}", stderr(&o));
    }
    for args in [&["--help"][..], &["run", "--help"], &["--version"]] {
        assert_eq!(hallmark(args).status.code(), Some(0), "{args:?}");
    }
}

#[test]
fn what_is_not_built_is_refused_with_3() {
    for device in ["metal", "cuda"] {
        refused(&["run", "-p", "x", "--device", device], 3, "use --device cpu");
    }
    // The emulator is there; the demo model runs without a receipt on the CPU only.
    refused(&["run", "-p", "x", "--device", "emu", "--numerics", "exact"], 3, "--allow-unqualified");
    let dir = tempfile::tempdir().unwrap();
    let image = r#"{"messages": [{"role": "user", "content": [{"type": "image_url",
        "image_url": {"url": "data:image/png;base64,AA=="}}]}]}"#;
    refused(&["run", "--messages", &file(&dir, "image.json", image)], 3, "the vision tower is not built");
    fs::write(dir.path().join("model.gguf"), "GGUF").unwrap();
    refused(&["run", &dir.path().display().to_string(), "-p", "x"], 3, "GGUF");
}

#[test]
fn a_schema_is_held_or_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let body = |schema: &str| {
        let text = format!(
            r#"{{"messages": [{{"role": "user", "content": "What is 1 + 2?"}}], "temperature": 0, "response_format":
            {{"type": "json_schema", "json_schema": {{"name": "a", "schema": {schema}}}}}}}"#
        );
        file(&dir, "schema.json", &text)
    };
    let not = r#"{"type": "object", "not": {"type": "string"}}"#;
    refused(&["run", "--messages", &body(not)], 4, "cannot be enforced");
    let one = r#"{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
        "additionalProperties": false}"#;
    let answer = json(&["run", "--messages", &body(one), "--max-tokens", "80", "--json"]);
    let content: Value = serde_json::from_str(answer["content"].as_str().unwrap()).unwrap();
    assert!(content["n"].is_i64() && content.as_object().unwrap().len() == 1, "{answer}");
}

#[test]
fn bad_input_exits_4_and_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    refused(&["run", "/no/such/model", "-p", "x"], 4, "/no/such/model");
    refused(&["run", "--messages", "/no/such/body.json"], 4, "/no/such/body.json");
    let broken = file(&dir, "broken.json", "{\"messages\": [");
    refused(&["run", "--messages", &broken], 4, "broken.json");
    refused(&["run", "--prompt-ids", "5,99999"], 4, "token id 99999");
    refused(&["run", "-p", "x", "--context", "10"], 4, "the context holds 10");
    refused(&["run", "-p", "x", "--context", "9999999"], 4, "max_position_embeddings");
    let config = file(&dir, "config.json", "{}");
    refused(&["inspect", "--config", &config], 4, "config.json");
}

#[test]
fn a_damaged_checkpoint_exits_4_and_names_the_tensor() {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(demo()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let model = dir.path().display().to_string();
    done(&["inspect", &model]);
    let shard = dir.path().join("model-00002-of-00002.safetensors");
    let whole = fs::read(&shard).unwrap();
    fs::write(&shard, &whole[..whole.len() - 1]).unwrap();
    refused(&["run", &model, "-p", "x"], 4, "model-00002-of-00002.safetensors");
    fs::remove_file(&shard).unwrap();
    refused(&["inspect", &model], 4, "model-00002-of-00002.safetensors");
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hallmark"))
        .args(["run", "-p", "Count from 1 to 40.", "--no-think"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
