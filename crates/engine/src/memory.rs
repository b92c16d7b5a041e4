//! Accounting of device memory: bytes and buffers, now, at most, and in all.
//!
//! Plugins differ in what they report (the CPU plugin reports nothing), so the engine counts what its values occupy, from
//! the moment a program is queued that makes them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// A counter in the manner of `torch.cuda.memory_stats`. What is in use is the difference of the two totals, so that the
/// hot path touches one number.
#[derive(Debug, Default)]
struct Stat {
    allocated: AtomicU64,
    freed: AtomicU64,
    peak: AtomicU64,
    /// The totals at the last reset.
    forgotten: [AtomicU64; 2],
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
    fn current(&self) -> u64 {
        let freed = self.freed.load(Relaxed);
        self.allocated.load(Relaxed).saturating_sub(freed)
    }

    fn add(&self, n: u64) {
        let allocated = self.allocated.fetch_add(n, Relaxed) + n;
        let now = allocated.saturating_sub(self.freed.load(Relaxed));
        if now > self.peak.load(Relaxed) {
            self.peak.fetch_max(now, Relaxed);
        }
    }

    fn sub(&self, n: u64) {
        self.freed.fetch_add(n, Relaxed);
    }

    fn read(&self) -> Reading {
        let since =
            |total: &AtomicU64, i: usize| total.load(Relaxed).saturating_sub(self.forgotten[i].load(Relaxed));
        Reading {
            current: self.current(),
            peak: self.peak.load(Relaxed),
            allocated: since(&self.allocated, 0),
            freed: since(&self.freed, 1),
        }
    }

    fn reset_peak(&self) {
        self.peak.store(self.current(), Relaxed);
    }

    fn reset_accumulated(&self) {
        self.forgotten[0].store(self.allocated.load(Relaxed), Relaxed);
        self.forgotten[1].store(self.freed.load(Relaxed), Relaxed);
    }
}

/// The memory of one device.
#[derive(Debug)]
pub struct Memory {
    bytes: Stat,
    buffers: Stat,
    /// Errors for want of memory.
    ooms: AtomicU64,
    /// Bytes that the device has.
    total: u64,
    /// Bytes of them that this process may use.
    limit: AtomicU64,
    /// Whether there can be more than the limit: nothing is there.
    boundless: bool,
    /// Of a mesh: the memory of each device. What is counted here is what is on each of them.
    devices: Box<[&'static Memory]>,
}

impl Memory {
    /// A device with `limit` bytes. Lives as long as the process: every value points at its device's.
    pub fn new(limit: u64) -> &'static Memory {
        Self::with(limit, false)
    }

