//! The tier of this process: values in use, bounded by forgetting those that were used least lately.

use crate::key::{Digest, Key};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// How much the tier of a process may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Values.
    pub count: usize,
    /// The sum of the sizes that were said of them.
    pub bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { count: usize::MAX, bytes: u64::MAX }
    }
}

/// A value in the tier. Whoever keeps a weak reference sees when it was evicted; whoever keeps a strong one keeps the value.
#[derive(Debug)]
pub struct Held<V> {
    value: V,
    bytes: u64,
    used: AtomicU64,
}

impl<V> Held<V> {
    /// Says that it was used now.
    pub fn touch(&self) {
        self.used.store(now(), Relaxed);
    }
}

impl<V> Deref for Held<V> {
    type Target = V;
    fn deref(&self) -> &V {
        &self.value
    }
}

/// A clock that only orders uses.
fn now() -> u64 {
    static CLOCK: AtomicU64 = AtomicU64::new(0);
    CLOCK.fetch_add(1, Relaxed)
}

/// The place of one key. Whoever makes the value holds the lock, so that others that want it wait.
type Cell<V> = Arc<Mutex<Option<Arc<Held<V>>>>>;

/// The tier of this process.
#[derive(Debug)]
pub struct Memory<V> {
    cells: Mutex<FxHashMap<Digest, Cell<V>>>,
    limits: Limits,
    evicted: AtomicU64,
}

impl<V> Memory<V> {
    /// An empty tier.
    pub fn new(limits: Limits) -> Self {
        Memory { cells: Mutex::default(), limits, evicted: AtomicU64::new(0) }
    }

    /// The value of a key and whether it was there. The first caller makes it and says its size; others that ask meanwhile
    /// wait, and make it themselves if the first could not.
    pub fn get_or_make<E>(
        &self,
        key: &Key,
        make: impl FnOnce() -> Result<(V, u64), E>,
    ) -> Result<(Arc<Held<V>>, bool), E> {
        let digest = key.digest();
        let cell = self.cells.lock().entry(digest).or_default().clone();
        let mut place = cell.lock();
        if let Some(held) = &*place {
            held.touch();
            return Ok((held.clone(), true));
        }
        let (value, bytes) = make()?;
        let held = Arc::new(Held { value, bytes, used: AtomicU64::new(now()) });
        *place = Some(held.clone());
        drop(place);
        self.evict(digest);
        Ok((held, false))
    }

    /// The value of a key if it is there or `look` finds it. None, at once, while somebody makes it.
    pub fn find(&self, key: &Key, look: impl FnOnce() -> Option<(V, u64)>) -> Option<Arc<Held<V>>> {
        let digest = key.digest();
        let cell = self.cells.lock().entry(digest).or_default().clone();
        let mut place = cell.try_lock()?;
        if let Some(held) = &*place {
            held.touch();
            return Some(held.clone());
        }
        let (value, bytes) = look()?;
        let held = Arc::new(Held { value, bytes, used: AtomicU64::new(now()) });
        *place = Some(held.clone());
        drop(place);
        self.evict(digest);
        Some(held)
    }

    /// Forgets the value of a key; callers keep it if they have it.
    pub fn forget(&self, key: &Key) {
        self.cells.lock().remove(&key.digest());
    }

    /// Forgets values until the limits hold with some room, but never the newest.
    fn evict(&self, newest: Digest) {
        let mut cells = self.cells.lock();
        // A cell that is locked is being made, and counts when it is done.
        let size = |cell: &Cell<V>| {
            cell.try_lock().and_then(|p| p.as_ref().map(|h| (h.used.load(Relaxed), h.bytes)))
        };
        let mut all: Vec<(u64, u64, Digest)> =
            cells.iter().filter_map(|(d, c)| size(c).map(|(used, bytes)| (used, bytes, *d))).collect();
        let mut bytes = all.iter().fold(0u64, |sum, (_, b, _)| sum.saturating_add(*b));
        let mut count = all.len();
        if count <= self.limits.count && bytes <= self.limits.bytes {
            return;
        }
        // Room for an eighth more, so that not every new value has to look at all others.
        let keep = |limit: u64| limit - limit / 8;
        all.sort_unstable();
        for (_, size, digest) in all {
            if count as u64 <= keep(self.limits.count as u64) && bytes <= keep(self.limits.bytes) {
                break;
            }
            if digest == newest {
                continue;
            }
            cells.remove(&digest);
            count -= 1;
            bytes -= size;
            self.evicted.fetch_add(1, Relaxed);
        }
    }

    /// How many values it holds or is making.
    pub fn len(&self) -> usize {
        self.cells.lock().len()
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many values were forgotten for the limits.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Relaxed)
    }

    /// Forgets every value; callers keep those they have.
    pub fn clear(&self) {
        self.cells.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u32) -> Key {
        Key::new().with("n", &n.to_le_bytes())
    }

    fn make(v: u32) -> impl FnOnce() -> Result<(u32, u64), ()> {
        move || Ok((v, 1))
    }

    #[test]
    fn many_threads_make_once() {
        let memory = Memory::new(Limits::default());
        let runs = AtomicU64::new(0);
        let get = || memory.get_or_make(&key(0), || Ok::<_, ()>((runs.fetch_add(1, Relaxed), 1))).unwrap();
        let made = std::thread::scope(|s| {
            let threads: Vec<_> = (0..8).map(|_| s.spawn(|| get().1)).collect();
            threads.into_iter().map(|t| t.join().unwrap()).filter(|was_there| !was_there).count()
        });
        assert_eq!((runs.into_inner(), made), (1, 1));
    }

    #[test]
    fn what_is_being_made_is_not_waited_for() {
        let memory = Memory::new(Limits::default());
        let find = || memory.find(&key(0), || None);
        assert!(find().is_none());
        let (made, _) = memory.get_or_make(&key(0), || Ok::<_, ()>((find().is_none(), 1))).unwrap();
        assert!(**made);
        assert!(Arc::ptr_eq(&find().unwrap(), &made));
        memory.forget(&key(0));
        assert!(find().is_none() && memory.find(&key(0), || Some((false, 1))).is_some());
    }

    #[test]
    fn what_could_not_be_made_is_made_by_the_next() {
        let memory = Memory::new(Limits::default());
        assert_eq!(memory.get_or_make(&key(0), || Err::<(u32, u64), _>("no")).unwrap_err(), "no");
        assert_eq!(**memory.get_or_make(&key(0), make(5)).unwrap().0, 5);
    }

    #[test]
    fn the_least_lately_used_goes_and_its_holders_see_it() {
        let memory = Memory::new(Limits { count: 2, bytes: u64::MAX });
        let weak: Vec<_> =
            (0..2).map(|i| Arc::downgrade(&memory.get_or_make(&key(i), make(i)).unwrap().0)).collect();
        weak[0].upgrade().unwrap().touch();
        memory.get_or_make(&key(2), make(2)).unwrap();
        assert!(weak[0].upgrade().is_some());
        assert!(weak[1].upgrade().is_none());
        assert_eq!((memory.len(), memory.evicted()), (2, 1));
    }

    #[test]
    fn bytes_are_a_limit_too_and_the_newest_value_stays() {
        let memory = Memory::new(Limits { count: 100, bytes: 10 });
        for i in 0..5 {
            memory.get_or_make(&key(i), || Ok::<_, ()>((i, 4))).unwrap();
        }
        assert_eq!(memory.len(), 2);
        let (huge, _) = memory.get_or_make(&key(9), || Ok::<_, ()>((9, 1000))).unwrap();
        assert_eq!((**huge, memory.len()), (9, 1));
    }
}
