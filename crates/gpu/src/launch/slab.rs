//! Stored bytes in device memory: mapped pages where the device takes them, one copy otherwise.

use checkpoint::Bytes;
use ops::DeviceError;

use crate::Device;

/// What vector loads of the kernels need.
const ALIGNMENT: u64 = 16;
/// Where copied parts begin.
const SPACING: u64 = 256;

/// Several stored tensors in one buffer.
pub(crate) struct Slab<D: Device> {
    pub buffer: D::Buffer,
    /// Where each part begins, in bytes.
    pub offsets: Vec<u64>,
    /// Keeps imported pages mapped.
    #[cfg_attr(not(test), expect(dead_code))] // only held
    pages: Option<Bytes>,
}

impl<D: Device> Slab<D> {
    /// The tensors `parts` of `name`.
    pub fn new(device: &D, name: &str, parts: &[&Bytes]) -> Result<Self, DeviceError> {
        match Self::import(device, parts)? {
            Some(slab) => Ok(slab),
            None => Self::copy(device, name, parts),
        }
    }

    #[cfg(test)]
    /// Whether the bytes are those of the mapping, without a copy.
    pub fn imported(&self) -> bool {
        self.pages.is_some()
    }

    /// The pages that hold all parts, if they are of one mapping, aligned, and hold little else.
    fn import(device: &D, parts: &[&Bytes]) -> Result<Option<Self>, DeviceError> {
        let Some((all, starts)) = Bytes::covering(parts) else { return Ok(None) };
        let wanted: usize = parts.iter().map(|p| p.len()).sum();
        if all.len() > wanted + wanted / 2 + (1 << 20) || all.len() as u64 > device.limits().buffer {
            return Ok(None);
        }
        let Some((buffer, base)) = device.import(&all)? else { return Ok(None) };
        let offsets: Vec<u64> = starts.iter().map(|s| base + *s as u64).collect();
        let aligned = offsets.iter().all(|o| o.is_multiple_of(ALIGNMENT));
        Ok(aligned.then_some(Self { buffer, offsets, pages: Some(all) }))
    }

    fn copy(device: &D, name: &str, parts: &[&Bytes]) -> Result<Self, DeviceError> {
        let mut end = 0u64;
        let place = |p: &&Bytes| {
            let at = end;
            end = (end + p.len() as u64).next_multiple_of(SPACING);
            at
        };
        let offsets: Vec<u64> = parts.iter().map(place).collect();
        let longest = device.limits().buffer;
        if end > longest {
            let backend = device.name();
            let reason =
                format!("{name} takes {end} bytes in one buffer, of which the device grants {longest}");
            return Err(DeviceError { backend, reason, refused: true });
        }
        let size = usize::try_from(end.max(SPACING)).expect("no longer than what is in memory");
        let buffer = device.allocate(size)?;
        for (part, at) in parts.iter().zip(&offsets) {
            device.write(&buffer, *at, part)?;
        }
        Ok(Self { buffer, offsets, pages: None })
    }
}

/// `words` in a buffer of their own.
pub(crate) fn table<D: Device, const N: usize>(
    device: &D,
    words: impl Iterator<Item = [u8; N]>,
) -> Result<D::Buffer, DeviceError> {
    let bytes: Vec<u8> = words.flatten().collect();
    let buffer = device.allocate(bytes.len().max(N))?;
    device.write(&buffer, 0, &bytes)?;
    Ok(buffer)
}
