//! `hallmark trace`: writes the intermediates of prefills and decode steps.

use std::path::{Path, PathBuf};

use clap::Args;
use engine::{About, Visit};
use model::{Input, Model};
use ops::Backend;
use qualify::{
    load,
    models::Subject,
    noise::nudged_embedding,
    trace::{Decode, Draft, Header, Recorder, Trace, record_decode, record_prefill},
};
use text::Tokenizer;

use crate::{
    commands::qualify::{On, subject},
    failure::Failure,
};

/// Write a trace: every intermediate of a prefill, and of decode steps, in the format of docs/trace.md.
#[derive(Args)]
pub struct TraceArgs {
    /// Model folder, or nano, micro, wide in a checkout; the built-in demo model by default
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub on: On,
    /// File to write
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Text of the prefill, taken as rendered (special tokens are recognised)
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Token ids of the prefill, separated by commas
    #[arg(long, value_name = "IDS", conflicts_with = "prompt", value_delimiter = ',')]
    pub prompt_ids: Option<Vec<u32>>,
    /// Take the prefills of another trace, so that the two can be judged
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_ids"])]
    pub like: Option<PathBuf>,
    /// Also record this many greedy decode steps behind the prompt
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub decode: usize,
    /// Move element E of the embedding of the token at position P by one unit in the last place: a second trace for
    /// judge --noise
    #[arg(long, value_name = "P,E", value_delimiter = ',', num_args = 1)]
    pub nudge: Option<Vec<usize>>,
}

pub fn run(args: &TraceArgs) -> Result<(), Failure> {
    let subject = subject(args.model.as_deref(), None)?;
    args.on.visit(Tracing { args, subject: &subject })?
}

struct Tracing<'a> {
    args: &'a TraceArgs,
    subject: &'a Subject,
}

impl Visit for Tracing<'_> {
    type Output = Result<(), Failure>;

    fn visit<B: Backend + 'static>(self, backend: B, _: About) -> Self::Output {
        record(self.args, self.subject, backend)
    }
}

fn record<B: Backend>(args: &TraceArgs, subject: &Subject, backend: B) -> Result<(), Failure> {
    let model = load(&subject.checkpoint, backend).map_err(Failure::Qualify)?;
    let passes = passes(args, subject, &model)?;
    let perturbation = match args.nudge.as_deref() {
        None => String::new(),
        Some([p, e]) => format!("one ulp of embedding element {e} at position {p}"),
        Some(_) => return Err(Failure::Usage("--nudge takes a position and an element: 0,7".into())),
    };
    let header = Header {
        engine: format!("hallmark {}", env!("CARGO_PKG_VERSION")),
        model: subject.name.clone(),
        checkpoint: qualify::identity::fingerprint(&subject.checkpoint).map_err(Failure::Qualify)?,
        numerics: args.on.numerics.name().into(),
        device: args.on.device.name().into(),
        perturbation,
        ..Header::default()
    };
    let mut recorder = Recorder::new(model.config(), Some(&subject.checkpoint)).map_err(Failure::Qualify)?;
    let mut draft = Draft::new(header);
    for (pass, ids) in &passes {
        let row = nudged(args, subject, ids, model.backend().mode())?;
        let input = Input { ids, embeddings: &row, ..Input::default() };
        record_prefill(&model, &mut recorder, input, pass, &mut draft).map_err(Failure::Qualify)?;
        eprintln!("{pass}: {} tokens", ids.len());
    }
    if args.decode > 0 {
        let prompt = passes.first().map_or(&[][..], |(_, ids)| ids);
        let run = Decode { prompt, steps: args.decode, follow: &[] };
        record_decode(&model, &mut recorder, run, &mut draft).map_err(Failure::Qualify)?;
        eprintln!("decode: {} steps", args.decode);
    }
    let trace = draft.write(&args.out).map_err(Failure::Qualify)?;
    eprintln!("{}: {} tensors", args.out.display(), trace.names().len());
    Ok(())
}

fn nudged(
    args: &TraceArgs,
    subject: &Subject,
    ids: &[u32],
    mode: ops::Mode,
) -> Result<Vec<(usize, Vec<f32>)>, Failure> {
    let Some([position, element]) = args.nudge.as_deref() else { return Ok(Vec::new()) };
    let table = subject.checkpoint.weight("embed")?;
    if *element >= table.cols() {
        let what = format!("--nudge: the embedding has {} elements, not {element}", table.cols());
        return Err(Failure::Usage(what));
    }
    // A prefill that is too short keeps its embeddings: it has nothing to change.
    Ok(match ids.get(*position) {
        Some(id) => vec![(*position, nudged_embedding(&table, *id, *element, mode))],
        None => Vec::new(),
    })
}

type Pass = (String, Vec<u32>);

fn passes<B: Backend>(args: &TraceArgs, subject: &Subject, model: &Model<B>) -> Result<Vec<Pass>, Failure> {
    if let Some(path) = &args.like {
        return like(path, model);
    }
    let ids = match (&args.prompt, &args.prompt_ids) {
        (Some(text), _) => {
            let name = "tokenizer.json";
            let tokenizer = Tokenizer::from_bytes(&subject.checkpoint.file(name)?, name)?;
            tokenizer.encode_with_added(text)
        }
        (None, Some(ids)) => ids.clone(),
        (None, None) => subject.text(32).map_err(Failure::Qualify)?,
    };
    if ids.is_empty() {
        return Err(Failure::Usage("the prompt has no tokens".into()));
    }
    Ok(vec![(format!("prompt{}", ids.len()), ids)])
}

/// The plain prefills of another trace.
fn like<B: Backend>(path: &Path, model: &Model<B>) -> Result<Vec<Pass>, Failure> {
    let trace = Trace::open(path).map_err(Failure::Qualify)?;
    let mut passes = Vec::new();
    for pass in trace.passes() {
        let ids = trace.tokens(&pass).map_err(Failure::Qualify)?;
        let whole = trace.get(&pass, "logits").is_none_or(|l| l.rows() == ids.len());
        if whole && !ids.contains(&model.config().image_token_id) && !pass.starts_with("dense") {
            passes.push((pass, ids));
        }
    }
    if passes.is_empty() {
        return Err(Failure::Usage(format!("{} has no prefill of plain text", path.display())));
    }
    Ok(passes)
}
