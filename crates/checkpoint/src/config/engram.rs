//! The Engram hash: bucket primes and multipliers [spec 2.9].

use super::{Config, pcg64::Pcg64};

/// Rows of the tables that `layers` Engram layers of `columns` hash columns have, when their primes start at
/// `vocab_size`.
pub fn engram_rows(vocab_size: u64, layers: usize, columns: usize) -> Vec<u64> {
    let mut primes = (vocab_size..).filter(|n| is_prime(*n));
    (0..layers).map(|_| primes.by_ref().take(columns).sum()).collect()
}

impl Config {
    /// Hash columns of one layer: heads times n-gram lengths.
    pub fn engram_columns(&self) -> usize {
        self.engram.n_heads * (self.engram.max_ngram_size - 1)
    }

    /// The prime moduli of Engram layer number `k` (a place in the lists), one per hash column: all n-gram lengths in
    /// ascending order, heads within. They are consecutive primes from `engram_vocab_size` on; no layer uses another's.
    pub fn engram_primes(&self, k: usize) -> Vec<u64> {
        self.all_engram_primes().swap_remove(k)
    }

    pub(super) fn all_engram_primes(&self) -> Vec<Vec<u64>> {
        let mut next = self.engram.vocab_size as u64..;
        let layers = self.engram.layer_ids.len();
        (0..layers)
            .map(|_| next.by_ref().filter(|n| is_prime(*n)).take(self.engram_columns()).collect())
            .collect()
    }

    /// The odd multipliers of Engram layer number `k`, one per shift `0..max_ngram_size`. Products with compressed ids
    /// stay below 2^63.
    pub fn engram_multipliers(&self, k: usize) -> Vec<i64> {
        let bound = (i64::MAX as u64) / self.engram.compressed_vocab_size as u64 / 2;
        let mut rng = Pcg64::new(10_007 * self.engram.layer_ids[k] as u64);
        (0..self.engram.max_ngram_size).map(|_| 2 * rng.below(bound) as i64 + 1).collect()
    }
}

fn is_prime(n: u64) -> bool {
    n == 2
        || (n > 2
            && !n.is_multiple_of(2)
            && (3..).step_by(2).take_while(|d| d * d <= n).all(|d| !n.is_multiple_of(d)))
}
