//! Products with EXL3 weights, straight from the trellis: each distinct rotated input is made once, then blocks of 128
//! outputs go to the threads.

use std::{
    ops::Range,
    sync::{Mutex, OnceLock, PoisonError},
};

use checkpoint::{Exl3, Form, Weight};
use exl3::{Arithmetic, BLOCK, Codebook, Linear, Rate, Rows, rotate_input};

use crate::{Engine, Isa, Job, linear::INLINE};

/// Rows that are arranged together: whole batches of the kernels.
const CHUNK: usize = 128;

/// Outputs `range` of one weight for some rows.
pub(crate) struct Product<'a> {
    /// All of its layers are EXL3.
    pub weight: &'a Weight,
    /// Wanted outputs.
    pub range: Range<usize>,
    /// Activations `[rows, in]`.
    pub x: &'a [f32],
    /// Results `[rows, range]`.
    pub y: &'a mut [f32],
}

/// Inputs of a layer before the trellis: `x * suh`, rotated. Layers with the same activations and `suh` share it.
struct Rotation<'a> {
    x: &'a [f32],
    layer: &'a Exl3,
    linear: Linear<'a>,
}

impl Rotation<'_> {
    fn rows(&self) -> usize {
        self.x.len() / self.layer.cols()
    }
}

/// A rotation as one rate and codebook takes it.
#[derive(Clone, Copy, PartialEq)]
struct Input {
    rotation: usize,
    rate: Rate,
    codebook: Codebook,
}

/// Blocks `blocks` of a layer.
struct Part<'a> {
    product: usize,
    linear: Linear<'a>,
    input: usize,
    blocks: Range<usize>,
    /// Wanted outputs of the layer.
    range: Range<usize>,
    /// Where they begin in a row of the result.
    at: usize,
}

/// The results of a product; units write disjoint parts.
struct Out {
    start: *mut f32,
    rows: usize,
    width: usize,
}
// SAFETY: the units of a run partition (row, output), so no two threads touch one element.
unsafe impl Sync for Out {}

/// The kernels' name for `isa`; some machines with AVX-512 lack what the EXL3 kernels need of it. The bits are the same.
fn kernels(isa: Isa) -> exl3::Isa {
    #[cfg(target_arch = "x86_64")]
    {
        let all = exl3::Isa::available();
        let wanted = match isa {
            Isa::Avx512 => &[exl3::Isa::Avx512Half, exl3::Isa::Avx512, exl3::Isa::Avx2][..],
            Isa::Avx2 => &[exl3::Isa::Avx2],
            Isa::Portable => &[],
        };
        wanted.iter().copied().find(|i| all.contains(i)).unwrap_or(exl3::Isa::Portable)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        exl3::Isa::Portable
    }
}

impl Engine {
    /// As [`Engine::run`] for weights of any form; EXL3 rounds as `arithmetic` says.
    pub fn run_any(&self, jobs: Vec<Job>, arithmetic: Arithmetic) {
        let (trellis, mut plain): (Vec<Job>, Vec<Job>) =
            jobs.into_iter().partition(|j| j.weight.form() == Form::Exl3);
        if !plain.is_empty() {
            self.run(&mut plain);
        }
        let products = trellis.into_iter().map(|j| {
            assert_eq!(j.x.len(), j.rows * j.weight.cols(), "{}: activations", j.weight.name());
            Product { weight: j.weight, range: 0..j.weight.rows(), x: j.x, y: j.y }
        });
        self.run_exl3(&mut products.collect::<Vec<_>>(), arithmetic);
    }

