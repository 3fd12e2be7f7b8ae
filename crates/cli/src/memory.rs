//! How the process keeps memory.

/// Keeps freed memory in the process instead of returning it after every step: the activations of a long prefill would
/// otherwise be mapped, zeroed and unmapped again for every operator (15 % of a prefill of the demo model).
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn keep_freed() {
    // SAFETY: mallopt only sets parameters of the allocator, before any thread is started.
    unsafe {
        // The largest value that the allocator takes.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 25);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

/// Other allocators keep what they have.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn keep_freed() {}
