//! Weights ready for use: matrices and the routed experts of a layer.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use checkpoint::{Exl3, Form, Weight};
use exl3::{BLOCK, Codebook, Rate};
use ops::{DeviceError, ExpertWeights};

use super::slab::{Slab, table};
use crate::Device;

/// Numbers of an entry of a table of matrices: offsets of data, scale (trellis, suh), svh; class; padding.
const ENTRY: usize = 8;
/// Threadgroups that a product of one row should have, so that a large GPU is busy: some six for each of its cores.
const BUSY: usize = 864;

/// What a kernel is compiled for: form and granularity of scales, or rate and codebook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    /// Form as the kernels number it, and log2 of the rows that share a scale.
    Plain { form: u32, scale_shift: u32 },
    /// Twice the bits of a weight, and the codebook's number.
    Exl3 { half_bits: u32, codebook: u32 },
}

impl Class {
    fn plain(form: Form) -> Self {
        let (form, scale_shift) = match form {
            Form::F32 => (0, 0),
            Form::Bf16 => (1, 0),
            Form::Fp8Block32 => (2, 5),
            Form::Fp8Row32 => (2, 0),
            Form::Fp4Row32 => (3, 0),
            Form::Exl3 => unreachable!("EXL3 has a class for each layer"),
        };
        Self::Plain { form, scale_shift }
    }

    fn exl3(rate: Rate, codebook: Codebook) -> Self {
        let codebook = match codebook {
            Codebook::ThreeInst => 0,
            Codebook::Mcg => 1,
            Codebook::Mul1 => 2,
        };
        Self::Exl3 { half_bits: rate.half_bits() as u32, codebook }
    }

    /// The class of a weight of one layer.
    fn of(weight: &Weight) -> Self {
        match weight.layers() {
            [layer] => Self::exl3(layer.rate(), layer.codebook()),
            _ => Self::plain(weight.form()),
        }
    }

    /// As the tables hold it.
    pub fn code(self) -> u32 {
        match self {
            Self::Plain { form, scale_shift } => form | scale_shift << 4,
            Self::Exl3 { half_bits, codebook } => 0x8000 | half_bits << 4 | codebook,
        }
    }

    pub fn is_exl3(self) -> bool {
        matches!(self, Self::Exl3 { .. })
    }

    /// Whether the released kernels have an order of their own for it [§3.2].
    pub fn has_order(self) -> bool {
        matches!(self, Self::Plain { form: 2 | 3, .. })
    }
}

/// A sum over `tile_rows` runs of 16 inputs is split so often; `blocks` threadgroups share a split. Depends on the shape
/// alone, so that the order of the sums does.
pub(crate) fn splits(tile_rows: usize, blocks: usize) -> usize {
    BUSY.div_ceil(blocks).min(tile_rows / 16).max(1)
}

/// A weight ready for use.
pub struct Mat<D: Device> {
    pub(crate) weight: Weight,
    pub(crate) slab: Slab<D>,
    pub(crate) class: Class,
    pub(crate) exl3: Option<Trellises<D>>,
}

/// What an EXL3 weight has beside its bytes.
pub(crate) struct Trellises<D: Device> {
    /// An entry for each layer.
    pub table: D::Buffer,
    /// Inputs, padded.
    pub inputs: usize,
    plans: Mutex<HashMap<usize, Arc<Plan<D>>>>,
}

/// The blocks of 128 outputs that a product computes, for one number of groups of inputs.
pub(crate) struct Plan<D: Device> {
    /// Eight numbers a unit: layer, block, rotation, first output, columns from and to, class, tiles.
    pub units: D::Buffer,
    /// Two numbers a rotation: layer whose suh it takes, and group of inputs.
    pub rotations: D::Buffer,
    pub unit_count: usize,
    pub rotation_count: usize,
    pub classes: Vec<Class>,
    pub splits: usize,
}

impl<D: Device> Mat<D> {
    /// Prepares `weight`.
    pub(crate) fn new(device: &D, weight: &Weight) -> Result<Self, DeviceError> {
        let slab = Slab::new(device, weight.name(), &weight.parts())?;
        let layers = weight.layers();
        let exl3 = match layers.first() {
            None => None,
            Some(first) => {
                let entry = |(i, l): (usize, &Exl3)| {
                    let class = Class::exl3(l.rate(), l.codebook()).code();
                    entry(&slab.offsets[3 * i..3 * i + 3], class)
                };
                Some(Trellises {
                    table: table(device, layers.iter().enumerate().flat_map(entry).map(u64::to_le_bytes))?,
                    inputs: first.linear().in_features(),
                    plans: Mutex::default(),
                })
            }
        };
        let class = match layers.first() {
            None => Class::plain(weight.form()),
            Some(l) => Class::exl3(l.rate(), l.codebook()),
        };
        Ok(Self { weight: weight.clone(), slab, class, exl3 })
    }

