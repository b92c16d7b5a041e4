//! The tiers together: this process, this machine's disk, what machines share, and making it.

use crate::entry::{self, Damaged, Meta};
use crate::key::{Key, hex};
use crate::lease::{Heart, Lease, Pace, Seen, Watch};
use crate::listing::{self, Listed};
use crate::memory::{Held, Limits, Memory};
use crate::stats::{Source, Stats};
use crate::store::{Folder, Sharing, Store};
use crate::uploads::{Upload, Uploads};
use parking_lot::Mutex;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Told once about what keeps a tier from working.
pub type Warn = Arc<dyn Fn(&str) + Send + Sync>;

/// What a cache is made of.
#[derive(Clone)]
pub struct Config {
    /// What this process holds.
    pub memory: Limits,
    /// This machine's cache folder, if there is one.
    pub disk: Option<PathBuf>,
    /// What the entries in that folder may have together, in bytes.
    pub disk_bytes: u64,
    /// What several machines share, if there is anything. Nobody bounds it.
    pub shared: Option<Shared>,
    /// How long to wait for another process to make what this one wants, before making it too.
    pub wait: Duration,
    /// How long a process of this machine may be silent before another takes over what it was making; six times that
    /// through a shared folder, where changes may be seen late.
    pub dead_after: Duration,
    /// After how long it is said that another process is waited for.
    pub say_after: Duration,
    /// Told once about what keeps a tier from working, and once about a long wait.
    pub warn: Warn,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            memory: Limits::default(),
            disk: None,
            disk_bytes: DISK_BYTES,
            shared: None,
            wait: WAIT,
            dead_after: Duration::from_secs(10),
            say_after: Duration::from_secs(10),
            warn: Arc::new(|_| ()),
        }
    }
}

/// A store that several machines share: a folder, or anything else that is a [`Store`].
#[derive(Clone)]
pub struct Shared {
    store: Arc<dyn Store>,
    place: String,
}

impl Shared {
    /// A cache folder on a network file system.
    pub fn folder(cache: &Path) -> Shared {
        let folder = Folder::of_programs(cache, Sharing::Network);
        Shared { store: Arc::new(folder), place: cache.display().to_string() }
    }

    /// Another kind of store; `place` names it in messages.
    pub fn store(store: Arc<dyn Store>, place: impl Into<String>) -> Shared {
        Shared { store, place: place.into() }
    }

    /// A cache folder, or an object store if the place is a URL, with `settings` such as `AWS_REGION`; others than those
    /// that the store knows may be among them. Nothing is asked over the network yet.
    pub fn open(place: &str, settings: &[(String, String)]) -> io::Result<Shared> {
        match place.split_once("://") {
            None => Ok(Shared::folder(Path::new(place))),
            Some(("file", path)) => Ok(Shared::folder(Path::new(path))),
            Some(_) => Shared::object_store(place, settings),
        }
    }

    #[cfg(feature = "object-store")]
    fn object_store(url: &str, settings: &[(String, String)]) -> io::Result<Shared> {
        let remote = crate::Remote::open(url, settings)?;
        let place = remote.place().to_owned();
        Ok(Shared::store(Arc::new(remote), place))
    }

    #[cfg(not(feature = "object-store"))]
    fn object_store(_url: &str, _settings: &[(String, String)]) -> io::Result<Shared> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this build of oxitorch has no object stores: build it with the cargo feature `object-store` \
             (`pip install . --config-settings=build-args='--features object-store'`), or name a folder",
        ))
    }

    /// Where it is, for people.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// What is kept there.
    pub fn contents(&self) -> Arc<dyn Store> {
        self.store.clone()
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.place)
    }
}

/// What the entries on a disk may have together if nothing is said: 5 GiB.
pub const DISK_BYTES: u64 = 5 << 30;
/// How long to wait for another process if nothing is said. Programs that take minutes exist; ten are more than any seen.
pub const WAIT: Duration = Duration::from_secs(600);

