//! Byte-pair merging inside one piece: lowest rank first, leftmost on ties.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rustc_hash::FxHashMap;

pub(super) struct Bpe {
    /// Id of each single byte.
    bytes: [u32; 256],
    /// Pair of ids to rank and merged id.
    merges: FxHashMap<(u32, u32), (u32, u32)>,
}

/// Buffers that one call of `encode` reuses for all its pieces.
#[derive(Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    /// Rank, position, and the pair as it was when queued: an entry whose pair has changed is stale.
    queue: BinaryHeap<Reverse<(u32, u32, u32, u32)>>,
}

struct Symbol {
    id: u32,
    prev: u32,
    next: u32,
}

const NONE: u32 = u32::MAX;

impl Bpe {
    pub fn new(bytes: [u32; 256], merges: FxHashMap<(u32, u32), (u32, u32)>) -> Self {
        Self { bytes, merges }
    }

    /// Appends the ids of `piece`. The piece must be shorter than 4 GiB.
    pub fn encode(&self, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let Scratch { symbols, queue } = scratch;
        symbols.clear();
        queue.clear();
        let n = piece.len() as u32;
        symbols.extend(piece.iter().zip(0u32..).map(|(&byte, i)| Symbol {
            id: self.bytes[byte as usize],
            prev: i.wrapping_sub(1),
            next: if i + 1 < n { i + 1 } else { NONE },
        }));
        for i in 1..symbols.len() {
            self.enqueue(symbols, i as u32 - 1, queue);
        }
        while let Some(Reverse((_, left, left_id, right_id))) = queue.pop() {
            let (id, right) = (symbols[left as usize].id, symbols[left as usize].next);
            if id != left_id || right == NONE || symbols[right as usize].id != right_id {
                continue;
            }
            let merged = self.merges[&(left_id, right_id)].1;
            let next = symbols[right as usize].next;
            // An id that no pair has marks the absorbed symbol, so its queued pairs read as stale.
            symbols[right as usize].id = NONE;
            symbols[left as usize].id = merged;
            symbols[left as usize].next = next;
            if next != NONE {
                symbols[next as usize].prev = left;
                self.enqueue(symbols, left, queue);
            }
            let prev = symbols[left as usize].prev;
            if prev != NONE {
                self.enqueue(symbols, prev, queue);
            }
        }
        ids.extend(symbols.iter().map(|s| s.id).filter(|&id| id != NONE));
    }

    fn enqueue(&self, symbols: &[Symbol], left: u32, queue: &mut BinaryHeap<Reverse<(u32, u32, u32, u32)>>) {
        let symbol = &symbols[left as usize];
        if symbol.next == NONE {
            return;
        }
        let pair = (symbol.id, symbols[symbol.next as usize].id);
        if let Some(&(rank, _)) = self.merges.get(&pair) {
            queue.push(Reverse((rank, left, pair.0, pair.1)));
        }
    }
}
