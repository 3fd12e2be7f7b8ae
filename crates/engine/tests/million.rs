//! A state of a million tokens at the released geometry, and what a step reads of it.
#![cfg(target_os = "linux")] // resident memory is read from /proc

mod common;

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use checkpoint::Config;
use common::*;
use cpu::Cpu;
use model::{
    Layout, Page, State,
    sealed::{Kind, Writer, seal, unseal},
};
use numerics::quantise::{store_fp4, store_fp8, store_kv};
use ops::{Backend, Compressed, Host, Mode, Window};

/// One test at a time: both look at the memory or the time of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

fn released() -> Config {
    Config::load_file(&root().join("fixtures/released/config.json")).unwrap()
}

fn tokens() -> usize {
    if full() { 1 << 20 } else { 1 << 16 }
}

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Values of a bell curve, about.
fn normal(random: &mut Random, n: usize) -> Vec<f32> {
    let unit = |r: &mut Random| (r.next() >> 40) as f32 / (1 << 24) as f32;
    (0..n).map(|_| (0..4).map(|_| unit(random)).sum::<f32>() * 1.7 - 3.4).collect()
}

/// `rows` stored rows of `dim` values; a few hundred different ones in changing order.
fn rows(rows: usize, dim: usize, width: usize, store: fn(&[f32], &mut [u8]), seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let some: Vec<Vec<u8>> = (0..256)
        .map(|_| {
            let mut row = vec![0; width];
            store(&normal(&mut random, dim), &mut row);
            row
        })
        .collect();
    (0..rows).flat_map(|_| some[random.below(256)].iter().copied()).collect()
}

#[test]
fn a_state_takes_890_bytes_a_token() {
    let _alone = ALONE.lock();
    let (c, n) = (released(), tokens());
    let (b, layout) = (Cpu::new(Mode::Native, Some(1), None).unwrap(), Layout::of(&c, true));
    let step = 1 << 14;
    let before = resident();
    let mut state = State::new(&b, &c, true, n).unwrap();
    for first in (0..n).step_by(step) {
        let mut bytes = Vec::with_capacity(layout.entry_bytes(first, step));
        for ratio in &layout.ratios {
            let n = step / ratio;
            bytes.extend(rows(n, c.head_dim, layout.kv_row, store_kv, first as u64));
            bytes.extend(rows(n, c.index_head_dim, layout.key_row, store_fp4, first as u64 + 1));
        }
        let mut out = Writer::default();
        out.size(first).size(step).bytes(&bytes);
        let sealed = seal(Kind::Page, &[0; 32], &out);
        let page = Page::read(&layout, &mut unseal(&sealed, Kind::Page, &[0; 32]).unwrap()).unwrap();
        state.load_page(&b, &layout, &page, n).unwrap();
    }
    let entries = layout.entry_bytes(0, n);
    assert_eq!(entries, 890 * n);
    let taken = resident() - before;
    println!(
        "{n} tokens: {:.1} MB of entries, {:.1} MB of windows, {:.1} MB resident",
        entries as f64 / 1e6,
        layout.window_bytes(n) as f64 / 1e6,
        taken as f64 / 1e6
    );
    assert!(taken >= entries as u64, "not all of it was written");
    // Windows, and the pieces in flight that the allocator has not given back.
    let most = if full() { 1_100_000_000 } else { entries as u64 + 80_000_000 };
    assert!(taken < most, "{taken} bytes");
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

fn time<T>(runs: usize, mut f: impl FnMut() -> T) -> f64 {
    median(
        (0..runs)
            .map(|_| {
                let start = Instant::now();
                std::hint::black_box(f());
                start.elapsed()
            })
            .collect(),
    )
}

/// What a decode step at this length reads: the scan of all index keys, the choice, attention over the chosen.
#[test]
fn a_step_scans_all_keys() {
    let _alone = ALONE.lock();
    let (c, n) = (released(), tokens());
    let layout = Layout::of(&c, true);
    let b = Cpu::new(Mode::Native, None, None).unwrap();
    let limits = cpu::bench::limits(b.engine());
    let mut random = Random(3);
    let keys = rows(n, c.index_head_dim, layout.key_row, store_fp4, 4);
    let keys = Host::u8(&[n, layout.key_row], keys);
    let cache = Host::u8(&[n, layout.kv_row], rows(n, c.head_dim, layout.kv_row, store_kv, 5));
    let q = Host::f32(
        &[1, c.index_n_heads * c.index_head_dim],
        normal(&mut random, c.index_n_heads * c.index_head_dim),
    );
    let q = b.quantise_index_query(&q);
    let w = Host::f32(&[1, c.index_n_heads], normal(&mut random, c.index_n_heads));
    let runs = if full() { 7 } else { 3 };
    let mut scores = b.index_scores(&q, &w, &keys, n, &[n as u32]);
    let scan = time(runs, || scores = b.index_scores(&q, &w, &keys, n, &[n as u32]));
    let mut topk = b.topk(&scores, c.index_topk);
    let choice = time(runs, || topk = b.topk(&scores, c.index_topk));
    let chosen = topk.as_i32();
    assert!(chosen.len() == c.index_topk && chosen.windows(2).all(|p| p[0] < p[1]) && chosen[0] >= 0);

    let dim = c.num_attention_heads * c.head_dim;
    let q = Host::f32(&[1, dim], normal(&mut random, dim));
    let ring = Host::u8(&[133, layout.ring_row], rows(133, c.head_dim, layout.ring_row, store_fp8, 6));
    let fresh = ring.slice_rows(0, 1);
    let position = n as u32 - 1;
    let window = Window { ring: &ring, fresh: &fresh, base: position, size: c.sliding_window };
    let compressed = Compressed { cache: &cache, topk: &topk };
    let sinks = Host::f32(&[c.num_attention_heads], normal(&mut random, c.num_attention_heads));
    let mut o = q.clone();
    let attention =
        time(runs, || o = b.sparse_attention(&q, &window, Some(&compressed), &sinks, &[position]));
    assert!(o.as_f32().iter().all(|v| v.is_finite()));

    let bytes = (n * layout.key_row) as f64;
    let macs = (n * c.index_n_heads * c.index_head_dim) as f64;
    let (by_memory, by_arithmetic) =
        (bytes / (limits.read_gb_s.median * 1e9), macs / (limits.gfma_s.median * 1e9));
    println!(
        "{n} entries: scan {:.2} ms ({:.1} MB, {:.1} GB/s; {:.1} G multiply-adds/s); roof by memory {:.2} ms at {:.1} GB/s, \
         by arithmetic {:.2} ms at {:.0} G/s: {:.0} % of the nearer; top-{} {:.2} ms; attention of a layer {:.2} ms",
        1e3 * scan,
        bytes / 1e6,
        bytes / scan / 1e9,
        macs / scan / 1e9,
        1e3 * by_memory,
        limits.read_gb_s.median,
        1e3 * by_arithmetic,
        limits.gfma_s.median,
        100.0 * by_memory.max(by_arithmetic) / scan,
        c.index_topk,
        1e3 * choice,
        1e3 * attention,
    );
    // Attention reads the chosen entries, not the context; on a shared machine only orders of magnitude are sure.
    assert!(attention < 1.0 && scan < 60.0);
}
