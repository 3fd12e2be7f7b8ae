//! The operators on the CPU: the fast kernels where time goes, the scalar reference's rows on all threads elsewhere.
//!
//! `native` is the arithmetic of `exact`: single precision without activation quantisation. Its departure from
//! `source` is the absence of the intermediate bf16 and fp8 roundings.

use checkpoint::{Form, Weight};
use ops::{
    Backend, Compressed, Data, DeviceError, ExpertWeights, Host, Io, Mix, Mode, Reference, RopeTable,
    Routing, Window, dspark, engram, hyper,
    hyper::{MIX, MixConstants},
    indexer, linear, moe, norm, pool, rope,
};

use crate::{Attention, Engine, Error, IndexQueries, Isa, Job, Slot, exl3::Product, source};

/// Work (multiply-adds or the like) under which a second thread costs more than it brings.
const PARALLEL: usize = 1 << 14;

/// The CPU backend.
pub struct Cpu {
    mode: Mode,
    engine: Engine,
    /// Computes what is a copy or a choice.
    plain: Reference,
}

impl Cpu {
    /// A backend with `threads` threads (all cores) and the instruction set `isa` (the best).
    ///
    /// # Errors
    /// An instruction set that the machine lacks.
    pub fn new(mode: Mode, threads: Option<usize>, isa: Option<Isa>) -> Result<Self, Error> {
        let plain = Reference::new(if mode == Mode::Source { Mode::Source } else { Mode::Exact });
        Ok(Self { mode, engine: Engine::new(threads, isa)?, plain })
    }

    /// The kernels' threads and instruction set.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Applies `f(row, x, out)` to every row; `work` is the cost of a row.
    fn map(
        &self,
        x: &Host,
        shape: &[usize],
        work: usize,
        f: impl Fn(usize, &[f32], &mut [f32]) + Sync + Send,
    ) -> Host {
        let width: usize = shape.iter().product();
        let mut out = vec![0.0; x.rows() * width];
        self.rows(&mut out, width, work, |t, o| f(t, x.row(t), o));
        Host::f32(&[&[x.rows()], shape].concat(), out)
    }

    /// Calls `f(row, out)` for every run of `width`, on all threads if there is enough work.
    fn rows<T: Send>(
        &self,
        out: &mut [T],
        width: usize,
        work: usize,
        f: impl Fn(usize, &mut [T]) + Sync + Send,
    ) {
        if out.len() / width.max(1) * work < PARALLEL {
            out.chunks_mut(width).enumerate().for_each(|(t, o)| f(t, o));
        } else {
            self.engine.par_chunks(out, width, f);
        }
    }

    /// The activations as the product takes them, quantised on all threads.
    fn activations(&self, io: Io, x: &Host) -> Host {
        if self.mode != Mode::Source || io != Io::Fp8 {
            return x.clone();
        }
        self.map(x, &x.shape()[1..], 4 * x.width(), |_, x, a| {
            a.copy_from_slice(&linear::activations(Mode::Source, Io::Fp8, x, x.len()));
        })
    }

    fn product(&self, weight: &Weight, io: Io, a: &Host) -> Vec<f32> {
        let mut y = vec![0.0; a.rows() * weight.rows()];
        self.products(io, vec![Job { weight, x: a.as_f32(), rows: a.rows(), y: &mut y }]);
        self.round(io, &mut y, weight.rows());
        y
    }

    /// All products of `jobs`, not rounded.
    fn products(&self, io: Io, jobs: Vec<Job>) {
        let ordered =
            |j: &Job| self.mode == Mode::Source && io == Io::Fp8 && source::has_order(j.weight.form());
        let (mut ordered, others): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(ordered);
        self.engine.run_source(&mut ordered);
        self.engine.run_any(others, ops::exl3::arithmetic(self.mode));
    }

