//! Metal Shading Language to C++ for the emulator and to CUDA C++ for NVRTC. Both dialects differ from MSL in what C++
//! cannot say: attributes of parameters, threadgroup variables and function constants. All else is left to a header
//! that stands in for `metal_stdlib`. Used by the build script and by tests.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// One parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its declaration without the attribute, name included.
    pub declaration: String,
    /// Its name.
    pub name: String,
    /// Its type.
    pub kind: String,
    /// The attribute: `buffer`, `threadgroup` or a thread's place.
    pub attribute: String,
    /// Index of a buffer or of threadgroup memory.
    pub index: usize,
}

impl Parameter {
    /// Whether a buffer is passed as a few bytes (`constant T&`).
    pub fn by_value(&self) -> bool {
        self.attribute == "buffer" && self.kind.ends_with('&')
    }
}

/// One kernel function.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Its parameters in order; buffers come first and are numbered from 0.
    pub parameters: Vec<Parameter>,
    /// Whether it, or a function it calls, waits at a barrier or exchanges values within a simdgroup.
    pub synchronises: bool,
    /// Types of the threadgroup variables that it and the functions it calls declare.
    pub threadgroup: Vec<String>,
}

impl Kernel {
    /// The buffers.
    pub fn buffers(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(|p| p.attribute == "buffer")
    }
}

/// One function constant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionConstant {
    /// `bool` or `uint`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Its index.
    pub id: u32,
}

/// A file of kernels in all three languages.
#[derive(Clone, Debug)]
pub struct File {
    /// MSL without includes of our own headers.
    pub metal: String,
    /// C++ for the emulator; entry points are `msl_kernel_NAME`, constants `msl_constant_FILE_ID`.
    pub cpp: String,
    /// CUDA C++; entry points have the kernels' names, constant ID is the macro `MSL_CONSTANT_ID`.
    pub cuda: String,
    /// The kernels.
    pub kernels: Vec<Kernel>,
    /// The function constants.
    pub constants: Vec<FunctionConstant>,
}

/// Where a thread stands: attribute, member of the emulator's context, function of the CUDA header.
const PLACES: [(&str, &str, &str); 10] = [
    ("thread_position_in_grid", "grid", "msl_grid()"),
    ("thread_position_in_threadgroup", "local", "msl_local()"),
    ("threadgroup_position_in_grid", "group", "msl_group()"),
    ("threads_per_threadgroup", "threads", "msl_size()"),
    ("threadgroups_per_grid", "groups", "msl_groups()"),
    ("threads_per_grid", "size", "msl_all()"),
    ("thread_index_in_threadgroup", "index", "msl_index()"),
    ("thread_index_in_simdgroup", "lane", "(msl_index() % 32)"),
    ("simdgroup_index_in_threadgroup", "simdgroup", "(msl_index() / 32)"),
    ("simdgroups_per_threadgroup", "simdgroups", "((msl_count() + 31) / 32)"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Comments, white space and preprocessor lines.
    Space,
    Word,
    Other,
}

type Token<'a> = (Kind, &'a str);

fn tokens(text: &str) -> Vec<Token<'_>> {
    let b = text.as_bytes();
    let (mut out, mut i, mut line_start) = (Vec::new(), 0, true);
    while i < b.len() {
        let start = i;
        let rest = &text[i..];
        let kind = if rest.starts_with("//") {
            i += rest.find('\n').unwrap_or(rest.len());
            Kind::Space
        } else if rest.starts_with("/*") {
            i += rest.find("*/").map_or(rest.len(), |n| n + 2);
            Kind::Space
        } else if b[i] == b'#' && line_start {
            while i < b.len() && (b[i] != b'\n' || b[i - 1] == b'\\') {
                i += 1;
            }
            Kind::Space
        } else if b[i].is_ascii_whitespace() {
            i += 1;
            Kind::Space
        } else if b[i].is_ascii_alphanumeric() || b[i] == b'_' {
            while i < b.len() && (b[i].is_ascii_alphanumeric() || b[i] == b'_' || b[i] == b'.') {
                // A point belongs to a number, never to a name.
                if b[i] == b'.' && !b[start].is_ascii_digit() {
                    break;
                }
                i += 1;
            }
            Kind::Word
        } else {
            i += 1;
            Kind::Other
        };
        let piece = &text[start..i];
        line_start = if kind == Kind::Space { line_start || piece.contains('\n') } else { false };
        out.push((kind, piece));
    }
    out
}

