//! Faults seeded into kernels are caught: by the emulator itself, by ThreadSanitizer, by AddressSanitizer with
//! UndefinedBehaviorSanitizer. A kernel without a fault passes all three without a report.
#![cfg(feature = "emu")]

use std::path::{Path, PathBuf};
use std::process::Command;

use gpu::rewrite::{resolve, rewrite};

const COMPILER: &str = "clang++-19";

#[derive(Clone, Copy)]
enum Build {
    Plain,
    Thread,
    Address,
}

impl Build {
    const ALL: [Self; 3] = [Self::Plain, Self::Thread, Self::Address];

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Thread => "thread",
            Self::Address => "address",
        }
    }

    /// Flags of the kernels and of the link; the runtime itself is not instrumented.
    fn sanitizer(self) -> &'static [&'static str] {
        match self {
            Self::Plain => &[],
            Self::Thread => &["-fsanitize=thread"],
            Self::Address => &["-fsanitize=address,undefined", "-mllvm", "-asan-stack=0"],
        }
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults")
}

fn run(command: &mut Command) -> (bool, String) {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

fn compile(command: &mut Command) {
    let (done, text) = run(command);
    assert!(done, "{command:?}\n{text}");
}

/// The program of one build, in a folder of its own.
fn program(build: Build, at: &Path) -> PathBuf {
    let metal = std::fs::read_to_string(folder().join("faults.metal")).unwrap();
    let file = rewrite("faults", &resolve(&metal, &|_| None).unwrap()).unwrap();
    let source = at.join(format!("{}.cpp", build.name()));
    std::fs::write(&source, &file.cpp).unwrap();
    let emu = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/emu");
    let kernels: String = file.kernels.iter().map(|k| format!("KERNEL({}) ", k.name)).collect();
    let flags = ["-std=c++20", "-O1", "-g", "-ffp-contract=off", "-march=x86-64-v3", "-x", "c++", "-c"];
    let (object, runtime, main) =
        (source.with_extension("o"), source.with_extension("runtime.o"), source.with_extension("main.o"));
    compile(
        Command::new(COMPILER)
            .args(flags)
            .args(build.sanitizer())
            .arg("-I")
            .arg(&emu)
            .arg(&source)
            .arg("-o")
            .arg(&object),
    );
    let tsan: &[&str] = if matches!(build, Build::Thread) { &["-DMSL_WITH_TSAN"] } else { &[] };
    compile(
        Command::new(COMPILER)
            .args(flags)
            .args(tsan)
            .arg("-I")
            .arg(&emu)
            .arg(emu.join("runtime.cpp"))
            .arg("-o")
            .arg(&runtime),
    );
    compile(
        Command::new(COMPILER)
            .args(flags)
            .arg(format!("-DKERNELS={kernels}"))
            .arg(folder().join("main.cpp"))
            .arg("-o")
            .arg(&main),
    );
    let program = source.with_extension("exe");
    let link = if matches!(build, Build::Address) { &build.sanitizer()[..1] } else { build.sanitizer() };
    compile(Command::new(COMPILER).args(link).args([&object, &runtime, &main]).arg("-o").arg(&program));
    program
}

#[test]
fn seeded_faults_are_caught_and_a_right_kernel_has_no_report() {
    let at = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("faults");
    std::fs::create_dir_all(&at).unwrap();
    let programs: Vec<PathBuf> = std::thread::scope(|scope| {
        let at = &at;
        let running = Build::ALL.map(|build| scope.spawn(move || program(build, at)));
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (build, program) in Build::ALL.into_iter().zip(&programs) {
        let (done, text) = run(Command::new(program).arg("right"));
        let sum = 64 * (0..64).sum::<u32>();
        assert!(done && text == format!("finished {sum}\n"), "{}: {text}", build.name());
    }
    let [plain, thread, address] = [0, 1, 2].map(|i| &programs[i]);
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
}
