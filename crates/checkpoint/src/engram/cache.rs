//! Hot rows in a fixed amount of memory.
//!
//! Text is Zipfian: few n-grams make most of the traffic. A row comes in cold and gains heat with every use; the hand of a
//! clock cools rows until it finds a cold one to replace. So a row that is used once goes before one that is used often,
//! whatever passes through.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    io,
    sync::{Arc, Mutex, MutexGuard, atomic::Ordering::Relaxed},
};

use super::{EngramTable, TableStats, Taken, meter::Meter, store::DiskStore};
use crate::error::{Error, Result};

/// Parts with a lock each.
const PARTS: usize = 64;
/// Uses that a row remembers.
const HOTTEST: u8 = 7;
/// Bytes of bookkeeping a row: its number twice, its place, its heat, the map's slack.
const BOOKS: usize = 32;

/// A table of which hot rows are in memory.
pub(crate) struct Cached {
    inner: Arc<Inner>,
}

struct Inner {
    store: DiskStore,
    parts: Vec<Mutex<Part>>,
    meter: Meter,
}

/// Spreads row numbers, which are close to random already.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u64(u64::from(*b)));
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0 ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    }
}

struct Part {
    places: HashMap<u64, u32, BuildHasherDefault<Spread>>,
    numbers: Vec<u64>,
    heat: Vec<u8>,
    bytes: Vec<u8>,
    hand: usize,
    capacity: usize,
}

impl Part {
    fn find(&mut self, row: u64, width: usize, out: &mut [u8]) -> bool {
        let Some(place) = self.places.get(&row).map(|p| *p as usize) else { return false };
        self.heat[place] = (self.heat[place] + 1).min(HOTTEST);
        out.copy_from_slice(&self.bytes[place * width..][..width]);
        true
    }

    fn put(&mut self, row: u64, raw: &[u8]) {
        if self.capacity == 0 || self.places.contains_key(&row) {
            return;
        }
        let place = if self.numbers.len() < self.capacity {
            self.numbers.push(row);
            self.heat.push(0);
            self.bytes.extend_from_slice(raw);
            self.numbers.len() - 1
        } else {
            while self.heat[self.hand] > 0 {
                self.heat[self.hand] -= 1;
                self.hand = (self.hand + 1) % self.capacity;
            }
            let place = self.hand;
            self.hand = (self.hand + 1) % self.capacity;
            self.places.remove(&self.numbers[place]);
            self.numbers[place] = row;
            self.bytes[place * raw.len()..][..raw.len()].copy_from_slice(raw);
            place
        };
        self.places.insert(row, place as u32);
    }
}

impl Cached {
    pub(crate) fn new(layer: usize, store: DiskStore, bytes: u64) -> Self {
        store.0.expect_random();
        let rows = (bytes / (store.0.width() + BOOKS) as u64).min(store.0.rows as u64);
        let part = |k: usize| {
            let capacity =
                (rows as usize / PARTS + usize::from(k < rows as usize % PARTS)).min(u32::MAX as usize);
            let (numbers, heat, bytes) = (Vec::new(), Vec::new(), Vec::new());
            Mutex::new(Part { places: HashMap::default(), numbers, heat, bytes, hand: 0, capacity })
        };
        let parts = (0..PARTS).map(part).collect();
        Self { inner: Arc::new(Inner { store, parts, meter: Meter::new(layer, "cache") }) }
    }
}

impl Inner {
    fn part(&self, row: u64) -> MutexGuard<'_, Part> {
        let part = row.wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 58;
        self.parts[part as usize].lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Reads rows from the file and keeps them; each goes to its place in `out`.
    fn read(&self, wanted: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        let bytes = wanted.len() * self.store.0.width();
        let keep = |row: u64, out: &[u8]| self.part(row).put(row, out);
        let mut waiting: Vec<_> = wanted
            .iter_mut()
            .filter_map(|(row, out)| match self.store.read_now(*row, out) {
                true => {
                    keep(*row, out);
                    None
                }
                false => Some((*row, out)),
            })
            .collect();
        // What is on disk is announced together, so that the disk works on it together; waiting for one after the other would
        // take as long as all of them.
        let rows: Vec<u64> = waiting.iter().map(|(row, _)| *row).collect();
        self.store.0.announce(&rows);
        for (row, out) in &mut waiting {
            self.store.read(*row, out)?;
            keep(*row, out);
        }
        self.meter.bytes.fetch_add(bytes as u64, Relaxed);
        Ok(())
    }
}

impl EngramTable for Cached {
    fn rows(&self) -> u64 {
        self.inner.store.0.rows as u64
    }

    fn prefetch(&self, mut rows: Vec<u64>) {
        if self.inner.store.0.check(&rows).is_err() {
            return; // what is asked for ahead is checked when it is taken
        }
        rows.sort_unstable();
        rows.dedup();
        let inner = self.inner.clone();
        self.inner.meter.ahead(rows.len(), move || {
            let width = inner.store.0.width();
            rows.retain(|row| !inner.part(*row).places.contains_key(row));
            // More than half of the room would push out what is asked for first.
            let room: usize = inner.parts.iter().map(|p| p.lock().map_or(0, |p| p.capacity)).sum();
            rows.truncate(room / 2);
            inner.meter.prefetched.fetch_add(rows.len() as u64, Relaxed);
            for some in rows.chunks(1024) {
                let mut raw = vec![0; some.len() * width];
                let mut wanted: Vec<_> = some.iter().copied().zip(raw.chunks_exact_mut(width)).collect();
                if inner.read(&mut wanted).is_err() {
                    return; // the step that takes the row reports it
                }
            }
        });
    }

    fn take(&self, rows: &[u64]) -> Result<Taken> {
        let inner = &*self.inner;
        let store = &inner.store.0;
        store.check(rows)?;
        let width = store.width();
        let mut raw = vec![0; rows.len() * width];
        let read = inner.meter.step(rows.len(), || {
            let places = rows.iter().copied().zip(raw.chunks_exact_mut(width));
            let mut missing: Vec<_> = places
                .filter_map(|(row, out)| (!inner.part(row).find(row, width, out)).then_some((row, out)))
                .collect();
            let read = inner.read(&mut missing);
            (read, missing.len() as u64)
        });
        read.map_err(Error::io(store.name.as_ref()))?;
        Ok(Taken { table: store.weight(&raw), rows: (0..rows.len() as u64).collect(), in_place: false })
    }

    fn stats(&self) -> TableStats {
        self.inner.meter.stats()
    }
}
