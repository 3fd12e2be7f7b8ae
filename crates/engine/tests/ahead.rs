//! Engram rows of a prompt are on their way before its first step, and nothing waits for a resident one.

mod common;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
};

use checkpoint::{
    Checkpoint, Result,
    engram::{EngramMode, EngramTable, TableStats, Taken},
    generate,
};
use common::*;
use cpu::Cpu;
use engine::{Lm, Residency, SessionOptions};
use model::Model;
use ops::Mode;
use text::{EngramMap, Tokenizer};

#[derive(Debug)]
enum Event {
    Ahead(Vec<u64>),
    Take(Vec<u64>),
}

/// A table that notes what is asked of it.
struct Watched {
    table: Arc<dyn EngramTable>,
    number: usize,
    log: Arc<Mutex<Vec<(usize, Event)>>>,
}

impl Watched {
    fn note(&self, event: Event) {
        self.log.lock().unwrap().push((self.number, event));
    }
}

impl EngramTable for Watched {
    fn rows(&self) -> u64 {
        self.table.rows()
    }

    fn prefetch(&self, rows: Vec<u64>) {
        self.note(Event::Ahead(rows.clone()));
        self.table.prefetch(rows);
    }

    fn take(&self, rows: &[u64]) -> Result<Taken> {
        self.note(Event::Take(rows.to_vec()));
        self.table.take(rows)
    }

    fn stats(&self) -> TableStats {
        self.table.stats()
    }
}

#[test]
fn the_rows_of_a_prompt_are_asked_for_before_its_first_step() {
    let ckpt = Checkpoint::open(&generate::cached("nano").unwrap()).unwrap();
    let tokenizer = Tokenizer::from_bytes(&ckpt.file("tokenizer.json").unwrap(), "tokenizer.json").unwrap();
    let (c, log) = (ckpt.config().clone(), Arc::new(Mutex::new(Vec::new())));
    let map = EngramMap::checked(&tokenizer, c.engram.compressed_vocab_size).unwrap();
    let mut model = Model::load(Cpu::new(Mode::Native, Some(1), None).unwrap(), &ckpt, map.classes).unwrap();
    let tables = ckpt.engram_tables(EngramMode::Mmap, None).unwrap().into_iter().enumerate();
    let watched = tables.map(|(number, table)| -> Arc<dyn EngramTable> {
        Arc::new(Watched { table, number, log: log.clone() })
    });
    model.set_engram(watched.collect());
    let lm: Arc<dyn Lm> = Arc::new(model);
    // Two steps of a prefill, then a decoded token, whose rows nobody knows ahead.
    let ids: Vec<u32> = (0..1000).map(|i| 3 + (i * i) % (c.vocab_size as u32 - 3)).collect();
    let mut session = lm.open(SessionOptions::new(ids.len() + 1)).unwrap();
    feed(&mut *session, &ids);
    let events = std::mem::take(&mut *log.lock().unwrap());
    let count = c.engram.layer_ids.len();
    for table in 0..count {
        let Some((_, Event::Ahead(asked))) = events[..count].iter().find(|(number, _)| *number == table)
        else {
            panic!("table {table}: its rows were not asked for first: {:?}", &events[..count])
        };
        assert_eq!(asked.len(), ids.len() * c.engram_columns(), "table {table}");
        let asked: HashSet<u64> = asked.iter().copied().collect();
        let mut steps = 0;
        for (_, event) in events[count..].iter().filter(|(number, _)| *number == table) {
            let Event::Take(rows) = event else { panic!("table {table}: rows asked for again") };
            assert!(
                rows.iter().all(|row| asked.contains(row)),
                "table {table}: a row that was not asked for"
            );
            steps += 1;
        }
        assert!(steps > 0, "table {table}");
    }
    feed(&mut *session, &[5]);
    assert!(log.lock().unwrap().iter().all(|(_, event)| matches!(event, Event::Take(_))));
}

#[test]
fn a_prefill_of_4096_tokens_waits_for_no_resident_row() {
    let ckpt = Checkpoint::open(&root().join("models/demo")).unwrap();
    let residency = Residency { engram: EngramMode::Resident, prefault: true, ..Residency::default() };
    residency.page_in(&ckpt, 1, &|_, _| {}).unwrap();
    let options =
        engine::LoadOptions { mode: Mode::Native, threads: Some(1), residency, ..Default::default() };
    let loaded = engine::Loaded::new(&ckpt, options).unwrap();
    let ids = random_ids(&loaded, 4096, 11);
    let mut session = open(&loaded, SessionOptions::new(ids.len()));
    feed(&mut *session, &ids);
    for s in loaded.lm.engram() {
        assert_eq!((s.misses, s.page_faults, s.hits), (0, 0, s.rows), "{s:?}");
        assert_eq!(s.prefetched, (ids.len() * ckpt.config().engram_columns()) as u64, "{s:?}");
    }
}
