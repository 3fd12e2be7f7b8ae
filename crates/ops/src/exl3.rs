//! Products with EXL3 weights: straight from the trellis, with roundings of their own [EXL3 specification, section 6].
//!
//! `source` is what the format's library computes: activations and rotated input rounded to fp16, sums in fp32; there is
//! no fp8 quantisation of activations. The result is rounded as for other weights.

use std::{borrow::Cow, ops::Range};

use checkpoint::{Exl3, Form, Weight};
use exl3::{Arithmetic, reference};

use crate::{
    Backend, DeviceError, ExpertWeights, Host, Io, Mode, Routing, linear::round_outputs, moe::chosen_experts,
    registry::*,
};

/// Where an EXL3 product rounds in `mode`.
pub fn arithmetic(mode: Mode) -> Arithmetic {
    if mode == Mode::Source { Arithmetic::Source } else { Arithmetic::Exact }
}

/// Rows of `x` with zeros up to the stored inputs of `layer`.
pub fn padded<'x>(layer: &Exl3, x: &'x [f32]) -> Cow<'x, [f32]> {
    let (cols, stored) = (layer.cols(), layer.linear().in_features());
    if cols == stored {
        return x.into();
    }
    let mut out = vec![0.0; x.len() / cols * stored];
    out.chunks_mut(stored).zip(x.chunks(cols)).for_each(|(o, x)| o[..cols].copy_from_slice(x));
    out.into()
}

/// `y [T, out]` = x · Wᵀ of an EXL3 weight, not rounded to bf16; layers without any of the outputs `wanted` stay zero.
pub(crate) fn product(mode: Mode, weight: &Weight, x: &[f32], wanted: Range<usize>) -> Vec<f32> {
    let (out, mut first) = (weight.rows(), 0);
    let mut y = vec![0.0; x.len() / weight.cols() * out];
    for layer in weight.layers() {
        if first >= wanted.end || first + layer.rows() <= wanted.start {
            first += layer.rows();
            continue;
        }
        let linear = layer.linear();
        let part =
            reference::linear(&linear, &padded(layer, x), arithmetic(mode)).expect("padded to the layer");
        for (y, part) in y.chunks_mut(out).zip(part.chunks(linear.out_features())) {
            y[first..first + layer.rows()].copy_from_slice(&part[..layer.rows()]);
        }
        first += layer.rows();
    }
    y
}

/// As [`crate::linear::grouped_linear`] for an EXL3 weight.
pub(crate) fn grouped_product(mode: Mode, weight: &Weight, groups: usize, x: &[f32]) -> Vec<f32> {
    let (k, out) = (weight.cols(), weight.rows());
    let per = out / groups;
    let mut y = vec![0.0; x.len() / (groups * k) * out];
    for g in 0..groups {
        let input: Vec<f32> = x.chunks(groups * k).flat_map(|x| x[g * k..][..k].to_vec()).collect();
        let all = product(mode, weight, &input, g * per..(g + 1) * per);
        for (y, all) in y.chunks_mut(out).zip(all.chunks(out)) {
            y[g * per..][..per].copy_from_slice(&all[g * per..][..per]);
        }
    }
    round_outputs(mode, Io::Bf16, &mut y);
    y
}

/// Registry entry of the linear layer with EXL3 weights.
pub struct LinearExl3;

/// Weights of the case: their names and how their results round. Rates and codebooks differ.
const LAYERS: [(&str, Io); 6] =
    [("a", Io::Fp8), ("b", Io::Bf16), ("c", Io::F32), ("d", Io::Fp8), ("e", Io::Bf16), ("f", Io::F32)];

