//! The three codebooks: 16-bit state to fp16 value (EXL3 specification, section 4).

use half::f16;
use std::sync::LazyLock;

/// Entries of a codebook.
pub const STATES: usize = 1 << 16;

/// How a 16-bit state becomes a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codebook {
    /// No marker: the oldest checkpoints.
    ThreeInst,
    /// Marker `mcg`.
    Mcg,
    /// Marker `mul1`: the present default of exllamav3.
    Mul1,
}

impl Codebook {
    /// All codebooks.
    pub const ALL: [Codebook; 3] = [Codebook::ThreeInst, Codebook::Mcg, Codebook::Mul1];

    /// Name as written in `quantization_config.codebook`.
    pub fn name(self) -> &'static str {
        match self {
            Codebook::ThreeInst => "3inst",
            Codebook::Mcg => "mcg",
            Codebook::Mul1 => "mul1",
        }
    }

    /// The codebook called `name` in `quantization_config.codebook`.
    pub fn from_name(name: &str) -> Option<Codebook> {
        Self::ALL.into_iter().find(|c| c.name() == name)
    }

    /// The multiplier, which is also the value of the marker tensor.
    pub const fn multiplier(self) -> u32 {
        match self {
            Codebook::ThreeInst => 89_226_354,
            Codebook::Mcg => 0xCBAC_1FED,
            Codebook::Mul1 => 0x83DC_D12D,
        }
    }

    /// What is added after the multiplication.
    pub const fn increment(self) -> u32 {
        match self {
            Codebook::ThreeInst => 64_248_484,
            _ => 0,
        }
    }

    /// Value of `state`, rounded to fp16 as the format defines it.
    pub fn value(self, state: u16) -> f16 {
        let x = u32::from(state).wrapping_mul(self.multiplier()).wrapping_add(self.increment());
        match self {
            Codebook::Mul1 => {
                let sum: u32 = x.to_le_bytes().into_iter().map(u32::from).sum();
                // 1024 slopes are exact, so the fused multiply-add over 1024 + sum reduces to this; exact in f32.
                f16::from_f32(MUL1_SLOPE * sum as f32 + MUL1_OFFSET)
            }
            _ => {
                let x = (x & 0x8FFF_8FFF) ^ 0x3B60_3B60;
                // The sum of two such fp16 numbers is exact in f32; one rounding remains.
                f16::from_f32(f16::from_bits(x as u16).to_f32() + f16::from_bits((x >> 16) as u16).to_f32())
            }
        }
    }

    /// All 65,536 values, widened to f32.
    pub fn table(self) -> &'static [f32; STATES] {
        static TABLES: [LazyLock<Box<Table<f32>>>; 3] = [
            LazyLock::new(|| Table::build(Codebook::ThreeInst, f16::to_f32)),
            LazyLock::new(|| Table::build(Codebook::Mcg, f16::to_f32)),
            LazyLock::new(|| Table::build(Codebook::Mul1, f16::to_f32)),
        ];
        &TABLES[self as usize].0
    }
}

/// fp16 0x1EEE.
pub(crate) const MUL1_SLOPE: f32 = 887.0 / 131_072.0;
/// fp16 0xC931 plus 1024 slopes.
pub(crate) const MUL1_OFFSET: f32 = -3.453_125;

/// Every state's value, on cache lines of its own.
#[repr(align(64))]
pub(crate) struct Table<T>(pub(crate) [T; STATES]);

impl<T: Copy + Default> Table<T> {
    pub(crate) fn build(codebook: Codebook, convert: fn(f16) -> T) -> Box<Self> {
        let mut table = Box::new(Table([T::default(); STATES]));
        for (state, value) in table.0.iter_mut().enumerate() {
            *value = convert(codebook.value(state as u16));
        }
        table
    }
}
