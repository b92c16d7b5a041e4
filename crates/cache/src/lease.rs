//! Leases: of many processes and machines that want the same entry, one makes it and the others wait.
//!
//! A lease is a file that one process creates and that nobody else can create meanwhile. Its owner changes it at every beat;
//! who waits watches it change, by a clock of its own, so that clocks of machines need not agree. A lease whose owner is
//! known to be dead, or that no longer changes, is overtaken. Nothing breaks if two processes believe to have the same one:
//! both then make the entry.

use crate::owner::{Owner, nonce};
use crate::store::Store;
use parking_lot::Mutex;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often an owner says that it lives, and when others stop believing it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) beat: Duration,
    pub(crate) dead_after: Duration,
}

/// What a lease file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ticket {
    nonce: String,
    owner: Owner,
}

impl Ticket {
    fn content(&self, beats: u64) -> Vec<u8> {
        format!("{} {} {beats}\n", self.nonce, self.owner.text()).into_bytes()
    }

    fn parse(content: &[u8]) -> Option<Ticket> {
        let mut words = std::str::from_utf8(content).ok()?.split_whitespace();
        let nonce = words.next()?.to_owned();
        Some(Ticket { nonce, owner: Owner::parse(words.next()?)? })
    }
}

/// Whether the process that wrote a lease has certainly ended; nothing if this is no lease.
pub(crate) fn is_dead(content: &[u8]) -> Option<bool> {
    Some(Ticket::parse(content)?.owner.is_dead())
}

/// A lease of this process.
struct Beating {
    store: Arc<dyn Store>,
    name: String,
    ticket: Ticket,
    pace: Pace,
    pulse: Mutex<Pulse>,
}

/// What an owner knows of its lease.
struct Pulse {
    beats: u64,
    /// When the next beat was looked at last.
    last: Instant,
    /// When it was certainly ours.
    sure: Instant,
    /// It was overtaken.
    lost: bool,
    given_back: bool,
}

impl Beating {
    fn beat(&self, tick: Duration) {
        let mut pulse = self.pulse.lock();
        if pulse.given_back || pulse.lost || pulse.last.elapsed() + tick / 2 < self.pace.beat {
            return;
        }
        pulse.last = Instant::now();
        // A lease that was overtaken is not taken back; a store that fails makes it look dead, which is harmless.
        let Ok(current) = self.store.read(&self.name) else { return };
        pulse.lost = !self.is_this(current);
        if !pulse.lost {
            pulse.beats += 1;
            if self.store.publish(&self.name, &self.ticket.content(pulse.beats)).is_ok() {
                pulse.sure = pulse.last;
            }
        }
    }

    fn give_back(&self) {
        let mut pulse = self.pulse.lock(); // not between the two halves of a beat
        pulse.given_back = true;
        if pulse.lost {
            return;
        }
        // Nobody takes over what changed so lately.
        let sure = pulse.sure.elapsed() < self.pace.dead_after / 2;
        if sure || self.is_this(self.store.read(&self.name).ok().flatten()) {
            // What stays is overtaken: its owner is dead, or no longer changes it.
            let _ = self.store.remove(&self.name);
        }
    }

    fn is_this(&self, content: Option<Vec<u8>>) -> bool {
        content.and_then(|c| Ticket::parse(&c)).as_ref() == Some(&self.ticket)
    }
}

/// The thread that says of all leases of this process that their owner lives; it exists while there are any.
pub(crate) struct Heart {
    /// Between two looks at all leases: the beat of the quickest.
    tick: Duration,
    leases: Mutex<Vec<Arc<Beating>>>,
    running: Mutex<bool>,
}

impl Heart {
    pub(crate) fn new(tick: Duration) -> Arc<Heart> {
        Arc::new(Heart { tick, leases: Mutex::default(), running: Mutex::default() })
    }

    fn add(self: &Arc<Self>, lease: Arc<Beating>) {
        self.leases.lock().push(lease);
        let mut running = self.running.lock();
        if !*running {
            let (own, tick) = (Arc::downgrade(self), self.tick);
            let thread = std::thread::Builder::new().name("oxi-lease".into());
            // Without a thread the lease looks dead after a while, and another process makes the entry too.
            *running = thread.spawn(move || beat(&own, tick)).is_ok();
        }
    }

    fn remove(&self, lease: &Arc<Beating>) {
        self.leases.lock().retain(|l| !Arc::ptr_eq(l, lease));
    }
}

/// How many beats without a lease the thread stays for.
const IDLE_BEATS: u32 = 5;

fn beat(heart: &Weak<Heart>, tick: Duration) {
    let mut idle = 0;
    loop {
        std::thread::sleep(tick);
        let Some(heart) = heart.upgrade() else { return };
        let leases = heart.leases.lock();
        idle = if leases.is_empty() { idle + 1 } else { 0 };
        if idle > IDLE_BEATS {
            // Under the lock that `add` takes first: a lease that comes later starts a new thread.
            *heart.running.lock() = false;
            return;
        }
        // A store may be slow: nobody waits for its lock meanwhile.
        let all = leases.clone();
        drop(leases);
        all.iter().for_each(|l| l.beat(tick));
    }
}

