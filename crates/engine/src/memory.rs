//! What memory there is, and what sessions have been promised of it.

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use crate::{Error, Result};

/// Bytes that open sessions may come to use.
static PROMISED: AtomicU64 = AtomicU64::new(0);
/// Most bytes for all of them.
static LIMIT: OnceLock<u64> = OnceLock::new();

/// Sets the most bytes that the states of all sessions may take together; the first call counts. Without one it is what
/// the machine has free when the first session is opened.
pub fn set_limit(bytes: u64) {
    let _ = LIMIT.set(bytes); // a later call changes nothing, as documented
}

/// Bytes of memory that programs can still take without swapping; none where the system does not tell.
pub fn available() -> Option<u64> {
    #[cfg(target_os = "linux")]
    return field("/proc/meminfo", "MemAvailable:");
    #[cfg(not(target_os = "linux"))]
    {
        let out = std::process::Command::new("sysctl").args(["-n", "hw.memsize"]).output().ok()?;
        String::from_utf8(out.stdout).ok()?.trim().parse().ok()
    }
}

/// Memory of this process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Used {
    /// In memory now: own pages and pages of mapped files.
    pub resident: u64,
    /// Own pages alone.
    pub own: u64,
    /// Most that was ever in memory.
    pub peak: u64,
}

/// What this process uses; none where the system does not tell.
pub fn used() -> Option<Used> {
    let get = |name| field("/proc/self/status", name);
    Some(Used { resident: get("VmRSS:")?, own: get("RssAnon:")?, peak: get("VmHWM:")? })
}

/// A field in kB of a file of the system, in bytes.
fn field(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Memory that a session may come to use; given back when dropped.
#[derive(Debug)]
pub struct Promise(u64);

impl Promise {
    /// Promises `state` bytes, if beside them and all that is promised a step of `step` bytes still has room.
    ///
    /// # Errors
    /// [`Error::Memory`]: nothing is promised.
    pub fn new(state: u64, step: u64) -> Result<Self> {
        let limit = *LIMIT.get_or_init(|| available().unwrap_or(u64::MAX));
        Self::within(&PROMISED, limit, state, step).map(|()| Self(state))
    }

    fn within(promised: &AtomicU64, limit: u64, state: u64, step: u64) -> Result<()> {
        let take = |now: u64| {
            let all = now.checked_add(state)?;
            (all.checked_add(step)? <= limit).then_some(all)
        };
        let full =
            |now: u64| Error::Memory { need: state.saturating_add(step), free: limit.saturating_sub(now) };
        promised.fetch_update(SeqCst, SeqCst, take).map(drop).map_err(full)
    }
}

impl Clone for Promise {
    /// A copy shares its pages until one of the two writes: it is promised all the same, and never refused.
    fn clone(&self) -> Self {
        PROMISED.fetch_add(self.0, SeqCst);
        Self(self.0)
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        PROMISED.fetch_sub(self.0, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_beside_the_others_is_refused_with_the_room_left() {
        let promised = AtomicU64::new(0);
        Promise::within(&promised, 100, 60, 10).unwrap();
        let e = Promise::within(&promised, 100, 35, 10).unwrap_err();
        assert!(matches!(e, Error::Memory { need: 45, free: 40 }) && e.exit_code() == 5, "{e}");
        Promise::within(&promised, 100, 30, 10).unwrap();
        assert!(Promise::within(&promised, 100, u64::MAX, 1).is_err());
        assert_eq!(promised.load(SeqCst), 90);
    }

    #[test]
    fn this_process_uses_memory() {
        #[cfg(target_os = "linux")]
        {
            let used = used().unwrap();
            assert!(used.own > 0 && used.resident >= used.own && used.peak >= used.own);
            assert!(available().unwrap() > 0);
        }
    }
}
