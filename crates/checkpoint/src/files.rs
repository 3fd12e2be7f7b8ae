//! Bounded reads of small files.

use std::{fs::File, io::Read, os::unix::fs::MetadataExt, path::Path};

use crate::{
    Bytes,
    error::{Error, Result},
};

/// The whole file, refused beyond `limit` bytes. An absent file is a bad checkpoint, not an I/O failure.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    open(path)?.take(limit + 1).read_to_end(&mut out).map_err(Error::io(path))?;
    if out.len() as u64 > limit {
        return Err(Error::invalid(path.display().to_string(), format!("has more than {limit} bytes")));
    }
    Ok(out)
}

/// A whole file, mapped; links are followed.
pub(crate) fn map(path: &Path) -> Result<Bytes> {
    let handle = open(path)?;
    let meta = handle.metadata().map_err(Error::io(path))?;
    if !meta.is_file() {
        return Err(Error::invalid(path.display().to_string(), "is not a file"));
    }
    // SAFETY: the map is read-only and lives as long as its bytes. A checkpoint that another process rewrites in place
    // under a running engine is outside any guarantee; downloads replace files whole.
    let map = unsafe { memmap2::Mmap::map(&handle) }.map_err(Error::io(path))?;
    // SAFETY: the call reads the process's identity.
    let user = unsafe { libc::geteuid() };
    Ok(Bytes::mapped_told(map, user == 0 || meta.uid() == user))
}

/// Opens a file that the checkpoint must have.
pub(crate) fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
            let what = match path.is_symlink() {
                true => "is a link whose target does not exist; download the model again",
                false => "does not exist",
            };
            Error::invalid(path.display().to_string(), what)
        }
        _ => Error::io(path)(e),
    })
}
