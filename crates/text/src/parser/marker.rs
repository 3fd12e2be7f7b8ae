//! Streaming search for the markers of a state (spec section 6.2): one automaton per marker, constant work per item on
//! average.

use crate::TextItem;

/// One marker: items to find, possibly with line ends before them that belong to it.
pub(super) struct Marker {
    pattern: Vec<TextItem>,
    /// Longest proper prefix of the pattern that ends each of its prefixes.
    fallback: Vec<usize>,
    takes_newlines: bool,
    matched: usize,
    /// Line ends directly before the matched part.
    newlines: usize,
}

const NEWLINE: TextItem = TextItem::Char('\n');

impl Marker {
    pub fn new(pattern: Vec<TextItem>) -> Self {
        let mut fallback = vec![0; pattern.len()];
        let mut length = 0;
        for i in 1..pattern.len() {
            while length > 0 && pattern[i] != pattern[length] {
                length = fallback[length - 1];
            }
            if pattern[i] == pattern[length] {
                length += 1;
            }
            fallback[i] = length;
        }
        Self { pattern, fallback, takes_newlines: false, matched: 0, newlines: 0 }
    }

    pub fn text(text: &str) -> Self {
        Self::new(text.chars().map(TextItem::Char).collect())
    }

    /// The same marker with any number of line ends before it. It must not contain one itself.
    pub fn after_newlines(mut self) -> Self {
        self.takes_newlines = true;
        self
    }

    /// Reads one item; returns whether the marker is complete.
    pub fn feed(&mut self, item: TextItem) -> bool {
        let before = self.matched;
        // A complete marker that is read on goes back to what may begin anew.
        let mut next = if before == self.pattern.len() { self.fallback[before - 1] } else { before };
        while next > 0 && self.pattern[next] != item {
            next = self.fallback[next - 1];
        }
        if self.pattern[next] == item {
            next += 1;
        }
        self.matched = next;
        if self.takes_newlines {
            self.newlines = match item {
                NEWLINE if before == 0 => self.newlines + 1,
                NEWLINE => 1,
                _ if next == before + 1 => self.newlines,
                _ => 0,
            };
        }
        self.matched == self.pattern.len()
    }

    /// Items read last that belong to the marker, or may.
    pub fn held(&self) -> usize {
        self.matched + self.newlines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(mut marker: Marker, text: &str) -> Option<(usize, usize)> {
        text.chars().position(|c| marker.feed(TextItem::Char(c))).map(|i| (i, marker.held()))
    }

    #[test]
    fn finds_overlaps_and_newlines() {
        assert_eq!(ends(Marker::text("aab"), "aaab"), Some((3, 3)));
        assert_eq!(ends(Marker::text("abab"), "abaabab"), Some((6, 4)));
        assert_eq!(ends(Marker::text("<d").after_newlines(), "x\n\n<d"), Some((4, 4)));
        assert_eq!(ends(Marker::text("<d").after_newlines(), "\n<<d"), Some((3, 2)));
        assert_eq!(ends(Marker::text("<d").after_newlines(), "<\n\n<d"), Some((4, 4)));
        assert_eq!(ends(Marker::text("<d").after_newlines(), "\n <d"), Some((3, 2)));
        assert_eq!(ends(Marker::text("<d"), "<<c"), None);
    }
}
