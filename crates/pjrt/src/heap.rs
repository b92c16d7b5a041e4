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

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    /// Resident bytes of this process.
    fn resident() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    }

    #[test]
    fn freed_memory_goes_back_to_the_system() {
        const BYTES: usize = 128 << 20;
        let mut small: Vec<Vec<u8>> = (0..BYTES / 1024).map(|_| vec![1; 1024]).collect();
        let last = small.pop(); // behind all others: malloc cannot give back what is before it by itself
        let full = resident();
        drop(small);
        super::trim_heap();
        assert!(resident() + BYTES / 2 < full, "{full} bytes before, {} after", resident());
        drop(last);
    }
}
