//! Writing a trace of our own engine: what the taps give, in the engine-neutral shapes of the format.

use std::collections::BTreeMap;

use checkpoint::{Checkpoint, Config};
use model::{Input, Model, Rows, State};
use numerics::quantise;
use ops::{Backend, Data, Host, Taps};

use crate::{
    Result,
    scores::{RouterScores, choice_margin},
    trace::{Draft, Elements, Kind, Tensor, place},
};

/// Turns taps into trace tensors. Codes become values, block masks become entry masks, margins are added.
pub struct Recorder<'a> {
    config: &'a Config,
    /// Router weights by layer, for the margins of expert choices; empty without a checkpoint.
    routers: BTreeMap<usize, RouterScores>,
    /// Rows inside an image span; empty for text.
    image: Vec<bool>,
    found: BTreeMap<String, Tensor>,
    positions: Vec<u32>,
}

impl<'a> Recorder<'a> {
    /// A recorder for a model of `config`; with a checkpoint it adds `router.margin`.
    ///
    /// # Errors
    /// A router tensor that is missing.
    pub fn new(config: &'a Config, checkpoint: Option<&Checkpoint>) -> Result<Self> {
        let mut routers = BTreeMap::new();
        if let Some(checkpoint) = checkpoint {
            for l in 0..config.num_hidden_layers {
                routers.insert(l, RouterScores::load(checkpoint, l)?);
            }
        }
        Ok(Self { config, routers, image: Vec::new(), found: BTreeMap::new(), positions: Vec::new() })
    }

    /// Begins a step whose rows stand at `positions`; `image` as in [`Input`].
    pub fn begin(&mut self, positions: Vec<u32>, image: &[bool]) {
        self.positions = positions;
        self.image = image.to_vec();
        self.found.clear();
    }

    /// What the step gave, by name.
    pub fn take(&mut self) -> BTreeMap<String, Tensor> {
        std::mem::take(&mut self.found)
    }

    /// Takes one tap.
    pub fn tap(&mut self, name: &str, host: &Host) {
        let at = place(name);
        let prefix = at.layer.map_or_else(String::new, |l| format!("layers.{l}."));
        let c = self.config;
        let tensor = match (at.stage.as_str(), host.data()) {
            ("window_kv", Data::U8(_)) => decoded(host, c.head_dim, quantise::load_fp8),
            ("compress_kv", Data::U8(_)) => decoded(host, c.head_dim, quantise::load_kv),
            ("index_k", Data::U8(_)) => decoded(host, c.index_head_dim, quantise::load_fp4),
            ("candidates", Data::U8(_)) => self.entry_mask(host, at.layer),
            ("engram.kv", Data::F32(_)) => {
                let (d, w) = (c.hidden_size, host.width());
                let values = (0..host.rows()).flat_map(|r| host.row(r)[w - d..].iter().copied()).collect();
                self.found.insert(format!("{prefix}engram.value"), Tensor::float(&[host.rows(), d], values));
                return;
            }
            _ => plain(host),
        };
        if let (Some(l), Kind::Scores, Some(scores)) = (at.layer, at.kind, tensor.as_float()) {
            self.selection_margins(l, scores, tensor.width());
        }
        if let (Some(l), "ffn_in", Some(x)) = (at.layer, at.stage.as_str(), tensor.as_float())
            && let Some(router) = self.routers.get(&l)
        {
            let k = c.num_experts_per_tok;
            let margin: Vec<f32> = (0..tensor.rows())
                .map(|r| {
                    let image = self.image.get(r).copied().unwrap_or(false);
                    let row = &x[r * tensor.width()..][..tensor.width()];
                    choice_margin(&router.biased(row, image), k) as f32
                })
                .collect();
            self.found.insert(format!("{prefix}router.margin"), Tensor::float(&[margin.len()], margin));
        }
        self.found.insert(name.to_owned(), tensor);
    }

    fn entry_mask(&self, host: &Host, layer: Option<usize>) -> Tensor {
        let ratio = layer.map_or(1, |l| self.config.layer(l).ratio.max(1)) as u32;
        let n = self.positions.last().map_or(0, |p| (p + 1) / ratio) as usize;
        let block = self.config.candidate_block_size;
        let mut mask = Vec::with_capacity(host.rows() * n);
        for (r, p) in self.positions.iter().enumerate() {
            let kept = host.code_row(r);
            let visible = ((p + 1) / ratio) as usize;
            mask.extend((0..n).map(|j| i64::from(j < visible && kept[j / block] == 1)));
        }
        Tensor::int(&[host.rows(), n], mask)
    }

