//! Memory and dispatches of the emulator.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::CStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use checkpoint::Bytes;
use ops::DeviceError;

use super::failed;
use super::team::Team;
use crate::{Binding, Constant, Device, Dispatch, Kernel, Limits, kernels};

type Entry = unsafe extern "C" fn(*const *const u8, *const u8);

/// As in runtime.cpp.
#[repr(C)]
struct Grid {
    groups: [u32; 3],
    threads: [u32; 3],
    shared: u32,
    shuffle: u32,
    waits: u32,
}

unsafe extern "C" {
    fn msl_run(
        entry: Entry,
        bindings: *const *const u8,
        grid: *const Grid,
        next: *mut u32,
        total: u32,
        message: *mut std::ffi::c_char,
    ) -> i32;
}

/// Function constants are variables of the program, so one dispatch runs at a time.
static RUNNING: Mutex<()> = Mutex::new(());

fn running() -> MutexGuard<'static, ()> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Address and length of memory that kernels read and write.
struct Memory {
    at: *mut u8,
    bytes: usize,
    owner: Owner,
}

enum Owner {
    Heap(Layout),
    /// Mapped by somebody else, kept alive here; kernels only read it.
    Mapped {
        _bytes: Bytes,
    },
}

// SAFETY: plain memory. Kernels write it only inside `submit`, and callers keep to the rules of `Device`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Owner::Heap(layout) = self.owner {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.at, layout) };
        }
    }
}

/// A range of memory.
#[derive(Clone)]
pub struct Buffer(Arc<Memory>);

impl Buffer {
    fn range(&self, offset: u64, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes as u64).expect("a range");
        assert!(end <= self.0.bytes as u64, "bytes {offset}+{bytes} of {}", self.0.bytes);
        // SAFETY: inside the allocation, or one behind its end.
        unsafe { self.0.at.add(offset as usize) }
    }
}

/// A kernel with its constants.
#[derive(Clone)]
pub struct Pipeline {
    kernel: &'static Kernel,
    constants: Arc<[(&'static kernels::Place, u32)]>,
}

/// The emulated GPU.
pub struct Emu {
    limits: Limits,
    threads: usize,
    shuffle: u32,
}

impl Emu {
    /// The emulator on all cores.
    pub fn open() -> Result<Self, DeviceError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self { limits: Limits::METAL, threads, shuffle: 0 })
    }

    /// The same on so many threads.
    pub fn with_threads(self, threads: usize) -> Self {
        Self { threads: threads.max(1), ..self }
    }

    /// The same with the simdgroups of a threadgroup in another order, by the seed; 0 is the usual one.
    pub fn with_order(self, shuffle: u32) -> Self {
        Self { shuffle, ..self }
    }

    /// A buffer on memory of `bytes`, as Metal makes one: of whole pages only.
    fn without_copy(&self, first: *const u8, len: usize, bytes: &Bytes) -> Result<Buffer, DeviceError> {
        let page = self.limits.import_alignment as usize;
        if len == 0 || !(first as usize).is_multiple_of(page) || !len.is_multiple_of(page) {
            return Err(failed(format!(
                "an imported range at {first:p} of {len} bytes is not made of pages of {page}"
            )));
        }
        let owner = Owner::Mapped { _bytes: bytes.clone() };
        Ok(Buffer(Arc::new(Memory { at: first.cast_mut(), bytes: len, owner })))
    }

