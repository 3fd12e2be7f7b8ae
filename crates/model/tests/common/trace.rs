//! Intermediates of a step in the names and forms of the golden files, and their comparison in forward order.

use checkpoint::Config;
use model::{Input, Model, Rows};
use numerics::quantise;
use ops::{Backend, Data, Host, Taps, registry::nrms};

use super::Golden;

/// Every intermediate of one step on an empty state, in the order of the forward pass.
pub fn trace<B: Backend>(model: &Model<B>, input: Input<'_>) -> Vec<(String, Host)> {
    let mut found = Vec::new();
    let mut sink = |name: &str, value: &B::Buf| {
        found.push((name.to_owned(), model.backend().read(value).unwrap()));
    };
    let mut state = model.new_state(input.ids.len()).unwrap();
    model.forward(&mut state, input, Rows::All, &mut Taps::new(&mut sink)).unwrap();
    found.into_iter().map(|(name, value)| as_golden(model.config(), name, value)).collect()
}

/// Renames and decodes a tap: caches as values, candidates by visible entry, of Engram's projection the value part.
fn as_golden(c: &Config, name: String, value: Host) -> (String, Host) {
    let suffix = name.rsplit('.').next().unwrap();
    match suffix {
        "window_kv" => (name, decoded(&value, c.head_dim, quantise::load_fp8)),
        "compress_kv" => (name, decoded(&value, c.head_dim, quantise::load_kv)),
        "index_k" => (name, decoded(&value, c.index_head_dim, quantise::load_fp4)),
        "kv" => (name.replace(".kv", ".value"), columns(&value, c.hc_mult * c.hidden_size, c.hidden_size)),
        "candidates" => {
            let (t, block) = (value.rows(), c.candidate_block_size);
            let seen = |p: usize, j: usize| u8::from(j <= p && value.code_row(p)[j / block] == 1);
            let mask = (0..t).flat_map(|p| (0..t).map(move |j| seen(p, j))).collect();
            (name, Host::u8(&[t, t], mask))
        }
        _ => (name, value),
    }
}

fn decoded(codes: &Host, dim: usize, load: fn(&[u8], &mut [f32])) -> Host {
    let mut values = vec![0.0; codes.rows() * dim];
    for (r, row) in values.chunks_mut(dim).enumerate() {
        load(codes.code_row(r), row);
    }
    Host::f32(&[codes.rows(), dim], values)
}

/// Columns `first..first + count`.
pub fn columns(x: &Host, first: usize, count: usize) -> Host {
    let values = (0..x.rows()).flat_map(|r| x.row(r)[first..first + count].to_vec()).collect();
    Host::f32(&[x.rows(), count], values)
}

/// How one row of one intermediate compares with the golden.
#[derive(Clone, Debug)]
pub struct Row {
    pub name: String,
    pub row: usize,
    /// NRMS of values; of choices 0 where equal, else infinite; of stored codes the share of differing elements.
    pub distance: f64,
}

/// Kinds of intermediates by what equality means for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Values,
    Choice,
    Stored,
}

pub fn kind(name: &str) -> Kind {
    match name.rsplit('.').next().unwrap() {
        "topk" | "experts" | "hash_ids" | "candidates" => Kind::Choice,
        "window_kv" | "compress_kv" | "index_k" => Kind::Stored,
        _ => Kind::Values,
    }
}

/// Every row of every intermediate that the golden's group has too, in forward order.
pub fn compare(trace: &[(String, Host)], golden: &Golden, group: &str) -> Vec<Row> {
    let key = |name: &str| format!("{group}/{name}");
    let shared = trace.iter().filter(|(name, _)| golden.has(&key(name)));
    shared.flat_map(|(name, got)| compare_rows(name, got, &golden.get(&key(name)))).collect()
}

/// Every row of one intermediate.
pub fn compare_rows(name: &str, got: &Host, want: &Host) -> Vec<Row> {
    assert_eq!(got.shape(), want.shape(), "{name}");
    let row = |row| Row { name: name.to_owned(), row, distance: distance(name, got, want, row) };
    (0..got.rows()).map(row).collect()
}

/// Limit of a row's distance in `exact`.
pub fn limit(name: &str) -> f64 {
    match name.rsplit('.').next().unwrap() {
        // Signed sums over heads: of rows with few entries, terms cancel to a tenth and less of their size.
        "index_scores" => 1e-5,
        // Ratios of two scores that are sqrt(softplus) of a logit, which may be small.
        "weights" => 5e-6,
        // fp32 sums in another order, through up to ten layers.
        _ if kind(name) == Kind::Values => 2e-6,
        _ => 0.0,
    }
}

fn distance(name: &str, got: &Host, want: &Host, r: usize) -> f64 {
    let w = got.width();
    let range = r * w..(r + 1) * w;
    match (got.data(), want.data()) {
        (Data::F32(a), Data::F32(b)) if kind(name) == Kind::Stored => {
            let pairs = a[range.clone()].iter().zip(&b[range]);
            pairs.filter(|(a, b)| a != b).count() as f64 / w as f64
        }
        (Data::F32(a), Data::F32(b)) => nrms(&a[range.clone()], &b[range]),
        (Data::I32(a), Data::I32(b)) if a[range.clone()] == b[range.clone()] => 0.0,
        (Data::U8(a), Data::U8(b)) if a[range.clone()] == b[range.clone()] => 0.0,
        _ => f64::INFINITY,
    }
}
