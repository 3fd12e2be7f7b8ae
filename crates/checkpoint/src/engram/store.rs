//! Where the bytes of a table's rows lie.

use std::{fs::File, io, os::unix::fs::FileExt, path::PathBuf, sync::Arc};

use crate::{
    Bytes, Checkpoint, Form, Weight,
    error::{Error, Result},
};

/// A table's rows, mapped, and where they are in files.
#[derive(Clone)]
pub(crate) struct Store {
    pub name: String,
    pub rows: usize,
    /// Codes of a row.
    pub dim: usize,
    /// Scales of a row.
    pub groups: usize,
    pub bytes: Stored,
    /// The same in files: none inside the program.
    pub file: Option<Filed>,
}

/// Mapped rows.
#[derive(Clone)]
pub(crate) enum Stored {
    /// Codes and scales apart, as a checkpoint has them.
    Split { codes: Bytes, scales: Bytes },
    /// Codes and scales of a row together.
    Packed(Bytes),
}

/// Places in files.
#[derive(Clone)]
pub(crate) enum Filed {
    Split { codes: (Arc<File>, u64), scales: (Arc<File>, u64) },
    Packed(Arc<File>, u64),
}

impl Store {
    /// Bytes of a row.
    pub(crate) fn width(&self) -> usize {
        self.dim + self.groups
    }

    /// Refuses rows that are not there.
    pub(crate) fn check(&self, rows: &[u64]) -> Result<()> {
        match rows.iter().find(|r| **r >= self.rows as u64) {
            None => Ok(()),
            Some(row) => {
                let what = format!("has {} rows, row {row} was asked for", self.rows);
                Err(Error::invalid(&self.name, what))
            }
        }
    }

    /// The places of a row in the mapped bytes.
    pub(crate) fn places(&self, row: usize) -> [(&Bytes, usize, usize); 2] {
        match &self.bytes {
            Stored::Split { codes, scales } => {
                [(codes, row * self.dim, self.dim), (scales, row * self.groups, self.groups)]
            }
            Stored::Packed(bytes) => {
                let at = row * self.width();
                [(bytes, at, self.dim), (bytes, at + self.dim, self.groups)]
            }
        }
    }

    /// Tells the system which of these rows it has to bring from disk, so that it works on all of them together; how many
    /// they are, unless the system does not tell and all are announced.
    pub(crate) fn announce(&self, rows: &[u64]) -> Option<u64> {
        let mut absent = Some(0);
        for row in rows {
            let places = self.places(*row as usize);
            let here = places.map(|(bytes, at, len)| bytes.is_in_memory(at, len));
            for ((bytes, at, len), _) in places.into_iter().zip(here).filter(|(_, here)| *here != Some(true))
            {
                bytes.will_need(at, len);
            }
            absent = match here {
                [Some(a), Some(b)] => absent.map(|n| n + u64::from(!(a && b))),
                _ => None,
            };
        }
        absent
    }

    /// Reads a byte of every page that a row lies on.
    pub(crate) fn touch(&self, row: u64) {
        for (bytes, at, len) in self.places(row as usize) {
            std::hint::black_box(bytes[at] ^ bytes[at + len - 1]);
        }
    }

    /// Copies a row: its codes, then its scales.
    pub(crate) fn copy(&self, row: usize, out: &mut [u8]) {
        let (codes, scales) = out.split_at_mut(self.dim);
        let [(a, at, n), (b, bt, m)] = self.places(row);
        codes.copy_from_slice(&a[at..at + n]);
        scales.copy_from_slice(&b[bt..bt + m]);
    }

    /// A weight of the rows in `raw`, one after the other.
    pub(crate) fn weight(&self, raw: &[u8]) -> Weight {
        let n = raw.len() / self.width();
        let (mut codes, mut scales) = (Vec::with_capacity(n * self.dim), Vec::with_capacity(n * self.groups));
        for row in raw.chunks_exact(self.width()) {
            codes.extend_from_slice(&row[..self.dim]);
            scales.extend_from_slice(&row[self.dim..]);
        }
        let (codes, scales) = (Bytes::copied(&codes), Bytes::copied(&scales));
        Weight::new(&self.name, Form::Fp8Row32, n, self.dim, codes, scales)
            .expect("sizes are those of whole rows")
    }

    /// The whole table as a weight, where codes and scales lie apart.
    pub(crate) fn whole(&self) -> Option<Weight> {
        let Stored::Split { codes, scales } = &self.bytes else { return None };
        let (codes, scales) = (codes.clone(), scales.clone());
        Weight::new(&self.name, Form::Fp8Row32, self.rows, self.dim, codes, scales).ok()
    }

