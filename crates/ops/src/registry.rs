//! The registry: one [`Spec`] an operator, with generated inputs and a run on any backend, from which tests,
//! qualification and tables derive.

use checkpoint::{Bytes, Form, Weight};
use numerics::{
    bf16,
    generator::{Stream, Tiny},
};

use crate::{Backend, DeviceError, Host, Mode};

/// How far a backend may depart from the scalar reference, and why.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Tolerance {
    /// Limit of the normalised RMS ‖a−b‖/‖b‖ of each output; 0 asks for equal bits.
    pub nrms: f64,
    /// Why the limit is what it is.
    pub reason: &'static str,
}

impl Tolerance {
    /// Equal bits, because `reason`.
    pub const fn bits(reason: &'static str) -> Self {
        Self { nrms: 0.0, reason }
    }

    /// At most `nrms`, because `reason`.
    pub const fn nrms(nrms: f64, reason: &'static str) -> Self {
        Self { nrms, reason }
    }
}

/// What the registry says about an operator.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Spec {
    /// Unique name.
    pub name: &'static str,
    /// Section of the model specification.
    pub section: &'static str,
    /// Inputs and outputs with their shapes, and what is computed.
    pub contract: &'static str,
    /// Tolerance in `exact`.
    pub exact: Tolerance,
    /// Tolerance in `source`.
    pub source: Tolerance,
}

impl Spec {
    /// The tolerance of `mode`; `native` on a backend without departures of its own has that of `exact`.
    pub fn tolerance(&self, mode: Mode) -> Tolerance {
        if mode == Mode::Source { self.source } else { self.exact }
    }
}

/// Sizes that a generated case takes.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // the fields are those of the model's configuration
pub struct Geometry {
    pub name: &'static str,
    pub hidden: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub rope_dim: usize,
    pub q_rank: usize,
    pub o_groups: usize,
    pub o_rank: usize,
    pub window: usize,
    pub index_heads: usize,
    pub index_dim: usize,
    pub topk: usize,
    pub block: usize,
    pub keep_blocks: usize,
    pub experts: usize,
    pub top: usize,
    pub inter: usize,
    pub limit: f32,
    pub vocab: usize,
    pub engram_cols: usize,
    pub engram_dim: usize,
    pub draft_block: usize,
    pub markov_rank: usize,
    pub entries: usize,
    /// Experts whose weights are generated; routing picks among them.
    pub stored_experts: usize,
}

impl Geometry {
    /// Small sizes with odd tails.
    pub const TINY: Self = Self {
        name: "tiny",
        hidden: 160,
        heads: 6,
        head_dim: 96,
        rope_dim: 32,
        q_rank: 96,
        o_groups: 3,
        o_rank: 32,
        window: 24,
        index_heads: 12,
        index_dim: 64,
        topk: 12,
        block: 3,
        keep_blocks: 7,
        experts: 10,
        top: 3,
        inter: 96,
        limit: 2.5,
        vocab: 640,
        engram_cols: 6,
        engram_dim: 64,
        draft_block: 5,
        markov_rank: 64,
        entries: 75,
        stored_experts: 10,
    };

    /// The released widths. Only the vocabulary and the number of stored experts are cut, so that a case stays small.
    pub const RELEASED: Self = Self {
        name: "released",
        hidden: 5120,
        heads: 64,
        head_dim: 512,
        rope_dim: 64,
        q_rank: 1280,
        o_groups: 8,
        o_rank: 1024,
        window: 128,
        index_heads: 32,
        index_dim: 128,
        topk: 512,
        block: 8,
        keep_blocks: 2048,
        experts: 384,
        top: 6,
        inter: 2304,
        limit: 10.0,
        vocab: 1024,
        engram_cols: 24,
        engram_dim: 256,
        draft_block: 5,
        markov_rank: 256,
        entries: 700,
        stored_experts: 8,
    };
}

/// One input of a case.
#[derive(Clone, Debug)]
pub enum Value {
    /// A tensor.
    Host(Host),
    /// A stored weight.
    Weight(Weight),
    /// Gate, up and down of each expert.
    Experts(Vec<[Weight; 3]>),
}

#[derive(Clone, Debug)]
struct Input {
    name: &'static str,
    value: Value,
    per_row: bool,
}

/// Generated inputs of one operator. All values are bf16-exact, as the reference's activations are.
#[derive(Clone, Debug)]
pub struct Case {
    seed: u64,
    rows: usize,
    inputs: Vec<Input>,
}

