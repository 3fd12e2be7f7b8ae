//! The layouts in which a sound model may lie, and what is read from it.

mod common;

use std::{fs, os::unix::fs::symlink, path::Path};

use checkpoint::{Checkpoint, Config, Form, Group, Stops};
use common::{Folder, INDEX, SHARDS, lay_out, raw, refused, repository, split};

/// Every stored byte of `a` equals `b`'s.
fn same(a: &Checkpoint, b: &Checkpoint) {
    let (names, others) = (a.tensors(), b.tensors());
    assert_eq!(names.len(), others.len());
    for (t, u) in names.iter().zip(&others) {
        assert_eq!((t.name, t.dtype, t.shape, t.group), (u.name, u.dtype, u.shape, u.group));
        assert_eq!(&a.tensor(t.name).unwrap()[..], &b.tensor(t.name).unwrap()[..], "{}", t.name);
    }
}

#[test]
fn shards_without_an_index() {
    let folder = Folder::nano();
    let with = folder.open();
    folder.remove(INDEX);
    same(&folder.open(), &with);
}

#[test]
fn a_single_file() {
    let folder = Folder::nano();
    let with = folder.open();
    let mut all = Vec::new();
    for shard in SHARDS {
        let (header, data) = split(&folder.read(shard));
        all.extend(raw(&header, &data));
        folder.remove(shard);
    }
    folder.remove(INDEX);
    folder.write("model.safetensors", lay_out(&all));
    same(&folder.open(), &with);
}

#[test]
fn an_embedded_model() {
    let folder = Folder::nano();
    let files: Vec<(&'static str, &'static [u8])> = fs::read_dir(folder.dir.path())
        .unwrap()
        .map(|e| e.unwrap())
        .map(|e| {
            let name: &'static str = Box::leak(e.file_name().into_string().unwrap().into_boxed_str());
            let bytes: &'static [u8] = Box::leak(fs::read(e.path()).unwrap().into_boxed_slice());
            (name, bytes)
        })
        .collect();
    let files: &'static [_] = Box::leak(files.into_boxed_slice());
    let embedded = Checkpoint::embedded(files).unwrap();
    same(&embedded, &folder.open());
    assert_eq!(&embedded.file("tokenizer.json").unwrap()[..], folder.read("tokenizer.json"));
    assert!(embedded.has_file("tokenizer.json") && !embedded.has_file("vocab.json"));
    refused(Checkpoint::embedded(&files[..1]), 4, &["embedded model"]);
}

/// `models--OWNER--NAME/{blobs,refs,snapshots}` as Hugging Face's cache lays it out.
#[test]
fn a_hugging_face_cache_entry() {
    let folder = Folder::nano();
    let entry = tempfile::tempdir().unwrap();
    let (blobs, snapshots) = (entry.path().join("blobs"), entry.path().join("snapshots"));
    let snapshot = snapshots.join("dba1be0a");
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(entry.path().join("refs")).unwrap();
    fs::write(entry.path().join("refs/main"), "dba1be0a").unwrap();
    for (i, file) in fs::read_dir(folder.dir.path()).unwrap().map(|e| e.unwrap().path()).enumerate() {
        fs::copy(&file, blobs.join(i.to_string())).unwrap();
        symlink(Path::new("../../blobs").join(i.to_string()), snapshot.join(file.file_name().unwrap()))
            .unwrap();
    }
    same(&Checkpoint::open(&snapshot).unwrap(), &folder.open());
    // The entry itself stands for its main revision, or for its only one.
    same(&Checkpoint::open(entry.path()).unwrap(), &folder.open());
    fs::remove_file(entry.path().join("refs/main")).unwrap();
    same(&Checkpoint::open(entry.path()).unwrap(), &folder.open());
    fs::create_dir(snapshots.join("2cba9e42")).unwrap();
    refused(Checkpoint::open(entry.path()), 4, &["holds 2 snapshots", "name one"]);
    // A half-finished download leaves links without targets.
    let shard = snapshot.join(SHARDS[1]);
    fs::remove_file(fs::canonicalize(&shard).unwrap()).unwrap();
    refused(Checkpoint::open(&snapshot), 4, &[SHARDS[1], "link whose target does not exist"]);
}

#[test]
fn draft_head_and_vision_may_be_absent_as_a_whole() {
    let drop = |prefixes: &'static [&'static str]| {
        let folder = Folder::nano();
        for shard in SHARDS {
            folder.edit_tensors(shard, |all| all.retain(|t| !prefixes.iter().any(|p| t.name.starts_with(p))));
        }
        folder.reindex();
        folder.open()
    };
    let whole = Folder::nano().open();
    assert!(whole.has_dspark() && whole.has_vision() && whole.summary().missing.is_empty());
    let no_drafts = drop(&["mtp."]);
    assert!(!no_drafts.has_dspark() && no_drafts.has_vision());
    assert_eq!(no_drafts.summary().missing, [Group::Dspark]);
    let no_images = drop(&["vision.", "aligner.", "image_"]);
    assert!(no_images.has_dspark() && !no_images.has_vision());
    assert_eq!(no_images.summary().missing, [Group::Vision, Group::ImageMarks]);
    assert!(no_images.summary().to_string().contains("image-marks         absent"));
    assert_eq!(whole.summary().bytes - no_drafts.summary().bytes, whole.group_bytes(Group::Dspark));
}

