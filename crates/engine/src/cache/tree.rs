//! The radix tree of pages with its two tiers.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    sync::Arc,
};

use model::{Layout, Page, Tail};

use super::{
    CacheStats, Fetched, Miss, Offer, PAGE,
    disk::Disk,
    item::{Item, PageData, TailData},
    key::Key,
};

/// Evicted prefixes that are remembered, to say so.
const REMEMBERED: usize = 1 << 16;
/// Kept texts that are looked at for the first token that differs.
const COMPARED: usize = 64;
/// Bytes of a file beside its entries and rows, at most.
const OVERHEAD: u64 = 4096;

/// A prefix of whole pages.
#[derive(Default)]
struct Node {
    /// Prefix and item of the last page; the root has none.
    page: Option<Item>,
    children: Vec<Key>,
    tails: Vec<(usize, Key)>,
}

/// Where an item is and when it was last used.
struct Entry {
    page: Option<Arc<PageData>>,
    tail: Option<Arc<TailData>>,
    tick: u64,
}

impl Entry {
    fn in_memory(&self) -> u64 {
        self.page.as_ref().map_or(0, |p| p.bytes()) + self.tail.as_ref().map_or(0, |t| t.bytes())
    }
}

/// The tree. An item's last use is never later than that of the pages before it, so that the order of last use is an
/// order in which items can be forgotten.
pub(crate) struct Tree {
    owner: [u8; 32],
    layout: Layout,
    root: Key,
    nodes: HashMap<Key, Node>,
    entries: HashMap<Item, Entry>,
    memory_order: BTreeMap<u64, Item>,
    disk_order: BTreeMap<u64, Item>,
    memory: u64,
    memory_limit: u64,
    disk: Option<Disk>,
    disk_limit: u64,
    tick: u64,
    evicted: (HashSet<Key>, VecDeque<Key>),
    /// The last file that was not used: prefix, name and reason.
    rejected: Option<(Key, String, String)>,
    stats: CacheStats,
}

impl Tree {
    /// An empty tree, or what the folder holds. `disk` lists its items, least recently used first.
    pub fn new(
        owner: [u8; 32],
        layout: Layout,
        memory_limit: u64,
        disk_limit: u64,
        disk: Option<(Disk, Vec<Item>)>,
    ) -> Self {
        let root = Key::root(&owner);
        let (disk, found) = disk.map_or((None, Vec::new()), |(disk, found)| (Some(disk), found));
        let mut tree = Self {
            owner,
            layout,
            root,
            nodes: HashMap::from([(root, Node::default())]),
            entries: HashMap::new(),
            memory_order: BTreeMap::new(),
            disk_order: BTreeMap::new(),
            memory: 0,
            memory_limit,
            disk,
            disk_limit,
            tick: 0,
            evicted: Default::default(),
            rejected: None,
            stats: CacheStats::default(),
        };
        tree.adopt(found);
        tree.shrink_disk();
        tree
    }

    /// Links the items of the folder. Those that do not hang together with the root (another model's, or behind a page
    /// that is gone) stay files until there is no room for them.
    fn adopt(&mut self, found: Vec<Item>) {
        for item in &found {
            self.entries.insert(*item, Entry { page: None, tail: None, tick: 0 });
            match *item {
                Item::Page { key, .. } if key == self.root => {}
                Item::Page { parent, key } => {
                    let node = self.nodes.entry(key).or_default();
                    node.page = Some(*item);
                    self.nodes.entry(parent).or_default().children.push(key);
                }
                Item::Tail { node, position, key } => {
                    self.nodes.entry(node).or_default().tails.push((position, key));
                }
            }
        }
        // Newest first, each with the pages before it that no newer one has named: as if used in this order.
        let (mut order, mut named) = (Vec::with_capacity(found.len()), HashSet::new());
        for item in found.into_iter().rev() {
            let start = order.len();
            let mut next = Some(item);
            while let Some(item) = next.filter(|i| named.insert(*i)) {
                order.push(item);
                let (Item::Page { parent: before, .. } | Item::Tail { node: before, .. }) = item;
                next = self.nodes.get(&before).and_then(|n| n.page);
            }
            order[start..].reverse();
        }
        order.into_iter().rev().for_each(|item| self.retick(item));
    }

