//! Prefix cache: entries of prompts by their tokens, and window tails at chosen lengths, in memory and on disk.
//!
//! Entries are kept in pages of [`PAGE`] tokens that form a radix tree; a page serves every prompt that begins with the
//! same tokens, up to the first token that differs. Window tails stand at the ends of turns and every so many tokens. A
//! prompt goes on from the tail that leaves least to compute; from entries without a tail its windows are made anew. Both
//! tiers forget the least recently used first, the longest prefixes before those that they continue. What comes from disk
//! is used only if checksum, model and tokens are right; else it is removed and the prompt computed.

mod disk;
mod item;
mod key;
mod tree;

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use model::{Page, Tail};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::{Error, Lm, Prefill, Result};
use disk::Disk;
use item::{PageData, TailData};
use tree::Tree;

/// Tokens of a page. Even, as groups of two tokens share an entry.
pub const PAGE: usize = 64;

/// Where and how much is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// Most bytes in memory.
    pub memory: u64,
    /// Folder of the disk tier; made if it is not there, readable by its owner only.
    pub dir: Option<PathBuf>,
    /// Most bytes on disk.
    pub disk: u64,
    /// Within a long prefill a window tail is kept every so many tokens.
    pub tail_every: usize,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self { memory: 1 << 30, dir: None, disk: 16 << 30, tail_every: 8192 }
    }
}

/// Why not more of a prompt is found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Miss {
    /// All of the prompt is there.
    None,
    /// Nothing is kept.
    Empty,
    /// What is kept goes on otherwise.
    Differs {
        /// First token that differs.
        at: usize,
        /// The prompt's id there.
        asked: u32,
        /// The kept id.
        kept: u32,
    },
    /// What is kept ends.
    Ends {
        /// First token that is not there.
        at: usize,
    },
    /// What followed was forgotten for lack of room.
    Evicted {
        /// First token that is not there.
        at: usize,
    },
    /// A file was not used.
    Rejected {
        /// First token that is not there.
        at: usize,
        /// The file's name.
        file: String,
        /// What is wrong with it.
        why: String,
    },
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Miss::None => f.write_str("nothing is missing"),
            Miss::Empty => f.write_str("nothing is kept"),
            Miss::Differs { at, asked, kept } => {
                write!(f, "token {at} is {asked}, what is kept goes on with {kept}")
            }
            Miss::Ends { at } => write!(f, "what is kept ends at token {at}"),
            Miss::Evicted { at } => write!(f, "tokens from {at} on were forgotten for lack of room"),
            Miss::Rejected { at, file, why } => write!(f, "tokens from {at} on: {file} is not used: {why}"),
        }
    }
}

/// What the cache has of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Tokens whose entries are there.
    pub entries: usize,
    /// Length of the longest window tail, 0 without.
    pub tail: usize,
    /// Why not more.
    pub miss: Miss,
}

/// Entries and perhaps a tail, ready to load.
pub(crate) struct Fetched {
    pages: Vec<Arc<PageData>>,
    tail: Option<Arc<TailData>>,
}

impl Fetched {
    /// The pages from token `from`, a multiple of [`PAGE`], on.
    pub fn pages(&self, from: usize) -> impl Iterator<Item = &Page> {
        let rest = self.tail.iter().filter(|t| !t.rest.is_empty()).map(|t| &t.page);
        self.pages.iter().map(|p| &p.page).chain(rest).filter(move |p| p.first() >= from)
    }

    /// The tail.
    pub fn tail(&self) -> Option<&Tail> {
        self.tail.as_ref().map(|t| &t.tail)
    }
}

/// Figures since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CacheStats {
    /// Prompts looked up.
    pub lookups: u64,
    /// Those of which something was used.
    pub hits: u64,
    /// Bytes in memory now.
    pub memory_bytes: u64,
    /// Bytes on disk now.
    pub disk_bytes: u64,
    /// Pages known now, in either tier.
    pub pages: u64,
    /// Tails known now, in either tier.
    pub tails: u64,
    /// Pages and tails read from disk.
    pub disk_reads: u64,
    /// Pages and tails written to disk.
    pub disk_writes: u64,
    /// Pages and tails forgotten for lack of room in memory.
    pub memory_evictions: u64,
    /// Pages and tails removed from disk for lack of room.
    pub disk_evictions: u64,
    /// Files that were not used because something was wrong with them.
    pub rejected: u64,
    /// Failures to write; the items then stay in memory only.
    pub write_errors: u64,
}

/// A prefix cache that sessions of one model share.
pub struct PrefixCache {
    tree: Mutex<Tree>,
    owner: [u8; 32],
    tail_every: usize,
}

impl PrefixCache {
    /// A cache for sessions of `lm` with this prefill; they refuse another's.
    ///
    /// # Errors
    /// A folder that cannot be used.
    pub fn open(options: &CacheOptions, lm: &dyn Lm, prefill: Prefill) -> Result<Self> {
        let owner = Self::owner(lm, prefill);
        let disk = match &options.dir {
            Some(dir) => Some(Disk::open(dir).map_err(Error::CacheDir)?),
            None => None,
        };
        let tree = Tree::new(owner, lm.layout(), options.memory, options.disk, disk);
        Ok(Self { tree: Mutex::new(tree), owner, tail_every: options.tail_every })
    }

    /// What the bytes of a kept state depend on: the model and, as bounded replay approximates, the kind of prefill.
    fn owner(lm: &dyn Lm, prefill: Prefill) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(lm.identity());
        hash.update(prefill.name());
        hash.finalize().into()
    }

    /// Whether sessions of `lm` with this prefill may use the cache.
    pub(crate) fn serves(&self, lm: &dyn Lm, prefill: Prefill) -> bool {
        self.owner == Self::owner(lm, prefill)
    }

    /// Figures.
    pub fn stats(&self) -> CacheStats {
        self.tree().stats()
    }

    /// Tokens between tails within a long prefill.
    pub(crate) fn tail_every(&self) -> usize {
        self.tail_every
    }

    fn tree(&self) -> MutexGuard<'_, Tree> {
        // Every change leaves the tree whole, so that a panic elsewhere does not spoil it.
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What there is of `ids`: entries for at most `limit` tokens, a tail at no more than that.
    pub(crate) fn find(&self, ids: &[u32], limit: usize) -> Offer {
        self.tree().find(ids, limit)
    }

    /// Entries of the first `len` tokens of `ids`, with the tail there or without. `None` where something turns out not
    /// to be usable; it is forgotten then, so that [`PrefixCache::find`] tells what is left.
    pub(crate) fn fetch(&self, ids: &[u32], len: usize, tail: bool) -> Option<Fetched> {
        self.tree().fetch(ids, len, tail)
    }

    /// Counts a lookup.
    pub(crate) fn count(&self, hit: bool) {
        self.tree().count(hit);
    }

    /// The first token whose page is not kept, of the whole pages of `ids`; and whether the tail at their end is.
    pub(crate) fn missing(&self, ids: &[u32]) -> (usize, bool) {
        self.tree().missing(ids)
    }

    /// Keeps `pages`, which begin where [`PrefixCache::missing`] said or before, and the tail at the end of `ids` with
    /// the entries behind the last whole page.
    pub(crate) fn insert(&self, ids: &[u32], pages: Vec<Page>, tail: Option<(Page, Tail)>) {
        self.tree().insert(ids, pages, tail);
    }
}
