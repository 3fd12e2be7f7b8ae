//! Blocks that share launches have the bits of their operators one after the other.

use checkpoint::Form;
use numerics::quantise::{fp4_row_bytes, fp8_row_bytes, kv_row_bytes};
use ops::{
    Backend, Compressed, ExpertWeights, Host, Io, Mix, Mode, RopeTable, Taps, Window,
    blocks::{
        self, AttentionWeights, Candidates, CompressorWeights, Entries, IndexerWeights, KeyWeights,
        MoeWeights, OpenGroup, SublayerWeights,
    },
    hyper::MixConstants,
    registry::generated_weight,
};

use crate::{Buf, Gpu, Mat, emu::Emu, launch::Choice};

const MODES: [Mode; 3] = [Mode::Exact, Mode::Source, Mode::Native];
const D: usize = 160;
const HEADS: usize = 6;
const DIM: usize = 96;

fn emu(mode: Mode) -> Gpu<Emu> {
    Gpu::new(mode, Emu::open().unwrap())
}

fn values(b: &Gpu<Emu>, name: &str, shape: &[usize]) -> Buf<Emu> {
    let s = numerics::generator::Stream::new(name, 3);
    let n: usize = shape.iter().product();
    let v = (0..n as u64).map(|i| numerics::bf16::round(s.normal(i))).collect();
    b.upload(&Host::f32(shape, v)).unwrap()
}

fn mat(b: &Gpu<Emu>, name: &str, form: Form, rows: usize, cols: usize) -> Mat<Emu> {
    b.load(&generated_weight(name, form, rows, cols, 3)).unwrap()
}

fn read(b: &Gpu<Emu>, x: &Buf<Emu>) -> Host {
    b.read(x).unwrap()
}

fn sublayer(b: &Gpu<Emu>) -> SublayerWeights<Gpu<Emu>> {
    SublayerWeights {
        fun: mat(b, "fn", Form::F32, 24, 4 * D),
        scale: values(b, "scale", &[3]),
        base: values(b, "base", &[24]),
        constants: MixConstants { iterations: 20, eps: 1e-6, norm_eps: 1e-6 },
        norm: values(b, "norm", &[D]),
        tap: "hc",
    }
}

fn attention(b: &Gpu<Emu>) -> AttentionWeights<Gpu<Emu>> {
    AttentionWeights {
        wq_a: mat(b, "wq_a", Form::Fp8Block32, 64, D),
        q_norm: values(b, "q_norm", &[64]),
        wq_b: mat(b, "wq_b", Form::Fp8Block32, HEADS * DIM, 64),
        wkv: mat(b, "wkv", Form::Fp8Block32, DIM, D),
        kv_norm: values(b, "kv_norm", &[DIM]),
        sinks: values(b, "sinks", &[HEADS]),
        wo_a: mat(b, "wo_a", Form::Fp8Block32, 3 * 32, 2 * DIM),
        wo_b: mat(b, "wo_b", Form::Fp8Block32, D, 3 * 32),
        head_dim: DIM,
        groups: 3,
        eps: 1e-6,
    }
}

fn table() -> RopeTable {
    RopeTable::plain(10_000.0, 32)
}

fn total(counts: &std::collections::HashMap<&'static str, u64>) -> u64 {
    counts.values().sum()
}

#[test]
fn a_result_on_its_way_into_the_next_sublayer_has_the_bits_of_the_operators() {
    for (mode, rows) in MODES.into_iter().flat_map(|m| [(m, 1), (m, 3)]) {
        let b = emu(mode);
        let w = sublayer(&b);
        let (streams, y) = (values(&b, "streams", &[rows, 4, D]), values(&b, "y", &[rows, D]));
        let mix = Mix {
            pre: values(&b, "pre", &[rows, 4]),
            post: values(&b, "post", &[rows, 4]),
            comb: values(&b, "comb", &[rows, 4, 4]),
        };
        let alone = b.hc_expand(&streams, &y, &mix);
        b.flush();
        let want_mix = b.hc_mix(&alone, &w.fun, &w.scale, &w.base, w.constants);
        let want = b.rmsnorm(&b.hc_collapse(&alone, &mix.pre), &w.norm, w.constants.norm_eps);
        let mut got = None;
        let counts = b.counted(|| {
            let next = b.hc_expand(&streams, &y, &mix);
            got = Some((b.sublayer_input(&next, &mix.pre, &w, &mut Taps::off()), next));
        });
        assert_eq!(total(&counts), 2, "{counts:?}");
        let ((got_mix, x), next) = got.unwrap();
        let pairs = [
            (&next, &alone),
            (&x, &want),
            (&got_mix.pre, &want_mix.pre),
            (&got_mix.post, &want_mix.post),
            (&got_mix.comb, &want_mix.comb),
        ];
        for (i, (got, want)) in pairs.into_iter().enumerate() {
            assert!(read(&b, got) == read(&b, want), "{} {rows} rows, output {i}", mode.name());
        }
    }
}

