//! G0 and G1 at the released geometry: every operator of the fixtures on the inputs that the CUDA reference had.
//!
//! Operators that the reference computes without a choice of order must be equal to the bit, and are held against the
//! SHA-256 of its whole output, rows that are not committed included. The others have a tolerance.

use checkpoint::{Form, Weight};
use model::Weights;
use numerics::{bf16, quantise};
use ops::{
    Backend, Host, Io, Mix, Mode, RopeTable,
    hyper::{MIX, MixConstants, STREAMS},
    moe,
    norm::{mean_square, rsqrt},
    rope::Yarn,
};
use rayon::prelude::*;

use super::{
    fixtures::Fixtures,
    generated::{self, Generated, host, ints, plain, quantised, values, values_bf16},
    hosted::Hosted,
    limits::at_most,
};
use crate::{
    Result,
    judge::metrics,
    receipt::{Check, Gate, Rule},
    sha256_hex,
};

/// Sparse attention over rows of values.
struct PlainAttention<'a> {
    /// Queries `[rows, heads * dim]`.
    q: &'a Host,
    /// Rows that slots name, `[n, dim]`.
    keys: &'a Host,
    /// Slots of every query `[rows, k]`; -1 is empty.
    slots: &'a Host,
    /// One a head.
    sinks: &'a Host,
}

impl PlainAttention<'_> {
    /// Softmax in double precision, rounded to bf16 once.
    fn exact(&self) -> Vec<f32> {
        let (sinks, dim, k) = (self.sinks.as_f32(), self.keys.width(), self.slots.width());
        let (scale, heads) = ((dim as f64).powf(-0.5), sinks.len());
        let one = |row: usize, h: usize| -> Vec<f32> {
            let q = &self.q.row(row)[h * dim..][..dim];
            let slots: Vec<usize> =
                self.slots.as_i32()[row * k..][..k].iter().filter_map(|s| usize::try_from(*s).ok()).collect();
            let dot = |s: usize| {
                q.iter().zip(self.keys.row(s)).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
                    * scale
            };
            let scores: Vec<f64> = slots.iter().map(|s| dot(*s)).collect();
            let max = scores.iter().copied().fold(-1e30, f64::max);
            let (mut sum, mut o) = ((f64::from(sinks[h]) - max).exp(), vec![0.0f64; dim]);
            for (s, score) in slots.iter().zip(&scores) {
                let p = (score - max).exp();
                sum += p;
                o.iter_mut().zip(self.keys.row(*s)).for_each(|(o, k)| *o += p * f64::from(*k));
            }
            o.iter().map(|v| bf16::round((v / sum) as f32)).collect()
        };
        let rows = self.slots.rows();
        (0..rows * heads).into_par_iter().flat_map_iter(|i| one(i / heads, i % heads)).collect()
    }
}

/// The gates in the making.
struct Bench<'a, B> {
    b: Hosted<'a, B>,
    f: &'a Fixtures,
    bits: Vec<Check>,
    near: Vec<Check>,
}

fn bf16_bytes(v: &[f32]) -> Vec<u8> {
    v.iter().flat_map(|v| bf16::to_bits(*v).to_le_bytes()).collect()
}

/// All finite bf16 patterns, in order and in another order, as rows of `width`; the last is filled up with zeros.
fn sweep(width: usize) -> Host {
    let finite = |bits: u32| if bits & 0x7f80 == 0x7f80 { 0.0 } else { bf16::from_bits(bits as u16) };
    let first = (0..65_536u32).map(finite);
    let second = (0..65_536u32).map(|i| finite((i * 40_503) & 0xffff));
    let mut all: Vec<f32> = first.chain(second).collect();
    all.resize(all.len().next_multiple_of(width), 0.0);
    Host::f32(&[all.len() / width, width], all)
}

/// Splits stored rows into codes and scales.
fn split(rows: &Host, codes: usize) -> [Vec<u8>; 2] {
    let part = |r: std::ops::Range<usize>| {
        (0..rows.rows()).flat_map(|t| rows.code_row(t)[r.clone()].to_vec()).collect()
    };
    [part(0..codes), part(codes..rows.width())]
}

