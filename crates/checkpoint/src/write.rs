//! Writing safetensors: one shard from finished bytes, whole or not at all; and reading back what was written.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use serde_json::{Map, Value, json};

use crate::{
    Bytes, Dtype,
    error::{Error, Result},
    files, header,
};

/// One finished tensor.
#[derive(Clone, Debug)]
pub struct Item<'a> {
    /// Full name.
    pub name: &'a str,
    /// Stored type.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: &'a [usize],
    /// Little-endian, row-major.
    pub data: &'a [u8],
}

/// Writes `items` in their order as one safetensors file, through a temporary file beside it. Panics where an item's
/// data does not fill its shape.
pub fn write_shard(path: &Path, items: &[Item]) -> Result<()> {
    // As kernels want the data.
    write_aligned(path, items, 16)
}

/// As [`write_shard`], with the data's start on a multiple of `alignment` bytes.
pub(crate) fn write_aligned(path: &Path, items: &[Item], alignment: usize) -> Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut offset = 0;
    for t in items {
        let want = t.shape.iter().product::<usize>() * t.dtype.size();
        assert_eq!(t.data.len(), want, "{}: bytes of {} {:?}", t.name, t.dtype.name(), t.shape);
        let end = offset + t.data.len();
        let entry = json!({ "dtype": t.dtype.name(), "shape": t.shape, "data_offsets": [offset, end] });
        header.insert(t.name.into(), entry);
        offset = end;
    }
    let mut header = Value::from(header).to_string().into_bytes();
    header.resize((8 + header.len()).next_multiple_of(alignment) - 8, b' ');
    replace(path, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        items.iter().try_for_each(|t| out.write_all(t.data))
    })
}

/// A tensor of a shard: name, stored type, shape, bytes.
pub type Read = (String, Dtype, Vec<usize>, Bytes);

/// The tensors of a whole shard in the order of their bytes; `file` is its name in errors.
pub fn read_shard(bytes: &Bytes, file: &str) -> Result<Vec<Read>> {
    let header = header::parse(bytes).map_err(|lie| match lie.tensor {
        Some(tensor) => Error::tensor(file, tensor, lie.what),
        None => Error::invalid(file, lie.what),
    })?;
    let one = |t: header::Place| {
        let data = bytes.slice(t.offset, t.len).expect("the header was checked against the file's length");
        (t.name, t.dtype, t.shape, data)
    };
    Ok(header.tensors.into_iter().map(one).collect())
}

/// As [`read_shard`], of a mapped file.
pub fn read_shard_file(path: &Path) -> Result<Vec<Read>> {
    read_shard(&files::map(path)?, &path.display().to_string())
}

/// Writes the index of tensors (name, file) whose bytes sum to `total`.
pub fn write_index<'a>(
    path: &Path,
    total: u64,
    tensors: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<()> {
    let sorted: std::collections::BTreeMap<_, _> = tensors.collect();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": sorted });
    replace(path, |out| writeln!(out, "{index:#}"))
}

/// Fills a temporary file and renames it to `path`, so that no reader ever sees half of it.
pub fn replace(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".part");
    let temporary = PathBuf::from(temporary);
    let write = || {
        let mut out = BufWriter::new(File::create(&temporary)?);
        fill(&mut out)?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(Error::io(path))
}
