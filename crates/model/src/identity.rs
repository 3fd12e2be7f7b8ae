//! Which model a kept state belongs to.

use checkpoint::{Checkpoint, Dtype};
use ops::Backend;
use sha2::{Digest, Sha256};

use crate::{Result, sealed};

/// Tensors of which some bytes are read.
const SAMPLED: usize = 1024;
/// Bytes read of each.
const SAMPLE: usize = 4096;

/// Hash of all that a state's bytes depend on: format and program version, backend, numerics, configuration, token map,
/// place and type of every tensor, and some bytes of many. Not of every byte: reading 510 GB would take minutes; two
/// trainings of one model differ in every tensor.
pub(crate) fn identity<B: Backend>(b: &B, ckpt: &Checkpoint, token_map: &[u32]) -> Result<[u8; 32]> {
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(&sealed::VERSION.to_le_bytes());
    part(env!("CARGO_PKG_VERSION").as_bytes());
    part(b.name().as_bytes());
    part(b.mode().name().as_bytes());
    part(&ckpt.file("config.json")?);
    part(&token_map.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>());
    let tensors = ckpt.tensors();
    let step = tensors.len().div_ceil(SAMPLED);
    for (i, t) in tensors.iter().enumerate() {
        let place =
            format!("{} {} {:?} {} {} {}", t.name, Dtype::name(t.dtype), t.shape, t.file, t.offset, t.len);
        part(place.as_bytes());
        if i % step == 0 {
            let bytes = ckpt.tensor(t.name)?;
            let n = bytes.len().min(SAMPLE);
            let start = (bytes.len() - n) / 2;
            part(&bytes[start..start + n]);
        }
    }
    Ok(hash.finalize().into())
}