#[test]
fn weights_have_their_stored_form() {
    let nano = Folder::nano().open();
    for (module, form, rows, cols) in [
        ("embed", Form::Bf16, 512, 128),
        ("norm", Form::Bf16, 1, 128),
        ("layers.0.attn.wq_a", Form::Fp8Block32, 64, 128),
        ("layers.0.attn.attn_sink", Form::F32, 1, 4),
        ("layers.3.hc_attn_fn", Form::F32, 24, 512),
        ("layers.3.hc_ffn_scale", Form::F32, 1, 3),
        ("layers.1.ffn.gate", Form::Bf16, 8, 128),
        ("layers.1.ffn.gate.bias", Form::F32, 1, 8),
        ("layers.1.ffn.experts.7.w2", Form::Fp4Row32, 128, 64),
        ("layers.1.engram.embed", Form::Fp8Row32, 434, 32),
        ("layers.1.engram.q_weight", Form::Bf16, 4, 128),
        ("mtp.1.confidence_head.proj", Form::Bf16, 1, 160),
        ("image_start", Form::Bf16, 1, 128),
    ] {
        let w = nano.weight(module).unwrap();
        assert_eq!((w.name(), w.form(), w.rows(), w.cols()), (module, form, rows, cols));
    }
    // Every module of the file can be asked for, and its bytes are those of its tensors.
    let mut bytes = 0;
    for t in nano.tensors().iter().filter(|t| !t.name.ends_with(".scale")) {
        bytes += nano.weight(t.name.strip_suffix(".weight").unwrap_or(t.name)).unwrap().stored_bytes();
    }
    assert_eq!(bytes, nano.summary().bytes);
    let error = nano.weight("layers.9.attn.wq_a").unwrap_err();
    assert!(error.to_string().ends_with("tensor layers.9.attn.wq_a is missing"), "{error}");
}

#[test]
fn weights_hold_the_file_s_values() {
    let nano = Folder::nano().open();
    for t in nano.tensors().iter().filter(|t| t.name.ends_with("_norm.weight")) {
        let values = nano.weight(t.name.strip_suffix(".weight").unwrap()).unwrap().to_f32();
        assert!(
            values.iter().all(|v| (v - 1.0).abs() < 0.35),
            "{}: the recipe's norms lie within 3.47 x 0.1 of 1",
            t.name
        );
    }
    let folder = Folder::nano();
    folder.edit_data(SHARDS[0], "layers.0.attn.attn_sink", |d| {
        d.copy_from_slice(&[0.5f32, -1.0, 2.0, 3.25].map(f32::to_le_bytes).concat());
    });
    assert_eq!(folder.open().weight("layers.0.attn.attn_sink").unwrap().to_f32(), [0.5, -1.0, 2.0, 3.25]);
}

/// Kernels load 16 bytes at a time; a file may place a tensor anywhere.
#[test]
fn misaligned_tensors_are_copied_once() {
    let folder = Folder::nano();
    let nano = folder.open();
    let misaligned = nano.misaligned();
    assert!(misaligned > 0 && nano.copied() == 0);
    for round in 0..2 {
        for t in nano.tensors() {
            let bytes = nano.tensor(t.name).unwrap();
            let table = t.group == Group::EngramTable;
            assert!(bytes.is_aligned(16) || table, "{}", t.name);
            let file = folder.read(t.file);
            assert_eq!(&bytes[..], &file[t.offset as usize..][..t.len as usize], "{}", t.name);
        }
        assert_eq!(nano.copied(), misaligned, "round {round}");
    }
}

#[test]
fn a_generation_config_is_optional() {
    let folder = Folder::nano();
    let g = folder.open().generation().unwrap().unwrap();
    assert_eq!((g.temperature, g.top_p, g.eos_token_id), (Some(1.0), Some(0.95), Some(Stops::One(1))));
    folder.write("generation_config.json", "{\"eos_token_id\": [1, 5]}");
    assert_eq!(folder.open().generation().unwrap().unwrap().eos_token_id, Some(Stops::Any(vec![1, 5])));
    folder.write("generation_config.json", "{\"temperature\": \"warm\"}");
    assert_eq!(folder.open().generation().unwrap_err().exit_code(), 4);
    folder.remove("generation_config.json");
    assert_eq!(folder.open().generation().unwrap(), None);
}

#[test]
fn a_configuration_loads_from_a_folder_or_a_file() {
    let dir = repository("fixtures/released");
    assert_eq!(Config::load(&dir).unwrap(), Config::load_file(&dir.join("config.json")).unwrap());
}
