//! The table of the committed receipts that stands in the README between two markers.

use std::fmt::Write as _;

use crate::{
    Error, Result,
    inputs::Inputs,
    receipt::{Receipt, State, verify},
};

/// First marker.
pub const BEGIN: &str = "<!-- qualification:begin (written by `hallmark receipt table`) -->";
/// Second marker.
pub const END: &str = "<!-- qualification:end -->";

/// One row a receipt, in the order given, held against the tree `present`; `name` is its file name.
///
/// What is not about the present tree says *historical*, without what changed, so that the table stays as it is while the
/// tree moves on.
pub fn table(receipts: &[(String, Receipt)], present: &Inputs) -> String {
    let mut out = String::from(
        "| what | device | numerics | G0 | G1 | G2 | G3 | G4 | verdict | of this tree | commit | date |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for (file, r) in receipts {
        let what = r.checkpoint.as_ref().map_or(r.kind.as_str(), |c| c.name.as_str());
        let _ = write!(out, "| [{what}](receipts/{file}) | {} | {}", r.device.family, r.numerics);
        for gate in ["G0", "G1", "G2", "G3", "G4"] {
            let word = r.gate(gate).map_or("-", |g| g.verdict.word());
            let _ = write!(out, " | {word}");
        }
        let state = match verify(r, present, None).state {
            State::Current => "current",
            State::Historical(_) => "historical",
        };
        let (commit, date) = (r.inputs.commit.get(..8).unwrap_or("-"), r.created.get(..10).unwrap_or("-"));
        let _ = writeln!(out, " | **{}** | {state} | {commit} | {date} |", r.verdict);
    }
    out
}

/// `document` with `table` between the markers.
///
/// # Errors
/// A document without both markers; `file` names it.
pub fn replace_table(document: &str, table: &str, file: &str) -> Result<String> {
    let (begin, end) = (document.find(BEGIN), document.find(END));
    match (begin, end) {
        (Some(begin), Some(end)) if begin < end => {
            Ok(format!("{}{BEGIN}\n\n{table}\n{}", &document[..begin], &document[end..]))
        }
        _ => Err(Error::file(file, format!("has no place for the table: add the lines {BEGIN} and {END}"))),
    }
}
