//! The command line.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use checkpoint::{Checkpoint, engram::EngramMode};
use clap::{Args, Parser, Subcommand, ValueEnum};
use engine::{
    CacheOptions, Device, Drafts, LoadOptions, Loaded, Prefill, PrefixCache, Residency, Session,
    SessionOptions,
};
use ops::Mode;
use text::Think;

use crate::{
    commands::{
        admission::Admission, bench_engram::BenchEngram, bench_load::BenchLoad, bisect::BisectArgs,
        capabilities::CapabilitiesArgs, engram::EngramCommand, judge::JudgeArgs, load, pull::Pull,
        qualify::Qualify, receipt::ReceiptCommand, trace::TraceArgs,
    },
    demo,
    failure::Failure,
};

/// DeepSeek-V4.1-Flash on your own machine, with proven numerics.
///
/// Without MODEL, commands use a tiny trained model of the same architecture that is built into the program. Results go
/// to standard output, everything else to standard error. Exit codes: 0 done, 1 a gate or verification failed, 2 usage,
/// 3 refused, 4 bad checkpoint or input, 5 not enough memory or disk, 6 network, input/output or internal error.
#[derive(Parser)]
#[command(name = "hallmark", version, max_term_width = 100, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Answer one prompt
    Run(Run),
    /// Talk with the model
    Chat(Chat),
    /// Serve the OpenAI and Anthropic APIs over HTTP
    #[cfg(feature = "server")]
    Serve(Serve),
    /// Say what a checkpoint holds, or what a configuration implies
    Inspect(Inspect),
    /// Say whether a model fits a machine, before it is downloaded or loaded
    Plan(Plan),
    /// Make or check row files of Engram tables
    #[command(subcommand)]
    Engram(EngramCommand),
    /// Download a model: one commit, every file checked by its hash
    Pull(Pull),
    /// Measure speed beside the machine's limits
    #[command(subcommand)]
    Bench(Bench),
    /// Run gates on a device and write a receipt
    #[command(subcommand)]
    Qualify(Qualify),
    /// Write the intermediates of a run to a file that any tool can read
    Trace(TraceArgs),
    /// Compare two traces, whoever made them
    Judge(JudgeArgs),
    /// Find the operator that makes results move
    Bisect(BisectArgs),
    /// Check, show and compare receipts
    #[command(subcommand)]
    Receipt(ReceiptCommand),
    /// Say what this build is qualified for, and why not for the rest
    Capabilities(CapabilitiesArgs),
    /// Make an EXL3 pack from a released checkpoint
    Quantize(Quantize),
    /// Compare two models on texts: NLL, KL both ways, best tokens, right answers
    Compare(Compare),
}

/// What every command that runs a model takes.
#[derive(Args, Clone)]
pub struct Model {
    /// Model folder (Hugging Face cache entries too); the built-in demo model by default
    pub model: Option<PathBuf>,
    /// Folder that holds the Engram tables, for a pack without them: the released model, or just the shards they are in
    #[arg(long, value_name = "DIR", requires = "model")]
    pub engram_from: Option<PathBuf>,
    /// Where to compute: cpu, metal, cuda or emu
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,
    /// Where values are rounded: exact, source or native
    #[arg(long, default_value = "native", value_name = "MODE")]
    pub numerics: Mode,
    /// Threads; all cores by default
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
    /// Write what was done when (steps, layers, Engram rows), by thread, as a Chrome trace: for chrome://tracing or Perfetto
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
    #[command(flatten)]
    pub residency: ResidencyArgs,
}

impl Command {
    /// Where the timeline goes, if one is asked for.
    pub fn timeline(&self) -> Option<&Path> {
        let model = match self {
            Command::Run(args) => &args.model,
            Command::Chat(args) => &args.model,
            #[cfg(feature = "server")]
            Command::Serve(args) => &args.model,
            Command::Bench(Bench::Prefill(args) | Bench::Decode(args)) => &args.model,
            _ => return None,
        };
        model.timeline.as_deref()
    }
}

