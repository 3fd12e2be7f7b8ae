//! What the cache keeps: pages and tails, and their sealed bytes.

use std::fmt;

use model::{
    Layout, Page, Tail,
    sealed::{Kind, Parsed, Reader, Unsealed, Writer, seal, unseal},
};

use super::{PAGE, key::Key};

/// One kept thing by its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Item {
    /// The entries of one page of tokens behind a prefix.
    Page {
        /// The prefix.
        parent: Key,
        /// The prefix and the page.
        key: Key,
    },
    /// Window rows at a length.
    Tail {
        /// The prefix of whole pages.
        node: Key,
        /// Tokens.
        position: usize,
        /// Prefix and the tokens behind its last whole page.
        key: Key,
    },
}

impl fmt::Display for Item {
    /// The name of its file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Item::Page { parent, key } => write!(f, "page-{parent}-{key}"),
            Item::Tail { node, position, key } => write!(f, "tail-{node}-{position}-{key}"),
        }
    }
}

impl Item {
    /// From the name of a file.
    pub fn parse(name: &str) -> Option<Self> {
        let parts: Vec<&str> = name.split('-').collect();
        let item = match parts.as_slice() {
            ["page", parent, key] => Item::Page { parent: Key::parse(parent)?, key: Key::parse(key)? },
            ["tail", node, position, key] => Item::Tail {
                node: Key::parse(node)?,
                position: position.parse().ok()?,
                key: Key::parse(key)?,
            },
            _ => return None,
        };
        // One name an item: no leading zeros.
        (item.to_string() == name).then_some(item)
    }
}

/// The tokens of one page with their entries.
#[derive(Debug)]
pub(crate) struct PageData {
    pub ids: Vec<u32>,
    pub page: Page,
}

/// Window rows with the entries behind the last whole page.
#[derive(Debug)]
pub(crate) struct TailData {
    /// Tokens behind the last whole page.
    pub rest: Vec<u32>,
    pub page: Page,
    pub tail: Tail,
}

impl PageData {
    /// Bytes in memory, about.
    pub fn bytes(&self) -> u64 {
        (self.page.len() + 4 * self.ids.len() + 256) as u64
    }

    pub fn seal(&self, identity: &[u8; 32], parent: Key) -> Vec<u8> {
        let mut out = Writer::default();
        out.bytes(parent.bytes());
        write_ids(&mut out, &self.ids);
        self.page.write(&mut out);
        seal(Kind::Page, identity, &out)
    }

    /// Reads the page behind `parent` that begins at token `first`.
    pub fn unseal(
        bytes: &[u8],
        identity: &[u8; 32],
        layout: &Layout,
        parent: Key,
        first: usize,
    ) -> Parsed<Self> {
        let mut from = unseal(bytes, Kind::Page, identity)?;
        expect(from.bytes()? == parent.bytes(), "prefix")?;
        let ids = read_ids(&mut from)?;
        let page = Page::read(layout, &mut from)?;
        from.end()?;
        expect(ids.len() == PAGE && page.first() == first && page.tokens() == PAGE, "page")?;
        Ok(Self { ids, page })
    }
}

impl TailData {
    /// Bytes in memory, about.
    pub fn bytes(&self) -> u64 {
        (self.tail.len() + self.page.len() + 4 * self.rest.len() + 256) as u64
    }

    pub fn seal(&self, identity: &[u8; 32], node: Key) -> Vec<u8> {
        let mut out = Writer::default();
        out.bytes(node.bytes());
        write_ids(&mut out, &self.rest);
        self.page.write(&mut out);
        self.tail.write(&mut out);
        seal(Kind::Tail, identity, &out)
    }

    /// Reads the tail at `position`, behind the whole pages of `node`.
    pub fn unseal(
        bytes: &[u8],
        identity: &[u8; 32],
        layout: &Layout,
        node: Key,
        position: usize,
    ) -> Parsed<Self> {
        let mut from = unseal(bytes, Kind::Tail, identity)?;
        expect(from.bytes()? == node.bytes(), "prefix")?;
        let rest = read_ids(&mut from)?;
        let page = Page::read(layout, &mut from)?;
        let tail = Tail::read(layout, &mut from)?;
        from.end()?;
        expect(tail.position() == position && rest.len() == position % PAGE, "position")?;
        expect(page.first() == position - rest.len() && page.tokens() == rest.len(), "page")?;
        Ok(Self { rest, page, tail })
    }
}

fn expect(right: bool, what: &'static str) -> Parsed<()> {
    if right { Ok(()) } else { Err(Unsealed::Field(what)) }
}

fn write_ids(out: &mut Writer, ids: &[u32]) {
    out.bytes(&ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>());
}

fn read_ids(from: &mut Reader<'_>) -> Parsed<Vec<u32>> {
    let bytes = from.bytes()?;
    expect(bytes.len().is_multiple_of(4) && bytes.len() <= 4 * PAGE, "tokens")?;
    Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}
