//! Configuration and safetensors headers of a revision, without its weights.

use std::{fs, path::Path};

use checkpoint::MAX_HEADER_BYTES;

use crate::{
    Client, Error, RemoteFile, Repository, Result,
    client::{Trouble, header},
};

/// Bytes of a shard's beginning that are asked for first; most headers fit.
const FIRST: u64 = 1 << 20;
/// Files beside the shards that say what the shards hold.
const SIDE: [&str; 3] = ["config.json", "quantization_config.json", "model.safetensors.index.json"];
/// Largest of these files that is read.
const MAX_SIDE: u64 = 100_000_000;

/// Makes in `dir` a folder that a checkpoint's headers can be read from: configuration and index whole and verified,
/// of every shard its header, at its true length and else empty (a file with a hole, which takes no space).
///
/// # Errors
/// A server that does not deliver ranges, or a shard that has no header.
pub fn headers(client: &Client, repo: &Repository, dir: &Path, note: &dyn Fn(&str)) -> Result<()> {
    for file in repo.files.iter().filter(|f| SIDE.contains(&f.name.as_str())) {
        let url = repo.url(client, &file.name);
        let bytes = client.document(&url, MAX_SIDE, note)?;
        let got = file.hash.of(&bytes[..], file.size).map_err(Error::io(dir))?;
        if got != file.hash.hex() {
            let what = format!("its {} is {got}, the revision's is {}", file.hash.kind(), file.hash.hex());
            return Err(Error::Server { url, what });
        }
        let path = dir.join(&file.name);
        fs::write(&path, bytes).map_err(Error::io(&path))?;
    }
    let shards = repo.files.iter().filter(|f| f.name.ends_with(".safetensors") && !f.name.contains('/'));
    for shard in shards {
        let bytes = beginning(client, repo, shard, note)?;
        let path = dir.join(&shard.name);
        let write = || {
            fs::write(&path, &bytes)?;
            fs::OpenOptions::new().write(true).open(&path)?.set_len(shard.size)
        };
        write().map_err(Error::io(&path))?;
    }
    Ok(())
}

/// The length and the header of a shard.
fn beginning(client: &Client, repo: &Repository, shard: &RemoteFile, note: &dyn Fn(&str)) -> Result<Vec<u8>> {
    let url = repo.url(client, &shard.name);
    let bad = |what: String| Error::Server { url: url.clone(), what };
    let mut bytes = range(client, &url, shard, (0, shard.size.min(FIRST)), note)?;
    let Some(length) = bytes.first_chunk::<8>().map(|b| u64::from_le_bytes(*b)) else {
        return Err(bad(format!("has {} bytes, too few for a safetensors header", shard.size)));
    };
    if length > MAX_HEADER_BYTES || 8 + length > shard.size {
        return Err(bad(format!("claims a header of {length} bytes")));
    }
    let (have, end) = (bytes.len() as u64, 8 + length);
    if end > have {
        bytes.extend(range(client, &url, shard, (have, end), note)?);
    }
    bytes.truncate(end as usize);
    Ok(bytes)
}

fn range(
    client: &Client,
    url: &str,
    shard: &RemoteFile,
    want: (u64, u64),
    note: &dyn Fn(&str),
) -> Result<Vec<u8>> {
    use std::io::Read;
    if want.0 == want.1 {
        return Ok(Vec::new());
    }
    client.retry(url, note, || {
        let response = client.get(url, Some(want))?;
        let range = format!("bytes {}-{}/{}", want.0, want.1 - 1, shard.size);
        match header(&response, "content-range") {
            Some(got) if got.trim() == range => {}
            None if response.status() == 200 => {
                let what = "the server sends no ranges; pull the model and plan the folder".into();
                return Err(Trouble::Final(Error::Server { url: url.into(), what }));
            }
            got => {
                let what = format!("asked for {range}, the answer is {}", got.unwrap_or("without a range"));
                return Err(Trouble::again(what));
            }
        }
        let mut bytes = Vec::new();
        let body = response.into_body().into_reader().take(want.1 - want.0).read_to_end(&mut bytes);
        match body {
            Ok(n) if n as u64 == want.1 - want.0 => Ok(bytes),
            Ok(n) => Err(Trouble::again(format!("{n} bytes came of {range}"))),
            Err(e) => Err(Trouble::again(format!("the connection broke ({e})"))),
        }
    })
}
