//! Two models on the same texts: what the second loses against the first.

use std::collections::BTreeMap;

use checkpoint::Checkpoint;
use cpu::Cpu;
use model::{Input, Model, Rows};
use ops::{Mode, Taps, indexer};
use qualify::judge::metrics;
use serde::Serialize;
use text::{EngramMap, Tokenizer};

use crate::{Error, Result, Text};

/// Figures over some texts: means over the scored tokens. A text is scored on its answer, or as a whole without one.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Texts.
    pub texts: usize,
    /// Scored tokens.
    pub tokens: usize,
    /// Negative log likelihood a token of the first model, nats.
    pub nll_a: f64,
    /// That of the second.
    pub nll_b: f64,
    /// KL(a ‖ b) in nats: what is lost when the second stands for the first.
    pub kl: f64,
    /// KL(b ‖ a) in nats.
    pub kl_back: f64,
    /// Share of tokens at which both have the same best one.
    pub top1: f64,
    /// Texts with a right answer.
    pub answers: usize,
    /// Share of answers of which the first model has every token as its best one.
    pub right_a: f64,
    /// That of the second.
    pub right_b: f64,
}

/// The comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The first model.
    pub a: String,
    /// The second.
    pub b: String,
    /// Where values are rounded.
    pub numerics: Mode,
    /// All texts.
    pub all: Figures,
    /// By category.
    pub categories: BTreeMap<String, Figures>,
    /// The tokens with the largest KL(a ‖ b), the largest first: a mean is often that of few.
    pub worst: Vec<Worst>,
}

/// One scored token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// Its text, counted from 1.
    pub text: usize,
    /// Its place among the text's tokens, from 0.
    pub position: usize,
    /// KL(a ‖ b) in nats.
    pub kl: f64,
    /// Its share of the sum over all tokens.
    pub share: f64,
}

/// Tokens that [`Comparison::worst`] keeps.
const WORST: usize = 10;

/// Sums on the way to [`Figures`].
impl Figures {
    fn add(&mut self, other: &Figures) {
        self.texts += other.texts;
        self.tokens += other.tokens;
        self.answers += other.answers;
        for (sum, v) in [
            (&mut self.nll_a, other.nll_a),
            (&mut self.nll_b, other.nll_b),
            (&mut self.kl, other.kl),
            (&mut self.kl_back, other.kl_back),
            (&mut self.top1, other.top1),
            (&mut self.right_a, other.right_a),
            (&mut self.right_b, other.right_b),
        ] {
            *sum += v;
        }
    }

    fn mean(mut self) -> Self {
        let (tokens, answers) = (self.tokens.max(1) as f64, self.answers.max(1) as f64);
        for v in [&mut self.nll_a, &mut self.nll_b, &mut self.kl, &mut self.kl_back, &mut self.top1] {
            *v /= tokens;
        }
        self.right_a /= answers;
        self.right_b /= answers;
        self
    }
}

/// A model ready to score.
struct Scorer {
    model: Model<Cpu>,
    tokenizer: Tokenizer,
}

impl Scorer {
    fn new(ckpt: &Checkpoint, mode: Mode, threads: Option<usize>) -> Result<Self> {
        let tokenizer = Tokenizer::from_bytes(&ckpt.file("tokenizer.json")?, "tokenizer.json")?;
        let map = EngramMap::checked(&tokenizer, ckpt.config().engram.compressed_vocab_size)?;
        let model = Model::load(Cpu::new(mode, threads, None)?, ckpt, map.classes)?;
        Ok(Self { model, tokenizer })
    }

    /// Logits of the positions from `first` that predict the ids after them, `[n, vocab]`.
    fn logits(&self, ids: &[u32], first: usize) -> Result<Vec<f32>> {
        let mut state = self.model.new_state(ids.len())?;
        let out = self.model.forward(&mut state, Input::text(ids), Rows::All, &mut Taps::off())?;
        let logits = out.expect("rows were asked for").logits;
        let vocab = logits.width();
        Ok(logits.as_f32()[first * vocab..(ids.len() - 1) * vocab].to_vec())
    }
}

