//! What the web page of `hallmark serve` shows: what is qualified, by which receipts, and a judgement.

use std::{fs, path::Path};

use engine::{Device, Loaded};
use qualify::{
    Verdict,
    capabilities::Capabilities,
    inputs::Inputs,
    receipt::{Receipt, State, verify},
};
use serde_json::{Value, json};

use crate::{
    args::Serve,
    commands::{admission::Standing, qualify::device_id},
    failure::Failure,
};

/// Largest judgement that is read.
const MAX_JUDGEMENT: u64 = 64 << 20;
/// Most checks of a gate that are shown; the receipt has all of them.
const SHOWN: usize = 20;
/// What the demo model knows.
const SUGGESTIONS: [&str; 4] =
    ["What is 12 * 13?", "My name is Sophie.", "What is the capital of France?", "Count from 1 to 40."];

/// What the page is told; receipts of `--receipts` are shown and decide nothing.
///
/// # Errors
/// A folder of receipts that can't be read.
pub fn page(
    args: &Serve,
    loaded: &Loaded,
    standing: &Standing,
    judgement: Option<Value>,
) -> Result<Value, Failure> {
    let devices = [Device::Cpu, Device::Metal, Device::Cuda, Device::Emu];
    let present: Vec<_> = devices.into_iter().filter_map(|d| Some(device_id(d, d.about().ok()?))).collect();
    let deciding = Capabilities::load();
    let mut shown = deciding.clone();
    if let Some(folder) = &args.receipts {
        fs::read_dir(folder).map_err(|e| Failure::Io(format!("--receipts {}: {e}", folder.display())))?;
        shown.add_folder(folder);
    }
    let inputs = deciding.inputs();
    let mut receipts: Vec<&(String, Receipt)> = shown.receipts().iter().collect();
    receipts.sort_by(|a, b| (&a.0, &a.1.created).cmp(&(&b.0, &b.1.created)));
    receipts.dedup_by(|a, b| a.1.seals == b.1.seals && a.0 == b.0);
    let demo = args.model.model.is_none();
    let mut page = json!({
        "suggestions": if demo { &SUGGESTIONS[..] } else { &[] },
        "qualification": {
            "serving": {
                "model": args.model.model.as_ref().map_or_else(|| "demo".into(), |m| name(m)),
                "device": loaded.lm.device().to_string(),
                "numerics": loaded.lm.mode().name(),
                "status": standing.status,
                "reason": standing.reason,
                "receipt": standing.receipt,
                "unqualified": standing.unqualified,
            },
            "build": {
                "version": env!("CARGO_PKG_VERSION"),
                "commit": inputs.commit,
                "dirty": inputs.dirty,
                "hash": inputs.hash,
            },
            "capabilities": deciding.table(&present),
            "receipts": receipts.iter().map(|(file, r)| receipt(file, r, inputs)).collect::<Vec<_>>(),
            "warnings": shown.warnings,
        },
    });
    page["qualification"]["judgement"] = judgement.unwrap_or(Value::Null);
    Ok(page)
}

/// The last part of a path: what clients may know of it.
fn name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

fn receipt(file: &str, r: &Receipt, inputs: &Inputs) -> Value {
    let changed = match verify(r, inputs, None).state {
        State::Current => None,
        State::Historical(parts) => Some(parts),
    };
    let gates = r.gates.iter().map(|g| {
        let telling = g.checks.iter().filter(|c| !matches!(c.verdict, Some(Verdict::Pass) | None));
        let shown = telling.take(SHOWN).map(
            |c| json!({"name": c.name, "figure": c.figure, "verdict": c.verdict, "note": c.note}),
        );
        json!({"gate": g.gate, "verdict": g.verdict, "checks": g.checks.len(), "shown": shown.collect::<Vec<_>>()})
    });
    json!({
        "file": file,
        "kind": r.kind,
        "name": r.checkpoint.as_ref().map_or(r.kind.as_str(), |c| c.name.as_str()),
        "scope": r.scope,
        "verdict": r.verdict,
        "created": r.created,
        "commit": r.inputs.commit,
        "current": changed.is_none(),
        "changed": changed.unwrap_or_default(),
        "device": r.device.family,
        "numerics": r.numerics,
        "machine": format!("{} {}, {} cores, {} GiB, {}", r.device.detail, r.machine.cpu, r.machine.cores, r.machine.memory_gib, r.machine.system).trim_start().to_owned(),
        "command": r.command,
        "gates": gates.collect::<Vec<_>>(),
    })
}