    /// Attention of every row of `q` over the slots that `slots(row)` lists.
    fn attend<'s>(&self, q: &Host, sinks: &Host, slots: impl Fn(usize) -> Vec<Slot<'s>> + Sync) -> Host {
        let sinks = sinks.as_f32();
        let dim = q.width() / sinks.len();
        let scale = (dim as f64).powf(-0.5) as f32;
        let queries = Attention { q: q.as_f32(), dim, sinks, scale, round: self.mode == Mode::Source };
        let mut o = vec![0.0; q.rows() * q.width()];
        self.engine.attention(queries, slots, &mut o);
        Host::f32(q.shape(), o)
    }

    /// Rounds products in place on all threads.
    fn round(&self, io: Io, y: &mut [f32], width: usize) {
        if self.mode == Mode::Source && io != Io::F32 {
            self.rows(y, width, width, |_, y| numerics::bf16::round_slice(y));
        }
    }

    /// Gated experts: the rows of `a` (as the products take them, for EXL3 `raw`) lie group by group, every group under
    /// its own w1, w3, w2, every row with its own weight.
    fn experts(&self, [a, raw]: [&[f32]; 2], groups: &[Group], weights: &[f32], limit: f32) -> Vec<f32> {
        let [w1, _, w2] = groups[0].parts;
        let (inter, out, rows) = (w1.rows(), w2.rows(), weights.len());
        let (mut gate, mut up) = (vec![0.0; rows * inter], vec![0.0; rows * inter]);
        let mut jobs = Vec::with_capacity(2 * groups.len());
        let (mut g_rest, mut u_rest) = (&mut gate[..], &mut up[..]);
        for group in groups {
            let (g, u);
            (g, g_rest) = g_rest.split_at_mut(group.rows * inter);
            (u, u_rest) = u_rest.split_at_mut(group.rows * inter);
            for (weight, y) in [(group.parts[0], g), (group.parts[1], u)] {
                let x = group.input(if weight.form() == Form::Exl3 { raw } else { a }, w1.cols());
                jobs.push(Job { weight, x, rows: group.rows, y });
            }
        }
        self.products(Io::Fp8, jobs);
        self.round(Io::Fp8, &mut gate, inter);
        self.round(Io::Fp8, &mut up, inter);
        let quantised: Vec<bool> = groups
            .iter()
            .flat_map(|g| vec![self.mode == Mode::Source && g.parts[2].form() != Form::Exl3; g.rows])
            .collect();
        let mut hidden = vec![0.0; rows * inter];
        self.rows(&mut hidden, inter, 16 * inter, |r, h| {
            let range = r * inter..(r + 1) * inter;
            moe::swiglu(self.mode, &gate[range.clone()], &up[range], limit, weights[r], h);
            if quantised[r] {
                numerics::quantise::qdq_fp8(h);
            }
        });
        let mut y = vec![0.0; rows * out];
        let mut jobs = Vec::with_capacity(groups.len());
        let mut y_rest = &mut y[..];
        for group in groups {
            let part;
            (part, y_rest) = y_rest.split_at_mut(group.rows * out);
            let x = group.input(&hidden, inter);
            jobs.push(Job { weight: group.parts[2], x, rows: group.rows, y: part });
        }
        self.products(Io::Fp8, jobs);
        self.round(Io::Fp8, &mut y, out);
        y
    }
}

/// Rows that share an expert.
struct Group<'a> {
    /// w1, w3, w2.
    parts: [&'a Weight; 3],
    /// First row.
    start: usize,
    /// Number of rows.
    rows: usize,
}

/// Rows as fp8 products take them and as EXL3 takes them; what no group needs is empty.
struct Inputs {
    quantised: Vec<f32>,
    raw: Vec<f32>,
}

impl Inputs {
    fn of(groups: &[Group], raw: impl Fn() -> Vec<f32>, quantised: impl Fn() -> Vec<f32>) -> Self {
        let some =
            |exl3: bool| groups.iter().any(|g| g.parts[..2].iter().any(|w| (w.form() == Form::Exl3) == exl3));
        let make = |needed: bool, f: &dyn Fn() -> Vec<f32>| if needed { f() } else { Vec::new() };
        Self { quantised: make(some(false), &quantised), raw: make(some(true), &raw) }
    }

    fn both(&self) -> [&[f32]; 2] {
        [&self.quantised, &self.raw]
    }
}

impl Group<'_> {
    /// The group's rows of `all`, rows of `width` values.
    fn input<'x>(&self, all: &'x [f32], width: usize) -> &'x [f32] {
        &all[self.start * width..][..self.rows * width]
    }
}

