//! Model folders that a test may break.
#![allow(dead_code)] // each test binary uses its part

use std::{
    fs,
    path::{Path, PathBuf},
};

use checkpoint::{Checkpoint, Error, generate};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

pub const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
pub const INDEX: &str = "model.safetensors.index.json";

/// One tensor of a shard, with nothing promised about it.
#[derive(Clone)]
pub struct Raw {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// Splits a shard into its header and its data.
pub fn split(file: &[u8]) -> (Map<String, Value>, Vec<u8>) {
    let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&file[8..8 + n]).unwrap();
    (header.as_object().unwrap().clone(), file[8 + n..].to_vec())
}

/// Joins a header, which may lie, and data.
pub fn join(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A private copy of the nano model.
pub struct Folder {
    pub dir: TempDir,
}

impl Folder {
    pub fn nano() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(generate::cached("nano").unwrap()).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        Self { dir }
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    pub fn read(&self, file: &str) -> Vec<u8> {
        fs::read(self.path(file)).unwrap()
    }

    pub fn write(&self, file: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.path(file), bytes).unwrap();
    }

    pub fn remove(&self, file: &str) {
        fs::remove_file(self.path(file)).unwrap();
    }

    /// Changes a shard's header and leaves its data.
    pub fn edit_header(&self, shard: &str, edit: impl FnOnce(&mut Map<String, Value>)) {
        let (mut header, data) = split(&self.read(shard));
        edit(&mut header);
        self.write(shard, join(&Value::from(header).to_string(), &data));
    }

    /// Changes a shard's tensors; offsets are laid out anew.
    pub fn edit_tensors(&self, shard: &str, edit: impl FnOnce(&mut Vec<Raw>)) {
        let (header, data) = split(&self.read(shard));
        let mut tensors = raw(&header, &data);
        edit(&mut tensors);
        self.write(shard, lay_out(&tensors));
    }

    /// Changes one tensor's bytes.
    pub fn edit_data(&self, shard: &str, tensor: &str, edit: impl FnOnce(&mut Vec<u8>)) {
        self.edit_tensors(shard, |all| {
            edit(&mut all.iter_mut().find(|t| t.name == tensor).expect("tensor of the shard").data);
        });
    }

    pub fn edit_json(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let mut tree: Value = serde_json::from_slice(&self.read(file)).unwrap();
        edit(&mut tree);
        self.write(file, tree.to_string());
    }

    /// Makes the index say what the shards hold.
    pub fn reindex(&self) {
        let mut map = Map::new();
        for shard in SHARDS {
            for name in split(&self.read(shard)).0.keys().filter(|n| *n != "__metadata__") {
                map.insert(name.clone(), shard.into());
            }
        }
        self.write(INDEX, json!({ "weight_map": map }).to_string());
    }

    pub fn open(&self) -> Checkpoint {
        Checkpoint::open(self.dir.path()).unwrap()
    }

    /// The folder is refused with this exit code by one sentence that holds all of `want`.
    pub fn refused(&self, exit_code: u8, want: &[&str]) {
        refused(Checkpoint::open(self.dir.path()), exit_code, want);
    }
}

pub fn refused(result: Result<Checkpoint, Error>, exit_code: u8, want: &[&str]) {
    let error = match result {
        Ok(c) => panic!("{c:?} must be refused: {want:?}"),
        Err(e) => e,
    };
    let text = error.to_string();
    for part in want {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
    assert!(!text.contains('\n'), "{text:?} is more than one line");
    assert_eq!(error.exit_code(), exit_code, "{text}");
}

pub fn raw(header: &Map<String, Value>, data: &[u8]) -> Vec<Raw> {
    let tensors = header.iter().filter(|(n, _)| *n != "__metadata__");
    tensors
        .map(|(name, t)| {
            let at = |i: usize| t["data_offsets"][i].as_u64().unwrap() as usize;
            Raw {
                name: name.clone(),
                dtype: t["dtype"].as_str().unwrap().into(),
                shape: serde_json::from_value(t["shape"].clone()).unwrap(),
                data: data[at(0)..at(1)].to_vec(),
            }
        })
        .collect()
}

pub fn lay_out(tensors: &[Raw]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for t in tensors {
        let start = data.len();
        data.extend(&t.data);
        let entry = json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": [start, data.len()] });
        header.insert(t.name.clone(), entry);
    }
    join(&Value::from(header).to_string(), &data)
}

pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}
