//! One weight matrix in its stored form.

use std::sync::Arc;

use numerics::{bf16, e2m1, e4m3, e8m0};

use crate::Bytes;

/// How a weight's values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Little-endian IEEE singles.
    F32,
    /// Little-endian bf16.
    Bf16,
    /// E4M3 codes with one E8M0 scale per 32x32 block.
    Fp8Block32,
    /// E4M3 codes with one E8M0 scale per row and 32 columns.
    Fp8Row32,
    /// Packed E2M1 codes (low nibble = even column) with one E8M0 scale per row and 32 columns.
    Fp4Row32,
}

impl Form {
    /// The name that reports use.
    pub fn name(self) -> &'static str {
        match self {
            Form::F32 => "f32",
            Form::Bf16 => "bf16",
            Form::Fp8Block32 => "fp8-32x32",
            Form::Fp8Row32 => "fp8-row32",
            Form::Fp4Row32 => "fp4-32",
        }
    }

    /// Bytes of codes of `rows` x `cols` values.
    pub fn data_len(self, rows: usize, cols: usize) -> Option<usize> {
        let n = rows.checked_mul(cols)?;
        match self {
            Form::F32 => n.checked_mul(4),
            Form::Bf16 => n.checked_mul(2),
            Form::Fp8Block32 | Form::Fp8Row32 => Some(n),
            Form::Fp4Row32 => cols.is_multiple_of(2).then_some(n / 2),
        }
    }

    /// Shape of the scale tensor, none for plain forms.
    pub fn scale_shape(self, rows: usize, cols: usize) -> Option<[usize; 2]> {
        match self {
            Form::F32 | Form::Bf16 => None,
            Form::Fp8Block32 => Some([rows.div_ceil(32), cols.div_ceil(32)]),
            Form::Fp8Row32 | Form::Fp4Row32 => Some([rows, cols.div_ceil(32)]),
        }
    }
}

/// A matrix `[rows, cols]`, row-major, as stored; `rows` are output features. A vector has one row. Never
/// dequantised as a whole; cloning shares the bytes.
#[derive(Clone, Debug)]
pub struct Weight {
    name: Arc<str>,
    form: Form,
    rows: usize,
    cols: usize,
    data: Bytes,
    scale: Bytes,
}

impl Weight {
    /// A weight from its parts; `scale` is empty for plain forms. `Err` names what does not fit.
    pub fn new(
        name: &str,
        form: Form,
        rows: usize,
        cols: usize,
        data: Bytes,
        scale: Bytes,
    ) -> Result<Self, String> {
        let want = form
            .data_len(rows, cols)
            .ok_or_else(|| format!("{name}: {rows} x {cols} is no {} shape", form.name()))?;
        if data.len() != want {
            return Err(format!(
                "{name}: {} bytes where {rows} x {cols} {} needs {want}",
                data.len(),
                form.name()
            ));
        }
        let want = form.scale_shape(rows, cols).map_or(0, |[r, c]| r * c);
        if scale.len() != want {
            return Err(format!(
                "{name}: {} scale bytes where {rows} x {cols} {} needs {want}",
                scale.len(),
                form.name()
            ));
        }
        Ok(Self { name: name.into(), form, rows, cols, data, scale })
    }

    /// A plain f32 weight from values.
    pub fn from_f32(name: &str, rows: usize, cols: usize, values: &[f32]) -> Result<Self, String> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(name, Form::F32, rows, cols, Bytes::copied(&bytes), Bytes::from_static(&[]))
    }

    /// The module name, without `.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How the values are stored.
    pub fn form(&self) -> Form {
        self.form
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The codes.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// The E8M0 scales; empty for plain forms.
    pub fn scale(&self) -> &[u8] {
        &self.scale
    }

    /// Stored bytes, scales included.
    pub fn stored_bytes(&self) -> u64 {
        self.data.len() as u64 + self.scale.len() as u64
    }

    /// The rows `start..start + count` as a weight of their own. For [`Form::Fp8Block32`] both must be multiples of 32
    /// (the end may be the last row).
    pub fn rows_slice(&self, start: usize, count: usize) -> Self {
        assert!(start + count <= self.rows, "{}: rows {start}+{count} of {}", self.name, self.rows);
        let per_row = self.data.len() / self.rows.max(1);
        let data = self.data.slice(start * per_row, count * per_row);
        let groups = self.cols.div_ceil(32);
        let scale = match self.form {
            Form::F32 | Form::Bf16 => self.scale.slice(0, 0),
            Form::Fp8Row32 | Form::Fp4Row32 => self.scale.slice(start * groups, count * groups),
            Form::Fp8Block32 => {
                let whole = count.is_multiple_of(32) || start + count == self.rows;
                assert!(start.is_multiple_of(32) && whole, "{}: rows {start}+{count} cut a block", self.name);
                self.scale.slice(start / 32 * groups, count.div_ceil(32) * groups)
            }
        };
        let (data, scale) = (data.expect("checked range"), scale.expect("checked range"));
        Self { name: self.name.clone(), rows: count, data, scale, ..*self }
    }

    /// Decodes row `r` exactly into `out` (`cols` values).
    pub fn decode_row(&self, r: usize, out: &mut [f32]) {
        assert!(r < self.rows && out.len() == self.cols, "{}: row {r} of {}", self.name, self.rows);
        let cols = self.cols;
        let groups = cols.div_ceil(32);
        match self.form {
            Form::F32 => {
                for (v, b) in out.iter_mut().zip(self.data[r * cols * 4..].chunks_exact(4)) {
                    *v = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            Form::Bf16 => {
                for (v, b) in out.iter_mut().zip(self.data[r * cols * 2..].chunks_exact(2)) {
                    *v = bf16::from_bits(u16::from_le_bytes([b[0], b[1]]));
                }
            }
            Form::Fp8Block32 | Form::Fp8Row32 => {
                let scale_row = if self.form == Form::Fp8Block32 { r / 32 } else { r };
                let scales = &self.scale[scale_row * groups..][..groups];
                let codes = &self.data[r * cols..][..cols];
                for ((vs, cs), s) in out.chunks_mut(32).zip(codes.chunks(32)).zip(scales) {
                    let s = e8m0::decode(*s);
                    for (v, c) in vs.iter_mut().zip(cs) {
                        *v = e4m3::decode(*c) * s;
                    }
                }
            }
            Form::Fp4Row32 => {
                let scales = &self.scale[r * groups..][..groups];
                let codes = &self.data[r * cols / 2..][..cols / 2];
                for ((vs, cs), s) in out.chunks_mut(32).zip(codes.chunks(16)).zip(scales) {
                    let s = e8m0::decode(*s);
                    for (pair, byte) in vs.chunks_mut(2).zip(cs) {
                        let v = e2m1::unpack(*byte);
                        pair[0] = v[0] * s;
                        pair[1] = v[1] * s;
                    }
                }
            }
        }
    }

    /// All values of a small weight (a norm, a bias).
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        for r in 0..self.rows {
            self.decode_row(r, &mut out[r * self.cols..][..self.cols]);
        }
        out
    }
}
