//! What is brought into memory before the first request, and where Engram rows are read from.

use std::path::PathBuf;

use checkpoint::{Checkpoint, PageIn, PagedIn, engram::EngramMode};

use crate::{Error, Result, memory};

/// How a model is kept in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// Where the rows of the Engram tables are kept.
    pub engram: EngramMode,
    /// Row files of this model's tables, made by [`checkpoint::engram::pack`]; else the checkpoint's own tables.
    pub engram_rows: Option<PathBuf>,
    /// Bring all weights into memory at load instead of at first use.
    pub prefault: bool,
    /// Lock what is brought, so that it stays.
    pub lock: bool,
}

impl Residency {
    /// What [`Residency::page_in`] brings of `ckpt`.
    pub fn wanted(&self, threads: usize) -> PageIn {
        PageIn {
            weights: self.prefault || self.lock,
            engram: self.engram == EngramMode::Resident && self.engram_rows.is_none(),
            lock: self.lock,
            threads,
        }
    }

    /// Brings weights and resident tables into memory, in the order of the files. `progress` hears bytes done and bytes in
    /// all.
    ///
    /// # Errors
    /// [`Error::Resident`] where they do not fit, found before anything is read; a file that cannot be read.
    pub fn page_in(
        &self,
        ckpt: &Checkpoint,
        threads: usize,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<PagedIn> {
        let wanted = self.wanted(threads);
        let need = ckpt.page_in_bytes(wanted);
        match memory::available() {
            Some(free) if need > free => Err(Error::Resident { need, free }),
            _ => Ok(ckpt.page_in(wanted, progress)?),
        }
    }
}
