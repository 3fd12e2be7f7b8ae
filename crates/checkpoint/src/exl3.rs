//! EXL3 layers inside a weight.

use exl3::{Codebook, Linear, Rate, Trellis};

use crate::Bytes;

/// One EXL3 layer as stored: some output rows of a weight [EXL3 specification, section 1]. Rate and codebook are its
/// own. The stored sizes are padded to multiples of 128: inputs beyond `cols` are zero, outputs beyond `rows` are
/// dropped.
#[derive(Clone, Debug)]
pub struct Exl3 {
    rows: usize,
    cols: usize,
    shape: [usize; 3],
    rate: Rate,
    codebook: Codebook,
    trellis: Bytes,
    suh: Bytes,
    svh: Bytes,
}

impl Exl3 {
    /// A layer of `rows` outputs and `cols` inputs from its tensors; `shape` is the trellis's. `Err` names what does
    /// not fit.
    pub fn new(
        name: &str,
        rows: usize,
        cols: usize,
        shape: [usize; 3],
        codebook: Codebook,
        trellis: Bytes,
        suh: Bytes,
        svh: Bytes,
    ) -> Result<Self, exl3::Error> {
        let packed = Trellis::new(&format!("{name}.trellis"), &shape, &trellis)?;
        let padded = |n: usize| n.max(1).next_multiple_of(exl3::BLOCK);
        if (packed.in_features(), packed.out_features()) != (padded(cols), padded(rows)) {
            let [i, o, last] = [padded(cols) / 16, padded(rows) / 16, shape[2]];
            let expected = format!("[{i}, {o}, {last}] for {cols} inputs and {rows} outputs");
            return Err(exl3::Error::Shape {
                tensor: format!("{name}.trellis"),
                found: shape.to_vec(),
                expected,
            });
        }
        let rate = packed.rate();
        Linear::new(name, packed, &suh, &svh, codebook)?;
        Ok(Self { rows, cols, shape, rate, codebook, trellis, suh, svh })
    }

    /// Output features, without padding.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features, without padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bits per weight.
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// The codebook.
    pub fn codebook(&self) -> Codebook {
        self.codebook
    }

    /// The layer in its padded sizes.
    pub fn linear(&self) -> Linear<'_> {
        let trellis = Trellis::new("trellis", &self.shape, &self.trellis);
        trellis
            .and_then(|t| Linear::new("layer", t, &self.suh, &self.svh, self.codebook))
            .expect("checked when it was made")
    }

    /// Trellis, suh and svh as stored.
    pub fn parts(&self) -> [&Bytes; 3] {
        [&self.trellis, &self.suh, &self.svh]
    }

    /// Stored bytes.
    pub fn stored_bytes(&self) -> u64 {
        (self.trellis.len() + self.suh.len() + self.svh.len()) as u64
    }

    /// The outputs `first..first + count` as a layer of their own, copied together; both are multiples of 128.
    pub(crate) fn columns(&self, first: usize, count: usize) -> Self {
        let whole = first.is_multiple_of(exl3::BLOCK) && count.is_multiple_of(exl3::BLOCK);
        assert!(whole && first + count <= self.rows, "outputs {first}+{count} of {}", self.rows);
        let tile = self.rate.tile_bytes();
        let band = self.shape[1] * tile;
        let (from, to) = (first / 16 * tile, (first + count) / 16 * tile);
        let tiles: Vec<u8> =
            self.trellis.chunks_exact(band).flat_map(|row| &row[from..to]).copied().collect();
        Self {
            rows: count,
            shape: [self.shape[0], count / 16, self.shape[2]],
            trellis: Bytes::copied(&tiles),
            suh: self.suh.clone(),
            svh: Bytes::copied(&self.svh[2 * first..2 * (first + count)]),
            ..*self
        }
    }

    /// Decodes output rows `first..first + out.len() / cols` exactly into `out`; `first` is a multiple of 128, and the
    /// count too unless it ends at the last row.
    pub(crate) fn decode_rows(&self, first: usize, out: &mut [f32]) {
        let linear = self.linear();
        for (band, out) in out.chunks_mut(exl3::BLOCK * self.cols).enumerate() {
            let w = exl3::reference::weight_band(&linear, first / exl3::BLOCK + band);
            for (r, row) in out.chunks_exact_mut(self.cols).enumerate() {
                for (k, v) in row.iter_mut().enumerate() {
                    *v = w[k * exl3::BLOCK + r];
                }
            }
        }
    }
}
