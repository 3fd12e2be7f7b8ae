//! Tensors in device memory.

use std::sync::Arc;

use crate::{Binding, Device, pool::Storage};

/// The elements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Values.
    F32,
    /// Indices.
    I32,
    /// Stored codes.
    U8,
}

impl Element {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        if self == Element::U8 { 1 } else { 4 }
    }
}

/// A tensor in device memory, row-major. Clones, slices and reshapes share the memory.
pub struct Buf<D: Device> {
    pub(crate) storage: Arc<Storage<D>>,
    pub(crate) offset: u64,
    shape: Vec<usize>,
    element: Element,
}

impl<D: Device> Clone for Buf<D> {
    fn clone(&self) -> Self {
        let (storage, shape) = (self.storage.clone(), self.shape.clone());
        Self { storage, offset: self.offset, shape, element: self.element }
    }
}

impl<D: Device> Buf<D> {
    pub(crate) fn new(storage: Storage<D>, shape: &[usize], element: Element) -> Self {
        Self { storage: Arc::new(storage), offset: 0, shape: shape.to_vec(), element }
    }

    /// The shape; the first dimension counts rows.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Kind of the elements.
    pub fn element(&self) -> Element {
        self.element
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of one row.
    pub fn width(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.len() * self.element.bytes()
    }

    /// Whether both are the same elements of the same memory.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage) && self.offset == other.offset && self.shape == other.shape
    }

    /// What a dispatch binds.
    pub(crate) fn binding(&self) -> Binding<D::Buffer> {
        self.binding_at(0)
    }

    /// The same from element `first` on.
    pub(crate) fn binding_at(&self, first: usize) -> Binding<D::Buffer> {
        match &self.storage.buffer {
            Some(buffer) => {
                Binding::Buffer(buffer.clone(), self.offset + (first * self.element.bytes()) as u64)
            }
            // Never started: the recorder holds the error.
            None => Binding::Inline(Arc::new([])),
        }
    }

    /// Rows `start..start + count` of the same memory.
    pub(crate) fn rows_at(&self, start: usize, count: usize) -> Self {
        assert!(start + count <= self.rows(), "rows {start}+{count} of {}", self.rows());
        let mut part = self.clone();
        part.offset += (start * self.width() * self.element.bytes()) as u64;
        part.shape[0] = count;
        part
    }

    /// The same elements under another shape.
    pub(crate) fn reshaped(&self, shape: &[usize]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), self.len(), "{shape:?} for {:?}", self.shape);
        Self { shape: shape.to_vec(), ..self.clone() }
    }
}
