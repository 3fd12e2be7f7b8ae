//! Figures in JSON: numbers, and the words "inf" and "nan" for what JSON lacks.

use serde::{Deserialize, Deserializer, Serializer, de::Error};

#[derive(Deserialize)]
#[serde(untagged)]
enum Raw {
    Number(f64),
    Word(String),
}

fn value<E: Error>(raw: Raw) -> Result<f64, E> {
    match raw {
        Raw::Number(v) => Ok(v),
        Raw::Word(w) if w == "inf" => Ok(f64::INFINITY),
        Raw::Word(w) if w == "nan" => Ok(f64::NAN),
        Raw::Word(w) => Err(E::custom(format!("\"{w}\" is no figure"))),
    }
}

/// Writes a figure.
///
/// # Errors
/// What the serializer reports.
pub fn serialize<S: Serializer>(v: &f64, s: S) -> Result<S::Ok, S::Error> {
    if v.is_finite() { s.serialize_f64(*v) } else { s.serialize_str(if v.is_nan() { "nan" } else { "inf" }) }
}

/// Reads a figure.
///
/// # Errors
/// Anything but a number, "inf" and "nan".
pub fn deserialize<'d, D: Deserializer<'d>>(d: D) -> Result<f64, D::Error> {
    value(Raw::deserialize(d)?)
}

/// The same for figures that may be absent (`null`).
pub mod option {
    use super::{Deserialize, Deserializer, Raw, Serializer, value};

    /// Writes a figure or `null`.
    ///
    /// # Errors
    /// What the serializer reports.
    pub fn serialize<S: Serializer>(v: &Option<f64>, s: S) -> Result<S::Ok, S::Error> {
        match v {
            None => s.serialize_none(),
            Some(v) => super::serialize(v, s),
        }
    }

    /// Reads a figure or `null`.
    ///
    /// # Errors
    /// Anything else.
    pub fn deserialize<'d, D: Deserializer<'d>>(d: D) -> Result<Option<f64>, D::Error> {
        Option::<Raw>::deserialize(d)?.map(value).transpose()
    }
}