impl Backend for Cpu {
    type Buf = Host;
    type Mat = Weight;
    type Experts = Vec<ExpertWeights>;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn mode(&self) -> Mode {
        self.mode
    }

    fn upload(&self, host: &Host) -> Result<Host, DeviceError> {
        Ok(host.clone())
    }

    fn read(&self, buf: &Host) -> Result<Host, DeviceError> {
        Ok(buf.clone())
    }

    fn shape(&self, buf: &Host) -> Vec<usize> {
        buf.shape().to_vec()
    }

    fn cache(&self, rows: usize, width: usize) -> Result<Host, DeviceError> {
        self.plain.cache(rows, width)
    }

    fn load(&self, weight: &Weight) -> Result<Weight, DeviceError> {
        Ok(weight.clone())
    }

    fn load_experts(&self, experts: Vec<ExpertWeights>) -> Result<Vec<ExpertWeights>, DeviceError> {
        Ok(experts)
    }

    fn concat_rows(&self, a: &Host, b: &Host) -> Host {
        a.concat_rows(b)
    }

    fn slice_rows(&self, x: &Host, start: usize, count: usize) -> Host {
        x.slice_rows(start, count)
    }

    fn reshape(&self, x: &Host, shape: &[usize]) -> Host {
        x.reshaped(shape)
    }

    fn embed(&self, table: &Weight, ids: &[u32]) -> Host {
        self.plain.embed(table, ids)
    }

    fn replicate(&self, x: &Host, streams: usize) -> Host {
        self.plain.replicate(x, streams)
    }

    fn rmsnorm(&self, x: &Host, weight: &Host, eps: f32) -> Host {
        self.map(x, &x.shape()[1..], 2 * x.width(), |_, x, y| {
            norm::rmsnorm_row(self.mode, x, weight.as_f32(), eps, y);
        })
    }

    fn linear(&self, x: &Host, weight: &Weight, io: Io) -> Host {
        let quantised = (weight.form() != Form::Exl3).then(|| self.activations(io, x));
        Host::f32(&[x.rows(), weight.rows()], self.product(weight, io, quantised.as_ref().unwrap_or(x)))
    }

    fn grouped_linear(&self, x: &Host, weight: &Weight, groups: usize) -> Host {
        let (rows, k, per) = (x.rows(), weight.cols(), weight.rows() / groups);
        // Group by group, so that every group's rows lie together.
        let mut inputs = vec![0.0; groups * rows * k];
        self.rows(&mut inputs, k, k, |i, o| o.copy_from_slice(&x.row(i % rows)[i / rows * k..][..k]));
        let mut outputs = vec![0.0; groups * rows * per];
        let each = inputs.chunks(rows * k).zip(outputs.chunks_mut(rows * per)).enumerate();
        if weight.form() == Form::Exl3 {
            let mut products: Vec<Product> =
                each.map(|(g, (x, y))| Product { weight, range: g * per..(g + 1) * per, x, y }).collect();
            self.engine.run_exl3(&mut products, ops::exl3::arithmetic(self.mode));
        } else {
            let parts: Vec<Weight> = (0..groups).map(|g| weight.rows_slice(g * per, per)).collect();
            let mut jobs: Vec<Job> = each.map(|(g, (x, y))| Job { weight: &parts[g], x, rows, y }).collect();
            self.engine.run(&mut jobs);
        }
        self.round(Io::Bf16, &mut outputs, per);
        self.map(x, &[weight.rows()], weight.rows(), |t, _, z| {
            for (g, z) in z.chunks_mut(per).enumerate() {
                z.copy_from_slice(&outputs[(g * rows + t) * per..][..per]);
            }
        })
    }

    fn argmax(&self, logits: &Host) -> Host {
        self.plain.argmax(logits)
    }

    fn rope(&self, x: &Host, head_dim: usize, table: &RopeTable, positions: &[u32], inverse: bool) -> Host {
        self.map(x, &x.shape()[1..], 4 * x.width(), |t, x, y| {
            y.copy_from_slice(x);
            rope::rope_row(self.mode, y, head_dim, table, positions[t], inverse);
        })
    }

