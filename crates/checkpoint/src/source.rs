//! Where the files of a model come from: a folder or the program image.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::{
    Bytes, Part,
    error::{Error, Result},
    files,
    index::{Index, MAX_INDEX_BYTES},
};

/// Which shard file each tensor is in.
pub(crate) type WeightMap = BTreeMap<String, String>;

/// The files of one model.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Folder(PathBuf),
    Embedded(&'static [(&'static str, &'static [u8])]),
}

impl Source {
    /// The folder of a model: `path` itself, or the snapshot inside a Hugging Face cache entry.
    pub(crate) fn folder(path: &Path) -> Result<Self> {
        let label = path.display().to_string();
        if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
            return Err(gguf(&label));
        }
        let meta = std::fs::metadata(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
                Error::invalid(&label, "does not exist; name a model folder")
            }
            _ => Error::io(path)(e),
        })?;
        if !meta.is_dir() {
            return Err(Error::invalid(&label, "is not a folder; name the folder that holds config.json"));
        }
        let source = Source::Folder(cache_snapshot(path)?.unwrap_or_else(|| path.to_path_buf()));
        let names = source.names()?;
        let ends = |suffix: &str| names.iter().any(|n| n.to_ascii_lowercase().ends_with(suffix));
        if !ends(".safetensors") {
            if ends(".gguf") {
                return Err(gguf(&label));
            }
            if ends(".npz") {
                return Err(Error::unsupported(
                    &label,
                    "holds MLX weights (npz), which are not supported; use the released safetensors checkpoint",
                ));
            }
        }
        Ok(source)
    }

    /// The name of `file` in messages.
    pub(crate) fn label(&self, file: &str) -> String {
        match self {
            Source::Folder(dir) => dir.join(file).display().to_string(),
            Source::Embedded(_) => format!("embedded model: {file}"),
        }
    }

    /// Where `file` is; none inside the program.
    pub(crate) fn path(&self, file: &str) -> Option<PathBuf> {
        match self {
            Source::Folder(dir) => Some(dir.join(file)),
            Source::Embedded(_) => None,
        }
    }

    /// The name of the whole in messages.
    pub(crate) fn root(&self) -> String {
        match self {
            Source::Folder(dir) => dir.display().to_string(),
            Source::Embedded(_) => "embedded model".into(),
        }
    }

    /// Names of all files, sorted.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let mut names: Vec<String> = match self {
            Source::Embedded(files) => files.iter().map(|(n, _)| n.to_string()).collect(),
            Source::Folder(dir) => std::fs::read_dir(dir)
                .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
                .map_err(Error::io(dir))?
                .into_iter()
                .filter_map(|e| e.file_name().into_string().ok())
                .collect(),
        };
        names.sort();
        Ok(names)
    }

    /// The bytes of one file, mapped; links are followed.
    pub(crate) fn bytes(&self, file: &str) -> Result<Bytes> {
        match self {
            Source::Embedded(files) => files
                .iter()
                .find(|(n, _)| *n == file)
                .map(|(_, bytes)| Bytes::from_static(bytes))
                .ok_or_else(|| Error::invalid(self.label(file), "does not exist")),
            Source::Folder(dir) => {
                if !is_plain_name(file) {
                    return Err(Error::invalid(self.root(), format!("\"{file}\" is not a file name")));
                }
                files::map(&dir.join(file))
            }
        }
    }

    /// The text of a small file.
    pub(crate) fn text(&self, file: &str, limit: usize) -> Result<String> {
        let bytes = self.bytes(file)?;
        if bytes.len() > limit {
            return Err(Error::invalid(self.label(file), format!("has more than {limit} bytes")));
        }
        let text = std::str::from_utf8(&bytes)
            .map_err(|e| Error::invalid(self.label(file), format!("is not UTF-8: {e}")))?;
        Ok(text.to_owned())
    }

    /// The shard files, and which shard each tensor should be in if an index says so.
    pub(crate) fn shards(&self) -> Result<(Vec<String>, Option<WeightMap>)> {
        const INDEX: &str = "model.safetensors.index.json";
        const SINGLE: &str = "model.safetensors";
        let names = self.names()?;
        let has = |name: &str| names.iter().any(|n| n == name);
        if has(INDEX) {
            let label = self.label(INDEX);
            let map = serde_json::from_str::<Index>(&self.text(INDEX, MAX_INDEX_BYTES)?)
                .map_err(|e| Error::invalid(&label, format!("is not a valid index: {e}")))?
                .0;
            let mut files: Vec<String> = map.values().cloned().collect();
            files.sort();
            files.dedup();
            if let Some(bad) = files.iter().find(|f| !is_plain_name(f)) {
                return Err(Error::invalid(&label, format!("names \"{bad}\", which is not a file name")));
            }
            // Shards of what a model may lack as a whole may be absent: a download can leave them out.
            let needed: std::collections::BTreeSet<&String> =
                map.iter().filter(|(t, _)| Part::of(t) == Part::Text).map(|(_, f)| f).collect();
            let absent = |f: &String| !has(f) && !needed.contains(f);
            files.retain(|f| !absent(f));
            let map: WeightMap =
                map.iter().filter(|(_, f)| !absent(f)).map(|(t, f)| (t.clone(), f.clone())).collect();
            if let Some((tensor, file)) = map.iter().find(|(_, f)| !has(f)) {
                return Err(Error::tensor(
                    &label,
                    tensor,
                    format!("is said to be in {file}, which does not exist"),
                ));
            }
            if files.is_empty() {
                return Err(Error::invalid(&label, "names no tensor"));
            }
            return Ok((files, Some(map)));
        }
        if has(SINGLE) {
            return Ok((vec![SINGLE.into()], None));
        }
        let shards: Vec<(String, usize, usize)> =
            names.into_iter().filter_map(|n| shard_number(&n).map(|(i, of)| (n, i, of))).collect();
        let Some((_, _, of)) = shards.first() else {
            return Err(Error::invalid(
                self.root(),
                "holds neither model.safetensors, nor model.safetensors.index.json, nor shards",
            ));
        };
        let complete =
            shards.len() == *of && shards.iter().enumerate().all(|(k, (_, i, n))| *i == k + 1 && n == of);
        if !complete {
            return Err(Error::invalid(
                self.root(),
                format!("holds {} shards and no index where all of 1 to {of} are needed", shards.len()),
            ));
        }
        Ok((shards.into_iter().map(|s| s.0).collect(), None))
    }
}

