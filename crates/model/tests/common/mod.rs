//! Golden files, the tiny models, and comparison of rows.
#![allow(dead_code, unused_macros, unused_imports)] // each test binary uses its part

pub mod layers;
pub mod probe;
pub mod trace;

use std::{fs, path::PathBuf};

use checkpoint::Checkpoint;
use cpu::Cpu;
use model::{Input, Model, Rows, State};
use ops::{Backend, Host, Mode, Taps};
use safetensors::{Dtype, SafeTensors};
use text::{EngramMap, Tokenizer};

/// The repository's root.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A golden file, read as a whole.
pub struct Golden {
    name: String,
    bytes: Vec<u8>,
}

impl Golden {
    pub fn open(path: &str) -> Self {
        let file = root().join("fixtures/model").join(path);
        let bytes = fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        Self { name: path.to_owned(), bytes }
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap()
    }

    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.tensors().names().into_iter().map(|n| n.to_string()).collect();
        names.sort();
        names
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors().tensor(name).is_ok()
    }

    pub fn get(&self, name: &str) -> Host {
        let tensors = self.tensors();
        let t = tensors.tensor(name).unwrap_or_else(|e| panic!("{}: {name}: {e}", self.name));
        let words = || t.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
        match t.dtype() {
            Dtype::F32 => Host::f32(t.shape(), words().map(f32::from_le_bytes).collect()),
            Dtype::I32 => Host::i32(t.shape(), words().map(i32::from_le_bytes).collect()),
            Dtype::U8 => Host::u8(t.shape(), t.data().to_vec()),
            Dtype::BF16 => {
                let values = t.data().chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
                Host::f32(t.shape(), values.map(numerics::bf16::from_bits).collect())
            }
            other => panic!("{name}: {other:?}"),
        }
    }

    pub fn tokens(&self, group: &str) -> Vec<u32> {
        self.get(&format!("{group}/tokens")).as_i32().iter().map(|t| *t as u32).collect()
    }

    /// Groups `promptN`, by N.
    pub fn prompts(&self) -> Vec<String> {
        let mut n: Vec<usize> = self
            .names()
            .iter()
            .filter_map(|n| n.strip_suffix("/tokens")?.strip_prefix("prompt")?.parse().ok())
            .collect();
        n.sort_unstable();
        n.into_iter().map(|n| format!("prompt{n}")).collect()
    }
}

/// The folder of a test model or of the demo.
pub fn folder(name: &str) -> PathBuf {
    if name == "demo" { root().join("models/demo") } else { checkpoint::generate::cached(name).unwrap() }
}

pub fn open(name: &str) -> Checkpoint {
    Checkpoint::open(&folder(name)).unwrap()
}

/// A model on `backend`.
pub fn load<B: Backend>(name: &str, backend: B) -> Model<B> {
    from_checkpoint(&open(name), backend)
}

fn from_checkpoint<B: Backend>(ckpt: &Checkpoint, backend: B) -> Model<B> {
    let tokenizer = Tokenizer::from_bytes(&ckpt.file("tokenizer.json").unwrap(), "tokenizer.json").unwrap();
    let map = EngramMap::checked(&tokenizer, ckpt.config().engram.compressed_vocab_size).unwrap();
    Model::load(backend, ckpt, map.classes).unwrap()
}

/// A test model whose selections keep everything: `index_topk` and `candidate_topk_blocks` of 4096.
pub fn load_dense<B: Backend>(name: &str, backend: B) -> Model<B> {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder(name)).unwrap() {
        let from = entry.unwrap().path();
        let to = dir.path().join(from.file_name().unwrap());
        if to.file_name().unwrap() == "config.json" {
            let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&from).unwrap()).unwrap();
            for field in ["index_topk", "candidate_topk_blocks"] {
                config["text_config"][field] = 4096.into();
            }
            fs::write(to, config.to_string()).unwrap();
        } else if fs::hard_link(&from, &to).is_err() {
            fs::copy(&from, &to).unwrap(); // another file system
        }
    }
    from_checkpoint(&Checkpoint::open(dir.path()).unwrap(), backend)
}

/// The tokens of one golden group, with the rows that stand for an image.
pub struct Tokens {
    pub ids: Vec<u32>,
    pub image: Vec<bool>,
    embeddings: Vec<(usize, Vec<f32>)>,
}

