//! The C library's heap, which plugins share with the process.

/// Gives freed memory back to the system. A compiler frees much at once, and glibc's malloc keeps it for what comes. Takes
/// about 10 ms for 100 MiB; other C libraries do it by themselves.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc lets any thread call it at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}