    /// Makes the pages up to `node` the most recently used, the shortest prefix last.
    fn touch_path(&mut self, path: &[Key]) {
        for key in path.iter().rev() {
            if let Some(item) = self.nodes.get(key).and_then(|n| n.page) {
                self.retick(item);
            }
        }
    }

    fn retick(&mut self, item: Item) {
        let Some(entry) = self.entries.get_mut(&item) else { return };
        self.tick += 1;
        self.memory_order.remove(&entry.tick);
        self.disk_order.remove(&entry.tick);
        entry.tick = self.tick;
        if entry.in_memory() > 0 {
            self.memory_order.insert(self.tick, item);
        }
        if self.disk.as_ref().is_some_and(|d| d.has(&item)) {
            self.disk_order.insert(self.tick, item);
        }
    }

    pub fn stats(&self) -> CacheStats {
        let tails = self.entries.keys().filter(|i| matches!(i, Item::Tail { .. })).count();
        CacheStats {
            memory_bytes: self.memory,
            disk_bytes: self.disk.as_ref().map_or(0, Disk::bytes),
            pages: (self.entries.len() - tails) as u64,
            tails: tails as u64,
            ..self.stats
        }
    }

    pub fn count(&mut self, hit: bool) {
        self.stats.lookups += 1;
        self.stats.hits += u64::from(hit);
    }

    fn has_page(&self, key: Key) -> bool {
        self.nodes.get(&key).is_some_and(|n| n.page.is_some())
    }

    /// Prefixes of whole pages of `ids` that are there, shortest first, the root included.
    fn walk(&self, ids: &[u32]) -> Vec<Key> {
        let mut path = vec![self.root];
        let mut key = self.root;
        for page in ids.chunks_exact(PAGE) {
            key = key.then(page);
            if !self.has_page(key) {
                break;
            }
            path.push(key);
        }
        path
    }

    pub fn find(&mut self, ids: &[u32], limit: usize) -> Offer {
        let path = self.walk(&ids[..limit]);
        let whole = (path.len() - 1) * PAGE;
        let last = path[path.len() - 1];
        let (partial, miss) = self.beyond(last, ids, whole, limit);
        let tail = path.iter().enumerate().rev().find_map(|(n, key)| {
            let first = n * PAGE;
            let fits = |(position, tail): &&(usize, Key)| {
                *position <= limit && *position >= first && *tail == key.then(&ids[first..*position])
            };
            // Looking beyond may have shown that a page of the path is none.
            self.nodes.get(key)?.tails.iter().filter(fits).map(|(position, _)| *position).max()
        });
        Offer { entries: whole + partial, tail: tail.unwrap_or(0), miss }
    }

    /// How many tokens behind `node`, which ends at `whole`, a kept page has in common with `ids`; and why not more.
    fn beyond(&mut self, node: Key, ids: &[u32], whole: usize, limit: usize) -> (usize, Miss) {
        let (common, differs) = match self.longest(node, ids, whole) {
            Some((_, common, kept)) => (common.min(limit - whole), kept.map(|k| (whole + common, k))),
            None => (0, None),
        };
        let at = whole + common;
        let next = ids.get(whole..whole + PAGE).map(|page| node.then(page));
        let miss = match (differs, &self.rejected) {
            _ if at >= limit => Miss::None,
            (_, Some((key, file, why))) if Some(*key) == next || *key == node => {
                Miss::Rejected { at, file: file.clone(), why: why.clone() }
            }
            _ if next.is_some_and(|key| self.evicted.0.contains(&key)) => Miss::Evicted { at },
            (Some((at, kept)), _) => Miss::Differs { at, asked: ids[at], kept },
            _ if self.entries.is_empty() => Miss::Empty,
            _ => Miss::Ends { at },
        };
        (common, miss)
    }