/// One row's norm and coefficients are made by the first product that takes it: the first of attention, the router's in both forms.
#[test]
fn a_way_in_that_ends_within_the_first_product_has_the_bits_of_the_operators() {
    for mode in MODES {
        let b = emu(mode);
        let (w, attention, table) = (sublayer(&b), attention(&b), table());
        let (streams, pre) = (values(&b, "streams", &[1, 4, D]), values(&b, "pre", &[1, 4]));
        let want_mix = b.hc_mix(&streams, &w.fun, &w.scale, &w.base, w.constants);
        let want = b.rmsnorm(&b.hc_collapse(&streams, &pre), &w.norm, w.constants.norm_eps);
        let gate = mat(&b, "gate", Form::Bf16, 9, D);
        let w1 = mat(&b, "w1", Form::Fp8Block32, 98, D);
        let w2 = mat(&b, "w2", Form::Fp8Block32, D, 98);
        let bias = values(&b, "bias", &[9]);
        let choice = || Choice { bias: &bias, image: None, top: 3, scale: 1.5 };
        let shared = || b.routed_and_shared(&want, &gate, &choice(), [&w1, &w1, &w2], 2.5);
        type Consumer<'a> = &'a dyn Fn(&Buf<Emu>) -> Vec<Buf<Emu>>;
        let consumers: [(&str, Consumer); 3] = [
            ("attention", &|x| {
                let own = b.attention_input(x, &attention, &table, &[7]);
                vec![own.latent, own.q, own.codes]
            }),
            ("router", &|x| vec![b.linear(x, &gate, Io::F32)]),
            ("router and shared expert", &|x| {
                let both = b.routed_and_shared(x, &gate, &choice(), [&w1, &w1, &w2], 2.5);
                both.map_or(Vec::new(), |(routing, y)| vec![routing.experts, routing.weights, y])
            }),
        ];
        for (name, consumer) in consumers {
            let outputs = consumer(&want);
            let mut got = None;
            let counts = b.counted(|| {
                let (mix, x) = b.sublayer_input(&streams, &pre, &w, &mut Taps::off());
                got = Some((consumer(&x), x, mix));
            });
            let (got, x, mix) = got.unwrap();
            let pairs = [(&x, &want), (&mix.pre, &want_mix.pre), (&mix.post, &want_mix.post)];
            let pairs =
                pairs.into_iter().chain([(&mix.comb, &want_mix.comb)]).chain(got.iter().zip(&outputs));
            for (i, (got, want)) in pairs.enumerate() {
                assert!(read(&b, got) == read(&b, want), "{}, {name}: output {i}", mode.name());
            }
            let alone = counts.contains_key("sublayer_finish");
            assert_eq!(alone, mode == Mode::Source, "{}, {name}: {counts:?}", mode.name());
        }
        assert_eq!(shared().is_some(), mode != Mode::Source);
    }
}

/// Streams that somebody reads before the next sublayer are there.
#[test]
fn a_waiting_result_is_recorded_before_anything_that_may_read_it() {
    let b = emu(Mode::Exact);
    let (streams, y) = (values(&b, "streams", &[2, 4, D]), values(&b, "y", &[2, D]));
    let mix = Mix {
        pre: values(&b, "pre", &[2, 4]),
        post: values(&b, "post", &[2, 4]),
        comb: values(&b, "comb", &[2, 4, 4]),
    };
    let first = b.hc_expand(&streams, &y, &mix);
    let mean = b.stream_mean(&first);
    let second = b.hc_expand(&first, &y, &mix);
    let third = b.hc_expand(&second, &y, &mix);
    let plain = ops::Reference::new(Mode::Exact);
    let host_mix = Mix { pre: read(&b, &mix.pre), post: read(&b, &mix.post), comb: read(&b, &mix.comb) };
    let (streams, y) = (read(&b, &streams), read(&b, &y));
    let want = plain.hc_expand(&streams, &y, &host_mix);
    assert!(read(&b, &mean) == plain.stream_mean(&want));
    let want = plain.hc_expand(&want, &y, &host_mix);
    assert!(read(&b, &third) == plain.hc_expand(&want, &y, &host_mix));
    // A part of the streams is no whole.
    let w = sublayer(&b);
    let all = b.hc_expand(&second, &b.upload(&y).unwrap(), &mix);
    let (_, x) =
        b.sublayer_input(&b.slice_rows(&all, 1, 1), &b.slice_rows(&mix.pre, 1, 1), &w, &mut Taps::off());
    let (_, both) = b.sublayer_input(&all, &mix.pre, &w, &mut Taps::off());
    assert!(read(&b, &x) == read(&b, &both).slice_rows(1, 1));
}

