//! The safetensors header, believed only after every claim in it is checked against the file.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize as DeriveDeserialize, Serialize};

/// Longest header that is parsed, in bytes.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most dimensions of a tensor.
const MAX_RANK: usize = 8;

/// Stored element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, DeriveDeserialize, Serialize)]
#[allow(missing_docs)] // the names of the safetensors format
pub enum Dtype {
    #[serde(rename = "BOOL")]
    Bool,
    #[serde(rename = "U8")]
    U8,
    #[serde(rename = "I8")]
    I8,
    #[serde(rename = "F8_E4M3")]
    E4m3,
    #[serde(rename = "F8_E5M2")]
    E5m2,
    #[serde(rename = "F8_E8M0")]
    E8m0,
    #[serde(rename = "I16")]
    I16,
    #[serde(rename = "U16")]
    U16,
    #[serde(rename = "F16")]
    F16,
    #[serde(rename = "BF16")]
    Bf16,
    #[serde(rename = "I32")]
    I32,
    #[serde(rename = "U32")]
    U32,
    #[serde(rename = "F32")]
    F32,
    #[serde(rename = "I64")]
    I64,
    #[serde(rename = "U64")]
    U64,
    #[serde(rename = "F64")]
    F64,
}

impl Dtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::Bool | Dtype::U8 | Dtype::I8 | Dtype::E4m3 | Dtype::E5m2 | Dtype::E8m0 => 1,
            Dtype::I16 | Dtype::U16 | Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::I32 | Dtype::U32 | Dtype::F32 => 4,
            Dtype::I64 | Dtype::U64 | Dtype::F64 => 8,
        }
    }

    /// The name in the file.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bool => "BOOL",
            Dtype::U8 => "U8",
            Dtype::I8 => "I8",
            Dtype::E4m3 => "F8_E4M3",
            Dtype::E5m2 => "F8_E5M2",
            Dtype::E8m0 => "F8_E8M0",
            Dtype::I16 => "I16",
            Dtype::U16 => "U16",
            Dtype::F16 => "F16",
            Dtype::Bf16 => "BF16",
            Dtype::I32 => "I32",
            Dtype::U32 => "U32",
            Dtype::F32 => "F32",
            Dtype::I64 => "I64",
            Dtype::U64 => "U64",
            Dtype::F64 => "F64",
        }
    }
}

/// One tensor's place in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Offset of the first byte from the start of the file.
    pub offset: usize,
    pub len: usize,
}

/// A parsed header.
#[derive(Debug)]
pub(crate) struct Header {
    /// In the order of the bytes.
    pub tensors: Vec<Place>,
    /// The `format` entry of the metadata.
    pub format: Option<String>,
}

/// Why a header is refused: a sentence, about one tensor where it names one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lie {
    pub tensor: Option<String>,
    pub what: String,
}

impl Lie {
    fn file(what: impl Into<String>) -> Self {
        Self { tensor: None, what: what.into() }
    }

    fn tensor(name: &str, what: impl Into<String>) -> Self {
        Self { tensor: Some(name.into()), what: what.into() }
    }
}

/// Parses and checks the header of a whole file: the tensors lie inside, have the length their shape needs, and cover
/// the data part without gap or overlap.
pub(crate) fn parse(file: &[u8]) -> Result<Header, Lie> {
    let Some((prefix, rest)) = file.split_first_chunk::<8>() else {
        return Err(Lie::file(format!("has {} bytes, too few for a safetensors header", file.len())));
    };
    let n = u64::from_le_bytes(*prefix);
    if n > MAX_HEADER_BYTES {
        return Err(Lie::file(format!("header length {n} is more than {MAX_HEADER_BYTES} bytes")));
    }
    let n = n as usize;
    if n > rest.len() {
        return Err(Lie::file(format!("header length {n} reaches beyond the file's {} bytes", file.len())));
    }
    let (json, data) = rest.split_at(n);
    let json = std::str::from_utf8(json).map_err(|e| Lie::file(format!("header is not UTF-8: {e}")))?;
    let raw: RawHeader =
        serde_json::from_str(json).map_err(|e| Lie::file(format!("header is not valid: {e}")))?;
    let base = 8 + n;
    let mut tensors = Vec::with_capacity(raw.tensors.len());
    for (name, t) in raw.tensors {
        let (start, end) = t.data_offsets;
        if start > end || end > data.len() as u64 {
            return Err(Lie::tensor(
                &name,
                format!(
                    "claims bytes {start}..{end} of {}; the file is truncated or its header lies",
                    data.len()
                ),
            ));
        }
        let len = end - start;
        let want = t.shape.0.iter().try_fold(t.dtype.size() as u64, |n, d| n.checked_mul(*d));
        if want != Some(len) {
            return Err(Lie::tensor(
                &name,
                format!("has {len} bytes, which {} {:?} does not fill", t.dtype.name(), t.shape.0),
            ));
        }
        // All numbers are at most the file's length from here on, or stand beside a zero dimension.
        let shape: Result<_, _> = t.shape.0.iter().map(|d| usize::try_from(*d)).collect();
        let shape = shape.map_err(|_| Lie::tensor(&name, format!("has an absurd shape {:?}", t.shape.0)))?;
        tensors.push(Place { name, dtype: t.dtype, shape, offset: base + start as usize, len: len as usize });
    }
    tensors.sort_by(|a, b| (a.offset, a.len, &a.name).cmp(&(b.offset, b.len, &b.name)));
    let mut next = base;
    for t in &tensors {
        if t.offset < next {
            return Err(Lie::tensor(&t.name, "overlaps the tensor before it"));
        }
        if t.offset > next {
            return Err(Lie::tensor(
                &t.name,
                format!("leaves {} unclaimed bytes before it", t.offset - next),
            ));
        }
        next += t.len;
    }
    if next != file.len() {
        return Err(Lie::file(format!("has {} bytes after its last tensor", file.len() - next)));
    }
    Ok(Header { tensors, format: raw.format })
}

struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    format: Option<String>,
}

#[derive(DeriveDeserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (u64, u64),
}

struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut seen = std::collections::HashSet::new();
                let mut out = RawHeader { tensors: Vec::new(), format: None };
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        return Err(A::Error::custom(format!("tensor {name} appears twice")));
                    }
                    if name == "__metadata__" {
                        out.format = map.next_value::<Metadata>()?.0;
                    } else {
                        out.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(out)
            }
        }
        d.deserialize_map(Entries)
    }
}

/// The `format` entry; whatever else the metadata says is not ours.
struct Metadata(Option<String>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut format = None;
                while let Some(key) = map.next_key::<String>()? {
                    if key == "format" {
                        format = Some(map.next_value()?);
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(Metadata(format))
            }
        }
        d.deserialize_map(Pairs)
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                write!(f, "a list of at most {MAX_RANK} sizes")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut out = Vec::new();
                while let Some(d) = seq.next_element()? {
                    if out.len() == MAX_RANK {
                        return Err(A::Error::custom(format!("a shape has more than {MAX_RANK} dimensions")));
                    }
                    out.push(d);
                }
                Ok(Shape(out))
            }
        }
        d.deserialize_seq(Dims)
    }
}