    /// The page or tail behind `node` that has most tokens in common with `ids` from `first` on, how many, and the token
    /// where it goes on otherwise, if it does.
    fn longest(&mut self, node: Key, ids: &[u32], first: usize) -> Option<(Item, usize, Option<u32>)> {
        let n = self.nodes.get(&node)?;
        let pages = n.children.iter().rev().filter_map(|c| self.nodes.get(c)?.page).take(COMPARED);
        let tail = |(position, key): &(usize, Key)| Item::Tail { node, position: *position, key: *key };
        let (near, far): (Vec<Item>, Vec<Item>) = n
            .tails
            .iter()
            .rev()
            .map(tail)
            .partition(|i| self.entries.get(i).is_some_and(|e| e.tail.is_some()));
        // A tail's file holds all windows, too much to read for its few tokens.
        let tails = near.into_iter().take(COMPARED).chain(far.into_iter().take(COMPARED / 16));
        let items: Vec<Item> = pages.chain(tails).collect();
        let ids = &ids[first..];
        let mut best: Option<(Item, usize, Option<u32>)> = None;
        for item in items {
            let Some(kept) = self.tokens(item, first) else { continue };
            let common = kept.iter().zip(ids).take_while(|(a, b)| a == b).count();
            let goes_on = kept.get(common).filter(|_| common < ids.len()).copied();
            // Of equal ones the first: a page, whose entries are at hand.
            if best.is_none_or(|(_, c, other)| (common, goes_on.is_some()) > (c, other.is_some())) {
                best = Some((item, common, goes_on));
            }
        }
        best
    }

    /// The tokens of an item behind the pages before it.
    fn tokens(&mut self, item: Item, first: usize) -> Option<Vec<u32>> {
        match item {
            Item::Page { .. } => self.page(item, first).map(|p| p.ids.clone()),
            Item::Tail { .. } => self.tail(item, first).map(|t| t.rest.clone()),
        }
    }

    pub fn fetch(&mut self, ids: &[u32], len: usize, with_tail: bool) -> Option<Fetched> {
        let whole = len / PAGE * PAGE;
        let path = self.walk(&ids[..whole]);
        if path.len() - 1 < whole / PAGE {
            return None;
        }
        let last = path[path.len() - 1];
        let mut pages = Vec::with_capacity(path.len());
        for (n, (key, asked)) in path[1..].iter().zip(ids.chunks(PAGE)).enumerate() {
            let item = self.nodes.get(key)?.page?;
            let page = self.page(item, n * PAGE)?;
            if page.ids != asked {
                return self.reject(item, "its tokens are others".into());
            }
            pages.push(page);
        }
        let (mut tail, mut used) = (None, self.nodes.get(&last)?.page);
        if with_tail {
            let item = Item::Tail { node: last, position: len, key: last.then(&ids[whole..len]) };
            let found = self.tail(item, whole)?;
            if found.rest != ids[whole..len] {
                return self.reject(item, "its tokens are others".into());
            }
            (tail, used) = (Some(found), Some(item));
        } else if len > whole {
            let (item, common, _) = self.longest(last, ids, whole)?;
            if common < len - whole {
                return None;
            }
            pages.push(match item {
                Item::Page { .. } => self.page(item, whole)?,
                // Its entries are of use without its windows.
                Item::Tail { .. } => {
                    let found = self.tail(item, whole)?;
                    Arc::new(PageData { ids: found.rest.clone(), page: found.page.clone() })
                }
            });
            used = Some(item);
        }
        if let Some(item) = used {
            self.retick(item);
            if let Some(disk) = &self.disk {
                disk.touch(&item);
            }
        }
        self.touch_path(&path);
        self.shrink_memory();
        Some(Fetched { pages, tail })
    }

    pub fn missing(&self, ids: &[u32]) -> (usize, bool) {
        let path = self.walk(ids);
        let whole = (path.len() - 1) * PAGE;
        let last = path[path.len() - 1];
        let complete = whole == ids.len() / PAGE * PAGE;
        let key = last.then(&ids[whole..]);
        let tail = complete && self.nodes[&last].tails.contains(&(ids.len(), key));
        (whole, tail)
    }

