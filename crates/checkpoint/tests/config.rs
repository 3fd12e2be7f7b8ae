//! Configurations that are accepted, and one test case for every rule that refuses one.

use std::path::Path;

use checkpoint::{Config, LayerPlan, Role};
use serde_json::{Value, json};

fn repository(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn released() -> Config {
    Config::load(&repository("fixtures/released")).unwrap()
}

#[test]
fn the_released_configuration_is_read_whole() {
    let c = released();
    assert_eq!((c.vocab_size, c.hidden_size, c.num_hidden_layers), (129_280, 5120, 40));
    assert_eq!((c.num_attention_heads, c.head_dim, c.qk_rope_head_dim), (64, 512, 64));
    assert_eq!((c.q_lora_rank, c.o_lora_rank, c.o_groups), (1280, 1024, 8));
    assert_eq!((c.moe_intermediate_size, c.n_routed_experts, c.num_experts_per_tok), (2304, 384, 6));
    assert_eq!((c.index_n_heads, c.index_head_dim, c.index_topk), (32, 128, 512));
    assert_eq!((c.candidate_topk_blocks, c.candidate_block_size, c.sliding_window), (2048, 8, 128));
    assert_eq!((c.hc_mult, c.hc_sinkhorn_iters, c.hc_eps), (4, 20, 1e-6));
    assert_eq!((c.swiglu_limit, c.rms_norm_eps, c.routed_scaling_factor), (10.0, 1e-20, 1.5));
    assert_eq!((c.rope_theta, c.compress_rope_theta), (1e4, 1.6e5));
    assert_eq!((c.yarn.factor, c.yarn.beta_fast, c.yarn.beta_slow), (16.0, 32.0, 1.0));
    assert_eq!((c.yarn.original_max_position_embeddings, c.max_position_embeddings), (65_536, 1 << 20));
    assert_eq!((c.bos_token_id, c.eos_token_id, c.pad_token_id, c.image_token_id), (0, 1, 2, 129_264));
    assert_eq!((c.engram.compressed_vocab_size, c.engram.pad_token_id, c.engram_columns()), (99_092, 2, 24));
    assert_eq!((c.dspark.stages, c.dspark.block_size, c.dspark.noise_token_id), (3, 5, 128_799));
    assert_eq!(
        (c.dspark.n_routed_experts, c.dspark.num_experts_per_tok, c.dspark.markov_rank),
        (128, 3, 256)
    );
    assert_eq!(c.dspark.target_layer_ids, [37, 38, 39]);
    assert_eq!((c.vision.num_hidden_layers, c.vision.hidden_size, c.vision.max_wh_ratio), (32, 1024, None));
}

/// The table of spec section 0.
#[test]
fn the_released_schedule() {
    let c = released();
    for l in 0..40 {
        let (role, ratio, kv, index) = match l {
            0 | 1 => (Role::Window, 0, None, None),
            2..20 => {
                let source = (l - 2) / 6 * 6 + 2;
                let role = if l == source { Role::Full } else { Role::Reuse };
                (role, 2, Some(source), Some(source))
            }
            20 => (Role::Full, 1, Some(20), Some(20)),
            _ => {
                let role = if l % 4 == 0 { Role::Reindex } else { Role::Reuse };
                (role, 1, Some(20), Some(l / 4 * 4))
            }
        };
        let want = LayerPlan {
            ratio,
            role,
            kv_source: kv,
            index_source: index,
            candidate_source: l == 20,
            engram: [1, 14].iter().position(|e| *e == l),
        };
        assert_eq!(c.layer(l), want, "layer {l}");
    }
}

/// A change of one field that must be refused.
struct Case(&'static str, Value, u8, &'static str);

fn refused(base: &str, case: &Case) {
    let Case(pointer, value, exit_code, want) = case;
    let mut tree: Value = serde_json::from_str(base).unwrap();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let object = tree.pointer_mut(parent).unwrap();
    match object {
        Value::Array(list) => list[key.parse::<usize>().unwrap()] = value.clone(),
        _ if *value == json!("REMOVE") => drop(object.as_object_mut().unwrap().shift_remove(key).unwrap()),
        _ => object[key] = value.clone(),
    }
    let error = Config::from_json(&tree.to_string(), "m/config.json")
        .expect_err(&format!("{pointer} = {value} must be refused"));
    let text = error.to_string();
    assert!(text.starts_with("m/config.json: "), "{text}");
    assert!(text.contains(want), "{pointer} = {value}: {text:?} lacks {want:?}");
    assert_eq!(error.exit_code(), *exit_code, "{text}");
}

#[test]
fn every_rule_refuses_its_violation() {
    let nano = std::fs::read_to_string(repository("fixtures/model/nano/config.json")).unwrap();
    Config::from_json(&nano, "nano").unwrap();
    let t = |field: &'static str, value: Value, want: &'static str| {
        Case(Box::leak(format!("/text_config/{field}").into_boxed_str()), value, 4, want)
    };
    let unsupported = |pointer, value, want| Case(pointer, value, 3, want);
    let cases = [
        // Fields: present, of their type, within bounds.
        t("hidden_size", json!("REMOVE"), "text_config.hidden_size is missing"),
        t("hidden_size", json!(0), "text_config.hidden_size is 0; it must be between 32 and 65536"),
        t("hidden_size", json!(130), "text_config.hidden_size is 130; it must be a multiple of 32"),
        t("hidden_size", json!(1u64 << 63), "text_config.hidden_size is 9223372036854775808"),
        t("hidden_size", json!(-128), "text_config.hidden_size is -128, not a whole number"),
        t("hidden_size", json!(128.5), "text_config.hidden_size is 128.5, not a whole number"),
        t("hidden_size", json!("128"), "text_config.hidden_size is \"128\", not a whole number"),
        t("head_dim", json!(48), "text_config.head_dim is 48; it must be a multiple of 32"),
        t("q_lora_rank", json!(65), "text_config.q_lora_rank is 65"),
        t("o_lora_rank", json!(16), "text_config.o_lora_rank is 16"),
        t("moe_intermediate_size", json!(33), "text_config.moe_intermediate_size is 33"),
        t("index_head_dim", json!(40), "text_config.index_head_dim is 40"),
        t("engram_head_dim", json!(16), "text_config.engram_head_dim is 16"),
        t("qk_rope_head_dim", json!(31), "text_config.qk_rope_head_dim is 31"),
        t("hc_mult", json!(2), "text_config.hc_mult is 2; it must be 4"),
        t("n_routed_experts", json!(1_000_000), "text_config.n_routed_experts is 1000000"),
        t("num_hidden_layers", json!(1_000_000_000), "text_config.num_hidden_layers is 1000000000"),
        t("rms_norm_eps", json!(0.0), "text_config.rms_norm_eps is 0; it must be positive and finite"),
        t("rms_norm_eps", json!(1e-60), "text_config.rms_norm_eps is 0"),
        t("swiglu_limit", json!(1e60), "text_config.swiglu_limit is 1"),
        t("rope_theta", json!("1e4"), "text_config.rope_theta is \"1e4\", not a number"),
        t("rope_scaling", Value::Null, "text_config.rope_scaling is not an object"),
        t("rope_scaling/factor", json!(-16), "text_config.rope_scaling.factor is -16"),
        t("compress_ratios/2", json!(3), "text_config.compress_ratios[2] is 3"),
        t("compress_ratios", json!(2), "text_config.compress_ratios is not a list"),
        Case("/vision_config/patch_size", json!(0), 4, "vision_config.patch_size is 0"),
        Case(
            "/vision_config/num_attention_heads",
            json!(5),
            4,
            "vision_config.hidden_size 64 is not a multiple of 4",
        ),
        Case("/bos_token_id", json!("REMOVE"), 4, "bos_token_id is missing"),
        Case("/text_config", json!("REMOVE"), 4, "text_config is missing"),
        // Rules between shapes.
        t("qk_rope_head_dim", json!(66), "qk_rope_head_dim 66 is more than head_dim 64"),
        t("qk_rope_head_dim", json!(64), "qk_rope_head_dim 64 is more than index_head_dim 32"),
        t("o_groups", json!(3), "o_groups 3 does not divide num_attention_heads 4"),
        t("num_experts_per_tok", json!(9), "num_experts_per_tok 9 is more than n_routed_experts 8"),
        t("rope_scaling/beta_fast", json!(1), "rope_scaling.beta_fast 1 is not more than beta_slow 1"),
        // The schedule.
        t("compress_ratios", json!([0, 2, 2, 2, 1, 1, 1, 0]), "compress_ratios has 8 entries"),
        t("compress_ratios/7", json!(1), "compress_ratios[7] is 1; draft stages have ratio 0"),
        t("kv_source_layer_ids", json!([1, 4, 3]), "kv_source_layer_ids does not ascend: 4 is followed by 3"),
        t("kv_source_layer_ids", json!([1, 1, 3, 4]), "kv_source_layer_ids does not ascend"),
        t(
            "kv_source_layer_ids",
            json!([1, 3, 4, 7]),
            "kv_source_layer_ids names layer 7; the last layer is 6",
        ),
        t(
            "kv_source_layer_ids",
            json!([0, 1, 3, 4]),
            "kv_source_layer_ids names layer 0, whose compress_ratios",
        ),
        t("kv_source_layer_ids", json!([3, 4]), "layer 1, which has no entries of its own"),
        t("compress_ratios/0", json!(2), "kv_source_layer_ids has no source at or before layer 0 of ratio 2"),
        t("kv_source_layer_ids", json!([1, 2, 3, 4]), "names layer 2, which index_source_layer_ids lacks"),
        t("kv_source_layer_ids", json!([1, 3]), "candidate_source_layer_id 4 is not in both"),
        t("kv_source_layer_ids", json!([1, 3, 4, 5]), "layer 5 after candidate_source_layer_id 4"),
        t("index_source_layer_ids", json!([1, 2, 3, 4, 5]), "layer 2, which has no entries of its own"),
        t("index_source_layer_ids", json!([1, 3, 5]), "candidate_source_layer_id 4 is not in both"),
        t("compress_ratios/5", json!(2), "layer 5 of ratio 2 would read layer 4 of ratio 1"),
        t("compress_ratios/2", json!(1), "layer 2 of ratio 1 would read layer 1 of ratio 2"),
        t("candidate_source_layer_id", json!(5), "candidate_source_layer_id 5 is not in both"),
        t("candidate_source_layer_id", json!(3), "candidate_source_layer_id 3 has ratio 2"),
        // Engram.
        t("engram_layer_ids", json!([4, 1]), "engram_layer_ids does not ascend"),
        t("engram_layer_ids", json!([1, 7]), "engram_layer_ids names layer 7"),
        t("engram_layer_ids", json!([1]), "engram_num_embeddings has 2 entries where engram_layer_ids has 1"),
        t(
            "engram_num_embeddings",
            json!([434, 607]),
            "engram_num_embeddings[1] is 607; the hash columns of layer 4 have 606 rows",
        ),
        t(
            "engram_vocab_size",
            json!(62),
            "engram_num_embeddings[0] is 434; the hash columns of layer 1 have",
        ),
        t(
            "engram_compressed_vocab_size",
            json!(513),
            "engram_compressed_vocab_size 513 is more than vocab_size 512",
        ),
        t("engram_pad_token_id", json!(512), "engram_pad_token_id 512 is not below vocab_size 512"),
        // Tokens.
        Case("/eos_token_id", json!(512), 4, "eos_token_id 512 is not below vocab_size 512"),
        Case("/image_token_id", json!(600), 4, "image_token_id 600 is not below vocab_size 512"),
        t("dspark_noise_token_id", json!(512), "dspark_noise_token_id 512 is not below vocab_size 512"),
        // The draft head.
        t("dspark_block_size", json!(0), "dspark_block_size is empty or 0"),
        t("dspark_target_layer_ids", json!([]), "dspark_target_layer_ids is empty or 0"),
        t("dspark_target_layer_ids", json!([5, 7]), "dspark_target_layer_ids names layer 7"),
        t(
            "dspark_num_experts_per_tok",
            json!(5),
            "dspark_num_experts_per_tok 5 is more than dspark_n_routed_experts 4",
        ),
        // What is not built is refused by name.
        unsupported(
            "/architectures",
            json!(["LlamaForCausalLM"]),
            "architecture LlamaForCausalLM is not supported",
        ),
        unsupported("/model_type", json!("deepseek_v3"), "model_type \"deepseek_v3\" is not supported"),
        unsupported("/quantization", json!({"group_size": 64, "bits": 4}), "MLX"),
        unsupported(
            "/quantization_config/quant_method",
            json!("awq"),
            "quantization_config.quant_method \"awq\" is not supported",
        ),
        unsupported("/quantization_config/scale_fmt", json!("float"), "scale_fmt \"float\""),
        unsupported("/quantization_config/expert_dtype", json!("fp8"), "expert_dtype \"fp8\""),
        unsupported(
            "/quantization_config/activation_scheme",
            json!("static"),
            "activation_scheme \"static\"",
        ),
        unsupported(
            "/quantization_config/weight_block_size",
            json!([128, 128]),
            "weight_block_size [128,128] is not supported",
        ),
        unsupported("/text_config/rope_scaling/rope_type", json!("linear"), "rope_type \"linear\""),
        unsupported("/text_config/hidden_act", json!("gelu"), "hidden_act \"gelu\""),
        unsupported("/text_config/scoring_func", json!("sigmoid"), "scoring_func \"sigmoid\""),
        unsupported("/text_config/topk_method", json!("greedy"), "topk_method \"greedy\""),
        unsupported("/text_config/norm_topk_prob", json!(false), "norm_topk_prob false"),
        unsupported("/text_config/attention_bias", json!(true), "attention_bias true"),
        unsupported("/text_config/tie_word_embeddings", json!(true), "tie_word_embeddings true"),
        unsupported("/text_config/num_key_value_heads", json!(4), "num_key_value_heads 4"),
        unsupported("/text_config/n_shared_experts", json!(2), "n_shared_experts 2"),
    ];
    for case in &cases {
        refused(&nano, case);
    }
}

#[test]
fn text_that_is_no_configuration() {
    for (text, want) in [
        ("", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ("{\"model_type\": \"deepseek_v41\", \"model_type\": \"x\"}", "key \"model_type\" appears twice"),
        ("{\"a\": {\"b\": [{\"c\": 1, \"c\": 2}]}}", "key \"c\" appears twice"),
        ("{\"model_type\": \"deepseek_v41\"}", "quantization_config is missing"),
    ] {
        let error = Config::from_json(text, "config.json").unwrap_err();
        assert!(error.to_string().contains(want), "{error}");
        assert_eq!(error.exit_code(), 4);
    }
    let deep = "[".repeat(100_000);
    assert!(Config::from_json(&deep, "config.json").unwrap_err().to_string().contains("recursion"));
    let long = " ".repeat(5 << 20);
    assert!(Config::from_json(&long, "config.json").unwrap_err().to_string().contains("more than"));
}

#[test]
fn draft_head_vision_and_engram_may_be_absent() {
    let text = std::fs::read_to_string(repository("fixtures/model/nano/config.json")).unwrap();
    let mut tree: Value = serde_json::from_str(&text).unwrap();
    tree.as_object_mut().unwrap().shift_remove("vision_config");
    let t = &mut tree["text_config"];
    t["num_nextn_predict_layers"] = json!(0);
    t["compress_ratios"] = json!([0, 2, 2, 2, 1, 1, 1]);
    t["dspark_noise_token_id"] = json!(100_000);
    t["engram_layer_ids"] = json!([]);
    t["engram_num_embeddings"] = json!([]);
    let c = Config::from_json(&tree.to_string(), "config.json").unwrap();
    assert_eq!((c.vision.num_hidden_layers, c.dspark.stages), (0, 0));
    let prefixes = ["mtp.", "vision.", "aligner.", "image_"];
    assert!(c.inventory().all(|t| !prefixes.iter().any(|p| t.name.starts_with(p))));
    assert!(c.inventory().all(|t| !t.name.contains("engram")));
}

/// Spec 2.9.
#[test]
fn released_engram_primes_and_multipliers() {
    let c = released();
    let above: Vec<u64> = c.engram_primes(0).iter().map(|p| p - 16_000_000).collect();
    assert_eq!(above[..8], [57, 79, 81, 97, 121, 129, 133, 183]);
    assert_eq!(above[8..16], [189, 207, 211, 253, 277, 289, 307, 321]);
    assert_eq!(above[16..], [339, 381, 393, 399, 403, 409, 447, 463]);
    let above: Vec<u64> = c.engram_primes(1).iter().map(|p| p - 16_000_000).collect();
    assert_eq!(above[..8], [477, 487, 499, 507, 511, 573, 609, 627]);
    assert_eq!(above[8..16], [667, 669, 693, 697, 711, 729, 759, 769]);
    assert_eq!(above[16..], [781, 799, 813, 819, 841, 877, 879, 889]);
    assert_eq!(c.engram_multipliers(0), [76632096046245, 4839876093313, 35959672319349, 73987337458391]);
    assert_eq!(c.engram_multipliers(1), [67716810739261, 51510806800915, 30921347202721, 82619226485591]);
}

/// Rows of one position by the rule of spec 2.9, from compressed ids.
fn hash_rows(c: &Config, k: usize, ids: &[i64], p: usize, pad: i64) -> Vec<u64> {
    let (multipliers, primes) = (c.engram_multipliers(k), c.engram_primes(k));
    let at = |s: usize| p.checked_sub(s).map_or(pad, |i| ids[i]);
    let heads = c.engram.n_heads;
    let mut offset = 0;
    let mut roll = at(0) * multipliers[0];
    let mut rows = Vec::new();
    for s in 1..c.engram.max_ngram_size {
        roll ^= at(s) * multipliers[s];
        for prime in &primes[(s - 1) * heads..s * heads] {
            rows.push(roll as u64 % prime + offset);
            offset += prime;
        }
    }
    rows
}

/// Vectors of spec 2.9, made with the released code.
#[test]
fn released_hash_vectors() {
    let c = released();
    let ids = [0, 5, 17, 99091, 42];
    assert_eq!(hash_rows(&c, 0, &ids, 0, 2)[..3], [5702652, 24393184, 39183301]);
    assert_eq!(hash_rows(&c, 0, &ids, 1, 2)[..3], [11226917, 28385813, 44491313]);
    assert_eq!(hash_rows(&c, 0, &ids, 4, 2)[..3], [13131409, 22107638, 46286683]);
    assert_eq!(hash_rows(&c, 1, &ids, 4, 2)[21..], [339946539, 354581237, 382145690]);
}

/// The bucket primes and multipliers of the source-CUDA fixtures: vocabulary 1000 and 1024 classes.
#[test]
fn engram_numbers_of_another_size() {
    let mut c = released();
    (c.engram.vocab_size, c.engram.compressed_vocab_size) = (1000, 1024);
    assert_eq!(c.engram_primes(0)[..8], [1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049]);
    assert_eq!(c.engram_primes(1)[16..], [1289, 1291, 1297, 1301, 1303, 1307, 1319, 1321]);
    assert_eq!(c.engram_primes(0).iter().sum::<u64>(), 25_874);
    assert_eq!(c.engram_primes(1).iter().sum::<u64>(), 30_058);
    let first = [7415652013100227, 468352540858031, 3479800634247035, 7159719964284203];
    let second = [6552924032983287, 4984676628433953, 2992244274425853, 7995023819248391];
    assert_eq!((c.engram_multipliers(0), c.engram_multipliers(1)), (first.to_vec(), second.to_vec()));
}
