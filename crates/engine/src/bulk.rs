//! Copies of many bytes in host memory, by several threads: one alone reaches neither the memory's rate nor that of the
//! system's page faults, where the destination is new.

use std::num::NonZero;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{Builder, available_parallelism, scope};

/// From here on several threads copy: to start and to end one takes as long as to copy 1 to 3 MiB (17 to 51 us).
pub(crate) const LEAST: usize = 4 << 20;
/// What a thread takes at a time, so that one that is disturbed takes fewer; no more than `LEAST`.
const PART: usize = 2 << 20;
/// More would mostly wait for the memory; chosen, not measured.
const MOST_THREADS: usize = 16;

/// Copies bytes; both have the same length.
pub(crate) fn copy(from: &[u8], to: &mut [u8]) {
    if to.len() < LEAST {
        return to.copy_from_slice(from);
    }
    assert_eq!(from.len(), to.len());
    let helpers = threads().min(to.len() / PART) - 1;
    let parts = Mutex::new(from.chunks(PART).zip(to.chunks_mut(PART)));
    let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some((from, to)) = next() {
            to.copy_from_slice(from);
        }
    };
    scope(|all| {
        // A thread that the system refuses is one less.
        let _ = (0..helpers).try_for_each(|_| Builder::new().spawn_scoped(all, work).map(drop));
        work();
    });
}

/// How many threads copy.
fn threads() -> usize {
    // The answer is read from files.
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_are_copied_and_no_others() {
        for len in [0, 1, LEAST - 1, LEAST, LEAST + 1, 3 * LEAST + PART / 2 + 7] {
            let from: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let mut to = vec![255; len + 2];
            copy(&from, &mut to[1..=len]);
            assert!(to[1..=len] == from[..], "{len} bytes");
            assert_eq!((to[0], to[len + 1]), (255, 255));
        }
    }
}