#[test]
fn the_input_of_attention_has_the_bits_of_the_operators() {
    for (mode, rows) in MODES.into_iter().flat_map(|m| [(m, 1), (m, 3), (m, 11)]) {
        let b = emu(mode);
        let w = attention(&b);
        let (x, table) = (values(&b, "x", &[rows, D]), table());
        let positions: Vec<u32> = (7..7 + rows as u32).collect();
        let latent = b.rmsnorm(&b.linear(&x, &w.wq_a, Io::Fp8), &w.q_norm, w.eps);
        let q = b.rope(&b.linear(&latent, &w.wq_b, Io::Fp8), DIM, &table, &positions, false);
        let kv = b.rmsnorm(&b.linear(&x, &w.wkv, Io::Fp8), &w.kv_norm, w.eps);
        let codes = b.store_window(&b.rope(&kv, DIM, &table, &positions, false));
        let mut got = None;
        let counts = b.counted(|| got = Some(b.attention_input(&x, &w, &table, &positions)));
        let got = got.unwrap();
        for (name, got, want) in
            [("latent", &got.latent, &latent), ("q", &got.q, &q), ("codes", &got.codes, &codes)]
        {
            assert!(read(&b, got) == read(&b, want), "{} {rows} rows: {name}", mode.name());
        }
        if mode == Mode::Exact {
            assert_eq!(total(&counts), 3, "{counts:?}");
        }
    }
}

#[test]
fn attention_that_keeps_its_rows_and_turns_back_has_the_bits_of_the_operators() {
    for (mode, rows) in MODES.into_iter().flat_map(|m| [(m, 1), (m, 3), (m, 70)]) {
        let b = emu(mode);
        let (w, table, size) = (attention(&b), table(), 24);
        let code = |name: &str, rows: usize, width: usize| {
            // Any scale near one, any finite code.
            let s = numerics::generator::Stream::new(name, 3);
            let byte = |i: u64| if i as usize % width >= DIM { 127 } else { (s.word(i) % 0x7f) as u8 };
            b.upload(&Host::u8(&[rows, width], (0..(rows * width) as u64).map(byte).collect())).unwrap()
        };
        let slots = size + 5;
        let ring = || {
            let mut ring = b.cache(slots, fp8_row_bytes(DIM)).unwrap();
            let positions: Vec<u32> = (0..slots as u32).collect();
            b.ring_write(&mut ring, &code("ring", slots, fp8_row_bytes(DIM)), &positions);
            ring
        };
        let fresh = code("fresh", rows, fp8_row_bytes(DIM));
        let cache = code("cache", 40, kv_row_bytes(DIM));
        let topk =
            b.upload(&Host::i32(&[rows, 12], (0..rows * 12).map(|i| (i % 40) as i32).collect())).unwrap();
        let q = values(&b, "q", &[rows, HEADS * DIM]);
        let positions: Vec<u32> = (50..50 + rows as u32).collect();
        let run = |apart: bool| {
            let mut ring = ring();
            b.flush();
            let mut o = None;
            let counts = b.counted(|| {
                let window = Window { ring: &ring, fresh: &fresh, base: 50, size };
                let compressed = Compressed { cache: &cache, topk: &topk };
                let attended = b.sparse_attention(&q, &window, Some(&compressed), &w.sinks, &positions);
                if apart {
                    b.flush();
                }
                let skip = rows.saturating_sub(slots);
                b.ring_write(&mut ring, &b.slice_rows(&fresh, skip, rows - skip), &positions[skip..]);
                o = Some(if apart {
                    let o = b.rope(&attended, DIM, &table, &positions, true);
                    b.linear(&b.grouped_linear(&o, &w.wo_a, 3), &w.wo_b, Io::Fp8)
                } else {
                    b.attention_output(&attended, &w, &table, &positions)
                });
            });
            (read(&b, &o.unwrap()), read(&b, &ring), total(&counts))
        };
        let (got, want) = (run(false), run(true));
        assert!(got.0 == want.0, "{} {rows} rows: results", mode.name());
        assert!(got.1 == want.1, "{} {rows} rows: ring", mode.name());
        if rows < 64 && mode != Mode::Source {
            assert_eq!((got.2, want.2), (4, 6), "{} {rows} rows", mode.name());
        }
    }
}

