//! The limits of the release gates, by name in the thresholds file.

use std::collections::BTreeMap;

use crate::{Thresholds, receipt::Rule, thresholds::Limit};

/// Named limits.
pub type Limits = BTreeMap<String, Limit>;

/// At most the limit `name` of the section `release`.
///
/// # Panics
/// Where the thresholds file lacks the name, which a test excludes.
pub fn at_most(name: &str) -> Rule {
    Rule::AtMost { limit: limit(name), threshold: format!("release.{name}") }
}

/// The limit `name` of the section `release`.
///
/// # Panics
/// As [`at_most`].
pub fn limit(name: &str) -> f64 {
    Thresholds::built_in()
        .release
        .get(name)
        .unwrap_or_else(|| panic!("thresholds.json lacks release.{name}"))
        .limit
}
