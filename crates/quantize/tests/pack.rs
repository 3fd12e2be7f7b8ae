//! Packs of a small model: they open and run, their bytes do not depend on threads or on a kill in between.

mod common;

use std::{fs, path::Path, process::Command, time::Duration};

use checkpoint::{Checkpoint, Form, Group, ROUTED_SCOPE, Weight};
use common::{files, options, quantize, rate, texts, write_model};
use cpu::Cpu;
use exl3::Codebook;
use model::{Input, Model, Rows};
use ops::{Backend, DeviceError, ExpertWeights, Host, Mode, Reference, Taps};
use quantize::{Options, compare, run};
use serde_json::Value;

/// The reference, with every EXL3 weight expanded to single precision when it is loaded.
struct Expanded {
    inner: Reference,
}

fn expanded(w: &Weight) -> Weight {
    match w.form() {
        Form::Exl3 => Weight::from_f32(w.name(), w.rows(), w.cols(), &w.to_f32()).unwrap(),
        _ => w.clone(),
    }
}

impl Backend for Expanded {
    type Buf = Host;
    type Mat = Weight;
    type Experts = Vec<ExpertWeights>;

    ops::delegate_backend!(inner: embed replicate rmsnorm linear grouped_linear argmax rope store_window ring_write
        publish_kv publish_key quantise_index_query pool_pairs index_scores candidates mask_scores topk
        sparse_attention router routed_experts shared_expert moe_sum hc_mix hc_collapse hc_expand engram_rows
        engram_gate stream_mean draft_attention markov_bias concat_cols);

    fn name(&self) -> &'static str {
        "expanded"
    }

    fn mode(&self) -> Mode {
        self.inner.mode()
    }

    fn upload(&self, host: &Host) -> Result<Host, DeviceError> {
        self.inner.upload(host)
    }

    fn read(&self, buf: &Host) -> Result<Host, DeviceError> {
        self.inner.read(buf)
    }

    fn shape(&self, buf: &Host) -> Vec<usize> {
        self.inner.shape(buf)
    }

    fn cache(&self, rows: usize, width: usize) -> Result<Host, DeviceError> {
        self.inner.cache(rows, width)
    }

    fn load(&self, weight: &Weight) -> Result<Weight, DeviceError> {
        self.inner.load(&expanded(weight))
    }

    fn load_experts(&self, experts: Vec<ExpertWeights>) -> Result<Vec<ExpertWeights>, DeviceError> {
        let one = |e: &ExpertWeights| ExpertWeights {
            gate: expanded(&e.gate),
            up: expanded(&e.up),
            down: expanded(&e.down),
        };
        self.inner.load_experts(experts.iter().map(one).collect())
    }

    fn concat_rows(&self, a: &Host, b: &Host) -> Host {
        self.inner.concat_rows(a, b)
    }

    fn slice_rows(&self, x: &Host, start: usize, count: usize) -> Host {
        self.inner.slice_rows(x, start, count)
    }

    fn reshape(&self, x: &Host, shape: &[usize]) -> Host {
        self.inner.reshape(x, shape)
    }
}

fn logits<B: Backend>(ckpt: &Checkpoint, backend: B, ids: &[u32]) -> Vec<f32> {
    let model = Model::load(backend, ckpt, qualify::token_map(ckpt).unwrap()).unwrap();
    let mut state = model.new_state(ids.len()).unwrap();
    let out = model.forward(&mut state, Input::text(ids), Rows::All, &mut Taps::off()).unwrap().unwrap();
    model.backend().read(&out.logits).unwrap().as_f32().to_vec()
}

fn nrms(a: &[f32], b: &[f32]) -> f64 {
    let square = |v: f64| v * v;
    let error: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(a - b))).sum();
    (error / b.iter().map(|b| square(f64::from(*b))).sum::<f64>()).sqrt()
}

fn as_expanded(ckpt: &Checkpoint, tokens: u32) {
    let ids: Vec<u32> = (0..tokens).map(|i| 5 + i * 7 % 400).collect();
    let exact = logits(ckpt, Cpu::new(Mode::Exact, Some(2), None).unwrap(), &ids);
    let want = logits(ckpt, Expanded { inner: Reference::new(Mode::Exact) }, &ids);
    // Single-precision sums in another order, through a few layers.
    println!("{} tokens: NRMS {:.2e} from the expanded weights", ids.len(), nrms(&exact, &want));
    assert!(nrms(&exact, &want) < 1e-5, "{}", nrms(&exact, &want));
    let other = logits(ckpt, Reference::new(Mode::Exact), &ids);
    assert!(nrms(&other, &want) < 1e-5, "{}", nrms(&other, &want));
}

