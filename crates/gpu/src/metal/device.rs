//! Metal through objc2: the thin layer that runs on a Mac only.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use block2::RcBlock;
use checkpoint::Bytes;
use objc2::{available, rc::Retained, rc::autoreleasepool, runtime::ProtocolObject};
use objc2_foundation::{NSProcessInfo, NSString};
use objc2_metal::{
    MTLBarrierScope, MTLBuffer, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandEncoder, MTLCommandQueue,
    MTLCompileOptions, MTLComputeCommandEncoder, MTLComputePipelineState, MTLCreateSystemDefaultDevice,
    MTLDataType, MTLDevice, MTLDispatchType, MTLFence, MTLFunctionConstantValues, MTLGPUFamily,
    MTLLanguageVersion, MTLLibrary, MTLMathFloatingPointFunctions, MTLMathMode, MTLResourceOptions, MTLSize,
};
use ops::DeviceError;

use super::{failed, refused, residency::Residency};
use crate::{Binding, Constant, Device, Dispatch, Kernel, Limits, kernels};

type Object<T> = Retained<ProtocolObject<T>>;

/// No hazard tracking: order comes from the barriers of the dispatches and one fence between lists.
const OPTIONS: MTLResourceOptions =
    MTLResourceOptions::StorageModeShared.union(MTLResourceOptions::HazardTrackingModeUntracked);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Memory {
    buffer: Object<dyn MTLBuffer>,
    bytes: u64,
    set: usize,
    writable: bool,
    residency: Arc<Residency>,
}

// SAFETY: Metal's buffers may be used from any thread; what the host reads and writes follows the rules of `Device`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        self.residency.remove(self.set, self.bytes, &self.buffer);
    }
}

/// A range of memory that CPU and GPU share.
#[derive(Clone)]
pub struct Buffer(Arc<Memory>);

/// A compiled kernel with its constants.
#[derive(Clone)]
pub struct Pipeline {
    kernel: &'static Kernel,
    state: Arc<State>,
}

struct State(Object<dyn MTLComputePipelineState>);

// SAFETY: Metal's pipeline states are immutable and may be used from any thread.
unsafe impl Send for State {}
// SAFETY: as above.
unsafe impl Sync for State {}

/// A list that was started, and what it uses.
struct Started {
    commands: Object<dyn MTLCommandBuffer>,
    _buffers: Vec<Buffer>,
}

// SAFETY: only waited for and asked after it was committed, which any thread may do.
unsafe impl Send for Started {}