/// `text` with each `#include "NAME"` replaced by that header, once; `header` finds it.
///
/// # Errors
/// A header that `header` does not know.
pub fn resolve(text: &str, header: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    fn add(
        out: &mut String,
        text: &str,
        seen: &mut BTreeSet<String>,
        header: &dyn Fn(&str) -> Option<String>,
    ) -> Result<(), String> {
        for line in text.lines() {
            let name = line.trim().strip_prefix("#include \"").and_then(|l| l.strip_suffix('"'));
            match name {
                None if line.trim() == "#pragma once" => {}
                None => {
                    out.push_str(line);
                    out.push('\n');
                }
                Some(name) if seen.insert(name.to_owned()) => {
                    let inner = header(name).ok_or_else(|| format!("no kernel header {name}"))?;
                    add(out, &inner, seen, header)?;
                }
                Some(_) => {}
            }
        }
        Ok(())
    }
    let mut out = String::new();
    add(&mut out, text, &mut BTreeSet::new(), header)?;
    Ok(out)
}

struct Parser<'a> {
    file: &'a str,
    tokens: Vec<Token<'a>>,
    at: usize,
}

impl<'a> Parser<'a> {
    fn error<T>(&self, what: &str) -> Result<T, String> {
        let line = 1 + self.tokens[..self.at].iter().map(|t| t.1.matches('\n').count()).sum::<usize>();
        Err(format!("{}.metal, line {line} after its headers: {what}", self.file))
    }

    /// The place of the next token that is no space, from `at` on.
    fn next(&self, mut at: usize) -> usize {
        while at < self.tokens.len() && self.tokens[at].0 == Kind::Space {
            at += 1;
        }
        at
    }

    fn is(&self, at: usize, text: &str) -> bool {
        self.tokens.get(at).is_some_and(|t| t.1 == text)
    }

    /// The place behind the bracket that closes the one at `at`.
    fn close(&self, at: usize) -> Result<usize, String> {
        let (mut depth, mut i) = (0usize, at);
        while let Some((kind, text)) = self.tokens.get(i) {
            if *kind == Kind::Other {
                match *text {
                    "(" | "[" | "{" => depth += 1,
                    ")" | "]" | "}" => {
                        depth -= 1;
                        if depth == 0 {
                            return Ok(i + 1);
                        }
                    }
                    _ => {}
                }
            }
            i += 1;
        }
        self.error("a bracket is not closed")
    }

    /// The first `what` at this level, from `at` on.
    fn find(&self, at: usize, what: &str) -> Result<usize, String> {
        let mut i = at;
        while i < self.tokens.len() {
            match self.tokens[i] {
                (Kind::Other, t) if t == what => return Ok(i),
                (Kind::Other, "(" | "[" | "{") => i = self.close(i)?,
                _ => i += 1,
            }
        }
        self.error(&format!("no `{what}` follows"))
    }

    fn text(&self, from: usize, to: usize) -> String {
        let mut out = String::new();
        for (kind, text) in &self.tokens[from..to] {
            match kind {
                Kind::Space => {
                    if !out.is_empty() && !out.ends_with(' ') {
                        out.push(' ');
                    }
                }
                _ => out.push_str(text),
            }
        }
        out.trim().to_owned()
    }