#[test]
fn router_and_shared_expert_together_have_the_bits_of_the_operators() {
    let part = |name: &str, rows, cols| generated_weight(name, Form::Exl3, rows, cols, 3);
    let all = |b: &Gpu<Emu>| {
        let one = |e: usize| ExpertWeights {
            gate: part(&format!("{e}.0"), 98, D),
            up: part(&format!("{e}.1"), 98, D),
            down: part(&format!("{e}.2"), D, 98),
        };
        b.load_experts((0..9).map(one).collect()).unwrap()
    };
    for (mode, rows) in MODES.into_iter().flat_map(|m| [(m, 1), (m, 3), (m, 9)]) {
        let b = emu(mode);
        let w = MoeWeights {
            gate: mat(&b, "gate", Form::Bf16, 9, D),
            bias: values(&b, "bias", &[9]),
            bias_vl: values(&b, "bias_vl", &[9]),
            experts: all(&b),
            shared: [("w1", 98, D), ("w3", 98, D), ("w2", D, 98)]
                .map(|(name, rows, cols)| mat(&b, name, Form::Fp8Block32, rows, cols)),
            top: 3,
            scale: 1.5,
            limit: 2.5,
        };
        let x = values(&b, "x", &[rows, D]);
        let mut image = vec![false; rows];
        image[rows - 1] = rows > 1;
        let logits = b.linear(&x, &w.gate, Io::F32);
        let other = image[rows - 1].then_some((&w.bias_vl, &image[..]));
        let want = b.router(&logits, &w.bias, other, w.top, w.scale);
        let routed = b.routed_experts(&x, &want, &w.experts, w.limit);
        let [w1, w3, w2] = &w.shared;
        let y = b.moe_sum(&routed, &b.shared_expert(&x, [w1, w3, w2], w.limit));
        let mut taps = Vec::new();
        let mut sink = |name: &str, value: &Buf<Emu>| taps.push((name.to_owned(), value.clone()));
        let mut got = None;
        let counts = b.counted(|| got = Some(b.moe(&x, &w, &image, &mut Taps::new(&mut sink))));
        let what = format!("{} {rows} rows", mode.name());
        assert!(read(&b, &got.unwrap()) == read(&b, &y), "{what}");
        for ((name, tap), want) in taps.iter().zip([&want.experts, &want.weights]) {
            assert!(read(&b, tap) == read(&b, want), "{what}: {name}");
        }
        if rows == 1 && mode != Mode::Source {
            // The classes of the experts' rates and codebooks take a launch each.
            let others = counts.iter().filter(|c| *c.0 != "exl3_expert_product");
            assert_eq!(others.map(|c| c.1).sum::<u64>(), 3, "{what}: {counts:?}");
        }
    }
}