type Variant = (&'static str, Vec<(u32, Constant)>);

/// The system's GPU.
pub struct Metal {
    device: Object<dyn MTLDevice>,
    queue: Object<dyn MTLCommandQueue>,
    fence: Object<dyn MTLFence>,
    residency: Arc<Residency>,
    limits: Limits,
    libraries: HashMap<&'static str, Object<dyn MTLLibrary>>,
    pipelines: Mutex<HashMap<Variant, Pipeline>>,
    started: Mutex<VecDeque<Started>>,
    last: Mutex<Option<f64>>,
}

impl Drop for Metal {
    fn drop(&mut self) {
        self.residency.stop();
    }
}

impl Metal {
    /// The default GPU; compiles all kernels. The self-test decides whether it is to be trusted.
    ///
    /// # Errors
    /// Refused before macOS 15 and on a GPU that is not Apple's.
    pub fn open() -> Result<Self, DeviceError> {
        if !available!(macos = 15.0) {
            return Err(refused(
                "macOS 15 or later is needed: earlier ones cannot keep a model's memory resident",
            ));
        }
        let device =
            MTLCreateSystemDefaultDevice().ok_or_else(|| refused("this machine has no Metal device"))?;
        // Virtual machines tell less than they can; the self-test decides there.
        if !device.supportsFamily(MTLGPUFamily::Metal3) && !device.name().to_string().contains("Paravirtual")
        {
            return Err(refused(format!(
                "{} is not of the Metal 3 family; Apple silicon is needed",
                device.name()
            )));
        }
        let queue = device.newCommandQueue().ok_or_else(|| failed("no command queue"))?;
        let fence = device.newFence().ok_or_else(|| failed("no fence"))?;
        let working_set = device.recommendedMaxWorkingSetSize();
        let residency = Residency::new(working_set, NSProcessInfo::processInfo().physicalMemory())?;
        let limits = Limits {
            buffer: device.maxBufferLength() as u64,
            working_set,
            threadgroup_memory: (device.maxThreadgroupMemoryLength() as u64)
                .min(u64::from(Limits::METAL.threadgroup_memory)) as u32,
            ..Limits::METAL
        };
        let mut libraries = HashMap::new();
        for file in kernels::FILES {
            libraries.insert(file.name, library(&device, file.name, file.metal)?);
        }
        Ok(Self {
            device,
            queue,
            fence,
            residency,
            limits,
            libraries,
            pipelines: Mutex::default(),
            started: Mutex::default(),
            last: Mutex::default(),
        })
    }

    /// The chip, as receipts name it.
    pub fn chip(&self) -> String {
        self.device.name().to_string()
    }

    /// The system, which holds driver and compiler.
    pub fn system(&self) -> String {
        format!("macOS {}", NSProcessInfo::processInfo().operatingSystemVersionString())
    }

    /// Makes a buffer of `bytes` resident; `make` is called once there is room.
    fn resident(
        &self,
        bytes: u64,
        writable: bool,
        make: impl FnOnce() -> Option<Object<dyn MTLBuffer>>,
    ) -> Result<Buffer, DeviceError> {
        if bytes > self.limits.buffer {
            return Err(refused(format!(
                "a buffer of {bytes} bytes; this GPU takes at most {}",
                self.limits.buffer
            )));
        }
        let set = self.residency.reserve(&self.device, &self.queue, bytes)?;
        let Some(buffer) = make() else {
            self.residency.release(set, bytes);
            return Err(failed(format!("Metal makes no buffer of {bytes} bytes")));
        };
        self.residency.add(set, &buffer);
        let residency = self.residency.clone();
        Ok(Buffer(Arc::new(Memory { buffer, bytes, set, writable, residency })))
    }

    fn compile(
        &self,
        kernel: &'static Kernel,
        constants: &[(u32, Constant)],
    ) -> Result<Pipeline, DeviceError> {
        let fault = |what: String| failed(format!("kernel {}: {what}", kernel.name));
        let library =
            self.libraries.get(kernel.file).ok_or_else(|| fault("its file is not embedded".into()))?;
        let values = MTLFunctionConstantValues::new();
        for (index, value) in constants {
            // Little-endian: the first byte is the bool.
            let (mut bits, kind) = match value {
                Constant::Bool(v) => (u32::from(*v), MTLDataType::Bool),
                Constant::U32(v) => (*v, MTLDataType::UInt),
            };
            let at = NonNull::from(&mut bits).cast::<c_void>();
            // SAFETY: the value lives until the call returns and has the type that is told.
            unsafe { values.setConstantValue_type_atIndex(at, kind, *index as usize) };
        }
        let function = library
            .newFunctionWithName_constantValues_error(&NSString::from_str(kernel.name), &values)
            .map_err(|e| fault(e.localizedDescription().to_string()))?;
        let state = self
            .device
            .newComputePipelineStateWithFunction_error(&function)
            .map_err(|e| fault(e.localizedDescription().to_string()))?;
        Ok(Pipeline { kernel, state: Arc::new(State(state)) })
    }

    fn encode(
        &self,
        encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>,
        list: &[Dispatch<Self>],
    ) -> Result<(), DeviceError> {
        for (number, d) in list.iter().enumerate() {
            let refuse = |what: String| Err(failed(format!("kernel {}: {what}", d.pipeline.kernel.name)));
            let threads = d.threads.iter().product::<u32>() as usize;
            let most = d.pipeline.state.0.maxTotalThreadsPerThreadgroup();
            if threads == 0 || threads > most || d.bindings.len() > self.limits.bindings as usize {
                return refuse(format!(
                    "{threads} threads and {} bindings; {most} and 31 are possible",
                    d.bindings.len()
                ));
            }
            if d.groups.contains(&0) {
                continue;
            }
            if d.barrier && number > 0 {
                encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
            }
            encoder.setComputePipelineState(&d.pipeline.state.0);
            for (index, binding) in d.bindings.iter().enumerate() {
                match binding {
                    Binding::Buffer(b, offset) if *offset <= b.0.bytes => {
                        // SAFETY: the offset lies in the buffer, the index below 31.
                        unsafe {
                            encoder.setBuffer_offset_atIndex(Some(&b.0.buffer), *offset as usize, index)
                        };
                    }
                    Binding::Inline(bytes)
                        if (1..=self.limits.inline_bytes as usize).contains(&bytes.len()) =>
                    {
                        let at = NonNull::from(&bytes[0]).cast::<c_void>();
                        // SAFETY: Metal copies these bytes before the call returns.
                        unsafe { encoder.setBytes_length_atIndex(at, bytes.len(), index) };
                    }
                    Binding::Buffer(b, offset) => {
                        return refuse(format!("binding {index} starts at byte {offset} of {}", b.0.bytes));
                    }
                    Binding::Inline(bytes) => {
                        return refuse(format!("binding {index} has {} inline bytes", bytes.len()));
                    }
                }
            }
            for (index, bytes) in d.threadgroup.iter().enumerate() {
                if !bytes.is_multiple_of(16) || *bytes > self.limits.threadgroup_memory {
                    return refuse(format!("{bytes} bytes of threadgroup memory"));
                }
                // SAFETY: a multiple of 16 within the limit.
                unsafe { encoder.setThreadgroupMemoryLength_atIndex(*bytes as usize, index) };
            }
            let size =
                |n: [u32; 3]| MTLSize { width: n[0] as usize, height: n[1] as usize, depth: n[2] as usize };
            encoder.dispatchThreadgroups_threadsPerThreadgroup(size(d.groups), size(d.threads));
        }
        Ok(())
    }

    /// Lets go of what finished lists used; with `all`, waits for the others first.
    fn collect(&self, all: bool) -> Result<(), DeviceError> {
        let mut started = lock(&self.started);
        if all && let Some(last) = started.back() {
            last.commands.waitUntilCompleted(); // lists of one queue end in their order
        }
        while let Some(first) = started.front() {
            let status = first.commands.status();
            if status == MTLCommandBufferStatus::Error {
                let error = first.commands.error();
                started.clear();
                let what = error.map_or_else(String::new, |e| e.localizedDescription().to_string());
                return Err(failed(format!("a list of kernels failed: {what}")));
            }
            if status != MTLCommandBufferStatus::Completed {
                break;
            }
            *lock(&self.last) = Some(first.commands.GPUEndTime() - first.commands.GPUStartTime());
            started.pop_front();
        }
        Ok(())
    }

    fn range(&self, buffer: &Buffer, offset: u64, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        if offset.checked_add(bytes as u64).is_none_or(|end| end > buffer.0.bytes) {
            return Err(failed(format!("bytes {offset}+{bytes} of a buffer of {}", buffer.0.bytes)));
        }
        // SAFETY: within the buffer, whose memory is shared with the CPU.
        Ok(unsafe { buffer.0.buffer.contents().cast::<u8>().add(offset as usize) })
    }
}

/// Compiles a file without fast math: results are those of the written operations.
fn library(
    device: &ProtocolObject<dyn MTLDevice>,
    name: &str,
    text: &str,
) -> Result<Object<dyn MTLLibrary>, DeviceError> {
    let options = MTLCompileOptions::new();
    options.setLanguageVersion(MTLLanguageVersion::Version3_1);
    options.setMathMode(MTLMathMode::Safe);
    options.setMathFloatingPointFunctions(MTLMathFloatingPointFunctions::Precise);
    device
        .newLibraryWithSource_options_error(&NSString::from_str(text), Some(&options))
        .map_err(|e| failed(format!("{name}.metal does not compile: {}", e.localizedDescription())))
}

impl Device for Metal {
    type Buffer = Buffer;
    type Pipeline = Pipeline;

    fn name(&self) -> &'static str {
        "metal"
    }

    fn description(&self) -> String {
        format!("{}, {}", self.chip(), self.system())
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let length = bytes.max(16);
        self.resident(length as u64, true, || self.device.newBufferWithLength_options(length, OPTIONS))
    }

    fn import(&self, bytes: &Bytes) -> Result<Option<(Buffer, u64)>, DeviceError> {
        let page = self.limits.import_alignment as usize;
        let Some((first, length)) = bytes.pages(page) else { return Ok(None) };
        let Some(at) = NonNull::new(first.cast_mut().cast::<c_void>()) else { return Ok(None) };
        let offset = bytes.as_ptr() as u64 - first as u64;
        // Metal keeps the block, and with it the mapping, until the last command buffer has let go of the buffer.
        let kept = bytes.clone();
        let release = RcBlock::new(move |_: NonNull<c_void>, _: usize| {
            let _ = &kept;
        });
        let buffer = self.resident(length as u64, false, || {
            // SAFETY: whole pages of a mapping that the block keeps; kernels only read them.
            unsafe {
                self.device.newBufferWithBytesNoCopy_length_options_deallocator(
                    at,
                    length,
                    OPTIONS,
                    Some(&release),
                )
            }
        })?;
        Ok(Some((buffer, offset)))
    }

    fn write(&self, buffer: &Buffer, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        if !buffer.0.writable {
            return Err(failed("an imported buffer is read-only"));
        }
        let at = self.range(buffer, offset, data.len())?;
        // SAFETY: the range was checked, and no work uses it by the rule of `write`.
        unsafe { at.as_ptr().copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        Ok(())
    }

    fn read(&self, buffer: &Buffer, offset: u64, data: &mut [u8]) -> Result<(), DeviceError> {
        self.collect(true)?;
        let at = self.range(buffer, offset, data.len())?;
        // SAFETY: the range was checked, and all work has finished.
        unsafe { data.as_mut_ptr().copy_from_nonoverlapping(at.as_ptr(), data.len()) };
        Ok(())
    }

    fn pipeline(
        &self,
        kernel: &'static Kernel,
        constants: &[(u32, Constant)],
    ) -> Result<Pipeline, DeviceError> {
        let variant = (kernel.name, constants.to_vec());
        if let Some(found) = lock(&self.pipelines).get(&variant) {
            return Ok(found.clone());
        }
        let made = self.compile(kernel, constants)?;
        lock(&self.pipelines).insert(variant, made.clone());
        Ok(made)
    }

    fn submit(&self, list: Vec<Dispatch<Self>>) -> Result<(), DeviceError> {
        self.collect(false)?;
        self.residency.commit();
        // One lock for the order on the queue and the order of what was started.
        let mut started = lock(&self.started);
        autoreleasepool(|_| {
            let commands = self.queue.commandBuffer().ok_or_else(|| failed("no command buffer"))?;
            let encoder = commands
                .computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent)
                .ok_or_else(|| failed("no encoder"))?;
            if !started.is_empty() {
                encoder.waitForFence(&self.fence); // untracked buffers: lists would overlap
            }
            let encoded = self.encode(&encoder, &list);
            encoder.updateFence(&self.fence);
            encoder.endEncoding();
            encoded?; // a command buffer that is not committed does nothing
            commands.commit();
            let buffers = list.into_iter().flat_map(|d| d.bindings).filter_map(|b| match b {
                Binding::Buffer(buffer, _) => Some(buffer),
                Binding::Inline(_) => None,
            });
            started.push_back(Started { commands, _buffers: buffers.collect() });
            Ok(())
        })
    }

    fn wait(&self) -> Result<Option<f64>, DeviceError> {
        self.collect(true)?;
        Ok(*lock(&self.last))
    }
}