    /// `[[name(argument)]]` at `at`: name, argument and the place behind it.
    fn attribute(&self, at: usize) -> Result<Option<(String, String, usize)>, String> {
        let inner = self.next(at + 1);
        if !self.is(at, "[") || !self.is(inner, "[") {
            return Ok(None);
        }
        let end = self.close(at)?;
        let text: String = self.text(inner + 1, end).chars().filter(|c| !c.is_whitespace()).collect();
        let text = text.trim_end_matches(']');
        let (name, argument) = text.split_once('(').unwrap_or((text, ""));
        Ok(Some((name.to_owned(), argument.trim_end_matches(')').to_owned(), end)))
    }

    fn parameters(&mut self, open: usize, name: &str) -> Result<Vec<Parameter>, String> {
        let end = self.close(open)? - 1;
        let (mut out, mut start) = (Vec::new(), open + 1);
        while start < end {
            let mut i = start;
            let mut attribute = None;
            while i < end && !self.is(i, ",") {
                if let Some(found) = self.attribute(i)? {
                    attribute = Some((found, i));
                    i = attribute.as_ref().map_or(i, |((_, _, end), _)| *end);
                } else if self.is(i, "(") {
                    i = self.close(i)?;
                } else {
                    i += 1;
                }
            }
            self.at = start;
            let Some(((attribute, argument, _), at)) = attribute else {
                return self.error(&format!("a parameter of kernel {name} has no attribute"));
            };
            let declaration = self.text(start, at);
            let word = declaration.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |n| n + 1);
            let parameter = declaration[word..].to_owned();
            let kind = declaration[..word].trim().to_owned();
            let index = match attribute.as_str() {
                "buffer" | "threadgroup" => match argument.parse() {
                    Ok(index) => index,
                    Err(_) => return self.error(&format!("[[{attribute}({argument})]] has no number")),
                },
                _ if PLACES.iter().any(|p| p.0 == attribute) => 0,
                _ => return self.error(&format!("[[{attribute}]] is not known to the rewriter")),
            };
            out.push(Parameter { declaration, name: parameter, kind, attribute, index });
            start = i + 1;
        }
        let buffers: Vec<usize> = out.iter().filter(|p| p.attribute == "buffer").map(|p| p.index).collect();
        if buffers != (0..buffers.len()).collect::<Vec<_>>() {
            return self.error(&format!("the buffers of kernel {name} are not 0, 1, 2 … in their order"));
        }
        let groups = out.iter().filter(|p| p.attribute == "threadgroup").count();
        if groups > 1 || out.iter().any(|p| p.attribute == "threadgroup" && p.index != 0) {
            return self.error(&format!("kernel {name}: one [[threadgroup(0)]] is what the rewriter knows"));
        }
        Ok(out)
    }
}

