//! Work is appended to one list; the list starts when somebody reads a value.

use std::{
    collections::HashMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use ops::DeviceError;

use crate::{Binding, Constant, Device, Dispatch, kernels::kernel, pool::Pool};

/// Dispatches after which a list starts though nobody reads: far more than a decode step has.
const LONGEST: usize = 8192;

type Key = (&'static str, Vec<(u32, Constant)>);

pub(crate) struct Recorder<D: Device> {
    state: Mutex<State<D>>,
    submissions: AtomicU64,
}

struct State<D: Device> {
    list: Vec<Dispatch<D>>,
    pipelines: HashMap<Key, D::Pipeline>,
    /// The first failure; nothing starts after it.
    failure: Option<(String, bool)>,
    /// Starts by kernel, while somebody counts.
    counts: Option<HashMap<&'static str, u64>>,
}

/// The bytes of a kernel's parameters.
pub(crate) fn inline<P, B>(params: &P) -> Binding<B> {
    const { assert!(align_of::<P>() == 4 && size_of::<P>() <= 4096, "fields of four bytes") };
    // SAFETY: `P` is a plain struct of u32 and f32 fields (alignment 4, no gaps); it is only read, for its length.
    let bytes =
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast::<u8>(), size_of::<P>()) };
    Binding::Inline(bytes.into())
}

impl<D: Device> Recorder<D> {
    pub fn new() -> Self {
        let state = State { list: Vec::new(), pipelines: HashMap::new(), failure: None, counts: None };
        Self { state: Mutex::new(state), submissions: AtomicU64::new(0) }
    }

    fn state(&self) -> MutexGuard<'_, State<D>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a failure that has no other way to the caller; `read` reports it.
    pub fn fail(&self, error: &DeviceError) {
        self.state().failure.get_or_insert_with(|| (error.reason.clone(), error.refused));
    }

    /// Appends a dispatch.
    pub fn push(
        &self,
        device: &D,
        pool: &Pool<D>,
        name: &'static str,
        constants: &[(u32, Constant)],
        bindings: Vec<Binding<D::Buffer>>,
        [groups, threads]: [[u32; 3]; 2],
    ) {
        let mut state = self.state();
        if state.failure.is_some() || groups.contains(&0) {
            return;
        }
        let key = (name, constants.to_vec());
        let pipeline = match state.pipelines.get(&key) {
            Some(p) => p.clone(),
            None => match device.pipeline(kernel(name), constants) {
                Ok(p) => state.pipelines.entry(key).or_insert(p).clone(),
                Err(e) => {
                    state.failure = Some((e.reason, e.refused));
                    return;
                }
            },
        };
        if let Some(counts) = &mut state.counts {
            *counts.entry(name).or_default() += 1;
        }
        let threadgroup = Vec::new();
        state.list.push(Dispatch { pipeline, bindings, threadgroup, groups, threads, barrier: true });
        if state.list.len() >= LONGEST
            && let Err(e) = self.start(device, pool, &mut state)
        {
            state.failure = Some((e.reason, e.refused));
        }
    }

    fn start(&self, device: &D, pool: &Pool<D>, state: &mut State<D>) -> Result<(), DeviceError> {
        if let Some((reason, refused)) = &state.failure {
            let reason = reason.clone();
            return Err(DeviceError { backend: device.name(), reason, refused: *refused });
        }
        if state.list.is_empty() {
            return Ok(());
        }
        device.submit(std::mem::take(&mut state.list))?;
        self.submissions.fetch_add(1, Relaxed);
        pool.submitted();
        Ok(())
    }

    /// Starts what is recorded.
    pub fn submit(&self, device: &D, pool: &Pool<D>) -> Result<(), DeviceError> {
        self.start(device, pool, &mut self.state())
    }

    /// Lists started so far.
    pub fn submissions(&self) -> u64 {
        self.submissions.load(Relaxed)
    }

    /// Counts the dispatches of `work` by kernel.
    pub fn counted(&self, work: impl FnOnce()) -> HashMap<&'static str, u64> {
        self.state().counts = Some(HashMap::new());
        work();
        self.state().counts.take().unwrap_or_default()
    }
}

/// Small inputs from the host that are still in device memory, so that a step sends each of them once.
pub(crate) struct Recent<K, V> {
    entries: Mutex<Vec<(K, V)>>,
    most: usize,
}

impl<K: PartialEq, V: Clone> Recent<K, V> {
    pub fn new(most: usize) -> Self {
        Self { entries: Mutex::new(Vec::new()), most }
    }

    fn entries(&self) -> MutexGuard<'_, Vec<(K, V)>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value whose key `is` accepts, or a new one.
    pub fn get(&self, is: impl Fn(&K) -> bool, make: impl FnOnce() -> (K, V)) -> V {
        if let Some((_, v)) = self.entries().iter().rev().find(|(k, _)| is(k)) {
            return v.clone();
        }
        let (key, value) = make();
        let mut entries = self.entries();
        if entries.len() >= self.most {
            entries.remove(0);
        }
        entries.push((key, value.clone()));
        value
    }
}

/// As dispatches count.
pub(crate) fn grid(n: [usize; 3]) -> [u32; 3] {
    n.map(|n| u32::try_from(n).expect("a grid below 2^32"))
}

/// A size as kernels take it.
pub(crate) fn u32_of(n: usize) -> u32 {
    u32::try_from(n).expect("a size below 2^32")
}
