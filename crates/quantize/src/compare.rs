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

/// Means over tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Losses {
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
}

/// Figures over some texts.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Texts.
    pub texts: usize,
    /// Every token but the first of each text, prompts included.
    pub every: Losses,
    /// The tokens of answers.
    pub answer: Losses,
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

/// Sums on the way to means.
impl Losses {
    fn add(&mut self, other: &Losses) {
        self.tokens += other.tokens;
        for (sum, v) in [
            (&mut self.nll_a, other.nll_a),
            (&mut self.nll_b, other.nll_b),
            (&mut self.kl, other.kl),
            (&mut self.kl_back, other.kl_back),
            (&mut self.top1, other.top1),
        ] {
            *sum += v;
        }
    }

    fn mean(mut self) -> Self {
        let tokens = self.tokens.max(1) as f64;
        for v in [&mut self.nll_a, &mut self.nll_b, &mut self.kl, &mut self.kl_back, &mut self.top1] {
            *v /= tokens;
        }
        self
    }
}

impl Figures {
    fn add(&mut self, other: &Figures) {
        self.texts += other.texts;
        self.every.add(&other.every);
        self.answer.add(&other.answer);
        self.answers += other.answers;
        self.right_a += other.right_a;
        self.right_b += other.right_b;
    }

    fn mean(self) -> Self {
        let answers = self.answers.max(1) as f64;
        let (every, answer) = (self.every.mean(), self.answer.mean());
        Self { every, answer, right_a: self.right_a / answers, right_b: self.right_b / answers, ..self }
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

    /// Logits of the positions that predict the ids after them, `[ids - 1, vocab]`.
    fn logits(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let mut state = self.model.new_state(ids.len())?;
        let out = self.model.forward(&mut state, Input::text(ids), Rows::All, &mut Taps::off())?;
        let logits = out.expect("rows were asked for").logits;
        let vocab = logits.width();
        Ok(logits.as_f32()[..(ids.len() - 1) * vocab].to_vec())
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
        if ids.len() < 2 || ids.len() > longest || prompt == 0 {
            let n = ids.len();
            return Err(Error::Input(format!(
                "text {} has {n} tokens; 2 to {longest} can be compared",
                i + 1
            )));
        }
        let (la, lb) = (first.logits(&ids)?, second.logits(&ids)?);
        let (figures, losses) = score(&la, &lb, &ids[1..], ids.len() - prompt);
        let one = |(at, kl)| Worst { text: i + 1, position: at + 1, kl, share: 0.0 };
        worst.extend(losses.into_iter().enumerate().map(one));
        worst.sort_by(|a, b| b.kl.total_cmp(&a.kl));
        worst.truncate(WORST);
        categories.entry(text.category.clone()).or_default().add(&figures);
        progress(i + 1);
    }
    let mut all = Figures::default();
    categories.values().for_each(|f| all.add(f));
    if all.every.kl > 0.0 {
        worst.iter_mut().for_each(|w| w.share = w.kl / all.every.kl);
    }
    let categories = categories.into_iter().map(|(name, f)| (name, f.mean())).collect();
    let (a, b) = (a.location(), b.location());
    Ok(Comparison { a, b, numerics: mode, all: all.mean(), categories, worst })
}

/// Sums over one text and KL(a ‖ b) of each token; `wanted` are the ids that the rows predict, of which the last `answer`
/// are an answer.
fn score(a: &[f32], b: &[f32], wanted: &[u32], answer: usize) -> (Figures, Vec<f64>) {
    let vocab = a.len() / wanted.len();
    let mut figures = Figures { texts: 1, answers: usize::from(answer > 0), ..Figures::default() };
    let (mut right_a, mut right_b) = (true, true);
    let mut each = Vec::with_capacity(wanted.len());
    for (i, id) in wanted.iter().enumerate() {
        let (a, b) = (&a[i * vocab..][..vocab], &b[i * vocab..][..vocab]);
        let id = *id as usize;
        // The first model is the reference.
        let error = metrics::logits(b, a, vocab);
        let losses = Losses {
            tokens: 1,
            nll_a: -log_probability(a, id),
            nll_b: -log_probability(b, id),
            kl: error.kl,
            kl_back: error.kl_back,
            top1: error.top1,
        };
        figures.every.add(&losses);
        if i + answer >= wanted.len() {
            figures.answer.add(&losses);
            let best = |row: &[f32]| indexer::highest(row, 1).first() == Some(&id);
            right_a &= best(a);
            right_b &= best(b);
        }
        each.push(error.kl);
    }
    let hit = |right: bool| f64::from(u8::from(answer > 0 && right));
    (figures.right_a, figures.right_b) = (hit(right_a), hit(right_b));
    (figures, each)
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
        let (f, losses) = score(&a, &b, &[0, 0], 1);
        let near = |x: f64, y: f64| (x - y).abs() < 1e-7; // ln 2 in single precision
        let all = &f.every;
        assert!(near(all.nll_a, 2.0 * 2f64.ln()) && near(all.nll_b, 3.0 * 2f64.ln()), "{f:?}");
        // Of the first row: 1/2 ln 2 - 1/4 ln 2, both ways.
        assert!(near(all.kl, 0.25 * 2f64.ln()) && near(all.kl_back, 0.25 * 2f64.ln()), "{f:?}");
        assert!(near(losses[0], all.kl) && losses[1] == 0.0, "{losses:?}");
        assert_eq!((f.texts, all.tokens, f.answer.tokens, f.answers), (1, 2, 1, 1));
        // The answer is the second row, at which both are right.
        assert_eq!((all.top1, f.answer.top1, f.right_a, f.right_b), (1.0, 1.0, 1.0, 1.0));
        assert!(near(f.answer.nll_a, 2f64.ln()) && f.answer.kl == 0.0, "{f:?}");
        assert_eq!(score(&a, &b, &[0, 0], 2).0.right_b, 0.0);
        let mut sum = f.clone();
        sum.add(&score(&a, &a, &[0, 1], 0).0);
        let m = sum.mean();
        assert_eq!((m.texts, m.every.tokens, m.answer.tokens, m.answers), (2, 4, 1, 1));
        assert_eq!((m.right_a, m.every.top1), (1.0, 0.75));
    }
}
