//! The backend over any device: memory, recording and the host's inputs. Launchers of the operators stand in `launch`.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use ops::{Data, DeviceError, Host, Mode, RopeTable};

use crate::{
    Binding, Buf, Constant, Device, Element,
    pending::Pending,
    pool::{Pool, Writer},
    record::{Recent, Recorder, grid, inline},
};

/// Inputs of a step that stay on the device for its other layers.
const RECENT: usize = 48;

/// Bytes written at a time to zero a cache.
const ZEROS: usize = 1 << 20;

/// The GPU backend: all operators over one device. `native` is the arithmetic of `exact`.
pub struct Gpu<D: Device> {
    pub(crate) mode: Mode,
    pub(crate) device: D,
    recorder: Recorder<D>,
    pub(crate) pending: Mutex<Option<Pending<D>>>,
    pool: Arc<Pool<D>>,
    words: Recent<Vec<u32>, Buf<D>>,
    turns: Recent<(RopeTable, Vec<u32>), Buf<D>>,
}

impl<D: Device> Gpu<D> {
    /// The backend in `mode` on `device`.
    pub fn new(mode: Mode, device: D) -> Self {
        let (words, turns) = (Recent::new(RECENT), Recent::new(RECENT / 4));
        let (recorder, pending) = (Recorder::new(), Mutex::new(None));
        Self { mode, device, recorder, pending, pool: Pool::new(), words, turns }
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Lists submitted so far. A decode step is one.
    pub fn submissions(&self) -> u64 {
        self.recorder.submissions()
    }

    /// Runs `work` and counts its dispatches by kernel.
    pub fn counted(&self, work: impl FnOnce()) -> HashMap<&'static str, u64> {
        self.flush();
        self.recorder.counted(|| {
            work();
            self.flush();
        })
    }

    /// Whether values are rounded as the released reference rounds.
    pub(crate) fn source(&self) -> bool {
        self.mode == Mode::Source
    }

    /// Records what waits and a dispatch of kernel `name`. `params` (a `#[repr(C)]` struct of u32 and f32 fields) binds
    /// behind `bindings`.
    pub(crate) fn launch<P>(
        &self,
        name: &'static str,
        constants: &[(u32, Constant)],
        bindings: &[Binding<D::Buffer>],
        params: &P,
        groups: [usize; 3],
        threads: [usize; 3],
    ) {
        self.flush();
        self.record(name, constants, bindings, params, groups, threads);
    }

    /// [`Gpu::launch`] before what waits.
    pub(crate) fn record<P>(
        &self,
        name: &'static str,
        constants: &[(u32, Constant)],
        bindings: &[Binding<D::Buffer>],
        params: &P,
        groups: [usize; 3],
        threads: [usize; 3],
    ) {
        let all = bindings.iter().cloned().chain([inline(params)]).collect();
        let size = [grid(groups), grid(threads)];
        self.recorder.push(&self.device, &self.pool, name, constants, all, size);
    }

    fn buf(&self, shape: &[usize], element: Element, writer: Writer) -> Buf<D> {
        let bytes = shape.iter().product::<usize>() * element.bytes();
        let storage = self.pool.take(&self.device, bytes, writer).unwrap_or_else(|e| {
            self.recorder.fail(&e);
            self.pool.missing(writer)
        });
        Buf::new(storage, shape, element)
    }

    /// New values of arbitrary contents. A failure is reported by the next read.
    pub(crate) fn values(&self, shape: &[usize]) -> Buf<D> {
        self.buf(shape, Element::F32, Writer::Kernels)
    }

    /// New indices of arbitrary contents.
    pub(crate) fn indices(&self, shape: &[usize]) -> Buf<D> {
        self.buf(shape, Element::I32, Writer::Kernels)
    }

    /// New codes of arbitrary contents.
    pub(crate) fn codes(&self, shape: &[usize]) -> Buf<D> {
        self.buf(shape, Element::U8, Writer::Kernels)
    }

    /// The same kind of cache as `cache`, of arbitrary contents.
    pub(crate) fn cache_like(&self, cache: &Buf<D>) -> Buf<D> {
        self.buf(cache.shape(), cache.element(), cache.storage.writer)
    }

