//! `hallmark bench decode|prefill --synthetic flash`: the released size on this machine's device, without the weights.

use std::{sync::Arc, time::Instant};

use checkpoint::Config;
use engine::{About, Lm, SessionOptions, Visit};
use exl3::Rate;
use model::Model;
use ops::Backend;
use qualify::synthetic::{self, Synthetic};
use serde::Serialize;

use super::bench::{Spread, decode, feed, seconds};
use crate::{args::BenchModel, failure::Failure, render};

#[derive(Serialize)]
struct Measured {
    what: &'static str,
    model: &'static str,
    /// Bits of the routed experts.
    bits: f64,
    /// Rows of each Engram table, and as released.
    engram_rows: [usize; 2],
    device: String,
    chip: String,
    driver: String,
    numerics: ops::Mode,
    prompt_tokens: usize,
    timed_tokens: usize,
    runs: usize,
    /// Time to make the weights and bring them to the device, in seconds.
    load_seconds: f64,
    tokens_per_second: Spread,
    ms_per_token: f64,
    /// Bytes of weights that one token's step reads.
    weight_bytes_per_token: u64,
    /// Those bytes a second, at the median.
    weight_gb_s: f64,
    /// Bytes of all weights but the Engram tables.
    weight_bytes: u64,
    /// Kernels of one more run in which every launch was timed: milliseconds a token. Their sum is more than an untimed
    /// step takes.
    kernels: Vec<KernelTime>,
}

#[derive(Serialize)]
struct KernelTime {
    kernel: &'static str,
    launches_per_token: f64,
    ms_per_token: f64,
}

pub fn run(args: &BenchModel, what: &'static str) -> Result<(), Failure> {
    let rate = Rate::from_bits(args.bits).map_err(|e| Failure::Usage(format!("--bits: {e}")))?;
    let config =
        synthetic::config(args.engram_vocab).map_err(|e| Failure::Usage(format!("--engram-vocab: {e}")))?;
    let weights = Synthetic::new(&config, rate);
    let start = Instant::now();
    let (lm, about) = args.model.device.visit(
        args.model.numerics,
        args.model.threads,
        Assemble { config: &config, weights: &weights },
    )??;
    let load_seconds = start.elapsed().as_secs_f64();
    eprintln!(
        "{} layers, {} experts at {} bits, ready in {load_seconds:.1} s",
        config.num_hidden_layers, config.n_routed_experts, args.bits
    );
    // Ids spread over the vocabulary: text of no meaning costs the same.
    let ids: Vec<u32> = (0..args.tokens).map(|i| (3 + i * 37 % (config.vocab_size - 3)) as u32).collect();
    let timed = if what == "prefill" { args.tokens } else { args.decode };
    let mut rates = Vec::new();
    // One prompt serves all decode runs: each goes on behind the one before.
    let options = SessionOptions::new(args.tokens + args.decode * (args.runs + 2) + 1);
    let open = || lm.clone().open(SessionOptions { prefill: args.prefill, ..options.clone() });
    let mut session = open()?;
    if what == "decode" {
        feed(&mut *session, &ids)?;
    }
    for run in 0..=args.runs {
        let time = if what == "prefill" {
            session = open()?;
            seconds(|| feed(&mut *session, &ids))?
        } else {
            seconds(|| decode(&mut *session, args.decode))?
        };
        if session.logits().iter().any(|v| !v.is_finite()) {
            return Err(Failure::Gate("the logits of the synthetic model are not finite".into()));
        }
        eprintln!("run {run}: {:.2} tok/s", timed as f64 / time);
        if run > 0 {
            rates.push(timed as f64 / time);
        }
    }
    let (outcome, times) = args.model.device.profile(|| {
        if what == "prefill" {
            session = open()?;
            feed(&mut *session, &ids)
        } else {
            decode(&mut *session, args.decode)
        }
    });
    outcome?;
    let each = |(kernel, launches, seconds): (&'static str, u64, f64)| KernelTime {
        kernel,
        launches_per_token: launches as f64 / timed as f64,
        ms_per_token: 1e3 * seconds / timed as f64,
    };
    let kernels: Vec<KernelTime> = times.into_iter().map(each).collect();
    let tokens_per_second = Spread::of(rates);
    let [per_token, all] = weights.bytes(&config);
    let m = Measured {
        what,
        model: "synthetic flash",
        bits: args.bits,
        engram_rows: [config.engram.num_embeddings[0], 384_006_168],
        device: about.family,
        chip: about.detail,
        driver: about.driver,
        numerics: args.model.numerics,
        prompt_tokens: args.tokens,
        timed_tokens: timed,
        runs: args.runs,
        load_seconds,
        ms_per_token: 1e3 / tokens_per_second.median,
        weight_bytes_per_token: per_token,
        weight_gb_s: per_token as f64 * tokens_per_second.median / 1e9,
        weight_bytes: all,
        kernels,
        tokens_per_second,
    };
    if args.json {
        return render::document(&m);
    }
    let reads = match what {
        "decode" => {
            format!("; {:.2} GB of weights a token = {:.0} GB/s", per_token as f64 / 1e9, m.weight_gb_s)
        }
        _ => String::new(),
    };
    render::line(&format!(
        "{what}, synthetic flash, experts at {} bits ({:.1} GB of weights), {} ({}) in {} numerics, prompt {} tokens: {:.2} \
         tok/s (median of {}, {:.2} to {:.2}) = {:.2} ms a token{reads}; Engram tables of {} rows instead of 384 million",
        m.bits,
        all as f64 / 1e9,
        m.device,
        m.chip,
        m.numerics.name(),
        m.prompt_tokens,
        m.tokens_per_second.median,
        m.runs,
        m.tokens_per_second.min,
        m.tokens_per_second.max,
        m.ms_per_token,
        m.engram_rows[0],
    ))?;
    for k in m.kernels.iter().filter(|k| k.ms_per_token > 0.0005 * m.ms_per_token) {
        render::line(&format!(
            "  {:<20} {:>9.4} ms a token, {:>8.2} launches",
            k.kernel, k.ms_per_token, k.launches_per_token
        ))?;
    }
    Ok(())
}

struct Assemble<'a> {
    config: &'a Config,
    weights: &'a Synthetic,
}

impl Visit for Assemble<'_> {
    type Output = Result<(Arc<dyn Lm>, About), Failure>;

    fn visit<B: Backend + 'static>(self, backend: B, about: About) -> Self::Output {
        let map = synthetic::token_map(self.config);
        let model =
            Model::assemble(backend, self.config.clone(), self.weights, map).map_err(engine::Error::from)?;
        Ok((Arc::new(model), about))
    }
}
