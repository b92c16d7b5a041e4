//! Counters of what a cache did.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What happened since the start or the last reset.
        #[derive(Debug, Default)]
        pub struct Stats {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        impl Stats {
            /// Every counter with its name, in declaration order.
            pub fn counters(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Relaxed)),)*]
            }

            /// Sets everything to zero.
            pub fn reset(&self) {
                $(self.$name.store(0, Relaxed);)*
            }
        }
    };
}

stats! {
    /// Values that the process had.
    memory_hits,
    /// Values that came from the disk.
    disk_hits,
    /// Values that came from the shared folder.
    shared_hits,
    /// Values that had to be made.
    made,
    /// What making the hits of disk and shared folder had taken, less what loading them took, in microseconds.
    saved_us,
    /// Bytes of entries read.
    bytes_read,
    /// Bytes of entries written.
    bytes_written,
    /// Entries written, in all tiers.
    stored,
    /// Entries that could not be written, or were too large.
    unstored,
    /// Entries removed for the size limit.
    evicted,
    /// Entries that were damaged, cut short or not entries; removed.
    damaged,
    /// Entries that were whole and could not be loaded; removed.
    refused,
    /// How often another process was making what this one wanted.
    waits,
    /// Time spent so, in microseconds.
    wait_us,
    /// Waits that ended because they had lasted too long.
    gave_up,
    /// Waits that ended because the other process was dead.
    overtaken,
    /// Failures of a file system.
    errors,
}

/// Where a value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// This process had it.
    Memory,
    /// The disk of this machine.
    Disk,
    /// What machines share.
    Shared,
    /// Nobody had it: it was made.
    Made,
}

impl Stats {
    pub(crate) fn hit(&self, source: Source, bytes: usize, cost: Duration, took: Duration) {
        let counter = if source == Source::Disk { &self.disk_hits } else { &self.shared_hits };
        counter.fetch_add(1, Relaxed);
        self.bytes_read.fetch_add(bytes as u64, Relaxed);
        self.saved_us.fetch_add(cost.saturating_sub(took).as_micros() as u64, Relaxed);
    }

    pub(crate) fn waited(&self, time: Duration) {
        self.wait_us.fetch_add(time.as_micros() as u64, Relaxed);
    }
}
