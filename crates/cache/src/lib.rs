//! Compile cache: named key components to a shared value.
//!
//! * [`Key`] names everything that a compiled program depends on, so that a miss can be explained by the components that
//!   differ.
//! * [`Memory`] is the tier of this process: each key is computed once, however many threads ask for it.
//!
//! It does not know what the values are.
#![forbid(unsafe_code)]

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// A blake3 digest.
pub type Digest = [u8; 32];

/// Everything that a cached value depends on, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    components: Vec<(&'static str, Digest)>,
}

impl Key {
    /// A key without components.
    pub fn new() -> Self {
        Key { components: Vec::new() }
    }

    /// Adds a component by its content.
    pub fn with(mut self, name: &'static str, content: &[u8]) -> Self {
        self.components.push((name, *blake3::hash(content).as_bytes()));
        self
    }

    /// One digest of all components, in the order they were added.
    pub fn digest(&self) -> Digest {
        let mut h = blake3::Hasher::new();
        for (name, digest) in &self.components {
            h.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes()).update(digest);
        }
        *h.finalize().as_bytes()
    }

    /// The names of the components in which two keys differ.
    pub fn differences(&self, other: &Key) -> Vec<&'static str> {
        let lookup = |k: &Key, name: &str| k.components.iter().find(|(n, _)| *n == name).map(|(_, d)| *d);
        let mut names: Vec<_> = self.components.iter().chain(&other.components).map(|(n, _)| *n).collect();
        names.sort_unstable();
        names.dedup();
        names.retain(|n| lookup(self, n) != lookup(other, n));
        names
    }
}

impl Default for Key {
    fn default() -> Self {
        Self::new()
    }
}

/// The tier of this process.
pub struct Memory<V> {
    entries: Mutex<FxHashMap<Digest, Arc<OnceLock<V>>>>,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl<V> Default for Memory<V> {
    fn default() -> Self {
        Memory { entries: Mutex::default(), hits: AtomicU64::new(0), misses: AtomicU64::new(0) }
    }
}

impl<V: Clone> Memory<V> {
    /// The value of a key, computed by the first caller; others that ask meanwhile wait for it.
    pub fn get_or_compute(&self, key: &Key, compute: impl FnOnce() -> V) -> V {
        let entry = self.entries.lock().entry(key.digest()).or_default().clone();
        let mut computed = false;
        let value = entry.get_or_init(|| {
            computed = true;
            compute()
        });
        if computed { &self.misses } else { &self.hits }.fetch_add(1, Relaxed);
        value.clone()
    }

    /// How often a value was there, and how often it had to be computed.
    pub fn counts(&self) -> (u64, u64) {
        (self.hits.load(Relaxed), self.misses.load(Relaxed))
    }

    /// Forgets every value; callers keep those they have.
    pub fn clear(&self) {
        self.entries.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_what_differs() {
        let a = Key::new().with("module", b"x").with("options", b"fast");
        let b = Key::new().with("module", b"x").with("options", b"slow").with("topology", b"1");
        assert_ne!(a.digest(), b.digest());
        assert_eq!(a.differences(&b), ["options", "topology"]);
        assert_eq!(a.differences(&a), Vec::<&str>::new());
    }

    #[test]
    fn component_names_are_part_of_the_digest() {
        assert_ne!(Key::new().with("a", b"x").digest(), Key::new().with("b", b"x").digest());
    }

    #[test]
    fn many_threads_compute_once() {
        let cache = Memory::default();
        let key = Key::new().with("module", b"x");
        let runs = AtomicU64::new(0);
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| cache.get_or_compute(&key, || runs.fetch_add(1, Relaxed)));
            }
        });
        assert_eq!(runs.into_inner(), 1);
        assert_eq!(cache.counts(), (7, 1));
    }
}