    /// All of `products`, spread together over the threads.
    pub(crate) fn run_exl3(&self, products: &mut [Product], arithmetic: Arithmetic) {
        let outs: Vec<Out> = products.iter_mut().map(out).collect();
        let products = &*products;
        let (mut rotations, mut inputs, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for (i, p) in products.iter().enumerate().filter(|(i, _)| outs[*i].rows > 0) {
            take_apart(i, p, &mut rotations, &mut inputs, &mut parts);
        }
        // A weight costs a seventh of a nanosecond to decode and a twenty-fifth to multiply.
        let weights = |p: &Part| p.blocks.len() * BLOCK * p.linear.in_features();
        let cost: usize = parts.iter().map(|p| weights(p) / 7 + weights(p) * outs[p.product].rows / 25).sum();
        let each = |n: usize, f: &(dyn Fn(usize) + Sync)| {
            if cost >= INLINE { self.par_rows(n, f) } else { (0..n).for_each(f) }
        };

        let mut rotated: Vec<Vec<f32>> =
            rotations.iter().map(|r| vec![0.0; r.rows() * r.linear.in_features()]).collect();
        let rows: Vec<(&Rotation, usize, Mutex<&mut [f32]>)> = rotations
            .iter()
            .zip(&mut rotated)
            .flat_map(|(r, out)| {
                let rows = out.chunks_mut(r.linear.in_features()).enumerate();
                rows.map(move |(row, out)| (r, row, Mutex::new(out)))
            })
            .collect();
        each(rows.len(), &|i| {
            let (rotation, row, out) = &rows[i];
            let x = &rotation.x[row * rotation.layer.cols()..][..rotation.layer.cols()];
            let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
            let x = ops::exl3::padded(rotation.layer, x);
            rotate_input(&x, rotation.linear.suh(), arithmetic, &mut out).expect("padded to the layer");
        });
        drop(rows);

        let isa = kernels(self.isa());
        let chunks: Vec<(usize, usize)> = (0..inputs.len())
            .flat_map(|i| (0..rotations[inputs[i].rotation].rows().div_ceil(CHUNK)).map(move |c| (i, c)))
            .collect();
        let arranged: Vec<OnceLock<Rows>> = chunks.iter().map(|_| OnceLock::new()).collect();
        let arrange = |i: usize| {
            let ((input, chunk), width) =
                (chunks[i], rotations[inputs[chunks[i].0].rotation].linear.in_features());
            let Input { rotation, rate, codebook } = inputs[input];
            let all = &rotated[rotation];
            let xh = &all[chunk * CHUNK * width..all.len().min((chunk + 1) * CHUNK * width)];
            Rows::with_isa(isa, xh, width, rate, codebook).expect("rows of the layer")
        };
        each(chunks.len(), &|i| {
            arranged[i].get_or_init(|| arrange(i));
        });

        let units: Vec<(usize, usize, usize)> = parts
            .iter()
            .enumerate()
            .flat_map(|(p, part)| {
                let of_part = chunks.iter().enumerate().filter(|(_, (input, _))| *input == part.input);
                of_part.flat_map(move |(c, _)| part.blocks.clone().map(move |b| (p, c, b)))
            })
            .collect();
        each(units.len(), &|i| {
            let (part, chunk, block) = units[i];
            let (part, rows) = (&parts[part], arranged[chunk].get_or_init(|| arrange(chunk)));
            let mut y = vec![0.0; rows.count() * BLOCK];
            part.linear.multiply(rows, block..block + 1, &mut y).expect("rows of the layer");
            let first = (block * BLOCK).max(part.range.start);
            let count = ((block + 1) * BLOCK).min(part.range.end) - first;
            let out = &outs[part.product];
            for (r, y) in y.chunks_exact(BLOCK).enumerate() {
                let row = chunks[chunk].1 * CHUNK + r;
                assert!(row < out.rows && part.at + first - part.range.start + count <= out.width);
                let y = &y[first - block * BLOCK..][..count];
                // SAFETY: the range lies in the results (just checked) and belongs to this unit alone.
                unsafe {
                    let to = out.start.add(row * out.width + part.at + first - part.range.start);
                    std::slice::from_raw_parts_mut(to, count).copy_from_slice(y);
                }
            }
        });
    }
}

fn out(p: &mut Product) -> Out {
    let (name, width) = (p.weight.name(), p.range.len());
    assert!(p.weight.form() == Form::Exl3, "{name} is {}", p.weight.form().name());
    assert!(p.range.end <= p.weight.rows() && p.weight.cols() > 0, "{name}: outputs {:?}", p.range);
    let rows = p.x.len() / p.weight.cols();
    assert_eq!(p.x.len(), rows * p.weight.cols(), "{name}: activations");
    assert_eq!(p.y.len(), rows * width, "{name}: results");
    Out { start: p.y.as_mut_ptr(), rows, width }
}

/// Adds the layers of a product and what they need.
fn take_apart<'a>(
    product: usize,
    p: &'a Product<'a>,
    rotations: &mut Vec<Rotation<'a>>,
    inputs: &mut Vec<Input>,
    parts: &mut Vec<Part<'a>>,
) {
    let mut first = 0;
    for layer in p.weight.layers() {
        let before = first;
        first += layer.rows();
        let (start, end) = (p.range.start.max(before), p.range.end.min(first));
        if start >= end {
            continue;
        }
        let linear = layer.linear();
        let same = |r: &Rotation| std::ptr::eq(r.x, p.x) && r.linear.suh() == linear.suh();
        let rotation = rotations.iter().position(same).unwrap_or_else(|| {
            rotations.push(Rotation { x: p.x, layer, linear });
            rotations.len() - 1
        });
        let input = Input { rotation, rate: layer.rate(), codebook: layer.codebook() };
        let input = inputs.iter().position(|i| *i == input).unwrap_or_else(|| {
            inputs.push(input);
            inputs.len() - 1
        });
        let range = start - before..end - before;
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        parts.push(Part { product, linear, input, blocks, range, at: start - p.range.start });
    }
}
