//! Tensors in host memory.

use std::sync::Arc;

/// The elements of a [`Host`] tensor, row-major.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Values.
    F32(Vec<f32>),
    /// Indices; -1 marks an empty place.
    I32(Vec<i32>),
    /// Stored codes.
    U8(Vec<u8>),
}

/// A tensor in host memory. Clones share the elements; writing copies them only while they are shared.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    shape: Vec<usize>,
    data: Arc<Data>,
}

impl Host {
    fn new(shape: &[usize], len: usize, data: Data) -> Self {
        assert_eq!(shape.iter().product::<usize>(), len, "{len} elements for shape {shape:?}");
        Self { shape: shape.to_vec(), data: Arc::new(data) }
    }

    /// A tensor of values.
    pub fn f32(shape: &[usize], data: Vec<f32>) -> Self {
        Self::new(shape, data.len(), Data::F32(data))
    }

    /// A tensor of indices.
    pub fn i32(shape: &[usize], data: Vec<i32>) -> Self {
        Self::new(shape, data.len(), Data::I32(data))
    }

    /// A tensor of codes.
    pub fn u8(shape: &[usize], data: Vec<u8>) -> Self {
        Self::new(shape, data.len(), Data::U8(data))
    }

    /// The shape; the first dimension counts rows.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of one row.
    pub fn width(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// The elements.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// The values; panics on another element type, which is a programming error.
    pub fn as_f32(&self) -> &[f32] {
        match &*self.data {
            Data::F32(v) => v,
            other => panic!("values expected, not {}", kind(other)),
        }
    }

    /// The indices.
    pub fn as_i32(&self) -> &[i32] {
        match &*self.data {
            Data::I32(v) => v,
            other => panic!("indices expected, not {}", kind(other)),
        }
    }

    /// The codes.
    pub fn as_u8(&self) -> &[u8] {
        match &*self.data {
            Data::U8(v) => v,
            other => panic!("codes expected, not {}", kind(other)),
        }
    }

    /// The codes, for writing.
    pub fn as_u8_mut(&mut self) -> &mut [u8] {
        match Arc::make_mut(&mut self.data) {
            Data::U8(v) => v,
            other => panic!("codes expected, not {}", kind(other)),
        }
    }

    /// Row `r` of a tensor of values.
    pub fn row(&self, r: usize) -> &[f32] {
        let w = self.width();
        &self.as_f32()[r * w..][..w]
    }

    /// Row `r` of a tensor of codes.
    pub fn code_row(&self, r: usize) -> &[u8] {
        let w = self.width();
        &self.as_u8()[r * w..][..w]
    }

    /// The same elements under another shape.
    pub fn reshaped(&self, shape: &[usize]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), self.shape.iter().product::<usize>(), "{shape:?}");
        Self { shape: shape.to_vec(), data: self.data.clone() }
    }

    /// Rows `start..start + count`.
    pub fn slice_rows(&self, start: usize, count: usize) -> Self {
        assert!(start + count <= self.rows(), "rows {start}+{count} of {}", self.rows());
        let (w, mut shape) = (self.width(), self.shape.clone());
        shape[0] = count;
        let range = start * w..(start + count) * w;
        match &*self.data {
            Data::F32(v) => Self::f32(&shape, v[range].to_vec()),
            Data::I32(v) => Self::i32(&shape, v[range].to_vec()),
            Data::U8(v) => Self::u8(&shape, v[range].to_vec()),
        }
    }

    /// `self` and then `other` along the rows.
    pub fn concat_rows(&self, other: &Self) -> Self {
        assert_eq!(self.shape[1..], other.shape[1..], "rows of different shapes");
        let mut shape = self.shape.clone();
        shape[0] += other.rows();
        match (&*self.data, &*other.data) {
            (Data::F32(a), Data::F32(b)) => Self::f32(&shape, [a.as_slice(), b].concat()),
            (Data::I32(a), Data::I32(b)) => Self::i32(&shape, [a.as_slice(), b].concat()),
            (Data::U8(a), Data::U8(b)) => Self::u8(&shape, [a.as_slice(), b].concat()),
            (a, b) => panic!("{} beside {}", kind(a), kind(b)),
        }
    }
}

fn kind(data: &Data) -> &'static str {
    match data {
        Data::F32(_) => "values",
        Data::I32(_) => "indices",
        Data::U8(_) => "codes",
    }
}