/// What `hallmark judge --json` printed, without its rows.
///
/// # Errors
/// A file that can't be read or is no judgement.
pub fn judgement(path: &Path) -> Result<Value, Failure> {
    let file = path.display();
    let size = fs::metadata(path).map_err(|e| Failure::Io(format!("--judgement {file}: {e}")))?.len();
    if size > MAX_JUDGEMENT {
        return Err(Failure::Input(format!(
            "{file} has {size} bytes; a judgement has at most {MAX_JUDGEMENT}"
        )));
    }
    let text = fs::read(path).map_err(|e| Failure::Io(format!("--judgement {file}: {e}")))?;
    let mut value: Value =
        serde_json::from_slice(&text).map_err(|e| Failure::Input(format!("{file} is no JSON: {e}")))?;
    reduce(&mut value).ok_or_else(|| {
        Failure::Input(format!("{file} is no judgement; make one with hallmark judge --json > FILE"))
    })?;
    Ok(value)
}

/// Checks what the page reads and drops what it does not; none for something else than a judgement.
fn reduce(value: &mut Value) -> Option<()> {
    for text in ["reference", "candidate", "verdict"] {
        value.get(text)?.as_str()?;
    }
    let passes = value.get_mut("passes")?.as_array_mut()?;
    if passes.is_empty() {
        return None;
    }
    for pass in passes {
        pass.get("pass")?.as_str()?;
        for tensor in pass.get_mut("tensors")?.as_array_mut()? {
            let tensor = tensor.as_object_mut()?;
            for text in ["name", "stage"] {
                tensor.get(text)?.as_str()?;
            }
            tensor.get("rows")?.as_u64()?;
            tensor.retain(|key, _| !["row_nrms", "margins"].contains(&key.as_str()));
            if let Some(choices) = tensor.get_mut("choices") {
                choices.get("rows")?.as_u64()?;
                choices.get("differing")?.as_array()?;
            }
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str) -> Result<Value, Failure> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, text).unwrap();
        judgement(file.path())
    }

    #[test]
    fn a_judgement_is_shown_without_its_rows() {
        let tensor = json!({"name": "L00.attn.out", "stage": "attn.out", "layer": 0, "kind": "values", "rows": 2,
            "values": {"nrms": 0.5}, "row_nrms": [0.5, 0.5]});
        let whole = json!({"reference": "a", "candidate": "b", "verdict": "NOT RUN",
            "passes": [{"pass": "prefill", "tensors": [tensor]}]});
        let read = written(&whole.to_string()).unwrap();
        let tensor = &read["passes"][0]["tensors"][0];
        assert_eq!(tensor["values"]["nrms"], 0.5);
        assert!(tensor.get("row_nrms").is_none(), "{tensor}");
    }

    #[test]
    fn what_is_no_judgement_is_refused_by_name() {
        for text in [
            "",
            "[]",
            "{}",
            r#"{"reference":"a","candidate":"b","verdict":"PASS","passes":[]}"#,
            r#"{"reference":"a","candidate":"b","verdict":"PASS","passes":[{"pass":"p","tensors":[{"name":3}]}]}"#,
        ] {
            let failure = written(text).unwrap_err();
            assert_eq!(failure.exit_code(), 4, "{text}: {failure}");
            assert!(failure.to_string().contains("is no "), "{text}: {failure}");
        }
        assert_eq!(judgement(Path::new("no such file")).unwrap_err().exit_code(), 6);
    }
}
