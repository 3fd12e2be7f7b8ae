//! Every way in which a model folder can be wrong ends in one sentence that names the file or the tensor.

mod common;

use std::{fs, os::unix::fs::symlink};

use checkpoint::{Checkpoint, MAX_HEADER_BYTES};
use common::{Folder, INDEX, Raw, SHARDS, join, lay_out, refused, split};
use serde_json::{Value, json};

#[test]
fn a_missing_tensor() {
    for name in ["norm.weight", "layers.5.ffn.experts.3.w2.scale", "layers.1.attn.compressor.wgate.weight"] {
        let folder = Folder::nano();
        for shard in SHARDS {
            folder.edit_tensors(shard, |all| all.retain(|t| t.name != name));
        }
        folder.reindex();
        folder.refused(4, &[name, "is missing"]);
    }
}

#[test]
fn half_a_draft_head_or_vision_tower() {
    for (name, rest) in [
        ("mtp.1.norm.weight", "mtp."),
        ("vision.blocks.1.norm2.weight", "vision."),
        ("image_start", "image_"),
        ("aligner.w1.bias", "aligner."),
    ] {
        let folder = Folder::nano();
        folder.edit_tensors(SHARDS[1], |all| all.retain(|t| t.name != name));
        folder.reindex();
        folder.refused(4, &[name, "is missing"]);
        // One tensor alone is no group either.
        let folder = Folder::nano();
        folder.edit_tensors(SHARDS[1], |all| {
            all.retain(|t| t.name == name || !t.name.starts_with(rest));
        });
        folder.reindex();
        folder.refused(4, &["is missing"]);
    }
}

#[test]
fn a_superfluous_tensor() {
    for name in
        ["layers.0.attn.extra.weight", "layers.7.attn_norm.weight", "mtp.2.norm.weight", "rotary.inv_freq"]
    {
        let folder = Folder::nano();
        folder.edit_tensors(SHARDS[0], |all| {
            all.push(Raw { name: name.into(), dtype: "F32".into(), shape: vec![1], data: vec![0; 4] });
        });
        folder.reindex();
        folder.refused(4, &[SHARDS[0], name, "is superfluous"]);
    }
}

#[test]
fn draft_tensors_that_the_configuration_denies() {
    let folder = Folder::nano();
    folder.edit_json("config.json", |c| {
        c["text_config"]["num_nextn_predict_layers"] = json!(0);
        c["text_config"]["compress_ratios"].as_array_mut().unwrap().truncate(7);
    });
    folder.refused(4, &["mtp.0.attn.attn_sink", "is superfluous"]);
}

#[test]
fn a_misshapen_tensor() {
    for (name, shape, want) in [
        ("embed.weight", vec![128, 512], "has shape [128, 512], not [512, 128]"),
        ("layers.0.attn.wq_b.weight", vec![256 * 64], "has shape [16384], not [256, 64]"),
        ("layers.0.attn.attn_sink", vec![4, 1], "has shape [4, 1], not [4]"),
        ("layers.1.engram.embed.scale", vec![1, 434], "has shape [1, 434], not [434, 1]"),
    ] {
        let folder = Folder::nano();
        folder.edit_header(SHARDS[0], |h| h[name]["shape"] = json!(shape));
        folder.refused(4, &[SHARDS[0], name, want]);
    }
}

#[test]
fn a_mistyped_tensor() {
    for (name, dtype, want) in [
        ("embed.weight", "F16", "is F16, not BF16"),
        ("layers.0.attn.wq_a.weight", "F8_E5M2", "is F8_E5M2, not F8_E4M3"),
        ("layers.0.attn.wq_a.scale", "U8", "is U8, not F8_E8M0"),
        ("layers.0.ffn.experts.0.w1.weight", "U8", "is U8, not I8"),
        ("layers.0.ffn.gate.bias", "I32", "is I32, not F32"),
    ] {
        let folder = Folder::nano();
        folder.edit_header(SHARDS[0], |h| h[name]["dtype"] = json!(dtype));
        folder.refused(4, &[SHARDS[0], name, want]);
    }
    let folder = Folder::nano();
    folder.edit_header(SHARDS[0], |h| h["embed.weight"]["dtype"] = json!("F4"));
    folder.refused(4, &[SHARDS[0], "header is not valid", "F4"]);
}

