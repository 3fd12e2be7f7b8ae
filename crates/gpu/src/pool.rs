//! Device memory that is used again.
//!
//! Work runs in the order in which it was recorded. So what only kernels touch may be used again as soon as its last
//! handle is gone: whoever writes it next was recorded later. What the host writes must wait until the lists that read it
//! have finished.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ops::DeviceError;

use crate::Device;

/// Unused memory that is kept, in bytes; more goes back to the device.
const KEPT: usize = 2 << 30;

/// Who writes a buffer, which decides when it may be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// Kernels.
    Kernels,
    /// The host, before the list that reads it.
    Host,
    /// Kernels, over many steps: a cache, which goes back to the device.
    Cache,
}

/// A buffer and what becomes of it.
pub(crate) struct Storage<D: Device> {
    /// `None` where the device had no memory; then the recorder holds the error and starts nothing more.
    pub buffer: Option<D::Buffer>,
    /// Length in bytes.
    pub bytes: usize,
    pub writer: Writer,
    pool: Arc<Pool<D>>,
}

impl<D: Device> Drop for Storage<D> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.give(buffer, self.bytes, self.writer);
        }
    }
}

/// The unused buffers.
pub(crate) struct Pool<D: Device> {
    state: Mutex<State<D::Buffer>>,
}

struct State<B> {
    /// By length: what kernels write.
    kernels: HashMap<usize, Vec<B>>,
    /// By length: what the host writes.
    host: HashMap<usize, Vec<B>>,
    /// What the host wrote and the list of that number may still read.
    waiting: Vec<(u64, usize, B)>,
    kept: usize,
    /// Number of the list that is being recorded.
    recording: u64,
}

/// Lengths that are kept: four for each power of two, so that shapes that grow share them.
fn class(bytes: usize) -> usize {
    let step = (bytes.max(256).next_power_of_two() / 8).max(64);
    bytes.max(256).next_multiple_of(step)
}

impl<D: Device> Pool<D> {
    pub fn new() -> Arc<Self> {
        let state = State {
            kernels: HashMap::new(),
            host: HashMap::new(),
            waiting: Vec::new(),
            kept: 0,
            recording: 0,
        };
        Arc::new(Self { state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State<D::Buffer>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// At least `bytes` bytes of arbitrary contents.
    pub fn take(
        self: &Arc<Self>,
        device: &D,
        bytes: usize,
        writer: Writer,
    ) -> Result<Storage<D>, DeviceError> {
        let bytes = match writer {
            _ if !device.shares_lengths() => bytes.max(1),
            Writer::Cache => bytes.next_multiple_of(16).max(16),
            Writer::Kernels | Writer::Host => class(bytes),
        };
        let mut state = self.state();
        let list = match writer {
            Writer::Kernels => state.kernels.get_mut(&bytes),
            Writer::Host => state.host.get_mut(&bytes),
            Writer::Cache => None,
        };
        let found = list.and_then(Vec::pop);
        if found.is_some() {
            state.kept -= bytes;
        }
        drop(state);
        let buffer = match found {
            Some(buffer) => buffer,
            None => device.allocate(bytes)?,
        };
        Ok(Storage { buffer: Some(buffer), bytes, writer, pool: self.clone() })
    }

    /// What stands for memory that the device refused.
    pub fn missing(self: &Arc<Self>, writer: Writer) -> Storage<D> {
        Storage { buffer: None, bytes: 0, writer, pool: self.clone() }
    }

    fn give(&self, buffer: D::Buffer, bytes: usize, writer: Writer) {
        let mut state = self.state();
        if writer == Writer::Cache || state.kept + bytes > KEPT {
            return;
        }
        state.kept += bytes;
        match writer {
            Writer::Host => {
                let list = state.recording;
                state.waiting.push((list, bytes, buffer));
            }
            _ => state.kernels.entry(bytes).or_default().push(buffer),
        }
    }

    /// A list has been submitted; the next one is being recorded.
    pub fn submitted(&self) {
        self.state().recording += 1;
    }

    /// Every list before number `list` has finished.
    pub fn finished(&self, list: u64) {
        let mut state = self.state();
        let (done, waiting) = std::mem::take(&mut state.waiting).into_iter().partition(|w| w.0 < list);
        state.waiting = waiting;
        for (_, bytes, buffer) in Vec::from_iter::<Vec<_>>(done) {
            state.host.entry(bytes).or_default().push(buffer);
        }
    }

    /// Number of the list that is being recorded.
    pub fn recording(&self) -> u64 {
        self.state().recording
    }
}