/// Stored rows as bf16 values.
fn decoded(rows: &Host, width: usize, load: fn(&[u8], &mut [f32])) -> Vec<u8> {
    let mut v = vec![0.0; rows.rows() * width];
    v.chunks_mut(width).enumerate().for_each(|(t, v)| load(rows.code_row(t), v));
    bf16_bytes(&v)
}

impl<B: Backend> Bench<'_, B> {
    /// A tensor that must be equal in every byte.
    fn equal(&mut self, name: &str, got: &[u8]) -> Result<()> {
        let whole = self.f.whole_op(name)?;
        let (mut differ, mut note) = (0, format!("SHA-256 of {:?} {}", whole.2, whole.1));
        if sha256_hex(got) != whole.0 {
            // The rows that are kept say how many elements are meant.
            (differ, note) = (1, format!("SHA-256 of {:?} {} is another", whole.2, whole.1));
            if self.f.ops.has(name) {
                let want = self.f.ops.raw(name)?;
                let rows: usize = whole.2[0];
                let per = got.len() / rows;
                let kept: Vec<usize> =
                    self.f.rows(name).map_or_else(|| (0..rows).collect(), <[usize]>::to_vec);
                let size = per * rows / whole.2.iter().product::<usize>().max(1);
                let elements = kept.iter().zip(want.chunks(per)).flat_map(|(r, w)| {
                    got[r * per..][..per].chunks(size).zip(w.chunks(size)).filter(|(a, b)| a != b)
                });
                differ = elements.count().max(1);
            }
        }
        self.bits.push(Check::new(name, differ as f64, Rule::Zero).noted(note));
        Ok(())
    }

    /// Choices that must be the same.
    fn same(&mut self, name: &str, got: &[i64], want: &[i64]) {
        let differ = got.iter().zip(want).filter(|(a, b)| a != b).count() + got.len().abs_diff(want.len());
        self.bits.push(Check::new(name, differ as f64, Rule::Zero).noted(format!("{} choices", want.len())));
    }

    /// Kept rows of a tensor whose rows have `width` values.
    fn kept(&self, name: &str, all: &[f32], width: usize) -> Vec<f32> {
        match self.f.rows(name) {
            Some(rows) => rows.iter().flat_map(|r| all[r * width..][..width].to_vec()).collect(),
            None => all.to_vec(),
        }
    }

    /// A tensor within a tolerance.
    fn near(&mut self, name: &str, got: &[f32], limit: &str) -> Result<()> {
        let want = self.f.ops.values(name)?;
        let e = metrics::values(got, &want);
        let differ = got.iter().zip(&want).filter(|(a, b)| a != b).count();
        let note = format!("NRMS; {differ} of {} elements differ, by {:.1e} at most", want.len(), e.max_abs);
        self.near.push(Check::new(name, e.nrms, at_most(limit)).noted(note));
        Ok(())
    }

    fn quantisers(&mut self) -> Result<()> {
        for (name, rows, width, std) in [("a", 33, 5120, 1.0), ("tiny", 8, 1280, 2e-5)] {
            let x = host(&format!("op.act_quant.{name}"), &[rows, width], std, 0.0);
            let [codes, scales] = split(&self.b.store_window(&x)?, width);
            self.equal(&format!("act_quant.{name}.codes"), &codes)?;
            self.equal(&format!("act_quant.{name}.scales"), &scales)?;
        }
        let [codes, scales] = split(&self.b.store_window(&sweep(5120))?, 5120);
        self.equal("act_quant.sweep.codes", &codes)?;
        self.equal("act_quant.sweep.scales", &scales)?;
        let rows = self.b.store_window(&sweep(512))?;
        self.equal("act_quant.sweep512.qdq", &decoded(&rows, 512, quantise::load_fp8))?;

        for (name, width) in [("e8m0", 128), ("e4m3", 512)] {
            let key = name == "e8m0";
            let load = if key { quantise::load_fp4 } else { quantise::load_kv };
            let stored = |x: &Host| if key { self.b.stored_keys(x) } else { self.b.stored_entries(x) };
            let rows = stored(&host(&format!("op.fp4_act_quant.{name}"), &[64, width], 1.0, 0.0))?;
            let swept = stored(&sweep(width))?;
            let [codes, scales] = split(&rows, width / 2);
            self.equal(&format!("fp4_act_quant.{name}.codes"), &codes)?;
            self.equal(&format!("fp4_act_quant.{name}.scales"), &scales)?;
            self.equal(&format!("fp4_act_quant.{name}.qdq"), &decoded(&rows, width, load))?;
            self.equal(&format!("fp4_act_quant.{name}.sweep"), &decoded(&swept, width, load))?;
        }
        Ok(())
    }

    fn products(&mut self) -> Result<()> {
        for (kind, n, k) in [
            ("fp8", 1280, 5120),
            ("fp8", 32_768, 1280),
            ("fp8", 5120, 8192),
            ("fp4", 2304, 5120),
            ("fp4", 5120, 2304),
        ] {
            let at = format!("op.{kind}_gemm.{n}x{k}");
            let names = [format!("{at}.w"), format!("{at}.w_scale")];
            let (form, e0) = if kind == "fp8" { (Form::Fp8Block32, 114) } else { (Form::Fp4Row32, 120) };
            let w = quantised([&names[0], &names[1]], form, n, k, e0);
            let x = host(&format!("{at}.x"), &[33, k], 1.0, 0.0);
            let y = self.b.linear(&x, &w, Io::Fp8)?;
            let name = format!("{kind}_gemm.{n}x{k}");
            if kind == "fp4" {
                self.equal(&name, &bf16_bytes(y.as_f32()))?;
                continue;
            }
            let whole = self.f.whole_op(&name)?;
            let equal = sha256_hex(&bf16_bytes(y.as_f32())) == whole.0;
            let got = self.kept(&name, y.as_f32(), n);
            let want = self.f.ops.values(&name)?;
            let ulp = |a: f32, b: f32| i64::from(order(a)).abs_diff(i64::from(order(b)));
            let differ = got.iter().zip(&want).filter(|(a, b)| a != b).count();
            let most = got.iter().zip(&want).map(|(a, b)| ulp(*a, *b)).max().unwrap_or(0);
            let of = want.len();
            let (share, note) = if equal {
                (0.0, format!("all {} elements equal by SHA-256", 33 * n))
            } else {
                (
                    differ as f64 / of as f64,
                    format!("{differ} of {of} kept elements differ, by {most} ulp at most"),
                )
            };
            self.near.push(
                Check::new(format!("{name}: share that differs"), share, at_most("g1.fp8_share")).noted(note),
            );
            self.near.push(Check::new(format!("{name}: ulp"), most as f64, at_most("g1.fp8_ulp")));
        }
        let x = host("op.linear.x", &[8, 5120], 1.0, 0.0);
        let w = plain("op.linear.ckv", Form::Bf16, 512, 5120, 0.014, 0.0);
        let y = self.b.linear(&x, &w, Io::F32)?;
        self.near("linear.compressor_r2_wkv_f32", y.as_f32(), "g1.f32_product")?;
        let y = self.b.linear(&x, &w, Io::Bf16)?;
        self.near("linear.compressor_r1_wkv_bf16", y.as_f32(), "g1.bf16_product")?;
        let o = host("op.linear.o", &[8, 8 * 4096], 0.3, 0.0);
        let w = plain("op.linear.wo_a", Form::Bf16, 8 * 1024, 4096, 0.016, 0.0);
        let y = self.b.grouped_linear(&o, &w, 8)?;
        self.near("linear.wo_a", &self.kept("linear.wo_a", y.as_f32(), 8192), "g1.bf16_product")
    }

    fn attention(&mut self) -> Result<()> {
        const WIDTH: usize = 64 * 512;
        let q = host("op.attn.q", &[17, WIDTH], 1.7, 0.0);
        let keys = host("op.attn.kv", &[700, 512], 1.0, 0.0);
        let sinks = Host::f32(&[64], values("op.attn.sink", 64, 1.0, 0.0));
        let (idx, drop) = (ints("op.attn.idx", 17 * 640, 700), ints("op.attn.drop", 17 * 640, 8));
        let dropped = |r: usize, c: usize| match r {
            0 => false,
            1 => c < 64 || drop[r * 640 + c] == 0,
            2 => true,
            3 => c != 639,
            _ => drop[r * 640 + c] == 0,
        };
        let slot = |i: usize| if dropped(i / 640, i % 640) { -1 } else { idx[i] as i32 };
        let slots = Host::i32(&[17, 640], (0..17 * 640).map(slot).collect());
        let case = PlainAttention { q: &q, keys: &keys, slots: &slots, sinks: &sinks };
        let o = self.b.attention(&q, &keys, &slots, &sinks)?;
        let o = o.as_f32();
        self.near("sparse_attn.m17", &self.kept("sparse_attn.m17", o, WIDTH), "g1.attention")?;
        let distance = metrics::values(o, &case.exact()).nrms;
        let theirs = self.f.attention_from_exact();
        self.near.push(
            Check::new("sparse_attn.m17: distance from exact softmax", distance, Rule::Shown).noted(format!(
                "the CUDA kernel's own distance is {theirs:.6e}: both round the probabilities to bf16"
            )),
        );
        for n in [8, 129] {
            let first = Host::i32(&[1, n], slots.as_i32()[4 * 640..][..n].to_vec());
            let o = self.b.attention(&q.slice_rows(4, 1), &keys, &first, &sinks)?;
            self.near(&format!("sparse_attn.topk{n}"), o.as_f32(), "g1.attention")?;
        }
        Ok(())
    }

    fn streams(&mut self) -> Result<()> {
        let constants = MixConstants { iterations: 20, eps: 1e-6, norm_eps: 1e-20 };
        let kept = self.f.ops.shape("sinkhorn")?[0];
        // Rows whose mean square is 1 and whose projections are the given mixes: these, a millionth of them, stand in the
        // first columns, and ones and twos fill the others.
        const COLUMNS: usize = 256;
        let (m, tiny) = (values("op.sinkhorn.mixes", 4096 * MIX, 1.5, 0.0), 2f32.powi(-20));
        let mut x = vec![1.0f32; kept * COLUMNS];
        for (x, m) in x.chunks_mut(COLUMNS).zip(m.chunks(MIX)) {
            x.iter_mut().zip(m).for_each(|(x, m)| *x = m * tiny);
            x[MIX..][..8].fill(2.0);
        }
        let mut fun = vec![0.0; MIX * COLUMNS];
        (0..MIX).for_each(|k| fun[k * COLUMNS + k] = 1.0 / tiny);
        let fun = Weight::from_f32("mixes", MIX, COLUMNS, &fun).expect("sizes follow from the form");
        let mix = self.b.hc_mix(
            &Host::f32(&[kept, STREAMS, COLUMNS / STREAMS], x),
            &fun,
            &Host::f32(&[3], values("op.sinkhorn.scale", 3, 0.1, 0.8)),
            &Host::f32(&[MIX], values("op.sinkhorn.base", MIX, 0.7, 0.0)),
            constants,
        )?;
        let row = |t: usize| [mix.pre.row(t), mix.post.row(t), mix.comb.row(t)].concat();
        let got: Vec<f32> = (0..kept).flat_map(row).collect();
        let want = self.f.ops.values("sinkhorn")?;
        let error = metrics::values(&got, &want).max_abs;
        self.near.push(
            Check::new("sinkhorn: largest difference", error, at_most("g1.sinkhorn"))
                .noted(format!("pre, post and comb of {kept} rows")),
        );

        let x = host("op.hc.x", &[8, 4, 5120], 1.5, 0.0);
        let y = host("op.hc.y", &[8, 5120], 1.0, 0.0);
        let f32s = |name: &str, shape: &[usize], std, offset| {
            Host::f32(shape, values(name, shape.iter().product(), std, offset))
        };
        let pre = f32s("op.hc.pre", &[8, 4], 0.15, 0.5);
        let (post, comb) =
            (f32s("op.hc.post", &[8, 4], 0.3, 1.0), f32s("op.hc.comb", &[8, 4, 4], 0.05, 0.25));
        let fun = plain("op.hc.fn", Form::F32, 24, 20_480, 0.007, 0.0);
        let flat = x.reshaped(&[8, 20_480]);
        let mut mixes = self.b.linear(&flat, &fun, Io::F32)?.as_f32().to_vec();
        for (t, row) in mixes.chunks_mut(24).enumerate() {
            let r = rsqrt(mean_square(flat.row(t)) + 1e-20);
            row.iter_mut().for_each(|v| *v *= r);
        }
        self.near("hc.mixes", &mixes, "g1.mixes")?;
        self.equal("hc.collapse", &bf16_bytes(self.b.hc_collapse(&x, &pre)?.as_f32()))?;
        let out = self.b.hc_expand(&x, &y, &Mix { pre, post, comb })?;
        self.equal("hc.expand", &bf16_bytes(out.as_f32()))
    }

    fn norms_and_rope(&mut self) -> Result<()> {
        for d in [5120, 1280, 512, 128] {
            let w = host(&format!("op.norm.w{d}"), &[d], 0.15, 1.0);
            let mut x = values_bf16(&format!("op.norm.x{d}"), 8 * d, 1.0, 0.0);
            x[3 * d..4 * d].fill(0.0);
            x[4 * d..5 * d].iter_mut().for_each(|v| *v = bf16::round(*v * 1e-3));
            let y = self.b.rmsnorm(&Host::f32(&[8, d], x), &w, 1e-20)?;
            self.equal(&format!("norm.{d}"), &bf16_bytes(y.as_f32()))?;
        }
        let positions = [0, 1, 127, 4095, 65_537, 1_000_003];
        let x = host("op.rope.x", &[6, 128], 1.0, 0.0);
        let y = Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original: 65_536 };
        let tables = [("plain", RopeTable::plain(1e4, 64)), ("yarn", RopeTable::yarn(160_000.0, 64, y))];
        for (name, table) in &tables {
            for (way, inverse) in [("forward", false), ("inverse", true)] {
                let y = self.b.rope(&x, 64, table, &positions, inverse)?;
                let tensor = format!("rope.{name}.{way}");
                if *name == "yarn" {
                    self.equal(&tensor, &bf16_bytes(y.as_f32()))?;
                } else {
                    self.near(&tensor, y.as_f32(), "g1.rope_plain")?;
                }
            }
        }
        Ok(())
    }

    /// The gated activation by the host's function.
    fn swiglu(&mut self) -> Result<()> {
        let (g, u) = (
            values_bf16("op.swiglu.gate", 8 * 2304, 6.0, 0.0),
            values_bf16("op.swiglu.up", 8 * 2304, 6.0, 0.0),
        );
        let w = values("op.swiglu.w", 8, 0.05, 0.25);
        for (name, weighted) in [("weighted", true), ("plain", false)] {
            let mut h = vec![0.0; g.len()];
            for (t, h) in h.chunks_mut(2304).enumerate() {
                let at = t * 2304..(t + 1) * 2304;
                moe::swiglu(Mode::Source, &g[at.clone()], &u[at], 10.0, if weighted { w[t] } else { 1.0 }, h);
            }
            self.equal(&format!("swiglu.{name}"), &bf16_bytes(&h))?;
        }
        Ok(())
    }

    fn router(&mut self) -> Result<()> {
        let x = host("op.router.x", &[64, 5120], 1.0, 0.0);
        let weight = plain("op.router.weight", Form::Bf16, 384, 5120, 0.02, 0.0);
        let bias = values("op.router.bias", 384, 0.1, 0.0);
        let logits = self.b.linear(&x, &weight, Io::F32)?;
        self.near("router.logits", &self.kept("router.logits", logits.as_f32(), 384), "g1.f32_product")?;
        let twice = |v: &[f32]| [&v[..192], &v[..192]].concat();
        let tied = Host::f32(&[64, 384], logits.as_f32().chunks(384).flat_map(twice).collect());
        for (name, logits, bias) in [("", &logits, bias.clone()), ("tied_", &tied, twice(&bias))] {
            let r = self.b.router(logits, &Host::f32(&[384], bias), 6, 1.5)?;
            // The order inside the six has no meaning: experts are added up in ascending id.
            let sorted = |ids: Vec<i64>, w: &[f32]| -> (Vec<i64>, Vec<f32>) {
                let rows = ids.chunks(6).zip(w.chunks(6)).flat_map(|(ids, w)| {
                    let mut row: Vec<(i64, f32)> = ids.iter().copied().zip(w.iter().copied()).collect();
                    row.sort_by_key(|p| p.0);
                    row
                });
                rows.unzip()
            };
            let ids = r.experts.as_i32().iter().map(|i| i64::from(*i)).collect();
            let (ids, w) = sorted(ids, r.weights.as_f32());
            let want = self.f.ops.ints(&format!("router.{name}indices"))?;
            let (want, want_w) = sorted(want, &self.f.ops.values(&format!("router.{name}weights"))?);
            self.same(&format!("router.{name}indices"), &ids, &want);
            let e = metrics::values(&w, &want_w).nrms;
            self.near.push(
                Check::new(format!("router.{name}weights"), e, at_most("g1.f32_product")).noted("NRMS"),
            );
        }
        Ok(())
    }

    fn selection(&mut self) -> Result<()> {
        let keys = host("op.index.k", &[3000, 128], 1.0, 0.0);
        let q = host("op.index.q", &[4, 32 * 128], 1.0, 0.0);
        let scores = self.b.index_scores(&q, &host("op.index.w", &[4, 32], 1.0, 0.0), &keys)?;
        self.equal("index.scores", &bf16_bytes(scores.as_f32()))?;
        let picked = |x: &Host| -> Result<Vec<i64>> {
            Ok(self.b.topk(x, 512)?.as_i32().iter().map(|i| i64::from(*i)).collect())
        };
        let mut cases = vec![("index.top512".to_owned(), picked(&scores)?)];
        for n in [600usize, 1025, 3000, 20_000, 300_000] {
            let v = ints(&format!("op.index.tie{n}"), n, 7).into_iter().map(|v| v as f32 / 8.0).collect();
            cases.push((format!("index.tie{n}"), picked(&Host::f32(&[1, n], v))?));
        }
        cases.push(("index.all_equal3000".into(), picked(&Host::f32(&[1, 3000], vec![0.0; 3000]))?));
        for (name, got) in cases {
            let want = self.f.ops.ints(&name)?;
            self.same(&name, &got, &want);
        }
        let (n, visible) = (20_000, [20_000, 17_003, 9, 8]);
        let raw = ints("op.cand.scores", 4 * n, 4001);
        let score = |i: usize| {
            let seen = i % n < visible[i / n] as usize;
            if seen { bf16::round(raw[i] as f32 / 64.0 - 20.0) } else { f32::NEG_INFINITY }
        };
        let scores = Host::f32(&[4, n], (0..4 * n).map(score).collect());
        let mask = self.b.candidates(&scores, &visible, 8, 2048)?;
        let got: Vec<i64> = mask.as_u8().iter().map(|v| i64::from(*v)).collect();
        let want = self.f.ops.ints("candidates.kept_blocks")?;
        self.same("candidates.kept_blocks", &got, &want);
        Ok(())
    }

    fn engram(&mut self, weights: &Generated) -> Result<()> {
        let at = |name: &str| weights.weight(&format!("layers.1.engram.{name}"));
        let table = at("embed")?;
        let rows: Vec<u64> =
            ints("op.engram.rows", 8 * 24, table.rows() as u64).into_iter().map(u64::from).collect();
        let x = host("op.engram.x", &[8, 4, 5120], 1.5, 0.0);
        let e = self.b.engram_rows(&table, &rows, 24)?;
        self.equal("engram.rows", &bf16_bytes(e.row(0)))?;
        let kv = self.b.linear(&e, &at("wkv")?, Io::Fp8)?;
        self.equal("engram.kv", &bf16_bytes(&kv.as_f32()[..2 * 25_600]))?;
        let vector = |w: Weight| Host::f32(&[w.rows(), w.cols()], w.to_f32());
        let (q, k) = (vector(at("q_weight")?), vector(at("k_weight")?));
        let out = self.b.engram_gate(&x, &kv, &q, &k, &[true; 8])?;
        self.equal("engram.out", &bf16_bytes(out.as_f32()))?;
        // The mask of the released code is true where the gate is open.
        let alive: Vec<bool> = (0..8).map(|t| t % 2 == 0).collect();
        let out = self.b.engram_gate(&x, &kv, &q, &k, &alive)?;
        self.equal("engram.out_masked", &bf16_bytes(&out.as_f32()[..2 * 20_480]))
    }

    fn unary(&mut self) -> Result<()> {
        let inputs: Vec<f32> = (0..=u16::MAX).map(bf16::from_bits).filter(|x| x.abs() < 80.0).collect();
        for name in ["exp", "sigmoid", "silu", "softplus"] {
            let f = |x: f32| match name {
                "exp" => x.exp(),
                "sigmoid" => 1.0 / (1.0 + (-x).exp()),
                "silu" => moe::silu(x),
                _ => moe::softplus(x),
            };
            let got: Vec<f32> = inputs.iter().map(|x| f(*x)).collect();
            let differs = sha256_hex(&bf16_bytes(&got)) != self.f.unary(name)?;
            let note = format!("rounded to bf16, SHA-256 over the {} bf16 inputs below 80", inputs.len());
            self.bits.push(
                Check::new(format!("unary.{name}"), f64::from(u8::from(differs)), Rule::Zero).noted(note),
            );
        }
        Ok(())
    }
}