    fn store_window(&self, kv: &Host) -> Host {
        let width = numerics::quantise::fp8_row_bytes(kv.width());
        let mut codes = vec![0; kv.rows() * width];
        self.rows(&mut codes, width, 8 * width, |t, row| numerics::quantise::store_fp8(kv.row(t), row));
        Host::u8(&[kv.rows(), width], codes)
    }

    fn ring_write(&self, ring: &mut Host, codes: &Host, positions: &[u32]) {
        self.plain.ring_write(ring, codes, positions);
    }

    fn publish_kv(&self, cache: &mut Host, latent: &Host, first: usize) {
        self.plain.publish_kv(cache, latent, first);
    }

    fn publish_key(&self, cache: &mut Host, key: &Host, first: usize) {
        self.plain.publish_key(cache, key, first);
    }

    fn quantise_index_query(&self, q: &Host) -> Host {
        self.map(q, &q.shape()[1..], 8 * q.width(), |_, q, out| {
            out.copy_from_slice(q);
            numerics::quantise::qdq_fp4(out);
        })
    }

    fn pool_pairs(&self, kv: &Host, score: &Host) -> Host {
        let d = kv.shape()[2];
        self.map(kv, &[d], 32 * d, |t, kv, out| pool::pool_pair(self.mode, kv, score.row(t), out))
    }

    fn index_scores(&self, q: &Host, w: &Host, cache: &Host, n: usize, visible: &[u32]) -> Host {
        let (heads, dim) = (w.width(), q.width() / w.width());
        let factor = ((heads * dim) as f64).powf(-0.5) as f32;
        let weights: Vec<f32> =
            w.as_f32().iter().map(|w| self.mode.bf16(self.mode.bf16(*w) * factor)).collect();
        let visible: Vec<usize> = visible.iter().map(|v| *v as usize).collect();
        let mut scores = vec![0.0; q.rows() * n];
        let queries =
            IndexQueries { q: q.as_f32(), dim, w: &weights, heads, round: self.mode == Mode::Source };
        self.engine.index_scores(queries, cache.as_u8(), n, &visible, &mut scores);
        Host::f32(&[q.rows(), n], scores)
    }

    fn candidates(&self, scores: &Host, visible: &[u32], block: usize, keep: usize) -> Host {
        let blocks = scores.width().div_ceil(block);
        let mut mask = vec![0; scores.rows() * blocks];
        self.rows(&mut mask, blocks, 4 * scores.width(), |t, m| {
            indexer::candidates_row(scores.row(t), visible[t] as usize, block, keep, m);
        });
        Host::u8(&[scores.rows(), blocks], mask)
    }

    fn mask_scores(&self, scores: &Host, mask: &Host, block: usize) -> Host {
        self.map(scores, &scores.shape()[1..], scores.width(), |t, s, out| {
            let kept = mask.code_row(t);
            for ((o, s), kept) in out.chunks_mut(block).zip(s.chunks(block)).zip(kept) {
                if *kept == 1 { o.copy_from_slice(s) } else { o.fill(f32::NEG_INFINITY) }
            }
        })
    }

    fn topk(&self, scores: &Host, k: usize) -> Host {
        let k = k.min(scores.width());
        let mut index = vec![-1; scores.rows() * k];
        self.rows(&mut index, k, 8 * scores.width(), |t, out| indexer::topk_row(scores.row(t), out));
        Host::i32(&[scores.rows(), k], index)
    }

    fn sparse_attention(
        &self,
        q: &Host,
        window: &Window<'_, Host>,
        compressed: Option<&Compressed<'_, Host>>,
        sinks: &Host,
        positions: &[u32],
    ) -> Host {
        self.attend(q, sinks, |t| {
            let p = positions[t];
            let ring = window.ring.rows();
            let oldest = (p + 1).saturating_sub(window.size as u32);
            let mut slots: Vec<Slot> = (oldest..=p)
                .map(|s| match s.checked_sub(window.base) {
                    Some(fresh) => Slot::Fp8(window.fresh.code_row(fresh as usize)),
                    None => Slot::Fp8(window.ring.code_row(s as usize % ring)),
                })
                .collect();
            if let Some(c) = compressed {
                // Empty columns keep their place, so that block borders depend on the position alone.
                slots.resize(window.size, Slot::Empty);
                let k = c.topk.width();
                slots.extend(c.topk.as_i32()[t * k..][..k].iter().map(|j| match usize::try_from(*j) {
                    Ok(j) if matches!(c.cache.data(), Data::F32(_)) => Slot::Plain(c.cache.row(j)),
                    Ok(j) => Slot::Kv(c.cache.code_row(j)),
                    Err(_) => Slot::Empty,
                }));
            }
            slots
        })
    }