impl Source {
    /// The files that hold `tensors`; the folder may lack all others.
    pub(crate) fn shards_of(&self, tensors: &[String]) -> Result<Vec<String>> {
        const INDEX: &str = "model.safetensors.index.json";
        let names = self.names()?;
        let mut files: Vec<String> = if names.iter().any(|n| n == INDEX) {
            let label = self.label(INDEX);
            let map = serde_json::from_str::<Index>(&self.text(INDEX, MAX_INDEX_BYTES)?)
                .map_err(|e| Error::invalid(&label, format!("is not a valid index: {e}")))?
                .0;
            let file = |t: &String| {
                map.get(t).cloned().ok_or_else(|| Error::tensor(&label, t, "is not in the index"))
            };
            tensors.iter().map(file).collect::<Result<_>>()?
        } else {
            names.into_iter().filter(|n| n.ends_with(".safetensors")).collect()
        };
        files.sort();
        files.dedup();
        Ok(files)
    }
}

fn gguf(label: &str) -> Error {
    Error::unsupported(label, "is GGUF, which is not supported; use the released safetensors checkpoint")
}

/// One path component without separators.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(std::path::Component::Normal(c)), None) if c == name)
}

/// `model-00003-of-00048.safetensors` is (3, 48).
fn shard_number(name: &str) -> Option<(usize, usize)> {
    let (i, of) = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    Some((i.parse().ok()?, of.parse().ok()?))
}

/// The snapshot folder where `path` is a cache entry `models--OWNER--NAME`.
fn cache_snapshot(path: &Path) -> Result<Option<PathBuf>> {
    let snapshots = path.join("snapshots");
    if path.join("config.json").exists() || !snapshots.is_dir() {
        return Ok(None);
    }
    if let Ok(revision) = std::fs::read_to_string(path.join("refs").join("main")) {
        let revision = revision.trim();
        let dir = snapshots.join(revision);
        if is_plain_name(revision) && dir.is_dir() {
            return Ok(Some(dir));
        }
    }
    let found = std::fs::read_dir(&snapshots)
        .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
        .map_err(Error::io(&snapshots))?;
    match found.as_slice() {
        [one] => Ok(Some(one.path())),
        many => Err(Error::invalid(
            path.display().to_string(),
            format!("holds {} snapshots and no refs/main; name one of the folders in snapshots", many.len()),
        )),
    }
}
