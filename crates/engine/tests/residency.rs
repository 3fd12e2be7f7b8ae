//! Where Engram rows are kept changes no bit.

mod common;

use std::path::Path;

use checkpoint::{
    Checkpoint,
    engram::{EngramMode, pack},
    generate,
};
use common::*;
use engine::{LoadOptions, Loaded, Residency, SessionOptions};
use ops::Mode;

fn kept(name: &str, engram: EngramMode, rows: Option<&Path>) -> Loaded {
    let ckpt = Checkpoint::open(&generate::cached(name).unwrap()).unwrap();
    let residency = Residency { engram, engram_rows: rows.map(Into::into), ..Residency::default() };
    let options = LoadOptions { mode: Mode::Native, threads: Some(1), residency, ..LoadOptions::default() };
    options.residency.page_in(&ckpt, 1, &|_, _| {}).unwrap();
    Loaded::new(&ckpt, options).unwrap()
}

#[test]
fn every_place_of_the_tables_gives_the_same_logits() {
    for name in ["nano", "micro"] {
        let ckpt = Checkpoint::open(&generate::cached(name).unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        pack(&ckpt, dir.path(), &|_, _| {}).unwrap();
        let own = load(name, Mode::Native);
        let ids = random_ids(&own, 120, 5);
        let logits = |loaded: &Loaded| {
            let mut session = open(loaded, SessionOptions::new(ids.len()));
            feed(&mut *session, &ids[..100]);
            let mut all = bits(session.logits());
            for id in &ids[100..] {
                feed(&mut *session, &[*id]);
                all.extend(bits(session.logits()));
            }
            all
        };
        let want = logits(&own);
        for engram in
            [EngramMode::Resident, EngramMode::Mmap, EngramMode::Cache(1 << 14), EngramMode::Cache(0)]
        {
            for rows in [None, Some(dir.path())] {
                let loaded = kept(name, engram, rows);
                assert!(logits(&loaded) == want, "{name}: {engram}, packed {}", rows.is_some());
                let stats = loaded.lm.engram();
                assert_eq!(stats.len(), ckpt.config().engram.layer_ids.len());
                for s in stats {
                    // A KV source publishes entries of rows that the layer itself then leaves out: a token takes rows twice at most.
                    let most = (2 * ids.len() * ckpt.config().engram_columns()) as u64;
                    assert!(s.rows > 0 && s.rows <= most && s.hits + s.misses == s.rows, "{s:?}");
                    assert_eq!(s.place, engram.to_string().split(':').next().unwrap());
                }
            }
        }
    }
}
