//! Rewrites the kernels for every device, and compiles them for the emulator where clang++-19 is there.

#[allow(dead_code)] // the library tells more about kernels than the build needs
#[path = "src/rewrite.rs"]
mod rewrite;

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fmt::Write;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

const COMPILER: &str = "clang++-19";
/// No contraction and no wider halves: the arithmetic is what the kernels say. AVX2 and FMA for speed; `fma()` is one
/// rounding with or without them.
const FLAGS: [&str; 10] = [
    "-std=c++20",
    "-O2",
    "-g1",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-march=x86-64-v3",
    "-Wall",
    "-Wno-unused-function",
];

fn main() {
    if let Err(what) = run() {
        eprintln!("error: {what}");
        exit(1);
    }
}

fn run() -> Result<(), String> {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("no manifest folder")?);
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("no output folder")?);
    let kernels = root.join("kernels");
    for watched in ["kernels", "src/rewrite.rs", "src/emu/metal_stdlib", "src/emu/runtime.cpp"] {
        println!("cargo:rerun-if-changed={}", root.join(watched).display());
    }
    println!("cargo:rustc-check-cfg=cfg(emulator)");
    println!("cargo:rerun-if-env-changed=PATH");
    let header = |name: &str| fs::read_to_string(kernels.join(name)).ok();
    let mut names: Vec<String> = fs::read_dir(&kernels)
        .map_err(|e| format!("{}: {e}", kernels.display()))?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_suffix(".metal").map(str::to_owned))
        .collect();
    names.sort();
    let mut files = Vec::new();
    for name in names {
        let text =
            fs::read_to_string(kernels.join(format!("{name}.metal"))).map_err(|e| format!("{name}: {e}"))?;
        let file = rewrite::rewrite(&name, &rewrite::resolve(&text, &header)?)?;
        for (suffix, text) in [("metal", &file.metal), ("cu", &file.cuda), ("cpp", &file.cpp)] {
            put(&out.join(format!("{name}.{suffix}")), text)?;
        }
        files.push((name, file));
    }
    put(&out.join("table.rs"), &table(&out, &files))?;
    let linux = env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux")
        && env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("x86_64");
    let wanted = env::var_os("CARGO_FEATURE_EMU").is_some();
    if linux && wanted && Command::new(COMPILER).arg("--version").output().is_ok_and(|o| o.status.success()) {
        emulator(&root, &out, &files)?;
    } else if linux && wanted {
        // A path that is not there runs this script again, so that the compiler is found once it is installed.
        println!("cargo:rerun-if-changed=/usr/bin/{COMPILER}");
    }
    Ok(())
}

/// Writes what changed, so that later steps see old times on what did not.
fn put(path: &Path, text: &str) -> Result<(), String> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}

/// The Rust table of kernels and of the files' texts.
fn table(out: &Path, files: &[(String, rewrite::File)]) -> String {
    let mut t = String::new();
    let mut externs = String::new();
    let _ = writeln!(t, "/// Every kernel, by file and place in it.\npub static KERNELS: &[Kernel] = &[");
    for (file, f) in files {
        for k in &f.kernels {
            let _ = write!(
                t,
                "    Kernel {{ name: {:?}, file: {file:?}, waits: {}, parameters: &[",
                k.name, k.synchronises
            );
            for p in k.buffers() {
                let _ = write!(
                    t,
                    "Parameter {{ name: {:?}, kind: {:?}, by_value: {} }}, ",
                    p.name,
                    p.kind,
                    p.by_value()
                );
            }
            t += "], constants: &[";
            for c in &f.constants {
                let _ = write!(t, "({}, {:?}), ", c.id, c.name);
            }
            let _ = writeln!(
                t,
                "], #[cfg(emulator)] entry: msl_kernel_{0}, #[cfg(emulator)] sizes: [Size(&raw const msl_threadgroup_{0}), \
                 Size(&raw const msl_inline_{0})] }},",
                k.name
            );
            let _ =
                writeln!(externs, "    static msl_threadgroup_{0}: u32; static msl_inline_{0}: u32;", k.name);
            let _ = writeln!(
                externs,
                "    fn msl_kernel_{}(arguments: *const *const u8, place: *const u8);",
                k.name
            );
        }
    }
    t += "];\n/// Name, MSL and CUDA text of every file.\npub static FILES: &[File] = &[\n";
    for (file, _) in files {
        let path = |suffix: &str| out.join(format!("{file}.{suffix}")).display().to_string();
        let _ = writeln!(
            t,
            "    File {{ name: {file:?}, metal: include_str!({:?}), cuda: include_str!({:?}) }},",
            path("metal"),
            path("cu")
        );
    }
    t += "];\n/// Where the emulator's kernels read a function constant.\n#[cfg(emulator)]\npub static CONSTANTS: &[(&str, u32, Place)] = &[\n";
    for (file, f) in files {
        for c in &f.constants {
            let _ = writeln!(t, "    ({file:?}, {}, Place(&raw mut msl_constant_{file}_{})),", c.id, c.id);
            let _ = writeln!(externs, "    static mut msl_constant_{file}_{}: u32;", c.id);
        }
    }
    t += "];\n";
    let _ = writeln!(t, "#[cfg(emulator)]\nunsafe extern \"C\" {{\n{externs}}}");
    t
}