impl Operator for LinearExl3 {
    const SPEC: Spec = Spec {
        name: "linear_exl3",
        section: "EXL3 6",
        contract: "x [T, k], W [o, k] EXL3 -> y [T, o] = (((x * suh) P) What P) * svh; source: x and the rotated input to \
                   fp16, fp32 sums, result bf16 unless the layer is one in single precision",
        exact: Tolerance::nrms(1e-6, "fp32 butterflies and accumulation order over K"),
        source: Tolerance::nrms(3e-4, "accumulation order flips isolated bf16 roundings of the result"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("x", &[g.hidden], 1.0);
        for (name, _) in LAYERS {
            c.weight(name, Form::Exl3, g.q_rank, g.hidden);
        }
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let x = c.buf(b, "x")?;
        let one = |(name, io)| Ok((name, b.read(&b.linear(&x, &c.mat(b, name)?, io))?));
        LAYERS.into_iter().map(one).collect()
    }
}

/// Registry entry of the grouped output projection with EXL3 weights.
pub struct GroupedLinearExl3;

impl Operator for GroupedLinearExl3 {
    const SPEC: Spec = Spec {
        name: "grouped_linear_exl3",
        section: "2.7",
        contract: "o [T, groups*k], W [groups*r, k] EXL3, in one layer or in one a group -> z [T, groups*r]; group g of z \
                   from group g of o; source: as linear_exl3",
        exact: LinearExl3::SPEC.exact,
        source: LinearExl3::SPEC.source,
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("o", &[g.heads * g.head_dim], 1.0)
            .shared("groups", Host::i32(&[1], vec![g.o_groups as i32]));
        let k = g.heads * g.head_dim / g.o_groups;
        c.weight("whole", Form::Exl3, g.o_groups * g.o_rank, k);
        let parts =
            (0..g.o_groups).map(|i| generated_weight(&format!("part {i}"), Form::Exl3, g.o_rank, k, seed));
        let layers = parts.flat_map(|w| w.layers().to_vec()).collect();
        c.stored("parts", Weight::exl3("parts", layers).expect("layers of one width"));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let (o, groups) = (c.buf(b, "o")?, c.u32s("groups")[0] as usize);
        let one = |name| Ok((name, b.read(&b.grouped_linear(&o, &c.mat(b, name)?, groups))?));
        ["whole", "parts"].into_iter().map(one).collect()
    }
}

/// Registry entry of routed and shared experts with EXL3 weights.
pub struct ExpertsExl3;

impl Operator for ExpertsExl3 {
    const SPEC: Spec = Spec {
        name: "experts_exl3",
        section: "2.8",
        contract: "x [T, d], experts [T, k], weights [T, k], EXL3 w1, w3, w2 of every expert, rates and codebooks their own \
                   -> acc [T, d] as routed_experts, shared [T, d] as shared_expert; source: as linear_exl3, no fp8 \
                   quantisation",
        exact: Tolerance::nrms(2e-6, "fp32 butterflies and accumulation order over K, twice"),
        source: Tolerance::nrms(1e-3, "flipped bf16 roundings pass through the second product"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        let (ids, weights) = chosen_experts(&c, g);
        c.normal("x", &[g.hidden], 1.0);
        c.row_input("ids", ids).row_input("weights", weights);
        c.experts("experts", g.stored_experts, Form::Exl3, g.hidden, g.inter);
        c.experts("shared", 1, Form::Exl3, g.hidden, g.inter);
        c.shared("limit", Host::f32(&[1], vec![g.limit]));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let list: Vec<ExpertWeights> = c.get_experts("experts").iter().map(ExpertWeights::from).collect();
        let routing = Routing { experts: c.buf(b, "ids")?, weights: c.buf(b, "weights")? };
        let (x, limit) = (c.buf(b, "x")?, c.host("limit").as_f32()[0]);
        let acc = b.routed_experts(&x, &routing, &b.load_experts(list)?, limit);
        let [w1, w3, w2] = &c.get_experts("shared")[0];
        let shared = b.shared_expert(&x, [&b.load(w1)?, &b.load(w3)?, &b.load(w2)?], limit);
        Ok(vec![("acc", b.read(&acc)?), ("shared", b.read(&shared)?)])
    }
}
