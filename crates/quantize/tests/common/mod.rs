//! The smallest model of the architecture that has a tokenizer, in the released form.
#![allow(dead_code)] // each test binary uses its part

use std::{collections::BTreeMap, fs, path::Path};

use checkpoint::{Checkpoint, Config, Dtype, Form, write};
use exl3::{Codebook, Rate};
use ops::registry::generated_weight;
use quantize::{Event, Options, Report, Search, Text, parse_texts, run};
use serde_json::{Value, json};

fn config() -> Value {
    let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/model/nano/config.json");
    let mut tree: Value = serde_json::from_slice(&fs::read(nano).unwrap()).unwrap();
    let text = json!({
        "hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
        "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2,
        "n_routed_experts": 3, "num_experts_per_tok": 1, "compress_ratios": [2, 1, 1, 0],
        "kv_source_layer_ids": [0, 1], "index_source_layer_ids": [0, 1, 2], "candidate_source_layer_id": 1,
        "index_n_heads": 2, "index_head_dim": 32, "engram_layer_ids": [1], "engram_max_ngram_size": 2,
        "engram_n_heads": 1, "engram_vocab_size": 5, "engram_num_embeddings": [5],
        "num_nextn_predict_layers": 1, "dspark_block_size": 1, "dspark_noise_token_id": 3,
        "dspark_target_layer_ids": [0], "dspark_markov_rank": 4, "dspark_n_routed_experts": 1,
        "dspark_num_experts_per_tok": 1
    });
    for (name, value) in text.as_object().unwrap() {
        tree["text_config"][name] = value.clone();
    }
    tree["vision_config"]["num_hidden_layers"] = json!(0);
    tree
}

/// Writes the model into `dir`.
pub fn write_model(dir: &Path) {
    let text = serde_json::to_string_pretty(&config()).unwrap();
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), &text).unwrap();
    let config = Config::from_json(&text, "config.json").unwrap();
    let mut made: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for t in config.inventory() {
        let (rows, cols) = match t.shape[..] {
            [n] => (1, n),
            [r, c] => (r, c),
            _ => panic!("{:?}", t.shape),
        };
        let data = match t.dtype {
            Dtype::E8m0 => {
                let m = t.name.trim_end_matches(".scale");
                let (_, _, _, scale) = made.iter().find(|w| w.0 == format!("{m}.scale.kept")).unwrap();
                scale.clone()
            }
            dtype => {
                let (form, cols) = match dtype {
                    Dtype::F32 => (Form::F32, cols),
                    Dtype::Bf16 => (Form::Bf16, cols),
                    Dtype::I8 => (Form::Fp4Row32, 2 * cols),
                    _ if t.name.contains("embed") => (Form::Fp8Row32, cols),
                    _ => (Form::Fp8Block32, cols),
                };
                let w = generated_weight(&t.name, form, rows, cols, 5);
                let m = t.name.trim_end_matches(".weight");
                made.push((format!("{m}.scale.kept"), Dtype::U8, vec![], w.scale().to_vec()));
                w.data().to_vec()
            }
        };
        made.push((t.name, t.dtype, t.shape, data));
    }
    made.retain(|t| !t.0.ends_with(".kept"));
    let items: Vec<_> = made
        .iter()
        .map(|(name, dtype, shape, data)| write::Item { name, dtype: *dtype, shape, data })
        .collect();
    write::write_shard(&dir.join("model.safetensors"), &items).unwrap();
    let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/model/nano");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(nano.join(file), dir.join(file)).unwrap();
    }
}

pub fn texts() -> Vec<Text> {
    let lines = "{\"text\": \"The assay office tests metal before it is sold, and strikes a mark on what is good.\"}\n\
        {\"prompt\": \"How many marks are there? \", \"answer\": \"Four marks.\", \"category\": \"count\"}\n\
        {\"text\": \"fn main() { println!(\\\"gold 999\\\"); }\"}\n";
    parse_texts(lines, "texts").unwrap()
}

pub fn rate(bits: f64) -> Rate {
    Rate::from_bits(bits).unwrap()
}

/// Everything EXL3.
pub fn options(bits: f64) -> Options {
    Options {
        rate: rate(bits),
        codebook: Codebook::Mul1,
        dense: Some(rate(3.0)),
        head: Some(rate(6.0)),
        search: Search::Short,
        engram: true,
        threads: Some(2),
    }
}

pub fn quantize(src: &Path, dst: &Path, options: &Options) -> Report {
    run(&Checkpoint::open(src).unwrap(), dst, options, &texts(), &|_: Event| ()).unwrap()
}

/// Every file of a folder but the report, which holds times.
pub fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    let file = |e: fs::DirEntry| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap());
    entries.map(file).filter(|(name, _)| name != "quantize_report.json").collect()
}
