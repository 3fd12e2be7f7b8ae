//! One weight matrix in its stored form.

use std::sync::Arc;

use numerics::{bf16, e2m1, e4m3, e8m0};

use crate::{Bytes, Exl3};

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
    /// EXL3: one or more [`Exl3`] layers, each with its own rate and codebook.
    Exl3,
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
            Form::Exl3 => "exl3",
        }
    }

    /// Bytes of codes of `rows` x `cols` values; none where the shape alone does not say.
    pub fn data_len(self, rows: usize, cols: usize) -> Option<usize> {
        let n = rows.checked_mul(cols)?;
        match self {
            Form::F32 => n.checked_mul(4),
            Form::Bf16 => n.checked_mul(2),
            Form::Fp8Block32 | Form::Fp8Row32 => Some(n),
            Form::Fp4Row32 => cols.is_multiple_of(2).then_some(n / 2),
            Form::Exl3 => None,
        }
    }

    /// Shape of the scale tensor, none for plain forms and EXL3.
    pub fn scale_shape(self, rows: usize, cols: usize) -> Option<[usize; 2]> {
        match self {
            Form::F32 | Form::Bf16 | Form::Exl3 => None,
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
    layers: Arc<[Exl3]>,
}

impl Weight {
    /// A weight from its parts; `scale` is empty for plain forms. `Err` names what does not fit. EXL3 weights are made
    /// by [`Weight::exl3`].
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
        Ok(Self { name: name.into(), form, rows, cols, data, scale, layers: Arc::new([]) })
    }

    /// A weight whose output rows are those of `layers`, one after the other. `Err` names what does not fit.
    pub fn exl3(name: &str, layers: Vec<Exl3>) -> Result<Self, String> {
        let Some(cols) = layers.first().map(Exl3::cols) else {
            return Err(format!("{name}: an EXL3 weight needs a layer"));
        };
        if let Some(other) = layers.iter().find(|l| l.cols() != cols) {
            return Err(format!("{name}: layers of {cols} and of {} inputs", other.cols()));
        }
        let rows = layers.iter().map(Exl3::rows).sum();
        let none = || Bytes::from_static(&[]);
        let (data, scale, layers) = (none(), none(), layers.into());
        Ok(Self { name: name.into(), form: Form::Exl3, rows, cols, data, scale, layers })
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

    /// The codes; empty for EXL3.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// The E8M0 scales; empty for plain forms and EXL3.
    pub fn scale(&self) -> &[u8] {
        &self.scale
    }

    /// What is stored, for a backend that keeps it elsewhere: codes and scales, or trellis, suh and svh of every layer.
    pub fn parts(&self) -> Vec<&Bytes> {
        match self.form {
            Form::Exl3 => self.layers.iter().flat_map(|l| l.parts()).collect(),
            Form::F32 | Form::Bf16 => vec![&self.data],
            Form::Fp8Block32 | Form::Fp8Row32 | Form::Fp4Row32 => vec![&self.data, &self.scale],
        }
    }

    /// The EXL3 layers, one for each run of output rows; empty for other forms.
    pub fn layers(&self) -> &[Exl3] {
        &self.layers
    }

    /// Stored bytes, scales included.
    pub fn stored_bytes(&self) -> u64 {
        let layers: u64 = self.layers.iter().map(Exl3::stored_bytes).sum();
        self.data.len() as u64 + self.scale.len() as u64 + layers
    }

    /// The rows `start..start + count` as a weight of their own. For [`Form::Fp8Block32`] both must be multiples of 32
    /// (the end may be the last row); for [`Form::Exl3`] they must cut no layer.
    pub fn rows_slice(&self, start: usize, count: usize) -> Self {
        assert!(start + count <= self.rows, "{}: rows {start}+{count} of {}", self.name, self.rows);
        if self.form == Form::Exl3 {
            return self.layers_slice(start, count);
        }
        let per_row = self.data.len() / self.rows.max(1);
        let data = self.data.slice(start * per_row, count * per_row);
        let groups = self.cols.div_ceil(32);
        let scale = match self.form {
            Form::F32 | Form::Bf16 | Form::Exl3 => self.scale.slice(0, 0),
            Form::Fp8Row32 | Form::Fp4Row32 => self.scale.slice(start * groups, count * groups),
            Form::Fp8Block32 => {
                let whole = count.is_multiple_of(32) || start + count == self.rows;
                assert!(start.is_multiple_of(32) && whole, "{}: rows {start}+{count} cut a block", self.name);
                self.scale.slice(start / 32 * groups, count.div_ceil(32) * groups)
            }
        };
        let (data, scale) = (data.expect("checked range"), scale.expect("checked range"));
        let (name, layers) = (self.name.clone(), self.layers.clone());
        Self { name, rows: count, data, scale, layers, ..*self }
    }

    fn layers_slice(&self, start: usize, count: usize) -> Self {
        let mut at = 0;
        let inside = |l: &&Exl3| {
            let first = at;
            at += l.rows();
            first >= start && at <= start + count
        };
        let layers: Vec<Exl3> = self.layers.iter().filter(inside).cloned().collect();
        let rows: usize = layers.iter().map(Exl3::rows).sum();
        assert_eq!(rows, count, "{}: rows {start}+{count} cut a layer", self.name);
        Self { name: self.name.clone(), rows, layers: layers.into(), ..self.clone() }
    }

    /// Decodes row `r` exactly into `out` (`cols` values). An EXL3 row costs as much as the 128 rows around it.
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
            Form::Exl3 => {
                let (mut r, mut layers) = (r, self.layers.iter());
                let layer = layers.find(|l| {
                    r < l.rows() || {
                        r -= l.rows();
                        false
                    }
                });
                let layer = layer.expect("the rows are those of the layers");
                let first = r - r % exl3::BLOCK;
                let mut band = vec![0.0; exl3::BLOCK.min(layer.rows() - first) * cols];
                layer.decode_rows(first, &mut band);
                out.copy_from_slice(&band[(r - first) * cols..][..cols]);
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

    /// All values: for small weights (a norm, a bias) and for tests.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        if self.form == Form::Exl3 {
            let mut rest = &mut out[..];
            for layer in self.layers.iter() {
                let part;
                (part, rest) = rest.split_at_mut(layer.rows() * self.cols);
                layer.decode_rows(0, part);
            }
            return out;
        }
        for r in 0..self.rows {
            self.decode_row(r, &mut out[r * self.cols..][..self.cols]);
        }
        out
    }
}
