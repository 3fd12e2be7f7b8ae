//! The disk tier: what is kept survives a restart, and nothing wrong is ever used.

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use common::*;
use engine::{CacheOptions, Loaded, Miss, Prefill, PrefixCache, Reuse, SessionOptions};
use ops::Mode;

fn on_disk(dir: &Path) -> CacheOptions {
    CacheOptions { dir: Some(dir.to_owned()), ..CacheOptions::default() }
}

fn open_cache(loaded: &Loaded, options: &CacheOptions) -> Arc<PrefixCache> {
    Arc::new(PrefixCache::open(options, &*loaded.lm, Prefill::Full).unwrap())
}

/// Logits after `ids` and what was reused; the state is kept afterwards.
fn take(loaded: &Loaded, cache: &Arc<PrefixCache>, ids: &[u32]) -> (Vec<u32>, Reuse) {
    let options = SessionOptions { cache: Some(cache.clone()), ..SessionOptions::new(512) };
    let mut session = open(loaded, options);
    let at = session.rewind(ids).unwrap();
    feed(&mut *session, &ids[at..]);
    session.mark().unwrap();
    (bits(session.logits()), session.reuse())
}

/// Texts that share beginnings: of one page and more, within a page, of none.
fn texts(loaded: &Loaded) -> Vec<Vec<u32>> {
    let a = random_ids(loaded, 200, 1);
    let tail = |n: usize, seed| random_ids(loaded, n, seed);
    vec![
        a[..70].to_vec(),
        a.clone(),
        [&a[..130], &tail(50, 2)].concat(),
        [&a[..131], &tail(30, 3)].concat(),
        [&a[..20], &tail(40, 4)].concat(),
        tail(140, 5),
    ]
}

fn straight(loaded: &Loaded, texts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    texts
        .iter()
        .map(|ids| {
            let mut session = open(loaded, SessionOptions::new(512));
            feed(&mut *session, ids);
            bits(session.logits())
        })
        .collect()
}

fn items(dir: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.file_name().unwrap().to_str().unwrap().contains('-'))
        .collect();
    all.sort();
    all
}

#[test]
fn a_restart_keeps_what_was_taken() {
    let loaded = load("micro", Mode::Native);
    let (texts, dir) = (texts(&loaded), tempfile::tempdir().unwrap());
    let want = straight(&loaded, &texts);
    let cache = open_cache(&loaded, &on_disk(dir.path()));
    let second = PrefixCache::open(&on_disk(dir.path()), &*loaded.lm, Prefill::Full).err().unwrap();
    assert!(second.to_string().contains("in use"), "{second}");
    for ids in &texts {
        take(&loaded, &cache, ids);
    }
    let written = cache.stats();
    assert_eq!(written.disk_writes, written.pages + written.tails);
    drop(cache);
    let cache = open_cache(&loaded, &on_disk(dir.path()));
    let stats = cache.stats();
    assert_eq!(
        (stats.pages, stats.tails, stats.disk_bytes),
        (written.pages, written.tails, written.disk_bytes)
    );
    assert_eq!(stats.memory_bytes, 0, "nothing is read before it is asked for");
    for (ids, want) in texts.iter().zip(&want) {
        let (got, reuse) = take(&loaded, &cache, ids);
        assert_eq!((&got, reuse.kept, reuse.recomputed), (want, ids.len() - 1, 0), "{reuse:?}");
    }
    assert_eq!((cache.stats().disk_writes, cache.stats().rejected), (0, 0));
    drop(cache);
    // Another model, other numerics and another prefill find nothing of it, and do no harm.
    for (other, prefill) in [("nano", Prefill::Full), ("micro", Prefill::Replay)] {
        let other = load(other, Mode::Native);
        let cache = PrefixCache::open(&on_disk(dir.path()), &*other.lm, prefill).unwrap();
        let options = SessionOptions { prefill, cache: Some(Arc::new(cache)), ..SessionOptions::new(512) };
        let mut session = open(&other, options);
        assert_eq!(session.rewind(&texts[0]).unwrap(), 0);
    }
    let cache = open_cache(&loaded, &on_disk(dir.path()));
    assert_eq!(take(&loaded, &cache, &texts[1]).1.kept, texts[1].len() - 1);
}

#[test]
fn the_disk_keeps_to_its_size() {
    let loaded = load("nano", Mode::Native);
    let (texts, dir) = (texts(&loaded), tempfile::tempdir().unwrap());
    for round in 0..3 {
        let options = CacheOptions { disk: 90_000, ..on_disk(dir.path()) };
        let cache = open_cache(&loaded, &options);
        for ids in &texts[round..] {
            take(&loaded, &cache, ids);
        }
        let bytes = items(dir.path()).iter().map(|p| p.metadata().unwrap().len()).sum::<u64>();
        assert!(bytes <= 90_000 && bytes == cache.stats().disk_bytes, "{bytes}: {:?}", cache.stats());
        assert!(round > 0 || cache.stats().disk_evictions > 0);
        // What was used last is there.
        drop(cache);
        let cache = open_cache(&loaded, &options);
        assert!(take(&loaded, &cache, &texts[5]).1.kept > 100, "round {round}");
        drop(cache);
        // A smaller limit holds from the start.
        let small = open_cache(&loaded, &CacheOptions { disk: 40_000, ..on_disk(dir.path()) });
        assert!(small.stats().disk_bytes <= 40_000);
    }
}

