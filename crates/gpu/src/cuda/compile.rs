//! Kernel text to machine code, by NVRTC, with a cache on disk.

use std::ffi::{CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};

use cudarc::nvrtc::{result, sys};
use ops::DeviceError;
use sha2::{Digest, Sha256};

use super::{failed, no_nvrtc};
use crate::Constant;

/// What the kernels see of Metal's standard library.
const SHIM: &str = include_str!("metal.cuh");

/// A compiled file.
pub struct Compiled {
    /// The machine code.
    pub cubin: Vec<u8>,
    /// What the assembler reports of registers and spills.
    pub log: String,
}

/// The text that NVRTC gets for a file of kernels.
fn text(source: &str, constants: &[(u32, Constant)]) -> String {
    let mut text = String::new();
    for (id, value) in constants {
        let value = match value {
            Constant::Bool(v) => v.to_string(),
            Constant::U32(v) => format!("{v}u"),
        };
        text += &format!("#define MSL_CONSTANT_{id} {value}\n");
    }
    text + SHIM + source
}

fn options(arch: &str) -> [String; 6] {
    [
        format!("--gpu-architecture={arch}"),
        "--std=c++17".into(),
        "--device-as-default-execution-space".into(),
        "--fmad=false".into(),
        "--ftz=false".into(),
        "--ptxas-options=-v".into(),
    ]
}

/// Compiles `source` (a file of kernels as CUDA C++) for `arch`, for example `sm_90`. `name` stands in errors.
pub fn compile(
    name: &str,
    source: &str,
    arch: &str,
    constants: &[(u32, Constant)],
) -> Result<Compiled, DeviceError> {
    // SAFETY: only looks whether a library of that name can be loaded.
    if !unsafe { sys::is_culib_present() } {
        return Err(no_nvrtc());
    }
    let text = CString::new(text(source, constants)).expect("kernel text has no zero byte");
    let file = CString::new(format!("{name}.cu")).expect("a kernel file name has no zero byte");
    let program = result::create_program(&text, Some(&file))
        .map_err(|e| failed(format!("NVRTC refuses {name}: {e:?}")))?;
    // SAFETY: `program` is alive until the end of this function.
    let outcome = unsafe { result::compile_program(program, &options(arch)) };
    // SAFETY: as above; the log ends with a zero.
    let log = unsafe { result::get_program_log(program) }
        .map(|log| unsafe { CStr::from_ptr(log.as_ptr()) }.to_string_lossy().into_owned())
        .unwrap_or_default();
    let cubin = match outcome {
        Err(e) => Err(failed(format!("kernel file {name} does not compile for {arch}: {e:?}\n{log}"))),
        Ok(()) => cubin(program).map_err(|e| failed(format!("NVRTC gives no code for {name}: {e:?}"))),
    };
    // SAFETY: the last use of `program`; a failure to free it leaks only memory.
    let _ = unsafe { result::destroy_program(program) };
    Ok(Compiled { cubin: cubin?, log })
}

fn cubin(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    let mut size = 0;
    // SAFETY: a compiled program; the buffer has the size that NVRTC asked for.
    unsafe {
        sys::nvrtcGetCUBINSize(program, &mut size).result()?;
        let mut code = vec![0u8; size];
        sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result()?;
        Ok(code)
    }
}

/// Compiles, or takes from `$XDG_CACHE_HOME/hallmark/cubin` what the same compiler (`version`) made before of the same
/// text with the same options.
pub fn cached(
    name: &str,
    source: &str,
    arch: &str,
    constants: &[(u32, Constant)],
    version: &str,
) -> Result<Compiled, DeviceError> {
    let mut hash = Sha256::new();
    for part in [&text(source, constants), version].into_iter().chain(options(arch).iter().map(|o| o as &str))
    {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let path = folder().map(|f| f.join(format!("{name}-{:x}.cubin", hash.finalize())));
    if let Some(path) = &path
        && let (Ok(cubin), Ok(log)) = (fs::read(path), fs::read_to_string(path.with_extension("log")))
    {
        return Ok(Compiled { cubin, log });
    }
    let made = compile(name, source, arch, constants)?;
    if let Some(path) = path {
        // A cache that cannot be written costs time, not correctness. The log goes first: code without it is not used.
        let _ = fs::create_dir_all(path.parent().expect("a folder above"))
            .and_then(|()| put(&path.with_extension("log"), made.log.as_bytes()))
            .and_then(|()| put(&path, &made.cubin));
    }
    Ok(made)
}

fn put(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(format!(".part-{}", std::process::id()));
    fs::write(&part, bytes)?;
    fs::rename(&part, path)
}

fn folder() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let base = base.or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache")))?;
    Some(base.join("hallmark/cubin"))
}

/// The version of the NVRTC library, none where it is not installed.
pub fn version() -> Option<String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: looks whether the library can be loaded, and writes two integers.
    unsafe {
        if !sys::is_culib_present() {
            return None;
        }
        sys::nvrtcVersion(&mut major, &mut minor).result().ok()?;
    }
    Some(format!("NVRTC {major}.{minor}"))
}

/// Registers and spilled bytes of each kernel, by what the assembler reported.
pub fn registers(log: &str) -> Vec<(String, u32, u32)> {
    let mut found = Vec::new();
    let (mut name, mut spills) = (String::new(), 0);
    let number = |line: &str, unit: &str| -> Option<u32> {
        line[..line.find(unit)?].trim_end().rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    for line in log.lines() {
        if let Some(rest) = line.split("Function properties for ").nth(1) {
            (name, spills) = (rest.trim().to_owned(), 0);
        } else if let Some(bytes) = number(line, "bytes spill stores") {
            spills = bytes;
        } else if let Some(n) = number(line, "registers") {
            found.push((std::mem::take(&mut name), n, spills));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    #[test]
    fn registers_and_spills_are_read_from_the_log() {
        let log = "ptxas info    : Compiling entry function 'f' for 'sm_90'\nptxas info    : Function properties for f\n    \
                   0 bytes stack frame, 12 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 40 registers, used 1 \
                   barriers, 128 bytes smem\n";
        assert_eq!(super::registers(log), [("f".to_owned(), 40, 12)]);
    }
}