impl Case {
    /// An empty case of `rows` rows whose inputs come from `seed`.
    pub fn new(rows: usize, seed: u64) -> Self {
        Self { seed, rows, inputs: Vec::new() }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The stream of words that input `name` is made of.
    pub fn stream(&self, name: &str) -> Stream {
        Stream::new(name, self.seed)
    }

    fn push(&mut self, name: &'static str, value: Value, per_row: bool) -> &mut Self {
        self.inputs.push(Input { name, value, per_row });
        self
    }

    /// A tensor with one entry a row.
    pub fn row_input(&mut self, name: &'static str, host: Host) -> &mut Self {
        assert_eq!(host.rows(), self.rows, "input {name}");
        self.push(name, Value::Host(host), true)
    }

    /// A tensor that all rows share.
    pub fn shared(&mut self, name: &'static str, host: Host) -> &mut Self {
        self.push(name, Value::Host(host), false)
    }

    fn gauss(&self, name: &str, n: usize, std: f32, mean: f32) -> Vec<f32> {
        let s = self.stream(name);
        (0..n as u64).map(|i| bf16::round(s.normal(i) * std + mean)).collect()
    }

    /// Near normal values, one `shape` a row.
    pub fn normal(&mut self, name: &'static str, shape: &[usize], std: f32) -> &mut Self {
        let shape = [&[self.rows], shape].concat();
        let data = self.gauss(name, shape.iter().product(), std, 0.0);
        self.row_input(name, Host::f32(&shape, data))
    }

    /// Near normal values that all rows share.
    pub fn shared_normal(&mut self, name: &'static str, shape: &[usize], std: f32, mean: f32) -> &mut Self {
        let data = self.gauss(name, shape.iter().product(), std, mean);
        self.shared(name, Host::f32(shape, data))
    }

    /// A stored weight whose product with unit activations has about unit variance.
    pub fn weight(&mut self, name: &'static str, form: Form, rows: usize, cols: usize) -> &mut Self {
        let w = generated_weight(name, form, rows, cols, self.seed);
        self.stored(name, w)
    }

    /// A stored weight made elsewhere.
    pub fn stored(&mut self, name: &'static str, weight: Weight) -> &mut Self {
        self.push(name, Value::Weight(weight), false)
    }

    /// Gate, up and down of `count` experts in `form`.
    pub fn experts(
        &mut self,
        name: &'static str,
        count: usize,
        form: Form,
        hidden: usize,
        inter: usize,
    ) -> &mut Self {
        let make = |e: usize, part: &str, rows, cols| {
            generated_weight(&format!("{name}.{e}.{part}"), form, rows, cols, self.seed)
        };
        let list = (0..count)
            .map(|e| {
                [make(e, "w1", inter, hidden), make(e, "w3", inter, hidden), make(e, "w2", hidden, inter)]
            })
            .collect();
        self.push(name, Value::Experts(list), false)
    }

    fn value(&self, name: &str) -> &Value {
        &self.inputs.iter().find(|i| i.name == name).unwrap_or_else(|| panic!("no input {name}")).value
    }

    /// The tensor `name`.
    pub fn host(&self, name: &str) -> &Host {
        match self.value(name) {
            Value::Host(h) => h,
            _ => panic!("input {name} is no tensor"),
        }
    }

    /// The stored weight `name`.
    pub fn get_weight(&self, name: &str) -> &Weight {
        match self.value(name) {
            Value::Weight(w) => w,
            _ => panic!("input {name} is no weight"),
        }
    }

    /// The experts `name`.
    pub fn get_experts(&self, name: &str) -> &[[Weight; 3]] {
        match self.value(name) {
            Value::Experts(e) => e,
            _ => panic!("input {name} is no list of experts"),
        }
    }

    /// Tensor `name` on the backend.
    pub fn buf<B: Backend>(&self, b: &B, name: &str) -> Result<B::Buf, DeviceError> {
        b.upload(self.host(name))
    }

    /// Weight `name` on the backend.
    pub fn mat<B: Backend>(&self, b: &B, name: &str) -> Result<B::Mat, DeviceError> {
        b.load(self.get_weight(name))
    }

    /// Index tensor `name` as unsigned numbers.
    pub fn u32s(&self, name: &str) -> Vec<u32> {
        self.host(name).as_i32().iter().map(|v| u32::try_from(*v).expect("a position")).collect()
    }

    /// The case of row `r` alone.
    pub fn row(&self, r: usize) -> Self {
        let inputs = self.inputs.iter().map(|i| match &i.value {
            Value::Host(h) if i.per_row => Input { value: Value::Host(h.slice_rows(r, 1)), ..i.clone() },
            _ => i.clone(),
        });
        Self { seed: self.seed, rows: 1, inputs: inputs.collect() }
    }
}

/// A weight of generated codes: standard deviation 1/sqrt(cols), scales that vary by block.
pub fn generated_weight(name: &str, form: Form, rows: usize, cols: usize, seed: u64) -> Weight {
    if form == Form::Exl3 {
        return generated_exl3(name, rows, cols, seed);
    }
    let t = Tiny::new(name, seed, 0.0, 1.0 / 37_837.227 / (cols as f32).sqrt());
    let plain = |bytes: Vec<u8>| (bytes, Vec::new());
    let (data, scale) = match form {
        Form::F32 => plain((0..rows * cols).flat_map(|i| t.f32(i).to_le_bytes()).collect()),
        Form::Bf16 => plain((0..rows * cols).flat_map(|i| t.bf16(i).to_le_bytes()).collect()),
        Form::Fp8Block32 => stored(t.fp8_block32(rows, cols)),
        Form::Fp8Row32 => stored(t.fp8_row32(rows, cols)),
        Form::Fp4Row32 => stored(t.fp4_row32(rows, cols)),
        Form::Exl3 => unreachable!("made above"),
    };
    Weight::new(name, form, rows, cols, Bytes::copied(&data), Bytes::copied(&scale))
        .expect("generated sizes fit")
}

/// Any bits are a valid trellis; rate and codebook follow from name and seed, scales vary by a factor of two.
fn generated_exl3(name: &str, rows: usize, cols: usize, seed: u64) -> Weight {
    let s = Stream::new(name, seed);
    let (inputs, outputs) = (cols.next_multiple_of(exl3::BLOCK), rows.next_multiple_of(exl3::BLOCK));
    let choice = s.word(u64::MAX) as usize;
    let rate = exl3::Rate::ALL[choice % exl3::Rate::ALL.len()];
    let codebook = match rate.is_half() {
        true => exl3::Codebook::Mul1,
        false => exl3::Codebook::ALL[choice / 16 % 3],
    };
    let shape = [inputs / 16, outputs / 16, rate.words16()];
    let words = shape.iter().product::<usize>() as u64;
    let trellis: Vec<u8> = (0..words).flat_map(|i| (s.word(i) as u16).to_le_bytes()).collect();
    let scales = |first: u64, n: usize, base: f32| -> Vec<u8> {
        let one = |i: u64| {
            let magnitude = base * (0.7 + 0.7 * s.uniform(first + i) as f32);
            let sign = if s.word(first + i) & 1 == 1 { -1.0 } else { 1.0 };
            half::f16::from_f32(sign * magnitude).to_le_bytes()
        };
        (0..n as u64).flat_map(one).collect()
    };
    let suh = scales(words, inputs, 1.0 / (cols as f32).sqrt());
    let svh = scales(words + inputs as u64, outputs, 1.0);
    let [trellis, suh, svh] = [trellis, suh, svh].map(|v| Bytes::copied(&v));
    let layer = checkpoint::Exl3::new(name, rows, cols, shape, codebook, trellis, suh, svh);
    Weight::exl3(name, vec![layer.expect("generated sizes fit")]).expect("one layer")
}

fn stored(s: numerics::generator::Stored) -> (Vec<u8>, Vec<u8>) {
    (s.codes, s.scales)
}

/// Named outputs of a run; the first dimension of each counts rows.
pub type Outputs = Vec<(&'static str, Host)>;

/// One operator: its entry in the registry.
pub trait Operator {
    /// What the registry says.
    const SPEC: Spec;

    /// Generated inputs of `rows` rows.
    fn case(g: &Geometry, rows: usize, seed: u64) -> Case;

    /// The operator on a backend.
    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError>;
}

macro_rules! operators {
    ($($op:path),* $(,)?) => {
        /// Every operator's entry, in the order of the forward pass.
        pub const SPECS: &[Spec] = &[$(<$op as Operator>::SPEC),*];

        /// Generated inputs of operator `name`; `None` for an unknown name.
        pub fn case(name: &str, g: &Geometry, rows: usize, seed: u64) -> Option<Case> {
            $(if name == <$op as Operator>::SPEC.name {
                return Some(<$op as Operator>::case(g, rows, seed));
            })*
            None
        }

        /// Runs operator `name` on a backend; `None` for an unknown name.
        pub fn run<B: Backend>(name: &str, b: &B, c: &Case) -> Option<Result<Outputs, DeviceError>> {
            $(if name == <$op as Operator>::SPEC.name {
                return Some(<$op as Operator>::run(b, c));
            })*
            None
        }
    };
}

operators! {
    crate::embed::Embed,
    crate::embed::Replicate,
    crate::engram::EngramRows,
    crate::engram::EngramGate,
    crate::hyper::HcMix,
    crate::hyper::HcCollapse,
    crate::norm::RmsNorm,
    crate::linear::LinearFp8,
    crate::linear::LinearBf16,
    crate::linear::LinearF32,
    crate::linear::GroupedLinear,
    crate::exl3::LinearExl3,
    crate::exl3::GroupedLinearExl3,
    crate::rope::Rope,
    crate::cache::StoreWindow,
    crate::cache::RingWrite,
    crate::cache::PublishKv,
    crate::cache::PublishKey,
    crate::cache::QuantiseIndexQuery,
    crate::pool::PoolPairs,
    crate::indexer::IndexScores,
    crate::indexer::Candidates,
    crate::indexer::MaskScores,
    crate::indexer::TopK,
    crate::attention::SparseAttention,
    crate::moe::Router,
    crate::moe::RoutedExperts,
    crate::moe::SharedExpert,
    crate::exl3::ExpertsExl3,
    crate::moe::MoeSum,
    crate::hyper::HcExpand,
    crate::linear::ArgMax,
    crate::dspark::StreamMean,
    crate::dspark::DraftAttention,
    crate::dspark::MarkovBias,
    crate::dspark::ConcatCols,
}

/// ‖a−b‖/‖b‖; infinite elements must agree exactly, NaN never does. 0 for equal all-zero tensors.
pub fn nrms(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "tensors of different sizes");
    let (mut num, mut den) = (0.0, 0.0);
    for (x, y) in a.iter().zip(b) {
        if x == y {
            if y.is_finite() {
                den += f64::from(*y) * f64::from(*y);
            }
            continue;
        }
        let d = f64::from(*x) - f64::from(*y);
        if !d.is_finite() {
            return f64::INFINITY;
        }
        num += d * d;
        den += f64::from(*y) * f64::from(*y);
    }
    if num == 0.0 { 0.0 } else { (num / den).sqrt() }
}

/// How two runs of one operator compare.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Name of the output.
    pub output: &'static str,
    /// NRMS of values; 0 for equal and infinite for differing indices or codes.
    pub nrms: f64,
    /// Whether all bits are equal.
    pub equal: bool,
}