#[test]
fn a_damaged_file_is_named_and_removed() {
    let loaded = load("nano", Mode::Native);
    let dir = tempfile::tempdir().unwrap();
    let ids = random_ids(&loaded, 300, 1);
    take(&loaded, &open_cache(&loaded, &on_disk(dir.path())), &ids);
    // The page of tokens 64 to 127: it has the first page as its prefix.
    let pages: Vec<PathBuf> =
        items(dir.path()).into_iter().filter(|p| name(p).starts_with("page-")).collect();
    let key = |p: &Path| name(p)[38..].to_owned();
    let parent = |p: &Path| name(p)[5..37].to_owned();
    let first = pages.iter().find(|p| pages.iter().all(|q| key(q) != parent(p))).unwrap();
    let second = pages.iter().find(|p| parent(p) == key(first)).unwrap();
    let mut bytes = fs::read(second).unwrap();
    bytes[1000] ^= 4;
    fs::write(second, &bytes).unwrap();
    let cache = open_cache(&loaded, &on_disk(dir.path()));
    let want = straight(&loaded, std::slice::from_ref(&ids));
    let (got, reuse) = take(&loaded, &cache, &ids);
    assert_eq!(got, want[0]);
    let Miss::Rejected { at: 64, file, why } = &reuse.miss else { panic!("{reuse:?}") };
    assert!(*file == name(second) && why.contains("checksum"), "{reuse:?}");
    assert_eq!(cache.stats().rejected, 1);
    // It was computed and written again.
    drop(cache);
    let (got, reuse) = take(&loaded, &open_cache(&loaded, &on_disk(dir.path())), &ids);
    assert_eq!((got, reuse.kept), (want[0].clone(), 299));
}

fn name(p: &Path) -> String {
    p.file_name().unwrap().to_str().unwrap().to_owned()
}

/// Damages some files of the folder.
fn damage(dir: &Path, random: &mut Random) {
    for _ in 0..1 + random.below(5) {
        let all: Vec<PathBuf> = items(dir).into_iter().filter(|p| p.is_file()).collect();
        let Some(file) = all.get(random.below(all.len().max(1))) else { return };
        let other = &all[random.below(all.len())];
        let mut bytes = fs::read(file).unwrap_or_default();
        let at = random.below(bytes.len().max(1));
        match random.below(12) {
            0 => bytes.truncate(at),
            1 => bytes.extend_from_slice(&random.next().to_le_bytes()),
            2 => bytes.clear(),
            3 if !bytes.is_empty() => bytes[at..].fill(0),
            4 => bytes = fs::read(other).unwrap_or_default(),
            5 => {
                let swapped = fs::read(other).unwrap_or_default();
                fs::write(other, &bytes).unwrap();
                bytes = swapped;
            }
            6 => {
                fs::remove_file(file).unwrap();
                continue;
            }
            7 => {
                // A name that promises another prefix or position.
                let mut parts: Vec<String> = name(file).split('-').map(str::to_owned).collect();
                let others: Vec<String> = name(other).split('-').map(str::to_owned).collect();
                let i = 1 + random.below(parts.len() - 1);
                parts[i] = others.get(i).unwrap_or(&parts[i]).clone();
                // Not where a folder has that name.
                let _ = fs::rename(file, dir.join(parts.join("-")));
                continue;
            }
            8 => {
                fs::write(dir.join("partial-1-1"), &bytes).unwrap();
                fs::write(dir.join("page-zz-1"), &bytes).unwrap();
                fs::write(dir.join("notes.txt"), &bytes).unwrap();
                continue;
            }
            9 => {
                fs::remove_file(file).unwrap();
                fs::create_dir(file).unwrap();
                continue;
            }
            _ if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            _ => {}
        }
        if file.is_file() {
            fs::write(file, bytes).unwrap();
        }
    }
}

fn copy(from: &Path, to: &Path) {
    for file in items(from) {
        fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
}

/// Once a page whose name claimed the prefix of a page before it took that page along, and the lookup panicked.
#[test]
fn a_name_that_claims_another_prefix_is_harmless() {
    let loaded = load("nano", Mode::Native);
    let (text, whole) = (random_ids(&loaded, 200, 1), tempfile::tempdir().unwrap());
    let want = straight(&loaded, std::slice::from_ref(&text));
    let cache = open_cache(&loaded, &on_disk(whole.path()));
    take(&loaded, &cache, &text);
    drop(cache);
    let names: Vec<String> = items(whole.path()).iter().map(|f| name(f)).collect();
    let pages: Vec<Vec<&str>> =
        names.iter().filter(|n| n.starts_with("page-")).map(|n| n.split('-').collect()).collect();
    assert_eq!(pages.len(), 3);
    // The root and the three prefixes.
    let mut keys: Vec<&str> = pages.iter().flat_map(|p| [p[1], p[2]]).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 4);
    for page in &pages {
        for (parent, key) in keys.iter().flat_map(|p| keys.iter().map(move |k| (p, k))) {
            let dir = tempfile::tempdir().unwrap();
            copy(whole.path(), dir.path());
            let forged = dir.path().join(format!("page-{parent}-{key}"));
            let _ = fs::remove_file(&forged);
            fs::copy(whole.path().join(page.join("-")), &forged).unwrap();
            let cache = open_cache(&loaded, &on_disk(dir.path()));
            for _ in 0..2 {
                assert_eq!(take(&loaded, &cache, &text).0, want[0], "{page:?} as {parent} {key}");
            }
        }
    }
}

