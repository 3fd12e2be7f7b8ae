//! The restricted JSON Schema of strict tools and strict answers (spec section 4.4).

use serde_json::{Map, Value};

/// Rewrites a strict schema: every object lists all its properties as required and admits no others; keywords that the
/// dialect lacks are dropped. The top must be an object; only there may it have no properties if `empty_top` is set.
pub(crate) fn strict(schema: &Value, empty_top: bool) -> Result<Value, String> {
    let normalised = node(schema, empty_top, false)?;
    if normalised["type"] != "object" {
        return Err("the top level of a strict schema must be an object".into());
    }
    Ok(normalised)
}

/// The schema of a strict tool without parameters.
pub(crate) fn empty_object() -> Value {
    serde_json::json!({"type": "object"})
}

fn node(schema: &Value, may_be_empty: bool, only_typed: bool) -> Result<Value, String> {
    let given = schema.as_object().ok_or_else(|| format!("a schema must be an object, not {schema}"))?;
    let mut out = Map::new();
    match (given.get("type"), given.get("anyOf"), given.get("$ref")) {
        (Some(Value::String(kind)), _, _) => return typed(kind, given, may_be_empty),
        (Some(Value::Array(kinds)), _, _) if !only_typed => {
            let simple = |kind: &Value| {
                ["string", "number", "integer", "boolean", "null"].iter().any(|simple| kind == simple)
            };
            if let Some(kind) = kinds.iter().find(|kind| !simple(kind)) {
                return Err(format!("a list of types may not contain {kind}"));
            }
            out.insert("type".into(), Value::Array(kinds.clone()));
            copy(given, &mut out, "description", Value::is_string)?;
        }
        (None, Some(Value::Array(options)), _) if !only_typed => {
            let options =
                options.iter().map(|option| node(option, may_be_empty, true)).collect::<Result<_, _>>()?;
            out.insert("anyOf".into(), Value::Array(options));
            copy(given, &mut out, "description", Value::is_string)?;
        }
        (None, None, Some(Value::String(target))) => {
            out.insert("$ref".into(), target.as_str().into());
        }
        _ => return Err("a strict schema needs one of `type`, `anyOf`, `$ref`, of the right type".into()),
    }
    Ok(Value::Object(out))
}

fn typed(kind: &str, given: &Map<String, Value>, may_be_empty: bool) -> Result<Value, String> {
    let mut out = Map::from_iter([("type".to_owned(), Value::from(kind))]);
    match kind {
        "object" => return object(given, may_be_empty),
        "array" => {
            let items = given.get("items").ok_or("an array schema needs `items`")?;
            out.insert("items".into(), node(items, false, false)?);
            copy(given, &mut out, "description", Value::is_string)?;
        }
        "string" => {
            copy(given, &mut out, "description", Value::is_string)?;
            copy(given, &mut out, "pattern", Value::is_string)?;
            let formats = ["email", "hostname", "ipv4", "ipv6", "uuid"];
            copy(given, &mut out, "format", |v| formats.iter().any(|format| v == format))?;
            copy(given, &mut out, "enum", |v| {
                v.as_array().is_some_and(|list| list.iter().all(Value::is_string))
            })?;
        }
        "number" | "integer" => {
            let fits = if kind == "number" { Value::is_number } else { Value::is_i64 };
            copy(given, &mut out, "description", Value::is_string)?;
            for keyword in [
                "const",
                "default",
                "minimum",
                "maximum",
                "exclusiveMinimum",
                "exclusiveMaximum",
                "multipleOf",
            ] {
                copy(given, &mut out, keyword, fits)?;
            }
        }
        "boolean" | "null" => copy(given, &mut out, "description", Value::is_string)?,
        other => return Err(format!("unknown schema type {other:?}")),
    }
    Ok(Value::Object(out))
}

