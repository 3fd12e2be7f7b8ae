//! Measures the self-noise of every test model and of the trained demo model, and writes `docs/self-noise.md`.

#[path = "../tests/common/mod.rs"]
mod common;

use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

use checkpoint::Checkpoint;
use common::{cpu, golden, judged, load, opened, root};
use numerics::generator::{fnv1a64, mix};
use ops::{Host, Mode, Reference};
use qualify::{
    gates::model::{decode, forward},
    judge::metrics,
    noise::{Draw, median, self_noise},
};
use safetensors::{SafeTensors, tensor::TensorView};

/// Perturbed runs of a text.
const DRAWS: usize = 8;
/// Most tokens of a text.
const TOKENS: usize = 160;
/// Lines of the demo model's recorded conversations.
const CONVERSATIONS: usize = 24;

struct Subject {
    name: &'static str,
    checkpoint: Checkpoint,
    texts: Vec<Vec<u32>>,
}

/// One row of the table.
#[derive(Default)]
struct Row {
    nrms: Vec<f64>,
    kl: Vec<f64>,
    top1: Vec<f64>,
    vanished: usize,
}

impl Row {
    fn push(&mut self, moved: &Host, base: &Host) {
        let values = metrics::values(moved.as_f32(), base.as_f32());
        if values.nrms == 0.0 {
            self.vanished += 1;
            return;
        }
        let l = metrics::logits(moved.as_f32(), base.as_f32(), base.width());
        self.draw(&Draw { position: 0, element: 0, nrms: values.nrms, kl: l.kl, top1: l.top1 });
    }

    fn draw(&mut self, d: &Draw) {
        self.nrms.push(d.nrms);
        self.kl.push(d.kl);
        self.top1.push(d.top1);
    }

    fn text(&self, subject: &str, mode: &str, change: &str) -> String {
        let runs = self.nrms.len() + self.vanished;
        if self.nrms.is_empty() {
            return format!("| {subject} | {mode} | {change} | 0 of {runs} | 0 | 0 | 0 | 1 |\n");
        }
        let largest = self.nrms.iter().copied().fold(0.0, f64::max);
        format!(
            "| {subject} | {mode} | {change} | {} of {runs} | {:.1e} | {largest:.1e} | {:.1e} | {:.4} |\n",
            self.nrms.len(),
            median(self.nrms.iter().copied()),
            median(self.kl.iter().copied()),
            self.top1.iter().sum::<f64>() / self.top1.len() as f64
        )
    }
}

fn rows(s: &Subject, mode: Mode) -> String {
    let (fast, scalar) = (load(&s.checkpoint, cpu(mode)), load(&s.checkpoint, Reference::new(mode)));
    let (mut ulp, mut order, mut steps) = (Row::default(), Row::default(), Row::default());
    for ids in &s.texts {
        let noise = self_noise(&fast, &s.checkpoint, ids, ids.len(), DRAWS).unwrap();
        noise.draws.iter().for_each(|d| ulp.draw(d));
        ulp.vanished += noise.vanished;
        let base = forward(&fast, ids).unwrap();
        order.push(&forward(&scalar, ids).unwrap(), &base);
        let half = ids.len() / 2;
        steps.push(&decode(&fast, ids, half).unwrap(), &base.slice_rows(ids.len() - half, half));
        eprintln!("{} {}: {} tokens", s.name, mode.name(), ids.len());
    }
    ulp.text(s.name, mode.name(), "one ulp of one embedding element")
        + &order.text(s.name, mode.name(), "sums in another order (scalar code)")
        + &steps.text(s.name, mode.name(), "one token a step instead of one prefill")
}

/// The demo model with the elements of every weight in another order: the same sizes, nothing learned.
fn shuffled(to: &Path) -> Checkpoint {
    let from = root().join("models/demo");
    for entry in fs::read_dir(&from).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let bytes = fs::read(&path).unwrap();
        if !name.ends_with(".safetensors") {
            fs::write(to.join(name), bytes).unwrap();
            continue;
        }
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut mixed = BTreeMap::new();
        for (tensor, view) in file.tensors() {
            let size = (view.dtype().bitsize() / 8).max(1);
            let mut elements: Vec<&[u8]> = view.data().chunks(size).collect();
            if !tensor.ends_with(".scale") {
                for i in (1..elements.len()).rev() {
                    let word = mix(fnv1a64(tensor.as_bytes()) ^ mix(i as u64));
                    elements.swap(i, (word % (i as u64 + 1)) as usize);
                }
            }
            mixed.insert(tensor, (view.dtype(), view.shape().to_vec(), elements.concat()));
        }
        let views = mixed.iter().map(|(n, (d, s, b))| (n, TensorView::new(*d, s.clone(), b).unwrap()));
        fs::write(to.join(name), safetensors::serialize(views, None).unwrap()).unwrap();
    }
    Checkpoint::open(to).unwrap()
}

