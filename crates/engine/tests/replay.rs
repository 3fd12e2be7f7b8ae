//! How far bounded replay is from a full prefill, and what it saves.

mod common;

use std::time::Instant;

use common::*;
use engine::{Loaded, Prefill, SessionOptions};
use ops::Mode;

/// What is measured over prompts of one model.
#[derive(Default)]
struct Figures {
    prompts: usize,
    kl: Vec<f64>,
    nrms: Vec<f64>,
    top: usize,
    answers: usize,
    seconds: [f64; 2],
}

fn probabilities(l: &[f32]) -> Vec<f64> {
    let max = l.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let all: Vec<f64> = l.iter().map(|l| f64::from(l - max).exp()).collect();
    let sum: f64 = all.iter().sum();
    all.into_iter().map(|p| p / sum).collect()
}

fn measure(loaded: &Loaded, prompts: &[Vec<u32>]) -> Figures {
    let mut f = Figures::default();
    for ids in prompts {
        let mut logits = Vec::new();
        let mut answers = Vec::new();
        for (i, prefill) in [Prefill::Full, Prefill::Replay].into_iter().enumerate() {
            let mut session = open(loaded, SessionOptions { prefill, ..SessionOptions::new(ids.len() + 16) });
            let start = Instant::now();
            feed(&mut *session, ids);
            f.seconds[i] += start.elapsed().as_secs_f64();
            logits.push(session.logits().to_vec());
            answers.push(answer(loaded, &mut *session, ids, greedy(), 16).ids);
        }
        let (p, q) = (probabilities(&logits[0]), probabilities(&logits[1]));
        f.kl.push(p.iter().zip(&q).filter(|(p, _)| **p > 0.0).map(|(p, q)| p * (p / q).ln()).sum());
        let square = |v: Vec<f64>| v.iter().map(|x| x * x).sum::<f64>().sqrt();
        let apart = logits[0].iter().zip(&logits[1]).map(|(a, b)| f64::from(a - b)).collect();
        f.nrms.push(square(apart) / square(logits[0].iter().map(|a| f64::from(*a)).collect()));
        f.top += usize::from(ops::linear::argmax(&logits[0]) == ops::linear::argmax(&logits[1]));
        f.answers += usize::from(answers[0] == answers[1]);
        f.prompts += 1;
    }
    f
}

fn report(name: &str, f: &Figures) {
    let stat = |v: &[f64]| {
        let mut v = v.to_vec();
        v.sort_by(f64::total_cmp);
        (v[v.len() / 2], v[v.len() - 1], v.iter().sum::<f64>() / v.len() as f64)
    };
    let ((kl, kl_max, kl_mean), (nrms, nrms_max, _)) = (stat(&f.kl), stat(&f.nrms));
    println!(
        "{name}: {} prompts: KL median {kl:.2e}, mean {kl_mean:.2e}, worst {kl_max:.2e}; NRMS median {nrms:.2e}, worst \
         {nrms_max:.2e}; top-1 equal {}, 16 greedy tokens equal {}; prefill {:.2} of the time",
        f.prompts,
        f.top,
        f.answers,
        f.seconds[1] / f.seconds[0],
    );
}

#[test]
fn bounded_replay_on_the_demo() {
    let loaded = load("demo", Mode::Native);
    let window = loaded.lm.config().sliding_window;
    let mut texts = demo_texts();
    // Prompts, each without its answer and with half of it.
    let halves: Vec<Vec<u32>> = texts.iter().map(|t| t[..t.len() - 6].to_vec()).collect();
    texts.iter_mut().for_each(|t| t.truncate(t.iter().rposition(|id| *id == 2011).unwrap() + 2));
    let prompts: Vec<Vec<u32>> = texts.into_iter().chain(halves).collect();
    let (short, mut long): (Vec<_>, Vec<_>) = prompts.into_iter().partition(|t| t.len() <= window);
    if !full() {
        long.truncate(12);
    }
    let exact = measure(&loaded, &short);
    assert!(exact.kl.iter().all(|kl| *kl == 0.0), "exact up to a window");
    let f = measure(&loaded, &long);
    report("demo", &f);
    // Of the demo's 8 layers only 3 are in the decoder; what they lose is what lies before their windows.
    assert!(f.kl.iter().all(|kl| kl.is_finite()) && 2 * f.top > f.prompts, "{} of {}", f.top, f.prompts);
}

#[test]
fn bounded_replay_on_random_weights() {
    for name in ["nano", "wide"] {
        if name == "wide" && !full() {
            continue; // its weights take minutes to generate
        }
        let loaded = load(name, Mode::Native);
        let window = loaded.lm.config().sliding_window;
        let n = if full() { 12 } else { 4 };
        let prompts: Vec<_> = (0..n).map(|s| random_ids(&loaded, 3 * window + 5 * s, s as u64)).collect();
        let f = measure(&loaded, &prompts);
        report(name, &f);
        assert!(f.nrms.iter().all(|d| *d > 0.0 && *d < 2.0));
    }
}