/// How to get a value that the process does not have.
pub trait Maker {
    /// The value.
    type Value;
    /// Why it cannot be made.
    type Error;

    /// For people: what the value is called, and more about it by name.
    fn describe(&self) -> (String, Vec<(String, String)>);

    /// From what [`Maker::save`] gave, with its size in memory; or why that cannot be used.
    fn load(&self, payload: &[u8]) -> Result<(Self::Value, u64), String>;

    /// From nothing, with its size in memory.
    fn make(&self) -> Result<(Self::Value, u64), Self::Error>;

    /// What [`Maker::load`] takes in another process; none if the value means something in this process alone.
    fn save(&self, value: &Self::Value) -> Option<Vec<u8>>;

    /// Whether it is worth looking for in other tiers than memory.
    fn is_portable(&self) -> bool;
}

/// Values by what they depend on, in several tiers.
pub struct Cache<V> {
    memory: Memory<V>,
    tiers: Arc<Tiers>,
}

impl<V> Cache<V> {
    /// Opens no file: tiers are looked at when something is asked for.
    pub fn new(config: &Config) -> Cache<V> {
        Cache { memory: Memory::new(config.memory), tiers: Arc::new(Tiers::new(config)) }
    }

    /// The tier of this process.
    pub fn memory(&self) -> &Memory<V> {
        &self.memory
    }

    /// What happened.
    pub fn stats(&self) -> &Stats {
        &self.tiers.stats
    }

    /// Whether there is any tier that outlives the process.
    pub fn is_persistent(&self) -> bool {
        !self.tiers.list.is_empty()
    }

    /// Ends all waiting for other processes and networks: what is waited for is made by this one, or not, as the maker
    /// decides. What is on its way to a remote store gets two seconds more.
    pub fn close(&self) {
        self.tiers.close();
    }

    /// The value of a key and where it came from. Of all threads, processes and machines that share a tier and ask for the
    /// same key at once, one makes the value.
    pub fn get_or_make<R: Maker<Value = V>>(
        &self,
        key: &Key,
        maker: &R,
    ) -> Result<(Arc<Held<V>>, Source), R::Error> {
        let mut source = Source::Memory;
        let (held, _) = self.memory.get_or_make(key, || {
            let (value, bytes, from) = self.tiers.get_or_make(key, maker)?;
            source = from;
            Ok((value, bytes))
        })?;
        if source == Source::Memory {
            self.stats().memory_hits.fetch_add(1, Relaxed);
        }
        Ok((held, source))
    }

    /// The value of a key if nobody has to make it, and where it came from. Waits for nobody who does.
    pub fn find<R: Maker<Value = V>>(&self, key: &Key, maker: &R) -> Option<(Arc<Held<V>>, Source)> {
        let mut source = Source::Memory;
        let held = self.memory.find(key, || {
            let (value, bytes, from) = self.tiers.find(key, maker)?;
            source = from;
            Some((value, bytes))
        })?;
        if source == Source::Memory {
            self.stats().memory_hits.fetch_add(1, Relaxed);
        }
        Some((held, source))
    }

    /// The entries of the nearest tier that outlives the process, without payloads: at most so many, those that were used
    /// last. None where it cannot be read.
    pub fn entries(&self, most: usize) -> Vec<Listed> {
        let Some(tier) = self.tiers.list.first() else { return Vec::new() };
        listing::list_latest(&*tier.store, most).unwrap_or_default()
    }
}

/// The tiers that outlive the process, nearest first.
struct Tiers {
    list: Vec<Tier>,
    wait: Duration,
    /// Nobody waits for other processes any more.
    closed: AtomicBool,
    say_after: Duration,
    said: AtomicBool,
    uploads: Uploads,
    /// Whole entries that could not be loaded, since one could.
    refusals: AtomicU32,
    heart: Arc<Heart>,
    stats: Stats,
    warn: Warn,
}

