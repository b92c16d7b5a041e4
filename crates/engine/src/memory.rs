//! Accounting of device memory: bytes and buffers, now, at most, and in all.
//!
//! Plugins differ in what they report (the CPU plugin reports nothing), so the engine counts what its values occupy, from
//! the moment a program is queued that makes them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A counter in the manner of `torch.cuda.memory_stats`.
#[derive(Debug, Default)]
struct Stat {
    current: AtomicU64,
    peak: AtomicU64,
    allocated: AtomicU64,
    freed: AtomicU64,
}

/// One counter at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Now.
    pub current: u64,
    /// The largest `current` since the last reset.
    pub peak: u64,
    /// All that was ever added, since the last reset.
    pub allocated: u64,
    /// All that was ever taken away, since the last reset.
    pub freed: u64,
}

impl Stat {
    fn add(&self, n: u64) {
        let now = self.current.fetch_add(n, Relaxed) + n;
        self.allocated.fetch_add(n, Relaxed);
        self.peak.fetch_max(now, Relaxed);
    }

    fn sub(&self, n: u64) {
        self.current.fetch_sub(n, Relaxed);
        self.freed.fetch_add(n, Relaxed);
    }

    fn read(&self) -> Reading {
        Reading {
            current: self.current.load(Relaxed),
            peak: self.peak.load(Relaxed),
            allocated: self.allocated.load(Relaxed),
            freed: self.freed.load(Relaxed),
        }
    }

    fn reset_peak(&self) {
        self.peak.store(self.current.load(Relaxed), Relaxed);
    }

    fn reset_accumulated(&self) {
        self.allocated.store(0, Relaxed);
        self.freed.store(0, Relaxed);
    }
}

/// The memory of one device.
#[derive(Debug)]
pub struct Memory {
    bytes: Stat,
    buffers: Stat,
    limit: u64,
}

impl Memory {
    /// A device with `limit` bytes.
    pub fn new(limit: u64) -> Arc<Memory> {
        Arc::new(Memory { bytes: Stat::default(), buffers: Stat::default(), limit })
    }

    /// Bytes that the device has in all.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether `bytes` more would fit.
    pub fn fits(&self, bytes: u64) -> bool {
        self.bytes.current.load(Relaxed).saturating_add(bytes) <= self.limit
    }

    /// Accounts for a buffer until the charge is dropped.
    pub(crate) fn charge(self: &Arc<Self>, bytes: u64) -> Charge {
        self.bytes.add(bytes);
        self.buffers.add(1);
        Charge { memory: self.clone(), bytes }
    }

    /// Bytes in use.
    pub fn bytes(&self) -> Reading {
        self.bytes.read()
    }

    /// Buffers in use.
    pub fn buffers(&self) -> Reading {
        self.buffers.read()
    }

    /// Lets the peaks start again from what is in use now.
    pub fn reset_peak(&self) {
        self.bytes.reset_peak();
        self.buffers.reset_peak();
    }

    /// Lets the totals start again from zero.
    pub fn reset_accumulated(&self) {
        self.bytes.reset_accumulated();
        self.buffers.reset_accumulated();
    }
}

/// The memory of one value.
#[derive(Debug)]
pub(crate) struct Charge {
    memory: Arc<Memory>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.memory.bytes.sub(self.bytes);
        self.memory.buffers.sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_and_totals() {
        let m = Memory::new(100);
        let a = m.charge(60);
        assert!(!m.fits(41) && m.fits(40));
        drop(a);
        let _b = m.charge(10);
        assert_eq!(m.bytes(), Reading { current: 10, peak: 60, allocated: 70, freed: 60 });
        m.reset_peak();
        m.reset_accumulated();
        assert_eq!(m.bytes(), Reading { current: 10, peak: 10, allocated: 0, freed: 0 });
    }
}
