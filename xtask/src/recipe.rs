//! `cargo xtask recipe`: a generated checkpoint's tensors against the digests of its `weights.json`.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::process::{hex, read, sha256};

/// Compares every tensor of the folder's shards with the recipe.
pub fn run(recipe: &Path, folder: &Path) -> Result<()> {
    let value: Value =
        serde_json::from_slice(&read(recipe)?).with_context(|| recipe.display().to_string())?;
    let mut expected = stored(&value).with_context(|| recipe.display().to_string())?;
    let total = expected.len();
    let mut faults = Vec::new();
    for shard in shards(folder)? {
        let bytes = read(&folder.join(&shard))?;
        let tensors =
            SafeTensors::deserialize(&bytes).with_context(|| folder.join(&shard).display().to_string())?;
        for (name, view) in tensors.tensors() {
            let Some(want) = expected.remove(&name) else {
                faults.push(format!("{shard}: {name} is not in the recipe"));
                continue;
            };
            let got = Stored {
                shape: view.shape().to_vec(),
                sha256: sha256(view.data()),
                first16: hex(&view.data()[..view.data().len().min(16)]),
            };
            if got != want {
                faults.push(format!("{shard}: {name} is {got:?}, the recipe says {want:?}"));
            }
        }
    }
    faults.extend(expected.keys().map(|name| format!("{name} is in the recipe and in no shard")));
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    println!("{}: {total} tensors equal to {}", folder.display(), recipe.display());
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
struct Stored {
    shape: Vec<usize>,
    sha256: String,
    first16: String,
}

/// The stored tensors that a recipe describes: each weight, and its scale where it is quantised.
fn stored(recipe: &Value) -> Result<BTreeMap<String, Stored>> {
    let mut out = BTreeMap::new();
    for (name, entry) in recipe["tensors"].as_object().context("the recipe has no object `tensors`")? {
        out.insert(name.clone(), one(&entry["weight"]).with_context(|| format!("{name}: weight"))?);
        if let Some(scale) = entry.get("scale") {
            let base = name
                .strip_suffix(".weight")
                .with_context(|| format!("{name} has a scale and no suffix .weight"))?;
            out.insert(format!("{base}.scale"), one(scale).with_context(|| format!("{name}: scale"))?);
        }
    }
    Ok(out)
}

fn one(value: &Value) -> Result<Stored> {
    let text = |key: &str| value[key].as_str().map(str::to_owned).with_context(|| format!("no text `{key}`"));
    let shape = value["shape"].as_array().context("no list `shape`")?;
    let shape = shape
        .iter()
        .map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok()).context("a size in `shape` is no number"));
    Ok(Stored { shape: shape.collect::<Result<_>>()?, sha256: text("sha256")?, first16: text("first16")? })
}

fn shards(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") {
            names.push(name);
        }
    }
    if names.is_empty() {
        bail!("{}: no .safetensors file", folder.display());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;

    #[test]
    fn a_changed_byte_a_superfluous_and_a_missing_tensor_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let recipe = folder.path().join("weights.json");
        let data = [7u8; 4];
        let entry =
            |sha: String| serde_json::json!({"weight": {"shape": [4], "sha256": sha, "first16": "07070707"}});
        let save = |names: &[&str]| {
            let tensors =
                names.iter().map(|name| (*name, TensorView::new(Dtype::U8, vec![4], &data).unwrap()));
            let bytes = safetensors::serialize(tensors, None).unwrap();
            std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        };
        let plan =
            |sha: String| serde_json::json!({"seed": 1, "tensors": {"a.weight": entry(sha)}}).to_string();

        std::fs::write(&recipe, plan(sha256(&data))).unwrap();
        save(&["a.weight"]);
        run(&recipe, folder.path()).unwrap();
        save(&["b.weight"]);
        let error = run(&recipe, folder.path()).unwrap_err().to_string();
        assert!(
            error.contains("b.weight is not in the recipe") && error.contains("a.weight is in the recipe"),
            "{error}"
        );
        save(&["a.weight"]);
        std::fs::write(&recipe, plan(sha256(b"other"))).unwrap();
        assert!(run(&recipe, folder.path()).unwrap_err().to_string().contains("a.weight is Stored"));
    }
}
