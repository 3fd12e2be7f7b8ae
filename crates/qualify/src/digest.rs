//! SHA-256 of bytes and files.

use std::{fmt::Write as _, fs::File, io::Read, path::Path};

use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// SHA-256 as lower-case hex.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// SHA-256 of a file's content.
///
/// # Errors
/// What the operating system reports.
pub fn sha256_file(path: &Path) -> Result<String> {
    let mut file = File::open(path).map_err(Error::io(path))?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer).map_err(Error::io(path))? {
            0 => return Ok(hex(&hash.finalize())),
            n => hash.update(&buffer[..n]),
        }
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, b| {
        let _ = write!(text, "{b:02x}"); // writing to a String can't fail
        text
    })
}