struct Tier {
    store: Arc<dyn Store>,
    /// For messages.
    place: String,
    source: Source,
    limit: Option<u64>,
    pace: Pace,
    /// Longest pause between two looks at somebody else's lease.
    look_every: Duration,
    warned: AtomicBool,
    space: Mutex<Space>,
    silence: Mutex<Silence>,
}

/// What a process believes about a remote store that did not answer.
#[derive(Default)]
struct Silence {
    /// It is not asked until then.
    until: Option<Instant>,
    /// How often in a row it did not answer.
    times: u32,
}

/// What a process believes about the space in a tier.
#[derive(Default)]
struct Space {
    bytes: u64,
    counted: Option<Instant>,
    /// After a failed write, none is tried until then.
    resting_until: Option<Instant>,
}

/// After so many entries in a row that are whole and cannot be loaded, none are looked for or written any more: whoever
/// loads them does not do what it says, and writing them again would not help.
const REFUSALS: u32 = 3;
/// After a failed write.
const REST: Duration = Duration::from_secs(60);
/// The rest after a remote store did not answer doubles each time it does so again, so many times at most.
const REST_DOUBLINGS: u32 = 6;
/// How long the end of a process waits for what it is still writing to a remote store.
const LAST_UPLOADS: Duration = Duration::from_secs(2);
/// Other processes write too.
const COUNT_EVERY: Duration = Duration::from_secs(30);

impl Tiers {
    fn new(config: &Config) -> Tiers {
        let pace = |dead_after: Duration| Pace { beat: dead_after / 5, dead_after };
        let disk = config.disk.as_ref().map(|cache| {
            let folder = Folder::of_programs(cache, Sharing::Machine);
            Tier {
                limit: Some(config.disk_bytes),
                ..Tier::new(Arc::new(folder), cache.display(), Source::Disk, pace(config.dead_after))
            }
        });
        let shared = config.shared.as_ref().map(|shared| {
            // Network file systems may show a change seconds later, and each look at an object store costs.
            let pace = pace(config.dead_after * 6);
            Tier {
                look_every: Duration::from_millis(500),
                ..Tier::new(shared.store.clone(), &shared.place, Source::Shared, pace)
            }
        });
        Tiers {
            list: disk.into_iter().chain(shared).collect(),
            wait: config.wait,
            closed: AtomicBool::new(false),
            say_after: config.say_after,
            said: AtomicBool::new(false),
            uploads: Uploads::default(),
            refusals: AtomicU32::new(0),
            heart: Heart::new(config.dead_after / 5),
            stats: Stats::default(),
            warn: config.warn.clone(),
        }
    }

    /// Whether they are of no use for a value.
    fn are_useless<R: Maker>(&self, maker: &R) -> bool {
        self.list.is_empty() || self.refusals.load(Relaxed) >= REFUSALS || !maker.is_portable()
    }

    fn find<R: Maker>(&self, key: &Key, maker: &R) -> Option<(R::Value, u64, Source)> {
        let useful = !self.are_useless(maker);
        useful.then(|| self.look(key, &hex(&key.digest()), maker)).flatten()
    }

    fn close(&self) {
        self.closed.store(true, Relaxed);
        self.list.iter().for_each(|t| t.store.end_reading());
        self.uploads.wait(LAST_UPLOADS);
        self.list.iter().for_each(|t| t.store.close());
    }