/// The right to make an entry, given back when dropped.
pub(crate) struct Lease {
    heart: Arc<Heart>,
    beating: Arc<Beating>,
}

impl Lease {
    /// Takes the lease if nobody has it.
    pub(crate) fn take(
        heart: &Arc<Heart>,
        store: &Arc<dyn Store>,
        name: &str,
        pace: Pace,
    ) -> io::Result<Option<Lease>> {
        let ticket = Ticket { nonce: nonce(), owner: Owner::own() };
        let created = store.create(name, &ticket.content(0))?;
        Ok(created.then(|| Self::start(heart, store, name, ticket, pace)))
    }

    fn start(heart: &Arc<Heart>, store: &Arc<dyn Store>, name: &str, ticket: Ticket, pace: Pace) -> Lease {
        let now = Instant::now();
        let pulse = Mutex::new(Pulse { beats: 0, last: now, sure: now, lost: false, given_back: false });
        let beating = Arc::new(Beating { store: store.clone(), name: name.to_owned(), ticket, pace, pulse });
        heart.add(beating.clone());
        Lease { heart: heart.clone(), beating }
    }

    /// Whether giving it back takes a network's time.
    pub(crate) fn is_remote(&self) -> bool {
        self.beating.store.is_remote()
    }

    /// Takes a dead owner's lease. Of several that try, the one that creates the marker succeeds; the marker carries the
    /// dead lease's number, and the lease is looked at again under it, so that a new lease is never overtaken for the old.
    fn overtake(
        heart: &Arc<Heart>,
        store: &Arc<dyn Store>,
        name: &str,
        dead: &[u8],
        pace: Pace,
    ) -> io::Result<Option<Lease>> {
        let marker = format!("{name}.{}.take", &blake3::hash(dead).to_hex()[..16]);
        let ticket = Ticket { nonce: nonce(), owner: Owner::own() };
        if !store.create(&marker, &ticket.content(0))? {
            // Whoever made the marker may have died before it removed it.
            let maker = store.read(&marker)?.and_then(|c| Ticket::parse(&c));
            if maker.is_some_and(|m| m.owner.is_dead()) {
                store.remove(&marker)?;
            }
            return Ok(None);
        }
        let mut taken = None;
        if store.read(name)?.as_deref() == Some(dead) {
            store.publish(name, &ticket.content(0))?;
            taken = Some(Self::start(heart, store, name, ticket, pace));
        }
        store.remove(&marker)?;
        Ok(taken)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.heart.remove(&self.beating);
        self.beating.give_back();
    }
}

/// Watches somebody else's lease.
pub(crate) struct Watch {
    seen: Option<Vec<u8>>,
    since: Instant,
}

/// What a watcher found.
pub(crate) enum Seen {
    /// Nobody has it any more.
    Gone,
    /// Its owner is at work.
    Busy,
    /// Its owner was dead; it is ours now.
    Overtaken(Lease),
}

impl Watch {
    pub(crate) fn new() -> Watch {
        Watch { seen: None, since: Instant::now() }
    }

    pub(crate) fn look(
        &mut self,
        heart: &Arc<Heart>,
        store: &Arc<dyn Store>,
        name: &str,
        pace: Pace,
    ) -> io::Result<Seen> {
        let Some(content) = store.read(name)? else { return Ok(Seen::Gone) };
        if self.seen.as_ref() != Some(&content) {
            self.since = Instant::now();
        }
        let dead = Ticket::parse(&content).is_some_and(|t| t.owner.is_dead());
        let silent = self.since.elapsed() > pace.dead_after;
        let taken = if dead || silent { Lease::overtake(heart, store, name, &content, pace)? } else { None };
        self.seen = Some(content);
        Ok(taken.map_or(Seen::Busy, Seen::Overtaken))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Folder, Sharing};

    const PACE: Pace = Pace { beat: Duration::from_millis(10), dead_after: Duration::from_millis(80) };

    fn setup() -> (tempfile::TempDir, Arc<Heart>, Arc<dyn Store>) {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(Folder::new(dir.path(), Sharing::Machine));
        (dir, Heart::new(PACE.beat), store)
    }

    fn look(watch: &mut Watch, heart: &Arc<Heart>, store: &Arc<dyn Store>) -> Seen {
        watch.look(heart, store, "x", PACE).unwrap()
    }

    #[test]
    fn one_has_it_until_it_gives_it_back() {
        let (_dir, heart, store) = setup();
        let lease = Lease::take(&heart, &store, "x", PACE).unwrap().unwrap();
        assert!(Lease::take(&heart, &store, "x", PACE).unwrap().is_none());
        drop(lease);
        assert_eq!(store.list().unwrap(), []);
        assert!(Lease::take(&heart, &store, "x", PACE).unwrap().is_some());
    }

