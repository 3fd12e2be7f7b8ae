//! A folder of the released checkpoint's true size, 510 GB of holes: offsets, shapes and sums beyond 32 bits.

mod common;

use std::{fs::File, io::Write};

use checkpoint::{Checkpoint, Config, Expected, Form, Group, Summary};
use common::repository;
use serde_json::{Map, json};

const SHARDS: usize = 48;

/// One shard with a true header and no stored data: the file system keeps only the header.
fn write_hollow(path: &std::path::Path, tensors: &[Expected]) {
    let (mut header, mut end) = (Map::new(), 0);
    for t in tensors {
        let start = end;
        end += t.bytes();
        let entry = json!({ "dtype": t.dtype.name(), "shape": t.shape, "data_offsets": [start, end] });
        header.insert(t.name.clone(), entry);
    }
    let mut text = serde_json::Value::from(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut file = File::create(path).unwrap();
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&text).unwrap();
    file.set_len(8 + text.len() as u64 + end).unwrap();
}

#[test]
fn the_released_layout_opens_by_its_headers() {
    let released = repository("fixtures/released/config.json");
    let config = Config::load_file(&released).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(&released, dir.path().join("config.json")).unwrap();
    let tensors: Vec<Expected> = config.inventory().collect();
    for (i, part) in tensors.chunks(tensors.len().div_ceil(SHARDS)).enumerate() {
        write_hollow(&dir.path().join(format!("model-{:05}-of-{SHARDS:05}.safetensors", i + 1)), part);
    }
    let model = Checkpoint::open_headers(dir.path()).unwrap();
    let (found, implied) = (model.summary(), Summary::from_config(&config, ""));
    assert_eq!((found.tensors, found.bytes), (96_085, 510_286_023_000));
    assert_eq!((found.groups, found.dtypes), (implied.groups, implied.dtypes));
    assert_eq!(found.shards.len(), SHARDS);
    // The last row of the larger table starts 98 GB behind the first.
    let table = model.weight("layers.14.engram.embed").unwrap();
    assert_eq!((table.form(), table.rows(), table.cols()), (Form::Fp8Row32, 384_016_682, 256));
    let mut row = vec![1.0; 256];
    table.decode_row(table.rows() - 1, &mut row);
    assert_eq!(row, [0.0; 256]);
    assert_eq!(model.copied(), 0, "a table is never copied");
    assert!(model.group_bytes(Group::EngramTable) > u64::from(u32::MAX));
}
