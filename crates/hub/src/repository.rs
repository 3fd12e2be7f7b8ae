//! A pinned revision: its commit, its files, their sizes and hashes.

use std::{
    fmt,
    path::{Component, Path},
    str::FromStr,
};

use serde::Deserialize;

use crate::{
    Client, Error, Hash, OWN_FOLDER, Result,
    client::{Trouble, encode},
};

/// Largest list of files that is read.
const MAX_LIST: u64 = 64 << 20;

/// A repository and a revision, as asked for: `OWNER/NAME@REVISION`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// `OWNER/NAME`.
    pub repository: String,
    /// A branch, a tag or a commit.
    pub revision: String,
}

impl FromStr for Wanted {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::Name(text.into());
        let (repository, revision) = text.split_once('@').ok_or_else(bad)?;
        let plain = |s: &str| {
            let fine = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
            !s.is_empty() && s.len() <= 96 && s.bytes().all(fine) && !s.starts_with('.')
        };
        let parts: Vec<&str> = repository.split('/').collect();
        let named = parts.len() == 2 && parts.iter().all(|p| plain(p));
        let visible = |c: char| c.is_ascii_graphic();
        if !named || revision.is_empty() || revision.len() > 256 || !revision.chars().all(visible) {
            return Err(bad());
        }
        Ok(Self { repository: repository.into(), revision: revision.into() })
    }
}

/// One file of a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Path in the repository; relative, with plain components only.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Their hash.
    pub hash: Hash,
}

/// A repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repository {
    /// `OWNER/NAME`.
    pub name: String,
    /// The commit, 40 hexadecimal digits.
    pub commit: String,
    /// All files by name.
    pub files: Vec<RemoteFile>,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    #[serde(alias = "oid")]
    sha256: String,
    size: u64,
}

impl Repository {
    /// Asks the server for the commit that `wanted` means now, and for its files.
    ///
    /// # Errors
    /// An unreachable server, no such repository, or a list that lacks a size or hash or has an unsafe name.
    pub fn resolve(client: &Client, wanted: &Wanted, note: &dyn Fn(&str)) -> Result<Self> {
        let url = format!(
            "{}/api/models/{}/revision/{}?blobs=true",
            client.options.endpoint,
            wanted.repository,
            encode(&wanted.revision, false)
        );
        let info: Info = client.retry(&url, note, || {
            let bytes = client.document(&url, MAX_LIST, note).map_err(Trouble::Final)?;
            // A list that is cut short by a proxy comes whole at the next try.
            serde_json::from_slice(&bytes)
                .map_err(|e| Trouble::again(format!("the list of files cannot be read ({e})")))
        })?;
        let bad = |what: String| Error::Repository { repository: wanted.repository.clone(), what };
        if !is_hex(&info.sha, 40) {
            return Err(bad(format!("its revision is {:?}, which is no commit", info.sha)));
        }
        if is_hex(&wanted.revision, 40) && wanted.revision != info.sha {
            return Err(bad(format!("commit {} was asked for, {} came", wanted.revision, info.sha)));
        }
        let mut files = Vec::with_capacity(info.siblings.len());
        for s in info.siblings {
            let name = s.rfilename;
            if !is_safe(&name) {
                return Err(bad(format!("lists a file {name:?}, which is no name inside a folder")));
            }
            let file = match (s.lfs, s.size, s.blob) {
                (Some(lfs), size, _) if is_hex(&lfs.sha256, 64) && size.is_none_or(|n| n == lfs.size) => {
                    RemoteFile { name, size: lfs.size, hash: Hash::Sha256(lfs.sha256) }
                }
                (None, Some(size), Some(blob)) if is_hex(&blob, 40) => {
                    RemoteFile { name, size, hash: Hash::GitBlob(blob) }
                }
                _ => return Err(bad(format!("gives no usable size and hash of {name}"))),
            };
            files.push(file);
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(pair) = files.windows(2).find(|p| p[0].name == p[1].name) {
            return Err(bad(format!("lists {} twice", pair[0].name)));
        }
        if files.is_empty() {
            return Err(bad("holds no file".into()));
        }
        Ok(Self { name: wanted.repository.clone(), commit: info.sha, files })
    }

    /// The address of a file's bytes.
    pub(crate) fn url(&self, client: &Client, file: &str) -> String {
        let (endpoint, name) = (&client.options.endpoint, &self.name);
        format!("{endpoint}/{name}/resolve/{}/{}", self.commit, encode(file, true))
    }

    /// The file of this name.
    pub fn file(&self, name: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|f| f.name == name)
    }
}

fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Whether a name stays inside the folder and away from our own files.
fn is_safe(name: &str) -> bool {
    let ours = |c: &Component| c.as_os_str().eq_ignore_ascii_case(OWN_FOLDER);
    let plain = Path::new(name).components().all(|c| matches!(c, Component::Normal(_)) && !ours(&c));
    plain
        && !name.is_empty()
        && !name.contains(['\\', '\0', ':'])
        && !name.ends_with('/')
        && name.len() <= 400
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.name, self.commit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_the_folder_are_unsafe() {
        for good in
            ["config.json", "model-00001-of-00048.safetensors", "inference/model.py", ".gitattributes"]
        {
            assert!(is_safe(good), "{good}");
        }
        for bad in [
            "",
            "/etc/passwd",
            "../x",
            "a/../b",
            "./a",
            ".hallmark/pull.json",
            "a/.HALLMARK/b",
            "a\\b",
            "C:x",
            "a/",
        ] {
            assert!(!is_safe(bad), "{bad}");
        }
    }

    #[test]
    fn a_revision_is_asked_for_by_name() {
        let w: Wanted = "deepseek-ai/DeepSeek-V4.1-Flash@refs/pr/3".parse().unwrap();
        assert_eq!(
            (w.repository.as_str(), w.revision.as_str()),
            ("deepseek-ai/DeepSeek-V4.1-Flash", "refs/pr/3")
        );
        for bad in ["a/b", "a@main", "a/b@", "a/b/c@main", "a/../b@main", "a/b@x y", "a/.b@main"] {
            assert_eq!(bad.parse::<Wanted>().unwrap_err().exit_code(), 2, "{bad}");
        }
    }
}
