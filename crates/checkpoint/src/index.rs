//! The shard index, `model.safetensors.index.json`.

use std::{collections::BTreeMap, fmt, path::Path};

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::{
    error::{Error, Result},
    files,
};

/// Largest index that is read; the released one has 9.5 MB.
pub(crate) const MAX_INDEX_BYTES: usize = 100_000_000;

/// Which shard file each tensor is in, by an index file.
///
/// # Errors
/// An index that is absent or not one.
pub fn weight_map(path: &Path) -> Result<BTreeMap<String, String>> {
    let bytes = files::read(path, MAX_INDEX_BYTES as u64)?;
    let index = serde_json::from_slice::<Index>(&bytes);
    let bad = |e| Error::invalid(path.display().to_string(), format!("is not a valid index: {e}"));
    Ok(index.map_err(bad)?.0)
}

/// The `weight_map` of an index.
pub(crate) struct Index(pub BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct Top;
        impl<'de> Visitor<'de> for Top {
            type Value = Index;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object with weight_map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Index, A::Error> {
                let mut found = None;
                while let Some(key) = map.next_key::<String>()? {
                    if key != "weight_map" {
                        map.next_value::<IgnoredAny>()?;
                    } else if found.replace(map.next_value::<WeightMap>()?.0).is_some() {
                        return Err(A::Error::custom("weight_map appears twice"));
                    }
                }
                found.map(Index).ok_or_else(|| A::Error::custom("weight_map is missing"))
            }
        }
        d.deserialize_map(Top)
    }
}

struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<WeightMap, A::Error> {
                let mut out = BTreeMap::new();
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    if out.insert(tensor.clone(), file).is_some() {
                        return Err(A::Error::custom(format!("tensor {tensor} appears twice")));
                    }
                }
                Ok(WeightMap(out))
            }
        }
        d.deserialize_map(Pairs)
    }
}
