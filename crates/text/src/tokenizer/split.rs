//! Pre-tokenisation (spec section 2.2): numbers, then Chinese and kana, then the six alternatives.
//!
//! The general expression engine that handles the look-ahead gives up silently after a fixed number of steps, which
//! a long run of spaces reaches; this scanner is linear.

use std::sync::OnceLock;

use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Class {
    Letter,
    Mark,
    Number,
    /// `\p{P}` or `\p{S}`.
    Punct,
    Space,
    /// `\r` or `\n`.
    Newline,
    Other,
}

fn classify(c: char) -> Class {
    if matches!(c, '\r' | '\n') {
        return Class::Newline;
    }
    if c.is_whitespace() {
        return Class::Space;
    }
    match c.general_category_group() {
        GeneralCategoryGroup::Letter => Class::Letter,
        GeneralCategoryGroup::Mark => Class::Mark,
        GeneralCategoryGroup::Number => Class::Number,
        GeneralCategoryGroup::Punctuation | GeneralCategoryGroup::Symbol => Class::Punct,
        _ => Class::Other,
    }
}

/// Classes of the code points below U+10000: the lookup is on the path of every byte of a prompt.
fn class(c: char) -> Class {
    static TABLE: OnceLock<Vec<Class>> = OnceLock::new();
    let table = TABLE
        .get_or_init(|| (0..0x1_0000u32).map(|c| char::from_u32(c).map_or(Class::Other, classify)).collect());
    table.get(c as usize).copied().unwrap_or_else(|| classify(c))
}

fn is_cjk(c: char) -> bool {
    matches!(c, '\u{4e00}'..='\u{9fa5}' | '\u{3040}'..='\u{30ff}')
}

/// Calls `piece` with the parts of `text`, in order; together they are `text`.
pub(super) fn split(text: &str, mut piece: impl FnMut(&str)) {
    #[derive(PartialEq, Clone, Copy)]
    enum Run {
        Number,
        Cjk,
        Rest,
    }
    let run_of = |c: char| match class(c) {
        Class::Number => Run::Number,
        _ if is_cjk(c) => Run::Cjk,
        _ => Run::Rest,
    };
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let run = run_of(first);
        let limit = if run == Run::Number { 3 } else { usize::MAX };
        let end = rest
            .char_indices()
            .take(limit)
            .find(|&(_, c)| run_of(c) != run)
            .map_or_else(|| if run == Run::Number { nth_char(rest, limit) } else { rest.len() }, |(i, _)| i);
        let (head, tail) = rest.split_at(end);
        if run == Run::Number {
            piece(head)
        } else {
            split_words(head, &mut piece)
        }
        rest = tail;
    }
}

/// Byte offset of the `n`th character, or the length of the text.
fn nth_char(text: &str, n: usize) -> usize {
    text.char_indices().nth(n).map_or(text.len(), |(i, _)| i)
}

/// The third step: matches and the gaps between them all become pieces.
fn split_words(text: &str, piece: &mut impl FnMut(&str)) {
    let (mut gap, mut at) = (0, 0);
    while at < text.len() {
        match word(&text[at..]) {
            0 => at += text[at..].chars().next().map_or(1, char::len_utf8),
            len => {
                if gap < at {
                    piece(&text[gap..at]);
                }
                piece(&text[at..at + len]);
                at += len;
                gap = at;
            }
        }
    }
    if gap < text.len() {
        piece(&text[gap..]);
    }
}

/// Length of the alternative that matches at the start of `text`, 0 if none does.
fn word(text: &str) -> usize {
    let bytes = text.as_bytes();
    let Some(first) = text.chars().next() else { return 0 };
    if first.is_ascii_punctuation() {
        let letters = bytes[1..].iter().take_while(|b| b.is_ascii_alphabetic()).count();
        if letters > 0 {
            return 1 + letters;
        }
    }
    let is_word = |c: char| matches!(class(c), Class::Letter | Class::Mark);
    let first_class = class(first);
    let after_first = &text[first.len_utf8()..];
    match first_class {
        Class::Letter | Class::Mark => return first.len_utf8() + run(after_first, is_word),
        Class::Newline | Class::Punct => {}
        Class::Space | Class::Number | Class::Other => {
            let letters = run(after_first, is_word);
            if letters > 0 {
                return first.len_utf8() + letters;
            }
        }
    }
    let space = usize::from(first == ' ');
    let punct = run(&text[space..], |c| class(c) == Class::Punct);
    if punct > 0 {
        let end = space + punct;
        return end + bytes[end..].iter().take_while(|b| matches!(b, b'\r' | b'\n')).count();
    }
    if !matches!(first_class, Class::Space | Class::Newline) {
        return 0;
    }
    let spaces = run(text, |c| matches!(class(c), Class::Space | Class::Newline));
    if let Some(newline) = bytes[..spaces].iter().rposition(|b| matches!(b, b'\r' | b'\n')) {
        return newline + 1;
    }
    if spaces == text.len() {
        return spaces;
    }
    // Of a run that something follows, the last space stays for the next word, unless it is the whole run.
    match text[..spaces].char_indices().next_back() {
        Some((last, _)) if last > 0 => last,
        _ => spaces,
    }
}

fn run(text: &str, in_run: impl Fn(char) -> bool) -> usize {
    text.char_indices().find(|&(_, c)| !in_run(c)).map_or(text.len(), |(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: &str) -> Vec<String> {
        let mut out = Vec::new();
        split(text, |p| out.push(p.to_owned()));
        out
    }

    #[test]
    fn alternatives_in_order() {
        for (text, expected) in [
            ("Hello, world", vec!["Hello", ",", " world"]),
            (".foo (bar)", vec![".foo", " (", "bar", ")"]),
            ("12345", vec!["123", "45"]),
            ("a   b", vec!["a", "  ", " b"]),
            ("a \n \n b", vec!["a", " \n \n", " b"]),
            ("x  ", vec!["x", "  "]),
            ("1  2", vec!["1", "  ", "2"]),
            ("中文English", vec!["中文", "English"]),
            ("ア・イ", vec!["ア", "・", "イ"]),
            ("\u{301}a", vec!["\u{301}a"]),
            ("\0\u{1}-", vec!["\0\u{1}", "-"]),
            ("\ta", vec!["\ta"]),
            ("!?\r\n\nx", vec!["!?\r\n\n", "x"]),
            ("  !", vec![" ", " !"]),
        ] {
            assert_eq!(pieces(text), expected, "{text:?}");
        }
    }
}
