//! From a float matrix to EXL3 tensors (EXL3 specification, sections 7 to 10).
//!
//! Work runs on the rayon pool of the caller. The bytes depend on the input, the seed and the settings only: not on the
//! number of threads or the machine.

mod calibration;
mod ldlq;
mod matrix;
mod refit;
mod regularize;
mod search;
#[cfg(test)]
mod tests;

pub use calibration::{Calibration, signs};
pub use search::{Scratch, Search, SearchCosts};

use crate::{BLOCK, Codebook, Error, Linear, Rate, Trellis, reference};
use half::f16;

/// Settings of the encoder.
#[derive(Clone, Debug)]
pub struct Encoder {
    /// Bits per weight.
    pub rate: Rate,
    /// Codebook; half rates need MUL1.
    pub codebook: Codebook,
    /// Arithmetic of the trellis search.
    pub costs: SearchCosts,
    /// Positions on each side of the ring's seam that the search looks at first; see [`Search::new`].
    pub context: usize,
    /// Whether output channels get scales of their own before quantisation.
    pub output_scales: bool,
    /// Scale of the rotated matrix before the search; None: searched for on sample tiles.
    pub global_scale: Option<f64>,
    /// Rounds of the scale refit.
    pub refit_rounds: usize,
}

/// One encoded matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Encoded {
    /// Bits per weight.
    pub rate: Rate,
    /// Codebook.
    pub codebook: Codebook,
    /// Input features.
    pub in_features: usize,
    /// Output features.
    pub out_features: usize,
    /// Data of the `trellis` tensor: int16 (in/16, out/16, 16 x bits).
    pub trellis: Vec<u8>,
    /// Data of `suh`: fp16 (in,).
    pub suh: Vec<u8>,
    /// Data of `svh`: fp16 (out,).
    pub svh: Vec<u8>,
    /// tr((W - Q)^T H (W - Q)) / tr(W^T H W), scales as stored; with H = I when there was no Hessian.
    pub proxy_error: f64,
    /// The scale found for the whole matrix (already part of `suh`).
    pub global_scale: f64,
}

impl Encoded {
    /// Shape of the `trellis` tensor.
    pub fn trellis_shape(&self) -> [usize; 3] {
        [self.in_features / 16, self.out_features / 16, self.rate.words16()]
    }

    /// The layer as a reader sees it.
    pub fn linear(&self) -> Result<Linear<'_>, Error> {
        let trellis = Trellis::new("encoded.trellis", &self.trellis_shape(), &self.trellis)?;
        Linear::new("encoded", trellis, &self.suh, &self.svh, self.codebook)
    }
}

impl Encoder {
    /// The settings of exllamav3's default conversion, with float32 search costs.
    pub fn new(rate: Rate, codebook: Codebook) -> Encoder {
        Encoder {
            rate,
            codebook,
            costs: SearchCosts::Single,
            context: 128,
            output_scales: true,
            global_scale: None,
            refit_rounds: 2,
        }
    }

    /// The trellis search with these settings.
    pub fn search(&self) -> Search {
        Search::new(self.rate, self.codebook, self.costs, self.context)
    }

    /// Encodes `w` (in, out), row-major: the transpose of a torch weight. in is `calibration`'s, out is the number of
    /// `out_signs` (+1 or -1, see [`signs`]); both multiples of 128, padded with zeros where needed.
    pub fn encode(&self, w: &[f32], calibration: &Calibration, out_signs: &[f32]) -> Result<Encoded, Error> {
        let (rows, columns) = (calibration.in_features(), out_signs.len());
        if columns == 0 || !columns.is_multiple_of(BLOCK) {
            return Err(Error::NotPadded { what: "output features", found: columns });
        }
        if Some(w.len()) != rows.checked_mul(columns) {
            return Err(Error::Length {
                what: "weights",
                found: w.len(),
                expected: rows.saturating_mul(columns),
            });
        }
        if self.rate.is_half() && self.codebook != Codebook::Mul1 {
            return Err(Error::HalfRate {
                tensor: "encoder".into(),
                bits: self.rate.to_string(),
                codebook: self.codebook.name(),
            });
        }
        if let Some(index) = w.iter().position(|v| !v.is_finite()) {
            return Err(Error::NotFinite { tensor: "weights".into(), index });
        }
        let regular = regularize::regularize(self, w, calibration, out_signs);
        let factor = calibration.hessian.as_ref().map(|h| &h.factor);
        let trellis = ldlq::quantize(self, &regular.weight, columns, factor);
        let mut encoded = Encoded {
            rate: self.rate,
            codebook: self.codebook,
            in_features: rows,
            out_features: columns,
            trellis,
            suh: vec![0; 2 * rows],
            svh: vec![0; 2 * columns],
            proxy_error: 0.0,
            global_scale: regular.global_scale,
        };
        let (mut su, mut sv) = (regular.su, regular.sv);
        drop(regular.weight);
        let inner = reference::inner(&encoded.linear()?);
        let refit = refit::Refit::new(w, columns, calibration, inner);
        for _ in 0..self.refit_rounds {
            refit.round(&mut su, &mut sv);
        }
        let su: Vec<f16> = su.into_iter().map(f16::from_f32).collect();
        let stored = |(s, zero): (f32, &bool)| if *zero { f16::ZERO } else { f16::from_f32(s) };
        let sv: Vec<f16> = sv.into_iter().zip(&regular.zero).map(stored).collect();
        for (what, scales) in [("suh", &su), ("svh", &sv)] {
            if scales.iter().any(|s| !s.is_finite()) {
                return Err(Error::ScaleRange { what });
            }
        }
        encoded.proxy_error = refit.proxy_error(&su, &sv);
        encoded.suh = su.iter().flat_map(|v| v.to_le_bytes()).collect();
        encoded.svh = sv.iter().flat_map(|v| v.to_le_bytes()).collect();
        Ok(encoded)
    }
}
