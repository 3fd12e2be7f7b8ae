//! `cargo xtask notices`: the crate table of THIRD_PARTY_NOTICES.md, from `cargo metadata`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::process::{cargo, output, read, root, write};

const FILE: &str = "THIRD_PARTY_NOTICES.md";
const BEGIN: &str = "<!-- crates: begin -->";
const END: &str = "<!-- crates: end -->";
/// Licences that a dependency may offer; of an `OR` one is enough, of an `AND` each is needed.
const ALLOWED: [&str; 13] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Rewrites the table, or checks it; fails for a crate whose licence is not allowed.
pub fn run(check: bool) -> Result<()> {
    let out = output(&mut cargo(&["metadata", "--format-version", "1", "--locked"])?)?;
    let metadata: Value = serde_json::from_slice(&out).context("cargo metadata")?;
    let crates = crates(&metadata)?;
    let refused: Vec<&str> =
        crates.iter().filter(|c| !allowed(&c.licence)).map(|c| c.name.as_str()).collect();
    if !refused.is_empty() {
        bail!("{}: no allowed licence; see ALLOWED in xtask/src/notices.rs", refused.join(", "));
    }
    let path = root().join(FILE);
    let old = String::from_utf8(read(&path)?).with_context(|| format!("{FILE} is not UTF-8"))?;
    let new = with_table(&old, &table(&crates))?;
    if old == new {
        println!("{FILE}: {} crates, up to date", crates.len());
    } else if check {
        bail!("{FILE} does not list the crates of Cargo.lock: run `cargo xtask notices`");
    } else {
        write(&path, new.as_bytes())?;
        println!("{FILE}: {} crates written", crates.len());
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Crate {
    name: String,
    version: String,
    licence: String,
    /// Linked into the binary on some platform; else used by builds, tests or developer commands only.
    shipped: bool,
}

/// Every package of the graph that is not of this workspace, sorted.
fn crates(metadata: &Value) -> Result<Vec<Crate>> {
    let members: BTreeSet<&str> =
        list(&metadata["workspace_members"])?.iter().filter_map(Value::as_str).collect();
    let mut edges: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for node in list(&metadata["resolve"]["nodes"])? {
        let linked = list(&node["deps"])?
            .iter()
            .filter(|dep| {
                dep["dep_kinds"]
                    .as_array()
                    .is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
            })
            .filter_map(|dep| dep["pkg"].as_str());
        edges.insert(node["id"].as_str().context("a node has no id")?, linked.collect());
    }
    let packages = list(&metadata["packages"])?;
    let mut open: Vec<&str> = Vec::new();
    for package in packages {
        let (id, name) = (text(package, "id")?, text(package, "name")?);
        if members.contains(id) && name != "xtask" {
            open.push(id);
        }
    }
    let mut shipped = BTreeSet::new();
    while let Some(id) = open.pop() {
        if shipped.insert(id) {
            open.extend(edges.get(id).into_iter().flatten());
        }
    }
    let mut out = Vec::new();
    for package in packages {
        let id = text(package, "id")?;
        if !members.contains(id) {
            out.push(Crate {
                name: text(package, "name")?.to_owned(),
                version: text(package, "version")?.to_owned(),
                licence: package["license"].as_str().unwrap_or("none given").replace('/', " OR "),
                shipped: shipped.contains(id),
            });
        }
    }
    out.sort();
    Ok(out)
}

fn list(value: &Value) -> Result<&Vec<Value>> {
    value.as_array().context("cargo metadata: a list is missing")
}

fn text<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key].as_str().with_context(|| format!("cargo metadata: no text `{key}`"))
}

/// Whether an SPDX expression can be met with allowed licences alone.
fn allowed(expression: &str) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace(" WITH ", "+WITH+");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    any_of(&words, &mut at) == Some(true) && at == words.len()
}

/// `all OR all OR ...`; None where the expression is not well formed.
fn any_of(words: &[&str], at: &mut usize) -> Option<bool> {
    let mut met = all_of(words, at)?;
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        met |= all_of(words, at)?;
    }
    Some(met)
}