/// What is kept in memory.
#[derive(Args, Clone)]
pub struct ResidencyArgs {
    /// Where Engram rows are kept: resident (all in memory), mmap (from disk as the system likes) or cache:SIZE (hot rows in
    /// so much memory, such as cache:16GiB)
    #[arg(long, default_value = "resident", value_name = "PLACE")]
    pub engram: EngramMode,
    /// Row files of this model's Engram tables, made by engram pack: a row is one read instead of two
    #[arg(long, value_name = "DIR", requires = "model")]
    pub engram_rows: Option<PathBuf>,
    /// Bring all weights into memory at load, in the order of the files, instead of at first use
    #[arg(long)]
    pub prefault: bool,
    /// Lock weights (and resident Engram tables) in memory; brings them there as --prefault does
    #[arg(long)]
    pub mlock: bool,
    /// Compare the files of a pulled model with their hashes while it runs; files that were compared since they last changed
    /// are not read again. A wrong file ends the program with exit code 4
    #[arg(long, requires = "model")]
    pub verify_hashes: bool,
    /// Most memory for the states of all conversations, such as 8GiB (default: what is free once the model is loaded)
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub state_memory: Option<u64>,
}

impl ResidencyArgs {
    /// The same for the engine.
    pub fn options(&self) -> Residency {
        Residency {
            engram: self.engram,
            engram_rows: self.engram_rows.clone(),
            prefault: self.prefault,
            lock: self.mlock,
        }
    }
}

impl Model {
    /// Opens the checkpoint; its pages are brought before its values are looked at.
    pub fn open(&self) -> Result<Checkpoint, Failure> {
        self.device.require()?;
        if let Some(most) = self.residency.state_memory {
            engine::memory::set_limit(most);
        }
        let Some(dir) = &self.model else { return Ok(demo::open()?) };
        let checkpoint = Checkpoint::open_unscanned(dir, self.engram_from.as_deref())?;
        if self.residency.verify_hashes {
            load::verify_behind(dir)?;
        }
        load::page_in(&checkpoint, &self.residency.options(), self.threads)?;
        checkpoint.scan_quick()?;
        Ok(checkpoint)
    }

    /// How to load it.
    pub fn options(&self) -> LoadOptions {
        LoadOptions {
            device: self.device,
            mode: self.numerics,
            threads: self.threads,
            residency: self.residency.options(),
        }
    }

    /// Opens and loads the checkpoint and says so.
    pub fn load(&self) -> Result<Loaded, Failure> {
        self.prepare(&self.open()?)
    }

    /// Loads an open checkpoint and says so.
    pub fn prepare(&self, ckpt: &Checkpoint) -> Result<Loaded, Failure> {
        let loaded = Loaded::new(ckpt, self.options())?;
        let c = ckpt.config();
        eprintln!(
            "{}: {} layers, {} experts, on {} in {} numerics, loaded in {:.2} s",
            self.model.as_ref().map_or("demo model".into(), |m| m.display().to_string()),
            c.num_hidden_layers,
            c.n_routed_experts,
            loaded.lm.device(),
            loaded.lm.mode().name(),
            loaded.load_time.as_secs_f64(),
        );
        if self.model.is_some() && c.vocab_size == 129_280 && !loaded.tokenizer.is_released() {
            eprintln!(
                "warning: tokenizer.json has SHA-256 {}, not the released one",
                loaded.tokenizer.sha256()
            );
        }
        Ok(loaded)
    }
}

/// How tokens are drawn and how many.
#[derive(Args, Clone)]
pub struct Sampling {
    /// Reasoning: low, high, xhigh, max or a number from 1 to 100 (default: as the request says, else high)
    #[arg(long, value_name = "LEVEL", conflicts_with = "no_think")]
    pub think: Option<Think>,
    /// Answer without reasoning
    #[arg(long)]
    pub no_think: bool,
    /// Most tokens of the answer, reasoning included
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_tokens: Option<usize>,
    /// Sampling temperature, 0 to 2; 0 takes the most likely token
    #[arg(long, value_name = "T", value_parser = temperature)]
    pub temperature: Option<f32>,
    /// Keep the most likely tokens up to this probability, above 0 to 1
    #[arg(long, value_name = "P", value_parser = probability)]
    pub top_p: Option<f32>,
    /// Seed of the draws; without it one is picked and printed
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Tokens of prompt and answer to reserve memory for (default: 65536, or the model's limit if that is less)
    #[arg(long, value_name = "N", value_parser = positive)]
    pub context: Option<usize>,
}

impl Sampling {
    /// The level asked for, if any.
    pub fn level(&self) -> Option<Think> {
        if self.no_think { Some(Think::Off) } else { self.think }
    }

