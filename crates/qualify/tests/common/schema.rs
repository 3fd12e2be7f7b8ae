//! A validator for the part of JSON Schema that the published schema uses; any other keyword is refused.

use regex_lite::Regex;
use serde_json::Value;

/// What is wrong with `value`; nothing if it follows `schema`. `root` resolves references.
pub fn faults(root: &Value, schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut out = Vec::new();
    for (keyword, rule) in schema.as_object().expect("a schema is an object") {
        let fine = match keyword.as_str() {
            "$schema" | "$id" | "$defs" | "title" | "description" => true,
            "$ref" => {
                let name = rule.as_str().and_then(|r| r.strip_prefix("#/$defs/")).expect("a local reference");
                out.extend(faults(root, &root["$defs"][name], value, at));
                true
            }
            "const" => value == rule,
            "enum" => rule.as_array().unwrap().contains(value),
            "type" => has_type(value, rule.as_str().unwrap()),
            "pattern" => {
                value.as_str().is_none_or(|v| Regex::new(rule.as_str().unwrap()).unwrap().is_match(v))
            }
            "minLength" => value.as_str().is_none_or(|v| v.len() as u64 >= rule.as_u64().unwrap()),
            "minimum" => value.as_f64().is_none_or(|v| v >= rule.as_f64().unwrap()),
            "minItems" => value.as_array().is_none_or(|v| v.len() as u64 >= rule.as_u64().unwrap()),
            "maxItems" => value.as_array().is_none_or(|v| v.len() as u64 <= rule.as_u64().unwrap()),
            "required" => {
                let names = rule.as_array().unwrap().iter().map(|n| n.as_str().unwrap());
                let missing: Vec<&str> =
                    names.filter(|n| value.is_object() && value.get(n).is_none()).collect();
                out.extend(missing.iter().map(|n| format!("{at}: {n} is missing")));
                true
            }
            "properties" => {
                for (name, part) in rule.as_object().unwrap() {
                    if let Some(v) = value.get(name) {
                        out.extend(faults(root, part, v, &format!("{at}/{name}")));
                    }
                }
                true
            }
            "additionalProperties" => {
                for (name, v) in value.as_object().into_iter().flatten() {
                    match (schema["properties"].get(name), rule) {
                        (Some(_), _) => {}
                        (None, Value::Bool(false)) => out.push(format!("{at}: {name} is unknown")),
                        (None, rule) => out.extend(faults(root, rule, v, &format!("{at}/{name}"))),
                    }
                }
                true
            }
            "items" => {
                for (i, v) in value.as_array().into_iter().flatten().enumerate() {
                    out.extend(faults(root, rule, v, &format!("{at}/{i}")));
                }
                true
            }
            "oneOf" => {
                let fits = |part: &&Value| faults(root, part, value, at).is_empty();
                rule.as_array().unwrap().iter().filter(fits).count() == 1
            }
            other => panic!("the validator does not know {other}"),
        };
        if !fine {
            out.push(format!("{at}: breaks {keyword} {rule}"));
        }
    }
    out
}

fn has_type(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("the validator does not know type {other}"),
    }
}