#[test]
fn what_a_source_publishes_has_the_bits_of_the_operators() {
    let (table, width, key_width) = (RopeTable::plain(10_000.0, 32), 96, 64);
    for (mode, rows, open) in MODES
        .into_iter()
        .flat_map(|m| [(m, 1, false), (m, 1, true), (m, 2, true), (m, 3, false), (m, 4, true), (m, 5, true)])
    {
        let b = emu(mode);
        let w = CompressorWeights {
            wkv: mat(&b, "wkv", Form::F32, width, D),
            wgate: Some(mat(&b, "wgate", Form::F32, width, D)),
            norm: values(&b, "norm", &[width]),
            eps: 1e-6,
        };
        let keys = KeyWeights {
            wk: mat(&b, "wk", Form::Bf16, key_width, width),
            k_norm: values(&b, "k_norm", &[key_width]),
            eps: 1e-6,
        };
        let x = values(&b, "x", &[rows, D]);
        let before = || {
            let part = |name: &str| values(&b, name, &[1, width]);
            open.then(|| OpenGroup { kv: part("open_kv"), score: part("open_score") })
        };
        let caches = || [fp4_row_bytes(key_width), kv_row_bytes(width)].map(|n| b.cache(9, n).unwrap());
        let what = format!("{} {rows} rows, open {open}", mode.name());
        let (mut want_open, mut got_open) = (before(), before());
        let want = blocks::compress(&b, &x, &w, &mut want_open);
        let mut got = None;
        let counts = b.counted(|| got = b.compress(&x, &w, &mut got_open));
        assert_eq!(total(&counts), 1 + u64::from(want.is_some()), "{what}: {counts:?}");
        match (want_open, got_open) {
            (Some(want), Some(got)) => {
                assert!(read(&b, &got.kv) == read(&b, &want.kv), "{what}");
                assert!(read(&b, &got.score) == read(&b, &want.score), "{what}");
            }
            (want, got) => assert_eq!(want.is_some(), got.is_some(), "{what}"),
        }
        assert_eq!(want.is_some(), got.is_some(), "{what}");
        let (Some(want), Some(got)) = (want, got) else { continue };
        assert!(read(&b, &got) == read(&b, &want), "{what}: latents");
        let positions: Vec<u32> = (0..want.rows() as u32).map(|i| 6 + 2 * i).collect();
        let ([mut k, mut v], [mut want_k, mut want_v]) = (caches(), caches());
        blocks::publish(&b, &want, &keys, &table, &positions, [&mut want_k, &mut want_v], 3);
        let counts = b.counted(|| b.publish(&want, &keys, &table, &positions, [&mut k, &mut v], 3));
        assert_eq!(total(&counts), 2, "{what}: {counts:?}");
        assert!(read(&b, &k) == read(&b, &want_k), "{what}: keys");
        assert!(read(&b, &v) == read(&b, &want_v), "{what}: entries");
    }
}

#[test]
fn a_choice_of_entries_in_two_launches_has_the_bits_of_the_operators() {
    let (heads, dim, n, rank) = (3, 64, 150, 48);
    let table = table();
    for (mode, rows) in MODES.into_iter().flat_map(|m| [(m, 1), (m, 4)]) {
        let b = emu(mode);
        let w = IndexerWeights {
            wq_b: mat(&b, "wq_b", Form::Fp8Block32, heads * dim, rank),
            weights_proj: mat(&b, "weights_proj", Form::Bf16, heads, D),
            dim,
        };
        let (x, latent) = (values(&b, "x", &[rows, D]), values(&b, "latent", &[rows, rank]));
        let mut keys = b.cache(n + 3, fp4_row_bytes(dim)).unwrap();
        b.publish_key(&mut keys, &values(&b, "keys", &[n, dim]), 0);
        let positions: Vec<u32> = (0..rows as u32).map(|i| 300 + i).collect();
        let visible: Vec<u32> = (0..rows).map(|i| (n - rows + i) as u32).collect();
        let entries = || Entries { keys: &keys, n, visible: &visible };
        let q = b.rope(&b.linear(&latent, &w.wq_b, Io::Fp8), dim, &table, &positions, false);
        let weights = b.linear(&x, &w.weights_proj, Io::Bf16);
        let scores = b.index_scores(&b.quantise_index_query(&q), &weights, &keys, n, &visible);
        let got = b.index_query(&x, &latent, &w, &table, &positions, entries());
        let what = format!("{} {rows} rows", mode.name());
        assert!(read(&b, &got) == read(&b, &scores), "{what}: scores");
        let mask = b.candidates(&scores, &visible, 8, 5);
        for (i, candidates) in
            [Candidates::All, Candidates::Choose(5), Candidates::Kept(&mask)].into_iter().enumerate()
        {
            let off = &mut Taps::off();
            let (want_mask, want) = blocks::choose(&b, &scores, &visible, 8, candidates, 20, off);
            let mut got = None;
            let counts = b.counted(|| got = Some(b.choose(&scores, &visible, 8, candidates, 20, off)));
            let (got_mask, got) = got.unwrap();
            assert_eq!(total(&counts), 1, "{what}: {counts:?}");
            assert!(read(&b, &got) == read(&b, &want), "{what}: places, {i}");
            assert_eq!(got_mask.map(|m| read(&b, &m)), want_mask.map(|m| read(&b, &m)), "{what}: mask, {i}");
        }
    }
}
