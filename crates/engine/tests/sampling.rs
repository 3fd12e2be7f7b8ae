//! The sampler on the sampling fixtures and on the properties that the engine relies on.

use std::path::Path;

use engine::sampler::{LEAST_LOG_PROB, Sampler, SamplerError, log_probs, uniform};
use serde_json::Value;
use text::SamplingParams;

fn params(given: &Value) -> SamplingParams {
    let known = [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    ];
    let given = given.as_object().unwrap();
    assert!(given.keys().all(|name| known.contains(&name.as_str())), "{given:?}");
    let number = |name: &str| given.get(name).map(|v| v.as_f64().unwrap() as f32);
    let default = SamplingParams::default();
    SamplingParams {
        temperature: number("temperature").unwrap_or(default.temperature),
        top_p: number("top_p").unwrap_or(default.top_p),
        top_k: number("top_k").map_or(0, |k| k.max(0.0) as u32),
        min_p: number("min_p").unwrap_or(default.min_p),
        repetition_penalty: number("repetition_penalty").unwrap_or(default.repetition_penalty),
        presence_penalty: number("presence_penalty").unwrap_or(default.presence_penalty),
        frequency_penalty: number("frequency_penalty").unwrap_or(default.frequency_penalty),
        logit_bias: given
            .get("logit_bias")
            .and_then(Value::as_object)
            .map(|map| map.iter().map(|(id, b)| (id.parse().unwrap(), b.as_f64().unwrap() as f32)).collect())
            .unwrap_or_default(),
        seed: None,
    }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn sampling_fixtures() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/encoding/sampling.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    let (mut cases, mut drawn) = (0, 0);
    for line in text.lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let name = case["id"].as_str().unwrap();
        let logits: Vec<f32> =
            case["logits"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap() as f32).collect();
        let (choice, position) = (case["choice"].as_u64().unwrap(), case["position"].as_u64().unwrap());
        let seed = case["seed"].as_u64().unwrap();
        let params = SamplingParams { seed: Some(seed), ..params(&case["params"]) };
        let mut sampler = Sampler::new(params.clone(), choice, &ids(&case["prompt_ids"]));
        ids(&case["generated_ids"]).into_iter().for_each(|id| sampler.accept(id));

        let distribution = sampler.distribution(&logits, None).unwrap();
        let kept: Vec<u32> = distribution.iter().map(|(id, _)| *id).collect();
        assert_eq!(kept, ids(&case["kept"]), "kept ids of {name}");
        for ((id, p), expected) in distribution.iter().zip(case["kept_probs"].as_array().unwrap()) {
            // Single-precision logits and parameters against the fixture's double ones.
            assert!((p - expected.as_f64().unwrap()).abs() < 1e-5, "{name}: probability {p} of {id}");
        }
        cases += 1;

        let expected = case["token"].as_u64().unwrap() as u32;
        let Some(u) = case["u"].as_f64() else {
            assert_eq!(sampler.sample(&logits, None), Ok(expected), "{name}");
            continue;
        };
        assert_eq!(uniform(seed, choice, position), u, "u of {name}");
        let mut sum = 0.0;
        let near_a_border = distribution.iter().any(|(_, p)| {
            sum += p;
            (sum - u).abs() < 1e-5
        });
        if !near_a_border {
            // The case's position is not the number of its generated ids: draw at it from the same distribution.
            let mut sum = 0.0;
            let token = distribution.iter().find(|(_, p)| {
                sum += p;
                sum > u
            });
            assert_eq!(token.map(|(id, _)| *id), Some(expected), "token of {name}");
            drawn += 1;
            if sampler.position() == position {
                assert_eq!(sampler.sample(&logits, None), Ok(expected), "draw of {name}");
            }
            if case["generated_ids"].as_array().unwrap().is_empty() && position < 10 {
                let neutral = SamplingParams { presence_penalty: 0.0, frequency_penalty: 0.0, ..params };
                let mut sampler = Sampler::new(neutral, choice, &[]);
                (0..position).for_each(|_| sampler.accept(u32::MAX));
                assert_eq!(sampler.sample(&logits, None), Ok(expected), "draw of {name} at {position}");
            }
        }
    }
    assert_eq!(cases, 76);
    assert!(drawn >= 60, "only {drawn} tokens compared");
}

fn rows(count: usize, size: usize) -> Vec<Vec<f32>> {
    (0..count as u64)
        .map(|row| (0..size as u64).map(|id| (uniform(3, row, id) * 24.0 - 12.0) as f32).collect())
        .collect()
}

