//! The order of summation, one for every instruction set, thread count and number of rows.
//!
//! A dot product over K runs in [`LANES`] lanes. K is padded with zeros to a multiple of [`STEP`]; within each
//! [`GROUP`] of 32 the weight forms that hold several values in a word are taken even columns first, then odd ones
//! (that is how they fall out of the words without a shuffle): lane `l` adds column `32 g + 2 l`, then `32 g + 2 l + 1`,
//! g ascending, each with one fused multiply-add. F32 weights are taken in natural order: lane `l` adds column
//! `16 s + l`, s ascending. The 16 lanes then add up by [`reduce`]. Nothing else may add: so a result depends on its
//! own row and the weight alone, and all kernels agree bit for bit.
//!
//! A scale is a power of two, so it may multiply the activations, the codes or the finished sum instead of the weight:
//! rounding commutes with powers of two as long as no value is subnormal or overflows. Where all activations lie in
//! [`in_window`], all scales in 2^-40 to 2^40 and K is at most [`LONGEST`], no value can be: products are multiples of
//! 2^-113 (2^-40 of the scale, 2^-9 of the code, 2^-40 and 23 bits more of the activation, one more bit to spare), so
//! that every sum is zero or normal, and no sum exceeds 2^(40 + 9 + 41 + 20). Kernels move the scales only under this
//! condition and else take the exact weight; both give the same bits.

use checkpoint::{Form, Weight};
use numerics::{bf16, e2m1, e4m3, e8m0};

/// Lanes of a dot product.
pub(crate) const LANES: usize = 16;
/// Columns that share a scale.
pub(crate) const GROUP: usize = 32;
/// Columns of one kernel step; K is padded to a multiple of it.
pub(crate) const STEP: usize = 64;

/// K with its padding.
pub(crate) const fn padded(cols: usize) -> usize {
    cols.next_multiple_of(STEP)
}

/// How the columns of a group are laid out before the lanes take them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// As stored.
    Natural,
    /// The 16 even columns of each group, then the 16 odd ones.
    EvenOdd,
}

impl Layout {
    pub(crate) fn of(form: Form) -> Self {
        if form == Form::F32 { Layout::Natural } else { Layout::EvenOdd }
    }

    /// Where column `k` lies.
    #[inline]
    pub(crate) fn place(self, k: usize) -> usize {
        match self {
            Layout::Natural => k,
            Layout::EvenOdd => (k & !(GROUP - 1)) | ((k & 1) << 4) | ((k & (GROUP - 1)) >> 1),
        }
    }
}

/// The sum of the lanes; a NaN becomes the one quiet NaN, whose bits would else depend on the machine.
#[inline(always)]
pub(crate) fn reduce(a: &[f32; LANES]) -> f32 {
    let q: [f32; 4] = std::array::from_fn(|i| (a[i] + a[i + 8]) + (a[i + 4] + a[i + 12]));
    let y = (q[0] + q[2]) + (q[1] + q[3]);
    if y.is_nan() { f32::NAN } else { y }
}

/// Most columns of the window.
pub(crate) const LONGEST: usize = 1 << 20;

/// Whether `x` is zero or of magnitude 2^-40 up to 2^41.
#[inline(always)]
pub(crate) fn in_window(x: f32) -> bool {
    const LOW: u32 = (127 - 40) << 23;
    const HIGH: u32 = (127 + 41) << 23;
    let magnitude = x.to_bits() & 0x7fff_ffff;
    magnitude == 0 || magnitude.wrapping_sub(LOW) < HIGH - LOW
}

/// Lays out one row of activations: `out` (padded length) from `x`; returns whether all of it is in the window.
#[inline(always)]
pub(crate) fn pack_row(x: &[f32], layout: Layout, out: &mut [f32]) -> bool {
    let mut fits = true;
    let whole = x.len() / GROUP * GROUP;
    for v in x {
        fits &= in_window(*v);
    }
    match layout {
        Layout::Natural => out[..whole].copy_from_slice(&x[..whole]),
        Layout::EvenOdd => {
            for (o, v) in out.chunks_exact_mut(GROUP).zip(x.chunks_exact(GROUP)) {
                let (even, odd) = o.split_at_mut(LANES);
                for i in 0..LANES {
                    even[i] = v[2 * i];
                    odd[i] = v[2 * i + 1];
                }
            }
        }
    }
    out[whole..].fill(0.0);
    for k in whole..x.len() {
        out[layout.place(k)] = x[k];
    }
    fits
}

/// A weight's parts, as the kernels read them.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub form: Form,
    pub rows: usize,
    pub cols: usize,
    pub groups: usize,
    pub row_bytes: usize,
    pub data: &'a [u8],
    pub scale: &'a [u8],
}

impl<'a> View<'a> {
    pub(crate) fn new(w: &'a Weight) -> Self {
        let (form, rows, cols) = (w.form(), w.rows(), w.cols());
        let row_bytes =
            form.data_len(1, cols).expect("a form whose shape says its bytes: EXL3 has kernels of its own");
        Self { form, rows, cols, groups: cols.div_ceil(GROUP), row_bytes, data: w.data(), scale: w.scale() }
    }

    /// The codes of row `r`.
    pub(crate) fn row(&self, r: usize) -> &'a [u8] {
        &self.data[r * self.row_bytes..][..self.row_bytes]
    }

    /// The scale bytes of row `r`, one per group; empty for plain forms.
    pub(crate) fn scales(&self, r: usize) -> &'a [u8] {
        match self.form {
            Form::F32 | Form::Bf16 => &[],
            Form::Fp8Block32 => &self.scale[r / GROUP * self.groups..][..self.groups],
            Form::Fp8Row32 | Form::Fp4Row32 => &self.scale[r * self.groups..][..self.groups],
            Form::Exl3 => unreachable!("no View is made of EXL3"),
        }
    }

    /// Decodes columns `k0..k0 + out.len()` of row `r`, laid out, zeros beyond the last column. `k0` is a multiple of
    /// [`STEP`]. The plain meaning of every form; the vector decoders must equal it.
    pub(crate) fn decode(&self, r: usize, k0: usize, out: &mut [f32]) {
        let layout = Layout::of(self.form);
        let (row, scales) = (self.row(r), self.scales(r));
        out.fill(0.0);
        for k in k0..self.cols.min(k0 + out.len()) {
            out[layout.place(k - k0)] = match self.form {
                Form::F32 => f32::from_le_bytes([row[4 * k], row[4 * k + 1], row[4 * k + 2], row[4 * k + 3]]),
                Form::Bf16 => bf16::from_bits(u16::from_le_bytes([row[2 * k], row[2 * k + 1]])),
                Form::Fp8Block32 | Form::Fp8Row32 => e4m3::decode(row[k]) * e8m0::decode(scales[k / GROUP]),
                Form::Exl3 => unreachable!("no View is made of EXL3"),
                Form::Fp4Row32 => e2m1::decode(row[k / 2] >> (4 * (k & 1))) * e8m0::decode(scales[k / GROUP]),
            };
        }
    }
}