    fn get_or_make<R: Maker>(
        self: &Arc<Self>,
        key: &Key,
        maker: &R,
    ) -> Result<(R::Value, u64, Source), R::Error> {
        if self.are_useless(maker) {
            self.stats.made.fetch_add(1, Relaxed);
            return maker.make().map(|(value, bytes)| (value, bytes, Source::Made));
        }
        let name = hex(&key.digest());
        if let Some(found) = self.look(key, &name, maker) {
            return Ok(found);
        }
        let lease = match self.lease(key, &name, maker) {
            Turn::Found(found) => return Ok(found),
            Turn::Ours(lease) => lease,
        };
        self.stats.made.fetch_add(1, Relaxed);
        let start = Instant::now();
        let made = maker.make();
        let cost = start.elapsed();
        match made.as_ref().ok().and_then(|(value, _)| maker.save(value)) {
            Some(payload) => self.store(key, &name, maker, &payload, cost, lease),
            None => self.give_back(lease),
        }
        made.map(|(value, bytes)| (value, bytes, Source::Made))
    }

    /// Looks into every tier; what a far one has is copied into the nearer ones.
    fn look<R: Maker>(&self, key: &Key, name: &str, maker: &R) -> Option<(R::Value, u64, Source)> {
        let file = format!("{name}{}", listing::ENTRY);
        for (i, tier) in self.list.iter().enumerate() {
            let start = Instant::now();
            let Some(bytes) = self.read(tier, &file) else { continue };
            let decoded = entry::decode(&bytes).and_then(|(meta, payload)| {
                let right = meta.key.digest() == key.digest();
                if right { Ok((meta, payload)) } else { Err(Damaged("it is the entry of another key")) }
            });
            let (meta, payload) = match decoded {
                Ok(parts) => parts,
                Err(Damaged(why)) => {
                    self.stats.damaged.fetch_add(1, Relaxed);
                    self.discard(tier, &file, why);
                    continue;
                }
            };
            match maker.load(payload) {
                Ok((value, size)) => {
                    tier.store.used(&file);
                    self.refusals.store(0, Relaxed);
                    self.stats.hit(
                        tier.source,
                        bytes.len(),
                        Duration::from_micros(meta.cost_us),
                        start.elapsed(),
                    );
                    for nearer in &self.list[..i] {
                        self.write(nearer, &file, &bytes);
                    }
                    return Some((value, size, tier.source));
                }
                Err(why) => {
                    self.stats.refused.fetch_add(1, Relaxed);
                    self.discard(tier, &file, &why);
                    if self.refusals.fetch_add(1, Relaxed) + 1 == REFUSALS {
                        let place = &tier.place;
                        (self.warn)(&format!(
                            "programs in {place} cannot be loaded and are not looked for any more: {why}"
                        ));
                    }
                }
            }
        }
        None
    }

    fn read(&self, tier: &Tier, file: &str) -> Option<Vec<u8>> {
        if !tier.answers() {
            return None;
        }
        match tier.store.read(file) {
            Ok(found) => {
                tier.answered();
                found
            }
            Err(e) => {
                tier.did_not_answer();
                self.complain(tier, "read", &e);
                None
            }
        }
    }

    /// An entry that cannot be used is removed, so that a good one can take its place.
    fn discard(&self, tier: &Tier, file: &str, why: &str) {
        if let Err(e) = tier.store.remove(file) {
            self.complain(tier, &format!("remove a damaged entry ({why}) of"), &e);
        }
    }

    /// Gets the right to make an entry, or the entry if somebody else made it meanwhile.
    fn lease<R: Maker>(self: &Arc<Self>, key: &Key, name: &str, maker: &R) -> Turn<R::Value> {
        let start = Instant::now();
        // In the tier that is shared widest: who shares the nearer ones shares that too.
        for tier in self.list.iter().rev().filter(|t| t.is_writable()) {
            match self.lease_in(tier, key, name, maker, start) {
                Ok(turn) => return turn,
                Err(e) => self.write_failed(tier, &e),
            }
        }
        Turn::Ours(None)
    }