    #[test]
    fn a_beating_lease_is_never_overtaken() {
        let (_dir, heart, store) = setup();
        let _lease = Lease::take(&heart, &store, "x", PACE).unwrap().unwrap();
        let (mut watch, start) = (Watch::new(), Instant::now());
        while start.elapsed() < PACE.dead_after * 4 {
            assert!(matches!(look(&mut watch, &heart, &store), Seen::Busy));
            std::thread::sleep(PACE.beat);
        }
    }

    #[test]
    fn a_silent_lease_of_an_unknown_owner_is_overtaken_by_one() {
        let (_dir, heart, store) = setup();
        for content in [&b""[..], b"n elsewhere-1-1 0\n", b"\xff not a lease"] {
            store.publish("x", content).unwrap();
            let (mut a, mut b) = (Watch::new(), Watch::new());
            assert!(matches!(look(&mut a, &heart, &store), Seen::Busy));
            assert!(matches!(look(&mut b, &heart, &store), Seen::Busy));
            std::thread::sleep(PACE.dead_after + PACE.beat);
            let Seen::Overtaken(lease) = look(&mut a, &heart, &store) else { panic!("not overtaken") };
            assert!(matches!(look(&mut b, &heart, &store), Seen::Busy), "the new lease is not the old one");
            drop(lease);
            assert!(matches!(look(&mut b, &heart, &store), Seen::Gone));
            assert_eq!(store.list().unwrap(), [], "no marker stays");
        }
    }

    #[test]
    fn a_dead_process_is_overtaken_at_once() {
        let (_dir, heart, store) = setup();
        let own = Owner::own().text();
        let [machine, pid, _] = own.split('-').collect::<Vec<_>>()[..] else { panic!("{own}") };
        store.publish("x", format!("n {machine}-{pid}-1 0\n").as_bytes()).unwrap();
        assert!(matches!(look(&mut Watch::new(), &heart, &store), Seen::Overtaken(_)));
    }

    #[test]
    fn an_owner_that_was_overtaken_leaves_the_new_lease_alone() {
        let (_dir, heart, store) = setup();
        let lost = Lease::take(&heart, &store, "x", PACE).unwrap().unwrap();
        store.publish("x", b"n elsewhere-1-1 0\n").unwrap();
        std::thread::sleep(PACE.beat * 3);
        drop(lost);
        std::thread::sleep(PACE.beat * 3);
        assert_eq!(store.read("x").unwrap().unwrap(), b"n elsewhere-1-1 0\n");
    }

    #[test]
    fn a_store_that_hangs_holds_up_its_own_leases_alone() {
        let (_dir, heart, store) = setup();
        let hanging: Arc<dyn Store> = Arc::new(Hanging(Mutex::new(())));
        let slow = Pace { beat: PACE.beat, dead_after: Duration::from_secs(60) };
        let stuck = Lease::take(&heart, &hanging, "x", slow).unwrap().unwrap();
        let start = Instant::now();
        std::thread::sleep(PACE.beat * 3); // the heart hangs
        drop(Lease::take(&heart, &store, "x", PACE).unwrap().unwrap());
        assert!(start.elapsed() < HANGS / 2, "{:?}", start.elapsed());
        drop(stuck);
    }

    const HANGS: Duration = Duration::from_millis(1500);
    struct Hanging(Mutex<()>);

    impl Store for Hanging {
        fn read(&self, _name: &str) -> io::Result<Option<Vec<u8>>> {
            let _one = self.0.lock();
            std::thread::sleep(HANGS);
            Err(io::ErrorKind::TimedOut.into())
        }

        fn read_start(&self, name: &str, _len: usize) -> io::Result<Option<(Vec<u8>, u64)>> {
            Ok(self.read(name)?.map(|all| (all, 0)))
        }

        fn publish(&self, _name: &str, _content: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn create(&self, _name: &str, _content: &[u8]) -> io::Result<bool> {
            Ok(true)
        }

        fn remove(&self, _name: &str) -> io::Result<bool> {
            Ok(true)
        }

        fn list(&self) -> io::Result<Vec<crate::Stored>> {
            Ok(Vec::new())
        }

        fn used(&self, _name: &str) {}

        fn clean(&self) {}
    }

    #[test]
    fn the_heart_starts_again_after_a_pause() {
        let (_dir, heart, store) = setup();
        drop(Lease::take(&heart, &store, "x", PACE).unwrap());
        std::thread::sleep(PACE.beat * (IDLE_BEATS + 4));
        let _lease = Lease::take(&heart, &store, "x", PACE).unwrap();
        let first = store.read("x").unwrap();
        std::thread::sleep(PACE.beat * 5);
        assert_ne!(store.read("x").unwrap(), first);
    }
}
