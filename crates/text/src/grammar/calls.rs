//! The form of a block of calls (spec section 4.3) as a grammar.
//!
//! Names of tools are those declared. Of a strict tool every parameter is there, in the schema's order, with a value of
//! its schema; of others names and values are free where the schema leaves them free, and every raw value is JSON.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::Tool;

/// The block after its marker `<｜DSML｜`.
pub(super) const OPENED: &str = "start: \" calls>\\n\" invokes\n";
/// The block after its first line, where the prompt has opened it.
pub(super) const INSIDE: &str = "start: invokes\n";

/// Refs that are followed one into the other.
const DEEPEST_REF: usize = 16;

/// The rule of a whole block.
pub(super) fn block(dsml: u32) -> String {
    format!("block: /\\n*</ <[{dsml}]> \" calls>\\n\" invokes\n")
}

/// The rules from `invokes` on.
pub(super) fn rules(tools: &[Tool], dsml: u32, parallel: bool) -> Result<String, String> {
    let d = format!("<[{dsml}]>");
    // What may stand in one place begins alike: the lexer takes the longest, and does not come back.
    let more = if parallel { "(\"\\n<\" invoke)* " } else { "" };
    let mut out = format!(
        "invokes: \"<\" invoke {more}\"\\n</\" {d} \" calls>\"\n\
         invoke: {d} \" invoke name=\\\"\" ({})\n\
         close: \"\\n</\" {d} \" invoke>\"\n\
         any_string: \"true\\\">\" TEXT {d} \" parameter>\"\n\
         any_json: \"false\\\">\" {} \"</\" {d} \" parameter>\"\n\
         TEXT: /(?s:.*)<\\//\n",
        (0..tools.len()).map(|i| format!("tool{i}")).collect::<Vec<_>>().join(" | "),
        super::json_rule(&json!({})),
    );
    for (i, tool) in tools.iter().enumerate() {
        let name = literal(&format!("{}\">\n", tool.name));
        if tool.strict == Some(true) {
            strict(&mut out, i, tool, &name, &d)
                .map_err(|reason| format!("tool {:?}: {reason}", tool.name))?;
        } else {
            free(&mut out, i, &tool.parameters, &name, &d);
        }
    }
    Ok(out)
}

/// A tool whose arguments are not held to their schemas.
fn free(out: &mut String, i: usize, schema: &Value, name: &str, d: &str) {
    let properties = schema["properties"].as_object();
    let closed = schema["additionalProperties"] == false;
    let begin = format!("{d} \" parameter name=\\\"\"");
    let names = match properties {
        Some(properties) if closed && !properties.is_empty() => {
            properties.keys().map(|key| literal(key)).collect::<Vec<_>>().join(" | ")
        }
        _ if closed => {
            let _ = writeln!(out, "tool{i}: {name} close");
            return;
        }
        _ => "/[^\"\\n]*/".into(),
    };
    let _ = writeln!(
        out,
        "tool{i}: {name} (\"<\" param{i} (\"\\n<\" param{i})*)? close\n\
         param{i}: {begin} ({names}) \"\\\" string=\\\"\" (any_string | any_json)"
    );
}

/// A tool of which every parameter follows its schema.
fn strict(out: &mut String, i: usize, tool: &Tool, name: &str, d: &str) -> Result<(), String> {
    let root = &tool.parameters;
    let none = serde_json::Map::new();
    let properties = root["properties"].as_object().unwrap_or(&none);
    let parts: Vec<String> = (0..properties.len()).map(|k| format!("param{i}_{k}")).collect();
    let _ = writeln!(out, "tool{i}: {name} {} close", parts.join(" \"\\n\" "));
    for (k, (key, schema)) in properties.iter().enumerate() {
        let mut values = Values::default();
        values.collect(schema, root, 0)?;
        let mut forms = Vec::new();
        for (n, text) in values.texts.iter().enumerate() {
            let terminal = format!("TEXT{i}_{k}_{n}");
            text.write(out, &terminal);
            forms.push(format!("\"true\\\">\" {terminal} {d} \" parameter>\""));
        }
        for value in values.json {
            forms.push(format!("\"false\\\">\" {} \"</\" {d} \" parameter>\"", super::json_rule(&value)));
        }
        if forms.is_empty() {
            return Err(format!("parameter {key:?} can have no value"));
        }
        let header = literal(&format!(" parameter name=\"{key}\" string=\""));
        let _ = writeln!(out, "param{i}_{k}: \"<\" {d} {header} ({})", forms.join(" | "));
    }
    Ok(())
}

/// Text as a literal of the grammar.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// What a parameter may be: text as it is, or JSON.
#[derive(Default)]
struct Values<'a> {
    texts: Vec<Text<'a>>,
    json: Vec<Value>,
}

/// Schema of a string that stands without quotes.
struct Text<'a> {
    choices: Option<&'a Vec<Value>>,
    pattern: Option<&'a str>,
    format: Option<&'a str>,
}

