//! Ten thousand damaged copies of a small model: the reader answers each with a model or one sentence, never a panic,
//! and never takes memory by a number that a file claims.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    collections::HashMap,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use checkpoint::{Checkpoint, Config, Dtype, write};
use numerics::generator::Stream;
use serde_json::{Value, json};

const MUTATIONS: u64 = 10_000;
/// Those of a pack.
const PACK_MUTATIONS: u64 = 6_000;
/// Live bytes that opening may add. The model has 0.2 MB; the largest list that a valid configuration can ask for is
/// one layer's inventory of 4096 experts, about 4 MB.
const MEMORY_LIMIT: usize = 16 << 20;

/// The system's allocator, counting.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed to the system's allocator unchanged; the counters touch no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// The smallest model that has every part: two layers of ratio 2 and 1, one of them with Engram, a draft stage, vision.
fn small_config() -> Value {
    let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/model/nano/config.json");
    let mut tree: Value = serde_json::from_slice(&fs::read(nano).unwrap()).unwrap();
    let text = json!({
        "vocab_size": 16, "hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 2, "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 32,
        "o_groups": 1, "n_routed_experts": 2, "num_experts_per_tok": 1, "compress_ratios": [2, 1, 1, 0],
        "kv_source_layer_ids": [0, 1], "index_source_layer_ids": [0, 1, 2], "candidate_source_layer_id": 1,
        "index_n_heads": 2, "index_head_dim": 32, "engram_layer_ids": [1], "engram_max_ngram_size": 2,
        "engram_n_heads": 1, "engram_vocab_size": 5, "engram_num_embeddings": [5], "engram_compressed_vocab_size": 16,
        "num_nextn_predict_layers": 1, "dspark_block_size": 1, "dspark_noise_token_id": 3,
        "dspark_target_layer_ids": [0], "dspark_markov_rank": 4, "dspark_n_routed_experts": 1,
        "dspark_num_experts_per_tok": 1
    });
    let vision = json!({
        "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 4, "patch_size": 1,
        "downsample_ratio": 1
    });
    for (section, fields) in [("text_config", text), ("vision_config", vision)] {
        for (name, value) in fields.as_object().unwrap() {
            tree[section][name] = value.clone();
        }
    }
    tree["image_token_id"] = json!(15);
    tree
}

