//! The folder in which a pack is made. What is finished stays over a kill and is believed only after its hash is checked.

use std::{
    fs,
    path::{Path, PathBuf},
};

use checkpoint::{
    Dtype,
    write::{self, Item},
};
use exl3::encode::Encoded;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

use crate::{Error, Result, TensorReport};

/// What a finished file says about itself.
#[derive(Serialize, Deserialize)]
struct Sealed<T> {
    sha256: String,
    content: T,
}

/// The folder `DST.part`.
pub(crate) struct Work {
    dir: PathBuf,
    tensors: PathBuf,
}

const SETTINGS: &str = "settings.sha256";

impl Work {
    /// Makes or takes up the work folder of `destination`; `settings` is the hash of all that the bytes depend on.
    pub fn open(destination: &Path, settings: &str) -> Result<Self> {
        if destination.exists() {
            let what = format!("{} exists already; name a new folder", destination.display());
            return Err(Error::Settings(what));
        }
        let mut dir = destination.as_os_str().to_owned();
        dir.push(".part");
        let dir = PathBuf::from(dir);
        let mark = dir.join(SETTINGS);
        if dir.exists() {
            let before = fs::read_to_string(&mark).unwrap_or_default();
            if before != settings {
                let what = format!(
                    "{} holds the work of another checkpoint, calibration or setting; remove it or name another folder",
                    dir.display()
                );
                return Err(Error::Settings(what));
            }
        }
        let tensors = dir.join("tensors");
        fs::create_dir_all(&tensors).map_err(Error::io(&tensors))?;
        write::replace(&mark, |out| out.write_all(settings.as_bytes()))?;
        Ok(Self { dir, tensors })
    }

    /// The path of a file of the pack in the making.
    pub fn path(&self, file: &str) -> PathBuf {
        self.dir.join(file)
    }

    /// Keeps a finished layer.
    pub fn keep_tensor(&self, encoded: &Encoded, report: &TensorReport) -> Result<()> {
        let path = self.tensors.join(format!("{}.safetensors", report.name));
        let shape = encoded.trellis_shape();
        let marker = encoded.codebook.multiplier().to_le_bytes();
        let item = |name, dtype, shape, data| Item { name, dtype, shape, data };
        let (suh, svh) = ([encoded.in_features], [encoded.out_features]);
        write::write_shard(
            &path,
            &[
                item("trellis", Dtype::I16, &shape[..], &encoded.trellis),
                item("suh", Dtype::F16, &suh, &encoded.suh),
                item("svh", Dtype::F16, &svh, &encoded.svh),
                item(encoded.codebook.name(), Dtype::I32, &[], &marker),
            ],
        )?;
        seal(&path, report)
    }

    /// A layer that was finished before, if its bytes are what they were.
    pub fn kept_tensor(&self, name: &str) -> Result<Option<TensorReport>> {
        kept(&self.tensors.join(format!("{name}.safetensors")))
    }

    /// The bytes of a kept layer.
    pub fn tensor_bytes(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.tensors.join(format!("{name}.safetensors"));
        fs::read(&path).map_err(Error::io(&path))
    }

    /// Drops a kept layer whose shard is finished.
    pub fn drop_tensor(&self, name: &str) {
        for file in [format!("{name}.safetensors"), format!("{name}.safetensors.json")] {
            let _ = fs::remove_file(self.tensors.join(file)); // the folder goes in the end anyway
        }
    }

    /// Marks a shard as finished.
    pub fn seal_shard(&self, file: &str, reports: &[TensorReport]) -> Result<()> {
        seal(&self.path(file), &reports)
    }

    /// The reports of a shard that was finished before, if its bytes are what they were.
    pub fn kept_shard(&self, file: &str) -> Result<Option<Vec<TensorReport>>> {
        kept(&self.path(file))
    }

    /// Gives the pack its name.
    pub fn finish(self, shards: &[String], destination: &Path) -> Result<()> {
        for file in shards {
            let path = self.dir.join(format!("{file}.json"));
            fs::remove_file(&path).map_err(Error::io(&path))?;
        }
        fs::remove_dir_all(&self.tensors).map_err(Error::io(&self.tensors))?;
        let mark = self.dir.join(SETTINGS);
        fs::remove_file(&mark).map_err(Error::io(&mark))?;
        fs::rename(&self.dir, destination).map_err(Error::io(destination))
    }
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".json");
    name.into()
}

fn seal<T: Serialize>(path: &Path, content: &T) -> Result<()> {
    let sealed = Sealed { sha256: sha256(path)?, content };
    let text = serde_json::to_string(&sealed).map_err(|e| Error::io(path)(e.into()))?;
    Ok(write::replace(&beside(path), |out| out.write_all(text.as_bytes()))?)
}

fn kept<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let Ok(text) = fs::read_to_string(beside(path)) else { return Ok(None) };
    let Ok(sealed) = serde_json::from_str::<Sealed<T>>(&text) else { return Ok(None) };
    if !path.is_file() || sha256(path)? != sealed.sha256 {
        return Ok(None);
    }
    Ok(Some(sealed.content))
}

fn sha256(path: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    let mut file = fs::File::open(path).map_err(Error::io(path))?;
    std::io::copy(&mut file, &mut hash).map_err(Error::io(path))?;
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}
