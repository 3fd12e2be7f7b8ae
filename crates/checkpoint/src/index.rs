//! The shard index, `model.safetensors.index.json`.

use std::{collections::BTreeMap, fmt};

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

/// The `weight_map` of an index.
pub(crate) struct Index(pub BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Top;
        impl<'de> Visitor<'de> for Top {
            type Value = Index;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object with weight_map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Index, A::Error> {
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
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
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