/// The same with the demo model, everything at 3 bits and its head at 6; the search takes a minute, so
/// `HALLMARK_FULL=1` alone runs it.
#[test]
fn the_demo_model_runs_as_its_expanded_weights() {
    if std::env::var_os("HALLMARK_FULL").is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    quantize(&demo, &dir.path().join("dst"), &options(3.0));
    as_expanded(&Checkpoint::open(&dir.path().join("dst")).unwrap(), 16);
}

/// Regression of the whole road: a pack runs as its expanded weights do.
#[test]
fn a_pack_runs_as_its_expanded_weights() {
    let dir = tempfile::tempdir().unwrap();
    let (src, dst) = (dir.path().join("src"), dir.path().join("dst"));
    write_model(&src);
    let report = quantize(&src, &dst, &options(2.5));
    let ckpt = Checkpoint::open(&dst).unwrap();
    as_expanded(&ckpt, 40);

    // Every linear layer is there, at its rate.
    let released = Checkpoint::open(&src).unwrap();
    assert_eq!(ckpt.summary().parameters, released.summary().parameters);
    for (module, bits, layers) in
        [("layers.1.ffn.experts.2.w2", 2.5, 1), ("layers.0.attn.wo_a", 3.0, 2), ("head", 6.0, 1)]
    {
        let w = ckpt.weight(module).unwrap();
        assert_eq!((w.layers().len(), w.layers()[0].rate().bits()), (layers, bits), "{module}");
    }
    assert_eq!(ckpt.weight("layers.0.attn.indexer.wk").unwrap().layers()[0].rate().bits(), 8.0);
    assert_eq!(ckpt.weight("mtp.0.ffn.experts.0.w1").unwrap().form(), Form::Fp4Row32);
    let whole = |t: &&checkpoint::TensorInfo| t.len.is_multiple_of(16);
    let all = ckpt.tensors();
    assert!(all.iter().filter(whole).all(|t| t.offset.is_multiple_of(16)), "our own packs are aligned");
    assert!(report.tensors.iter().all(|t| t.calibration_rows > 0 && t.proxy_error < 0.2), "{report:?}");
    let at = |bits: f64| report.tensors.iter().filter(move |t| t.bits == bits);
    let mean = |bits: f64| at(bits).map(|t| t.proxy_error).sum::<f64>() / at(bits).count() as f64;
    assert!(mean(2.5) > mean(3.0) && mean(3.0) > mean(6.0) && mean(6.0) > mean(8.0));
    assert_eq!((report.kept, report.bytes), (0, ckpt.tensors().iter().map(|t| t.len).sum()));

    // It differs from the released model, and a model does not differ from itself.
    let c = compare(&released, &ckpt, &texts(), Mode::Exact, Some(2), &|_| ()).unwrap();
    assert!(
        c.all.every.kl > 0.0 && c.all.every.kl_back > 0.0 && c.all.texts == 3 && c.all.answers == 1,
        "{c:?}"
    );
    let sorted = c.worst.is_sorted_by(|a, b| a.kl >= b.kl);
    assert!(sorted && c.worst[0].share > 0.0 && c.worst[0].text <= 3, "{:?}", c.worst);
    let same = compare(&ckpt, &ckpt, &texts(), Mode::Exact, Some(2), &|_| ()).unwrap();
    assert_eq!((same.all.every.kl, same.all.every.kl_back, same.all.every.top1), (0.0, 0.0, 1.0));
    assert_eq!(same.all.every.nll_a, same.all.every.nll_b);
    assert_eq!(same.categories.len(), 2);
}

