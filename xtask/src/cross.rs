//! The macOS half of the code, checked on Linux: Debian builds a Rust whose standard library can be compiled for any
//! target, objc2's crates need no SDK to be checked, and zig compiles C and links for macOS.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{cache, output, read, root, run, write};
use crate::{python, tools};

const TARGET: &str = "aarch64-apple-darwin";
const ZIG: &str = "ziglang==0.17.1";
/// The first macOS with residency sets.
const ZIG_TARGET: &str = "aarch64-macos.15.0";
/// Compiler, cargo, the standard library's source of the same version, and clippy.
const PACKAGES: [&str; 4] = ["rustc-web", "cargo-web", "rust-web-src", "rust-web-clippy"];
/// The workspace's Rust version is 1.95.
const MINOR: u32 = 95;

/// Clippy of every crate of the product for macOS, the dependencies with C code included.
pub fn check() -> Result<()> {
    if !cfg!(target_os = "linux") {
        println!("the cross check is for Linux; on macOS, cargo itself is the check");
        return Ok(());
    }
    let mut cargo = cargo()?;
    cargo.args([
        "clippy",
        "-Zbuild-std",
        "--locked",
        "--target",
        TARGET,
        "--workspace",
        "--exclude",
        "xtask",
    ]);
    run(cargo.args(["--no-deps", "--", "-D", "warnings"]))
}

/// Links the GPU crate's tests of the Metal device as a program for macOS, which a Mac can be handed.
pub fn link() -> Result<()> {
    let mut cargo = cargo()?;
    cargo.args([
        "test",
        "-Zbuild-std",
        "--locked",
        "--target",
        TARGET,
        "-p",
        "gpu",
        "--test",
        "metal",
        "--no-run",
    ]);
    let text = output(cargo.arg("--message-format=json-render-diagnostics"))?;
    let program = String::from_utf8_lossy(&text).lines().find_map(executable);
    let program = program.context("cargo named no program of the Metal tests")?;
    let bytes = read(&program)?;
    if !mach_o(&bytes) {
        bail!("{} is no program for macOS on Apple silicon", program.display());
    }
    println!("linked, not run: {} ({} bytes)", program.display(), bytes.len());
    Ok(())
}

/// The program of the tests `metal` in one of cargo's messages.
fn executable(line: &str) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    (message["target"]["name"] == "metal").then(|| message["executable"].as_str().map(PathBuf::from))?
}

/// Whether these are the first bytes of a 64-bit Mach-O program for arm64.
fn mach_o(bytes: &[u8]) -> bool {
    const HEAD: [u32; 2] = [0xfeed_facf, 0x0100_000c];
    let word = |i: usize| bytes.get(4 * i..4 * i + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    [word(0), word(1)] == HEAD.map(Some) && word(3) == Some(2)
}

/// Debian's cargo, with zig as the C compiler and the linker.
fn cargo() -> Result<Command> {
    toolchain()?;
    let mut cargo = Command::new("/usr/bin/cargo");
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO") || text.starts_with("RUST") {
            cargo.env_remove(&name); // rustup's choice of a toolchain must not reach Debian's
        }
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = [PathBuf::from("/usr/bin")].into_iter().chain(std::env::split_paths(&path));
    let apple = cache()?.join("apple");
    let [cc, ar, linker] = programs(&apple)?;
    cargo
        .current_dir(root())
        .env("PATH", std::env::join_paths(folders)?)
        .env("RUSTC_BOOTSTRAP", "1") // -Zbuild-std
        .env("CARGO_TARGET_DIR", apple.join("target"))
        .env("CC_aarch64_apple_darwin", cc)
        .env("AR_aarch64_apple_darwin", ar)
        .env("CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER", linker)
        .env("SDKROOT", apple.join("sdk")); // else Apple's xcrun would be asked for it
    Ok(cargo)
}

/// C compiler, archiver and linker, and what the linker needs to know of Apple's libraries.
fn programs(apple: &Path) -> Result<[PathBuf; 3]> {
    let python = python::environment("zig", &[ZIG])?;
    let sdk = apple.join("sdk");
    for (path, text) in stubs() {
        write(&sdk.join(path), text.as_bytes())?;
    }
    let zig = format!("exec {} -m ziglang", python.display());
    // What rustc and its C crates say of the target, zig wants said in its own way.
    let filtered = "skip=
for a; do
    shift
    if [ \"$skip\" ]; then skip=; continue; fi
    case \"$a\" in
        -arch | -isysroot) skip=1 ;;
        --target=* | -mmacosx-version-min=*) ;;
        *) set -- \"$@\" \"$a\" ;;
    esac
done";
    let cc = format!("{filtered}\n{zig} cc -target {ZIG_TARGET} \"$@\"");
    let folders = format!(
        "-F {0}/System/Library/Frameworks -L {0}/usr/lib",
        sdk.to_str().context("the cache folder's name is not UTF-8")?
    );
    let linker = format!("{filtered}\n{zig} cc -target {ZIG_TARGET} {folders} \"$@\"");
    let mut out = [apple.join("cc"), apple.join("ar"), apple.join("linker")];
    for (path, body) in out.iter_mut().zip([cc, format!("{zig} ar \"$@\""), linker]) {
        let text = format!("#!/bin/sh\n{body}\n");
        // A new time on the script would compile the C code again.
        if !std::fs::read_to_string(&path).is_ok_and(|old| old == text) {
            write(path, text.as_bytes())?;
        }
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))
                .with_context(|| format!("cannot make {} executable", path.display()))?;
        }
    }
    Ok(out)
}