/// Compares outputs `a` with the reference's `b`.
pub fn compare(a: &Outputs, b: &Outputs) -> Vec<Comparison> {
    assert_eq!(a.len(), b.len(), "runs with different outputs");
    a.iter()
        .zip(b)
        .map(|((name, a), (_, b))| {
            assert_eq!(a.shape(), b.shape(), "output {name}");
            let equal = match (a.data(), b.data()) {
                (crate::Data::F32(a), crate::Data::F32(b)) => {
                    a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
                }
                (a, b) => a == b,
            };
            let nrms = match (a.data(), b.data()) {
                (crate::Data::F32(a), crate::Data::F32(b)) => nrms(a, b),
                _ if equal => 0.0,
                _ => f64::INFINITY,
            };
            Comparison { output: name, nrms, equal }
        })
        .collect()
}

/// Runs operator `name` on `rows` rows together and on each alone; the rows whose bits differ, with the output.
///
/// # Errors
/// What the backend reports.
pub fn row_variance<B: Backend>(
    name: &str,
    b: &B,
    g: &Geometry,
    rows: usize,
    seed: u64,
) -> Result<Vec<(usize, &'static str)>, DeviceError> {
    let whole = case(name, g, rows, seed).unwrap_or_else(|| panic!("no operator {name}"));
    let together = run(name, b, &whole).expect("a known operator")?;
    let mut differing = Vec::new();
    for r in 0..rows {
        let alone = run(name, b, &whole.row(r)).expect("a known operator")?;
        for ((output, t), (_, a)) in together.iter().zip(&alone) {
            if !compare(&vec![("row", t.slice_rows(r, 1))], &vec![("row", a.clone())])[0].equal {
                differing.push((r, *output));
            }
        }
    }
    Ok(differing)
}
