//! The tensors that a configuration implies, against the published counts of the released checkpoint [spec 1.3].

use std::{collections::HashSet, path::Path};

use checkpoint::{Checkpoint, Config, Dtype, Group, Summary};

fn repository(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn released() -> Summary {
    Summary::from_config(&Config::load(&repository("fixtures/released")).unwrap(), "released")
}

#[test]
fn released_totals() {
    let s = released();
    assert_eq!((s.tensors, s.bytes), (96_085, 510_286_023_000));
    let dtype = |d| s.dtypes.iter().find(|x| x.dtype == d).map(|x| x.elements);
    assert_eq!(dtype(Dtype::Bf16), Some(1_976_441_856));
    assert_eq!(dtype(Dtype::F32), Some(42_307_282));
    assert_eq!(dtype(Dtype::E4m3), Some(204_015_223_296));
    assert_eq!(dtype(Dtype::I8), Some(278_585_671_680));
    assert_eq!(dtype(Dtype::E8m0), Some(23_563_015_184));
    assert_eq!(s.dtypes.len(), 5);
}

#[test]
fn released_groups() {
    let s = released();
    assert_eq!(s.group_bytes(Group::Attention), 5_069_721_600);
    assert_eq!(s.group_bytes(Group::KvIndex), 81_835_008);
    assert_eq!(s.group_bytes(Group::RoutedExperts), 288_777_830_400);
    assert_eq!(s.group_bytes(Group::SharedExperts), 1_416_960_000);
    assert_eq!(s.group_bytes(Group::Router), 157_409_280);
    assert_eq!(s.group_bytes(Group::EngramTable), 202_758_032_400);
    assert_eq!(s.group_bytes(Group::Engram) + s.group_bytes(Group::EngramTable), 203_073_076_240);
    assert_eq!(s.group_bytes(Group::Dspark), 7_932_874_632);
    assert_eq!(s.group_bytes(Group::Vision), 970_506_240);
    assert_eq!(s.group_bytes(Group::ImageMarks), 30_720);
    assert_eq!(s.group_bytes(Group::Embedding), 2_647_654_400);
    assert_eq!(s.group_bytes(Group::Hyper), 157_295_040);
    assert_eq!(s.group_bytes(Group::Norm), 819_200 + 10_240);
    assert_eq!(s.groups.iter().map(|g| g.bytes).sum::<u64>(), s.bytes);
    let dspark = s.groups.iter().find(|g| g.group == Group::Dspark).unwrap();
    assert_eq!(dspark.tensors, 2401);
}

/// The parameter counts of the model card: 552 B backbone, 196 B Engram, with 14.2 B DSpark and 0.49 B vision.
#[test]
fn released_parameters() {
    let s = released();
    let parameters = |groups: &[Group]| -> u64 {
        s.groups.iter().filter(|g| groups.contains(&g.group)).map(|g| g.parameters).sum()
    };
    assert_eq!(parameters(&[Group::EngramTable]), (384_006_168 + 384_016_682) * 256);
    assert_eq!(parameters(&[Group::EngramTable, Group::Engram]) / 100_000_000, 1969);
    assert_eq!(parameters(&[Group::Dspark]) / 1_000_000, 14_225);
    assert_eq!(parameters(&[Group::Vision, Group::ImageMarks]) / 1_000_000, 485);
    assert_eq!(s.parameters / 1_000_000, 763_205);
}

#[test]
fn names_are_unique_and_shapes_are_those_of_the_table() {
    let c = Config::load(&repository("fixtures/released")).unwrap();
    let mut names = HashSet::new();
    for t in c.inventory() {
        assert!(names.insert(t.name.clone()), "{} twice", t.name);
    }
    let find = |name: &str| c.inventory().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"));
    for (name, dtype, shape) in [
        ("layers.39.hc_ffn_fn", Dtype::F32, vec![24, 20480]),
        ("layers.0.attn.wo_a.weight", Dtype::E4m3, vec![8192, 4096]),
        ("layers.0.attn.wo_a.scale", Dtype::E8m0, vec![256, 128]),
        ("layers.3.ffn.experts.383.w2.weight", Dtype::I8, vec![5120, 1152]),
        ("layers.3.ffn.experts.383.w2.scale", Dtype::E8m0, vec![5120, 72]),
        ("layers.14.engram.embed.scale", Dtype::E8m0, vec![384_016_682, 8]),
        ("layers.1.engram.wkv.weight", Dtype::E4m3, vec![25_600, 6144]),
        ("mtp.0.main_proj.weight", Dtype::E4m3, vec![5120, 15_360]),
        ("mtp.2.confidence_head.proj.weight", Dtype::Bf16, vec![1, 5376]),
        ("vision.blocks.31.attn.wqkv.weight", Dtype::Bf16, vec![3072, 1024]),
        ("aligner.w1.weight", Dtype::Bf16, vec![5120, 9216]),
    ] {
        let t = find(name);
        assert_eq!((t.dtype, t.shape), (dtype, shape), "{name}");
    }
    for absent in [
        "layers.20.attn.compressor.wgate.weight",
        "layers.24.attn.indexer.wk.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "mtp.1.main_proj.weight",
        "mtp.0.norm.weight",
    ] {
        assert!(!names.contains(absent), "{absent}");
    }
}

/// A model trained and exported by other code: its files hold exactly the inventory.
#[test]
fn the_demo_model_holds_its_inventory() {
    let demo = Checkpoint::open(&repository("models/demo")).unwrap();
    demo.verify().unwrap();
    let s = demo.summary();
    assert_eq!((s.tensors, s.bytes), (780, 14_591_728));
    assert!(demo.has_dspark() && !demo.has_vision() && s.missing.is_empty());
    let implied = Summary::from_config(demo.config(), "demo");
    assert_eq!((s.groups, s.dtypes), (implied.groups, implied.dtypes));
}

#[test]
fn the_report_prints_and_serialises() {
    let s = released();
    let text = s.to_string();
    for want in
        ["96,085 tensors, 510,286,023,000 bytes", "routed-experts", "F8_E8M0", "29-31          1  reuse"]
    {
        assert!(text.contains(want), "{want} in {text}");
    }
    let json = serde_json::to_value(&s).unwrap();
    assert_eq!(json["bytes"], 510_286_023_000u64);
    assert_eq!(json["layers"][24]["role"], "reindex");
    assert_eq!(json["groups"][6]["group"], "routed-experts");
    assert_eq!(json["dtypes"][0]["dtype"], "I8");
}