/// Compiles what changed, several files at a time, into one archive.
fn emulator(root: &Path, out: &Path, files: &[(String, rewrite::File)]) -> Result<(), String> {
    let include = root.join("src/emu");
    let shim = fs::read_to_string(include.join("metal_stdlib")).map_err(|e| format!("metal_stdlib: {e}"))?;
    let runtime = include.join("runtime.cpp");
    let mut jobs: Vec<(PathBuf, PathBuf)> = files
        .iter()
        .map(|(name, _)| (out.join(format!("{name}.cpp")), out.join(format!("{name}.o"))))
        .collect();
    jobs.push((runtime, out.join("runtime.o")));
    let objects: Vec<PathBuf> = jobs.iter().map(|j| j.1.clone()).collect();
    let threads = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(2usize).max(1);
    let queue = std::sync::Mutex::new(jobs.into_iter());
    let compile = || -> Result<(), String> {
        loop {
            let job = queue.lock().map_err(|e| e.to_string())?.next();
            let Some((source, object)) = job else { return Ok(()) };
            let text = fs::read_to_string(&source).map_err(|e| format!("{}: {e}", source.display()))?;
            let mut hash = DefaultHasher::new();
            (&text, &shim, FLAGS).hash(&mut hash);
            let (stamp, key) = (object.with_extension("key"), format!("{:x}", hash.finish()));
            if object.exists() && fs::read_to_string(&stamp).is_ok_and(|old| old == key) {
                continue;
            }
            let output = Command::new(COMPILER)
                .args(FLAGS)
                .args(["-Xclang", "-ffloat16-excess-precision=none", "-I"])
                .arg(&include)
                .args(["-x", "c++", "-c"])
                .arg(&source)
                .arg("-o")
                .arg(&object)
                .output()
                .map_err(|e| format!("{COMPILER}: {e}"))?;
            let said = String::from_utf8_lossy(&output.stderr);
            if !output.status.success() {
                return Err(format!("{} does not compile:\n{said}", source.display()));
            }
            if !said.trim().is_empty() {
                for line in said.lines() {
                    println!("cargo:warning={line}");
                }
            }
            fs::write(&stamp, key).map_err(|e| format!("{}: {e}", stamp.display()))?;
        }
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(compile)).collect();
        running.into_iter().try_for_each(|r| r.join().map_err(|_| "a compile job panicked".to_owned())?)
    })?;
    let archive = out.join("libmsl_kernels.a");
    let _ = fs::remove_file(&archive);
    let made = Command::new("ar").arg("crs").arg(&archive).args(&objects).status();
    if !made.is_ok_and(|s| s.success()) {
        return Err("ar cannot make the archive of the emulator's kernels".into());
    }
    println!("cargo:rustc-cfg=emulator");
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=static=msl_kernels");
    println!("cargo:rustc-link-lib=stdc++");
    Ok(())
}