#[test]
fn experts_alone_and_tables_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let (src, dst) = (dir.path().join("src"), dir.path().join("dst"));
    write_model(&src);
    let experts = Options { codebook: Codebook::Mcg, dense: None, head: None, engram: false, ..options(1.0) };
    let report = quantize(&src, &dst, &experts);
    assert_eq!((report.tensors.len(), report.mean_bits), (3 * 3 * 3, 1.0));
    let error = Checkpoint::open(&dst).unwrap_err();
    assert!(error.to_string().contains("--engram-from"), "{error}");
    let ckpt = Checkpoint::open_with(&dst, Some(&src)).unwrap();
    let q: Value = serde_json::from_slice(&fs::read(dst.join("quantization_config.json")).unwrap()).unwrap();
    assert_eq!(q["scope"], ROUTED_SCOPE);
    assert_eq!((q["bits"].as_u64(), q["codebook"].as_str()), (Some(1), Some("mcg")));
    let stored = &q["tensor_storage"]["layers.2.ffn.experts.0.w3"];
    assert_eq!(
        (stored["bits_per_weight"].as_u64(), stored["mcg_multiplier"].as_u64()),
        (Some(1), Some(3_417_055_213))
    );
    assert_eq!(stored["stored_tensors"]["layers.2.ffn.experts.0.w3.trellis"]["n_bytes"], 2 * 8 * 8 * 16);
    assert_eq!(q["original_quantization_config"]["quant_method"], "fp8");
    for t in ckpt.tensors().iter().filter(|t| t.group != Group::RoutedExperts) {
        let released = Checkpoint::open(&src).unwrap();
        assert_eq!(&*ckpt.tensor(t.name).unwrap(), &*released.tensor(t.name).unwrap(), "{}", t.name);
    }
    let id = qualify::identity::identify(&ckpt, "pack", Some(&dst), None, true).unwrap();
    let engram = id.engram.unwrap();
    assert_eq!((id.format.as_str(), engram.files.len()), ("exl3", 1));
    assert!(engram.files[0].name == "model.safetensors" && engram.fingerprint != id.fingerprint);

    // A pack is no source, a folder is not written over, half rates have one codebook.
    let again = |src: &Path, options: &Options, to: &str| {
        let ckpt = Checkpoint::open_with(src, (src == dst).then_some(&*dir.path().join("src"))).unwrap();
        run(&ckpt, &dir.path().join(to), options, &texts(), &|_| ()).unwrap_err()
    };
    for (error, code, want) in [
        (again(&dst, &experts, "new"), 3, "is an EXL3 pack already"),
        (again(&src, &experts, "dst"), 2, "exists already"),
        (again(&src, &Options { rate: rate(2.5), ..experts.clone() }, "new"), 2, "codebook mul1 only"),
    ] {
        assert!(error.to_string().contains(want) && error.exit_code() == code, "{error}");
    }
}

#[test]
fn equal_bytes_on_any_number_of_threads_and_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let src = dir.path().join("src");
    write_model(&src);
    let to = |name: &str| dir.path().join(name);
    quantize(&src, &to("one"), &Options { threads: Some(1), ..options(2.0) });
    quantize(&src, &to("three"), &Options { threads: Some(3), ..options(2.0) });
    let want = files(&to("one"));
    assert!(want == files(&to("three")));
    assert!(want.contains_key("tokenizer.json") && want.len() == 5 + 5, "{:?}", want.keys());

    // A child process is killed while it works on the second shard.
    let tensors = to("killed.part").join("tensors");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_child_that_is_killed"])
        .env("HALLMARK_TEST_QUANTIZE", dir.path())
        .spawn()
        .unwrap();
    let sealed = || -> Vec<std::path::PathBuf> {
        let names = fs::read_dir(&tensors).into_iter().flatten().filter_map(|e| Some(e.ok()?.path()));
        names.filter(|p| p.to_string_lossy().ends_with(".safetensors.json")).collect()
    };
    let shard = to("killed.part").join("model-00002-of-00005.safetensors.json");
    while !(shard.exists() && sealed().len() > 3) {
        assert!(child.try_wait().unwrap().is_none(), "the child ended before it could be killed");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let kept = sealed().len();
    assert!(!to("killed").exists() && kept > 3);

    // What is damaged since is made anew, other settings do not take the work up.
    let damaged = sealed()[0].with_extension("");
    let mut bytes = fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&damaged, bytes).unwrap();
    let ckpt = Checkpoint::open(&src).unwrap();
    let other = run(&ckpt, &to("killed"), &options(3.0), &texts(), &|_| ()).unwrap_err();
    assert!(other.to_string().contains("remove it") && other.exit_code() == 2, "{other}");
    let report = quantize(&src, &to("killed"), &options(2.0));
    assert!(report.kept >= kept - 1 && report.kept < report.tensors.len(), "{} of {kept}", report.kept);
    assert!(want == files(&to("killed")));
}

/// Not a test of its own: the process that the test above kills.
#[test]
fn the_child_that_is_killed() {
    let Some(dir) = std::env::var_os("HALLMARK_TEST_QUANTIZE") else { return };
    let dir = Path::new(&dir);
    quantize(&dir.join("src"), &dir.join("killed"), &options(2.0));
}