/// A tensor of the small model.
struct Made {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

/// The model's tensors; in a pack the linear layers that `exl3` gives a rate are EXL3.
fn tensors(config: &Config, exl3: impl Fn(&str) -> Option<f64>) -> Vec<Made> {
    let mut out = Vec::new();
    let mut scale = String::new();
    for t in config.inventory().filter(|t| !t.name.contains(".engram.embed.") || exl3("head").is_none()) {
        let module = t.name.trim_end_matches(".weight").to_owned();
        if t.name == scale {
            continue;
        }
        let Some(([rows, cols], bits)) = t.linear.zip(exl3(&module)) else {
            let data = vec![if t.dtype == Dtype::E8m0 { 127 } else { 0 }; t.bytes() as usize];
            out.push(Made { name: t.name, dtype: t.dtype, shape: t.shape, data });
            continue;
        };
        scale = format!("{module}.scale");
        let words = exl3::Rate::from_bits(bits).unwrap().words16();
        let (i, o) = (cols.next_multiple_of(128), rows.next_multiple_of(128));
        let mut add = |part: &str, dtype: Dtype, shape: Vec<usize>, data: Vec<u8>| {
            out.push(Made { name: format!("{module}.{part}"), dtype, shape, data });
        };
        add("trellis", Dtype::I16, vec![i / 16, o / 16, words], vec![0x5A; i / 16 * o / 16 * words * 2]);
        add("suh", Dtype::F16, vec![i], vec![0x2C; 2 * i]);
        add("svh", Dtype::F16, vec![o], vec![0x3C; 2 * o]);
        add("mul1", Dtype::I32, vec![], exl3::Codebook::Mul1.multiplier().to_le_bytes().to_vec());
    }
    out
}

fn write_model(dir: &Path, config: &Value, exl3: impl Fn(&str) -> Option<f64>) {
    let text = serde_json::to_string_pretty(config).unwrap();
    fs::write(dir.join(CONFIG), &text).unwrap();
    let config = Config::from_json(&text, CONFIG).unwrap();
    let tensors = tensors(&config, exl3);
    let item = |i: usize| write::Item {
        name: &tensors[i].name,
        dtype: tensors[i].dtype,
        shape: &tensors[i].shape,
        data: &tensors[i].data,
    };
    let half = tensors.len() / 2;
    for (shard, range) in SHARDS.iter().zip([0..half, half..tensors.len()]) {
        write::write_shard(&dir.join(shard), &range.map(item).collect::<Vec<_>>()).unwrap();
    }
    let places = tensors.iter().enumerate().map(|(i, t)| (t.name.as_str(), SHARDS[usize::from(i >= half)]));
    write::write_index(&dir.join(INDEX), 0, places).unwrap();
}

/// The draws of one mutation.
struct Draw {
    stream: Stream,
    next: u64,
}

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.next += 1;
        (self.stream.word(self.next) % n.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

const NUMBERS: [&str; 14] = [
    "0",
    "1",
    "2",
    "3",
    "31",
    "33",
    "-1",
    "0.5",
    "1e300",
    "4096",
    "65536",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
];

/// Flips one to eight bits.
fn flip(draw: &mut Draw, bytes: &mut [u8], within: usize) {
    for _ in 0..=draw.below(8) {
        let at = draw.below(within);
        bytes[at] ^= 1 << draw.below(8);
    }
}

/// Replaces a number, doubles, drops or overwrites a span of JSON text at `start..end`.
fn edit_text(draw: &mut Draw, bytes: &mut Vec<u8>, start: usize, end: usize) {
    let at = start + draw.below(end - start);
    match draw.below(5) {
        0 | 1 => {
            let Some(first) = (at..end).find(|i| bytes[*i].is_ascii_digit()) else { return };
            let last = (first..end).find(|i| !bytes[*i].is_ascii_digit()).unwrap_or(end);
            bytes.splice(first..last, draw.pick(&NUMBERS).bytes());
        }
        2 => {
            let span = bytes[at..end.min(at + 1 + draw.below(60))].to_vec();
            bytes.splice(at..at, span);
        }
        3 => drop(bytes.drain(at..end.min(at + 1 + draw.below(60)))),
        _ => bytes[at] = draw.below(256) as u8,
    }
}

/// Changes one value somewhere in a tree: another number, type, length, or none at all.
fn edit_tree(draw: &mut Draw, tree: &mut Value) {
    match tree {
        Value::Object(map) if !map.is_empty() => {
            let key = draw.pick(&map.keys().cloned().collect::<Vec<_>>()).clone();
            match draw.below(12) {
                0 => drop(map.shift_remove(&key)),
                1 => drop(map.insert(key, json!({}))),
                _ => edit_tree(draw, &mut map[&key]),
            }
        }
        Value::Array(list) if !list.is_empty() => {
            let at = draw.below(list.len());
            match draw.below(6) {
                0 => drop(list.remove(at)),
                1 => list.insert(at, list[at].clone()),
                2 => list.swap(0, at),
                _ => edit_tree(draw, &mut list[at]),
            }
        }
        leaf => {
            *leaf = match draw.below(8) {
                0 => Value::Null,
                1 => json!("x"),
                2 => json!([1]),
                3 => leaf.as_u64().map_or(json!(true), |n| json!(n + 1)),
                4 => leaf.as_u64().map_or(json!(1), |n| json!(n * 2)),
                5 => leaf.as_u64().map_or(json!(0), |n| json!(n / 2)),
                _ => serde_json::from_str(NUMBERS[draw.below(NUMBERS.len())]).unwrap(),
            }
        }
    }
}

/// Damages one file; returns its name and new bytes.
fn mutate(draw: &mut Draw, files: &HashMap<&'static str, Vec<u8>>) -> (&'static str, Vec<u8>) {
    let shard = *draw.pick(&SHARDS);
    let mut bytes = files[shard].clone();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    match draw.below(12) {
        0 => {
            let within = bytes.len();
            flip(draw, &mut bytes, within);
        }
        1 => flip(draw, &mut bytes, header),
        2 => bytes.truncate(draw.below(files[shard].len())),
        3 => bytes.extend((0..1 + draw.below(64)).map(|i| i as u8)),
        4 => {
            let near = header as u64 - 8;
            let choices = [0, 1, near - 1, near + 1, near * 2, 100_000_000, 100_000_001, 1 << 40, u64::MAX];
            bytes[..8].copy_from_slice(&draw.pick(&choices).to_le_bytes());
        }
        5 | 6 => {
            // The length prefix follows, so that the damage reaches the parser.
            let before = bytes.len();
            edit_text(draw, &mut bytes, 8, header);
            let n = (header - 8 + bytes.len()) as u64 - before as u64;
            bytes[..8].copy_from_slice(&n.to_le_bytes());
        }
        7 => {
            let mut tree: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
            edit_tree(draw, &mut tree);
            let text = tree.to_string().into_bytes();
            bytes = [&(text.len() as u64).to_le_bytes()[..], &text, &bytes[header..]].concat();
        }
        8 => {
            bytes = files[INDEX].clone();
            let end = bytes.len();
            edit_text(draw, &mut bytes, 0, end);
            return (INDEX, bytes);
        }
        9 => {
            bytes = files[CONFIG].clone();
            let end = bytes.len();
            edit_text(draw, &mut bytes, 0, end);
            return (CONFIG, bytes);
        }
        _ => {
            let mut tree: Value = serde_json::from_slice(&files[CONFIG]).unwrap();
            for _ in 0..=draw.below(2) {
                edit_tree(draw, &mut tree);
            }
            return (CONFIG, tree.to_string().into_bytes());
        }
    }
    (shard, bytes)
}

/// Opens the folder and uses everything it offers.
fn use_whole(dir: &Path, engram_from: Option<&Path>) -> Result<(), checkpoint::Error> {
    let model = Checkpoint::open_with(dir, engram_from)?;
    assert!(!model.summary().to_string().is_empty());
    for t in model.tensors() {
        let module = t.name.strip_suffix(".weight").or(t.name.strip_suffix(".trellis"));
        let part = [".scale", ".suh", ".svh", ".mul1", ".mcg"].iter().any(|p| t.name.ends_with(p));
        if module.is_some() || !part {
            let weight = model.weight(module.unwrap_or(t.name))?;
            weight.decode_row(weight.rows() - 1, &mut vec![0.0; weight.cols()]);
        }
    }
    model.verify()
}

/// Damages the model in `dir` file by file; returns how many were accepted and refused, by exit code.
fn damage(dir: &Path, engram_from: Option<&Path>, label: &str, times: u64) -> (u64, HashMap<u8, u64>) {
    use_whole(dir, engram_from).unwrap();
    let files: HashMap<&'static str, Vec<u8>> = [CONFIG, INDEX, SHARDS[0], SHARDS[1]]
        .into_iter()
        .map(|name| (name, fs::read(dir.join(name)).unwrap()))
        .collect();
    // A new file each time: some file systems flush a file that is truncated and written again.
    let put = |name: &str, bytes: &[u8]| {
        fs::remove_file(dir.join(name)).unwrap();
        fs::write(dir.join(name), bytes).unwrap();
    };
    let (mut accepted, mut refused) = (0, HashMap::<u8, u64>::new());
    for n in 0..times {
        let mut draw = Draw { stream: Stream::new(label, n), next: 0 };
        let (name, bytes) = mutate(&mut draw, &files);
        put(name, &bytes);
        let before = LIVE.load(Relaxed);
        PEAK.store(before, Relaxed);
        let result = catch_unwind(AssertUnwindSafe(|| use_whole(dir, engram_from)));
        let grown = PEAK.load(Relaxed).saturating_sub(before);
        assert!(grown < MEMORY_LIMIT, "{label} {n} of {name} took {grown} bytes");
        match result {
            Err(_) => panic!("{label} {n} of {name} panicked"),
            Ok(Ok(())) => accepted += 1,
            Ok(Err(e)) => {
                let text = e.to_string();
                assert!(!text.contains('\n') && text.len() < 2000, "{label} {n}: {text}");
                *refused.entry(e.exit_code()).or_default() += 1;
            }
        }
        put(name, &files[name]);
    }
    use_whole(dir, engram_from).unwrap();
    println!("{label}: accepted {accepted}, refused by exit code {refused:?}");
    assert!(!refused.contains_key(&6), "damaged content is no I/O error: {refused:?}");
    (accepted, refused)
}

// One test: the counters of memory are the process's.
#[test]
fn thousands_of_damaged_models() {
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), &small_config(), |_| None);
    let (accepted, refused) = damage(dir.path(), None, "mutation", MUTATIONS);
    // The damage is real, and harmless changes exist: both roads are travelled.
    assert!(refused[&4] > MUTATIONS / 2 && refused[&3] > 50 && accepted > 50, "{accepted} {refused:?}");

    let pack = tempfile::tempdir().unwrap();
    let mut config = small_config();
    config["quantization_config"] = json!({
        "quant_method": "exl3", "bits": 1.4, "head_bits": 2, "codebook": "mul1", "layer_bits": { "0": 1, "1": 1 },
        "expert_bits": { "2": { "gu": 1.5, "down": 1 } }
    });
    write_model(pack.path(), &config, |module| {
        let last = module.rsplit('.').next().unwrap();
        let third = module.starts_with("layers.2.ffn.experts.") && matches!(last, "w1" | "w3");
        Some(if module == "head" {
            2.0
        } else if third {
            1.5
        } else {
            1.0
        })
    });
    let (accepted, refused) = damage(pack.path(), Some(dir.path()), "pack", PACK_MUTATIONS);
    // Most bytes of a pack are trellis and scales, of which any bits are valid.
    assert!(refused[&4] > PACK_MUTATIONS / 3 && refused[&3] > 20 && accepted > 50, "{accepted} {refused:?}");
}
