//! Keeps buffers wired: many small residency sets on the queue, and a heartbeat that asks for them again while work comes.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use objc2::{rc::Retained, runtime::ProtocolObject};
use objc2_metal::{MTLBuffer, MTLCommandQueue, MTLDevice, MTLResidencySet, MTLResidencySetDescriptor};
use ops::DeviceError;

use super::{budget::Plan, failed, refused};

/// Between two requests while there is work.
const BEAT: Duration = Duration::from_millis(500);
/// After so long without work the memory may go.
const IDLE: Duration = Duration::from_secs(180);

type Set = Retained<ProtocolObject<dyn MTLResidencySet>>;

struct State {
    plan: Plan,
    sets: Vec<Set>,
    /// Sets with changes that are not committed: a commit is expensive, so it happens once before work starts.
    changed: Vec<bool>,
    last: Instant,
    stopped: bool,
}

// SAFETY: Metal's objects may be used from any thread; the state is behind a lock.
unsafe impl Send for State {}

/// The residency sets of a device.
pub struct Residency {
    state: Mutex<State>,
    wake: Condvar,
    memory: u64,
}

fn lock(r: &Residency) -> MutexGuard<'_, State> {
    r.state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Residency {
    /// Sets for `working_set` bytes on a machine with `memory` bytes, and their heartbeat.
    pub fn new(working_set: u64, memory: u64) -> Result<Arc<Self>, DeviceError> {
        let state = State {
            plan: Plan::new(working_set),
            sets: Vec::new(),
            changed: Vec::new(),
            last: Instant::now(),
            stopped: false,
        };
        let this = Arc::new(Self { state: Mutex::new(state), wake: Condvar::new(), memory });
        let weak = Arc::downgrade(&this);
        std::thread::Builder::new()
            .name("metal residency".into())
            .spawn(move || heartbeat(&weak))
            .map_err(|e| failed(format!("cannot start a thread: {e}")))?;
        Ok(this)
    }

    /// Reserves room for `bytes`, before the buffer is made; the number of its set.
    pub fn reserve(
        &self,
        device: &ProtocolObject<dyn MTLDevice>,
        queue: &ProtocolObject<dyn MTLCommandQueue>,
        bytes: u64,
    ) -> Result<usize, DeviceError> {
        let mut state = lock(self);
        let Some(set) = state.plan.add(bytes) else {
            return Err(refused(state.plan.refusal(bytes, self.memory)));
        };
        if set == state.sets.len() {
            let descriptor = MTLResidencySetDescriptor::new();
            match device.newResidencySetWithDescriptor_error(&descriptor) {
                Ok(made) => {
                    queue.addResidencySet(&made);
                    state.sets.push(made);
                    state.changed.push(false);
                }
                Err(error) => {
                    state.plan.undo_new();
                    return Err(failed(format!("no residency set: {}", error.localizedDescription())));
                }
            }
        }
        Ok(set)
    }

    /// Puts a buffer into the set that was reserved for it.
    pub fn add(&self, set: usize, buffer: &ProtocolObject<dyn MTLBuffer>) {
        let mut state = lock(self);
        state.sets[set].addAllocation(buffer.as_ref());
        state.changed[set] = true;
    }

    /// Gives back a reservation whose buffer was not made.
    pub fn release(&self, set: usize, bytes: u64) {
        lock(self).plan.remove(set, bytes);
    }

    /// Takes a buffer out of its set.
    pub fn remove(&self, set: usize, bytes: u64, buffer: &ProtocolObject<dyn MTLBuffer>) {
        let mut state = lock(self);
        state.sets[set].removeAllocation(buffer.as_ref());
        state.changed[set] = true;
        state.plan.remove(set, bytes);
    }

    /// Makes every set current; called before a list starts.
    pub fn commit(&self) {
        let mut state = lock(self);
        let State { sets, changed, .. } = &mut *state;
        for (set, changed) in sets.iter().zip(changed) {
            if std::mem::take(changed) {
                set.commit();
                set.requestResidency();
            }
        }
        let idle = state.last.elapsed() > IDLE;
        state.last = Instant::now();
        drop(state);
        if idle {
            self.wake.notify_all();
        }
    }

    /// Ends the heartbeat.
    pub fn stop(&self) {
        lock(self).stopped = true;
        self.wake.notify_all();
    }
}

fn heartbeat(weak: &Weak<Residency>) {
    while let Some(residency) = weak.upgrade() {
        let state = lock(&residency);
        if state.stopped {
            return;
        }
        // Without work it sleeps until `commit` or `stop` wakes it.
        let pause = if state.last.elapsed() < IDLE { BEAT } else { Duration::from_secs(3600) };
        let waited = residency.wake.wait_timeout(state, pause);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if !state.stopped && state.last.elapsed() < IDLE {
            state.sets.iter().for_each(|set| set.requestResidency());
        }
    }
}
