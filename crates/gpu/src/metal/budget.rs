//! What a Mac's GPU may hold: residency sets, and the sentence for what does not fit. No Metal call in here.

/// At most this many residency sets on a command queue.
pub const SETS: usize = 32;
/// A set holds at most the working set divided by this: macOS decides about residency set by set, and with few large ones it
/// drops too much at once.
const SHARE: u64 = 20;
const MIB: u64 = 1 << 20;

/// Which buffer belongs to which residency set.
#[derive(Clone, Debug)]
pub struct Plan {
    working_set: u64,
    sets: Vec<u64>,
}

impl Plan {
    /// For a device that keeps `working_set` bytes resident.
    pub fn new(working_set: u64) -> Self {
        Self { working_set, sets: Vec::new() }
    }

    /// Bytes in all sets.
    pub fn total(&self) -> u64 {
        self.sets.iter().sum()
    }

    /// Number of sets so far.
    pub fn sets(&self) -> usize {
        self.sets.len()
    }

    /// The set for a buffer of `bytes`; it may be a new one, numbered behind the others. A buffer above a twentieth of the
    /// working set has a set of its own. When all 32 are in use, the emptiest takes the buffer. `None` where the working
    /// set has no room.
    pub fn add(&mut self, bytes: u64) -> Option<usize> {
        if self.total().checked_add(bytes)? > self.working_set {
            return None;
        }
        let limit = self.working_set / SHARE;
        let fits = self.sets.iter().position(|held| *held + bytes <= limit);
        let set = match fits {
            Some(set) => set,
            None if self.sets.len() < SETS => {
                self.sets.push(0);
                self.sets.len() - 1
            }
            None => (0..self.sets.len()).min_by_key(|set| self.sets[*set])?,
        };
        self.sets[set] += bytes;
        Some(set)
    }

    /// Takes a buffer out of its set.
    pub fn remove(&mut self, set: usize, bytes: u64) {
        self.sets[set] -= bytes;
    }

    /// Takes back the newest set, which could not be made, with the buffer that opened it.
    pub fn undo_new(&mut self) {
        self.sets.pop();
    }

    /// Why a buffer of `bytes` has no place, and the command that makes room on a machine with `memory` bytes.
    pub fn refusal(&self, bytes: u64, memory: u64) -> String {
        let needed = self.total() + bytes;
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        let start = format!(
            "{:.1} GiB of GPU memory are needed and macOS grants {:.1} GiB",
            gib(needed),
            gib(self.working_set)
        );
        // A sixteenth above what is needed, because the system counts its own share too; 8 GiB stay for the system.
        let limit = (needed + needed / 16).div_ceil(MIB);
        if limit * MIB + (8 << 30) > memory {
            return format!(
                "{start}; this machine has {:.0} GiB of memory: take a smaller pack",
                gib(memory)
            );
        }
        format!("{start}: `sudo sysctl iogpu.wired_limit_mb={limit}` raises that until the next boot")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn sets_stay_under_a_twentieth_and_fill_up_in_order() {
        let mut plan = Plan::new(200 * GIB);
        let sets: Vec<_> = (0..5).map(|_| plan.add(4 * GIB).unwrap()).collect();
        assert_eq!(sets, [0, 0, 1, 1, 2]);
        assert_eq!(plan.add(2 * GIB), Some(0), "10 GiB fill the first set");
        plan.remove(1, 4 * GIB);
        assert_eq!(plan.add(6 * GIB), Some(1));
        assert_eq!(plan.add(30 * GIB), Some(3), "a set of its own");
        assert_eq!((plan.sets(), plan.total()), (4, 54 * GIB));
    }

    #[test]
    fn a_full_working_set_takes_at_most_32_sets() {
        let mut plan = Plan::new(384 * GIB);
        // 11 GiB each: one to a set of 19.2 GiB, so 34 buffers need more than 32 sets of the usual size.
        for _ in 0..34 {
            plan.add(11 * GIB).unwrap();
        }
        assert_eq!((plan.sets(), plan.total()), (SETS, 374 * GIB));
        assert_eq!(plan.add(11 * GIB), None);
        assert!(plan.add(10 * GIB).is_some());
        assert_eq!(plan.add(u64::MAX), None);
    }

    #[test]
    fn the_refusal_names_the_exact_command_or_the_machine() {
        let mut plan = Plan::new(384 * GIB);
        plan.add(380 * GIB).unwrap();
        assert_eq!(
            plan.refusal(20 * GIB, 512 * GIB),
            "400.0 GiB of GPU memory are needed and macOS grants 384.0 GiB: `sudo sysctl iogpu.wired_limit_mb=435200` \
             raises that until the next boot"
        );
        assert_eq!(
            plan.refusal(120 * GIB, 512 * GIB),
            "500.0 GiB of GPU memory are needed and macOS grants 384.0 GiB; this machine has 512 GiB of memory: take a \
             smaller pack"
        );
    }
}
