//! In which order a kernel holds the 256 weights of a decoded tile.

use crate::rate::TILE;
use crate::trellis::{ring_position, row_column};

/// Vectors of `lanes` weights. Vector `per * s + k` is multiplied lane by lane with an input vector (`slot`) and added to sum
/// s, each lane of which belongs to one output column.
pub(super) struct Layout {
    pub(super) lanes: usize,
    pub(super) sums: usize,
    /// Vectors per sum.
    pub(super) per: usize,
    /// Input vectors; vector v takes number v modulo `slots`.
    pub(super) slots: usize,
    /// Row of each lane of each input vector.
    pub(super) rows: Vec<u8>,
    /// For each of 16 columns, the lanes (counted through all sums) that belong to it.
    pub(super) columns: [Vec<u16>; 16],
    /// Where the decoder's n-th vector goes.
    pub(super) place: Vec<u8>,
    /// Row-major tiles whose inputs are not spread over lanes.
    pub(super) plain: bool,
}

impl Layout {
    /// From the ring position of each lane, in the order in which the decoder makes them.
    pub(super) fn new(lanes: usize, positions: &[usize]) -> Layout {
        assert_eq!(positions.len(), TILE);
        let vectors: Vec<&[usize]> = positions.chunks(lanes).collect();
        let of = |v: usize| -> (Vec<usize>, Vec<usize>) { vectors[v].iter().map(|i| row_column(*i)).unzip() };
        let mut sums: Vec<Vec<usize>> = vec![];
        let mut sum: Vec<usize> = (0..vectors.len()).map(|v| index_of(&mut sums, of(v).1)).collect();
        let per = vectors.len() / sums.len();
        if !(0..sums.len()).all(|s| sum.iter().filter(|t| **t == s).count() == per) {
            // Uneven: every vector gets a sum of its own.
            sums = (0..vectors.len()).map(|v| of(v).1).collect();
            sum = (0..vectors.len()).collect();
        }
        let mut order: Vec<usize> = (0..vectors.len()).collect();
        order.sort_by_key(|v| sum[*v]);
        let mut place = vec![0; vectors.len()];
        let mut slots: Vec<Vec<usize>> = vec![];
        let slot: Vec<usize> = order.iter().map(|v| index_of(&mut slots, of(*v).0)).collect();
        for (at, v) in order.iter().enumerate() {
            place[*v] = at as u8;
            assert_eq!(slot[at], at % slots.len(), "input vectors take turns");
        }
        let columns = std::array::from_fn(|c| {
            let lanes = sums.iter().flatten().enumerate();
            lanes.filter(|(_, column)| **column == c).map(|(lane, _)| lane as u16).collect()
        });
        Layout {
            lanes,
            sums: sums.len(),
            per: vectors.len() / sums.len(),
            slots: slots.len(),
            rows: slots.into_iter().flatten().map(|r| r as u8).collect(),
            columns,
            place,
            plain: false,
        }
    }

    /// Row-major: vectors are rows, one sum holds the sixteen columns.
    pub(super) fn row_major() -> Layout {
        let positions: Vec<usize> = (0..TILE).map(|i| ring_position(i / 16, i % 16)).collect();
        Layout { plain: true, rows: (0..16).collect(), ..Layout::new(16, &positions) }
    }

    /// Floats of one decoded row of 16 inputs, for one row of the batch.
    pub(super) fn input_width(&self) -> usize {
        if self.plain { 16 } else { self.slots * self.lanes }
    }

    /// Floats of all sums.
    pub(super) fn sums_width(&self) -> usize {
        self.sums * self.lanes
    }
}

fn index_of(list: &mut Vec<Vec<usize>>, item: Vec<usize>) -> usize {
    list.iter().position(|i| *i == item).unwrap_or_else(|| {
        list.push(item);
        list.len() - 1
    })
}