    fn check(&self, d: &Dispatch<Self>) -> Result<(), DeviceError> {
        let kernel = d.pipeline.kernel;
        let refuse = |what: String| Err(failed(format!("kernel {}: {what}", kernel.name)));
        let (bindings, threads) = (d.bindings.len(), d.threads.iter().product::<u32>());
        if bindings != kernel.parameters.len() || bindings > self.limits.bindings as usize {
            return refuse(format!(
                "{bindings} bindings where it has {} parameters",
                kernel.parameters.len()
            ));
        }
        let inline: usize =
            d.bindings.iter().map(|b| if let Binding::Inline(v) = b { v.len() } else { 0 }).sum();
        if inline > self.limits.inline_bytes as usize {
            return refuse(format!("{inline} inline bytes; {} can be passed", self.limits.inline_bytes));
        }
        if threads == 0 || threads > self.limits.threads || !threads.is_multiple_of(32) {
            return refuse(format!(
                "{threads} threads in a threadgroup; a multiple of 32 up to {}",
                self.limits.threads
            ));
        }
        let shared: u64 = d.threadgroup.iter().map(|n| u64::from(*n)).sum();
        if shared + u64::from(kernel.threadgroup_bytes()) > u64::from(self.limits.threadgroup_memory)
            || d.threadgroup.iter().any(|n| !n.is_multiple_of(16))
        {
            return refuse(format!(
                "{shared} bytes of threadgroup memory beside its own {}; multiples of 16 up to {} in all",
                kernel.threadgroup_bytes(),
                self.limits.threadgroup_memory
            ));
        }
        if d.groups.iter().map(|g| u64::from(*g)).product::<u64>() > u64::from(u32::MAX) {
            return refuse(format!("a grid of {:?} threadgroups", d.groups));
        }
        for (binding, parameter) in d.bindings.iter().zip(kernel.parameters) {
            if parameter.by_value && !matches!(binding, Binding::Inline(_)) {
                return refuse(format!("parameter {} is passed inline", parameter.name));
            }
            if let Binding::Buffer(b, offset) = binding
                && *offset > b.0.bytes as u64
            {
                return refuse(format!("parameter {} begins behind its buffer's end", parameter.name));
            }
        }
        let structs = d.bindings.iter().zip(kernel.parameters).filter(|(_, parameter)| parameter.by_value);
        let given: usize = structs.map(|(b, _)| if let Binding::Inline(v) = b { v.len() } else { 0 }).sum();
        if given != kernel.inline_bytes() as usize {
            return refuse(format!("{given} inline bytes; its structs have {}", kernel.inline_bytes()));
        }
        Ok(())
    }

    fn run(&self, d: &Dispatch<Self>) -> Result<(), DeviceError> {
        self.check(d)?;
        let total: u32 = d.groups.iter().product();
        if total == 0 {
            return Ok(());
        }
        // Inline bytes in memory of their own, aligned as any parameter may be.
        let inline: Vec<Vec<u128>> = d
            .bindings
            .iter()
            .map(|b| if let Binding::Inline(v) = b { words(v) } else { Vec::new() })
            .collect();
        let mut bindings = [std::ptr::null::<u8>(); 32];
        for ((slot, binding), inline) in bindings.iter_mut().zip(&d.bindings).zip(&inline) {
            *slot = match binding {
                Binding::Buffer(b, offset) => b.range(*offset, 0),
                Binding::Inline(_) => inline.as_ptr().cast(),
            };
        }
        let grid = Grid {
            groups: d.groups,
            threads: d.threads,
            shared: d.threadgroup.iter().sum(),
            shuffle: self.shuffle,
            waits: u32::from(d.pipeline.kernel.waits),
        };
        let _running = running();
        for (place, value) in d.pipeline.constants.iter() {
            // SAFETY: a variable of the kernels' file, which nobody else touches while the lock is held.
            unsafe { place.0.write(*value) };
        }
        let mut next = 0u32;
        let work = Work {
            entry: d.pipeline.kernel.entry,
            bindings: &bindings,
            grid: &grid,
            next: &raw mut next,
            total,
        };
        // A few threads' worth of work is done before another core has woken up.
        let threads = self.threads.min(total as usize);
        let few = u64::from(total) * u64::from(d.threads.iter().product::<u32>()) < 2048;
        let fault = Mutex::new(None);
        Team::get().run(if few { 1 } else { threads }, &|| {
            if let Err(what) = work.run() {
                fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(what);
            }
        });
        let outcome = fault.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err);
        outcome.map_err(|what| failed(format!("kernel {}: {what}", d.pipeline.kernel.name)))
    }
}

/// One dispatch for several threads.
struct Work<'a> {
    entry: Entry,
    bindings: &'a [*const u8; 32],
    grid: &'a Grid,
    next: *mut u32,
    total: u32,
}

// SAFETY: `next` is used atomically; the memory behind the bindings is the kernels' to share.
unsafe impl Sync for Work<'_> {}

impl Work<'_> {
    fn run(&self) -> Result<(), String> {
        let mut message = [0; 256];
        // SAFETY: bindings, grid and counter live until this returns; the function belongs to the kernel whose
        // parameters the bindings were checked against.
        let failed = unsafe {
            msl_run(
                self.entry,
                self.bindings.as_ptr(),
                self.grid,
                self.next,
                self.total,
                message.as_mut_ptr(),
            )
        };
        if failed == 0 {
            return Ok(());
        }
        // SAFETY: the runtime ends the message with a zero.
        Err(unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy().into_owned())
    }
}