    /// Writes what was asked for over the request's parameters.
    pub fn apply(&self, params: &mut text::SamplingParams) {
        params.temperature = self.temperature.unwrap_or(params.temperature);
        params.top_p = self.top_p.unwrap_or(params.top_p);
        params.seed = self.seed.or(params.seed);
    }

    /// Tokens to reserve.
    pub fn context(&self, loaded: &Loaded) -> usize {
        self.context.unwrap_or_else(|| loaded.lm.config().max_position_embeddings.min(65_536))
    }
}

/// How a conversation is computed; nothing here but `--prefill replay` changes an answer.
#[derive(Args, Clone)]
pub struct Sessions {
    /// Speculative decoding: on, off or a number of drafted tokens (default: as many as save time, none while they do
    /// not)
    #[arg(long, value_name = "on|off|N")]
    pub drafts: Option<Drafts>,
    /// How prompts are taken in: full, or replay (half of the layers on the last tokens only, an approximation)
    #[arg(long, default_value = "full", value_name = "full|replay")]
    pub prefill: Prefill,
    /// Keep the states of prompts in this folder for later runs; they hold what was said, readable by you only
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Most bytes in --cache-dir, such as 500MiB; the least recently used go first
    #[arg(long, default_value = "16GiB", value_name = "SIZE", value_parser = bytes)]
    pub cache_size: u64,
}

impl Sessions {
    /// A session of at most `context` tokens.
    pub fn open(&self, loaded: &Loaded, context: usize) -> Result<Box<dyn Session>, Failure> {
        let dir = self.cache_dir.clone();
        let options = CacheOptions { dir, disk: self.cache_size, ..CacheOptions::default() };
        let cache = Some(Arc::new(PrefixCache::open(&options, &*loaded.lm, self.prefill)?));
        let drafts = self.drafts.unwrap_or_default();
        Ok(loaded.lm.clone().open(SessionOptions { context, prefill: self.prefill, drafts, cache })?)
    }
}

/// Answer one prompt: the answer goes to standard output, reasoning (dimmed) and statistics to standard error; tool
/// calls are printed as JSON, one a line.
#[derive(Args)]
pub struct Run {
    #[command(flatten)]
    pub model: Model,
    /// The user's message
    #[arg(short, long, value_name = "TEXT", required_unless_present_any = ["messages", "prompt_ids"])]
    pub prompt: Option<String>,
    /// A Chat Completions request body: messages, tools, thinking, sampling (- for standard input)
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub messages: Option<PathBuf>,
    /// Token ids of a ready prompt, separated by commas
    #[arg(long, value_name = "IDS", conflicts_with_all = ["prompt", "messages"], value_delimiter = ',')]
    pub prompt_ids: Option<Vec<u32>>,
    /// Take the prompt as already rendered: special tokens in it are recognised, no template is added
    #[arg(long, requires = "prompt", conflicts_with_all = ["messages", "prompt_ids"])]
    pub raw: bool,
    #[command(flatten)]
    pub sampling: Sampling,
    #[command(flatten)]
    pub sessions: Sessions,
    #[command(flatten)]
    pub admission: Admission,
    /// Print one JSON document instead of text
    #[arg(long)]
    pub json: bool,
}

/// Talk with the model; /help lists the commands, Ctrl-C stops an answer.
#[derive(Args)]
pub struct Chat {
    #[command(flatten)]
    pub model: Model,
    /// System message of the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    #[command(flatten)]
    pub sampling: Sampling,
    #[command(flatten)]
    pub sessions: Sessions,
    #[command(flatten)]
    pub admission: Admission,
}

/// Serve the OpenAI APIs (chat completions, completions, responses) and Anthropic messages over HTTP, and a web page at /.
/// One request computes at a time, the others wait; docs/serving.md tells how to begin, docs/api.md what becomes of every
/// field.
#[cfg(feature = "server")]
#[derive(Args)]
pub struct Serve {
    #[command(flatten)]
    pub model: Model,
    /// Address to listen on; the default is for this machine only
    #[arg(long, default_value = "127.0.0.1", value_name = "IP")]
    pub host: std::net::IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8080, value_name = "N")]
    pub port: u16,
    /// Key that clients must send, also from HALLMARK_API_KEY; may be given more than once, keys take turns
    #[arg(long, value_name = "KEY")]
    pub api_key: Vec<String>,
    /// Name of the model in the API
    #[arg(long, default_value = "deepseek-v4.1-flash", value_name = "NAME")]
    pub served_name: String,
    /// Tokens of prompt and answer to reserve memory for (default: 65536, or the model's limit if that is less)
    #[arg(long, value_name = "N", value_parser = positive)]
    pub context: Option<usize>,
    /// Most requests that wait; more get status 429
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub max_queue: usize,
    /// Most seconds of a request, its wait included
    #[arg(long, default_value_t = 3600, value_name = "SECONDS")]
    pub deadline: u64,
    /// Seconds that a running answer has to end when the server does
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub grace: u64,
    /// Largest request body
    #[arg(long, default_value = "64MiB", value_name = "SIZE", value_parser = bytes)]
    pub max_body: u64,
    /// Sampling fields as sent, or as the official API applies them
    #[arg(long, value_enum, default_value = "honour")]
    pub sampling: SamplingMode,
    /// Most sampled tokens kept so that an answer that a client gives back is read as it was sampled; 0 reads it as sent
    #[arg(long, default_value_t = 4 << 20, value_name = "N")]
    pub replay: usize,
    /// Origin whose web pages may use the server, or *; may be given more than once (default: none)
    #[arg(long, value_name = "ORIGIN")]
    pub cors: Vec<String>,
    /// Show the receipts of this folder on the web page too, beside those of the program and of this machine
    #[arg(long, value_name = "DIR")]
    pub receipts: Option<PathBuf>,
    /// Show this judgement on the web page: what hallmark judge --json printed
    #[arg(long, value_name = "FILE")]
    pub judgement: Option<PathBuf>,
    #[command(flatten)]
    pub sessions: Sessions,
    #[command(flatten)]
    pub admission: Admission,
}

