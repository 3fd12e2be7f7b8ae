//! Typed access to one JSON object; every error names the field and its section.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// One object of the configuration.
pub(super) struct Fields<'a> {
    file: &'a str,
    /// Path of the object with a trailing dot; empty at the root.
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn root(file: &'a str, tree: &'a Value) -> Result<Self> {
        let map = tree.as_object().ok_or_else(|| Error::invalid(file, "is not a JSON object"))?;
        Ok(Self { file, path: String::new(), map })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    pub(super) fn unsupported(&self, what: impl Into<String>) -> Error {
        Error::unsupported(self.file, what)
    }

    fn invalid(&self, name: &str, what: impl std::fmt::Display) -> Error {
        Error::invalid(self.file, format!("{}{name} {what}", self.path))
    }

    fn get(&self, name: &str) -> Result<&'a Value> {
        self.map.get(name).ok_or_else(|| self.invalid(name, "is missing"))
    }

    pub(super) fn section(&self, name: &str) -> Result<Fields<'a>> {
        let value = self.get(name)?;
        let map = value.as_object().ok_or_else(|| self.invalid(name, "is not an object"))?;
        Ok(Fields { file: self.file, path: format!("{}{name}.", self.path), map })
    }

    pub(super) fn optional_section(&self, name: &str) -> Result<Option<Fields<'a>>> {
        match self.map.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(_) => self.section(name).map(Some),
        }
    }

    fn whole(&self, name: &str, value: &Value, min: usize, max: usize) -> Result<usize> {
        let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
        let number = number.ok_or_else(|| self.invalid(name, format!("is {value}, not a whole number")))?;
        if number < min || number > max {
            let want = if min == max { min.to_string() } else { format!("between {min} and {max}") };
            return Err(self.invalid(name, format!("is {number}; it must be {want}")));
        }
        Ok(number)
    }

    /// A whole number in `min..=max`.
    pub(super) fn size(&self, name: &str, min: usize, max: usize) -> Result<usize> {
        self.whole(name, self.get(name)?, min, max)
    }

    /// A positive multiple of `unit`.
    pub(super) fn multiple(&self, name: &str, unit: usize, max: usize) -> Result<usize> {
        let n = self.size(name, unit, max)?;
        if n.is_multiple_of(unit) {
            Ok(n)
        } else {
            Err(self.invalid(name, format!("is {n}; it must be a multiple of {unit}")))
        }
    }

    /// A list of whole numbers up to `max`.
    pub(super) fn sizes(&self, name: &str, max: usize) -> Result<Vec<usize>> {
        let list = self.get(name)?.as_array().ok_or_else(|| self.invalid(name, "is not a list"))?;
        list.iter().enumerate().map(|(i, v)| self.whole(&format!("{name}[{i}]"), v, 0, max)).collect()
    }

    pub(super) fn token(&self, name: &str) -> Result<u32> {
        self.size(name, 0, u32::MAX as usize).map(|n| n as u32)
    }

    /// A positive number that is neither zero nor infinite as an IEEE single.
    pub(super) fn positive(&self, name: &str) -> Result<f64> {
        let value = self.get(name)?;
        let number = value.as_f64().ok_or_else(|| self.invalid(name, format!("is {value}, not a number")))?;
        if number as f32 > 0.0 && (number as f32).is_finite() {
            Ok(number)
        } else {
            Err(self.invalid(name, format!("is {number}; it must be positive and finite")))
        }
    }

    pub(super) fn optional_positive(&self, name: &str) -> Result<Option<f64>> {
        match self.map.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(_) => self.positive(name).map(Some),
        }
    }

    pub(super) fn optional(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    pub(super) fn optional_name(&self, name: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.optional(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.invalid(name, format!("is {value}, not a name")))
    }

    /// The keys of the object, as layer ids.
    pub(super) fn layers(&self) -> Result<Vec<(&'a str, usize)>> {
        let one = |key: &'a String| match key.parse() {
            Ok(layer) => Ok((key.as_str(), layer)),
            Err(_) => Err(self.invalid(key, "is not the number of a layer")),
        };
        self.map.keys().map(one).collect()
    }

    /// An object of positive numbers by layer id; empty where it is absent.
    pub(super) fn numbers_by_layer(&self, name: &str) -> Result<BTreeMap<usize, f64>> {
        let Some(all) = self.optional_section(name)? else { return Ok(BTreeMap::new()) };
        all.layers()?.into_iter().map(|(key, layer)| Ok((layer, all.positive(key)?))).collect()
    }

    pub(super) fn strings(&self, name: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.map.get(name) else { return Ok(None) };
        let list: Option<Vec<&str>> = value.as_array().and_then(|l| l.iter().map(Value::as_str).collect());
        list.map(Some).ok_or_else(|| self.invalid(name, "is not a list of names"))
    }

    /// A name of which one value is built; any other is refused by name.
    pub(super) fn must_be(&self, name: &str, want: &str) -> Result<()> {
        let value = self.get(name)?;
        let text = value.as_str().ok_or_else(|| self.invalid(name, format!("is {value}, not a name")))?;
        if text == want {
            return Ok(());
        }
        Err(self.unsupported(format!("{}{name} \"{text}\" is not supported, only \"{want}\" is", self.path)))
    }

    /// A value of which one choice is built.
    pub(super) fn must_equal(&self, name: &str, want: &Value) -> Result<()> {
        let value = self.get(name)?;
        if value == want {
            return Ok(());
        }
        Err(self.unsupported(format!("{}{name} {value} is not supported, only {want} is", self.path)))
    }
}