impl<'a> Values<'a> {
    fn collect(&mut self, schema: &'a Value, root: &'a Value, depth: usize) -> Result<(), String> {
        if let Some(target) = schema["$ref"].as_str() {
            let path = target.strip_prefix('#').unwrap_or(target);
            return match root.pointer(path) {
                Some(schema) if depth < DEEPEST_REF => self.collect(schema, root, depth + 1),
                _ => Err(format!("$ref {target:?} leads nowhere")),
            };
        }
        if let Some(options) = schema["anyOf"].as_array() {
            return options.iter().try_for_each(|option| self.collect(option, root, depth));
        }
        if let Some(kinds) = schema["type"].as_array() {
            for kind in kinds {
                match kind == "string" {
                    true => self.texts.push(Text { choices: None, pattern: None, format: None }),
                    false => self.json.push(json!({"type": kind})),
                }
            }
            return Ok(());
        }
        if schema["type"] == "string" {
            self.texts.push(Text {
                choices: schema["enum"].as_array(),
                pattern: schema["pattern"].as_str(),
                format: schema["format"].as_str(),
            });
            return Ok(());
        }
        check_refs(schema)?;
        let mut value = schema.clone();
        for name in DEFINITIONS {
            if let (Some(own), Some(all)) = (value.as_object_mut(), root.get(name)) {
                own.insert(name.into(), all.clone());
            }
        }
        self.json.push(value);
        Ok(())
    }
}

/// Where the schemas stand that a `$ref` may name.
const DEFINITIONS: [&str; 2] = ["$def", "$defs"];

/// A parameter's schema is compiled on its own: refs may lead to definitions only.
fn check_refs(schema: &Value) -> Result<(), String> {
    match schema {
        Value::Object(members) => {
            if let Some(target) = schema["$ref"].as_str()
                && !DEFINITIONS.iter().any(|name| target.starts_with(&format!("#/{name}/")))
            {
                return Err(format!("$ref {target:?} must lead into $defs"));
            }
            members.values().try_for_each(check_refs)
        }
        Value::Array(items) => items.iter().try_for_each(check_refs),
        _ => Ok(()),
    }
}

impl Text<'_> {
    /// The terminal: the text and the `</` behind it.
    fn write(&self, out: &mut String, terminal: &str) {
        let mut all = Vec::new();
        if let Some(choices) = self.choices {
            let choice = |text: &Value| literal(&format!("{}</", text.as_str().unwrap_or_default()));
            all.push(format!("({})", choices.iter().map(choice).collect::<Vec<_>>().join(" | ")));
        }
        let regex = |regex: &str| format!("/(?:{})<\\//", llguidance::regex_to_lark(regex, "dw"));
        if let Some(pattern) = self.pattern {
            all.push(regex(&unanchored(pattern)));
        }
        if let Some(format) = self.format.and_then(format) {
            all.push(regex(&format));
        }
        if all.is_empty() {
            all.push(regex("(?s:.*)"));
        }
        let _ = writeln!(out, "{terminal}: {}", all.join(" & "));
    }
}

/// A pattern, which is searched for, as an expression that matches the whole text.
fn unanchored(pattern: &str) -> String {
    const ANY: &str = "(?s:.*)";
    let (begin, rest) = match pattern.strip_prefix('^') {
        Some(rest) => ("", rest),
        None => (ANY, pattern),
    };
    let escaped = rest.strip_suffix('$').map(|rest| rest.len() - rest.trim_end_matches('\\').len());
    let (rest, end) = match rest.strip_suffix('$') {
        Some(inner) if escaped.is_some_and(|n| n % 2 == 0) => (inner, ""),
        _ => (rest, ANY),
    };
    format!("{begin}(?:{rest}){end}")
}

/// The formats of the strict dialect as expressions.
fn format(name: &str) -> Option<String> {
    let octet = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
    let label = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?";
    let hostname = format!("{label}(?:\\.{label})*");
    Some(match name {
        "uuid" => "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}".into(),
        "ipv4" => format!("{octet}(?:\\.{octet}){{3}}"),
        "hostname" => hostname,
        "email" => format!("[A-Za-z0-9.!#$%&'*+/=?^_`{{|}}~-]{{1,64}}@{hostname}"),
        "ipv6" => {
            let group = "[0-9a-fA-F]{1,4}";
            let mut forms = vec![format!("(?:{group}:){{7}}{group}")];
            for left in 0..8usize {
                let before = match left {
                    0 => ":".to_owned(),
                    n => format!("(?:{group}:){{{n}}}"),
                };
                let after = match 7 - left {
                    0 => String::new(),
                    n => format!("(?:{group}(?::{group}){{0,{}}})?", n - 1),
                };
                forms.push(format!("{before}:{after}"));
            }
            forms.join("|")
        }
        _ => return None,
    })
}
