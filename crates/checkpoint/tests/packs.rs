//! The public layouts of EXL3 packs open; a pack that lacks something or contradicts itself is refused by the tensor's
//! name.

mod common;
#[path = "common/pack.rs"]
mod pack;

use std::fs;

use checkpoint::{Checkpoint, Form, Group};
use common::{Folder, Raw, SHARDS, refused};
use exl3::Codebook;
use pack::{configure, everything, experts_only, is_routed, layer, replace, without_tables};
use serde_json::json;

/// Edits every shard.
fn edit(folder: &Folder, mut edit: impl FnMut(&mut Vec<Raw>)) {
    for shard in SHARDS {
        folder.edit_tensors(shard, &mut edit);
    }
    folder.reindex();
}

#[test]
fn routed_experts_alone() {
    let folder = experts_only();
    let model = folder.open();
    let w = model.weight("layers.3.ffn.experts.5.w2").unwrap();
    assert_eq!((w.form(), w.rows(), w.cols()), (Form::Exl3, 128, 64));
    let [one] = w.layers() else { panic!("one layer") };
    assert_eq!((one.rate().bits(), one.codebook()), (2.0, Codebook::Mcg));
    // Inputs beyond 64 are padding.
    let whole = exl3::reference::weight(&one.linear());
    assert_eq!(w.to_f32(), (0..128 * 64).map(|i| whole[i % 64 * 128 + i / 64]).collect::<Vec<f32>>());
    for (module, form) in [
        ("layers.3.attn.wq_a", Form::Fp8Block32),
        ("mtp.0.ffn.experts.0.w1", Form::Fp4Row32),
        ("layers.3.ffn.shared_experts.w1", Form::Fp8Block32),
        ("head", Form::Bf16),
    ] {
        assert_eq!(model.weight(module).unwrap().form(), form, "{module}");
    }
    let summary = model.summary();
    let released = Folder::nano().open().summary();
    assert_eq!(summary.parameters, released.parameters);
    let of = |g: Group| summary.forms.iter().filter(|f| f.group == g).collect::<Vec<_>>();
    let [experts] = of(Group::RoutedExperts)[..] else { panic!("{:?}", summary.forms) };
    assert_eq!((experts.form.as_str(), experts.weights), ("exl3 2 mcg", 7 * 8 * 3));
    assert_eq!(summary.forms.iter().map(|f| f.bytes).sum::<u64>(), summary.bytes);
    assert!(summary.to_string().contains("exl3 2 mcg"));
    model.verify().unwrap();
}

#[test]
fn everything_with_rates_by_tensor() {
    let folder = everything();
    let model = folder.open();
    for (module, bits) in [
        ("layers.0.ffn.experts.1.w1", 3.0),
        ("layers.0.ffn.experts.1.w3", 2.5),
        ("layers.0.ffn.experts.1.w2", 4.0),
        ("layers.2.ffn.shared_experts.w2", 4.0),
        ("mtp.1.ffn.experts.3.w2", 4.0),
        ("mtp.0.main_proj", 8.0),
        ("layers.1.engram.wkv", 8.0),
        ("head", 6.0),
    ] {
        let w = model.weight(module).unwrap();
        assert_eq!((w.form(), w.layers()[0].rate().bits()), (Form::Exl3, bits), "{module}");
    }
    let w = model.weight("layers.4.attn.wo_a").unwrap();
    assert_eq!((w.rows(), w.cols(), w.layers().len()), (64, 128, 2));
    assert_eq!(w.rows_slice(32, 32).to_f32(), w.to_f32()[32 * 128..]);
    for plain in ["layers.0.ffn.gate", "embed", "layers.0.attn_norm"] {
        assert_eq!(model.weight(plain).unwrap().form(), Form::Bf16, "{plain}");
    }
    assert_eq!(model.summary().parameters, Folder::nano().open().summary().parameters);
}

