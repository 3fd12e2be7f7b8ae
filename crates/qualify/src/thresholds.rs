//! The limits of all gates, in one file with their reasons.

use std::{collections::BTreeMap, sync::OnceLock};

use serde::{Deserialize, Serialize};

use crate::sha256_hex;

const FILE: &str = include_str!("../thresholds.json");

/// A limit and why it is what it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Largest figure that passes.
    pub limit: f64,
    /// Why.
    pub reason: String,
}

impl std::ops::Deref for Limit {
    type Target = f64;

    fn deref(&self) -> &f64 {
        &self.limit
    }
}

/// What the judge uses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Judge {
    /// Error from which a tensor is named as departing where no noise is known.
    pub departure: Limit,
}

/// G3: the whole model against the reference's own noise N.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct G3 {
    /// d may be this many times N.
    pub factor: Limit,
    /// NRMS that passes whatever N is.
    pub floor_nrms: Limit,
    /// KL that passes whatever N is.
    pub floor_kl: Limit,
    /// The proposed fixed gate; printed only.
    pub proposal: Limit,
}

impl G3 {
    /// Largest NRMS that passes where the reference's own noise is `n`.
    pub fn limit_nrms(&self, n: f64) -> f64 {
        (*self.factor * n).max(*self.floor_nrms)
    }

    /// Largest KL that passes where the reference's own noise is `n`.
    pub fn limit_kl(&self, n: f64) -> f64 {
        (*self.factor * n).max(*self.floor_kl)
    }
}

/// G2: NRMS of the streams behind a teacher-forced layer, over token-layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layers {
    /// Median.
    pub median: Limit,
    /// 95th percentile.
    pub p95: Limit,
    /// Largest.
    pub max: Limit,
}

/// Choices that may differ because the scores tie within their error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flips {
    /// A flip is set apart where its margin is at most this many times our score error.
    pub margin_factor: Limit,
    /// Flips that may be set apart in any run.
    pub base: Limit,
    /// Share of token-layers that may be set apart beyond `base`.
    pub share: Limit,
}

/// The thresholds file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Thresholds {
    /// The judge.
    pub judge: Judge,
    /// G2, by `MODEL-NUMERICS`; `default-NUMERICS` for every other model.
    pub g2: BTreeMap<String, Layers>,
    /// Flips.
    pub flips: Flips,
    /// G3.
    pub g3: G3,
    /// The fixtures at released size, by `GATE.FIGURE`.
    pub release: BTreeMap<String, Limit>,
}

impl Thresholds {
    /// The thresholds of this build.
    pub fn built_in() -> &'static Self {
        static PARSED: OnceLock<Thresholds> = OnceLock::new();
        PARSED.get_or_init(|| serde_json::from_str(FILE).expect("the thresholds file is checked by a test"))
    }

    /// The limits of `MODEL-NUMERICS` with the key they stand under.
    pub fn layers(&self, key: &str) -> (&str, &Layers) {
        let default = key.rsplit_once('-').map_or("default-source", |(_, mode)| match mode {
            "exact" => "default-exact",
            "native" => "default-native",
            _ => "default-source",
        });
        let (key, limits) = self
            .g2
            .get_key_value(key)
            .or_else(|| self.g2.get_key_value(default))
            .expect("the thresholds file has the three defaults");
        (key, limits)
    }

    /// Every limit under the path of its names: `g3.factor`.
    pub fn named(&self) -> BTreeMap<String, f64> {
        fn walk(tree: &serde_json::Value, path: &str, out: &mut BTreeMap<String, f64>) {
            let Some(fields) = tree.as_object() else { return };
            if let Some(limit) = fields.get("limit").and_then(serde_json::Value::as_f64) {
                out.insert(path.to_owned(), limit);
                return;
            }
            for (name, field) in fields {
                walk(field, &if path.is_empty() { name.clone() } else { format!("{path}.{name}") }, out);
            }
        }
        let mut out = BTreeMap::new();
        walk(&serde_json::to_value(self).expect("thresholds are plain data"), "", &mut out);
        out
    }

    /// SHA-256 of the thresholds file of this build.
    pub fn digest() -> String {
        sha256_hex(FILE.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_has_limits() {
        let t = Thresholds::built_in();
        for (asked, key) in
            [("nano-source", "nano-source"), ("x-exact", "default-exact"), ("x-native", "default-native")]
        {
            assert_eq!(t.layers(asked).0, key);
        }
        assert_eq!(t.layers("my-model-source").0, "default-source");
    }

    #[test]
    fn every_limit_has_a_name_and_a_reason() {
        let named = Thresholds::built_in().named();
        assert_eq!(named["g3.factor"], 1.2);
        assert_eq!(named["judge.departure"], 0.01);
        let tree: serde_json::Value = serde_json::from_str(FILE).unwrap();
        let reasons = tree.to_string().matches("\"reason\"").count();
        assert_eq!(reasons, named.len());
        assert!(!tree.to_string().contains("\"reason\":\"\""));
    }
}
