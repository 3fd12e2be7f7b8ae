//! Router, routed experts and the shared expert [§2.8].

use checkpoint::{Form, Weight};

use crate::{
    Backend, DeviceError, ExpertWeights, Host, Io, Mode,
    linear::{linear, round_outputs},
    registry::*,
};

/// The experts that a router chose: `experts [T, k]` in the order of choice, and their `weights [T, k]`.
#[derive(Clone, Debug)]
pub struct Routing<T> {
    /// Expert ids.
    pub experts: T,
    /// Routing weights, scaled.
    pub weights: T,
}

/// softplus(x), x itself above 20.
#[inline]
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// silu(x).
#[inline]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// One row of the router: scores sqrt(softplus(logit)); the `ids.len()` highest of score + bias, lower id on ties;
/// weights score / (Σ + 1e-20) · `scale`.
pub fn router_row(logits: &[f32], bias: &[f32], scale: f32, ids: &mut [i32], weights: &mut [f32]) {
    let scores: Vec<f32> = logits.iter().map(|x| softplus(*x).sqrt()).collect();
    let biased: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
    let chosen = crate::indexer::highest(&biased, ids.len());
    assert_eq!(chosen.len(), ids.len(), "fewer finite router scores than experts to choose");
    let sum: f32 = chosen.iter().map(|e| scores[*e]).sum();
    for ((id, w), e) in ids.iter_mut().zip(weights).zip(&chosen) {
        *id = *e as i32;
        *w = scores[*e] / (sum + 1e-20) * scale;
    }
}

/// The gated activation: h = weight · (silu(min(g, limit)) · clamp(u, ±limit)).
pub fn swiglu(mode: Mode, gate: &[f32], up: &[f32], limit: f32, weight: f32, out: &mut [f32]) {
    for ((h, g), u) in out.iter_mut().zip(gate).zip(up) {
        *h = mode.bf16(weight * (silu(g.min(limit)) * u.clamp(-limit, limit)));
    }
}

/// A gated expert on one or more rows, every row with its own routing weight.
pub fn expert(mode: Mode, parts: [&Weight; 3], x: &[f32], weights: &[f32], limit: f32) -> Vec<f32> {
    let [w1, w3, w2] = parts;
    let (gate, up) = (linear(mode, Io::Fp8, w1, x), linear(mode, Io::Fp8, w3, x));
    let inter = w1.rows();
    let mut h = vec![0.0; gate.len()];
    for (r, weight) in weights.iter().enumerate() {
        let range = r * inter..(r + 1) * inter;
        swiglu(mode, &gate[range.clone()], &up[range.clone()], limit, *weight, &mut h[range]);
    }
    linear(mode, Io::Fp8, w2, &h)
}

/// Σ over a row's experts, ascending by id, starting from 0, in single precision.
pub fn routed_experts(
    mode: Mode,
    x: &Host,
    routing: &Routing<Host>,
    experts: &[ExpertWeights],
    limit: f32,
) -> Host {
    let k = routing.experts.width();
    let mut acc = vec![0.0f32; x.rows() * x.width()];
    for (t, acc) in acc.chunks_mut(x.width()).enumerate() {
        let mut chosen: Vec<(i32, f32)> = (0..k)
            .map(|i| (routing.experts.as_i32()[t * k + i], routing.weights.as_f32()[t * k + i]))
            .collect();
        chosen.sort_by_key(|c| c.0);
        for (e, weight) in chosen {
            let e = &experts[e as usize];
            let y = expert(mode, [&e.gate, &e.up, &e.down], x.row(t), &[weight], limit);
            acc.iter_mut().zip(&y).for_each(|(a, y)| *a += y);
        }
    }
    Host::f32(x.shape(), acc)
}

/// Registry entry of the router.
pub struct Router;

