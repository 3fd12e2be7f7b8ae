//! Engram memory: n-gram hashes, table rows and the gate [§2.9].

use checkpoint::{Form, Weight};

use crate::{
    Backend, DeviceError, Host, Mode,
    norm::{mean_square, rsqrt},
    registry::*,
};

/// A token of the n-gram history: its compressed id, or nothing where it cannot take part (an image span).
pub type HistoryToken = Option<u32>;

/// How one Engram layer hashes n-grams to table rows.
#[derive(Clone, Debug)]
pub struct HashPlan {
    /// Odd multipliers by distance.
    pub multipliers: Vec<u64>,
    /// Table sizes, column = (n − 2)·heads + head.
    pub primes: Vec<u64>,
    /// Columns of one n.
    pub heads: usize,
    /// Compressed id that stands for what lies before the text or inside an image span.
    pub pad: u32,
}

impl HashPlan {
    /// Rows of the position whose token is `history`'s last; earlier tokens stand before it, as many as known.
    pub fn rows(&self, history: &[HistoryToken]) -> Vec<u64> {
        let mut offset = 0;
        let mut offsets = self.primes.iter().map(|p| {
            offset += p;
            offset - p
        });
        let mut roll = 0;
        let mut blocked = false;
        let mut rows = Vec::with_capacity(self.primes.len());
        for (s, m) in self.multipliers.iter().enumerate() {
            let token = history.len().checked_sub(s + 1).and_then(|i| history[i]);
            blocked |= token.is_none();
            let id = if blocked { self.pad } else { token.unwrap_or(self.pad) };
            roll ^= u64::from(id) * m;
            if s > 0 {
                for p in &self.primes[(s - 1) * self.heads..][..self.heads] {
                    rows.push(roll % p + offsets.next().unwrap_or(0));
                }
            }
        }
        rows
    }
}

/// Table rows `[T, columns]` one after the other: `[T, columns·dim]`. Exact in bf16.
pub fn engram_rows(table: &Weight, rows: &[u64], columns: usize) -> Host {
    let dim = table.cols();
    let mut e = vec![0.0; rows.len() * dim];
    for (row, out) in rows.iter().zip(e.chunks_mut(dim)) {
        table.decode_row(*row as usize, out);
    }
    Host::f32(&[rows.len() / columns, columns * dim], e)
}

/// One row's gates: each stream's key against the stream; 0 where the token is not `alive`.
pub fn gates_row(
    streams: &[f32],
    kv: &[f32],
    q_weight: &[f32],
    k_weight: &[f32],
    alive: bool,
    gate: &mut [f32],
) {
    let d = streams.len() / gate.len();
    for (i, gate) in gate.iter_mut().enumerate() {
        let range = i * d..(i + 1) * d;
        let (x, key) = (&streams[range.clone()], &kv[range.clone()]);
        let (q, k) = (&q_weight[range.clone()], &k_weight[range]);
        let sum: f64 = (0..d).map(|c| f64::from(x[c] * (q[c] * k[c]) * key[c])).sum();
        let norms = rsqrt(mean_square(x) + 1e-20) * rsqrt(mean_square(key) + 1e-20);
        let dot = sum as f32 * norms * (d as f64).powf(-0.5) as f32;
        let root = dot.abs().max(1e-6).sqrt().copysign(dot);
        *gate = if alive { 1.0 / (1.0 + (-root).exp()) } else { 0.0 };
    }
}

/// One row's new streams: each stream plus its gate times the value, which lies behind the keys in `kv`.
pub fn add_row(mode: Mode, streams: &[f32], kv: &[f32], gate: &[f32], out: &mut [f32]) {
    let d = streams.len() / gate.len();
    let value = &kv[streams.len()..];
    for ((out, x), gate) in out.chunks_mut(d).zip(streams.chunks(d)).zip(gate) {
        for (o, (x, v)) in out.iter_mut().zip(x.iter().zip(value)) {
            *o = mode.bf16(x + gate * v);
        }
    }
}

/// Registry entry of the table lookup.
pub struct EngramRows;

impl Operator for EngramRows {
    const SPEC: Spec = Spec {
        name: "engram_rows",
        section: "2.9",
        contract: "table [R, e] fp8 rows, row ids [T, columns] -> e [T, columns*e]; exact in bf16",
        exact: Tolerance::bits("a decoder"),
        source: Tolerance::bits("a decoder"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        let s = c.stream("ids");
        let ids = (0..(rows * g.engram_cols) as u64).map(|i| (s.word(i) % 500) as i32).collect();
        c.row_input("ids", Host::i32(&[rows, g.engram_cols], ids)).weight(
            "table",
            Form::Fp8Row32,
            500,
            g.engram_dim,
        );
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let ids: Vec<u64> = c.u32s("ids").into_iter().map(u64::from).collect();
        let columns = c.host("ids").width();
        Ok(vec![("e", b.read(&b.engram_rows(c.get_weight("table"), &ids, columns))?)])
    }
}

/// Registry entry of the gate.
pub struct EngramGate;

impl Operator for EngramGate {
    const SPEC: Spec = Spec {
        name: "engram_gate",
        section: "2.9",
        contract: "X [T, 4, d], kv [T, 5d], q_weight [4, d], k_weight [4, d], alive [T] -> X' [T, 4, d], gate [T, 4]; \
                   gate 0 in an image span; source: X' bf16",
        exact: Tolerance::nrms(1e-6, "fp32 accumulation order over d, exp of 1 ulp"),
        source: Tolerance::nrms(3e-4, "a last-bit change of the gate flips isolated bf16 roundings"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("streams", &[4, g.hidden], 1.0).normal("kv", &[5 * g.hidden], 1.0);
        c.shared_normal("q_weight", &[4, g.hidden], 0.2, 1.0).shared_normal(
            "k_weight",
            &[4, g.hidden],
            0.2,
            1.0,
        );
        c.row_input("alive", Host::i32(&[rows], (0..rows as i32).map(|r| i32::from(r % 5 != 3)).collect()));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let alive: Vec<bool> = c.u32s("alive").iter().map(|v| *v != 0).collect();
        let (x, kv) = (c.buf(b, "streams")?, c.buf(b, "kv")?);
        let (x, gate) = b.engram_gate(&x, &kv, &c.buf(b, "q_weight")?, &c.buf(b, "k_weight")?, &alive);
        Ok(vec![("streams", b.read(&x)?), ("gate", b.read(&gate)?)])
    }
}