/// `one AND one AND ...`, which binds more tightly than OR.
fn all_of(words: &[&str], at: &mut usize) -> Option<bool> {
    let mut met = one_of(words, at)?;
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        met &= one_of(words, at)?;
    }
    Some(met)
}

/// A licence, or an expression in brackets.
fn one_of(words: &[&str], at: &mut usize) -> Option<bool> {
    let word = *words.get(*at)?;
    *at += 1;
    if word != "(" {
        return Some(ALLOWED.contains(&word.replace("+WITH+", " WITH ").as_str()));
    }
    let met = any_of(words, at)?;
    if words.get(*at) != Some(&")") {
        return None;
    }
    *at += 1;
    Some(met)
}

fn table(crates: &[Crate]) -> String {
    let mut text = String::from("| crate | version | licence | used in |\n| --- | --- | --- | --- |\n");
    for c in crates {
        let used = if c.shipped { "the binary" } else { "builds, tests" };
        text += &format!("| {} | {} | {} | {used} |\n", c.name, c.version, c.licence);
    }
    text
}

fn with_table(old: &str, table: &str) -> Result<String> {
    let begin = old.find(BEGIN).with_context(|| format!("{FILE} has no line {BEGIN}"))? + BEGIN.len();
    let end = old
        .find(END)
        .filter(|end| *end >= begin)
        .with_context(|| format!("{FILE} has no line {END} after {BEGIN}"))?;
    Ok(format!("{}\n{table}{}", &old[..begin], &old[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_expressions() {
        for yes in [
            "MIT",
            "MIT OR Apache-2.0",
            "GPL-2.0 OR MIT",
            "(MIT OR GPL-3.0) AND Unicode-3.0",
            "MIT OR GPL-2.0 AND GPL-3.0",
            "Apache-2.0 WITH LLVM-exception",
        ] {
            assert!(allowed(yes), "{yes}");
        }
        for no in [
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "none given",
            "",
            "(MIT",
            "MIT)",
            "GPL-3.0 WITH LLVM-exception",
            "MIT OR",
        ] {
            assert!(!allowed(no), "{no}");
        }
    }

    #[test]
    fn a_crate_that_only_developers_use_is_not_called_shipped() {
        let dep = |to: &str, kind: Value| serde_json::json!({"pkg": to, "dep_kinds": [{"kind": kind}]});
        let metadata = serde_json::json!({
            "workspace_members": ["engine", "tasks"],
            "packages": [
                {"id": "engine", "name": "engine", "version": "0", "license": null},
                {"id": "tasks", "name": "xtask", "version": "0", "license": null},
                {"id": "far", "name": "far", "version": "1", "license": "MIT/Apache-2.0"},
                {"id": "near", "name": "near", "version": "2", "license": "MIT"},
                {"id": "prop", "name": "prop", "version": "3", "license": "MIT"},
            ],
            "resolve": {"nodes": [
                {"id": "engine", "deps": [dep("near", Value::Null), dep("prop", "dev".into())]},
                {"id": "near", "deps": [dep("far", Value::Null)]},
                {"id": "tasks", "deps": [dep("prop", Value::Null)]},
            ]},
        });
        let found = crates(&metadata).unwrap();
        let rows: Vec<(&str, bool)> = found.iter().map(|c| (c.name.as_str(), c.shipped)).collect();
        assert_eq!(rows, [("far", true), ("near", true), ("prop", false)]);
        assert_eq!(found[0].licence, "MIT OR Apache-2.0");
    }

    #[test]
    fn only_the_text_between_the_marks_changes() {
        let old = format!("head\n{BEGIN}\nold\n{END}\ntail\n");
        assert_eq!(with_table(&old, "new\n").unwrap(), format!("head\n{BEGIN}\nnew\n{END}\ntail\n"));
        assert!(with_table("no marks", "new\n").is_err());
        assert!(with_table(&format!("{END}{BEGIN}"), "new\n").is_err());
    }
}