impl Operator for Router {
    const SPEC: Spec = Spec {
        name: "router",
        section: "2.8",
        contract: "logits [T, E], bias [E] (bias_vl for rows of an image span) -> experts [T, k] in the order of \
                   choice, weights [T, k]; lower id on ties",
        exact: Tolerance::nrms(1e-6, "exp and log1p of 1 ulp each; the choice itself must be equal"),
        source: Tolerance::nrms(1e-6, "exp and log1p of 1 ulp each; the choice itself must be equal"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("logits", &[g.experts], 1.4).shared_normal("bias", &[g.experts], 0.1, 0.0);
        c.shared_normal("bias_vl", &[g.experts], 0.5, 0.0);
        c.row_input("image", Host::i32(&[rows], (0..rows as i32).map(|r| i32::from(r % 4 == 2)).collect()));
        c.shared("k", Host::i32(&[1], vec![g.top as i32]));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let image: Vec<bool> = c.u32s("image").iter().map(|v| *v != 0).collect();
        let (bias, vl) = (c.buf(b, "bias")?, c.buf(b, "bias_vl")?);
        let r = b.router(&c.buf(b, "logits")?, &bias, Some((&vl, &image)), c.u32s("k")[0] as usize, 1.5);
        Ok(vec![("experts", b.read(&r.experts)?), ("weights", b.read(&r.weights)?)])
    }
}

/// Generated ids `[T, k]` of chosen experts and their weights `[T, k]`.
pub(crate) fn chosen_experts(c: &Case, g: &Geometry) -> (Host, Host) {
    let s = c.stream("choice");
    let (rows, n, k) = (c.rows(), g.stored_experts, g.top);
    let mut ids = Vec::new();
    for r in 0..rows {
        let scores: Vec<f32> = (0..n).map(|e| s.uniform((r * n + e) as u64) as f32).collect();
        ids.extend(crate::indexer::highest(&scores, k).iter().map(|e| *e as i32));
    }
    let weights = (0..rows * k).map(|i| 0.1 + s.uniform((i + 1_000_000) as u64) as f32).collect();
    (Host::i32(&[rows, k], ids), Host::f32(&[rows, k], weights))
}

/// Registry entry of the routed experts.
pub struct RoutedExperts;

impl Operator for RoutedExperts {
    const SPEC: Spec = Spec {
        name: "routed_experts",
        section: "2.8",
        contract: "x [T, d], experts [T, k], weights [T, k], fp4 w1, w3, w2 of every expert -> acc [T, d] fp32: sum \
                   over chosen experts, ascending by id, of w2*(weight*(silu(w1*x)*(w3*x))), clamped; source: L4 \
                   roundings",
        exact: Tolerance::nrms(2e-6, "fp32 accumulation order over K, twice"),
        source: Tolerance::nrms(3e-3, "flipped bf16 roundings pass through the second fp8 quantisation"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        let (ids, weights) = chosen_experts(&c, g);
        c.normal("x", &[g.hidden], 1.0);
        c.row_input("ids", ids).row_input("weights", weights);
        c.experts("experts", g.stored_experts, Form::Fp4Row32, g.hidden, g.inter);
        c.shared("limit", Host::f32(&[1], vec![g.limit]));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let list: Vec<ExpertWeights> = c.get_experts("experts").iter().map(ExpertWeights::from).collect();
        let routing = Routing { experts: c.buf(b, "ids")?, weights: c.buf(b, "weights")? };
        let limit = c.host("limit").as_f32()[0];
        let acc = b.routed_experts(&c.buf(b, "x")?, &routing, &b.load_experts(list)?, limit);
        Ok(vec![("acc", b.read(&acc)?)])
    }
}

/// Registry entry of the shared expert.
pub struct SharedExpert;

impl Operator for SharedExpert {
    const SPEC: Spec = Spec {
        name: "shared_expert",
        section: "2.8",
        contract: "x [T, d], fp8 w1, w3, w2 -> y [T, d] = w2*(silu(w1*x)*(w3*x)), clamped; source: L8 roundings",
        exact: Tolerance::nrms(2e-6, "fp32 accumulation order over K, twice"),
        source: Tolerance::nrms(3e-3, "flipped bf16 roundings pass through the second fp8 quantisation"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("x", &[g.hidden], 1.0).experts("shared", 1, Form::Fp8Block32, g.hidden, g.inter);
        c.shared("limit", Host::f32(&[1], vec![g.limit]));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let [w1, w3, w2] = &c.get_experts("shared")[0];
        let limit = c.host("limit").as_f32()[0];
        let y = b.shared_expert(&c.buf(b, "x")?, [&b.load(w1)?, &b.load(w3)?, &b.load(w2)?], limit);
        Ok(vec![("y", b.read(&y)?)])
    }
}

/// Registry entry of the sum of routed and shared experts.
pub struct MoeSum;

impl Operator for MoeSum {
    const SPEC: Spec = Spec {
        name: "moe_sum",
        section: "2.8",
        contract: "routed [T, d] fp32, shared [T, d] -> y [T, d]; source: result bf16",
        exact: Tolerance::bits("one addition"),
        source: Tolerance::bits("one addition and one rounding"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("routed", &[g.hidden], 1.0).normal("shared", &[g.hidden], 1.0);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        Ok(vec![("y", b.read(&b.moe_sum(&c.buf(b, "routed")?, &c.buf(b, "shared")?))?)])
    }
}

/// Element-wise sum, rounded like a bf16 result in `source`.
pub fn moe_sum(mode: Mode, a: &[f32], b: &[f32]) -> Vec<f32> {
    let mut y: Vec<f32> = a.iter().zip(b).map(|(a, b)| a + b).collect();
    round_outputs(mode, Io::Bf16, &mut y);
    y
}