fn conversations() -> Vec<Vec<u32>> {
    let text = fs::read_to_string(root().join("models/demo/expected.jsonl")).unwrap();
    let ids = |v: &serde_json::Value| -> Vec<u32> {
        v.as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as u32).collect()
    };
    text.lines()
        .take(CONVERSATIONS)
        .map(|line| {
            let case: serde_json::Value = serde_json::from_str(line).unwrap();
            let mut all = ids(&case["prompt_ids"]);
            all.extend(ids(&case["float32"]["ids"]));
            all.pop();
            all.truncate(TOKENS);
            all
        })
        .collect()
}

/// Pairs of golden files: neither is ours.
fn pairs() -> String {
    let mut out = String::new();
    for (candidate, reference, what) in [
        ("official_float32", "float32", "another implementation, the same numerics"),
        ("bf16", "float32", "other numerics: bf16 products"),
        ("official", "float32", "other numerics: every rounding of the released code"),
    ] {
        for model in ["nano", "micro"] {
            let j = judged(model, candidate, reference);
            let logits = j.passes.iter().filter(|p| p.pass.starts_with("prompt") || p.pass == "decode");
            let logits: Vec<_> = logits.filter_map(|p| p.tensor("logits")).collect();
            let nrms: Vec<f64> = logits.iter().filter_map(|t| t.values).map(|v| v.nrms).collect();
            let errors: Vec<_> = logits.iter().filter_map(|t| t.logits).collect();
            let _ = writeln!(
                out,
                "| {model} | {candidate} / {reference} | {what} | {} | {:.1e} | {:.1e} | {:.1e} | {:.4} |",
                nrms.len(),
                median(nrms.iter().copied()),
                nrms.iter().copied().fold(0.0, f64::max),
                median(errors.iter().map(|e| e.kl)),
                errors.iter().map(|e| e.top1).sum::<f64>() / errors.len() as f64
            );
        }
    }
    out
}

fn main() {
    let prompts = |model: &str| -> Vec<Vec<u32>> {
        let trace = golden(model, "official");
        let passes = trace.passes().into_iter().filter(|p| p.starts_with("prompt"));
        let texts = passes.map(|p| trace.tokens(&p).unwrap());
        texts.filter(|ids| ids.len() >= 17).collect()
    };
    let folder = tempfile::tempdir().unwrap();
    let trained = Checkpoint::open(&root().join("models/demo")).unwrap();
    let subjects = [
        Subject { name: "nano", checkpoint: opened("nano"), texts: prompts("nano") },
        Subject { name: "micro", checkpoint: opened("micro"), texts: prompts("micro") },
        Subject { name: "demo (trained)", checkpoint: trained, texts: conversations() },
        Subject { name: "demo, shuffled", checkpoint: shuffled(folder.path()), texts: conversations() },
    ];
    let mut table = String::new();
    for subject in &subjects {
        for mode in [Mode::Source, Mode::Exact] {
            table += &rows(subject, mode);
        }
    }
    let document = format!(
        "{HEAD}{HEADER}{table}\n{PAIRS}| model | pair | what differs | passes | NRMS, median | largest | KL, median | \
         top-1 |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n{}",
        pairs()
    );
    fs::write(root().join("docs/self-noise.md"), document).unwrap();
}

const HEADER: &str = "| model | numerics | change | runs that moved | NRMS, median | largest | KL, median | top-1 |\n\
                      | --- | --- | --- | --- | --- | --- | --- | --- |\n";

const HEAD: &str = "# Self-noise

How far a model's own logits move under a change that should not matter, nothing else changed. Written by
`cargo run -p qualify --example noise`.

- *One ulp*: one element of one token's embedding is moved to the next value that the numerics hold (bf16 in `source`,
  single precision in `exact`), eight times a text. Where the change is rounded away, all bits stay; those runs are counted
  and left out of the medians.
- *Sums in another order*: the vector kernels against the scalar reference.
- *One token a step*: the second half of a text decoded token by token against one prefill. A row's bits do not depend on
  the rows beside it here, so nothing moves; in the released CUDA code this change costs 0.07 to 0.4.
- nano (7 layers) and micro (10) have random weights and read their golden prompts. The demo model (8 layers) is trained and
  reads recorded conversations. *Shuffled* is the demo model with the elements of every weight tensor in another order: the
  same architecture, sizes and distribution of weights, and nothing learned.
- `native` on the CPU is the arithmetic of `exact`.

NRMS and KL (nats) are of all rows of a text; top-1 is the share of rows with the same best token, mean over the runs that
moved.

";

const PAIRS: &str = "## Pairs of other people's runs

The golden files, none of them ours: the first pair is noise between implementations, the others are the price of other
numerics, for scale. Passes are prompts and decoded rows.

";
