//! One CUDA device.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex};

use checkpoint::Bytes;
use cudarc::driver::{result, sys};
use ops::DeviceError;

use super::graph::{Argument, Call, Graphs};
use super::{compile, failed, no_nvrtc, profile, refused};
use crate::kernels::Parameter;
use crate::{Binding, Constant, Device, Dispatch, Kernel, Limits, kernels};

pub(super) fn check<T>(what: &str, r: Result<T, result::DriverError>) -> Result<T, DeviceError> {
    r.map_err(|e| match e.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => refused(format!("{what}: the GPU's memory is full")),
        _ => failed(format!("{what}: {e:?}")),
    })
}

/// A kernel or a file of kernels, and the values of its function constants.
type Variant = (&'static str, Vec<(u32, Constant)>);

/// The first CUDA device of this machine.
pub struct Cuda {
    limits: Limits,
    chip: String,
    driver: String,
    arch: String,
    /// What the cubin cache depends on besides the text.
    version: String,
    pipelines: Mutex<HashMap<Variant, Pipeline>>,
    modules: Mutex<HashMap<Variant, usize>>,
    clock: Mutex<Option<[Event; 2]>>,
    graphs: Mutex<Graphs>,
    /// Last: events and graphs go before their context does.
    shared: Arc<Shared>,
}

/// Context and stream, alive while a buffer is.
struct Shared {
    context: sys::CUcontext,
    stream: sys::CUstream,
    device: sys::CUdevice,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Shared {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Shared {}

impl Shared {
    fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: the context lives as long as `self`.
        check("CUDA context", unsafe { result::ctx::set_current(self.context) })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: last user of stream and context; errors at the end of a program change nothing.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

struct Event(sys::CUevent);

// SAFETY: a driver handle, used under the lock of `Cuda::clock`.
unsafe impl Send for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `event::create`, destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

struct Memory {
    shared: Arc<Shared>,
    at: sys::CUdeviceptr,
    bytes: usize,
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Freed in stream order: lists that use the memory have been submitted before.
        if self.shared.enter().is_ok() {
            // SAFETY: allocated on this stream, freed once.
            let _ = unsafe { result::free_async(self.at, self.shared.stream) };
        }
    }
}

/// A range of the GPU's memory.
#[derive(Clone)]
pub struct Buffer(Arc<Memory>);

impl Buffer {
    fn range(&self, offset: u64, bytes: usize) -> sys::CUdeviceptr {
        let end = offset.checked_add(bytes as u64).expect("a range");
        assert!(end <= self.0.bytes as u64, "bytes {offset}+{bytes} of {}", self.0.bytes);
        self.0.at + offset
    }
}

/// A loaded kernel.
#[derive(Clone)]
pub struct Pipeline {
    function: usize,
    kernel: &'static Kernel,
}

impl Cuda {
    /// The first device; refused where there is no driver or no device.
    pub fn open() -> Result<Self, DeviceError> {
        // SAFETY: only looks whether a library of that name can be loaded.
        if !unsafe { sys::is_culib_present() } {
            return Err(refused("no CUDA driver on this machine (libcuda is missing)"));
        }
        result::init().map_err(|e| refused(format!("the CUDA driver does not start: {e:?}")))?;
        let device = result::device::get(0).map_err(|e| refused(format!("no CUDA device: {e:?}")))?;
        let attribute = |a| {
            check("CUDA device", unsafe {
                // SAFETY: `device` is valid.
                result::device::get_attribute(device, a)
            })
        };
        use sys::CUdevice_attribute_enum as A;
        let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let name = check("CUDA device", result::device::get_name(device))?;
        // SAFETY: `device` is valid.
        let context = check("CUDA context", unsafe { result::primary_ctx::retain(device) })?;
        // SAFETY: just retained.
        check("CUDA context", unsafe { result::ctx::set_current(context) })?;
        let stream = check("CUDA stream", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        // SAFETY: `device` is valid.
        let memory = check("CUDA device", unsafe { result::device::total_mem(device) })? as u64;
        keep_freed_memory(device)?;
        let mut driver = 0;
        // SAFETY: writes one integer.
        check("CUDA driver", unsafe { sys::cuDriverGetVersion(&mut driver) }.result())?;
        let version = compile::version().ok_or_else(no_nvrtc)?;
        Ok(Self {
            shared: Arc::new(Shared { context, stream, device }),
            limits: Limits { buffer: memory, working_set: memory, ..Limits::METAL },
            chip: name,
            driver: format!("driver for CUDA {}.{}, {version}", driver / 1000, driver % 1000 / 10),
            arch: format!("sm_{major}{minor}"),
            version,
            pipelines: Mutex::default(),
            modules: Mutex::default(),
            clock: Mutex::default(),
            graphs: Mutex::default(),
        })
    }

    /// The instruction set that kernels are compiled for: `sm_90`.
    pub fn arch(&self) -> &str {
        &self.arch
    }

    /// The chip's name.
    pub fn chip(&self) -> &str {
        &self.chip
    }

    /// Driver and compiler.
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// Free and whole memory of the device, in bytes.
    pub fn memory(&self) -> Result<(u64, u64), DeviceError> {
        self.shared.enter()?;
        let (free, total) = check("CUDA memory", result::mem_get_info())?;
        Ok((free as u64, total as u64))
    }

    fn module(
        &self,
        file: &'static str,
        constants: &[(u32, Constant)],
    ) -> Result<sys::CUmodule, DeviceError> {
        let key = (file, constants.to_vec());
        let mut modules = self.modules.lock().expect("no panic holds this lock");
        if let Some(&module) = modules.get(&key) {
            return Ok(module as sys::CUmodule);
        }
        let code =
            compile::cached(file, kernels::file(file).cuda, &self.arch, constants, &self.version)?.cubin;
        self.shared.enter()?;
        // SAFETY: `code` is a cubin for this device, alive during the call. Modules stay loaded.
        let module = check(file, unsafe { result::module::load_data(code.as_ptr().cast()) })?;
        modules.insert(key, module as usize);
        Ok(module)
    }
}

/// Lets the device's pool keep what is freed, so that the next step's buffers cost nothing.
fn keep_freed_memory(device: sys::CUdevice) -> Result<(), DeviceError> {
    // SAFETY: `device` is valid; the threshold is one 64-bit number.
    unsafe {
        let pool = check("CUDA memory pool", result::device::get_default_mem_pool(device))?;
        let all = u64::MAX;
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let r = sys::cuMemPoolSetAttribute(pool, threshold, (&raw const all).cast_mut().cast());
        check("CUDA memory pool", r.result())
    }
}

impl Device for Cuda {
    type Buffer = Buffer;
    type Pipeline = Pipeline;

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn description(&self) -> String {
        format!("{}, {}, {}", self.chip, self.arch, self.driver)
    }

    fn multiplies_matrices(&self) -> bool {
        // Here they are made of shuffles.
        false
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.shared.enter()?;
        let bytes = bytes.max(1);
        // SAFETY: the stream is alive.
        let at = unsafe { result::malloc_async(self.shared.stream, bytes) };
        let at = check(&format!("{bytes} bytes on the GPU"), at)?;
        Ok(Buffer(Arc::new(Memory { shared: self.shared.clone(), at, bytes })))
    }

    fn import(&self, _: &Bytes) -> Result<Option<(Buffer, u64)>, DeviceError> {
        Ok(None) // the GPU has its own memory
    }

    fn write(&self, buffer: &Buffer, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.shared.enter()?;
        // SAFETY: the range was checked; the copy from pageable memory has left `data` when the call returns.
        let r =
            unsafe { result::memcpy_htod_async(buffer.range(offset, data.len()), data, self.shared.stream) };
        check("copy to the GPU", r)
    }

    fn read(&self, buffer: &Buffer, offset: u64, data: &mut [u8]) -> Result<(), DeviceError> {
        self.shared.enter()?;
        let at = buffer.range(offset, data.len());
        // SAFETY: the range was checked, and the stream is waited for before `data` is used.
        unsafe {
            check("copy from the GPU", result::memcpy_dtoh_async(data, at, self.shared.stream))?;
            check("work on the GPU", result::stream::synchronize(self.shared.stream))
        }
    }

    fn pipeline(
        &self,
        kernel: &'static Kernel,
        constants: &[(u32, Constant)],
    ) -> Result<Pipeline, DeviceError> {
        let key = (kernel.name, constants.to_vec());
        if let Some(p) = self.pipelines.lock().expect("no panic holds this lock").get(&key) {
            return Ok(p.clone());
        }
        let module = self.module(kernel.file, constants)?;
        let name = CString::new(kernel.name).expect("a kernel name has no zero byte");
        // SAFETY: the module stays loaded.
        let function = check(kernel.name, unsafe { result::module::get_function(module, name) })?;
        let pipeline = Pipeline { function: function as usize, kernel };
        self.pipelines.lock().expect("no panic holds this lock").insert(key, pipeline.clone());
        Ok(pipeline)
    }

    fn submit(&self, list: Vec<Dispatch<Self>>) -> Result<(), DeviceError> {
        self.shared.enter()?;
        let stream = self.shared.stream;
        let arena = self.upload(&list)?;
        let mut clock = self.clock.lock().expect("no panic holds this lock");
        if clock.is_none() {
            let event = || check("CUDA event", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT));
            *clock = Some([Event(event()?), Event(event()?)]);
        }
        let [start, end] = clock.as_ref().expect("just made");
        // SAFETY: events and stream are alive.
        check("CUDA event", unsafe { result::event::record(start.0, stream) })?;
        let mut uploaded = 0;
        let calls: Vec<Call> = list.iter().map(|d| call(d, arena.as_ref(), &mut uploaded)).collect();
        if profile::enabled() {
            timed(&calls, stream)?;
        } else {
            self.graphs.lock().expect("no panic holds this lock").run(calls, stream)?;
        }
        // SAFETY: as above.
        check("CUDA event", unsafe { result::event::record(end.0, stream) })
    }

    fn wait(&self) -> Result<Option<f64>, DeviceError> {
        self.shared.enter()?;
        // SAFETY: the stream is alive.
        check("work on the GPU", unsafe { result::stream::synchronize(self.shared.stream) })?;
        let clock = self.clock.lock().expect("no panic holds this lock");
        let Some([start, end]) = clock.as_ref() else { return Ok(None) };
        // SAFETY: both were recorded on the stream that was waited for.
        let ms = check("CUDA event", unsafe { result::event::elapsed(start.0, end.0) })?;
        Ok(Some(f64::from(ms) / 1e3))
    }
}

/// An event at this place of the stream.
fn mark(stream: sys::CUstream) -> Result<Event, DeviceError> {
    let event = check("CUDA event", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
    // SAFETY: event and stream are alive.
    check("CUDA event", unsafe { result::event::record(event, stream) })?;
    Ok(Event(event))
}

/// Starts one call after another and keeps the time of each.
fn timed(calls: &[Call], stream: sys::CUstream) -> Result<(), DeviceError> {
    let mut marks = vec![mark(stream)?];
    for call in calls {
        call.launch(stream)?;
        marks.push(mark(stream)?);
    }
    // SAFETY: the stream is alive.
    check("work on the GPU", unsafe { result::stream::synchronize(stream) })?;
    for (call, pair) in calls.iter().zip(marks.windows(2)) {
        // SAFETY: both were recorded on the stream that was waited for.
        let ms = check("CUDA event", unsafe { result::event::elapsed(pair[0].0, pair[1].0) })?;
        profile::add(call.name, f64::from(ms) / 1e3);
    }
    Ok(())
}

/// Bytes between the starts of inline arrays in their common upload.
fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(16)
}

/// The inline bytes of a dispatch that its kernel takes through a pointer.
fn arrays(d: &Dispatch<Cuda>) -> impl Iterator<Item = &Arc<[u8]>> {
    d.bindings.iter().zip(d.pipeline.kernel.parameters).filter_map(|(b, p)| match b {
        Binding::Inline(bytes) if !p.by_value => Some(bytes),
        _ => None,
    })
}

impl Cuda {
    /// All inline arrays of a list in one copy.
    fn upload(&self, list: &[Dispatch<Self>]) -> Result<Option<Buffer>, DeviceError> {
        let mut all = Vec::new();
        for bytes in list.iter().flat_map(arrays) {
            all.extend_from_slice(bytes);
            all.resize(padded(all.len()), 0);
        }
        if all.is_empty() {
            return Ok(None);
        }
        let buffer = self.allocate(all.len())?;
        self.write(&buffer, 0, &all)?;
        Ok(Some(buffer))
    }
}

/// A dispatch as the driver takes it: one argument for each parameter.
fn call(d: &Dispatch<Cuda>, arena: Option<&Buffer>, uploaded: &mut usize) -> Call {
    let kernel = d.pipeline.kernel;
    assert_eq!(d.bindings.len(), kernel.parameters.len(), "bindings of {}", kernel.name);
    let argument = |(binding, parameter): (&Binding<Buffer>, &Parameter)| match binding {
        Binding::Buffer(b, offset) => Argument::Pointer(b.range(*offset, 0)),
        Binding::Inline(bytes) if parameter.by_value => Argument::Bytes(bytes.clone()),
        Binding::Inline(bytes) => {
            let at = *uploaded;
            *uploaded += padded(bytes.len());
            Argument::Pointer(arena.expect("an upload of every array").range(at as u64, bytes.len()))
        }
    };
    Call {
        name: kernel.name,
        function: d.pipeline.function,
        groups: d.groups,
        threads: d.threads,
        shared: d.threadgroup.iter().sum(),
        arguments: d.bindings.iter().zip(kernel.parameters).map(argument).collect(),
    }
}
