//! Why EXL3 data is refused.

/// A refusal; each message names the tensor or argument and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The last dimension of a trellis is no known rate.
    #[error(
        "{tensor}: last dimension {last} is not 16 x bits for 1 to 8 bits or 1.5, 2.5, 3.5; the file is damaged or not EXL3"
    )]
    LastDimension {
        /// Tensor name.
        tensor: String,
        /// The dimension found.
        last: usize,
    },
    /// A bit rate that the format does not have.
    #[error("{bits} bits per weight is not an EXL3 rate; choose 1 to 8, or 1.5, 2.5, 3.5 with MUL1")]
    NoSuchRate {
        /// The rate asked for, as text.
        bits: String,
    },
    /// A tensor of a linear layer is missing.
    #[error("{tensor}: missing; an EXL3 layer needs trellis, suh and svh: fetch the whole checkpoint")]
    Missing {
        /// Tensor name.
        tensor: String,
    },
    /// The early sign-bit format.
    #[error(
        "{tensor}: packed signs (su/sv) of early EXL3 files are not supported; convert the checkpoint with exllamav3 1.x first"
    )]
    Legacy {
        /// Tensor name.
        tensor: String,
    },
    /// Wrong element type.
    #[error("{tensor}: element type {found}, expected {expected}; the file is damaged or not EXL3")]
    ElementType {
        /// Tensor name.
        tensor: String,
        /// What the file says.
        found: String,
        /// What the format says.
        expected: &'static str,
    },
    /// Wrong shape.
    #[error("{tensor}: shape {found:?}, expected {expected}; the file is damaged or not EXL3")]
    Shape {
        /// Tensor name.
        tensor: String,
        /// What the file says.
        found: Vec<usize>,
        /// What the format says.
        expected: String,
    },
    /// Fewer or more bytes than the shape needs.
    #[error("{tensor}: {found} bytes, its shape needs {expected}; the file is truncated, fetch it again")]
    Bytes {
        /// Tensor name.
        tensor: String,
        /// Bytes given.
        found: usize,
        /// Bytes that the shape needs.
        expected: usize,
    },
    /// Both codebook markers are present.
    #[error("{tensor}: both codebook markers mcg and mul1 are present; an EXL3 layer has at most one")]
    BothMarkers {
        /// Layer name.
        tensor: String,
    },
    /// A marker has a value other than its multiplier.
    #[error("{tensor}: marker value {found:#010x}, expected {expected:#010x}; the file is damaged")]
    Marker {
        /// Tensor name.
        tensor: String,
        /// Value in the file.
        found: u32,
        /// The multiplier.
        expected: u32,
    },
    /// Half rates exist with MUL1 only.
    #[error("{tensor}: {bits} bits per weight needs the MUL1 codebook, found {codebook}")]
    HalfRate {
        /// Layer name.
        tensor: String,
        /// The rate, as text.
        bits: String,
        /// The codebook's name.
        codebook: &'static str,
    },
    /// A scale is infinite or NaN.
    #[error("{tensor}: element {index} is not finite; the file is damaged")]
    NotFinite {
        /// Tensor name.
        tensor: String,
        /// First such element.
        index: usize,
    },
    /// A caller's slice has the wrong length.
    #[error("{what}: {found} values given, {expected} needed")]
    Length {
        /// The argument.
        what: &'static str,
        /// Values given.
        found: usize,
        /// Values needed.
        expected: usize,
    },
    /// A dimension that is not a multiple of the Hadamard size.
    #[error("{what}: {found} is not a positive multiple of 128; pad with zeros first")]
    NotPadded {
        /// The argument.
        what: &'static str,
        /// Its value.
        found: usize,
    },
    /// Weights too large for the format's fp16 scales.
    #[error("{what}: a scale exceeds the range of fp16; the weights are too large for EXL3")]
    ScaleRange {
        /// `suh` or `svh`.
        what: &'static str,
    },
    /// Rows arranged for another layer.
    #[error(
        "the rows were arranged for another rate, codebook or width than this layer's; arrange them anew"
    )]
    OtherLayer,
    /// The Hessian cannot be factored.
    #[error(
        "Hessian of {features} features is not positive definite even after damping; use more calibration rows"
    )]
    Indefinite {
        /// Input features.
        features: usize,
    },
}