    /// A device that says to have `limit` bytes and is not there: everything fits.
    pub(crate) fn boundless(limit: u64) -> &'static Memory {
        Self::with(limit, true)
    }

    fn with(limit: u64, boundless: bool) -> &'static Memory {
        let (bytes, buffers, ooms, devices) = Default::default();
        let limit_now = limit.into();
        Box::leak(Box::new(Memory {
            bytes,
            buffers,
            ooms,
            total: limit,
            limit: limit_now,
            boundless,
            devices,
        }))
    }

    /// The memory of several devices, of which each has a part of every value, or a copy.
    pub(crate) fn of_mesh(devices: &[&'static Memory]) -> &'static Memory {
        let (bytes, buffers, ooms) = Default::default();
        let total = devices.iter().map(|m| m.total).min().unwrap_or(0);
        let (limit, devices) = (total.into(), devices.into());
        Box::leak(Box::new(Memory { bytes, buffers, ooms, total, limit, boundless: false, devices }))
    }

    /// Bytes that the device has in all.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes of them that this process may use.
    pub fn limit(&self) -> u64 {
        let own = self.limit.load(Relaxed);
        self.devices.iter().map(|m| m.limit()).min().map_or(own, |least| least.min(own))
    }

    /// The device that has the least left, where there are several.
    pub(crate) fn fullest(&self) -> &Memory {
        let left = |m: &&&Memory| m.limit().saturating_sub(m.bytes.current());
        self.devices.iter().min_by_key(left).map_or(self, |m| m)
    }

    /// Lets this process use no more than this part of the device's memory, between 0 and 1. What is in use stays.
    pub fn set_fraction(&self, fraction: f64) {
        self.limit.store((self.total as f64 * fraction.clamp(0.0, 1.0)).round() as u64, Relaxed);
    }

    /// That part.
    pub fn fraction(&self) -> f64 {
        if self.total == 0 { 1.0 } else { self.limit() as f64 / self.total as f64 }
    }

    /// Whether `bytes` would fit if nothing else were there.
    pub fn has(&self, bytes: u64) -> bool {
        self.boundless || bytes <= self.limit()
    }

    /// Whether `bytes` more would fit.
    pub fn fits(&self, bytes: u64) -> bool {
        let here = self.boundless || self.bytes.current().saturating_add(bytes) <= self.limit();
        here && self.devices.iter().all(|m| m.fits(bytes))
    }

    /// Errors for want of memory that somebody has got, or will at the next wait.
    pub fn ooms(&self) -> u64 {
        self.ooms.load(Relaxed)
    }

    pub(crate) fn count_oom(&self) {
        self.ooms.fetch_add(1, Relaxed);
    }

    /// Accounts for a buffer until the charge is released.
    pub(crate) fn charge(&'static self, bytes: u64, charge: &Charge) {
        if charge.0.set((self, bytes, AtomicBool::new(true))).is_ok() {
            self.add(bytes);
        }
    }

    fn add(&self, bytes: u64) {
        self.bytes.add(bytes);
        self.buffers.add(1);
        self.devices.iter().for_each(|m| m.add(bytes));
    }

    fn sub(&self, bytes: u64) {
        self.bytes.sub(bytes);
        self.buffers.sub(1);
        self.devices.iter().for_each(|m| m.sub(bytes));
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
        self.ooms.store(0, Relaxed);
        self.bytes.reset_accumulated();
        self.buffers.reset_accumulated();
    }
}

/// The memory of one value: charged once, and released until it is taken again.
#[derive(Debug, Default)]
pub(crate) struct Charge(OnceLock<(&'static Memory, u64, AtomicBool)>);

impl Charge {
    /// Gives the memory back.
    pub(crate) fn release(&self) {
        if let Some((memory, bytes, held)) = self.0.get()
            && held.swap(false, Relaxed)
        {
            memory.sub(*bytes);
        }
    }

    /// Whether a value takes the memory.
    pub(crate) fn is_held(&self) -> bool {
        self.0.get().is_some_and(|(_, _, held)| held.load(Relaxed))
    }

    /// Takes memory again that was given back; whether there was such.
    pub(crate) fn again(&self) -> bool {
        match self.0.get() {
            Some((memory, bytes, held)) if !held.swap(true, Relaxed) => {
                memory.add(*bytes);
                true
            }
            _ => false,
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fraction_bounds_what_fits_and_not_what_there_is() {
        let m = Memory::new(1000);
        m.set_fraction(0.25);
        assert_eq!((m.total(), m.limit(), m.fraction()), (1000, 250, 0.25));
        assert!(m.has(250) && !m.has(251));
        let held = Charge::default();
        m.charge(200, &held);
        assert!(m.fits(50) && !m.fits(51));
        m.set_fraction(0.1);
        assert!(!m.fits(0) && m.bytes().current == 200);
        m.set_fraction(1.0);
        assert!(m.fits(800));
        held.release();
        assert!(!held.is_held() && held.again() && !held.again() && m.bytes().current == 200);
    }

    #[test]
    fn a_mesh_has_what_each_of_its_devices_has() {
        let devices = [Memory::new(100), Memory::new(80)];
        let mesh = Memory::of_mesh(&devices);
        let (all, own) = (Charge::default(), Charge::default());
        devices[0].charge(50, &own);
        mesh.charge(30, &all);
        let used = || devices.map(|m| m.bytes().current);
        assert_eq!((used(), mesh.bytes().current, mesh.total()), ([80, 30], 30, 80));
        assert!(mesh.fits(20) && !mesh.fits(21) && mesh.has(80) && !mesh.has(81));
        assert_eq!(mesh.fullest().total(), 100);
        devices[1].set_fraction(0.5);
        assert!(mesh.fits(10) && !mesh.fits(11));
        drop(all);
        assert_eq!((used(), mesh.bytes().current), ([50, 0], 0));
    }

    #[test]
    fn peak_and_totals() {
        let m = Memory::new(100);
        let (a, b) = (Charge::default(), Charge::default());
        m.charge(60, &a);
        assert!(!m.fits(41) && m.fits(40));
        a.release();
        drop(a);
        m.charge(10, &b);
        assert_eq!(m.bytes(), Reading { current: 10, peak: 60, allocated: 70, freed: 60 });
        m.reset_peak();
        m.reset_accumulated();
        assert_eq!(m.bytes(), Reading { current: 10, peak: 10, allocated: 0, freed: 0 });
    }
}
