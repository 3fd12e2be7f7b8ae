//! Shared read-only bytes: a range of a mapped file, of an owned buffer or of the program image.

use std::{io, ops::Deref, sync::Arc};

use memmap2::Advice;

enum Owner {
    /// A file, and whether the system tells this process which of its pages are in memory.
    Mapped(memmap2::Mmap, bool),
    /// Words, so that the start is aligned to 16 bytes.
    Owned(Vec<u128>),
    Static(&'static [u8]),
}

/// A cheaply cloned range of read-only bytes.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<Owner>,
    start: usize,
    len: usize,
}

impl Bytes {
    /// A whole mapped file.
    pub fn mapped(map: memmap2::Mmap) -> Self {
        Self::mapped_told(map, false)
    }

    /// A whole mapped file; `told` is whether the system tells which of its pages are in memory, which Linux does for files
    /// that the process owns or may write.
    pub(crate) fn mapped_told(map: memmap2::Mmap, told: bool) -> Self {
        let len = map.len();
        Self { owner: Arc::new(Owner::Mapped(map, told)), start: 0, len }
    }

    /// Bytes of the program image.
    pub fn from_static(bytes: &'static [u8]) -> Self {
        Self { owner: Arc::new(Owner::Static(bytes)), start: 0, len: bytes.len() }
    }