#[test]
fn a_whole_output_projection_is_cut_by_group() {
    let folder = everything();
    let to = 128;
    folder.edit_json("config.json", |c| c["text_config"]["o_lora_rank"] = json!(to));
    edit(&folder, |all| {
        all.retain(|t| !t.name.contains(".wo_a.") && !t.name.contains(".wo_b."));
    });
    folder.edit_tensors(SHARDS[0], |all| {
        for block in (0..7).map(|l| format!("layers.{l}")).chain((0..2).map(|s| format!("mtp.{s}"))) {
            all.extend(layer(&format!("{block}.attn.wo_a"), [2 * to, 128], 3.0, Codebook::Mul1));
            all.extend(layer(&format!("{block}.attn.wo_b"), [128, 2 * to], 3.0, Codebook::Mul1));
        }
    });
    folder.reindex();
    let model = folder.open();
    let before = model.copied();
    let w = model.weight("layers.2.attn.wo_a").unwrap();
    assert_eq!((w.layers().len(), w.rows(), model.copied() >= before + 2), (2, 256, true));
    let whole = layer("layers.2.attn.wo_a", [256, 128], 3.0, Codebook::Mul1);
    let trellis = exl3::Trellis::new("t", &whole[0].shape, &whole[0].data).unwrap();
    let one = exl3::Linear::new("w", trellis, &whole[1].data, &whole[2].data, Codebook::Mul1).unwrap();
    let want = exl3::reference::weight(&one);
    assert_eq!(w.to_f32(), (0..256 * 128).map(|i| want[i % 128 * 256 + i / 128]).collect::<Vec<f32>>());
    // Groups of 32 outputs cannot be cut out of one layer.
    let folder = everything();
    edit(&folder, |all| all.retain(|t| !t.name.contains(".wo_a.")));
    folder.edit_tensors(SHARDS[0], |all| {
        for block in (0..7).map(|l| format!("layers.{l}")).chain((0..2).map(|s| format!("mtp.{s}"))) {
            all.extend(layer(&format!("{block}.attn.wo_a"), [64, 128], 3.0, Codebook::Mul1));
        }
    });
    folder.reindex();
    folder.refused(3, &["layers.0.attn.wo_a has one EXL3 layer for 2 groups", "slice.0"]);
}

#[test]
fn a_head_in_fp8_by_row() {
    for (weight, scale, dtype) in
        [("head.weight", "head.scale", "F8_E8M0"), ("lm_head.weight", "lm_head.weight_scale", "U8")]
    {
        let folder = experts_only();
        edit(&folder, |all| {
            let Some(at) = all.iter().position(|t| t.name == "head.weight") else { return };
            all.remove(at);
            let raw = |name: &str, dtype: &str, cols: usize, byte: u8| Raw {
                name: name.into(),
                dtype: dtype.into(),
                shape: vec![512, cols],
                data: vec![byte; 512 * cols],
            };
            all.extend([raw(weight, "F8_E4M3", 128, 0x38), raw(scale, dtype, 4, 126)]);
        });
        let head = folder.open().weight("head").unwrap();
        assert_eq!((head.form(), head.rows(), head.cols()), (Form::Fp8Row32, 512, 128));
        assert!(head.to_f32().iter().all(|v| *v == 0.5));
        // 255 is no scale, whatever its type is called.
        edit(&folder, |all| all.iter_mut().filter(|t| t.name == scale).for_each(|t| t.data[9] = 255));
        folder.refused(4, &["head.scale", "holds scale 255"]);
    }
}