/// Whether a backend's unary functions and gated activation are the host's own, so that they can be called alone. Elsewhere
/// they lie inside kernels, which `qualify ops` holds against these.
pub fn has_host_functions(b: &impl Backend) -> bool {
    ["cpu", "reference"].contains(&b.name())
}

/// Runs every operator of the fixtures on `b`, which computes in mode `source`; `progress` is told what comes next.
///
/// # Errors
/// Fixtures that can't be read, or a device failure.
pub fn operators<B: Backend>(
    b: &B,
    fixtures: &Fixtures,
    mut progress: impl FnMut(&str),
) -> Result<[Gate; 2]> {
    let config = generated::config();
    let mut bench = Bench { b: Hosted(b), f: fixtures, bits: Vec::new(), near: Vec::new() };
    progress("quantisers");
    bench.quantisers()?;
    progress("matrix products");
    bench.products()?;
    progress("sparse attention");
    bench.attention()?;
    progress("streams, norms, rotary embedding");
    bench.streams()?;
    bench.norms_and_rope()?;
    progress("router and selection");
    bench.router()?;
    bench.selection()?;
    progress("Engram");
    bench.engram(&Generated::new(&config, false))?;
    if has_host_functions(b) {
        bench.swiglu()?;
        bench.unary()?;
    }
    Ok([Gate::new("G0", bench.bits), Gate::new("G1", bench.near)])
}

/// A bf16 value's place among all, so that neighbours differ by one.
fn order(v: f32) -> i32 {
    let bits = i32::from(bf16::to_bits(v) as i16);
    if bits < 0 { -(bits & 0x7fff) } else { bits }
}