    fn selection_margins(&mut self, l: usize, scores: &[f32], n: usize) {
        let c = self.config;
        let rows = scores.len() / n.max(1);
        let row = |r: usize| scores[r * n..][..n].iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
        let margins = (0..rows).map(|r| choice_margin(&row(r), c.index_topk) as f32).collect();
        self.found.insert(format!("layers.{l}.topk.margin"), Tensor::float(&[rows], margins));
        if c.layer(l).candidate_source {
            let margins = (0..rows)
                .map(|r| {
                    choice_margin(&block_scores(&row(r), c.candidate_block_size), c.candidate_topk_blocks)
                        as f32
                })
                .collect();
            self.found.insert(format!("layers.{l}.candidates.margin"), Tensor::float(&[rows], margins));
        }
    }
}

/// Best score of each block, the newest visible block first of all.
fn block_scores(row: &[f64], block: usize) -> Vec<f64> {
    let visible = row.iter().rposition(|v| *v > f64::NEG_INFINITY).map_or(0, |j| j + 1);
    let mut best: Vec<f64> =
        row.chunks(block).map(|b| b.iter().copied().fold(f64::NEG_INFINITY, f64::max)).collect();
    if visible > 0 {
        best[(visible - 1) / block] = f64::INFINITY;
    }
    best
}

fn decoded(host: &Host, dim: usize, load: fn(&[u8], &mut [f32])) -> Tensor {
    let mut values = vec![0.0; host.rows() * dim];
    values.chunks_mut(dim).enumerate().for_each(|(r, out)| load(host.code_row(r), out));
    Tensor::float(&[host.rows(), dim], values)
}

fn plain(host: &Host) -> Tensor {
    match host.data() {
        Data::F32(v) => Tensor::float(host.shape(), v.clone()),
        Data::I32(v) => Tensor::int(host.shape(), v.iter().map(|v| i64::from(*v)).collect()),
        Data::U8(v) => Tensor::int(host.shape(), v.iter().map(|v| i64::from(*v)).collect()),
    }
}

/// Runs one step with all taps on; every intermediate by name.
///
/// # Errors
/// What the model or the device reports.
pub(crate) fn recorded_step<B: Backend>(
    model: &Model<B>,
    state: &mut State<B>,
    input: Input<'_>,
    recorder: &mut Recorder<'_>,
) -> Result<BTreeMap<String, Tensor>> {
    let first = state.len();
    recorder.begin((first..first + input.ids.len()).map(|p| p as u32).collect(), input.image);
    let mut failure = None;
    let mut sink = |name: &str, value: &B::Buf| match model.backend().read(value) {
        Ok(host) => recorder.tap(name, &host),
        Err(e) => failure = Some(e),
    };
    model.forward(state, input, Rows::All, &mut Taps::new(&mut sink))?;
    match failure {
        Some(e) => Err(e.into()),
        None => Ok(recorder.take()),
    }
}

/// Records a prefill of `input` as `pass`.
///
/// # Errors
/// What the model or the device reports.
pub fn record_prefill<B: Backend>(
    model: &Model<B>,
    recorder: &mut Recorder<'_>,
    input: Input<'_>,
    pass: &str,
    draft: &mut Draft,
) -> Result<()> {
    let mut state = model.new_state(input.ids.len())?;
    let found = recorded_step(model, &mut state, input, recorder)?;
    draft.put(pass, "tokens", token_tensor(input.ids));
    found.into_iter().for_each(|(name, t)| draft.put(pass, &name, t));
    Ok(())
}

/// How to record decode steps.
#[derive(Clone, Copy, Debug)]
pub struct Decode<'a> {
    /// Tokens of the prefill.
    pub prompt: &'a [u32],
    /// Tokens to choose, the first by the prefill.
    pub steps: usize,
    /// Tokens to take instead of the greedy choice, so that two engines follow the same text; empty for greedy.
    pub follow: &'a [u32],
}