    fn router(
        &self,
        logits: &Host,
        bias: &Host,
        image: Option<(&Host, &[bool])>,
        k: usize,
        scale: f32,
    ) -> Routing<Host> {
        let rows = logits.rows();
        // Ids ride as values beside the weights: they are small whole numbers.
        let mut both = vec![0.0; rows * 2 * k];
        self.rows(&mut both, 2 * k, 64 * logits.width(), |t, out| {
            let bias = match image {
                Some((vl, flags)) if flags[t] => vl,
                _ => bias,
            };
            let mut ids = vec![0; k];
            let (as_values, weights) = out.split_at_mut(k);
            moe::router_row(logits.row(t), bias.as_f32(), scale, &mut ids, weights);
            as_values.iter_mut().zip(&ids).for_each(|(v, id)| *v = *id as f32);
        });
        let part = |range: std::ops::Range<usize>| {
            both.chunks(2 * k).flat_map(move |row| row[range.clone()].to_vec())
        };
        Routing {
            experts: Host::i32(&[rows, k], part(0..k).map(|v| v as i32).collect()),
            weights: Host::f32(&[rows, k], part(k..2 * k).collect()),
        }
    }

    fn routed_experts(
        &self,
        x: &Host,
        routing: &Routing<Host>,
        experts: &Vec<ExpertWeights>,
        limit: f32,
    ) -> Host {
        let (k, d) = (routing.experts.width(), x.width());
        let (ids, weights) = (routing.experts.as_i32(), routing.weights.as_f32());
        // Choices sorted by expert: every expert's rows lie together, and a token's experts add up in ascending order.
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_by_key(|c| ids[*c]);
        let gather = |x: &Host| {
            let mut inputs = vec![0.0; order.len() * d];
            self.rows(&mut inputs, d, d, |i, o| o.copy_from_slice(x.row(order[i] / k)));
            inputs
        };
        let mut groups: Vec<Group> = Vec::new();
        let mut places = vec![Vec::with_capacity(k); x.rows()];
        for (i, c) in order.iter().enumerate() {
            places[c / k].push(i);
            let e = &experts[ids[*c] as usize];
            match groups.last_mut() {
                Some(g) if i > 0 && ids[order[i - 1]] == ids[*c] => g.rows += 1,
                _ => groups.push(Group { parts: [&e.gate, &e.up, &e.down], start: i, rows: 1 }),
            }
        }
        let weights: Vec<f32> = order.iter().map(|c| weights[*c]).collect();
        let inputs = Inputs::of(&groups, || gather(x), || gather(&self.activations(Io::Fp8, x)));
        let y = self.experts(inputs.both(), &groups, &weights, limit);
        self.map(x, &[d], 2 * k * d, |t, _, acc| {
            for i in &places[t] {
                acc.iter_mut().zip(&y[i * d..][..d]).for_each(|(a, y)| *a += y);
            }
        })
    }

    fn shared_expert(&self, x: &Host, parts: [&Weight; 3], limit: f32) -> Host {
        let rows = x.rows();
        let all = [Group { parts, start: 0, rows }];
        let inputs =
            Inputs::of(&all, || x.as_f32().to_vec(), || self.activations(Io::Fp8, x).as_f32().to_vec());
        Host::f32(x.shape(), self.experts(inputs.both(), &all, &vec![1.0; rows], limit))
    }