#[test]
fn a_truncated_shard() {
    let whole = Folder::nano().read(SHARDS[1]);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for (len, want) in [
        (0, "has 0 bytes, too few"),
        (7, "has 7 bytes, too few"),
        (8, "reaches beyond the file's 8 bytes"),
        (header - 1, "reaches beyond the file"),
        (header, "the file is truncated"),
        (whole.len() - 1, "the file is truncated"),
    ] {
        let folder = Folder::nano();
        folder.write(SHARDS[1], &whole[..len]);
        folder.refused(4, &[SHARDS[1], want]);
    }
}

#[test]
fn ranges_that_overlap_or_leave_gaps() {
    let shift = |by: i64| {
        let folder = Folder::nano();
        folder.edit_header(SHARDS[0], |h| {
            let t = &mut h["layers.0.ffn.gate.bias"]["data_offsets"];
            let at = |i: usize| t[i].as_i64().unwrap() + by;
            *t = json!([at(0), at(1)]);
        });
        folder
    };
    shift(-8).refused(4, &[SHARDS[0], "layers.0.ffn.gate.bias overlaps the tensor before it"]);
    shift(8).refused(4, &[SHARDS[0], "leaves 8 unclaimed bytes before it"]);
    let folder = Folder::nano();
    folder.write(SHARDS[0], [folder.read(SHARDS[0]), vec![0; 3]].concat());
    folder.refused(4, &[SHARDS[0], "has 3 bytes after its last tensor"]);
}

#[test]
fn a_header_that_lies() {
    let with = |offsets: Value, shape: Value, want: &[&str]| {
        let folder = Folder::nano();
        folder.edit_header(SHARDS[0], |h| {
            h["embed.weight"]["data_offsets"] = offsets;
            h["embed.weight"]["shape"] = shape;
        });
        folder.refused(4, want);
    };
    let (max, name) = (u64::MAX, "embed.weight");
    with(json!([0, 8]), json!([512, 128]), &[name, "has 8 bytes, which BF16 [512, 128] does not fill"]);
    with(json!([8, 0]), json!([512, 128]), &[name, "claims bytes 8..0"]);
    with(json!([0, max]), json!([512, 128]), &[name, "claims bytes 0..18446744073709551615"]);
    with(json!([0, 0]), json!([max, 0]), &[name]);
    with(json!([0, 0]), json!([max, max, 2]), &[name, "does not fill"]);
    with(json!([0, 131072]), json!([1u64 << 62, 4]), &[name, "does not fill"]);
    with(json!([-1, 131071]), json!([512, 128]), &["header is not valid"]);
    with(json!([0.5, 131072]), json!([512, 128]), &["header is not valid"]);
    with(json!([0, 131072, 5]), json!([512, 128]), &["header is not valid"]);
    with(json!([0, 131072]), json!([512, "128"]), &["header is not valid"]);
    with(json!([0, 131072]), json!([1, 1, 1, 1, 1, 1, 1, 512, 128]), &["more than 8 dimensions"]);
}

#[test]
fn a_header_of_impossible_length() {
    for (n, want) in [
        (MAX_HEADER_BYTES + 1, "header length 100000001 is more than 100000000 bytes"),
        (u64::MAX, "header length 18446744073709551615 is more than"),
        (MAX_HEADER_BYTES, "header length 100000000 reaches beyond the file"),
    ] {
        let folder = Folder::nano();
        let mut file = folder.read(SHARDS[0]);
        file[..8].copy_from_slice(&n.to_le_bytes());
        folder.write(SHARDS[0], file);
        folder.refused(4, &[SHARDS[0], want]);
    }
}

#[test]
fn a_header_that_is_no_json_object() {
    let folder = Folder::nano();
    let (header, data) = split(&folder.read(SHARDS[0]));
    let good = Value::from(header).to_string();
    let twice =
        format!("{{\"norm.weight\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}},{}", &good[1..]);
    let twice = twice.replacen("norm.weight", "embed.weight", 1);
    for (text, want) in [
        ("[]", "header is not valid"),
        ("", "header is not valid"),
        ("{", "header is not valid"),
        (twice.as_str(), "tensor embed.weight appears twice"),
        ("{\"__metadata__\":{\"format\":7}}", "header is not valid"),
        ("{\"a\":{\"dtype\":\"U8\",\"shape\":[0]}}", "missing field `data_offsets`"),
        (
            "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
            "duplicate field `dtype`",
        ),
        ("{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0],\"b\":1}}", "unknown field `b`"),
    ] {
        folder.write(SHARDS[0], join(text, &data));
        folder.refused(4, &[SHARDS[0], want]);
    }
    let mut bytes = join(&good, &data);
    bytes[9] = 0xff;
    folder.write(SHARDS[0], bytes);
    folder.refused(4, &[SHARDS[0], "header is not UTF-8"]);
}

