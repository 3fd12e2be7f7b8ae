//! Linear layers [§3.2] and the argmax over logits.

use checkpoint::{Form, Weight};
use numerics::quantise;

use crate::{Backend, DeviceError, Mode, registry::*};

/// What the released reference does around a linear layer's product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Io {
    /// Activations quantised to E4M3 in blocks of 32, result bf16 (`L8`, `L4`).
    Fp8,
    /// bf16 activations, result bf16.
    Bf16,
    /// fp32 activations, result fp32.
    F32,
}

/// The activations as the product takes them: fake-quantised for [`Io::Fp8`] in `source`.
pub fn activations(mode: Mode, io: Io, x: &[f32], cols: usize) -> Vec<f32> {
    let mut a = x.to_vec();
    if mode == Mode::Source && io == Io::Fp8 {
        a.chunks_mut(cols).for_each(quantise::qdq_fp8);
    }
    a
}

/// Rounds products as [`Io`] asks.
pub fn round_outputs(mode: Mode, io: Io, y: &mut [f32]) {
    if mode == Mode::Source && io != Io::F32 {
        numerics::bf16::round_slice(y);
    }
}

/// Σ_k w[k]·x[k]. In `source`, fp8 products accumulate as the tensor-core loop does: an exact partial sum per 32,
/// added in single precision; everything else is summed exactly and rounded once.
fn product(mode: Mode, io: Io, w: &[f32], x: &[f32]) -> f32 {
    let exact =
        |w: &[f32], x: &[f32]| -> f64 { w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum() };
    if mode == Mode::Source && io == Io::Fp8 {
        w.chunks(32).zip(x.chunks(32)).fold(0.0, |acc, (w, x)| acc + exact(w, x) as f32)
    } else {
        exact(w, x) as f32
    }
}

/// `y [T, out]` = x · Wᵀ.
pub fn linear(mode: Mode, io: Io, weight: &Weight, x: &[f32]) -> Vec<f32> {
    if weight.form() == Form::Exl3 {
        let mut y = crate::exl3::product(mode, weight, x, 0..weight.rows());
        round_outputs(mode, io, &mut y);
        return y;
    }
    let (out, cols) = (weight.rows(), weight.cols());
    let rows = x.len() / cols;
    let a = activations(mode, io, x, cols);
    let (mut y, mut w) = (vec![0.0; rows * out], vec![0.0; cols]);
    for o in 0..out {
        weight.decode_row(o, &mut w);
        for r in 0..rows {
            y[r * out + o] = product(mode, io, &w, &a[r * cols..][..cols]);
        }
    }
    round_outputs(mode, io, &mut y);
    y
}

/// Group g of the output takes group g of the input [§2.7]: `x [T, groups·k]`, `weight [groups·o, k]`.
pub fn grouped_linear(mode: Mode, weight: &Weight, groups: usize, x: &[f32]) -> Vec<f32> {
    if weight.form() == Form::Exl3 {
        return crate::exl3::grouped_product(mode, weight, groups, x);
    }
    let (k, out) = (weight.cols(), weight.rows());
    let (per, rows) = (out / groups, x.len() / (groups * k));
    let (mut y, mut w) = (vec![0.0; rows * out], vec![0.0; k]);
    for o in 0..out {
        weight.decode_row(o, &mut w);
        for r in 0..rows {
            let x = &x[(r * groups + o / per) * k..][..k];
            y[r * out + o] = product(mode, Io::Bf16, &w, x);
        }
    }
    round_outputs(mode, Io::Bf16, &mut y);
    y
}

/// Index of the largest logit, the lowest on ties.
pub fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in logits.iter().enumerate() {
        if *v > logits[best] {
            best = i;
        }
    }
    best
}

const EXACT: Tolerance = Tolerance::nrms(1e-6, "fp32 accumulation order over K");

macro_rules! linear_operator {
    ($type:ident, $doc:literal, $name:literal, $io:expr, $forms:expr, $contract:literal, $source:expr) => {
        #[doc = $doc]
        pub struct $type;

        impl Operator for $type {
            const SPEC: Spec =
                Spec { name: $name, section: "3.2", contract: $contract, exact: EXACT, source: $source };

            fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
                let mut c = Case::new(rows, seed);
                c.normal("x", &[g.hidden], 1.0);
                for (name, form) in $forms {
                    c.weight(name, form, g.q_rank, g.hidden);
                }
                c
            }

            fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
                let x = c.buf(b, "x")?;
                let mut outputs = Vec::new();
                for (name, _) in $forms {
                    outputs.push((name, b.read(&b.linear(&x, &c.mat(b, name)?, $io))?));
                }
                Ok(outputs)
            }
        }
    };
}

linear_operator!(
    LinearFp8,
    "Registry entry of the linear layer with fp8 activations.",
    "linear_fp8",
    Io::Fp8,
    [("fp8", Form::Fp8Block32), ("fp4", Form::Fp4Row32)],
    "x [T, k], W [o, k] fp8 or fp4 -> y [T, o]; source: x to E4M3 with a power-of-two scale per 32, result bf16",
    Tolerance::nrms(3e-4, "accumulation order flips isolated bf16 roundings of the result")
);
linear_operator!(
    LinearBf16,
    "Registry entry of the linear layer with bf16 activations.",
    "linear_bf16",
    Io::Bf16,
    [("bf16", Form::Bf16), ("fp8", Form::Fp8Block32)],
    "x [T, k], W [o, k] -> y [T, o]; source: result bf16",
    Tolerance::nrms(3e-4, "accumulation order flips isolated bf16 roundings of the result")
);
linear_operator!(
    LinearF32,
    "Registry entry of the linear layer in single precision.",
    "linear_f32",
    Io::F32,
    [("bf16", Form::Bf16), ("f32", Form::F32)],
    "x [T, k], W [o, k] -> y [T, o] in fp32 (router, head, hyper-connection and ratio-2 compressor projections)",
    EXACT
);

/// Registry entry of the grouped output projection.
pub struct GroupedLinear;

impl Operator for GroupedLinear {
    const SPEC: Spec = Spec {
        name: "grouped_linear",
        section: "2.7",
        contract: "o [T, groups*k], W [groups*r, k] fp8 -> z [T, groups*r]; group g of z from group g of o; activations \
                   are not quantised",
        exact: EXACT,
        source: Tolerance::nrms(3e-4, "accumulation order flips isolated bf16 roundings of the result"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("o", &[g.heads * g.head_dim], 1.0)
            .shared("groups", crate::Host::i32(&[1], vec![g.o_groups as i32]));
        c.weight("wo_a", Form::Fp8Block32, g.o_groups * g.o_rank, g.heads * g.head_dim / g.o_groups);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let groups = c.u32s("groups")[0] as usize;
        Ok(vec![("z", b.read(&b.grouped_linear(&c.buf(b, "o")?, &c.mat(b, "wo_a")?, groups))?)])
    }
}

/// Registry entry of the argmax.
pub struct ArgMax;

impl Operator for ArgMax {
    const SPEC: Spec = Spec {
        name: "argmax",
        section: "2.10",
        contract: "logits [T, V] -> id [T]; the lowest id on ties",
        exact: Tolerance::bits("a choice"),
        source: Tolerance::bits("a choice"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        let s = c.stream("logits");
        // A few distinct values, so that ties are common.
        let logits = (0..(rows * g.vocab) as u64).map(|i| (s.word(i) % 7) as f32).collect();
        c.row_input("logits", crate::Host::f32(&[rows, g.vocab], logits));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        Ok(vec![("id", b.read(&b.argmax(&c.buf(b, "logits")?))?)])
    }
}
