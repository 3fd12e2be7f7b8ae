//! What the fixture tests share.
#![allow(dead_code)] // each test binary uses a part

use std::io::Read;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use serde_json::Value;
use text::Tokenizer;

/// A path inside the repository.
pub fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The path of the released tokenizer, which is not committed.
pub fn released_path() -> PathBuf {
    let path = std::env::var_os("HALLMARK_TOKENIZER").map(PathBuf::from).unwrap_or_else(|| {
        PathBuf::from(std::env::var_os("HOME").unwrap_or_default())
            .join(".cache/hallmark/tokenizer/tokenizer.json")
    });
    assert!(
        path.is_file(),
        "the released tokenizer is not at {}: run `cargo xtask tokenizer`, or set HALLMARK_TOKENIZER to the file",
        path.display()
    );
    path
}

/// The released tokenizer.
pub fn released() -> Arc<Tokenizer> {
    static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
        let tokenizer = Tokenizer::from_file(&released_path()).expect("the released tokenizer loads");
        assert!(tokenizer.is_released(), "{tokenizer:?} is not the released file");
        Arc::new(tokenizer)
    });
    Arc::clone(&TOKENIZER)
}

/// The tokenizer of the demo model.
pub fn demo() -> Arc<Tokenizer> {
    Arc::new(
        Tokenizer::from_file(&repository("models/demo/tokenizer.json")).expect("the demo tokenizer loads"),
    )
}

/// The lines of a fixture file.
pub fn cases(path: &str) -> Vec<Value> {
    let path = repository(path);
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut text = String::new();
    let read = match path.extension().is_some_and(|e| e == "gz") {
        true => flate2::read::GzDecoder::new(&bytes[..]).read_to_string(&mut text),
        false => (&bytes[..]).read_to_string(&mut text),
    };
    read.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).expect("a fixture line is JSON")).collect()
}

/// A list of ids.
pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("a list of ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}