#[test]
fn engram_tables_from_a_second_folder() {
    let (folder, base) = (everything(), Folder::nano());
    without_tables(&folder);
    folder.refused(4, &["layers.1.engram.embed.weight is missing", "--engram-from"]);
    let with = |dir: &std::path::Path| Checkpoint::open_with(folder.dir.path(), Some(dir));
    let model = with(base.dir.path()).unwrap();
    let table = |c: &Checkpoint| c.weight("layers.1.engram.embed").unwrap().to_f32();
    assert_eq!(table(&model), table(&base.open()));
    assert_eq!(model.engram_location().unwrap(), base.dir.path().display().to_string());
    let files = model.files();
    assert!(files.iter().any(|f| f.engram) && files.iter().any(|f| !f.engram), "{files:?}");
    assert!(files.iter().all(|f| f.path.as_ref().is_some_and(|p| p.is_file())));
    assert!(model.summary().to_string().contains("Engram tables from"));

    // The shards that hold the tables are enough.
    let only = tempfile::tempdir().unwrap();
    let holds = |shard: &str| common::split(&base.read(shard)).0.keys().any(|k| k.contains(".engram.embed."));
    for file in SHARDS.into_iter().filter(|s| holds(s)).chain([common::INDEX]) {
        fs::copy(base.path(file), only.path().join(file)).unwrap();
    }
    assert_eq!(table(&with(only.path()).unwrap()), table(&model));
    for shard in SHARDS.into_iter().filter(|s| holds(s)) {
        fs::remove_file(only.path().join(shard)).unwrap();
    }
    refused(with(only.path()), 4, &[SHARDS[0], "does not exist"]);

    // Tables of another model, tables twice, no tables.
    base.edit_json("config.json", |c| c["text_config"]["engram_pad_token_id"] = json!(3));
    refused(with(base.dir.path()), 4, &["describes other Engram tables"]);
    base.remove("config.json");
    without_tables(&base);
    refused(with(base.dir.path()), 4, &["layers.1.engram.embed.weight is not in the index"]);
    base.remove(common::INDEX);
    fs::rename(base.path(SHARDS[0]), base.path("one.safetensors")).unwrap();
    refused(with(base.dir.path()), 4, &["layers.1.engram.embed", "is missing"]);
    let own = Folder::nano();
    let twice = Checkpoint::open_with(own.dir.path(), Some(folder.dir.path()));
    refused(twice, 4, &["leave out --engram-from"]);
}

#[test]
fn a_part_that_is_missing_or_too_much() {
    for part in ["trellis", "suh", "svh"] {
        let (folder, name) = (experts_only(), format!("layers.2.ffn.experts.1.w3.{part}"));
        edit(&folder, |all| all.retain(|t| t.name != name));
        folder.refused(4, &[&name, "missing"]);
    }
    let folder = experts_only();
    edit(&folder, |all| all.retain(|t| !t.name.starts_with("layers.2.ffn.experts.1.w3.")));
    folder.refused(4, &["layers.2.ffn.experts.1.w3.weight is missing"]);
    let folder = everything();
    edit(&folder, |all| all.retain(|t| !t.name.starts_with("layers.2.attn.wo_a.slice.1.")));
    folder.refused(4, &["layers.2.attn.wo_a.slice.1.trellis", "missing"]);
    // The released form beside the EXL3 one.
    let folder = experts_only();
    let module = "layers.2.ffn.experts.1.w3";
    let released = Folder::nano();
    let mut copy = None;
    edit(&released, |all| {
        copy = copy.take().or(all.iter().find(|t| t.name == format!("{module}.weight")).cloned())
    });
    folder.edit_tensors(SHARDS[0], |all| all.push(copy.clone().unwrap()));
    folder.reindex();
    folder.refused(4, &["layers.2.ffn.experts.1.w3.weight is superfluous"]);
    // A layer that must stay as released.
    let folder = everything();
    edit(&folder, |all| {
        if all.iter().any(|t| t.name == "layers.0.ffn.gate.weight") {
            all.extend(layer("layers.0.ffn.gate", [8, 128], 3.0, Codebook::Mul1));
        }
    });
    folder.refused(4, &["layers.0.ffn.gate.mul1 is superfluous"]);
}

#[test]
fn markers_and_scales_that_lie() {
    let name = "layers.4.ffn.experts.7.w1";
    let with = |change: &dyn Fn(&mut Vec<Raw>)| {
        let folder = experts_only();
        edit(&folder, |all| {
            if all.iter().any(|t| t.name == format!("{name}.trellis")) {
                change(all);
            }
        });
        folder
    };
    let marker = |all: &mut Vec<Raw>| all.iter().position(|t| t.name == format!("{name}.mcg")).unwrap();
    let wrong = with(&|all| {
        let at = marker(all);
        all[at].data[2] ^= 4;
    });
    wrong.refused(4, &[&format!("{name}.mcg"), "marker value"]);
    let both = with(&|all| {
        let extra = layer(name, [64, 128], 2.0, Codebook::Mul1).pop().unwrap();
        all.push(extra);
    });
    both.refused(4, &[name, "both codebook markers"]);
    let none = with(&|all| {
        let at = marker(all);
        all.remove(at);
    });
    none.refused(4, &[&format!("{name}.trellis"), "has codebook 3inst", "quantization_config.codebook mcg"]);
    let legacy = with(&|all| {
        let at = all.iter().position(|t| t.name == format!("{name}.suh")).unwrap();
        all[at] = Raw { name: format!("{name}.su"), dtype: "I16".into(), shape: vec![8], data: vec![0; 16] };
    });
    legacy.refused(3, &[&format!("{name}.su"), "not supported"]);
    let infinite = with(&|all| {
        let at = all.iter().position(|t| t.name == format!("{name}.svh")).unwrap();
        all[at].data[11] = 0x7C;
    });
    infinite.refused(4, &[&format!("{name}.svh"), "non-finite value at element 5"]);
}