#[cfg(feature = "server")]
impl Serve {
    /// The keys of the command line and of the environment.
    ///
    /// # Errors
    /// An empty key.
    pub fn keys(&self) -> Result<Vec<String>, Failure> {
        let mut keys = self.api_key.clone();
        keys.extend(std::env::var("HALLMARK_API_KEY").ok());
        match keys.iter().any(|key| key.trim().is_empty()) {
            true => Err(Failure::Usage("an API key is empty; leave it out to let everybody in".into())),
            false => Ok(keys),
        }
    }
}

/// What becomes of sampling fields.
#[cfg(feature = "server")]
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SamplingMode {
    Honour,
    Official,
}

/// Say what a checkpoint holds (tensors and bytes by group and type, layer schedule), or what a configuration implies.
#[derive(Args)]
pub struct Inspect {
    /// Model folder; the built-in demo model by default
    #[arg(conflicts_with = "config")]
    pub model: Option<PathBuf>,
    /// Folder that holds the Engram tables, for a pack without them
    #[arg(long, value_name = "DIR", requires = "model")]
    pub engram_from: Option<PathBuf>,
    /// A config.json alone: what its checkpoint would hold
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Read every byte: Engram scales and all codes too
    #[arg(long, conflicts_with = "config")]
    pub verify: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct Plan {
    /// Model folder, or OWNER/NAME@REVISION before it is pulled: headers are read, nothing else; the built-in demo model by
    /// default
    #[arg(conflicts_with = "config")]
    pub model: Option<PathBuf>,
    /// A config.json alone: the checkpoint that it describes, in the released format or with --bits
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Routed experts in EXL3 of this many bits (1 to 8, 1.5, 2.5, 3.5), all else as released
    #[arg(long, value_name = "K", requires = "config", value_parser = rate)]
    pub bits: Option<exl3::Rate>,
    /// Tokens of the longest conversation
    #[arg(long, default_value_t = 131_072, value_name = "N")]
    pub context: usize,
    /// Load the draft stages too: on or off
    #[arg(long, default_value = "on", value_name = "on|off", value_parser = ["on", "off"])]
    pub drafts: String,
    /// One machine of the table alone, by its name
    #[arg(long, value_name = "NAME")]
    pub machine: Option<String>,
    /// A machine with one memory of this size instead of the table, such as 192GiB
    #[arg(long, value_name = "SIZE", value_parser = bytes, conflicts_with = "machine", requires = "bandwidth")]
    pub memory: Option<u64>,
    /// Read bandwidth in GB/s, for the roof of the speed: of that machine, or instead of the makers' figures
    #[arg(long, value_name = "GB_S", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub bandwidth: Option<u64>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Make an EXL3 pack from a checkpoint in the released form: routed experts, and if asked the dense layers and the head.
///
/// The layers are calibrated with the model's own forward over texts, on all cores. A killed run goes on where it was
/// when called again: its work lies in DST.part until all is done. The bytes depend on checkpoint, texts and settings
/// only, not on the number of threads.
#[derive(Args)]
pub struct Quantize {
    /// Folder of the released checkpoint
    #[arg(value_name = "SRC")]
    pub source: PathBuf,
    /// Folder of the pack; must not exist
    #[arg(value_name = "DST")]
    pub destination: PathBuf,
    /// Bits per weight of the routed experts: 1 to 8, or 1.5, 2.5, 3.5
    #[arg(long, value_name = "K", value_parser = rate)]
    pub bits: exl3::Rate,
    /// Codebook; half rates need mul1
    #[arg(long, value_enum, default_value = "mul1")]
    pub codebook: CodebookName,
    /// Bits per weight of the output head (default: as released, or 6 or more with --dense K)
    #[arg(long, value_name = "K", value_parser = rate)]
    pub head_bits: Option<exl3::Rate>,
    /// Attention, shared experts, compressors, Engram projections: keep as released, or bits per weight
    #[arg(long, default_value = "keep", value_name = "keep|K")]
    pub dense: Dense,
    /// Texts to calibrate with: JSON lines with a field text, or one plain text (default: texts within the program)
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Search less: five to eight times faster on small matrices, one and a half times on large ones, for some percent
    /// more error
    #[arg(long)]
    pub short_search: bool,
    /// Leave the Engram tables out: the pack then takes them from elsewhere with --engram-from
    #[arg(long)]
    pub no_engram: bool,
    /// Threads; all cores by default
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
    /// Print the report as one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum CodebookName {
    Mul1,
    Mcg,
}

impl From<CodebookName> for exl3::Codebook {
    fn from(name: CodebookName) -> Self {
        match name {
            CodebookName::Mul1 => Self::Mul1,
            CodebookName::Mcg => Self::Mcg,
        }
    }
}

/// What becomes of dense layers.
#[derive(Clone, Copy)]
pub enum Dense {
    Keep,
    Bits(exl3::Rate),
}

impl std::str::FromStr for Dense {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        if s == "keep" { Ok(Dense::Keep) } else { rate(s).map(Dense::Bits) }
    }
}

/// Compare model B with model A on texts: negative log likelihood, KL divergence both ways, agreement of the best token,
/// and right answers where the texts have them. A text is scored on its answer, or as a whole if it has none.
#[derive(Args)]
pub struct Compare {
    /// The reference: a model folder, or demo for the built-in model
    pub a: PathBuf,
    /// The model that is judged
    pub b: PathBuf,
    /// JSON lines with prompt and answer, or text, and category; or one plain text
    #[arg(long, value_name = "FILE")]
    pub texts: PathBuf,
    /// Folder that holds the Engram tables, for a pack without them
    #[arg(long, value_name = "DIR")]
    pub engram_from: Option<PathBuf>,
    /// Where values are rounded: exact, source or native
    #[arg(long, default_value = "native", value_name = "MODE")]
    pub numerics: Mode,
    /// Threads; all cores by default
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

fn rate(s: &str) -> Result<exl3::Rate, String> {
    let rate = s.parse().ok().and_then(|bits| exl3::Rate::from_bits(bits).ok());
    rate.ok_or_else(|| "bits per weight are 1 to 8, or 1.5, 2.5, 3.5".into())
}

#[derive(Subcommand)]
pub enum Bench {
    /// Prefill: tokens a second of one prompt
    Prefill(BenchModel),
    /// Decode: tokens a second, one token a step
    Decode(BenchModel),
    /// Time from files to the first token, beside reading the same files with cat
    Load(BenchLoad),
    /// Engram rows a second, resident, mapped and cached, beside a plain loop over mapped rows
    Engram(BenchEngram),
    /// Operators at released width, weights streamed from memory, beside the machine's bandwidth and arithmetic limit
    Ops(BenchOps),
}

#[derive(Args)]
pub struct BenchModel {
    #[command(flatten)]
    pub model: Model,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = positive)]
    pub tokens: usize,
    /// Decoded tokens a run
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = positive)]
    pub decode: usize,
    /// Runs counted, after one that is not
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = positive)]
    pub runs: usize,
    /// Decode with drafts: on, off or a number; then the timed text is a recorded prompt's, as drafts of text of no
    /// meaning are worth nothing
    #[arg(long, default_value = "off", value_name = "on|off|N")]
    pub drafts: Drafts,
    /// Prefill: full or replay
    #[arg(long, default_value = "full", value_name = "full|replay")]
    pub prefill: Prefill,
    /// A model of the released size with generated weights, none of which is read from a file
    #[arg(long, value_enum, conflicts_with_all = ["model", "drafts"])]
    pub synthetic: Option<SyntheticSize>,
    /// Bits of its routed experts, which are EXL3
    #[arg(long, default_value_t = 2.0, value_name = "K", requires = "synthetic")]
    pub bits: f64,
    /// About how many rows each of the 24 columns of its two Engram tables has; 16000000 as released (203 GB in memory)
    #[arg(long, default_value_t = 100_000, value_name = "N", requires = "synthetic")]
    pub engram_vocab: u64,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Sizes of generated models.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SyntheticSize {
    /// DeepSeek-V4.1-Flash without draft stages and vision.
    Flash,
}