    /// A 16-byte aligned copy.
    pub fn copied(bytes: &[u8]) -> Self {
        let mut words = vec![0u128; bytes.len().div_ceil(16)];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks(16)) {
            let mut b = [0; 16];
            b[..chunk.len()].copy_from_slice(chunk);
            *word = u128::from_ne_bytes(b);
        }
        Self { owner: Arc::new(Owner::Owned(words)), start: 0, len: bytes.len() }
    }

    /// `pattern` over and over, `len` bytes in all, 16-byte aligned. The pattern's length is a multiple of 16.
    ///
    /// # Panics
    /// On an empty pattern or one of another length.
    pub fn repeated(pattern: &[u8], len: usize) -> Self {
        assert!(
            !pattern.is_empty() && pattern.len().is_multiple_of(16),
            "a pattern of {} bytes",
            pattern.len()
        );
        let word = |b: &[u8]| u128::from_ne_bytes(b.try_into().expect("16 bytes"));
        let words = pattern.chunks_exact(16).map(word).cycle().take(len.div_ceil(16)).collect();
        Self { owner: Arc::new(Owner::Owned(words)), start: 0, len }
    }

    /// The sub-range `start..start + len`, or `None` where it does not lie inside.
    pub fn slice(&self, start: usize, len: usize) -> Option<Self> {
        let end = start.checked_add(len)?;
        (end <= self.len).then(|| Self { owner: self.owner.clone(), start: self.start + start, len })
    }

    /// Start and length of the pages of `page` bytes around this range, where all of them belong to the mapped file
    /// that it lies in.
    pub fn pages(&self, page: usize) -> Option<(*const u8, usize)> {
        let Owner::Mapped(map, _) = &*self.owner else { return None };
        let (base, start, end) = (map.as_ptr() as usize, self.start, self.start + self.len);
        // The kernel maps whole pages of its own size; what lies behind the file's end reads as zeros.
        let first = (base + start) / page * page;
        let last = (base + end).next_multiple_of(page);
        let mapped = (base + map.len()).next_multiple_of(4096);
        (first >= base && last <= mapped).then(|| (map.as_ptr().wrapping_add(first - base), last - first))
    }

    /// Whether the bytes are those of a mapped file.
    pub fn is_mapped(&self) -> bool {
        matches!(&*self.owner, Owner::Mapped(..))
    }

    /// Tells the system that reads will be all over the range.
    pub(crate) fn expect_random(&self) {
        self.advise(Advice::Random, 0, self.len);
    }

    /// Tells the system that `start..start + len` will be read soon; it begins to bring them.
    pub(crate) fn will_need(&self, start: usize, len: usize) {
        self.advise(Advice::WillNeed, start, len);
    }

    /// Whether `start..start + len` can be read without waiting for the disk, where the system tells: what is no file always
    /// can.
    pub(crate) fn is_in_memory(&self, start: usize, len: usize) -> Option<bool> {
        let Owner::Mapped(map, told) = &*self.owner else { return Some(true) };
        let bytes = map.get(self.start + start..self.start + start + len).filter(|_| *told)?;
        let page = page_size();
        let first = bytes.as_ptr() as usize / page * page;
        let pages = (bytes.as_ptr() as usize + len - first).div_ceil(page);
        let mut present = [0u8; 8];
        if pages > present.len() {
            return None;
        }
        let base = map.as_ptr().wrapping_add(first - map.as_ptr() as usize);
        // SAFETY: the pages lie around bytes of a living map, and there is room for a byte for each of them.
        let done =
            unsafe { libc::mincore(base.cast_mut().cast(), pages * page, present.as_mut_ptr().cast()) };
        (done == 0).then(|| present[..pages].iter().all(|p| p & 1 == 1))
    }

    fn advise(&self, advice: Advice, start: usize, len: usize) {
        if let Owner::Mapped(map, _) = &*self.owner
            && start + len <= self.len
        {
            let _ = map.advise_range(advice, self.start + start, len); // advice that is not taken costs time only
        }
    }

    /// Brings `start..start + len` into memory and into the page tables.
    ///
    /// # Errors
    /// A file that can't be read.
    pub(crate) fn populate(&self, start: usize, len: usize) -> io::Result<()> {
        #[cfg(target_os = "linux")]
        if let Owner::Mapped(map, _) = &*self.owner {
            match map.advise_range(Advice::PopulateRead, self.start + start, len) {
                // Kernels before 5.14 don't know it.
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => {}
                other => return other,
            }
        }
        let sum = self[start..start + len].iter().step_by(4096).fold(0u8, |sum, b| sum ^ b);
        std::hint::black_box(sum);
        Ok(())
    }

    /// Keeps the bytes in memory until the map is dropped.
    ///
    /// # Errors
    /// A limit of the system.
    pub(crate) fn lock(&self) -> io::Result<()> {
        // SAFETY: the range is mapped as long as `self` lives; locking changes none of its bytes.
        let done = unsafe { libc::mlock(self.as_ptr().cast(), self.len) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The shortest range around `parts` and where each begins in it; none where they are not of one mapping or buffer.
    pub fn covering(parts: &[&Self]) -> Option<(Self, Vec<usize>)> {
        let first = parts.first()?;
        if !parts.iter().all(|p| Arc::ptr_eq(&p.owner, &first.owner)) {
            return None;
        }
        let start = parts.iter().map(|p| p.start).min()?;
        let end = parts.iter().map(|p| p.start + p.len).max()?;
        let offsets = parts.iter().map(|p| p.start - start).collect();
        Some((Self { owner: first.owner.clone(), start, len: end - start }, offsets))
    }

    /// Whether the first byte lies on a multiple of `align`.
    pub fn is_aligned(&self, align: usize) -> bool {
        (self.as_ptr() as usize).is_multiple_of(align)
    }
}

/// Bytes of a page of this system.
fn page_size() -> usize {
    static PAGE: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    // SAFETY: the call reads a constant of the system.
    *PAGE.get_or_init(|| usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(1))
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let all: &[u8] = match &*self.owner {
            Owner::Mapped(map, _) => map,
            // SAFETY: any initialised memory may be read as bytes; the length covers exactly the words.
            Owner::Owned(words) => unsafe {
                std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), size_of_val(words.as_slice()))
            },
            Owner::Static(bytes) => bytes,
        };
        &all[self.start..self.start + self.len]
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bytes({})", self.len)
    }
}
