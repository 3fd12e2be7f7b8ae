//! Generated tables, for measurements on a machine that has no released one.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    EngramMode, EngramTable,
    cache::Cached,
    mapped::Mapped,
    store::{Filed, Store, Stored},
};
use crate::{
    error::{Error, Result},
    files,
};

/// Codes of a row, as released.
const DIM: usize = 256;
/// Scales of a row.
const GROUPS: usize = 8;

/// A table of random codes in files of its own: codes and scales apart, and the same rows packed.
pub struct Generated {
    dir: PathBuf,
    rows: usize,
}

impl Generated {
    /// Writes a table of `rows` rows into `dir`: 528 bytes a row in all.
    ///
    /// # Errors
    /// A failed write.
    pub fn write(dir: &Path, rows: usize) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
        let create = |name: &str| File::create(dir.join(name)).map_err(Error::io(dir));
        let (mut codes, mut scales, mut packed) = (create("codes")?, create("scales")?, create("rows")?);
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        let per = 1 << 14;
        for first in (0..rows).step_by(per) {
            let n = per.min(rows - first);
            let (mut a, mut b) = (vec![0; n * DIM], vec![0; n * GROUPS]);
            for word in a.chunks_exact_mut(8) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                // No code is the NaN, whose low seven bits are all set.
                word.copy_from_slice(&(state & 0xBFBF_BFBF_BFBF_BFBF).to_le_bytes());
            }
            b.iter_mut().enumerate().for_each(|(k, s)| *s = 118 + (k % 7) as u8);
            let mut c = Vec::with_capacity(n * (DIM + GROUPS));
            for (codes, scales) in a.chunks_exact(DIM).zip(b.chunks_exact(GROUPS)) {
                c.extend_from_slice(codes);
                c.extend_from_slice(scales);
            }
            let write =
                codes.write_all(&a).and_then(|()| scales.write_all(&b)).and_then(|()| packed.write_all(&c));
            write.map_err(Error::io(dir))?;
        }
        for file in [&codes, &scales, &packed] {
            file.sync_all().map_err(Error::io(dir))?;
        }
        Ok(Self { dir: dir.into(), rows })
    }

    /// The files that a table of this layout is read from.
    pub fn files(&self, packed: bool) -> Vec<PathBuf> {
        let names: &[&str] = if packed { &["rows"] } else { &["codes", "scales"] };
        names.iter().map(|n| self.dir.join(n)).collect()
    }

    fn store(&self, packed: bool) -> Result<Store> {
        let paths = self.files(packed);
        let maps = paths.iter().map(|p| files::map(p)).collect::<Result<Vec<_>>>()?;
        let handles: Vec<Arc<File>> =
            paths.iter().map(|p| Ok(Arc::new(files::open(p)?))).collect::<Result<_>>()?;
        let (bytes, file) = match (maps.as_slice(), handles.as_slice()) {
            ([codes, scales], [a, b]) => (
                Stored::Split { codes: codes.clone(), scales: scales.clone() },
                Filed::Split { codes: (a.clone(), 0), scales: (b.clone(), 0) },
            ),
            _ => (Stored::Packed(maps[0].clone()), Filed::Packed(handles[0].clone(), 0)),
        };
        let name = self.dir.display().to_string();
        Ok(Store { name, rows: self.rows, dim: DIM, groups: GROUPS, bytes, file: Some(file) })
    }

    /// The table kept as `mode` says.
    ///
    /// # Errors
    /// A file that cannot be mapped or, for a resident table, read.
    pub fn table(&self, mode: EngramMode, packed: bool) -> Result<Arc<dyn EngramTable>> {
        let store = self.store(packed)?;
        if mode == EngramMode::Resident {
            store.bring().map_err(Error::io(&self.dir))?;
        }
        Ok(match mode {
            EngramMode::Cache(bytes) => Arc::new(Cached::new(0, store.on_disk(), bytes)),
            _ => Arc::new(Mapped::new(0, store, mode == EngramMode::Resident)),
        })
    }

    /// Copies rows out of the mapped files and nothing else: what any table can be compared with. Gives the exclusive or of
    /// all bytes.
    ///
    /// # Errors
    /// A file that cannot be mapped.
    pub fn plain(&self, packed: bool) -> Result<impl FnMut(&[u64]) -> u8 + use<>> {
        let store = self.store(packed)?;
        let mut row = vec![0; store.width()];
        Ok(move |rows: &[u64]| {
            let mut sum = 0;
            for r in rows {
                store.copy(*r as usize, &mut row);
                sum ^= row[0] ^ row[DIM];
            }
            sum
        })
    }
}