/// Records a prefill and single-token steps as pass `decode`: `tokens` are the prompt and the chosen ones, row i of
/// `logits` and `final_hidden` chose token N + i, rows of layers are of the steps alone, and `dspark.*` are what the
/// draft head says after each step.
///
/// # Errors
/// What the model or the device reports.
pub fn record_decode<B: Backend>(
    model: &Model<B>,
    recorder: &mut Recorder<'_>,
    run: Decode<'_>,
    draft: &mut Draft,
) -> Result<()> {
    const PASS: &str = "decode";
    let mut state = model.new_state(run.prompt.len() + run.steps)?;
    let mut rows: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
    let first = recorded_step(model, &mut state, Input::text(run.prompt), recorder)?;
    for name in ["logits", "final_hidden"] {
        if let Some(t) = first.get(name) {
            rows.entry(name.into()).or_default().push(last_row(t));
        }
    }
    let mut ids = run.prompt.to_vec();
    for i in 0..run.steps {
        let logits = rows["logits"].last().and_then(Tensor::as_float).unwrap_or(&[]);
        let chosen = run.follow.get(i).copied().unwrap_or_else(|| ops::linear::argmax(logits) as u32);
        ids.push(chosen);
        // The rows before the last choice were already computed for the token before it.
        if i + 1 == run.steps {
            break;
        }
        let found = recorded_step(model, &mut state, Input::text(&[chosen]), recorder)?;
        let logits = found.get("logits").and_then(Tensor::as_float).unwrap_or(&[]);
        let next = run.follow.get(i + 1).copied().unwrap_or_else(|| ops::linear::argmax(logits) as u32);
        if let Some(d) = model.draft(&state, next)? {
            let block = d.ids.len();
            let tokens = std::iter::once(next).chain(d.ids).map(i64::from).collect();
            let logits = Tensor::float(&[1, block, d.logits.width()], d.logits.as_f32().to_vec());
            let mut put = |name: &str, t: Tensor| rows.entry(name.into()).or_default().push(t);
            put("dspark.tokens", Tensor::int(&[1, block + 1], tokens));
            put("dspark.logits", logits);
            put("dspark.confidence", Tensor::float(&[1, block], d.confidence));
        }
        found.into_iter().for_each(|(name, t)| rows.entry(name).or_default().push(t));
    }
    draft.put(PASS, "tokens", token_tensor(&ids));
    for (name, parts) in rows {
        draft.put(PASS, &name, stacked(place(&name).kind, parts));
    }
    Ok(())
}

fn token_tensor(ids: &[u32]) -> Tensor {
    Tensor::int(&[ids.len()], ids.iter().map(|id| i64::from(*id)).collect())
}

fn last_row(t: &Tensor) -> Tensor {
    let (w, at) = (t.width(), t.rows().saturating_sub(1));
    let mut shape = t.shape.clone();
    shape[0] = 1;
    match &t.elements {
        Elements::Float(v) => Tensor::float(&shape, v[at * w..].to_vec()),
        Elements::Int(v) => Tensor::int(&shape, v[at * w..].to_vec()),
    }
}

/// One tensor of all steps' rows. Widths grow with the number of entries; short rows are filled with what means
/// "nothing there".
fn stacked(kind: Kind, parts: Vec<Tensor>) -> Tensor {
    let width = parts.iter().map(Tensor::width).max().unwrap_or(0);
    let mut parts = parts.into_iter().map(|t| if t.width() < width { padded(kind, &t, width) } else { t });
    let mut all = parts.next().expect("a name has at least one step");
    parts.for_each(|t| all.append(&t));
    all
}

fn padded(kind: Kind, t: &Tensor, width: usize) -> Tensor {
    fn fill<T: Copy>(v: &[T], from: usize, to: usize, with: T) -> Vec<T> {
        if from == 0 {
            return vec![with; to];
        }
        v.chunks(from).flat_map(|r| r.iter().copied().chain(std::iter::repeat_n(with, to - from))).collect()
    }
    let shape = [t.rows(), width];
    match &t.elements {
        Elements::Float(v) => Tensor::float(&shape, fill(v, t.width(), width, f32::NEG_INFINITY)),
        Elements::Int(v) => {
            let empty = if kind == Kind::Mask { 0 } else { -1 };
            Tensor::int(&shape, fill(v, t.width(), width, empty))
        }
    }
}
