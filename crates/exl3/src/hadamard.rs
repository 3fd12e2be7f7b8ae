//! The 128-point Hadamard transform and the input rotation (EXL3 specification, sections 5 and 6.2).

use crate::Error;
use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

/// Size of the transform.
pub const BLOCK: usize = 128;

/// 1 / sqrt(128) as exllamav3 writes it, in f32.
pub const FACTOR: f32 = 0.088_388_346;

/// Where values round between the parts of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// float32 throughout, no intermediate rounding to fp16.
    Exact,
    /// As exllamav3 with fp32 output (section 6.2): x and the rotated input are rounded to fp16.
    Source,
}

/// Butterflies with strides 1, 2, .., 64, not scaled.
#[inline(always)]
pub(crate) fn butterflies<T: Copy + std::ops::Add<Output = T> + std::ops::Sub<Output = T>>(
    block: &mut [T; BLOCK],
) {
    let mut stride = 1;
    while stride < BLOCK {
        for pair in block.chunks_exact_mut(2 * stride) {
            let (low, high) = pair.split_at_mut(stride);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride *= 2;
    }
}

/// H128 of one block in f32: butterflies, then one multiplication by [`FACTOR`].
#[inline]
pub fn hadamard(block: &mut [f32; BLOCK]) {
    butterflies(block);
    for v in block {
        *v *= FACTOR;
    }
}

/// H128 of one block in f64, with the exact factor.
pub fn hadamard_f64(block: &mut [f64; BLOCK]) {
    butterflies(block);
    for v in block {
        *v *= 128f64.sqrt().recip();
    }
}

/// Rotated input `(x * suh) P` of `rows` rows: `x` and `out` are rows x features, `suh` is fp16, little-endian.
///
/// `Source` gives exactly the fp16 values (widened) that exllamav3 computes. Linears with equal `suh` share it.
pub fn rotate_input(x: &[f32], suh: &[u8], arithmetic: Arithmetic, out: &mut [f32]) -> Result<(), Error> {
    let features = suh.len() / 2;
    if features == 0 || !features.is_multiple_of(BLOCK) || !suh.len().is_multiple_of(2) {
        return Err(Error::NotPadded { what: "input features", found: features });
    }
    if !x.len().is_multiple_of(features) {
        return Err(Error::Length {
            what: "rows of the input",
            found: x.len(),
            expected: x.len() / features * features,
        });
    }
    if out.len() != x.len() {
        return Err(Error::Length { what: "rotated input", found: out.len(), expected: x.len() });
    }
    let mut scales = vec![0f32; features];
    widen(suh, &mut scales);
    for (x, out) in x.chunks_exact(features).zip(out.chunks_exact_mut(features)) {
        let blocks = x.as_chunks::<BLOCK>().0.iter().zip(out.as_chunks_mut::<BLOCK>().0);
        for ((x, out), s) in blocks.zip(scales.as_chunks::<BLOCK>().0) {
            match arithmetic {
                Arithmetic::Exact => {
                    for i in 0..BLOCK {
                        out[i] = x[i] * s[i];
                    }
                    hadamard(out);
                }
                Arithmetic::Source => {
                    *out = *x;
                    round_to_half(out);
                    for i in 0..BLOCK {
                        out[i] *= s[i]; // exact: 11 x 11 bits
                    }
                    round_to_half(out);
                    hadamard(out);
                    round_to_half(out);
                }
            }
        }
    }
    Ok(())
}

/// Output side: `z P * svh` of one block of 128 sums, in f32.
#[inline]
pub fn rotate_output(z: &mut [f32; BLOCK], svh: &[f32; BLOCK]) {
    hadamard(z);
    for (v, s) in z.iter_mut().zip(svh) {
        *v *= s;
    }
}

fn round_to_half(block: &mut [f32; BLOCK]) {
    let mut bits = [0u16; BLOCK];
    let halves = bits.reinterpret_cast_mut::<f16>();
    halves.convert_from_f32_slice(block);
    halves.convert_to_f32_slice(block);
}

/// Little-endian fp16 bytes to f32; lengths must agree.
pub(crate) fn widen(bytes: &[u8], out: &mut [f32]) {
    // The library looks for the instruction at every call: many numbers a call.
    let mut bits = [0u16; BLOCK];
    for (out, bytes) in out.chunks_mut(BLOCK).zip(bytes.as_chunks::<2>().0.chunks(BLOCK)) {
        bits.iter_mut().zip(bytes).for_each(|(to, b)| *to = u16::from_le_bytes(*b));
        bits[..out.len()].reinterpret_cast::<f16>().convert_to_f32_slice(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_sylvester_matrix() {
        for i in [0usize, 1, 37, 127] {
            let mut unit = [0f64; BLOCK];
            unit[i] = 1.0;
            hadamard_f64(&mut unit);
            for (j, v) in unit.iter().enumerate() {
                let sign = if (i & j).count_ones() % 2 == 0 { 1.0 } else { -1.0 };
                assert_eq!(*v, sign / 128f64.sqrt());
            }
        }
    }

    #[test]
    fn refuses_lengths_that_do_not_fit() {
        let suh = [0u8; 256];
        let mut out = [0f32; 128];
        assert!(rotate_input(&[0.0; 128], &suh[..254], Arithmetic::Exact, &mut out).is_err());
        assert!(rotate_input(&[0.0; 127], &suh, Arithmetic::Exact, &mut out).is_err());
        assert!(rotate_input(&[0.0; 256], &suh, Arithmetic::Exact, &mut out).is_err());
        assert!(rotate_input(&[0.0; 128], &[], Arithmetic::Exact, &mut out).is_err());
        assert!(rotate_input(&[0.0; 128], &suh, Arithmetic::Exact, &mut out).is_ok());
    }
}
