//! A table in mapped memory: paged in and locked, or as the system likes.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::{
    EngramTable, TableStats, Taken,
    meter::{Meter, page_faults},
    store::Store,
};
use crate::{Weight, error::Result};

/// Rows between two looks at the page faults.
const BLOCK: usize = 64;
/// Blocks without a row on disk after which rows are no longer looked up one by one.
const CALM: u32 = 4;

/// A mapped table.
pub(crate) struct Mapped {
    store: Store,
    whole: Option<Weight>,
    resident: bool,
    pace: Pace,
    meter: Meter,
}

/// Whether rows are looked up in the system's memory before they are read. A row on disk that was announced with the
/// others costs a wait for all of them, one that was not a wait of its own; looking up costs more than reading where
/// nothing is on disk.
#[derive(Default)]
struct Pace(AtomicU32);

impl Pace {
    fn is_calm(&self) -> bool {
        self.0.load(Relaxed) >= CALM
    }

    /// Hears how many rows of a block were on disk.
    fn hear(&self, absent: u64) {
        let calm = if absent > 0 { 0 } else { self.0.load(Relaxed).saturating_add(1) };
        self.0.store(calm, Relaxed);
    }
}

impl Mapped {
    pub(crate) fn new(layer: usize, store: Store, resident: bool) -> Self {
        store.expect_random();
        let meter = Meter::new(layer, if resident { "resident" } else { "mmap" });
        Self { whole: store.whole(), store, resident, pace: Pace::default(), meter }
    }

    /// Calls `read` for every row, rows on disk being announced before; how many were there.
    fn each(&self, rows: &[u64], mut read: impl FnMut(u64)) -> u64 {
        if self.resident {
            let before = page_faults();
            rows.iter().for_each(|row| read(*row));
            return page_faults().saturating_sub(before).min(rows.len() as u64);
        }
        let mut absent = 0;
        let mut rest = rows;
        while !rest.is_empty() {
            let told = if self.pace.is_calm() { None } else { Some(self.store.announce(rest)) };
            let (block, more) =
                rest.split_at(if told.is_some() { rest.len() } else { BLOCK.min(rest.len()) });
            let before = page_faults();
            block.iter().for_each(|row| read(*row));
            let faults = page_faults().saturating_sub(before).min(block.len() as u64);
            let away = match told {
                Some(Some(away)) => away,
                // Nobody knows what was on disk: rows are announced for ever.
                Some(None) => return absent + faults,
                None => faults,
            };
            self.pace.hear(away);
            (absent, rest) = (absent + away, more);
        }
        absent
    }
}

impl EngramTable for Mapped {
    fn rows(&self) -> u64 {
        self.store.rows as u64
    }

    fn prefetch(&self, rows: Vec<u64>) {
        if self.store.check(&rows).is_err() {
            return; // what is asked for ahead is checked when it is taken
        }
        self.meter.prefetched.fetch_add(rows.len() as u64, Relaxed);
        let (store, resident) = (self.store.clone(), self.resident);
        self.meter.ahead(rows.len(), move || {
            if resident {
                // What was not locked and has been pushed out comes back here, not in a step.
                rows.iter().for_each(|row| store.touch(*row));
            } else {
                store.announce(&rows);
            }
        });
    }

    fn take(&self, rows: &[u64]) -> Result<Taken> {
        self.store.check(rows)?;
        Ok(self.meter.step(rows.len(), || match &self.whole {
            Some(table) => {
                // The pages are brought here, where it is counted, and not in the operator.
                let absent = self.each(rows, |row| self.store.touch(row));
                (Taken { table: table.clone(), rows: rows.to_vec(), in_place: true }, absent)
            }
            None => {
                let width = self.store.width();
                let mut raw = vec![0; rows.len() * width];
                let mut out = raw.chunks_exact_mut(width);
                let absent = self.each(rows, |row| {
                    if let Some(out) = out.next() {
                        self.store.copy(row as usize, out);
                    }
                });
                let rows = (0..rows.len() as u64).collect();
                (Taken { table: self.store.weight(&raw), rows, in_place: false }, absent)
            }
        }))
    }

    fn stats(&self) -> TableStats {
        self.meter.stats()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_looked_up_until_none_is_on_disk_for_a_while() {
        let pace = Pace::default();
        for _ in 0..CALM {
            assert!(!pace.is_calm());
            pace.hear(0);
        }
        assert!(pace.is_calm());
        pace.hear(0);
        assert!(pace.is_calm());
        pace.hear(1);
        assert!(!pace.is_calm());
    }
}
