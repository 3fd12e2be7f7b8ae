//! Sizes of a state's parts in stored form [§6.3].

use checkpoint::{Config, Role};
use numerics::quantise::{fp4_row_bytes, fp8_row_bytes, kv_row_bytes};

/// What one sequence's state consists of; a function of the configuration alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Window rings of the backbone.
    pub layers: usize,
    /// Window rings of the draft stages.
    pub stages: usize,
    /// Positions of a window.
    pub window: usize,
    /// Bytes of a window row.
    pub ring_row: usize,
    /// Bytes of a compressed entry.
    pub kv_row: usize,
    /// Bytes of an index key.
    pub key_row: usize,
    /// Tokens per entry of each KV source, in layer order.
    pub ratios: Vec<usize>,
    /// Values of one projection of an open group.
    pub open_values: usize,
    /// Earlier tokens that an n-gram reaches.
    pub history: usize,
}

impl Layout {
    /// The layout for a configuration, with the draft stages' rings or without.
    pub fn of(c: &Config, draft: bool) -> Self {
        let sources = (0..c.num_hidden_layers).map(|l| c.layer(l)).filter(|p| p.role == Role::Full);
        Self {
            layers: c.num_hidden_layers,
            stages: if draft { c.dspark.stages } else { 0 },
            window: c.sliding_window,
            ring_row: fp8_row_bytes(c.head_dim),
            kv_row: kv_row_bytes(c.head_dim),
            key_row: fp4_row_bytes(c.index_head_dim),
            ratios: sources.map(|p| p.ratio).collect(),
            open_values: c.head_dim,
            history: c.engram.max_ngram_size - 1,
        }
    }

    /// Bytes of all compressed entries and index keys of tokens `first..first + tokens`, `first` being even.
    pub fn entry_bytes(&self, first: usize, tokens: usize) -> usize {
        let row = self.kv_row + self.key_row;
        self.ratios.iter().map(|r| ((first + tokens) / r - first / r) * row).sum()
    }

    /// Bytes of all window rows at a length of `len` tokens.
    pub fn window_bytes(&self, len: usize) -> usize {
        (self.layers + self.stages) * len.min(self.window) * self.ring_row
    }

    /// Bytes of the open groups at an odd length: value and gate projections of one token a source.
    pub fn open_bytes(&self) -> usize {
        self.ratios.iter().filter(|r| **r == 2).count() * 2 * self.open_values * size_of::<f32>()
    }

    /// Bytes of a state's groups of two [§6.3]: while a step closes a group, the projections of both its tokens are there.
    pub fn group_bytes(&self) -> usize {
        2 * self.open_bytes()
    }

    /// Bytes that a state has at `context` tokens [§6.3]: entries and index keys, windows, groups of two.
    pub fn state_bytes(&self, context: usize) -> usize {
        self.entry_bytes(0, context) + self.window_bytes(context) + self.group_bytes()
    }
}
