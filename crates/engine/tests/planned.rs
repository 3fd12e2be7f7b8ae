//! The plan's bytes are those that come into memory. Memory is the process's, so that this file has one test.

use checkpoint::{Checkpoint, engram::EngramMode, generate};
use engine::{Residency, memory, plan::Parts};

/// Twenty synthetic packs: ten depths, with resident Engram tables and with tables that stay on disk.
#[cfg(target_os = "linux")]
#[test]
fn twenty_packs_take_the_memory_that_was_planned() {
    let dir = tempfile::tempdir().unwrap();
    for layers in 4..14 {
        let folder = dir.path().join(layers.to_string());
        generate::deepened(&folder, layers).unwrap();
        for engram in [EngramMode::Resident, EngramMode::Mmap] {
            // The system may push pages out before they are counted, so the most of a few tries counts.
            let (mut planned, mut measured) = (0, 0);
            for _ in 0..5 {
                let before = memory::used().unwrap();
                let ckpt = Checkpoint::open_unscanned(&folder, None).unwrap();
                let residency = Residency { engram, prefault: true, ..Residency::default() };
                let paged = residency.page_in(&ckpt, 1, &|_, _| {}).unwrap();
                let after = memory::used().unwrap();
                let parts = Parts::of_checkpoint(&ckpt);
                planned = parts.text() + if engram == EngramMode::Resident { parts.engram } else { 0 };
                assert_eq!(paged.bytes, planned, "{layers} layers, {engram}");
                measured = measured.max(after.resident.saturating_sub(before.resident));
                if measured * 100 >= planned * 99 {
                    break;
                }
            }
            // Page tables and headers are not planned: they are what the one percent is for.
            let off = measured as f64 / planned as f64 - 1.0;
            println!(
                "{layers} layers, {engram}: planned {planned}, measured {measured}, {:+.3} %",
                100.0 * off
            );
            assert!(off.abs() < 0.01, "{layers} layers, {engram}: planned {planned}, measured {measured}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