impl Tokens {
    pub fn text(ids: Vec<u32>) -> Self {
        Self { ids, image: Vec::new(), embeddings: Vec::new() }
    }

    /// `group` of a golden file of test model `name`. In the group `image`, image tokens take the golden's aligned
    /// rows in order; start, end and new line take the checkpoint's embeddings. All files share the float32 file's
    /// token types.
    pub fn of(golden: &Golden, name: &str, group: &str) -> Self {
        let ids = golden.tokens(group);
        if group != "image" {
            return Self::text(ids);
        }
        let types = Golden::open(&format!("{name}/golden/float32.safetensors")).get("image/types");
        let (ckpt, aligned) = (open(name), golden.get("image/aligned"));
        let marker = |name: &str| -> Vec<f32> {
            let bytes = ckpt.tensor(name).unwrap();
            bytes
                .chunks_exact(2)
                .map(|b| numerics::bf16::from_bits(u16::from_le_bytes([b[0], b[1]])))
                .collect()
        };
        let mut rows = (0..aligned.rows()).map(|r| aligned.row(r).to_vec());
        let mut embeddings = Vec::new();
        for (row, kind) in types.as_i32().iter().enumerate() {
            match kind {
                -1 => {}
                0 => embeddings.push((row, marker("image_start"))),
                1 => embeddings.push((row, rows.next().unwrap())),
                2 => embeddings.push((row, marker("image_newline"))),
                3 => embeddings.push((row, marker("image_end"))),
                other => panic!("token type {other}"),
            }
        }
        assert!(rows.next().is_none(), "more aligned rows than image tokens");
        Self { ids, image: types.as_i32().iter().map(|t| *t >= 0).collect(), embeddings }
    }

    pub fn input(&self) -> Input<'_> {
        Input { ids: &self.ids, image: &self.image, embeddings: &self.embeddings }
    }
}

/// Logits of every row of a prefill in one step.
pub fn prefill<B: Backend>(model: &Model<B>, tokens: &Tokens) -> Vec<Vec<f32>> {
    step(model, &mut model.new_state(tokens.ids.len()).unwrap(), tokens.input())
}

/// Logits of every token, fed in chunks of at most `chunk`.
pub fn logits<B: Backend>(model: &Model<B>, ids: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let mut state = model.new_state(ids.len()).unwrap();
    ids.chunks(chunk).flat_map(|c| step(model, &mut state, Input::text(c))).collect()
}

/// Logits of every row of one step.
pub fn step<B: Backend>(model: &Model<B>, state: &mut State<B>, input: Input<'_>) -> Vec<Vec<f32>> {
    let out = model.forward(state, input, Rows::All, &mut Taps::off()).unwrap().unwrap();
    let host = model.backend().read(&out.logits).unwrap();
    (0..host.rows()).map(|r| host.row(r).to_vec()).collect()
}

/// NRMS of each row.
pub fn row_nrms(got: &[Vec<f32>], want: &Host) -> Vec<f64> {
    assert_eq!(got.len(), want.rows());
    got.iter().enumerate().map(|(r, g)| ops::registry::nrms(g, want.row(r))).collect()
}

/// The median of an unsorted list.
pub fn median(values: &[f64]) -> f64 {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

/// Whether what is slow runs too.
pub fn full() -> bool {
    std::env::var_os("HALLMARK_FULL").is_some()
}

/// The CPU backend as it serves.
pub fn cpu(mode: Mode) -> Cpu {
    Cpu::new(mode, None, None).unwrap()
}

/// The GPU backend on the emulator.
pub fn emu(mode: Mode) -> gpu::Gpu<gpu::emu::Emu> {
    gpu::Gpu::new(mode, gpu::emu::Emu::open().unwrap())
}

/// Runs each generic check on every backend.
macro_rules! on_backends {
    ($($check:ident),+ $(,)?) => {
        mod reference {
            $(#[test]
            fn $check() {
                super::$check(ops::Reference::new);
            })+
        }

        mod cpu {
            $(#[test]
            fn $check() {
                super::$check(crate::common::cpu);
            })+
        }
    };
}
pub(crate) use on_backends;