#[test]
fn an_index_that_lies() {
    let with = |edit: &dyn Fn(&mut Value), want: &[&str]| {
        let folder = Folder::nano();
        folder.edit_json(INDEX, |index| edit(&mut index["weight_map"]));
        folder.refused(4, want);
    };
    with(
        &|m| m["norm.weight"] = json!("model-00003-of-00002.safetensors"),
        &[INDEX, "norm.weight", "is said to be in model-00003-of-00002.safetensors, which does not exist"],
    );
    with(&|m| m["layers.0.ghost"] = json!(SHARDS[0]), &[INDEX, "layers.0.ghost", "which does not hold it"]);
    with(&|m| m["norm.weight"] = json!(SHARDS[0]), &[SHARDS[1], "norm.weight", "the index says"]);
    with(
        &|m| drop(m.as_object_mut().unwrap().remove("norm.weight")),
        &[SHARDS[1], "norm.weight", "is not in the index"],
    );
    with(
        &|m| m["norm.weight"] = json!("../outside.safetensors"),
        &["\"../outside.safetensors\", which is not a file name"],
    );
    with(&|m| m["norm.weight"] = json!("/etc/passwd"), &["\"/etc/passwd\", which is not a file name"]);
    with(&|m| m["norm.weight"] = json!("config.json"), &["config.json"]);
    with(&|m| m["norm.weight"] = json!(3), &["is not a valid index"]);
    with(&|m| *m = json!({}), &["names no tensor"]);
    with(&|m| *m = json!([]), &["is not a valid index"]);
    for (text, want) in [
        ("{}", "weight_map is missing"),
        ("{\"weight_map\":{\"a\":\"b\",\"a\":\"b\"}}", "tensor a appears twice"),
        ("{\"weight_map\":{},\"weight_map\":{}}", "weight_map appears twice"),
    ] {
        let folder = Folder::nano();
        folder.write(INDEX, text);
        folder.refused(4, &[INDEX, want]);
    }
}

#[test]
fn a_tensor_in_two_shards() {
    let folder = Folder::nano();
    let name = "norm.weight";
    folder.edit_tensors(SHARDS[0], |all| {
        all.push(Raw { name: name.into(), dtype: "BF16".into(), shape: vec![128], data: vec![0; 256] });
    });
    folder.refused(4, &[SHARDS[0], name, "the index says"]);
    folder.remove(INDEX);
    folder.refused(4, &[SHARDS[1], name, "is also in model-00001-of-00002.safetensors"]);
}

#[test]
fn shards_that_are_not_all_there() {
    let folder = Folder::nano();
    folder.remove(SHARDS[0]);
    folder.refused(4, &["is said to be in model-00001-of-00002.safetensors, which does not exist"]);
    folder.remove(INDEX);
    folder.refused(4, &["holds 1 shards and no index where all of 1 to 2 are needed"]);
    folder.remove(SHARDS[1]);
    folder.refused(4, &["holds neither model.safetensors"]);
    folder.write(SHARDS[0], "");
    fs::remove_file(folder.path(SHARDS[0])).unwrap();
    fs::create_dir(folder.path("model.safetensors")).unwrap();
    folder.refused(4, &["model.safetensors", "is not a file"]);
}

#[test]
fn a_scale_of_255() {
    for (name, at) in [
        ("layers.0.attn.wq_a.scale", 0),
        ("layers.2.ffn.experts.5.w3.scale", 255),
        ("layers.1.engram.wkv.scale", 119),
    ] {
        let folder = Folder::nano();
        folder.edit_data(SHARDS[0], name, |d| d[at] = 255);
        folder.refused(4, &[SHARDS[0], name, &format!("holds scale 255 (NaN) at element {at}")]);
        // Headers alone are sound.
        Checkpoint::open_headers(folder.dir.path()).unwrap();
    }
}

