//! Test vectors of the generators.

use numerics::generator::{Tiny, fnv1a64, smgen};
use serde_json::Value;

fn hex(bytes: impl IntoIterator<Item = u8>) -> String {
    bytes.into_iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn smgen_gives_its_published_vectors() {
    let vectors: Value = serde_json::from_str(include_str!("smgen_vectors.json")).unwrap();
    for v in vectors.as_array().unwrap() {
        let (name, seed) = (v["name"].as_str().unwrap(), v["seed"].as_u64().unwrap());
        let t = smgen::Tensor::new(name, seed);
        assert_eq!(format!("{:016x}", fnv1a64(name.as_bytes())), v["fnv1a64"].as_str().unwrap());
        let list = |key: &str| -> Vec<String> {
            v[key]
                .as_array()
                .unwrap()
                .iter()
                .map(|x| x.as_str().map_or(x.to_string(), str::to_owned))
                .collect()
        };
        let four = |f: &dyn Fn(u64) -> String| -> Vec<String> { (0..4).map(f).collect() };
        assert_eq!(four(&|i| format!("{:016x}", t.stream().word(i))), list("word_0_3"));
        assert_eq!(format!("{:016x}", t.stream().word(1_000_003)), v["word_1000003"].as_str().unwrap());
        assert_eq!(four(&|i| t.stream().lanes(i).to_string()), list("ih_0_3"));
        assert_eq!(
            four(&|i| format!("{:08x}", t.f32(i, 1.0, 0.25).to_bits())),
            list("f32_std1_offset0.25_0_3")
        );
        assert_eq!(four(&|i| format!("{:04x}", t.bf16(i, 1.0, 0.25))), list("bf16_std1_offset0.25_0_3"));
        assert_eq!(hex((0..16).map(|i| t.e4m3(i))), v["e4m3_0_15"].as_str().unwrap());
        assert_eq!(hex((0..8).map(|i| t.e2m1_packed(i))), v["e2m1_packed_0_7"].as_str().unwrap());
        assert_eq!(hex((0..2).flat_map(|w| t.e4m3_word(w))), v["e4m3_0_15"].as_str().unwrap());
        assert_eq!(hex((0..2).flat_map(|w| t.e2m1_word(w))), v["e2m1_packed_0_7"].as_str().unwrap());
        assert_eq!(four(&|i| t.e8m0(i, 114).to_string()), list("e8m0_e0_114_0_3"));
        assert_eq!(four(&|i| t.int(i, 1024).to_string()), list("int_mod1024_0_3"));
    }
}

#[test]
fn tiny_gives_the_first_bytes_of_the_wide_recipe() {
    // First bytes of three tensors of fixtures/model/wide/weights.json; whole tensors are hashed by `checkpoint`.
    let embed = Tiny::new("embed.weight", 2, 0.0, f32::from_bits(0x37dd_b3d8));
    assert_eq!(hex((0..8).flat_map(|i| embed.bf16(i).to_le_bytes())), "71bfee3ec2bfc23f273e9f3fea3fa3bf");
    let norm = Tiny::new("layers.0.attn_norm.weight", 2, 1.0, f32::from_bits(0x3631_5cac));
    assert_eq!(hex((0..8).flat_map(|i| norm.bf16(i).to_le_bytes())), "903f7f3f683f7d3f7b3f823f963f6f3f");
    let mix = Tiny::new("layers.0.hc_attn_fn", 2, 0.0, f32::from_bits(0x3431_5cac));
    assert_eq!(hex((0..4).flat_map(|i| mix.f32(i).to_le_bytes())), "fa19713a8a51c1baffd0c9bb629446bb");
}