/// Text stubs of the libraries that objc2's crates and Rust's standard library link: names, no code. zig has libSystem.
fn stubs() -> Vec<(String, String)> {
    let framework = |name: &str| format!("System/Library/Frameworks/{name}.framework");
    let mut out = Vec::new();
    for (name, version, symbols, classes) in FRAMEWORKS {
        let folder = framework(name);
        let text = stub(&format!("/{folder}/Versions/{version}/{name}"), symbols, classes);
        out.push((format!("{folder}/{name}.tbd"), text));
    }
    for (file, library, symbols) in
        [("libobjc", "libobjc.A.dylib", &OBJC[..]), ("libiconv", "libiconv.2.dylib", &["_iconv"])]
    {
        out.push((format!("usr/lib/{file}.tbd"), stub(&format!("/usr/lib/{library}"), symbols, &[])));
    }
    out
}

fn stub(install: &str, symbols: &[&str], classes: &[&str]) -> String {
    let mut text = format!(
        "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: '{install}'\nexports:\n  - targets: [ arm64-macos \
         ]\n"
    );
    for (key, names) in [("symbols", symbols), ("objc-classes", classes)] {
        if !names.is_empty() {
            text += &format!("    {key}: [ {} ]\n", names.join(", "));
        }
    }
    text + "...\n"
}

/// Name, version folder, functions and classes that are linked.
type Framework = (&'static str, &'static str, &'static [&'static str], &'static [&'static str]);

const FRAMEWORKS: [Framework; 4] = [
    (
        "Metal",
        "A",
        &["_MTLCreateSystemDefaultDevice"],
        &["MTLCompileOptions", "MTLFunctionConstantValues", "MTLResidencySetDescriptor"],
    ),
    ("Foundation", "C", &[], &["NSError", "NSProcessInfo", "NSString", "NSObject"]),
    ("CoreFoundation", "A", &["_CFRelease", "_CFRetain"], &[]),
    ("CoreGraphics", "A", &["_CGMainDisplayID"], &[]),
];

/// What objc2 calls of the Objective-C runtime.
const OBJC: [&str; 35] = [
    "_class_addIvar",
    "_class_addMethod",
    "_class_addProtocol",
    "_class_conformsToProtocol",
    "_class_getInstanceMethod",
    "_class_getInstanceSize",
    "_class_getInstanceVariable",
    "_class_getName",
    "_class_getSuperclass",
    "_class_isMetaClass",
    "_ivar_getOffset",
    "_method_getName",
    "_method_getTypeEncoding",
    "_objc_allocateClassPair",
    "_objc_alloc",
    "_objc_allocWithZone",
    "_objc_autorelease",
    "_objc_autoreleasePoolPop",
    "_objc_autoreleasePoolPush",
    "_objc_autoreleaseReturnValue",
    "_objc_claimAutoreleasedReturnValue",
    "_objc_disposeClassPair",
    "_objc_getClass",
    "_objc_getProtocol",
    "_objc_msgSend",
    "_objc_msgSendSuper",
    "_objc_opt_class",
    "_objc_registerClassPair",
    "_objc_release",
    "_objc_retain",
    "_objc_retainAutoreleasedReturnValue",
    "_object_getClass",
    "_object_getClassName",
    "_sel_getName",
    "_sel_registerName",
];

/// Installs Debian's toolchain where it is missing or older than the workspace asks for.
fn toolchain() -> Result<()> {
    let version = || -> Option<String> {
        let clippy = Command::new("/usr/bin/cargo-clippy").arg("--version").output().ok()?;
        let rustc = Command::new("/usr/bin/rustc").arg("-V").output().ok()?;
        (clippy.status.success() && rustc.status.success())
            .then(|| String::from_utf8_lossy(&rustc.stdout).trim().to_owned())
    };
    if !version().is_some_and(|text| new_enough(&text)) {
        tools::install_newest(&PACKAGES)?;
    }
    match version() {
        Some(text) if new_enough(&text) => println!("{text}"),
        other => bail!("Debian's rustc-web must be 1.{MINOR} or later; found {other:?}"),
    }
    Ok(())
}

/// Of what `rustc -V` prints.
fn new_enough(text: &str) -> bool {
    let minor = text.split(['.', ' ']).nth(2).and_then(|minor| minor.parse::<u32>().ok());
    minor.is_some_and(|minor| minor >= MINOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_for_apple_silicon_is_known_by_its_head() {
        let head = |words: [u32; 4]| words.map(u32::to_le_bytes).concat();
        assert!(mach_o(&head([0xfeed_facf, 0x0100_000c, 0, 2])));
        assert!(!mach_o(&head([0xfeed_facf, 0x0100_0007, 0, 2])), "x86-64");
        assert!(!mach_o(&head([0xfeed_facf, 0x0100_000c, 0, 6])), "a library");
        assert!(!mach_o(b"\x7fELF") && !mach_o(&[]));
    }

    #[test]
    fn cargo_s_message_names_the_program() {
        let line = r#"{"reason":"compiler-artifact","target":{"name":"metal"},"executable":"/t/metal-1"}"#;
        assert_eq!(executable(line), Some("/t/metal-1".into()));
        assert_eq!(executable(&line.replace("metal\"}", "gpu\"}")), None);
        assert_eq!(executable("no message"), None);
    }

    #[test]
    fn versions_of_rustc() {
        assert!(new_enough("rustc 1.96.0 (ac68faa20 2026-01-01) (built from a source tarball)"));
        assert!(new_enough("rustc 1.95.0"));
        assert!(!new_enough("rustc 1.85.0 (4d91de4e4 2025-02-17)") && !new_enough("rustc"));
    }
}