#[test]
fn rates_that_the_configuration_denies() {
    let name = "layers.5.ffn.experts.0.w2.trellis";
    let mixed = |q: &dyn Fn(&mut serde_json::Value)| {
        let folder = Folder::nano();
        replace(&folder, |m, f| {
            let bits = if m == "layers.5.ffn.experts.0.w2" { 3.0 } else { 2.0 };
            is_routed(m).then(|| layer(m, f, bits, Codebook::Mcg))
        });
        let mut config = json!({ "quant_method": "exl3", "bits": 2, "codebook": "mcg", "scope": checkpoint::ROUTED_SCOPE });
        q(&mut config);
        configure(&folder, config);
        folder
    };
    mixed(&|_| ()).refused(4, &[name, "has 3 bits per weight", "quantization_config.bits 2"]);
    // An average says nothing about one tensor, nor does the rate of gate and up about down.
    mixed(&|q| q["bits"] = json!(2.01)).open();
    mixed(&|q| q["layer_bits"] = json!({ "5": 2 })).open();
    mixed(&|q| q["layer_bits"] = json!({ "4": 3 })).refused(4, &["layers.4.ffn", "layer_bits.4 3"]);
    let by_matrix = |down: u32| json!({ "5": { "gu": 2, "down": down } });
    mixed(&|q| q["expert_bits"] = by_matrix(4)).refused(4, &[name, "expert_bits.5 4"]);
    mixed(&|q| q["expert_bits"] = json!({ "x": {} }))
        .refused(4, &["expert_bits.x is not the number of a layer"]);
    let unknown = mixed(&|q| q["codebook"] = json!("mul2"));
    unknown.refused(3, &["codebook \"mul2\" is not supported"]);

    let storage = |entry: serde_json::Value| {
        let folder = mixed(&|q| q["bits"] = json!(2.01));
        let all = json!({ "tensor_storage": { "layers.5.ffn.experts.0.w2": entry } });
        folder.write("quantization_config.json", all.to_string());
        folder
    };
    let good = json!({
        "stored_tensors": {}, "quant_format": "exl3", "bits_per_weight": 3, "mcg_multiplier": 3_417_055_213u32
    });
    storage(good.clone()).open();
    for (field, value, want) in [
        ("bits_per_weight", json!(2), "quantization_config.json says 2"),
        ("mcg_multiplier", json!(1), "says mcg with 1"),
        ("mul1_multiplier", json!(2_212_286_765u32), "says mul1"),
        ("quant_format", json!("fp8"), "says fp8"),
    ] {
        let mut entry = good.clone();
        entry[field] = value;
        storage(entry).refused(4, &[name, want]);
    }
    let folder = storage(good);
    folder.write("quantization_config.json", "{\"tensor_storage\": 1}");
    folder.refused(4, &["quantization_config.json", "is not valid"]);

    let folder = experts_only();
    let nano = Folder::nano();
    fs::copy(nano.path("config.json"), folder.path("config.json")).unwrap();
    folder.refused(4, &["layers.0.ffn.experts.0.w1 is EXL3", "quant_method says fp8"]);
}

#[test]
fn shapes_of_another_layer() {
    let folder = Folder::nano();
    replace(&folder, |m, f| {
        let f = if m == "layers.1.ffn.experts.0.w1" { [200, 128] } else { f };
        is_routed(m).then(|| layer(m, f, 2.0, Codebook::Mcg))
    });
    configure(&folder, json!({ "quant_method": "exl3" }));
    folder.refused(
        4,
        &["layers.1.ffn.experts.0.w1.trellis", "has 128 inputs and 256 outputs, not 128 and 128"],
    );
}
