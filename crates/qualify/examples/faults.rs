//! Runs every fault in every size through the gates and the bisect, and writes `docs/faults.md`.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{cpu, golden, opened, root};
use qualify::fault::{FAULTS, suite::Suite, suite::document};

fn main() {
    let (checkpoint, second, reference) = (opened("nano"), opened("micro"), golden("nano", "official"));
    let suite = Suite {
        checkpoint: &checkpoint,
        reference: &reference,
        pass: "prompt33",
        key: "nano-source",
        second: &second,
        backend: cpu,
    };
    let base = suite.baseline().unwrap();
    let mut findings = Vec::new();
    for fault in FAULTS {
        for size in fault.sizes {
            let f = suite.run(fault, *size, &base).unwrap();
            eprintln!("{} {}: {:?} {:?}", fault.name, size.word(), f.gates, f.operator());
            findings.push(f);
        }
    }
    std::fs::write(root().join("docs/faults.md"), document(&findings, &base)).unwrap();
}
