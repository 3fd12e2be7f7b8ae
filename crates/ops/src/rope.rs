//! Rotary position embedding [§2.1]: adjacent pairs of the last dimensions of every head.

use crate::{Backend, DeviceError, Host, Mode, registry::*};

/// The frequencies of one kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    freqs: Vec<f32>,
}

/// The YaRN parameters of compressed layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Context extension factor.
    pub factor: f64,
    /// Rotations over the original context above which a pair is left alone.
    pub beta_fast: f64,
    /// Rotations below which a pair is interpolated in full.
    pub beta_slow: f64,
    /// Context of the original training.
    pub original: usize,
}

impl RopeTable {
    /// f_i = 1/θ^(2i/dim), i < dim/2, in single precision.
    pub fn plain(theta: f64, dim: usize) -> Self {
        let freqs = (0..dim / 2)
            .map(|i| {
                let exponent = (2 * i) as f32 / dim as f32;
                1.0 / theta.powf(f64::from(exponent)) as f32
            })
            .collect();
        Self { freqs }
    }

    /// The same with YaRN interpolation.
    pub fn yarn(theta: f64, dim: usize, y: Yarn) -> Self {
        let mut table = Self::plain(theta, dim);
        // The pair whose wavelength makes `rotations` turns within the original context.
        let pair = |rotations: f64| {
            dim as f64 * (y.original as f64 / (rotations * 2.0 * std::f64::consts::PI)).ln()
                / (2.0 * theta.ln())
        };
        let low = pair(y.beta_fast).floor().max(0.0) as f32;
        let high = pair(y.beta_slow).ceil().min((dim - 1) as f64) as f32;
        let high = if low == high { high + 0.001 } else { high };
        for (i, f) in table.freqs.iter_mut().enumerate() {
            let ramp = ((i as f32 - low) / (high - low)).clamp(0.0, 1.0);
            let keep = 1.0 - ramp;
            *f = *f / y.factor as f32 * (1.0 - keep) + *f * keep;
        }
        table
    }

    /// Given frequencies.
    pub fn of(freqs: Vec<f32>) -> Self {
        Self { freqs }
    }

    /// Rotated dimensions.
    pub fn dim(&self) -> usize {
        self.freqs.len() * 2
    }

    /// The frequencies.
    pub fn freqs(&self) -> &[f32] {
        &self.freqs
    }

    /// Cosine and sine of pair `i` at `position`: of the angle rounded to single precision, with full range
    /// reduction.
    #[inline]
    pub fn turn(&self, i: usize, position: u32) -> (f32, f32) {
        let angle = f64::from(position as f32 * self.freqs[i]);
        (angle.cos() as f32, angle.sin() as f32)
    }
}

/// Rotates the last `table.dim()` of each `head_dim` run of `x` at `position`; backwards for `inverse`.
pub fn rope_row(mode: Mode, x: &mut [f32], head_dim: usize, table: &RopeTable, position: u32, inverse: bool) {
    let pairs = table.freqs.len();
    let turns: Vec<(f32, f32)> = (0..pairs).map(|i| table.turn(i, position)).collect();
    for head in x.chunks_mut(head_dim) {
        let tail = &mut head[head_dim - 2 * pairs..];
        for (pair, (cos, sin)) in tail.chunks_mut(2).zip(&turns) {
            let sin = if inverse { -sin } else { *sin };
            let (a, b) = (pair[0], pair[1]);
            pair[0] = mode.bf16(a * cos - b * sin);
            pair[1] = mode.bf16(a * sin + b * cos);
        }
    }
}

/// Registry entry of RoPE.
pub struct Rope;

impl Operator for Rope {
    const SPEC: Spec = Spec {
        name: "rope",
        section: "2.1",
        contract: "x [T, heads*d], position [T] -> y [T, heads*d]: pairs of the last dims of each head turned by the \
                   fp32 angle position*f_i; forward and inverse",
        exact: Tolerance::nrms(1e-7, "a fused multiply-add of the complex product"),
        source: Tolerance::nrms(2e-4, "a fused multiply-add flips isolated bf16 roundings"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        let s = c.stream("position");
        let positions = (0..rows as u64).map(|i| (s.word(i) % 1_048_576) as i32).collect();
        c.normal("x", &[g.heads * g.head_dim], 1.0).row_input("position", Host::i32(&[rows], positions));
        c.shared("dims", Host::i32(&[2], vec![g.head_dim as i32, g.rope_dim as i32]));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let (x, positions, dims) = (c.buf(b, "x")?, c.u32s("position"), c.u32s("dims"));
        let (head, rope) = (dims[0] as usize, dims[1] as usize);
        let yarn = Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original: 65_536 };
        let mut outputs = Vec::new();
        for (name, table, inverse) in [
            ("plain", RopeTable::plain(10_000.0, rope), false),
            ("yarn", RopeTable::yarn(160_000.0, rope, yarn), false),
            ("inverse", RopeTable::plain(10_000.0, rope), true),
        ] {
            outputs.push((name, b.read(&b.rope(&x, head, &table, &positions, inverse))?));
        }
        Ok(outputs)
    }
}
