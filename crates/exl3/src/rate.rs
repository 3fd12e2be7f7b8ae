//! Bits per weight of a trellis (EXL3 specification, sections 1 and 3).

use crate::Error;
use std::fmt;

/// Weights in one tile.
pub const TILE: usize = 256;

/// Bits per weight: 1 to 8, or 1.5, 2.5, 3.5.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rate(u8); // twice the bits

impl Rate {
    /// Every rate of the format, ascending.
    pub const ALL: [Rate; 11] = [
        Rate(2),
        Rate(3),
        Rate(4),
        Rate(5),
        Rate(6),
        Rate(7),
        Rate(8),
        Rate(10),
        Rate(12),
        Rate(14),
        Rate(16),
    ];

    /// The rate whose trellis has `last` int16 words per tile: `16 * bits`.
    pub fn from_last_dimension(last: usize) -> Option<Rate> {
        Self::ALL.into_iter().find(|r| r.words16() == last)
    }

    /// The rate of exactly `bits` bits per weight.
    pub fn from_bits(bits: f64) -> Result<Rate, Error> {
        let rate = Self::ALL.into_iter().find(|r| r.bits() == bits);
        rate.ok_or_else(|| Error::NoSuchRate { bits: bits.to_string() })
    }

    /// Bits per weight.
    pub fn bits(self) -> f64 {
        f64::from(self.0) / 2.0
    }

    /// Twice the bits per weight.
    pub const fn half_bits(self) -> usize {
        self.0 as usize
    }

    /// True for 1.5, 2.5 and 3.5.
    pub fn is_half(self) -> bool {
        self.0 % 2 == 1
    }

    /// Bits that ring position `i` adds to the stream.
    pub const fn new_bits(self, i: usize) -> usize {
        (self.0 as usize + (i & 1)) / 2
    }

    /// Stream bits up to and including position `i`.
    pub const fn end(self, i: usize) -> usize {
        ((i + 1) * self.0 as usize) / 2
    }

    /// 32-bit words of one tile.
    pub const fn words(self) -> usize {
        4 * self.0 as usize
    }

    /// 16-bit words of one tile: the last dimension of the stored tensor.
    pub const fn words16(self) -> usize {
        8 * self.0 as usize
    }

    /// Bytes of one tile.
    pub const fn tile_bytes(self) -> usize {
        16 * self.0 as usize
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bits())
    }
}

impl fmt::Debug for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rate({})", self.bits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_the_running_sum_of_new_bits() {
        for rate in Rate::ALL {
            let mut sum = 0;
            for i in 0..TILE {
                sum += rate.new_bits(i);
                assert_eq!(rate.end(i), sum, "{rate} at {i}");
            }
            assert_eq!(sum, 32 * rate.words());
            assert_eq!(Rate::from_last_dimension(rate.words16()), Some(rate));
            assert_eq!(Rate::from_bits(rate.bits()), Ok(rate));
        }
        assert_eq!(Rate::from_last_dimension(0), None);
        assert_eq!(Rate::from_last_dimension(72), None);
        assert!(Rate::from_bits(4.5).is_err());
    }
}
