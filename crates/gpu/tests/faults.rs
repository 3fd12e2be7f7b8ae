//! Faults seeded into kernels are caught: by the emulator itself, by ThreadSanitizer, by AddressSanitizer with
//! UndefinedBehaviorSanitizer. A kernel without a fault passes all three without a report.
#![cfg(feature = "emu")]

#[path = "sanitizers/build.rs"]
mod build;

use std::path::{Path, PathBuf};
use std::process::Command;

use build::{Build, Source, program, run};
use gpu::rewrite::{resolve, rewrite};

/// The program of one build.
fn faults(build: Build) -> PathBuf {
    let read = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults").join(name);
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    let file = rewrite("faults", &resolve(&read("faults.metal"), &|_| None).unwrap()).unwrap();
    let kernels: String = file.kernels.iter().map(|k| format!("KERNEL({}) ", k.name)).collect();
    let main = format!("#define KERNELS {kernels}\n{}", read("main.cpp"));
    program(
        build,
        "faults",
        vec![
            Source { name: "faults".into(), text: file.cpp, kernels: true },
            Source { name: "faults-main".into(), text: main, kernels: false },
        ],
    )
}

#[test]
fn seeded_faults_are_caught_and_a_right_kernel_has_no_report() {
    let builds = [Build::Plain, Build::Thread, Build::Address];
    let programs = builds.map(faults);
    for (build, program) in builds.into_iter().zip(&programs) {
        let (done, text) = run(Command::new(program).arg("right"));
        let sum = 64 * (0..64).sum::<u32>();
        assert!(done && text == format!("finished {sum}\n"), "{}: {text}", build.name());
    }
    let [plain, thread, address] = &programs;
    for (program, kernel, reports) in [
        (plain, "divergent_barrier", &["refused: threadgroup_barrier is not reached by all threads"][..]),
        (plain, "divergent_simd", &["refused: a simd operation is not reached by all lanes"]),
        (plain, "too_much_memory", &["refused: more than 32 KiB of threadgroup memory"]),
        (thread, "missing_barrier", &["ThreadSanitizer: data race"]),
        (address, "out_of_bounds", &["AddressSanitizer: heap-buffer-overflow"]),
        (address, "index_out_of_bounds", &["runtime error: index 32 out of bounds for type"]),
    ] {
        let (done, text) = run(Command::new(program).arg(kernel).env("UBSAN_OPTIONS", "halt_on_error=1"));
        assert!(!done && reports.iter().all(|report| text.contains(report)), "{kernel}: {text}");
    }
    programs.iter().for_each(|program| std::fs::remove_file(program).unwrap());
}
