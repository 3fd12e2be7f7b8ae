//! In which order a kernel holds the 256 weights of a decoded tile.

use crate::rate::TILE;
use crate::trellis::{ring_position, row_column};

/// Vectors of `lanes` weights, each with sums of its own: one sum per element of a tile, over all tiles of a column. The
/// order of additions is then the same for every layout, so every instruction set gives the same bits.
pub(super) struct Layout {
    pub(super) lanes: usize,
    /// Input vectors; vector v is multiplied lane by lane with number v modulo this.
    pub(super) slots: usize,
    /// Row of each lane of each input vector.
    pub(super) rows: Vec<u8>,
    /// Lane (counted through all vectors) of each element, row by row.
    pub(super) lane: [u8; TILE],
    /// Where the decoder's n-th vector goes.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // portable code has no vectors
    pub(super) place: Vec<u8>,
    /// Row-major tiles whose inputs are not spread over lanes.
    pub(super) plain: bool,
}

impl Layout {
    /// From the ring position of each lane, in the order in which the decoder makes them.
    pub(super) fn new(lanes: usize, positions: &[usize]) -> Layout {
        assert_eq!(positions.len(), TILE);
        let vectors: Vec<&[usize]> = positions.chunks(lanes).collect();
        let mut slots: Vec<Vec<usize>> = vec![];
        let slot: Vec<usize> = vectors
            .iter()
            .map(|v| index_of(&mut slots, v.iter().map(|i| row_column(*i).0).collect()))
            .collect();
        let mut seen = vec![0; slots.len()];
        let place: Vec<u8> = slot
            .iter()
            .map(|s| {
                seen[*s] += 1;
                ((seen[*s] - 1) * slots.len() + s) as u8
            })
            .collect();
        assert!(seen.iter().all(|n| *n == seen[0]), "input vectors take turns");
        let mut lane = [0; TILE];
        for (at, vector) in place.iter().zip(&vectors) {
            for (l, i) in vector.iter().enumerate() {
                let (row, column) = row_column(*i);
                lane[16 * row + column] = (usize::from(*at) * lanes + l) as u8;
            }
        }
        Layout {
            lanes,
            slots: slots.len(),
            rows: slots.into_iter().flatten().map(|r| r as u8).collect(),
            lane,
            place,
            plain: false,
        }
    }

    /// Row-major: vectors are rows.
    pub(super) fn row_major() -> Layout {
        let positions: Vec<usize> = (0..TILE).map(|i| ring_position(i / 16, i % 16)).collect();
        Layout { plain: true, rows: (0..16).collect(), ..Layout::new(16, &positions) }
    }

    /// Floats of one decoded row of 16 inputs, for one row of the batch.
    pub(super) fn input_width(&self) -> usize {
        if self.plain { 16 } else { self.slots * self.lanes }
    }

    /// The sums of the sixteen columns: their rows' added in one order.
    pub(super) fn columns(&self, sums: &[f32; TILE]) -> [f32; 16] {
        let at = |i: usize| sums[usize::from(self.lane[i])];
        let eight: [f32; 128] = std::array::from_fn(|i| at(i) + at(128 + i));
        let four: [f32; 64] = std::array::from_fn(|i| eight[i] + eight[64 + i]);
        let two: [f32; 32] = std::array::from_fn(|i| four[i] + four[32 + i]);
        std::array::from_fn(|c| two[c] + two[16 + c])
    }
}

fn index_of(list: &mut Vec<Vec<usize>>, item: Vec<usize>) -> usize {
    list.iter().position(|i| *i == item).unwrap_or_else(|| {
        list.push(item);
        list.len() - 1
    })
}
