//! Tiles, rings and the packed bit stream (EXL3 specification, sections 1 to 3).

use crate::rate::TILE;
use crate::{Error, Rate};

/// Row and column, inside its 16x16 tile, of ring position `i` (0..256). Row is the input side.
pub const fn row_column(i: usize) -> (usize, usize) {
    let (t, j) = (i >> 3, i & 7);
    (2 * (t & 3) + (j & 1) + 8 * ((j >> 1) & 1), (t >> 2) + 8 * ((j >> 2) & 1))
}

/// Ring position of element (`row`, `column`) of a tile.
pub const fn ring_position(row: usize, column: usize) -> usize {
    8 * ((row & 7) / 2 + 4 * (column & 7)) + (row & 1) + 2 * (row >> 3) + 4 * (column >> 3)
}

/// Unpacks one tile of [`Rate::tile_bytes`] bytes into its 256 states.
///
/// # Panics
/// If `bytes` has another length.
pub fn unpack(rate: Rate, bytes: &[u8]) -> [u16; TILE] {
    assert_eq!(bytes.len(), rate.tile_bytes(), "bytes of one tile");
    // The ring is closed: position 0 takes its upper bits from the end of the stream.
    let mut ring = [0u32; 2 + 64];
    let count = rate.words();
    for (word, bytes) in ring[1..].iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    ring[0] = ring[count];
    std::array::from_fn(|i| {
        let start = rate.end(i) + 16; // 16 bits before its end, one word further on
        let pair = u64::from(ring[start / 32]) << 32 | u64::from(ring[start / 32 + 1]);
        ((pair << (start % 32)) >> 48) as u16
    })
}

/// Packs the low bits of 256 states into [`Rate::tile_bytes`] bytes, the inverse of [`unpack`] for a closed ring.
///
/// # Panics
/// If `out` has another length.
pub fn pack(rate: Rate, states: &[u16; TILE], out: &mut [u8]) {
    assert_eq!(out.len(), rate.tile_bytes(), "bytes of one tile");
    let mut held = 0u64;
    let mut bits = 0;
    let mut words = out.as_chunks_mut::<4>().0.iter_mut();
    for (i, state) in states.iter().enumerate() {
        let new = rate.new_bits(i);
        held = held << new | u64::from(*state) & ((1 << new) - 1);
        bits += new;
        if bits >= 32 {
            bits -= 32;
            if let Some(word) = words.next() {
                *word = ((held >> bits) as u32).to_le_bytes();
            }
        }
    }
}

/// True if `states` is one closed ring: each state continues the one before it, the first the last.
pub fn is_closed(rate: Rate, states: &[u16; TILE]) -> bool {
    (0..TILE).all(|i| {
        let new = rate.new_bits(i);
        let before = u32::from(states[(i + TILE - 1) % TILE]);
        u32::from(states[i]) >> new == (before << new & 0xFFFF) >> new
    })
}

/// The packed weights of one linear layer: (in/16) x (out/16) tiles, checked against its shape.
#[derive(Clone, Copy, Debug)]
pub struct Trellis<'a> {
    bytes: &'a [u8],
    rate: Rate,
    in_tiles: usize,
    out_tiles: usize,
}

impl<'a> Trellis<'a> {
    /// `bytes` of the int16 tensor `name` with `shape` (in/16, out/16, 16 * bits), little-endian, at any alignment.
    pub fn new(name: &str, shape: &[usize], bytes: &'a [u8]) -> Result<Trellis<'a>, Error> {
        let wrong = |expected: &str| Error::Shape {
            tensor: name.into(),
            found: shape.to_vec(),
            expected: expected.into(),
        };
        let &[in_tiles, out_tiles, last] = shape else {
            return Err(wrong("(in/16, out/16, 16 x bits)"));
        };
        let rate = Rate::from_last_dimension(last)
            .ok_or_else(|| Error::LastDimension { tensor: name.into(), last })?;
        if in_tiles == 0 || out_tiles == 0 || in_tiles % 8 != 0 || out_tiles % 8 != 0 {
            return Err(wrong("multiples of 8 tiles (128 features) both ways"));
        }
        let expected = in_tiles
            .checked_mul(out_tiles)
            .and_then(|tiles| tiles.checked_mul(rate.tile_bytes()))
            .filter(|bytes| *bytes <= isize::MAX as usize)
            .ok_or_else(|| wrong("a size that fits the address space"))?;
        if bytes.len() != expected {
            return Err(Error::Bytes { tensor: name.into(), found: bytes.len(), expected });
        }
        Ok(Trellis { bytes, rate, in_tiles, out_tiles })
    }

    /// As [`Trellis::new`], from the words in memory.
    #[cfg(target_endian = "little")]
    pub fn from_words(name: &str, shape: &[usize], words: &'a [u16]) -> Result<Trellis<'a>, Error> {
        Self::new(name, shape, bytemuck::cast_slice(words))
    }

    /// Bits per weight.
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Input features (multiple of 128).
    pub fn in_features(&self) -> usize {
        16 * self.in_tiles
    }

    /// Output features (multiple of 128).
    pub fn out_features(&self) -> usize {
        16 * self.out_tiles
    }

    /// All bytes, tile after tile, output side fastest.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Packed bytes of tile (`a`, `b`): input rows from 16a, output columns from 16b.
    ///
    /// # Panics
    /// If there is no such tile.
    pub fn tile(&self, a: usize, b: usize) -> &'a [u8] {
        assert!(a < self.in_tiles && b < self.out_tiles, "tile ({a}, {b})");
        let size = self.rate.tile_bytes();
        &self.bytes[(a * self.out_tiles + b) * size..][..size]
    }

    /// The 256 states of tile (`a`, `b`) in ring order.
    ///
    /// # Panics
    /// If there is no such tile.
    pub fn states(&self, a: usize, b: usize) -> [u16; TILE] {
        unpack(self.rate, self.tile(a, b))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_order_is_a_permutation() {
        let mut seen = [false; TILE];
        for i in 0..TILE {
            let (row, column) = row_column(i);
            assert_eq!(ring_position(row, column), i);
            assert!(!std::mem::replace(&mut seen[16 * row + column], true));
        }
        assert_eq!((row_column(7), row_column(8), row_column(32)), ((9, 8), (2, 0), (0, 1)));
    }

    #[test]
    fn every_bit_string_is_a_closed_ring() {
        for rate in Rate::ALL {
            let bytes: Vec<u8> = (0..rate.tile_bytes()).map(|i| (i * 151 + i * i * 7 + 3) as u8).collect();
            let states = unpack(rate, &bytes);
            assert!(is_closed(rate, &states), "{rate}");
            let mut again = vec![0; bytes.len()];
            pack(rate, &states, &mut again);
            assert_eq!(again, bytes, "{rate}");
            let mut open = states;
            open[100] ^= 0x8000;
            assert!(!is_closed(rate, &open), "{rate}");
        }
    }
}
