//! The parts of a tool call: parameter headers, raw values, bodies (spec section 6.3).

use serde::de::IgnoredAny;

/// A complete parameter header.
#[derive(Debug, PartialEq)]
pub(super) struct Header {
    pub name: String,
    pub is_string: bool,
}

/// Reads the text after `parameter name=`, which has just grown by one character. There is a header as soon as the whole
/// text is `"name" string="true">` (or `false`, or with a space before the bracket), or `"name">` without quotes in the
/// name.
pub(super) fn header(text: &str) -> Option<Header> {
    let inner = text.strip_suffix('>')?;
    let inner = inner.strip_suffix(' ').unwrap_or(inner).strip_prefix('"')?;
    for (attribute, is_string) in [("string=\"true\"", true), ("string=\"false\"", false)] {
        if let Some(before) = inner.strip_suffix(attribute) {
            let named = before.trim_end();
            if let Some(name) = named.strip_suffix('"').filter(|_| named.len() < before.len()) {
                return Some(Header { name: name.to_owned(), is_string });
            }
        }
    }
    let name = inner.strip_suffix('"').filter(|name| !name.contains('"'))?;
    Some(Header { name: name.to_owned(), is_string: false })
}

/// A raw value as it goes into the arguments: JSON as it came, anything else trimmed and as a JSON string.
pub(super) fn raw_value(text: &str) -> String {
    let trimmed = text.trim();
    if is_json(trimmed) {
        return text.to_owned();
    }
    let mut string = String::with_capacity(trimmed.len() + 2);
    crate::json::write_string(trimmed, &mut string);
    string
}

/// The arguments of a call without parameters: a JSON object that stands in their place, else none.
pub(super) fn body_arguments(body: &str) -> String {
    let inner = body.trim_start().strip_prefix('>').unwrap_or_default().trim();
    if inner.starts_with('{') && is_json(inner) { inner.to_owned() } else { "{}".to_owned() }
}

/// Whether a body says that the call has no parameters and ends here.
pub(super) fn is_self_closing(body: &str) -> bool {
    matches!(body, "/>" | " />")
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers() {
        let found = |text: &str| header(text).map(|h| (h.name, h.is_string));
        for (text, name, is_string) in [
            ("\"a\" string=\"true\">", "a", true),
            ("\"a\"  string=\"false\" >", "a", false),
            ("\"ship addr\" string=\"true\">", "ship addr", true),
            ("\"q\"uo\" string=\"true\">", "q\"uo", true),
            ("\"\" string=\"true\">", "", true),
            ("\"a\">", "a", false),
            ("\"a b\" >", "a b", false),
            ("\"x>y\"\nstring=\"true\">", "x>y", true),
        ] {
            assert_eq!(found(text), Some((name.to_owned(), is_string)), "{text}");
        }
        for text in [
            "",
            ">",
            "\">",
            "a>",
            "\"a\" string=\"maybe\">",
            "\"a\"string=\"true\">",
            "\"a\" string=\"true\"",
            "\"x>",
        ] {
            assert_eq!(found(text), None, "{text}");
        }
    }

    #[test]
    fn values_and_bodies() {
        for (text, value) in [
            (" {\"a\":1 } ", " {\"a\":1 } "),
            ("NaN", "\"NaN\""),
            ("-Infinity", "\"-Infinity\""),
            ("", "\"\""),
            (" x\ny ", "\"x\\ny\""),
            ("1 2", "\"1 2\""),
            ("1e999", "1e999"),
        ] {
            assert_eq!(raw_value(text), value, "{text:?}");
        }
        assert_eq!(body_arguments(">\n {\"a\": 1}\n"), "{\"a\": 1}");
        for other in ["", ">", ">\n\n", ">[1]", ">{\"a\": }", "{\"a\": 1}", ">{} x"] {
            assert_eq!(body_arguments(other), "{}", "{other:?}");
        }
    }
}