    pub fn insert(&mut self, ids: &[u32], pages: Vec<Page>, tail: Option<(Page, Tail)>) {
        self.rejected = None;
        let mut key = self.root;
        let mut path = vec![key];
        let mut pages = pages.into_iter().peekable();
        let mut whole = true;
        for (n, asked) in ids.chunks_exact(PAGE).enumerate() {
            let (parent, first) = (key, n * PAGE);
            key = key.then(asked);
            path.push(key);
            let page = pages.next_if(|p| p.first() == first);
            if self.has_page(key) {
                continue;
            }
            // Another session may have pushed out what was not to be kept again.
            let Some(page) = page else {
                whole = false;
                break;
            };
            let item = Item::Page { parent, key };
            let data = Arc::new(PageData { ids: asked.to_vec(), page });
            let sealed = self.disk.is_some().then(|| data.seal(&self.owner, parent));
            let node = self.nodes.entry(key).or_default();
            node.page = Some(item);
            self.nodes.entry(parent).or_default().children.push(key);
            self.forget_eviction(key);
            self.store(item, sealed, |e| e.page = Some(data));
        }
        if let Some((page, tail)) = tail.filter(|_| whole) {
            let (node, position) = (key, ids.len());
            let rest = ids[position / PAGE * PAGE..].to_vec();
            let key = node.then(&rest);
            let item = Item::Tail { node, position, key };
            if !self.entries.contains_key(&item) {
                let data = Arc::new(TailData { rest, page, tail });
                let sealed = self.disk.is_some().then(|| data.seal(&self.owner, node));
                self.nodes.entry(node).or_default().tails.push((position, key));
                self.store(item, sealed, |e| e.tail = Some(data));
            }
            self.retick(item);
        }
        self.touch_path(&path);
        self.shrink_memory();
        self.shrink_disk();
    }

    /// Takes a new item into memory and, sealed, to disk.
    fn store(&mut self, item: Item, sealed: Option<Vec<u8>>, set: impl FnOnce(&mut Entry)) {
        let mut entry = Entry { page: None, tail: None, tick: 0 };
        set(&mut entry);
        self.memory += entry.in_memory();
        if let (Some(disk), Some(sealed)) = (&mut self.disk, sealed) {
            match disk.write(item, &sealed) {
                Ok(()) => self.stats.disk_writes += 1,
                Err(_) => self.stats.write_errors += 1,
            }
        }
        self.entries.insert(item, entry);
        self.retick(item);
    }

    /// The data of the page that begins at token `first`, from memory or from disk.
    fn page(&mut self, item: Item, first: usize) -> Option<Arc<PageData>> {
        if let Some(page) = &self.entries.get(&item)?.page {
            return Some(page.clone());
        }
        let Item::Page { parent, key } = item else { return None };
        let most = self.layout.entry_bytes(first, PAGE) as u64 + OVERHEAD;
        let bytes = self.read(item, most)?;
        match PageData::unseal(&bytes, &self.owner, &self.layout, parent, first) {
            Ok(data) if parent.then(&data.ids) == key => {
                let data = Arc::new(data);
                self.remember(item, data.bytes(), |e| e.page = Some(data.clone()));
                Some(data)
            }
            Ok(_) => self.reject(item, "its tokens are others".into()),
            Err(e) => self.reject(item, e.to_string()),
        }
    }

    /// The data of a tail whose last whole page ends before token `first`, from memory or from disk.
    fn tail(&mut self, item: Item, first: usize) -> Option<Arc<TailData>> {
        if let Some(tail) = &self.entries.get(&item)?.tail {
            return Some(tail.clone());
        }
        let Item::Tail { node, position, key } = item else { return None };
        if !(first..first + PAGE).contains(&position) {
            return self.reject(item, "its position is not behind its prefix".into());
        }
        let l = &self.layout;
        let most = l.entry_bytes(first, position - first) + l.window_bytes(position) + l.open_bytes();
        let bytes = self.read(item, most as u64 + OVERHEAD)?;
        match TailData::unseal(&bytes, &self.owner, &self.layout, node, position) {
            Ok(data) if node.then(&data.rest) == key => {
                let data = Arc::new(data);
                self.remember(item, data.bytes(), |e| e.tail = Some(data.clone()));
                Some(data)
            }
            Ok(_) => self.reject(item, "its tokens are others".into()),
            Err(e) => self.reject(item, e.to_string()),
        }
    }

