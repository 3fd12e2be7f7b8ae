use super::*;
use crate::generate;

fn nano() -> Checkpoint {
    Checkpoint::open(&generate::cached("nano").unwrap()).unwrap()
}

/// Row numbers of a Zipf-like sequence.
fn some(rows: u64, n: usize, seed: u64) -> Vec<u64> {
    let mut x = seed | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    (0..n).map(|_| ((next() % rows) * (next() % rows)) / rows).collect()
}

fn values(taken: &Taken) -> Vec<f32> {
    let mut out = vec![0.0; taken.table.cols()];
    let decode = |row: &u64| {
        taken.table.decode_row(*row as usize, &mut out);
        out.clone()
    };
    taken.rows.iter().flat_map(decode).collect()
}

#[test]
fn every_place_gives_the_same_rows() {
    let ckpt = nano();
    let dir = tempfile::tempdir().unwrap();
    let packed = pack(&ckpt, dir.path(), &|_, _| {}).unwrap();
    assert_eq!(packed.len(), ckpt.config().engram.layer_ids.len());
    let own = ckpt.engram_tables(EngramMode::Mmap, None).unwrap();
    for mode in [EngramMode::Resident, EngramMode::Mmap, EngramMode::Cache(20_000), EngramMode::Cache(0)] {
        for rows in [None, Some(dir.path())] {
            let tables = ckpt.engram_tables(mode, rows).unwrap();
            for (table, own) in tables.iter().zip(&own) {
                assert_eq!(table.rows(), own.rows());
                for step in 0..40 {
                    let wanted = some(own.rows(), 1 + step * 7, 77 + step as u64);
                    if step % 5 == 0 {
                        table.prefetch(wanted.clone());
                    }
                    let (a, b) = (table.take(&wanted).unwrap(), own.take(&wanted).unwrap());
                    assert_eq!(values(&a), values(&b), "{mode} packed {} step {step}", rows.is_some());
                }
                let stats = table.stats();
                assert_eq!((stats.steps, stats.hits + stats.misses), (40, stats.rows));
                if mode == EngramMode::Cache(0) {
                    assert_eq!(stats.hits, 0);
                }
            }
        }
    }
}

#[test]
fn a_row_that_is_not_there_is_an_error() {
    for mode in [EngramMode::Resident, EngramMode::Mmap, EngramMode::Cache(1 << 20)] {
        let table = nano().engram_tables(mode, None).unwrap().remove(0);
        table.prefetch(vec![table.rows()]);
        let e = table.take(&[0, table.rows()]).unwrap_err();
        assert!(e.to_string().contains("rows, row"), "{e}");
    }
}

/// Rows that are used again and again stay while others pass through once.
#[test]
fn the_cache_keeps_what_is_hot() {
    let ckpt = nano();
    let table = ckpt.engram_tables(EngramMode::Cache(64 * 1024), None).unwrap().remove(0);
    let hot: Vec<u64> = (0..16).collect();
    let per_pass = table.rows() / 20;
    for pass in 0..20 {
        table.take(&hot).unwrap();
        table.take(&hot).unwrap();
        table.take(&(pass * per_pass..(pass + 1) * per_pass).collect::<Vec<_>>()).unwrap();
    }
    let before = table.stats().misses;
    table.take(&hot).unwrap();
    assert_eq!(table.stats().misses, before);
}

#[test]
fn a_pack_is_checked() {
    let ckpt = nano();
    let dir = tempfile::tempdir().unwrap();
    let packed = pack(&ckpt, dir.path(), &|_, _| {}).unwrap();
    let path = dir.path().join(&packed[0].file);
    let whole = std::fs::read(&path).unwrap();
    // A wrong byte anywhere is found by the hash, one in a sampled row at once.
    let mut bad = whole.clone();
    *bad.last_mut().unwrap() ^= 1;
    std::fs::write(&path, &bad).unwrap();
    let e = verify_pack(dir.path(), &mut |_| {}).unwrap_err();
    assert!(e.to_string().contains("SHA-256") && e.exit_code() == 4, "{e}");
    let e = ckpt.engram_tables(EngramMode::Mmap, Some(dir.path())).err().unwrap();
    assert!(e.to_string().contains("another model's"), "{e}");
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    assert_eq!(ckpt.engram_tables(EngramMode::Mmap, Some(dir.path())).err().unwrap().exit_code(), 4);
    std::fs::remove_file(&path).unwrap();
    assert!(ckpt.engram_tables(EngramMode::Mmap, Some(dir.path())).is_err());
}

#[test]
fn places_are_read_as_they_are_written() {
    for (text, mode) in [
        ("resident", EngramMode::Resident),
        ("mmap", EngramMode::Mmap),
        ("cache:2GiB", EngramMode::Cache(2 << 30)),
    ] {
        assert_eq!(text.parse(), Ok(mode));
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
    for bad in ["", "ram", "cache", "cache:", "cache:2GB", "cache:99999999TiB"] {
        assert!(bad.parse::<EngramMode>().is_err(), "{bad}");
    }
}