fn object(given: &Map<String, Value>, may_be_empty: bool) -> Result<Value, String> {
    let properties = nodes(given, "properties")?.unwrap_or_default();
    if properties.is_empty() && !may_be_empty {
        return Err("an object with no properties is not allowed".into());
    }
    if let Some(required) = present(given, "required") {
        let names = required.as_array().ok_or("`required` must be a list")?;
        let mut seen = std::collections::HashSet::new();
        for name in names {
            let name = name.as_str().ok_or("`required` must list names")?;
            if !properties.contains_key(name) || !seen.insert(name) {
                return Err(format!("`required` names {name:?}, which is no property or repeated"));
            }
        }
        if seen.len() != properties.len() {
            return Err("`required` must list all properties of a strict object".into());
        }
    }
    match present(given, "additionalProperties") {
        None | Some(Value::Bool(false)) => {}
        Some(_) => return Err("`additionalProperties` of a strict object must be false".into()),
    }
    let names: Vec<Value> = properties.keys().map(|name| name.as_str().into()).collect();
    let mut out = Map::new();
    out.insert("type".into(), "object".into());
    out.insert("properties".into(), Value::Object(properties));
    out.insert("additionalProperties".into(), false.into());
    out.insert("required".into(), Value::Array(names));
    copy(given, &mut out, "description", Value::is_string)?;
    // The dialect's own word, and the one that JSON Schema has and clients send.
    for keyword in ["$def", "$defs"] {
        if let Some(definitions) = nodes(given, keyword)? {
            out.insert(keyword.into(), Value::Object(definitions));
        }
    }
    Ok(Value::Object(out))
}

/// A keyword that maps names to schemas, each of them rewritten.
fn nodes(given: &Map<String, Value>, keyword: &str) -> Result<Option<Map<String, Value>>, String> {
    let Some(value) = present(given, keyword) else { return Ok(None) };
    let schemas = value.as_object().ok_or_else(|| format!("`{keyword}` must be an object"))?;
    schemas
        .iter()
        .map(|(name, schema)| Ok((name.clone(), node(schema, false, false)?)))
        .collect::<Result<_, String>>()
        .map(Some)
}

fn present<'a>(given: &'a Map<String, Value>, keyword: &str) -> Option<&'a Value> {
    given.get(keyword).filter(|value| !value.is_null())
}

fn copy(
    given: &Map<String, Value>,
    out: &mut Map<String, Value>,
    keyword: &str,
    fits: impl Fn(&Value) -> bool,
) -> Result<(), String> {
    if let Some(value) = present(given, keyword) {
        if !fits(value) {
            return Err(format!("`{keyword}` is {value}, which the strict dialect does not allow"));
        }
        out.insert(keyword.into(), value.clone());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rewriting() {
        let given = json!({
            "$schema": "x", "title": "t", "description": "d",
            "properties": {
                "b": {"type": "string", "enum": ["x"], "minLength": 1, "format": "email"},
                "a": {"type": "array", "minItems": 1, "items": {"type": "object", "properties": {"x": {"type": ["null", "integer"]}}}},
                "c": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 0.5}], "title": "no"},
                "d": {"$ref": "#/$def/n", "description": "dropped"},
            },
            "$def": {"n": {"type": "boolean"}},
            "type": "object",
        });
        assert_eq!(
            strict(&given, true).unwrap().to_string(),
            "{\"type\":\"object\",\"properties\":{\"b\":{\"type\":\"string\",\"format\":\"email\",\"enum\":[\"x\"]},\
             \"a\":{\"type\":\"array\",\"items\":{\"type\":\"object\",\"properties\":{\"x\":{\"type\":[\"null\",\
             \"integer\"]}},\"additionalProperties\":false,\"required\":[\"x\"]}},\"c\":{\"anyOf\":[{\"type\":\"null\"},\
             {\"type\":\"number\",\"minimum\":0.5}]},\"d\":{\"$ref\":\"#/$def/n\"}},\"additionalProperties\":false,\
             \"required\":[\"b\",\"a\",\"c\",\"d\"],\"description\":\"d\",\"$def\":{\"n\":{\"type\":\"boolean\"}}}"
        );
    }

    #[test]
    fn refusals() {
        let refused = |schema: Value| assert!(strict(&schema, true).is_err(), "{schema}");
        refused(json!({"type": "string"}));
        refused(json!({"description": "no type"}));
        refused(json!(true));
        refused(json!({"type": "object", "properties": {"a": {"type": "object"}}}));
        refused(json!({"type": "object", "additionalProperties": true}));
        refused(json!({"type": "object", "properties": {"a": {"type": "null"}}, "required": []}));
        refused(json!({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "a"]}));
        refused(json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 0.5}}}));
        refused(json!({"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}));
        refused(json!({"type": "object", "properties": {"a": {"type": ["object"]}}}));
        assert!(strict(&empty_object(), true).is_ok());
        assert!(strict(&empty_object(), false).is_err());
    }
}