    fn mappings(&self) -> Vec<&Bytes> {
        match &self.bytes {
            Stored::Split { codes, scales } => vec![codes, scales],
            Stored::Packed(rows) => vec![rows],
        }
    }

    /// Tells the system that rows are all over the table: reading around them would only fill memory.
    pub(crate) fn expect_random(&self) {
        self.mappings().into_iter().for_each(Bytes::expect_random);
    }

    /// Brings all rows into memory.
    pub(crate) fn bring(&self) -> io::Result<()> {
        use rayon::prelude::*;
        const STEP: usize = 8 << 20;
        self.mappings().into_iter().try_for_each(|bytes| {
            let steps = (0..bytes.len()).into_par_iter().step_by(STEP);
            steps.try_for_each(|at| {
                let len = STEP.min(bytes.len() - at);
                bytes.will_need(at, len);
                bytes.populate(at, len)
            })
        })
    }

    pub(crate) fn on_disk(self) -> DiskStore {
        DiskStore(self)
    }
}

/// A table whose rows are read from its file and are no part of the process's memory.
pub(crate) struct DiskStore(pub Store);

impl DiskStore {
    /// Reads a row if that does not wait for the disk; whether it did.
    pub(crate) fn read_now(&self, row: u64, out: &mut [u8]) -> bool {
        let store = &self.0;
        let (dim, groups, width) = (store.dim as u64, store.groups as u64, store.width() as u64);
        match &store.file {
            None => {
                store.copy(row as usize, out);
                true
            }
            Some(Filed::Packed(file, at)) => now(file, out, at + row * width),
            Some(Filed::Split { codes, scales }) => {
                let (a, b) = out.split_at_mut(store.dim);
                now(&codes.0, a, codes.1 + row * dim) && now(&scales.0, b, scales.1 + row * groups)
            }
        }
    }

    /// Reads a row: its codes, then its scales.
    pub(crate) fn read(&self, row: u64, out: &mut [u8]) -> io::Result<()> {
        let store = &self.0;
        let (dim, groups, width) = (store.dim as u64, store.groups as u64, store.width() as u64);
        match &store.file {
            None => {
                store.copy(row as usize, out);
                Ok(())
            }
            Some(Filed::Packed(file, at)) => file.read_exact_at(out, at + row * width),
            Some(Filed::Split { codes, scales }) => {
                let (a, b) = out.split_at_mut(store.dim);
                codes.0.read_exact_at(a, codes.1 + row * dim)?;
                scales.0.read_exact_at(b, scales.1 + row * groups)
            }
        }
    }
}

/// Reads `out` at `at` if the system has all of it in memory; whether it had.
#[cfg(target_os = "linux")]
fn now(file: &File, out: &mut [u8], at: u64) -> bool {
    use std::os::fd::AsRawFd;
    let Ok(at) = libc::off_t::try_from(at) else { return false };
    let part = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() };
    // SAFETY: the descriptor is open and the one part is `out`, which nothing else sees meanwhile.
    let n = unsafe { libc::preadv2(file.as_raw_fd(), &part, 1, at, libc::RWF_NOWAIT) };
    usize::try_from(n) == Ok(out.len())
}

/// Other systems do not say: every read may wait.
#[cfg(not(target_os = "linux"))]
fn now(_: &File, _: &mut [u8], _: u64) -> bool {
    false
}

/// The table of a layer as the checkpoint has it.
pub(crate) fn of_checkpoint(ckpt: &Checkpoint, layer: usize) -> Result<Store> {
    let name = format!("layers.{layer}.engram.embed");
    let weight = ckpt.weight(&name)?;
    let (rows, dim) = (weight.rows(), weight.cols());
    let at = |tensor: &str| -> Result<(Bytes, Option<(PathBuf, u64)>)> {
        let tensor = format!("{name}.{tensor}");
        let (path, offset) = ckpt.place(&tensor)?;
        Ok((ckpt.tensor(&tensor)?, path.map(|p| (p, offset))))
    };
    let ((codes, a), (scales, b)) = (at("weight")?, at("scale")?);
    let open = |(path, at): (PathBuf, u64)| -> Result<(Arc<File>, u64)> {
        Ok((Arc::new(File::open(&path).map_err(Error::io(&path))?), at))
    };
    let file = match (a, b) {
        (Some(a), Some(b)) => Some(Filed::Split { codes: open(a)?, scales: open(b)? }),
        _ => None,
    };
    Ok(Store { name, rows, dim, groups: dim.div_ceil(32), bytes: Stored::Split { codes, scales }, file })
}
