//! Memory that is free goes back to the host.
//!
//! By itself glibc raises its mmap threshold to the largest block freed so far. Smaller
//! blocks then come from the heap, and each arena keeps up to twice that much free memory.
//! After a burst of large results a service kept 600 MB, and with these bounds 100. They
//! are far above what a run of the usual size takes.

/// Larger blocks are mapped by themselves, in bytes, and are gone when they are free.
const MAPPED_ABOVE_BYTES: i32 = 1 << 20;
/// What a heap keeps at its end, in bytes.
const KEPT_BYTES: i32 = 4 << 20;

/// Bounds what this process keeps. To be called before it has other threads.
pub fn goes_back() {
    let options =
        [(libc::M_MMAP_THRESHOLD, MAPPED_ABOVE_BYTES), (libc::M_TRIM_THRESHOLD, KEPT_BYTES)];
    for (option, bytes) in options {
        // SAFETY: it changes numbers of the allocator alone, and says if it knows no such.
        unsafe { libc::mallopt(option, bytes) };
    }
}

/// Environment variables that bound what a process keeps which is started with them
/// (mallopt(3)).
pub(crate) fn environment() -> [(&'static str, String); 2] {
    [
        ("MALLOC_MMAP_THRESHOLD_", MAPPED_ABOVE_BYTES.to_string()),
        ("MALLOC_TRIM_THRESHOLD_", KEPT_BYTES.to_string()),
    ]
}