#[test]
fn a_non_finite_norm_or_single() {
    for (name, bytes, at) in [
        ("layers.0.attn_norm.weight", &[0x80u8, 0x7f][..], 3), // +inf
        ("layers.0.ffn_norm.weight", &[0xc0, 0xff], 127),      // NaN
        ("layers.1.attn.compressor.norm.weight", &[0x80, 0xff], 0), // -inf
        ("layers.1.hc_attn_fn", &[0, 0, 0xc0, 0x7f], 5000),    // NaN
        ("layers.0.attn.attn_sink", &[0, 0, 0x80, 0xff], 2),   // -inf
        ("layers.0.ffn.gate.bias_vl", &[1, 0, 0x80, 0x7f], 7), // signalling NaN
    ] {
        let folder = Folder::nano();
        folder.edit_data(SHARDS[0], name, |d| d[at * bytes.len()..][..bytes.len()].copy_from_slice(bytes));
        folder.refused(4, &[SHARDS[0], name, &format!("holds a non-finite value at element {at}")]);
    }
}

/// What is too large to be read at every load is found by `verify`.
#[test]
fn verify_reads_everything() {
    let verify = |shard: &str, name: &str, at: usize, byte: u8, want: &str| {
        let folder = Folder::nano();
        folder.edit_data(shard, name, |d| d[at] = byte);
        let error = folder.open().verify().expect_err(name);
        let text = error.to_string();
        assert!(text.contains(name) && text.ends_with(want), "{text}");
        assert_eq!(error.exit_code(), 4);
    };
    verify(SHARDS[0], "layers.1.engram.embed.scale", 433, 255, "holds scale 255 (NaN) at element 433");
    verify(SHARDS[0], "layers.1.engram.embed.weight", 9, 0x7f, "holds a NaN code at element 9");
    verify(SHARDS[0], "layers.1.attn.wo_b.weight", 8191, 0xff, "holds a NaN code at element 8191");
    Folder::nano().open().verify().unwrap();
}

#[test]
fn not_a_model_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    refused(Checkpoint::open(&path("absent")), 4, &["absent", "does not exist"]);
    fs::write(path("note.txt"), "hello").unwrap();
    refused(Checkpoint::open(&path("note.txt")), 4, &["note.txt", "is not a folder"]);
    refused(Checkpoint::open(&path("note.txt/below")), 4, &["does not exist"]);
    refused(Checkpoint::open(dir.path()), 4, &["config.json", "does not exist"]);
    fs::create_dir(path("config.json")).unwrap();
    refused(Checkpoint::open(dir.path()), 4, &["config.json", "is not a file"]);
}

#[test]
fn other_formats_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("flash-Q4_K.gguf"), "GGUF").unwrap();
    refused(Checkpoint::open(&path("flash-Q4_K.gguf")), 3, &["flash-Q4_K.gguf", "is GGUF"]);
    refused(Checkpoint::open(dir.path()), 3, &["is GGUF", "safetensors"]);
    fs::remove_file(path("flash-Q4_K.gguf")).unwrap();
    fs::write(path("weights.npz"), "PK").unwrap();
    refused(Checkpoint::open(dir.path()), 3, &["MLX"]);

    let folder = Folder::nano();
    folder.edit_header(SHARDS[0], |h| drop(h.insert("__metadata__".into(), json!({"format": "mlx"}))));
    folder.refused(3, &[SHARDS[0], "MLX"]);
    let folder = Folder::nano();
    folder.edit_json("config.json", |c| c["quantization"] = json!({"group_size": 64, "bits": 4}));
    folder.refused(3, &["config.json", "MLX"]);
    let folder = Folder::nano();
    folder.edit_json("config.json", |c| c["architectures"] = json!(["DeepseekV3ForCausalLM"]));
    folder.refused(3, &["config.json", "DeepseekV3ForCausalLM"]);
}

#[test]
fn the_system_s_refusal_is_an_io_error() {
    let folder = Folder::nano();
    folder.remove(SHARDS[0]);
    symlink(SHARDS[0], folder.path(SHARDS[0])).unwrap();
    folder.refused(6, &[SHARDS[0]]);
}

#[test]
fn a_large_header_of_junk() {
    // 20 MB that claim one tensor of ten million dimensions.
    let text = format!("{{\"a\":{{\"dtype\":\"U8\",\"shape\":[{}0]}}}}", "0,".repeat(10_000_000));
    let folder = Folder::nano();
    folder.write(SHARDS[0], join(&text, &[]));
    folder.refused(4, &["more than 8 dimensions"]);
    folder.write(SHARDS[0], lay_out(&[]));
    folder.refused(4, &["is said to be in", "which does not hold it"]);
}