    /// `bytes` from the host.
    fn sent(&self, shape: &[usize], element: Element, bytes: &[u8]) -> Result<Buf<D>, DeviceError> {
        let storage = self.pool.take(&self.device, bytes.len(), Writer::Host)?;
        if let (Some(buffer), false) = (&storage.buffer, bytes.is_empty()) {
            self.device.write(buffer, 0, bytes)?;
        }
        Ok(Buf::new(storage, shape, element))
    }

    /// `bytes` from the host; a failure is reported by the next read.
    pub(crate) fn send(&self, shape: &[usize], element: Element, bytes: &[u8]) -> Buf<D> {
        self.sent(shape, element, bytes).unwrap_or_else(|e| {
            self.recorder.fail(&e);
            Buf::new(self.pool.missing(Writer::Host), shape, element)
        })
    }

    /// A short list of numbers from the host (positions, ids), sent once while it is in use.
    pub(crate) fn words(&self, words: &[u32]) -> Buf<D> {
        let make = || {
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            (words.to_vec(), self.send(&[words.len()], Element::I32, &bytes))
        };
        self.words.get(|k| k == words, make)
    }

    /// Cosine and sine of every pair at every position, `[T, pairs, 2]`; made on the host, bit for bit the
    /// reference's.
    pub(crate) fn turns(&self, table: &RopeTable, positions: &[u32]) -> Buf<D> {
        let pairs = table.dim() / 2;
        let make = || {
            let turn = |p: &u32| (0..pairs).map(|i| table.turn(i, *p)).collect::<Vec<_>>();
            let bytes: Vec<u8> = positions
                .iter()
                .flat_map(turn)
                .flat_map(|(cos, sin)| [cos.to_le_bytes(), sin.to_le_bytes()].concat())
                .collect();
            let buf = self.send(&[positions.len(), pairs, 2], Element::F32, &bytes);
            ((table.clone(), positions.to_vec()), buf)
        };
        self.turns.get(|(t, p)| t == table && p == positions, make)
    }

    /// A tensor from the host.
    pub(crate) fn upload_host(&self, host: &Host) -> Result<Buf<D>, DeviceError> {
        match host.data() {
            Data::F32(v) => {
                let bytes: Vec<u8> = v.iter().flat_map(|v| v.to_le_bytes()).collect();
                self.sent(host.shape(), Element::F32, &bytes)
            }
            Data::I32(v) => {
                let bytes: Vec<u8> = v.iter().flat_map(|v| v.to_le_bytes()).collect();
                self.sent(host.shape(), Element::I32, &bytes)
            }
            Data::U8(v) => self.sent(host.shape(), Element::U8, v),
        }
    }

    /// A zeroed cache.
    pub(crate) fn zeroed(&self, rows: usize, width: usize) -> Result<Buf<D>, DeviceError> {
        let storage = self.pool.take(&self.device, rows * width, Writer::Cache)?;
        let zeros = vec![0; storage.bytes.min(ZEROS)];
        if let Some(buffer) = &storage.buffer {
            for at in (0..storage.bytes).step_by(ZEROS) {
                self.device.write(buffer, at as u64, &zeros[..zeros.len().min(storage.bytes - at)])?;
            }
        }
        Ok(Buf::new(storage, &[rows, width], Element::U8))
    }

    /// Starts what is recorded, waits and copies `buf` to the host.
    pub(crate) fn fetch(&self, buf: &Buf<D>) -> Result<Host, DeviceError> {
        self.flush();
        self.recorder.submit(&self.device, &self.pool)?;
        let list = self.pool.recording();
        let mut bytes = vec![0; buf.bytes()];
        if let Some(buffer) = &buf.storage.buffer {
            self.device.read(buffer, buf.offset, &mut bytes)?;
        }
        self.pool.finished(list);
        let words = || bytes.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
        Ok(match buf.element() {
            Element::F32 => Host::f32(buf.shape(), words().map(f32::from_le_bytes).collect()),
            Element::I32 => Host::i32(buf.shape(), words().map(i32::from_le_bytes).collect()),
            Element::U8 => Host::u8(buf.shape(), bytes),
        })
    }

    /// Keeps a failure that has no other way to the caller; the next read reports it, and nothing starts before.
    pub(crate) fn note(&self, error: &DeviceError) {
        self.recorder.fail(error);
    }
}
