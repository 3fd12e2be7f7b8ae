//! Engram tables as a component: where rows are kept, how they are fetched ahead, what that costs.
//!
//! A table is 100 GB of rows of 264 bytes (256 codes, 8 scales) of which a token reads 24. Three ways to keep it, behind
//! one trait: resident (paged in and locked), mapped (from disk as the system likes), or a cache of hot rows in memory.

mod cache;
mod generated;
mod mapped;
mod meter;
mod pack;
mod store;

use std::{fmt, path::Path, str::FromStr, sync::Arc};

pub use generated::Generated;
pub use meter::{Latency, TableStats};
pub use pack::{PackedLayer, pack, verify_pack};

use crate::{
    Checkpoint, Group, Weight,
    error::{Error, Result},
};

/// Where the rows of the tables are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngramMode {
    /// All in memory, locked where the system allows it.
    #[default]
    Resident,
    /// Mapped: the system keeps what it likes.
    Mmap,
    /// Hot rows in this many bytes of memory; the rest is read from disk.
    Cache(u64),
}

impl fmt::Display for EngramMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EngramMode::Resident => f.write_str("resident"),
            EngramMode::Mmap => f.write_str("mmap"),
            EngramMode::Cache(bytes) => write!(f, "cache:{bytes}"),
        }
    }
}

impl FromStr for EngramMode {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.split_once(':') {
            None if text == "resident" => Ok(EngramMode::Resident),
            None if text == "mmap" => Ok(EngramMode::Mmap),
            Some(("cache", size)) => Ok(EngramMode::Cache(size_of_text(size)?)),
            _ => {
                Err(format!("unknown place '{text}': use resident, mmap or cache:SIZE, such as cache:16GiB"))
            }
        }
    }
}

/// A size such as 500MiB; without a unit bytes.
///
/// # Errors
/// What is wanted instead.
pub fn size_of_text(s: &str) -> std::result::Result<u64, String> {
    let split = s.find(|c: char| !c.is_ascii_digit()).unwrap_or(s.len());
    let (number, unit) = s.split_at(split);
    let shift = match unit.trim() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return Err("a size such as 500MiB is needed (KiB, MiB, GiB, TiB or bytes)".into()),
    };
    let number: u64 = number.parse().map_err(|_| "a whole number and a unit are needed, such as 500MiB")?;
    number.checked_mul(1 << shift).ok_or_else(|| "more bytes than there are".into())
}

/// Rows for one step: those of `rows` in `table`, which may be the whole table or just them.
#[derive(Clone, Debug)]
pub struct Taken {
    /// Form [`crate::Form::Fp8Row32`].
    pub table: Weight,
    /// For each row that was asked for, its row in `table`.
    pub rows: Vec<u64>,
    /// Whether `table` is the checkpoint's whole table.
    pub in_place: bool,
}

/// One Engram layer's table.
pub trait EngramTable: Send + Sync {
    /// Rows.
    fn rows(&self) -> u64;
    /// Begins to bring rows that will be taken soon, and returns at once.
    fn prefetch(&self, rows: Vec<u64>);
    /// Rows for a step, in memory.
    ///
    /// # Errors
    /// A row that the table does not have, or a failed read.
    fn take(&self, rows: &[u64]) -> Result<Taken>;
    /// What it cost so far.
    fn stats(&self) -> TableStats;
}

impl Checkpoint {
    /// The tables of all Engram layers in their order. `rows` is the folder that [`pack`] wrote for this model; without
    /// one, rows are read where the checkpoint has them.
    ///
    /// # Errors
    /// A pack that is not this model's, or a table that cannot be read.
    pub fn engram_tables(&self, mode: EngramMode, rows: Option<&Path>) -> Result<Vec<Arc<dyn EngramTable>>> {
        let layers = &self.config().engram.layer_ids;
        let mut out: Vec<Arc<dyn EngramTable>> = Vec::with_capacity(layers.len());
        for &layer in layers {
            let store = match rows {
                Some(dir) => {
                    let store = pack::open(self, dir, layer)?;
                    if mode == EngramMode::Resident {
                        store.bring().map_err(Error::io(dir))?;
                    }
                    store
                }
                None => store::of_checkpoint(self, layer)?,
            };
            out.push(match mode {
                EngramMode::Cache(bytes) => {
                    Arc::new(cache::Cached::new(layer, store.on_disk(), bytes / layers.len() as u64))
                }
                _ => Arc::new(mapped::Mapped::new(layer, store, mode == EngramMode::Resident)),
            });
        }
        Ok(out)
    }

    /// Stored bytes of the Engram tables.
    pub fn engram_bytes(&self) -> u64 {
        self.group_bytes(Group::EngramTable)
    }
}

#[cfg(test)]
mod tests;