    /// The weight as it is stored.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// Units and rotations of a product whose inputs lie in `groups` groups; made once.
    pub(crate) fn plan(&self, device: &D, groups: usize) -> Result<Arc<Plan<D>>, DeviceError> {
        let trellises = self.exl3.as_ref().expect("an EXL3 weight");
        let mut plans = trellises.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&groups) {
            return Ok(plan.clone());
        }
        let layers = self.weight.layers();
        let per = self.weight.rows() / groups;
        let (mut units, mut rotations): (Vec<[u32; 8]>, Vec<[u32; 2]>) = Default::default();
        let (mut classes, mut first) = (Vec::new(), 0);
        for (i, layer) in layers.iter().enumerate() {
            let class = Class::exl3(layer.rate(), layer.codebook());
            for (start, g) in (0..layer.rows()).step_by(BLOCK).flat_map(|s| (0..groups).map(move |g| (s, g)))
            {
                // The block's columns that are outputs of group `g`.
                let end = (start + BLOCK).min(layer.rows()) + first;
                let (from, to) = ((first + start).max(g * per), end.min((g + 1) * per));
                if from >= to {
                    continue;
                }
                let suh = |e: usize| layers[e].linear().suh();
                let same = |r: &[u32; 2]| r[1] as usize == g && suh(r[0] as usize) == suh(i);
                let rotation = rotations.iter().position(same).unwrap_or_else(|| {
                    rotations.push([i as u32, g as u32]);
                    rotations.len() - 1
                });
                let origin = first + start;
                let tiles = layer.linear().out_features() / 16;
                let numbers = [
                    i,
                    start / BLOCK,
                    rotation,
                    origin,
                    from - origin,
                    to - origin,
                    class.code() as usize,
                    tiles,
                ];
                units.push(numbers.map(|n| n as u32));
                classes.push(class);
            }
            first += layer.rows();
        }
        classes.sort();
        classes.dedup();
        let words = |w: &[u32; 8]| w.map(u32::to_le_bytes);
        let plan = Arc::new(Plan {
            unit_count: units.len(),
            rotation_count: rotations.len(),
            splits: splits(trellises.inputs / 16, units.len()),
            units: table(device, units.iter().flat_map(words))?,
            rotations: table(device, rotations.iter().flatten().map(|n| n.to_le_bytes()))?,
            classes,
        });
        plans.insert(groups, plan.clone());
        Ok(plan)
    }
}

/// An entry of a table of matrices.
fn entry(offsets: &[u64], class: u32) -> [u64; ENTRY] {
    let mut entry = [0; ENTRY];
    entry[..offsets.len()].copy_from_slice(offsets);
    entry[3] = class.into();
    entry
}

/// The routed experts of one layer, ready for use.
pub struct Experts<D: Device> {
    pub(crate) slab: Slab<D>,
    /// Three entries an expert: gate, up, down.
    pub(crate) table: D::Buffer,
    pub(crate) count: usize,
    /// Width of activations and results.
    pub(crate) hidden: usize,
    /// Width between the products.
    pub(crate) inter: usize,
    /// Classes of gate and up.
    pub(crate) first: Vec<Class>,
    /// Classes of down.
    pub(crate) second: Vec<Class>,
}

impl<D: Device> Experts<D> {
    /// Whether a matrix is EXL3: then routed and shared experts do not share launches.
    pub(crate) fn has_exl3(&self) -> bool {
        self.first.iter().chain(&self.second).any(|c| c.is_exl3())
    }

    /// Prepares `experts`; any mixture of forms, rates and codebooks goes together, shapes must agree.
    pub(crate) fn new(device: &D, experts: &[ExpertWeights]) -> Result<Self, DeviceError> {
        let refuse = |reason| DeviceError { backend: device.name(), reason, refused: true };
        let Some(one) = experts.first() else {
            return Err(refuse(
                "a layer without routed experts: check n_routed_experts in config.json".into(),
            ));
        };
        let (inter, hidden) = (one.gate.rows(), one.gate.cols());
        let (mut parts, mut kinds, mut counts) = (Vec::new(), Vec::new(), Vec::new());
        for e in experts {
            for (w, rows, cols) in
                [(&e.gate, inter, hidden), (&e.up, inter, hidden), (&e.down, hidden, inter)]
            {
                if (w.rows(), w.cols()) != (rows, cols) {
                    let found = format!("{} x {}", w.rows(), w.cols());
                    return Err(refuse(format!(
                        "{} is {found} where its layer has {rows} x {cols}",
                        w.name()
                    )));
                }
                if w.layers().len() > 1 {
                    let n = w.layers().len();
                    return Err(refuse(format!(
                        "{} is stored in {n} EXL3 layers; an expert has one",
                        w.name()
                    )));
                }
                kinds.push(Class::of(w));
                counts.push(w.parts().len());
                parts.extend(w.parts());
            }
        }
        let slab = Slab::new(device, one.gate.name(), &parts)?;
        let mut offsets = &slab.offsets[..];
        let mut entries = Vec::new();
        for (class, count) in kinds.iter().zip(&counts) {
            let (own, rest) = offsets.split_at(*count);
            offsets = rest;
            entries.extend(entry(own, class.code()));
        }
        let classes = |wanted: &[usize]| {
            let mut all: Vec<Class> =
                (0..kinds.len()).filter(|i| wanted.contains(&(i % 3))).map(|i| kinds[i]).collect();
            all.sort();
            all.dedup();
            all
        };
        Ok(Self {
            table: table(device, entries.into_iter().map(u64::to_le_bytes))?,
            count: experts.len(),
            hidden,
            inter,
            first: classes(&[0, 1]),
            second: classes(&[2]),
            slab,
        })
    }
}
