//! Row files: codes and scales of a row side by side, so that a row is one read instead of two.
//!
//! A pack is a folder with a safetensors file a layer (one tensor of bytes, `[rows, 264]`) and `engram.json`, which names
//! them with their SHA-256. It stands beside the checkpoint, whose own tables say what model it is.

use std::{
    fs::{self, File},
    io::Read,
    path::Path,
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::store::{self, Filed, Store, Stored};
use crate::{
    Checkpoint, Dtype,
    error::{Error, Result},
    files, header, write,
};

const LIST: &str = "engram.json";
/// Rows that are compared with the checkpoint when a pack is opened.
const SAMPLES: usize = 64;
/// Bytes that are written or read at a time.
const BLOCK: usize = 8 << 20;

/// One row file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedLayer {
    /// The Engram layer.
    pub layer: usize,
    /// Its file in the folder.
    pub file: String,
    /// Rows.
    pub rows: u64,
    /// Bytes of a row.
    pub width: usize,
    /// Of the whole file.
    pub sha256: String,
}

#[derive(Serialize, Deserialize)]
struct List {
    layers: Vec<PackedLayer>,
}

fn file_name(layer: usize) -> String {
    format!("engram-{layer:02}.safetensors")
}

fn tensor_name(layer: usize) -> String {
    format!("layers.{layer}.engram.embed.rows")
}

/// Writes the tables of `ckpt` to the folder `dst`, one file a layer, reads every file back and checks its hash and its
/// rows. `progress` hears bytes done and bytes in all.
///
/// # Errors
/// A model without tables, a failed write, or bytes that come back wrong.
pub fn pack(ckpt: &Checkpoint, dst: &Path, progress: &dyn Fn(u64, u64)) -> Result<Vec<PackedLayer>> {
    let layers = &ckpt.config().engram.layer_ids;
    if layers.is_empty() {
        return Err(Error::invalid(ckpt.location(), "has no Engram tables"));
    }
    fs::create_dir_all(dst).map_err(Error::io(dst))?;
    let stores = layers.iter().map(|l| store::of_checkpoint(ckpt, *l)).collect::<Result<Vec<_>>>()?;
    let total: u64 = 2 * stores.iter().map(|s| (s.rows * s.width()) as u64).sum::<u64>();
    let mut done = 0;
    let mut list = Vec::new();
    for (&layer, store) in layers.iter().zip(&stores) {
        let (file, width) = (file_name(layer), store.width());
        let path = dst.join(&file);
        let mut hasher = Sha256::new();
        write::replace(&path, |out| {
            let mut put = |bytes: &[u8]| {
                hasher.update(bytes);
                out.write_all(bytes)
            };
            put(&head(layer, store))?;
            let per = (BLOCK / width).max(1);
            let mut block = vec![0; per * width];
            for first in (0..store.rows).step_by(per) {
                let n = per.min(store.rows - first);
                for (k, row) in block[..n * width].chunks_exact_mut(width).enumerate() {
                    store.copy(first + k, row);
                }
                put(&block[..n * width])?;
                done += (n * width) as u64;
                progress(done, total);
            }
            Ok(())
        })?;
        let sha256 = hex(&hasher.finalize());
        list.push(PackedLayer { layer, file, rows: store.rows as u64, width, sha256 });
    }
    let text = serde_json::to_string_pretty(&List { layers: list.clone() }).expect("plain fields");
    write::replace(&dst.join(LIST), |out| writeln!(out, "{text}"))?;
    verify_pack(dst, &mut |n| progress(done + n, total))?;
    Ok(list)
}

/// The header of a row file; rows begin on a multiple of 16 bytes.
fn head(layer: usize, store: &Store) -> Vec<u8> {
    let len = store.rows * store.width();
    let tree = json!({
        "__metadata__": { "format": "pt" },
        tensor_name(layer): {
            "dtype": Dtype::U8.name(),
            "shape": [store.rows, store.width()],
            "data_offsets": [0, len],
        },
    });
    let mut text = tree.to_string().into_bytes();
    text.resize((8 + text.len()).next_multiple_of(16) - 8, b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// Reads every byte of a pack and compares its files' hashes; `progress` hears bytes done.
///
/// # Errors
/// A file that is absent or has another hash.
pub fn verify_pack(dir: &Path, progress: &mut dyn FnMut(u64)) -> Result<()> {
    let mut done = 0;
    for packed in list(dir)?.layers {
        let path = dir.join(&packed.file);
        let mut file = files::open(&path)?;
        let mut hasher = Sha256::new();
        let mut block = vec![0; BLOCK];
        loop {
            let n = file.read(&mut block).map_err(Error::io(&path))?;
            if n == 0 {
                break;
            }
            hasher.update(&block[..n]);
            done += n as u64;
            progress(done);
        }
        let got = hex(&hasher.finalize());
        if got != packed.sha256 {
            let what = format!("has SHA-256 {got}, {LIST} says {}; pack it again", packed.sha256);
            return Err(Error::invalid(path.display().to_string(), what));
        }
    }
    Ok(())
}

fn list(dir: &Path) -> Result<List> {
    let path = dir.join(LIST);
    let bytes = files::read(&path, 1 << 20)?;
    let bad = |e| Error::invalid(path.display().to_string(), format!("is not a list of row files: {e}"));
    serde_json::from_slice(&bytes).map_err(bad)
}

/// The rows of a layer in a pack, after some of them are compared with the checkpoint's own.
pub(crate) fn open(ckpt: &Checkpoint, dir: &Path, layer: usize) -> Result<Store> {
    let own = store::of_checkpoint(ckpt, layer)?;
    let path = dir.join(file_name(layer));
    let label = path.display().to_string();
    let bad = |what: String| Error::invalid(&label, what);
    if !list(dir)?.layers.iter().any(|l| l.layer == layer && l.file == file_name(layer)) {
        return Err(Error::invalid(dir.join(LIST).display().to_string(), format!("lacks layer {layer}")));
    }
    let bytes = files::map(&path)?;
    let header = header::parse(&bytes).map_err(|lie| bad(lie.what))?;
    let [place] = header.tensors.as_slice() else {
        return Err(bad(format!("holds {} tensors where one is wanted", header.tensors.len())));
    };
    let shape = [own.rows, own.width()];
    if place.name != tensor_name(layer) || place.dtype != Dtype::U8 || place.shape != shape {
        return Err(bad(format!(
            "holds {} {:?}, not {} {shape:?}",
            place.name,
            place.shape,
            tensor_name(layer)
        )));
    }
    let file = Filed::Packed(Arc::new(File::open(&path).map_err(Error::io(&path))?), place.offset as u64);
    let rows =
        bytes.slice(place.offset, place.len).expect("the header was checked against the file's length");
    let store = Store { bytes: Stored::Packed(rows), file: Some(file), ..own.clone() };
    let (mut a, mut b) = (vec![0; own.width()], vec![0; own.width()]);
    for k in 0..SAMPLES.min(own.rows) {
        let row = k * (own.rows - 1) / (SAMPLES - 1).max(1);
        own.copy(row, &mut a);
        store.copy(row, &mut b);
        if a != b {
            return Err(bad(format!("is another model's: row {row} differs from {}", ckpt.location())));
        }
    }
    Ok(store)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
