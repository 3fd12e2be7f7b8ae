//! Buffers that begin on a cache line: a vector load that crosses one costs twice.

use bytemuck::{Pod, Zeroable};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: 64 bytes without padding, any bit pattern is valid.
unsafe impl Zeroable for Line {}
// SAFETY: as above; the type is Copy and 'static.
unsafe impl Pod for Line {}

/// A slice of zeros at first, 64-byte aligned.
pub(crate) struct Aligned<T> {
    lines: Vec<Line>,
    start: usize,
    length: usize,
    of: PhantomData<T>,
}

impl<T: Pod> Aligned<T> {
    pub(crate) fn new(length: usize) -> Self {
        Self::skewed(length, 0)
    }

    /// Begins `skew` lines later than a page would, so that buffers that advance together use different cache sets.
    pub(crate) fn skewed(length: usize, skew: usize) -> Self {
        let lines = skew + (length * size_of::<T>()).div_ceil(64);
        Aligned {
            lines: vec![Line([0; 64]); lines],
            start: skew * 64 / size_of::<T>(),
            length,
            of: PhantomData,
        }
    }
}

impl<T: Pod> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &bytemuck::cast_slice(&self.lines)[self.start..self.start + self.length]
    }
}

impl<T: Pod> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[self.start..self.start + self.length]
    }
}