    fn lease_in<R: Maker>(
        self: &Arc<Self>,
        tier: &Tier,
        key: &Key,
        name: &str,
        maker: &R,
        start: Instant,
    ) -> io::Result<Turn<R::Value>> {
        let file = format!("{name}{}", listing::LEASE);
        let found = |lease: Option<Lease>| match self.look(key, name, maker) {
            Some(found) => {
                self.give_back(lease);
                Turn::Found(found)
            }
            None => Turn::Ours(lease),
        };
        let mut watch = Watch::new();
        let mut pause = Duration::from_millis(1);
        let mut waited = false;
        loop {
            if let Some(lease) = Lease::take(&self.heart, &tier.store, &file, tier.pace)? {
                // Somebody may have made it between our look and our lease.
                return Ok(found(Some(lease)));
            }
            if !waited {
                waited = true;
                self.stats.waits.fetch_add(1, Relaxed);
            }
            loop {
                if start.elapsed() >= self.wait || self.closed.load(Relaxed) {
                    self.stats.waited(start.elapsed());
                    self.stats.gave_up.fetch_add(1, Relaxed);
                    return Ok(Turn::Ours(None));
                }
                self.say_waiting(tier, maker, start.elapsed());
                std::thread::sleep(pause.min(self.wait.saturating_sub(start.elapsed())));
                pause = (pause * 3 / 2).min(tier.look_every);
                match watch.look(&self.heart, &tier.store, &file, tier.pace)? {
                    Seen::Busy => {}
                    Seen::Gone => break,
                    Seen::Overtaken(lease) => {
                        self.stats.waited(start.elapsed());
                        self.stats.overtaken.fetch_add(1, Relaxed);
                        return Ok(found(Some(lease)));
                    }
                }
            }
            if let Some(found) = self.look(key, name, maker) {
                self.stats.waited(start.elapsed());
                return Ok(Turn::Found(found));
            }
            // Whoever had the lease could not make it: our turn, or another waiter's.
        }
    }

    /// A wait that somebody may wonder about is said once.
    fn say_waiting<R: Maker>(&self, tier: &Tier, maker: &R, waited: Duration) {
        if waited >= self.say_after && !self.said.swap(true, Relaxed) {
            let (what, _) = maker.describe();
            let limit = self.wait.as_secs();
            (self.warn)(&format!(
                "waiting for another process that compiles `{what}` for {}; after {limit} s this one compiles it too",
                tier.place
            ));
        }
    }

    /// Writes an entry to every tier, and gives the lease back after that.
    fn store<R: Maker>(
        self: &Arc<Self>,
        key: &Key,
        name: &str,
        maker: &R,
        payload: &[u8],
        cost: Duration,
        lease: Option<Lease>,
    ) {
        let (title, notes) = maker.describe();
        let meta = Meta {
            key: key.clone(),
            name: title,
            notes,
            created_ms: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64,
            cost_us: cost.as_micros() as u64,
        };
        let Ok(bytes) = entry::encode(&meta, payload) else {
            self.stats.unstored.fetch_add(1, Relaxed);
            return self.give_back(lease);
        };
        let file = format!("{name}{}", listing::ENTRY);
        for tier in self.list.iter().filter(|t| !t.store.is_remote()) {
            self.write(tier, &file, &bytes);
        }
        match self.list.iter().position(|t| t.store.is_remote()) {
            Some(tier) => self.later(Upload { entry: Some((tier, file, bytes.into())), lease }),
            None => drop(lease), // after the entry is there
        }
    }

    /// Gives a lease back, without waiting for a network.
    fn give_back(self: &Arc<Self>, lease: Option<Lease>) {
        if lease.as_ref().is_some_and(Lease::is_remote) {
            self.later(Upload { entry: None, lease });
        }
    }

    /// Does what takes a network's time on a thread of its own.
    fn later(self: &Arc<Self>, upload: Upload) {
        let put = |tiers: &Tiers, upload: Upload| {
            if let Some((tier, file, content)) = upload.entry {
                tiers.write(&tiers.list[tier], &file, &content);
            }
            drop(upload.lease); // after the entry is there
        };
        match self.uploads.push(upload) {
            Ok(false) => {}
            Ok(true) => {
                let own = self.clone();
                let work = move || own.uploads.work(|u| put(&own, u));
                if std::thread::Builder::new().name("oxi-upload".into()).spawn(work).is_err() {
                    self.uploads.work(|u| put(self, u));
                }
            }
            Err(upload) => put(self, upload),
        }
    }