/// Compares `b` with `a` on `texts`; `progress` hears how many texts are done.
///
/// # Errors
/// Models of other tokens, a text longer than their context or shorter than two tokens, and what the models report.
pub fn compare(
    a: &Checkpoint,
    b: &Checkpoint,
    texts: &[Text],
    mode: Mode,
    threads: Option<usize>,
    progress: &dyn Fn(usize),
) -> Result<Comparison> {
    let (first, second) = (Scorer::new(a, mode, threads)?, Scorer::new(b, mode, threads)?);
    if first.tokenizer.sha256() != second.tokenizer.sha256() {
        return Err(Error::Input(format!(
            "{} and {} have different tokenizers; only models with the same tokens can be compared",
            a.location(),
            b.location()
        )));
    }
    let longest = a.config().max_position_embeddings.min(b.config().max_position_embeddings);
    let mut categories: BTreeMap<String, Figures> = BTreeMap::new();
    let mut worst: Vec<Worst> = Vec::new();
    for (i, text) in texts.iter().enumerate() {
        let (ids, prompt) = text.encode(&first.tokenizer);
        let answer = ids.len() > prompt;
        if ids.len() < 2 || ids.len() > longest || prompt == 0 {
            let n = ids.len();
            return Err(Error::Input(format!(
                "text {} has {n} tokens; 2 to {longest} can be compared",
                i + 1
            )));
        }
        let from = if answer { prompt - 1 } else { 0 };
        let (la, lb) = (first.logits(&ids, from)?, second.logits(&ids, from)?);
        let (figures, losses) = score(&la, &lb, &ids[from + 1..], answer);
        let one = |(at, kl)| Worst { text: i + 1, position: from + 1 + at, kl, share: 0.0 };
        worst.extend(losses.into_iter().enumerate().map(one));
        worst.sort_by(|a, b| b.kl.total_cmp(&a.kl));
        worst.truncate(WORST);
        categories.entry(text.category.clone()).or_default().add(&figures);
        progress(i + 1);
    }
    let mut all = Figures::default();
    categories.values().for_each(|f| all.add(f));
    if all.kl > 0.0 {
        worst.iter_mut().for_each(|w| w.share = w.kl / all.kl);
    }
    let categories = categories.into_iter().map(|(name, f)| (name, f.mean())).collect();
    let (a, b) = (a.location(), b.location());
    Ok(Comparison { a, b, numerics: mode, all: all.mean(), categories, worst })
}

/// Sums over one text and KL(a ‖ b) of each token; `wanted` are the ids that the rows predict.
fn score(a: &[f32], b: &[f32], wanted: &[u32], answer: bool) -> (Figures, Vec<f64>) {
    let vocab = a.len() / wanted.len();
    let rows = |l: &'_ [f32]| -> (f64, bool) {
        let (mut nll, mut right) = (0.0, true);
        for (row, id) in l.chunks_exact(vocab).zip(wanted) {
            nll -= log_probability(row, *id as usize);
            right &= indexer::highest(row, 1).first() == Some(&(*id as usize));
        }
        (nll, right)
    };
    let ((nll_a, right_a), (nll_b, right_b)) = (rows(a), rows(b));
    // The first model is the reference.
    let rows = a.chunks_exact(vocab).zip(b.chunks_exact(vocab));
    let errors: Vec<_> = rows.map(|(a, b)| metrics::logits(b, a, vocab)).collect();
    let hit = |right: bool| f64::from(u8::from(answer && right));
    let figures = Figures {
        texts: 1,
        tokens: wanted.len(),
        nll_a,
        nll_b,
        kl: errors.iter().map(|e| e.kl).sum(),
        kl_back: errors.iter().map(|e| e.kl_back).sum(),
        top1: errors.iter().map(|e| e.top1).sum(),
        answers: usize::from(answer),
        right_a: hit(right_a),
        right_b: hit(right_b),
    };
    (figures, errors.into_iter().map(|e| e.kl).collect())
}

fn log_probability(row: &[f32], id: usize) -> f64 {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    f64::from(row[id]) - max - row.iter().map(|v| (f64::from(*v) - max).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_worked_case() {
        // Two rows over three ids: a has probabilities 1/2, 1/4, 1/4; b has 1/4, 1/2, 1/4, then the same as a.
        let (two, none) = (2f32.ln(), 0.0);
        let a = [two, none, none, two, none, none];
        let b = [none, two, none, two, none, none];
        let (f, losses) = score(&a, &b, &[0, 0], true);
        let near = |x: f64, y: f64| (x - y).abs() < 1e-7; // ln 2 in single precision
        assert!(near(f.nll_a, 2.0 * 2f64.ln()) && near(f.nll_b, 3.0 * 2f64.ln()), "{f:?}");
        // Of the first row: 1/2 ln 2 - 1/4 ln 2, both ways.
        assert!(near(f.kl, 0.25 * 2f64.ln()) && near(f.kl_back, 0.25 * 2f64.ln()), "{f:?}");
        assert!(near(losses[0], f.kl) && losses[1] == 0.0, "{losses:?}");
        assert_eq!((f.texts, f.tokens, f.answers), (1, 2, 1));
        assert_eq!((f.top1, f.right_a, f.right_b), (1.0, 1.0, 0.0));
        let mut sum = f.clone();
        sum.add(&score(&a, &a, &[0, 1], false).0);
        let m = sum.mean();
        assert_eq!((m.texts, m.tokens, m.answers, m.right_a, m.top1), (2, 4, 1, 1.0, 0.75));
    }
}
