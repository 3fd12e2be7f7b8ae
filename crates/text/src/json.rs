//! JSON as prompt text (spec section 4.2): as Python's `json.dumps` writes it, non-ASCII kept.

use serde_json::{Number, Value};

/// `value` with `", "` and `": "` between its parts, keys in the order received.
pub fn to_text(value: &Value) -> String {
    let mut out = String::new();
    write_value(value, &mut out);
    out
}

fn write_value(value: &Value, out: &mut String) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
        Value::Number(n) => out.push_str(&number(n)),
        Value::String(s) => write_string(s, out),
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_value(item, out);
            }
            out.push(']');
        }
        Value::Object(members) => {
            out.push('{');
            for (i, (key, member)) in members.iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_string(key, out);
                out.push_str(": ");
                write_value(member, out);
            }
            out.push('}');
        }
    }
}

/// Appends `text` as a JSON string, quotes included.
pub(crate) fn write_string(text: &str, out: &mut String) {
    out.push('"');
    text.chars().for_each(|c| escape(c, out));
    out.push('"');
}

/// Appends one character as it stands inside a JSON string.
pub(crate) fn escape(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\u{8}' => out.push_str("\\b"),
        '\u{c}' => out.push_str("\\f"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c if c < ' ' => out.push_str(&format!("\\u{:04x}", c as u32)),
        c => out.push(c),
    }
}

/// An integer as received, a double as Python's `repr`: the shortest digits that read back, an exponent below 1e-4 and
/// from 1e16 on.
fn number(n: &Number) -> String {
    let shortest = n.to_string();
    if !n.is_f64() {
        return shortest;
    }
    // The digits are taken from serde_json: where two shortest forms are equally near it takes the even one, as Python
    // does and `format!` does not.
    let (sign, magnitude) = match shortest.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", shortest.as_str()),
    };
    let (mantissa, exponent) = magnitude.split_once('e').unwrap_or((magnitude, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let all = format!("{whole}{fraction}");
    let digits = all.trim_start_matches('0');
    if digits.is_empty() {
        return format!("{sign}0.0");
    }
    let leading_zeros = (all.len() - digits.len()) as i32;
    let exponent = exponent.parse().unwrap_or(0) + whole.len() as i32 - 1 - leading_zeros;
    let digits = digits.trim_end_matches('0');
    let magnitude = if (-4..0).contains(&exponent) {
        format!("0.{}{digits}", "0".repeat(-exponent as usize - 1))
    } else if (0..16).contains(&exponent) {
        let whole = exponent as usize + 1;
        let padded = format!("{digits:0<whole$}");
        let (int, fraction) = padded.split_at(whole);
        format!("{int}.{}", if fraction.is_empty() { "0" } else { fraction })
    } else {
        let (first, rest) = digits.split_at(1);
        let point = if rest.is_empty() { "" } else { "." };
        format!("{first}{point}{rest}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
    };
    format!("{sign}{magnitude}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_as_python_prints_them() {
        for (json, text) in [
            ("1", "1"),
            ("-7", "-7"),
            ("18446744073709551615", "18446744073709551615"),
            ("-9223372036854775808", "-9223372036854775808"),
            ("18446744073709551616", "1.8446744073709552e+19"),
            ("-0", "-0.0"),
            ("0.0", "0.0"),
            ("1.0", "1.0"),
            ("1e0", "1.0"),
            ("120.50", "120.5"),
            ("0.0001", "0.0001"),
            ("0.00012345", "0.00012345"),
            ("0.00001", "1e-05"),
            ("1.5e-7", "1.5e-07"),
            ("123456789012345680", "123456789012345680"),
            ("1234567890123456.8", "1234567890123456.8"),
            ("9999999999999998.0", "9999999999999998.0"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("1.5e300", "1.5e+300"),
            ("5e-324", "5e-324"),
            ("0.1", "0.1"),
            ("2.2250738585072011e-308", "2.225073858507201e-308"),
        ] {
            assert_eq!(to_text(&serde_json::from_str(json).unwrap()), text, "{json}");
        }
        assert!(serde_json::from_str::<Value>("1e400").is_err(), "beyond a double");
    }

    /// Exactly between two shortest forms: the even one, as Python prints it.
    #[test]
    fn equally_near_digits_are_even() {
        for (json, text) in
            [("917521762710684.25", "917521762710684.2"), ("-237585891692028.125", "-237585891692028.12")]
        {
            assert_eq!(to_text(&serde_json::from_str(json).unwrap()), text, "{json}");
        }
    }

    #[test]
    fn strings_and_order() {
        let json = r#"{"b":"\u0001\b\f\n\r\t\"\\\/\u007f\u2028é","a":[{},[],null,true],"b2":1,"a":2}"#;
        assert_eq!(
            to_text(&serde_json::from_str(json).unwrap()),
            "{\"b\": \"\\u0001\\b\\f\\n\\r\\t\\\"\\\\/\u{7f}\u{2028}é\", \"a\": 2, \"b2\": 1}"
        );
    }
}