    fn moe_sum(&self, routed: &Host, shared: &Host) -> Host {
        self.map(routed, &routed.shape()[1..], routed.width(), |t, a, y| {
            for ((y, a), b) in y.iter_mut().zip(a).zip(shared.row(t)) {
                *y = self.mode.bf16(a + b);
            }
        })
    }

    fn hc_mix(
        &self,
        streams: &Host,
        fun: &Weight,
        scale: &Host,
        base: &Host,
        constants: MixConstants,
    ) -> Mix<Host> {
        let rows = streams.rows();
        let projections = self.product(fun, Io::F32, streams);
        let (mut pre, mut post, mut comb) = (vec![0.0; rows * 4], vec![0.0; rows * 4], vec![0.0; rows * 16]);
        let mut all = vec![0.0; rows * MIX];
        self.rows(&mut all, MIX, 2 * streams.width() + 2000, |t, out| {
            let (pre, rest) = out.split_at_mut(4);
            let (post, comb) = rest.split_at_mut(4);
            let mean = norm::mean_square(streams.row(t));
            let (scale, base) = (scale.as_f32(), base.as_f32());
            hyper::mix_row(&projections[t * MIX..][..MIX], mean, scale, base, constants, pre, post, comb);
        });
        for (t, row) in all.chunks(MIX).enumerate() {
            pre[t * 4..][..4].copy_from_slice(&row[..4]);
            post[t * 4..][..4].copy_from_slice(&row[4..8]);
            comb[t * 16..][..16].copy_from_slice(&row[8..]);
        }
        Mix {
            pre: Host::f32(&[rows, 4], pre),
            post: Host::f32(&[rows, 4], post),
            comb: Host::f32(&[rows, 4, 4], comb),
        }
    }

    fn hc_collapse(&self, streams: &Host, pre: &Host) -> Host {
        let d = streams.shape()[2];
        self.map(streams, &[d], 4 * d, |t, x, out| hyper::collapse_row(self.mode, x, pre.row(t), out))
    }

    fn hc_expand(&self, streams: &Host, y: &Host, mix: &Mix<Host>) -> Host {
        self.map(streams, &streams.shape()[1..], 5 * streams.width(), |t, x, out| {
            hyper::expand_row(self.mode, x, y.row(t), mix.post.row(t), mix.comb.row(t), out);
        })
    }

    fn engram_rows(&self, table: &Weight, rows: &[u64], columns: usize) -> Host {
        engram::engram_rows(table, rows, columns)
    }

    fn engram_gate(
        &self,
        streams: &Host,
        kv: &Host,
        q_weight: &Host,
        k_weight: &Host,
        alive: &[bool],
    ) -> (Host, Host) {
        let (n, width) = (streams.shape()[1], streams.width());
        let (q, k) = (q_weight.as_f32(), k_weight.as_f32());
        let gate = self.map(streams, &[n], 8 * width, |t, x, gate| {
            engram::gates_row(x, kv.row(t), q, k, alive[t], gate);
        });
        let out = self.map(streams, &streams.shape()[1..], 2 * width, |t, x, out| {
            engram::add_row(self.mode, x, kv.row(t), gate.row(t), out);
        });
        (out, gate)
    }

    fn stream_mean(&self, streams: &Host) -> Host {
        let d = streams.shape()[2];
        self.map(streams, &[d], 4 * d, |_, x, out| dspark::stream_mean_row(self.mode, x, out))
    }

    fn draft_attention(
        &self,
        q: &Host,
        ring: &Host,
        window: usize,
        block: &Host,
        sinks: &Host,
        position: u32,
    ) -> Host {
        self.attend(q, sinks, |_| {
            let oldest = (position + 1).saturating_sub(window as u32);
            let row = |p: u32| Slot::Fp8(ring.code_row(p as usize % ring.rows()));
            let mut slots: Vec<Slot> = (oldest..=position).map(row).collect();
            slots.resize(window, Slot::Empty);
            slots.extend((0..block.rows()).map(|b| Slot::Fp8(block.code_row(b))));
            slots
        })
    }

    fn markov_bias(&self, base: &Host, bias: &Host) -> Host {
        self.plain.markov_bias(base, bias)
    }

    fn concat_cols(&self, parts: &[&Host]) -> Host {
        dspark::concat_cols(parts)
    }
}