/// Rewrites a file whose own includes have been resolved. `file` is its name without `.metal`.
///
/// # Errors
/// A sentence that names the file and the line, where the text leaves the rules of the kernels.
pub fn rewrite(file: &str, metal: &str) -> Result<File, String> {
    let mut p = Parser { file, tokens: tokens(metal), at: 0 };
    let (mut cpp, mut cuda) = (String::from("#include <metal_stdlib>\n"), String::new());
    let (mut kernels, mut constants) = (Vec::new(), Vec::new());
    // Names used in the body of each function at file level, and the types of its threadgroup variables.
    let mut bodies: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut variables: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let (mut depth, mut statement, mut shared, mut function) = (0usize, true, 0usize, String::new());
    let mut i = 0;
    while i < p.tokens.len() {
        p.at = i;
        let (kind, text) = p.tokens[i];
        if kind == Kind::Space {
            // NVRTC gets its header in front of the text.
            if !text.trim_start().starts_with("#include") {
                cuda.push_str(text);
                cpp.push_str(text);
            }
            i += 1;
            continue;
        }
        if depth == 0 && statement && text == "constant" {
            let end = p.find(i, ";")?;
            if let Some(at) = (i..end).find(|at| matches!(p.attribute(*at), Ok(Some(_)))) {
                let Some((attribute, id, _)) = p.attribute(at)? else { return p.error("an attribute") };
                let words = p.text(i, at);
                let words: Vec<&str> = words.split(' ').collect();
                let (["constant", kind @ ("bool" | "uint"), name], "function_constant", Ok(id)) =
                    (words.as_slice(), attribute.as_str(), id.parse::<u32>())
                else {
                    return p
                        .error("a function constant is `constant bool|uint NAME [[function_constant(N)]];`");
                };
                let _ = writeln!(cpp, "extern \"C\" {{ uint32_t msl_constant_{file}_{id}; }}");
                let _ = write!(cpp, "#define {name} (({kind})msl_constant_{file}_{id})");
                let _ = write!(cuda, "static constexpr {kind} {name} = MSL_CONSTANT_{id};");
                constants.push(FunctionConstant { kind: (*kind).into(), name: (*name).into(), id });
                i = end + 1;
                continue;
            }
        }
        if depth == 0 && text == "kernel" {
            let result = p.next(i + 1);
            let name_at = p.next(result + 1);
            let open = p.next(name_at + 1);
            if !p.is(result, "void") || !p.is(open, "(") {
                return p.error("a kernel is `kernel void NAME(`");
            }
            let name = p.tokens[name_at].1.to_owned();
            let parameters = p.parameters(open, &name)?;
            let body = p.next(p.close(open)?);
            if !p.is(body, "{") {
                return p.error(&format!("kernel {name} has no body"));
            }
            signatures(&mut cpp, &mut cuda, &name, &parameters);
            function.clone_from(&name);
            kernels.push(Kernel { name, parameters, synchronises: false, threadgroup: Vec::new() });
            (i, depth, statement) = (body + 1, 1, true);
            continue;
        }
        if depth > 0 && statement && text == "threadgroup" {
            let end = p.find(i, ";")?;
            let dims = (i..end).find(|at| p.is(*at, "[")).unwrap_or(end);
            let declaration = p.text(i + 1, dims);
            let Some((kind, name)) = declaration.rsplit_once(' ') else {
                return p.error("a threadgroup variable is `threadgroup TYPE NAME[N];`");
            };
            if !declaration.contains('*') {
                let dims = p.text(dims, end);
                shared += 1;
                variables.entry(function.clone()).or_default().push(format!("{kind}{dims}"));
                let _ = write!(
                    cpp,
                    "typedef threadgroup {kind} msl_shared_{shared}{dims}; msl_shared_{shared}& {name} = \
                     *(msl_shared_{shared}*)msl::shared({shared}, sizeof(msl_shared_{shared}));"
                );
                let _ = write!(cuda, "__shared__ {kind} {name}{dims};");
                i = end + 1;
                continue;
            }
        }
        if depth == 0 && kind == Kind::Word && p.is(p.next(i + 1), "(") {
            text.clone_into(&mut function);
        }
        if depth > 0 && kind == Kind::Word {
            bodies.entry(function.clone()).or_default().insert(text.to_owned());
        }
        match text {
            "{" => depth += 1,
            "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        statement = matches!(text, "{" | "}" | ";");
        cpp.push_str(text);
        cuda.push_str(text);
        i += 1;
    }
    let synchronising = synchronising(&bodies);
    for kernel in &mut kernels {
        kernel.synchronises = synchronising.contains(&kernel.name);
        let called = reached(&bodies, &kernel.name);
        kernel.threadgroup = called.iter().filter_map(|f| variables.get(f)).flatten().cloned().collect();
        entry(&mut cpp, kernel);
    }
    Ok(File { metal: metal.to_owned(), cpp, cuda, kernels, constants })
}

/// `function` and what it calls, itself or through others.
fn reached(bodies: &BTreeMap<String, BTreeSet<String>>, function: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::from([function.to_owned()]);
    let mut open = vec![function.to_owned()];
    while let Some(words) = open.pop().map(|name| bodies.get(&name)) {
        for word in words.into_iter().flatten().filter(|w| bodies.contains_key(*w)) {
            if found.insert(word.clone()) {
                open.push(word.clone());
            }
        }
    }
    found
}

/// The functions that synchronise themselves or through what they call.
fn synchronising(bodies: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<String> {
    let direct = |word: &String| word.starts_with("simd") || word.ends_with("_barrier");
    let mut found: BTreeSet<String> =
        bodies.iter().filter(|(_, words)| words.iter().any(direct)).map(|(name, _)| name.clone()).collect();
    loop {
        let more: Vec<String> = bodies
            .iter()
            .filter(|(name, words)| !found.contains(*name) && words.iter().any(|w| found.contains(w)))
            .map(|(name, _)| name.clone())
            .collect();
        if more.is_empty() {
            return found;
        }
        found.extend(more);
    }
}

/// Both signatures, up to and with the brace of the body.
fn signatures(cpp: &mut String, cuda: &mut String, name: &str, parameters: &[Parameter]) {
    let all: Vec<&str> = parameters.iter().map(|p| p.declaration.as_str()).collect();
    let _ = write!(cpp, "static inline void {name}({}) {{", all.join(", "));
    let mut passed = Vec::new();
    let mut places = String::new();
    for p in parameters {
        match p.attribute.as_str() {
            "buffer" if p.by_value() => passed.push(format!("{} {}", p.kind.trim_end_matches('&'), p.name)),
            "buffer" => passed.push(p.declaration.clone()),
            "threadgroup" => {
                let _ = write!(
                    places,
                    " extern __shared__ __align__(16) unsigned char msl_dynamic[]; {} = ({})msl_dynamic;",
                    p.declaration, p.kind
                );
            }
            place => {
                let function = PLACES.iter().find(|x| x.0 == place).map_or("", |x| x.2);
                let _ = write!(places, " const {} = metal::msl_as<{}>({function});", p.declaration, p.kind);
            }
        }
    }
    let _ = write!(cuda, "extern \"C\" __global__ void {name}({}) {{{places}", passed.join(", "));
}

/// The emulator's entry point of a kernel.
fn entry(cpp: &mut String, kernel: &Kernel) {
    let arguments: Vec<String> = kernel
        .parameters
        .iter()
        .map(|p| match p.attribute.as_str() {
            "buffer" if p.by_value() => format!("*({}*)a[{}]", p.kind.trim_end_matches('&'), p.index),
            "buffer" => format!("({})a[{}]", p.kind, p.index),
            "threadgroup" => format!("({})a[31]", p.kind),
            place => {
                let member = PLACES.iter().find(|x| x.0 == place).map_or("", |x| x.1);
                format!("msl::as<{}>(c->{member})", p.kind)
            }
        })
        .collect();
    let _ = write!(
        cpp,
        "\nextern \"C\" void msl_kernel_{0}(void** a, const msl::Place* c) {{ (void)a; (void)c; {0}({1}); }}",
        kernel.name,
        arguments.join(", ")
    );
    // What Metal limits, as the compiler counts it.
    let shared = kernel.threadgroup.iter().map(|t| format!(" + (sizeof({t}) + 15) / 16 * 16"));
    let inline = kernel.buffers().filter(|p| p.by_value());
    let inline = inline.map(|p| format!(" + sizeof({})", p.kind.trim_end_matches('&')));
    for (what, sum) in [("threadgroup", shared.collect::<String>()), ("inline", inline.collect())] {
        let name = format!("msl_{what}_{}", kernel.name);
        let _ =
            write!(cpp, "\nextern \"C\" {{ extern const uint32_t {name}; const uint32_t {name} = 0{sum}; }}");
    }
}