fn words(bytes: &[u8]) -> Vec<u128> {
    let word = |chunk: &[u8]| {
        let mut b = [0; 16];
        b[..chunk.len()].copy_from_slice(chunk);
        u128::from_ne_bytes(b)
    };
    bytes.chunks(16).map(word).collect()
}

impl Device for Emu {
    type Buffer = Buffer;
    type Pipeline = Pipeline;

    fn name(&self) -> &'static str {
        "emu"
    }

    fn description(&self) -> String {
        format!("emulator of Metal kernels, {} thread(s)", self.threads)
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let layout =
            Layout::from_size_align(bytes.max(16), 64).map_err(|_| failed(format!("{bytes} bytes")))?;
        // SAFETY: the layout is not empty.
        let at = unsafe { alloc(layout) };
        if at.is_null() {
            return Err(failed(format!("{bytes} bytes of memory are not there")));
        }
        // SAFETY: just allocated.
        unsafe { at.write_bytes(0xff, layout.size()) };
        Ok(Buffer(Arc::new(Memory { at, bytes, owner: Owner::Heap(layout) })))
    }

    fn import(&self, bytes: &Bytes) -> Result<Option<(Buffer, u64)>, DeviceError> {
        let Some((first, len)) = bytes.pages(self.limits.import_alignment as usize) else { return Ok(None) };
        let offset = bytes.as_ptr() as u64 - first as u64;
        Ok(Some((self.without_copy(first, len, bytes)?, offset)))
    }

    fn write(&self, buffer: &Buffer, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        if let Owner::Mapped { .. } = buffer.0.owner {
            return Err(failed("an imported buffer is read-only"));
        }
        let at = buffer.range(offset, data.len());
        // SAFETY: the range was checked, and no work uses it by the rule of `write`.
        unsafe { at.copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        Ok(())
    }

    fn read(&self, buffer: &Buffer, offset: u64, data: &mut [u8]) -> Result<(), DeviceError> {
        let at = buffer.range(offset, data.len());
        // SAFETY: the range was checked; lists have run when `submit` returned.
        unsafe { data.as_mut_ptr().copy_from_nonoverlapping(at, data.len()) };
        Ok(())
    }

    fn pipeline(
        &self,
        kernel: &'static Kernel,
        constants: &[(u32, Constant)],
    ) -> Result<Pipeline, DeviceError> {
        let mut list = Vec::new();
        for (id, name) in kernel.constants {
            let Some((_, value)) = constants.iter().find(|c| c.0 == *id) else {
                return Err(failed(format!("kernel {}: function constant {name} has no value", kernel.name)));
            };
            let place = kernels::CONSTANTS.iter().find(|c| c.0 == kernel.file && c.1 == *id);
            let place = &place.expect("the table has every constant").2;
            list.push((
                place,
                match value {
                    Constant::Bool(v) => u32::from(*v),
                    Constant::U32(v) => *v,
                },
            ));
        }
        if let Some((id, _)) = constants.iter().find(|c| kernel.constants.iter().all(|k| k.0 != c.0)) {
            return Err(failed(format!("kernel {} has no function constant {id}", kernel.name)));
        }
        Ok(Pipeline { kernel, constants: list.into() })
    }

    fn submit(&self, list: Vec<Dispatch<Self>>) -> Result<(), DeviceError> {
        list.iter().try_for_each(|d| self.run(d))
    }

    fn wait(&self) -> Result<Option<f64>, DeviceError> {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Metal makes no buffer of memory that begins or ends within a page of 16 KiB; nor does the emulator.
    #[test]
    fn a_misaligned_buffer_without_copy_is_refused() {
        let emu = Emu::open().unwrap();
        let page = emu.limits.import_alignment as usize;
        let bytes = Bytes::copied(&vec![7; 3 * page]);
        let first = bytes.as_ptr().wrapping_add(bytes.as_ptr().align_offset(page));
        let read = |buffer: &Buffer| {
            let mut data = [0; 4];
            emu.read(buffer, page as u64 - 4, &mut data).unwrap();
            data
        };
        assert_eq!(read(&emu.without_copy(first, page, &bytes).unwrap()), [7; 4]);
        for (shift, len) in [(4096, page), (16, page), (0, page - 4096), (0, 0)] {
            let refused = emu.without_copy(first.wrapping_add(shift), len, &bytes);
            let said = refused.err().expect("no whole pages").to_string();
            assert!(said.contains("not made of pages of 16384"), "{shift} {len}: {said}");
        }
    }
}