/// The lazily sorted ranking draws what a full sort draws.
#[test]
fn draws_equal_a_full_sort() {
    for (i, logits) in rows(40, 5000).iter().enumerate() {
        let params = SamplingParams {
            temperature: 0.3 + 0.1 * i as f32,
            top_p: if i % 2 == 0 { 1.0 } else { 0.9 },
            top_k: if i % 3 == 0 { 700 } else { 0 },
            min_p: if i % 5 == 0 { 1e-3 } else { 0.0 },
            seed: Some(i as u64),
            ..SamplingParams::default()
        };
        let mut sampler = Sampler::new(params.clone(), 1, &[]);
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let largest = f64::from(logits[order[0]]);
        let weight = |id: usize| ((f64::from(logits[id]) - largest) / f64::from(params.temperature)).exp();
        let total: f64 = (0..logits.len()).map(weight).sum();
        let mut before = 0.0;
        let mut kept = Vec::new();
        for (n, &id) in order.iter().enumerate() {
            let fits = (params.top_k == 0 || n < params.top_k as usize)
                && before < f64::from(params.top_p)
                && weight(id) >= f64::from(params.min_p);
            if n > 0 && !fits {
                break;
            }
            before += weight(id) / total;
            kept.push(id);
        }
        let distribution = sampler.distribution(logits, None).unwrap();
        assert!(distribution.iter().map(|(id, _)| *id as usize).eq(kept.iter().copied()), "row {i}");
        let sum: f64 = kept.iter().map(|&id| weight(id)).sum();
        let mut running = 0.0;
        let drawn = kept.iter().find(|&&id| {
            running += weight(id);
            running > uniform(i as u64, 1, 0) * sum
        });
        assert_eq!(sampler.sample(logits, None).unwrap() as usize, *drawn.unwrap(), "row {i}");
    }
}

/// A million draws: frequencies equal probabilities within five standard deviations.
#[test]
fn draws_follow_the_distribution() {
    let logits = [1.0f32, 0.0, -1.0, 2.0, f32::NEG_INFINITY];
    let params = SamplingParams { seed: Some(11), ..SamplingParams::default() };
    let mut sampler = Sampler::new(params, 0, &[]);
    let mut counts = [0f64; 5];
    let n = 1_000_000.0;
    for _ in 0..n as usize {
        counts[sampler.sample(&logits, None).unwrap() as usize] += 1.0;
        sampler.accept(u32::MAX);
    }
    let total: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
    for (count, logit) in counts.iter().zip(logits) {
        let p = f64::from(logit).exp() / total;
        let deviation = (n * p * (1.0 - p)).sqrt();
        assert!((count - n * p).abs() <= 5.0 * deviation, "{count} of {n}, expected {}", n * p);
    }
}

#[test]
fn masks_and_broken_rows() {
    let mut sampler = Sampler::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() }, 0, &[]);
    let mut logits = vec![0.0f32; 40];
    logits[35] = 5.0;
    assert_eq!(sampler.sample(&logits, None), Ok(35));
    assert_eq!(sampler.sample(&logits, Some(&[0b1100, 0])), Ok(2));
    assert_eq!(sampler.sample(&logits, Some(&[0, 0])), Err(SamplerError::NothingAllowed));
    assert_eq!(sampler.sample(&logits, Some(&[1 << 31])), Ok(31));
    assert_eq!(sampler.sample(&[], None), Err(SamplerError::NothingAllowed));
    logits[3] = f32::NAN;
    assert_eq!(sampler.sample(&logits, None), Err(SamplerError::NotFinite { id: 3 }));
    logits[3] = f32::INFINITY;
    let error = sampler.sample(&logits, Some(&[1])).unwrap_err();
    assert!(error.to_string().contains("token 3"), "{error}");
}

/// Ids of a bias or a prompt that the row does not have do nothing; a masked id stays masked with any bias or penalty.
#[test]
fn adjustments_stay_in_bounds() {
    let params = SamplingParams {
        temperature: 0.0,
        logit_bias: vec![(99, 5.0), (0, 100.0)],
        repetition_penalty: 0.5,
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(params, 0, &[0, 1, 1_000_000]);
    assert_eq!(sampler.sample(&[1.0, 2.0, 3.0], Some(&[0b110])), Ok(1));
}

#[test]
fn the_same_seed_gives_the_same_tokens() {
    let rows = rows(50, 300);
    let run = |seed: Option<u64>, choice: u64| {
        let mut sampler = Sampler::new(SamplingParams { seed, ..SamplingParams::default() }, choice, &[]);
        let tokens: Vec<u32> = rows
            .iter()
            .map(|row| {
                let id = sampler.sample(row, None).unwrap();
                assert_eq!(sampler.sample(row, None), Ok(id), "a draw is repeatable");
                sampler.accept(id);
                id
            })
            .collect();
        (tokens, sampler.seed())
    };
    assert_eq!(run(Some(5), 0), run(Some(5), 0));
    assert_ne!(run(Some(5), 0).0, run(Some(5), 1).0);
    let (tokens, seed) = run(None, 0);
    assert!(seed < 1 << 63);
    assert_eq!(run(Some(seed), 0).0, tokens);
}

#[test]
fn reported_log_probabilities() {
    let logits = [1.0f32, 3.0, 3.0, f32::NEG_INFINITY, -2.0];
    let total: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
    let found = log_probs(&logits, 4, 5);
    let expected = |logit: f32| (f64::from(logit) - total.ln()) as f32;
    // Two roundings of single precision.
    let close = |a: f32, b: f32| (a - b).abs() < 1e-6 * b.abs().max(1.0);
    assert!(close(found.sampled, expected(-2.0)));
    let order: Vec<u32> = found.top.iter().map(|(id, _)| *id).collect();
    assert_eq!(order, [1, 2, 0, 4, 3]);
    assert!(close(found.top[0].1, expected(3.0)) && found.top[4].1 == LEAST_LOG_PROB);
    assert_eq!(log_probs(&logits, 3, 0), engine::sampler::LogProbs { sampled: LEAST_LOG_PROB, top: vec![] });
    assert_eq!(log_probs(&logits, 0, 20).top.len(), 5);
}