    fn write(&self, tier: &Tier, file: &str, bytes: &[u8]) {
        let size = bytes.len() as u64;
        if tier.limit.is_some_and(|limit| size > limit) || !tier.is_writable() {
            self.stats.unstored.fetch_add(1, Relaxed);
            return;
        }
        match tier.store.publish(file, bytes) {
            Ok(()) => {
                self.stats.stored.fetch_add(1, Relaxed);
                self.stats.bytes_written.fetch_add(size, Relaxed);
                self.make_room(tier, size);
            }
            Err(e) => {
                self.stats.unstored.fetch_add(1, Relaxed);
                self.write_failed(tier, &e);
            }
        }
    }

    /// After a write: counts what is there now and then, and evicts what was used least lately.
    fn make_room(&self, tier: &Tier, written: u64) {
        let mut space = tier.space.lock();
        space.bytes += written;
        if space.counted.is_none() {
            tier.store.clean();
        }
        let known = space.counted.is_some_and(|at| at.elapsed() < COUNT_EVERY);
        let Some(limit) = tier.limit.filter(|&limit| !known || space.bytes > limit) else {
            space.counted.get_or_insert_with(Instant::now);
            return;
        };
        match listing::evict(&*tier.store, Some(limit)) {
            Ok(evicted) => {
                space.bytes = evicted.left_bytes;
                space.counted = Some(Instant::now());
                self.stats.evicted.fetch_add(evicted.entries, Relaxed);
            }
            Err(e) => self.complain(tier, "make room in", &e),
        }
    }

    fn write_failed(&self, tier: &Tier, error: &io::Error) {
        if error.kind() == io::ErrorKind::TimedOut {
            tier.did_not_answer(); // it would not let itself be read either
        }
        tier.space.lock().resting_until = Some(Instant::now() + REST);
        self.complain(tier, "write to", error);
    }

    fn complain(&self, tier: &Tier, what: &str, error: &io::Error) {
        if self.closed.load(Relaxed) {
            return; // it was not let finish
        }
        self.stats.errors.fetch_add(1, Relaxed);
        if !tier.warned.swap(true, Relaxed) {
            (self.warn)(&format!(
                "cannot {what} the program cache in {}: {error}; programs are compiled again instead",
                tier.place
            ));
        }
    }
}

impl Tier {
    fn new(store: Arc<dyn Store>, place: impl ToString, source: Source, pace: Pace) -> Tier {
        Tier {
            store,
            place: place.to_string(),
            source,
            limit: None,
            pace,
            look_every: Duration::from_millis(50),
            warned: AtomicBool::new(false),
            space: Mutex::default(),
            silence: Mutex::default(),
        }
    }

    /// Whether it is worth asking.
    fn answers(&self) -> bool {
        self.silence.lock().until.is_none_or(|until| Instant::now() >= until)
    }

    fn answered(&self) {
        *self.silence.lock() = Silence::default();
    }

    /// A remote store is left alone for a while: asking it again would take as long again.
    fn did_not_answer(&self) {
        if self.store.is_remote() {
            let mut silence = self.silence.lock();
            silence.until = Some(Instant::now() + REST * 2u32.pow(silence.times.min(REST_DOUBLINGS)));
            silence.times += 1;
        }
    }

    fn is_writable(&self) -> bool {
        self.answers() && self.space.lock().resting_until.is_none_or(|until| Instant::now() >= until)
    }
}

/// How waiting ended.
enum Turn<V> {
    /// Somebody else made it.
    Found((V, u64, Source)),
    /// It is ours to make, with or without a lease.
    Ours(Option<Lease>),
}
