//! What a GPU is to the rest of this crate: memory, pipelines and lists of dispatches.

use std::sync::Arc;

use checkpoint::Bytes;
use ops::DeviceError;

use crate::Kernel;

/// What a device can hold and start.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Longest buffer, in bytes.
    pub buffer: u64,
    /// Memory that may be resident at once, in bytes.
    pub working_set: u64,
    /// Threadgroup memory of one threadgroup, in bytes.
    pub threadgroup_memory: u32,
    /// Threads of one threadgroup.
    pub threads: u32,
    /// Buffers that one dispatch binds.
    pub bindings: u32,
    /// Bytes that one dispatch passes inline.
    pub inline_bytes: u32,
    /// What the address and the length of an imported range must be multiples of.
    pub import_alignment: u64,
}

impl Limits {
    /// What every supported Metal device grants (buffer and working set excepted, which it tells itself).
    pub const METAL: Self = Self {
        buffer: u64::MAX,
        working_set: u64::MAX,
        threadgroup_memory: 32 << 10,
        threads: 1024,
        bindings: 31,
        inline_bytes: 4 << 10,
        import_alignment: 16 << 10,
    };
}

/// Value of a function constant. Constants are for choices with few values (mode, form, rate), because each
/// combination is a pipeline of its own; sizes travel as inline bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Constant {
    /// `constant bool`.
    Bool(bool),
    /// `constant uint`.
    U32(u32),
}

/// What a dispatch binds at the buffer index that is its place in the list.
#[derive(Clone, Debug)]
pub enum Binding<B> {
    /// A buffer, from a byte offset on.
    Buffer(B, u64),
    /// A copy of a few bytes, for `constant Params&`.
    Inline(Arc<[u8]>),
}

/// One kernel launch.
pub struct Dispatch<D: Device + ?Sized> {
    /// What runs.
    pub pipeline: D::Pipeline,
    /// Buffer index i binds element i.
    pub bindings: Vec<Binding<D::Buffer>>,
    /// Bytes of `[[threadgroup(i)]]`; a multiple of 16 each.
    pub threadgroup: Vec<u32>,
    /// Threadgroups in x, y, z.
    pub groups: [u32; 3],
    /// Threads of a threadgroup in x, y, z; their product is a multiple of 32.
    pub threads: [u32; 3],
    /// Whether everything recorded before must have finished first. `false` promises that this dispatch touches
    /// nothing that a dispatch since the last barrier writes, and writes nothing that one reads.
    pub barrier: bool,
}

/// A GPU or its emulator.
///
/// Work is submitted as whole lists; lists run in the order of submission, and [`Device::read`] waits for all of them.
/// Handles are cheap clones; memory is given back when the last handle and the last list that binds it are gone.
pub trait Device: Send + Sync + 'static {
    /// A range of device memory.
    type Buffer: Clone + Send + Sync;
    /// A compiled kernel with its constants.
    type Pipeline: Clone + Send + Sync;

    /// Name on the command line: `metal`, `cuda`, `emu`.
    fn name(&self) -> &'static str;
    /// The chip and its driver, for receipts.
    fn description(&self) -> String;
    /// What it can hold and start.
    fn limits(&self) -> &Limits;
    /// Whether products of 8x8 matrices are at least as fast as those of lanes, as on Apple's GPUs.
    fn multiplies_matrices(&self) -> bool {
        true
    }

    /// Whether buffers of similar lengths are made equally long, so that they can stand in for each other. A device that
    /// looks for accesses behind a buffer's end wants the lengths that are used.
    fn shares_lengths(&self) -> bool {
        true
    }

    /// `bytes` of device memory; the contents are arbitrary (the emulator fills them with 0xFF).
    fn allocate(&self, bytes: usize) -> Result<Self::Buffer, DeviceError>;
    /// The mapped pages around `bytes` as device memory, without a copy, and the offset of `bytes` in them; `None`
    /// where the device cannot (no page range around them lies within the mapping, or no shared memory).
    fn import(&self, bytes: &Bytes) -> Result<Option<(Self::Buffer, u64)>, DeviceError>;
    /// Copies `data` to `offset`. No submitted or recorded work may still use that range.
    fn write(&self, buffer: &Self::Buffer, offset: u64, data: &[u8]) -> Result<(), DeviceError>;
    /// Waits for all submitted work, then copies from `offset` on.
    fn read(&self, buffer: &Self::Buffer, offset: u64, data: &mut [u8]) -> Result<(), DeviceError>;
    /// Compiles a kernel; function constant `id` takes its value from `constants`. Cached by the device.
    fn pipeline(
        &self,
        kernel: &'static Kernel,
        constants: &[(u32, Constant)],
    ) -> Result<Self::Pipeline, DeviceError>;
    /// Starts a list in one submission. Returns without waiting.
    fn submit(&self, list: Vec<Dispatch<Self>>) -> Result<(), DeviceError>;
    /// Waits until everything submitted has finished; the device's own time of the last list in seconds, where it has
    /// a clock.
    fn wait(&self) -> Result<Option<f64>, DeviceError>;
}
