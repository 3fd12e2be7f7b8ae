//! The generated test models are the models that the golden data was made with.

use std::path::{Path, PathBuf};

use checkpoint::{
    Checkpoint, Error,
    generate::{self, Recipe},
};
use sha2::{Digest, Sha256};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/model").join(name)
}

fn sha256(path: &Path) -> String {
    Sha256::digest(std::fs::read(path).unwrap()).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn every_recipe_gives_a_valid_checkpoint() {
    for (name, tensors, bytes) in
        [("nano", 728, 3_643_872), ("micro", 1175, 9_141_973), ("wide", 405, 85_045_912)]
    {
        let checkpoint = Checkpoint::open(&generate::cached(name).unwrap()).unwrap();
        checkpoint.verify().unwrap();
        let recipe = Recipe::load(&fixture(name).join("weights.json")).unwrap();
        let summary = checkpoint.summary();
        assert_eq!((summary.tensors, summary.bytes), (tensors, bytes), "{name}");
        assert_eq!(recipe.tensor_count() as u64, tensors, "{name}");
    }
}

/// Hashes of the shard files from which the golden data was computed.
#[test]
fn shards_equal_the_original_files() {
    for (name, shards) in [
        (
            "nano",
            [
                "3cb33303bc1ea1e45d1e218010ca76365fb443cb5738dd540c8c969b35c2fe02",
                "8d9df2c0c6639a5f3085f752616e0922997ff1050d4d48d8a662004b75422c2d",
            ],
        ),
        (
            "micro",
            [
                "a28372b45e002c0fb5edc0be15661495725036c4c2c738a5d415df0aa7b81a37",
                "093a61eaf7c0e0df357f2d647b86800e26c314391d8e28ff323382b5cdeef0fb",
            ],
        ),
    ] {
        let folder = generate::cached(name).unwrap();
        for (i, want) in shards.iter().enumerate() {
            let file = folder.join(format!("model-{:05}-of-00002.safetensors", i + 1));
            assert_eq!(sha256(&file), *want, "{}", file.display());
        }
    }
}

#[test]
fn side_files_are_those_of_the_recipe() {
    let folder = generate::cached("nano").unwrap();
    for file in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(sha256(&folder.join(file)), sha256(&fixture("nano").join(file)), "{file}");
    }
}

#[test]
fn threads_that_generate_at_once_get_one_folder() {
    let folders: Vec<PathBuf> = std::thread::scope(|s| {
        let calls: Vec<_> = (0..4).map(|_| s.spawn(|| generate::cached("nano").unwrap())).collect();
        calls.into_iter().map(|c| c.join().unwrap()).collect()
    });
    assert!(folders.windows(2).all(|w| w[0] == w[1]));
    Checkpoint::open(&folders[0]).unwrap();
}

/// Edits the text of nano's recipe and generates from it.
fn generate_edited(from: &str, to: &str) -> Error {
    let text = std::fs::read_to_string(fixture("nano").join("weights.json")).unwrap();
    assert!(text.contains(from), "the recipe has {from}");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("weights.json");
    std::fs::write(&file, text.replacen(from, to, 1)).unwrap();
    let out = dir.path().join("out");
    let made = Recipe::load(&file).and_then(|r| generate::write_folder(&r, &fixture("nano"), &out));
    let error = made.expect_err("the edited recipe is refused");
    assert!(!out.exists(), "nothing is written");
    error
}

#[test]
fn a_recipe_that_does_not_hold_is_refused() {
    let seed = generate_edited("\"seed\":16", "\"seed\":17").to_string();
    assert!(seed.contains("generates to SHA-256"), "{seed}");
    for (from, to, want) in [
        ("\"kind\":\"bf16\"", "\"kind\":\"fp6\"", "tensor embed.weight: kind \"fp6\" is unknown"),
        ("[512,128]", "[512,1e30]", "tensor embed.weight: logical_shape"),
        ("[512,128]", "[4294967296,4294967296]", "tensor embed.weight: logical_shape"),
        ("\"37ddb3d8\"", "\"37ddb3d8f\"", "tensor embed.weight: multiplier"),
        ("\"37ddb3d8\"", "\"37ddb3d9\"", "tensor embed.weight generates to"),
        ("\"seed\":16,", "", "seed is missing"),
        ("\"seed\":16,", "\"seed\":16,\"seed\":16,", "key \"seed\" appears twice"),
    ] {
        let error = generate_edited(from, to);
        assert!(error.to_string().contains(want), "{error}");
        assert_eq!(error.exit_code(), 4);
    }
}
