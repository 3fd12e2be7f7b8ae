//! One quantised linear layer as stored in a checkpoint (EXL3 specification, section 1).

use crate::hadamard::widen;
use crate::{Codebook, Error, Trellis};

/// A tensor as a safetensors header describes it: description borrowed for `'s`, data for `'a`.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'s, 'a> {
    /// Element type as safetensors writes it: `I16`, `I32`, `F16`, ..
    pub dtype: &'s str,
    /// Shape.
    pub shape: &'s [usize],
    /// Little-endian bytes.
    pub bytes: &'a [u8],
}

/// The tensors found under one layer's name, before any check.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts<'s, 'a> {
    /// `NAME.trellis`.
    pub trellis: Option<Tensor<'s, 'a>>,
    /// `NAME.suh`.
    pub suh: Option<Tensor<'s, 'a>>,
    /// `NAME.svh`.
    pub svh: Option<Tensor<'s, 'a>>,
    /// `NAME.su`, of early files only.
    pub su: Option<Tensor<'s, 'a>>,
    /// `NAME.sv`, of early files only.
    pub sv: Option<Tensor<'s, 'a>>,
    /// `NAME.mcg`.
    pub mcg: Option<Tensor<'s, 'a>>,
    /// `NAME.mul1`.
    pub mul1: Option<Tensor<'s, 'a>>,
}

/// y = x W with W = diag(suh) P What P diag(svh), What decoded from the trellis.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    trellis: Trellis<'a>,
    suh: &'a [u8],
    svh: &'a [u8],
    codebook: Codebook,
}

impl<'a> Linear<'a> {
    /// Puts a layer together from checked parts; `name` is used in errors. `suh` and `svh` are fp16, little-endian.
    pub fn new(
        name: &str,
        trellis: Trellis<'a>,
        suh: &'a [u8],
        svh: &'a [u8],
        codebook: Codebook,
    ) -> Result<Linear<'a>, Error> {
        for (field, bytes, features) in
            [("suh", suh, trellis.in_features()), ("svh", svh, trellis.out_features())]
        {
            if bytes.len() != 2 * features {
                return Err(Error::Bytes {
                    tensor: format!("{name}.{field}"),
                    found: bytes.len(),
                    expected: 2 * features,
                });
            }
        }
        if trellis.rate().is_half() && codebook != Codebook::Mul1 {
            return Err(Error::HalfRate {
                tensor: name.into(),
                bits: trellis.rate().to_string(),
                codebook: codebook.name(),
            });
        }
        Ok(Linear { trellis, suh, svh, codebook })
    }

    /// Checks everything that the checkpoint says about layer `name`: presence, element types, shapes, sizes, markers.
    pub fn from_parts<'s>(name: &str, parts: &Parts<'s, 'a>) -> Result<Linear<'a>, Error> {
        for (field, tensor) in [("su", parts.su), ("sv", parts.sv)] {
            if tensor.is_some() {
                return Err(Error::Legacy { tensor: format!("{name}.{field}") });
            }
        }
        let need = |field: &str, tensor: Option<Tensor<'s, 'a>>, dtype: &'static str| {
            let full = format!("{name}.{field}");
            let tensor = tensor.ok_or_else(|| Error::Missing { tensor: full.clone() })?;
            check_type(&full, &tensor, dtype)?;
            Ok((full, tensor))
        };
        let (full, t) = need("trellis", parts.trellis, "I16")?;
        let trellis = Trellis::new(&full, t.shape, t.bytes)?;
        let vector = |field: &str, tensor: Option<Tensor<'s, 'a>>, features: usize| {
            let (full, tensor) = need(field, tensor, "F16")?;
            if tensor.shape != [features] {
                let expected = format!("[{features}], as its trellis says");
                return Err(Error::Shape { tensor: full, found: tensor.shape.to_vec(), expected });
            }
            Ok(tensor.bytes)
        };
        let suh = vector("suh", parts.suh, trellis.in_features())?;
        let svh = vector("svh", parts.svh, trellis.out_features())?;
        let mcg = parts.mcg.map(|t| marker(&format!("{name}.mcg"), &t, Codebook::Mcg)).transpose()?;
        let mul1 = parts.mul1.map(|t| marker(&format!("{name}.mul1"), &t, Codebook::Mul1)).transpose()?;
        if mcg.is_some() && mul1.is_some() {
            return Err(Error::BothMarkers { tensor: name.into() });
        }
        let codebook = mcg.or(mul1).unwrap_or(Codebook::ThreeInst);
        Linear::new(name, trellis, suh, svh, codebook)
    }

    /// Refuses infinite or NaN scales. Reads `suh` and `svh` once.
    pub fn check_scales(&self, name: &str) -> Result<(), Error> {
        for (field, bytes) in [("suh", self.suh), ("svh", self.svh)] {
            let exponents = bytes.as_chunks::<2>().0.iter().map(|b| b[1] & 0x7C);
            if let Some(index) = exponents.into_iter().position(|e| e == 0x7C) {
                return Err(Error::NotFinite { tensor: format!("{name}.{field}"), index });
            }
        }
        Ok(())
    }

    /// The packed weights.
    pub fn trellis(&self) -> &Trellis<'a> {
        &self.trellis
    }

    /// The codebook.
    pub fn codebook(&self) -> Codebook {
        self.codebook
    }

    /// Input scales, fp16, little-endian.
    pub fn suh(&self) -> &'a [u8] {
        self.suh
    }

    /// Output scales, fp16, little-endian.
    pub fn svh(&self) -> &'a [u8] {
        self.svh
    }

    /// Input scales, widened.
    pub fn suh_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.in_features()];
        widen(self.suh, &mut out);
        out
    }

    /// Output scales, widened.
    pub fn svh_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.out_features()];
        widen(self.svh, &mut out);
        out
    }

    /// Input features.
    pub fn in_features(&self) -> usize {
        self.trellis.in_features()
    }

    /// Output features.
    pub fn out_features(&self) -> usize {
        self.trellis.out_features()
    }
}

fn check_type(full: &str, tensor: &Tensor<'_, '_>, expected: &'static str) -> Result<(), Error> {
    if tensor.dtype == expected {
        return Ok(());
    }
    Err(Error::ElementType { tensor: full.into(), found: tensor.dtype.into(), expected })
}

fn marker(full: &str, tensor: &Tensor<'_, '_>, codebook: Codebook) -> Result<Codebook, Error> {
    check_type(full, tensor, "I32")?;
    if !tensor.shape.iter().all(|d| *d == 1) {
        let expected = "a scalar".to_string();
        return Err(Error::Shape { tensor: full.into(), found: tensor.shape.to_vec(), expected });
    }
    let Ok(bytes) = <[u8; 4]>::try_from(tensor.bytes) else {
        return Err(Error::Bytes { tensor: full.into(), found: tensor.bytes.len(), expected: 4 });
    };
    let found = u32::from_le_bytes(bytes);
    if found != codebook.multiplier() {
        return Err(Error::Marker { tensor: full.into(), found, expected: codebook.multiplier() });
    }
    Ok(codebook)
}