/// Once a folder with the name of an unfinished file kept the cache from opening.
#[test]
fn a_folder_with_the_name_of_a_partial_file_is_left_alone() {
    let (loaded, dir) = (load("nano", Mode::Native), tempfile::tempdir().unwrap());
    fs::create_dir(dir.path().join("partial-1-1")).unwrap();
    fs::write(dir.path().join("partial-2-1"), b"half").unwrap();
    take(&loaded, &open_cache(&loaded, &on_disk(dir.path())), &random_ids(&loaded, 80, 1));
    assert!(dir.path().join("partial-1-1").is_dir() && !dir.path().join("partial-2-1").exists());
}

#[test]
fn damaged_folders_never_give_a_wrong_state() {
    let loaded = load("nano", Mode::Native);
    let texts = texts(&loaded);
    let (want, whole) = (straight(&loaded, &texts), tempfile::tempdir().unwrap());
    let cache = open_cache(&loaded, &on_disk(whole.path()));
    texts.iter().for_each(|ids| drop(take(&loaded, &cache, ids)));
    drop(cache);
    let scenarios = if full() { 800 } else { 40 };
    let (mut rejected, mut kept) = (0, 0);
    for seed in 0..scenarios {
        let (dir, mut random) = (tempfile::tempdir().unwrap(), Random(seed));
        copy(whole.path(), dir.path());
        damage(dir.path(), &mut random);
        for _ in 0..2 {
            let cache = open_cache(&loaded, &on_disk(dir.path()));
            for _ in 0..2 {
                let i = random.below(texts.len());
                let (got, reuse) = take(&loaded, &cache, &texts[i]);
                assert_eq!(got, want[i], "scenario {seed}: {reuse:?}");
                kept += reuse.kept;
            }
            rejected += cache.stats().rejected;
        }
    }
    println!("{scenarios} damaged folders: {rejected} files not used, {kept} tokens kept");
    assert!(rejected > scenarios / 4 && kept > 0);
}

/// Takes texts and keeps them in the folder of `HALLMARK_TEST_WRITER` until it is killed; without it once.
#[test]
fn writer() {
    let loaded = load("nano", Mode::Native);
    let texts = texts(&loaded);
    let Some(dir) = std::env::var_os("HALLMARK_TEST_WRITER").map(PathBuf::from) else {
        let dir = tempfile::tempdir().unwrap();
        take(&loaded, &open_cache(&loaded, &on_disk(dir.path())), &texts[1]);
        assert_eq!(items(dir.path()).len(), 3 + 1, "three pages and a tail");
        return;
    };
    let cache = open_cache(&loaded, &on_disk(&dir));
    println!("ready");
    let mut random = Random(u64::from(std::process::id()));
    loop {
        let ids = &texts[random.below(texts.len())];
        let more = 1 + random.below(20);
        take(&loaded, &cache, &[ids.as_slice(), &random_ids(&loaded, more, random.next())].concat());
    }
}

#[test]
fn killed_writers_leave_nothing_wrong() {
    let loaded = load("nano", Mode::Native);
    let texts = texts(&loaded);
    let want = straight(&loaded, &texts);
    let dir = tempfile::tempdir().unwrap();
    let kills = if full() { 200 } else { 4 };
    let (mut random, mut partial, mut kept) = (Random(1), 0, 0);
    for kill in 0..kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writer", "--nocapture", "--test-threads", "1"])
            .env("HALLMARK_TEST_WRITER", dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        assert!(lines.any(|l| l.unwrap().ends_with("ready")), "the writer did not start");
        std::thread::sleep(Duration::from_micros(random.below(150_000) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        partial += items(dir.path()).iter().filter(|p| name(p).starts_with("partial-")).count();
        let cache = open_cache(&loaded, &on_disk(dir.path()));
        assert!(items(dir.path()).iter().all(|p| !name(p).starts_with("partial-")));
        let i = random.below(texts.len());
        let (got, reuse) = take(&loaded, &cache, &texts[i]);
        assert_eq!(got, want[i], "kill {kill}: {reuse:?}");
        assert_eq!(cache.stats().rejected, 0, "kill {kill}: a named file is whole");
        kept += reuse.kept;
    }
    println!("{kills} killed writers: {partial} partial files, {kept} tokens kept");
    assert!(kept > 0);
}