#[derive(Args)]
pub struct BenchOps {
    /// Instruction set (default: the best of this machine)
    #[arg(long, value_enum)]
    pub isa: Option<IsaName>,
    /// Which weights (default: all)
    #[arg(long, value_enum)]
    pub only: Option<Forms>,
    /// Runs counted for every case
    #[arg(long, default_value_t = 9, value_name = "N", value_parser = positive)]
    pub runs: usize,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Forms {
    /// The released forms
    Released,
    /// EXL3: layers, experts and the encoder's search
    Exl3,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum IsaName {
    Portable,
    Avx2,
    Avx512,
}

fn positive(s: &str) -> Result<usize, String> {
    match s.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("a whole number above 0 is needed".into()),
    }
}

fn bytes(s: &str) -> Result<u64, String> {
    checkpoint::engram::size_of_text(s)
}

fn temperature(s: &str) -> Result<f32, String> {
    match s.parse::<f32>() {
        Ok(t) if (0.0..=2.0).contains(&t) => Ok(t),
        _ => Err("a number from 0 to 2 is needed".into()),
    }
}

fn probability(s: &str) -> Result<f32, String> {
    match s.parse::<f32>() {
        Ok(p) if p > 0.0 && p <= 1.0 => Ok(p),
        _ => Err("a number above 0 and up to 1 is needed".into()),
    }
}
