//! The byte format of kept states: a header with kind, version and the model's identity, the contents, a checksum.
//!
//! ```text
//! "hallmark" | version u32 | kind u32 | identity 32 B | length u64 | contents | SHA-256 of all before, 32 B
//! ```
//! Numbers are little-endian. Nothing is used before the checksum is found right.

use sha2::{Digest, Sha256};

/// Version of the format and of what the parts mean. Bytes of another version are refused.
pub const VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"hallmark";
const HEADER: usize = 8 + 4 + 4 + 32 + 8;
const CHECKSUM: usize = 32;

/// What is read from kept bytes, or why it cannot be.
pub type Parsed<T> = Result<T, Unsealed>;

/// What sealed bytes hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// A whole state.
    State = 1,
    /// The entries of a run of tokens.
    Page = 2,
    /// What a state holds beside its entries.
    Tail = 3,
    /// A session: tokens and state.
    Session = 4,
}

/// Why bytes are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsealed {
    /// Not of this program.
    #[error("it does not begin like a kept state")]
    Magic,
    /// Of another version.
    #[error("its format is version {0}, this program's is {VERSION}")]
    Version(u32),
    /// Of another kind.
    #[error("it holds something else")]
    Kind,
    /// Of another model, numerics or device.
    #[error("it belongs to another model, numerics or device")]
    Identity,
    /// Too short or too long.
    #[error("its length is not the stated one")]
    Length,
    /// Damaged.
    #[error("its checksum is wrong")]
    Checksum,
    /// Contents that do not fit the model.
    #[error("its {0} does not fit the model")]
    Field(&'static str),
}

/// Contents with header and checksum.
pub fn seal(kind: Kind, identity: &[u8; 32], contents: &Writer) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + contents.0.len() + CHECKSUM);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(kind as u32).to_le_bytes());
    out.extend_from_slice(identity);
    out.extend_from_slice(&(contents.0.len() as u64).to_le_bytes());
    out.extend_from_slice(&contents.0);
    let sum = Sha256::digest(&out);
    out.extend_from_slice(&sum);
    out
}

/// The contents of sealed bytes of this kind and model.
///
/// # Errors
/// What is wrong with them.
pub fn unseal<'a>(bytes: &'a [u8], kind: Kind, identity: &[u8; 32]) -> Parsed<Reader<'a>> {
    if !bytes.starts_with(MAGIC) {
        return Err(Unsealed::Magic);
    }
    let mut header = Reader(&bytes[MAGIC.len()..]);
    let version = header.word()?;
    if version != VERSION {
        return Err(Unsealed::Version(version));
    }
    let (found, owner) = (header.word()?, header.take(identity.len())?);
    let contents = header.bytes()?;
    if header.0.len() != CHECKSUM {
        return Err(Unsealed::Length);
    }
    if Sha256::digest(&bytes[..bytes.len() - CHECKSUM]).as_slice() != header.0 {
        return Err(Unsealed::Checksum);
    }
    if found != kind as u32 {
        return Err(Unsealed::Kind);
    }
    if owner != identity {
        return Err(Unsealed::Identity);
    }
    Ok(Reader(contents))
}

/// Collects contents.
#[derive(Clone, Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// A size or position.
    pub fn size(&mut self, v: usize) -> &mut Self {
        self.0.extend_from_slice(&(v as u64).to_le_bytes());
        self
    }

    /// A 32-bit word.
    pub fn word(&mut self, v: u32) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }

    /// Bytes with their number before them.
    pub fn bytes(&mut self, v: &[u8]) -> &mut Self {
        self.size(v.len());
        self.0.extend_from_slice(v);
        self
    }
}

/// Takes contents apart; whatever is missing is an error.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Parsed<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n).ok_or(Unsealed::Length)?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    /// A size or position.
    ///
    /// # Errors
    /// Too few bytes, or a number that this machine has no size for.
    pub fn size(&mut self) -> Parsed<usize> {
        usize::try_from(u64::from_le_bytes(self.array()?)).map_err(|_| Unsealed::Length)
    }

    /// A 32-bit word.
    ///
    /// # Errors
    /// Too few bytes.
    pub fn word(&mut self) -> Parsed<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Bytes with their number before them.
    ///
    /// # Errors
    /// Fewer bytes than stated.
    pub fn bytes(&mut self) -> Parsed<&'a [u8]> {
        let n = self.size()?;
        self.take(n)
    }

    /// That everything was read.
    ///
    /// # Errors
    /// Bytes that are left.
    pub fn end(self) -> Parsed<()> {
        if self.0.is_empty() { Ok(()) } else { Err(Unsealed::Length) }
    }
}
