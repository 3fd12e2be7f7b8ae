//! A table in mapped memory: paged in and locked, or as the system likes.

use std::sync::atomic::Ordering::Relaxed;

use super::{EngramTable, TableStats, Taken, meter::Meter, store::Store};
use crate::{Weight, error::Result};

/// A mapped table.
pub(crate) struct Mapped {
    store: Store,
    whole: Option<Weight>,
    resident: bool,
    meter: Meter,
}

impl Mapped {
    pub(crate) fn new(layer: usize, store: Store, resident: bool) -> Self {
        store.expect_random();
        let meter = Meter::new(layer, if resident { "resident" } else { "mmap" });
        Self { whole: store.whole(), store, resident, meter }
    }
}

impl EngramTable for Mapped {
    fn rows(&self) -> u64 {
        self.store.rows as u64
    }

    fn prefetch(&self, rows: Vec<u64>) {
        if self.resident || self.store.check(&rows).is_err() {
            return; // what is asked for ahead is checked when it is taken
        }
        self.meter.prefetched.fetch_add(rows.len() as u64, Relaxed);
        let store = self.store.clone();
        std::thread::spawn(move || {
            store.announce(&rows);
        });
    }

    fn take(&self, rows: &[u64]) -> Result<Taken> {
        self.store.check(rows)?;
        Ok(self.meter.step(rows.len(), || {
            if !self.resident {
                // All at once, so that the disk works on them together.
                self.store.announce(rows);
            }
            let taken = match &self.whole {
                Some(table) => {
                    // The pages are brought here, where it is counted, and not in the operator.
                    for row in rows {
                        for (bytes, at, len) in self.store.places(*row as usize) {
                            std::hint::black_box(bytes[at] ^ bytes[at + len - 1]);
                        }
                    }
                    Taken { table: table.clone(), rows: rows.to_vec(), in_place: true }
                }
                None => {
                    let width = self.store.width();
                    let mut raw = vec![0; rows.len() * width];
                    for (row, out) in rows.iter().zip(raw.chunks_exact_mut(width)) {
                        self.store.copy(*row as usize, out);
                    }
                    Taken {
                        table: self.store.weight(&raw),
                        rows: (0..rows.len() as u64).collect(),
                        in_place: false,
                    }
                }
            };
            (taken, None)
        }))
    }

    fn stats(&self) -> TableStats {
        self.meter.stats()
    }
}
