//! Work that waits for the next call, which may take it into its own launch.
//!
//! Some operators are cheaper as a part of the launch that follows. They are kept here instead of being recorded; the launcher
//! that can take one in does, and any other launch, submission or count records it first. So the order of the work, as seen by
//! whoever reads memory, is that of the calls.

use std::sync::{MutexGuard, PoisonError};

use crate::{
    Device, Gpu,
    launch::{Expand, Finish, Values},
};

/// Work that waits.
pub(crate) enum Pending<D: Device> {
    /// A sublayer's result on its way into the streams.
    Expand(Expand<D>),
    /// The end of a sublayer's way in.
    Finish(Finish<D>),
    /// The second half of attention.
    Values(Values<D>),
}

impl<D: Device> Gpu<D> {
    /// What waits, for the caller to change or take.
    pub(crate) fn pending(&self) -> MutexGuard<'_, Option<Pending<D>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps `work`, behind what waited so far.
    pub(crate) fn defer(&self, work: Pending<D>) {
        let mut pending = self.pending();
        if let Some(other) = pending.replace(work) {
            self.run(&other);
        }
    }

    /// Records what waits; under its lock, so that no other thread's launch comes between.
    pub(crate) fn flush(&self) {
        let mut pending = self.pending();
        if let Some(work) = pending.take() {
            self.run(&work);
        }
    }

    fn run(&self, work: &Pending<D>) {
        match work {
            Pending::Expand(e) => self.expand_alone(e),
            Pending::Finish(f) => self.finish_alone(f),
            Pending::Values(v) => self.add_values(v),
        }
    }
}
