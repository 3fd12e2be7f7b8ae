//! A device that runs everything on the emulator and writes down what it was told, for `replay.cpp`.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use checkpoint::Bytes;
use gpu::{Binding, Constant, Device, Dispatch, Kernel, Limits, emu};
use ops::DeviceError;

type Record = Arc<Mutex<Vec<u8>>>;

/// The emulator with a record of all calls.
pub struct Capture {
    emu: emu::Emu,
    record: Record,
}

/// The next buffer's number; several devices may share a record.
static NEXT: AtomicU32 = AtomicU32::new(0);

struct Owned {
    buffer: emu::Buffer,
    id: u32,
    record: Record,
}

impl Drop for Owned {
    fn drop(&mut self) {
        put(&self.record, b'F', &[&self.id.to_le_bytes()]);
    }
}

#[derive(Clone)]
pub struct Buffer(Arc<Owned>);

#[derive(Clone)]
pub struct Pipeline {
    pipeline: emu::Pipeline,
    kernel: &'static Kernel,
    constants: Vec<(u32, Constant)>,
}

fn put(record: &Record, tag: u8, parts: &[&[u8]]) {
    let mut record = record.lock().unwrap();
    record.push(tag);
    parts.iter().for_each(|part| record.extend_from_slice(part));
}

fn word(n: usize) -> [u8; 4] {
    u32::try_from(n).unwrap().to_le_bytes()
}

fn long(n: usize) -> [u8; 8] {
    (n as u64).to_le_bytes()
}

impl Capture {
    pub fn new(record: Record) -> Self {
        Self { emu: emu::Emu::open().unwrap(), record }
    }

    /// What follows in the record belongs to `name`.
    pub fn label(&self, name: &str) {
        put(&self.record, b'N', &[&word(name.len()), name.as_bytes()]);
    }
}

impl Device for Capture {
    type Buffer = Buffer;
    type Pipeline = Pipeline;

    fn name(&self) -> &'static str {
        "capture"
    }

    fn description(&self) -> String {
        "the emulator, written down".into()
    }

    fn limits(&self) -> &Limits {
        self.emu.limits()
    }

    /// Buffers of the lengths that are asked for, so that an access behind the end shows.
    fn shares_lengths(&self) -> bool {
        false
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let buffer = self.emu.allocate(bytes)?;
        let id = NEXT.fetch_add(1, Relaxed);
        put(&self.record, b'A', &[&id.to_le_bytes(), &long(bytes)]);
        Ok(Buffer(Arc::new(Owned { buffer, id, record: self.record.clone() })))
    }

    fn import(&self, _: &Bytes) -> Result<Option<(Buffer, u64)>, DeviceError> {
        Ok(None)
    }

    fn write(&self, buffer: &Buffer, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        let (id, offset_bytes) = (buffer.0.id.to_le_bytes(), offset.to_le_bytes());
        put(&self.record, b'W', &[&id, &offset_bytes, &long(data.len()), data]);
        self.emu.write(&buffer.0.buffer, offset, data)
    }

    fn read(&self, buffer: &Buffer, offset: u64, data: &mut [u8]) -> Result<(), DeviceError> {
        self.emu.read(&buffer.0.buffer, offset, data)?;
        let (id, offset) = (buffer.0.id.to_le_bytes(), offset.to_le_bytes());
        put(&self.record, b'R', &[&id, &offset, &long(data.len()), data]);
        Ok(())
    }

    fn pipeline(
        &self,
        kernel: &'static Kernel,
        constants: &[(u32, Constant)],
    ) -> Result<Pipeline, DeviceError> {
        Ok(Pipeline {
            pipeline: self.emu.pipeline(kernel, constants)?,
            kernel,
            constants: constants.to_vec(),
        })
    }

    fn submit(&self, list: Vec<Dispatch<Self>>) -> Result<(), DeviceError> {
        let (mut inner, mut text) = (Vec::new(), Vec::new());
        for d in &list {
            text.push(b'D');
            let kernel = d.pipeline.kernel;
            for name in [kernel.name, kernel.file] {
                text.extend(word(name.len()));
                text.extend_from_slice(name.as_bytes());
            }
            text.extend(word(d.pipeline.constants.len()));
            for (id, value) in &d.pipeline.constants {
                let value = match value {
                    Constant::Bool(v) => u32::from(*v),
                    Constant::U32(v) => *v,
                };
                text.extend([id.to_le_bytes(), value.to_le_bytes()].concat());
            }
            text.extend(word(d.bindings.len()));
            for binding in &d.bindings {
                match binding {
                    Binding::Buffer(b, offset) => {
                        text.push(0);
                        text.extend(b.0.id.to_le_bytes());
                        text.extend(offset.to_le_bytes());
                    }
                    Binding::Inline(bytes) => {
                        text.push(1);
                        text.extend(word(bytes.len()));
                        text.extend_from_slice(bytes);
                    }
                }
            }
            let shared: u32 = d.threadgroup.iter().sum();
            for n in d.groups.iter().chain(&d.threads).chain([&shared, &u32::from(d.barrier)]) {
                text.extend(n.to_le_bytes());
            }
            let binding = |b: &Binding<Buffer>| match b {
                Binding::Buffer(b, offset) => Binding::Buffer(b.0.buffer.clone(), *offset),
                Binding::Inline(bytes) => Binding::Inline(bytes.clone()),
            };
            inner.push(Dispatch {
                pipeline: d.pipeline.pipeline.clone(),
                bindings: d.bindings.iter().map(binding).collect(),
                threadgroup: d.threadgroup.clone(),
                groups: d.groups,
                threads: d.threads,
                barrier: d.barrier,
            });
        }
        put(&self.record, b'L', &[&word(list.len()), &text]);
        self.emu.submit(inner)
    }

    fn wait(&self) -> Result<Option<f64>, DeviceError> {
        self.emu.wait()
    }
}
