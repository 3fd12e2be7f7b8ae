//! Programs of kernels in the emulator's three builds: plain, with ThreadSanitizer, with AddressSanitizer and
//! UndefinedBehaviorSanitizer. What was compiled before is taken from the build folder.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

const COMPILER: &str = "clang++-19";
const FLAGS: [&str; 9] = [
    "-std=c++20",
    "-O1",
    "-g1",
    "-ffp-contract=off",
    "-march=x86-64-v3",
    "-Wno-unused-function",
    "-x",
    "c++",
    "-c",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    Plain,
    Thread,
    Address,
}

impl Build {
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Thread => "thread",
            Self::Address => "address",
        }
    }

    /// Flags of the kernels; what runs them is not instrumented.
    fn kernels(self) -> &'static [&'static str] {
        match self {
            Self::Plain => &[],
            // Several threads share what ThreadSanitizer takes for one: their calls do not nest.
            Self::Thread => &["-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"],
            Self::Address => &["-fsanitize=address,undefined", "-mllvm", "-asan-stack=0"],
        }
    }

    /// Flags of what runs them.
    fn runtime(self) -> &'static [&'static str] {
        if self == Self::Thread { &["-DMSL_WITH_TSAN"] } else { &[] }
    }
}

/// A C++ file to compile: its name, its text, and whether it is a file of kernels.
pub struct Source {
    pub name: String,
    pub text: String,
    pub kernels: bool,
}

pub fn run(command: &mut Command) -> (bool, String) {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

fn compile(command: &mut Command) {
    let (done, text) = run(command);
    assert!(done, "{command:?}\n{text}");
}

fn emulator() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../gpu/src/emu")
}

/// The emulator's runtime, a part of every program.
fn runtime() -> Source {
    let text = fs::read_to_string(emulator().join("runtime.cpp")).unwrap();
    Source { name: "runtime".into(), text, kernels: false }
}

/// Compiles into `at`, unless an object of this content is there.
fn object(build: Build, source: &Source, at: &Path) -> PathBuf {
    let flags = if source.kernels { build.kernels() } else { build.runtime() };
    let shim = fs::read_to_string(emulator().join("metal_stdlib")).unwrap();
    let mut hash = DefaultHasher::new();
    (&source.text, shim, FLAGS, flags).hash(&mut hash);
    let object = at.join(format!("{}-{}-{:016x}.o", source.name, build.name(), hash.finish()));
    if object.exists() {
        return object;
    }
    // Several processes may do the same; the last one to finish replaces the same bytes.
    let own = format!("{}.{}", object.display(), std::process::id());
    let text = format!("{own}.cpp");
    fs::write(&text, &source.text).unwrap();
    compile(
        Command::new(COMPILER).args(FLAGS).args(flags).arg("-I").arg(emulator()).args([&text, "-o", &own]),
    );
    fs::rename(&own, &object).unwrap();
    fs::remove_file(&text).unwrap();
    object
}

/// One program at a time: tests of a process need the same objects.
static BUILDING: Mutex<u32> = Mutex::new(0);

/// The program of one build; its caller removes it.
pub fn program(build: Build, name: &str, sources: Vec<Source>) -> PathBuf {
    let mut number = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    *number += 1;
    let at = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sanitizers");
    fs::create_dir_all(&at).unwrap();
    let queue = Mutex::new(sources.into_iter().chain([runtime()]));
    let objects = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let Some(source) = queue.lock().unwrap().next() else { return };
                    let made = object(build, &source, &at);
                    objects.lock().unwrap().push(made);
                }
            });
        }
    });
    let mut objects = objects.into_inner().unwrap();
    objects.sort();
    let program = at.join(format!("{name}-{}-{}-{number}", build.name(), std::process::id()));
    let link = build.kernels().get(..1).unwrap_or_default();
    compile(Command::new(COMPILER).args(link).args(&objects).arg("-pthread").arg("-o").arg(&program));
    program
}