    fn read(&mut self, item: Item, most: u64) -> Option<Vec<u8>> {
        match self.disk.as_ref()?.read(&item, most) {
            Ok(bytes) => {
                self.stats.disk_reads += 1;
                Some(bytes)
            }
            Err(e) => self.reject(item, e.to_string()),
        }
    }

    fn remember(&mut self, item: Item, bytes: u64, set: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.entries.get_mut(&item) {
            set(entry);
            self.memory += bytes;
            self.memory_order.insert(entry.tick, item);
        }
    }

    /// Forgets an item that must not be used, with all that stands on it.
    fn reject<T>(&mut self, item: Item, why: String) -> Option<T> {
        self.stats.rejected += 1;
        let (Item::Page { key, .. } | Item::Tail { node: key, .. }) = item;
        self.rejected = Some((key, item.to_string(), why));
        self.forget(item);
        None
    }

    /// Removes an item from both tiers, and with a page everything behind it.
    fn forget(&mut self, item: Item) {
        let mut stack = vec![item];
        while let Some(item) = stack.pop() {
            if let Some(entry) = self.entries.remove(&item) {
                self.memory -= entry.in_memory();
                self.memory_order.remove(&entry.tick);
                self.disk_order.remove(&entry.tick);
            }
            if let Some(disk) = &mut self.disk {
                disk.remove(&item);
            }
            match item {
                Item::Page { parent, key } => {
                    if let Some(node) = self.nodes.get_mut(&parent) {
                        node.children.retain(|k| *k != key);
                    }
                    // A file's name may claim a prefix that is another item's.
                    if self.nodes.get(&key).is_none_or(|n| n.page != Some(item)) {
                        continue;
                    }
                    let Some(node) = self.nodes.remove(&key) else { continue };
                    stack.extend(node.children.iter().filter_map(|k| self.nodes.get(k)?.page));
                    let tail = |(position, tail): (usize, Key)| Item::Tail { node: key, position, key: tail };
                    stack.extend(node.tails.into_iter().map(tail));
                }
                Item::Tail { node, position, key } => {
                    if let Some(node) = self.nodes.get_mut(&node) {
                        node.tails.retain(|t| *t != (position, key));
                    }
                }
            }
        }
    }

    fn shrink_memory(&mut self) {
        while self.memory > self.memory_limit {
            let Some((tick, item)) = self.memory_order.pop_first() else { return };
            self.stats.memory_evictions += 1;
            if self.disk.as_ref().is_some_and(|d| d.has(&item)) {
                if let Some(entry) = self.entries.get_mut(&item) {
                    debug_assert_eq!(entry.tick, tick);
                    self.memory -= entry.in_memory();
                    (entry.page, entry.tail) = (None, None);
                }
            } else {
                self.evict(item);
            }
        }
    }

    fn shrink_disk(&mut self) {
        while self.disk.as_ref().is_some_and(|d| d.bytes() > self.disk_limit) {
            let Some((_, item)) = self.disk_order.pop_first() else { return };
            self.stats.disk_evictions += 1;
            if self.entries.get(&item).is_some_and(|e| e.in_memory() > 0) {
                if let Some(disk) = &mut self.disk {
                    disk.remove(&item);
                }
            } else {
                self.evict(item);
            }
        }
    }

    /// Forgets an item for lack of room and remembers that.
    fn evict(&mut self, item: Item) {
        if let Item::Page { key, .. } = item {
            let (set, order) = &mut self.evicted;
            if set.insert(key) {
                order.push_back(key);
            }
            if order.len() > REMEMBERED {
                order.pop_front().map(|k| set.remove(&k));
            }
        }
        self.forget(item);
    }

    fn forget_eviction(&mut self, key: Key) {
        if self.evicted.0.remove(&key) {
            self.evicted.1.retain(|k| *k != key);
        }
    }
}
