//! What is in a store: for people, for finding similar entries, and for making room.

use crate::entry::{self, Damaged, HEADER, Meta};
use crate::lease;
use crate::store::{Store, Stored};
use std::io;
use std::time::{Duration, SystemTime};

/// How the names of entries end.
pub(crate) const ENTRY: &str = ".oxi";
/// How the names of leases end; markers have more behind it.
pub(crate) const LEASE: &str = ".lease";
/// A lease that nobody changed for this long is nobody's.
const LEASE_AGE: Duration = Duration::from_secs(24 * 3600);

/// An entry without its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The file's name, without its folder: the key's digest and the ending.
    pub file: String,
    /// Of the whole file, in bytes.
    pub size: u64,
    /// When it was used last.
    pub used: SystemTime,
    /// How often it was used, as far as it was counted.
    pub hits: u64,
    /// What it says about itself.
    pub meta: Meta,
}

/// What removing entries did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Entries removed.
    pub entries: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of the entries that stay.
    pub left_bytes: u64,
}

fn entries(store: &dyn Store) -> io::Result<Vec<Stored>> {
    Ok(store.list()?.into_iter().filter(|f| f.name.ends_with(ENTRY)).collect())
}

/// All entries that say what they are, in no order. Payloads are neither read nor checked.
pub fn list(store: &dyn Store) -> io::Result<Vec<Listed>> {
    Ok(describe_all(store, &entries(store)?))
}

/// At most so many of them: those that were used last.
pub fn list_latest(store: &dyn Store, most: usize) -> io::Result<Vec<Listed>> {
    let mut files = entries(store)?;
    if files.len() > most {
        files.select_nth_unstable_by_key(most, |f| std::cmp::Reverse(f.modified));
        files.truncate(most);
    }
    Ok(describe_all(store, &files))
}

fn describe_all(store: &dyn Store, files: &[Stored]) -> Vec<Listed> {
    let list = |files: &[Stored]| -> Vec<Listed> {
        let one = |file: &Stored| match describe(store, &file.name) {
            Ok(Some(Ok((hits, meta)))) => {
                let Stored { name, size, modified } = file.clone();
                Some(Listed { file: name, size, used: modified, hits, meta })
            }
            // An entry that was removed meanwhile, or is damaged, is not listed.
            _ => None,
        };
        files.iter().filter_map(one).collect()
    };
    // Of a remote store, most of the time is waiting.
    let at_once = if store.is_remote() { 16 } else { 1 };
    std::thread::scope(|s| {
        let part = files.len().div_ceil(at_once).max(1);
        let threads: Vec<_> = files.chunks(part).map(|part| s.spawn(|| list(part))).collect();
        threads.into_iter().flat_map(|t| t.join().unwrap_or_default()).collect()
    })
}

/// The hits and the description of an entry.
fn describe(store: &dyn Store, name: &str) -> io::Result<Option<Result<(u64, Meta), Damaged>>> {
    // Most descriptions fit, so that one read does.
    let Some((mut start, len)) = store.read_start(name, 8 << 10)? else { return Ok(None) };
    let header = match entry::header(&start, len) {
        Ok(header) => header,
        Err(e) => return Ok(Some(Err(e))),
    };
    let end = HEADER + header.meta;
    if start.len() < end {
        let Some((more, _)) = store.read_start(name, end)? else { return Ok(None) };
        start = more;
    }
    let meta = start.get(HEADER..end).ok_or(Damaged("cut short")).and_then(entry::meta);
    Ok(Some(meta.map(|m| (header.hits, m))))
}

/// Removes the entries used least lately until those that stay have at most nine tenths of the limit, if they have more
/// than all of it. Readers that have one open read on; the others miss.
pub fn evict(store: &dyn Store, limit: Option<u64>) -> io::Result<Evicted> {
    let mut all = entries(store)?;
    let mut evicted = Evicted { left_bytes: all.iter().map(|e| e.size).sum(), ..Evicted::default() };
    let Some(limit) = limit.filter(|&l| evicted.left_bytes > l) else { return Ok(evicted) };
    all.sort_unstable_by_key(|e| e.modified);
    for entry in all {
        if evicted.left_bytes <= limit - limit / 10 {
            break;
        }
        evicted.remove(store, &entry)?;
    }
    Ok(evicted)
}

/// Removes the entries that were not used for this long.
pub fn evict_older(store: &dyn Store, age: Duration) -> io::Result<Evicted> {
    let all = entries(store)?;
    let mut evicted = Evicted { left_bytes: all.iter().map(|e| e.size).sum(), ..Evicted::default() };
    for entry in all.iter().filter(|e| e.modified.elapsed().is_ok_and(|a| a > age)) {
        evicted.remove(store, entry)?;
    }
    Ok(evicted)
}

impl Evicted {
    fn remove(&mut self, store: &dyn Store, entry: &Stored) -> io::Result<()> {
        if store.remove(&entry.name)? {
            self.entries += 1;
            self.bytes += entry.size;
        }
        self.left_bytes -= entry.size;
        Ok(())
    }
}

/// Reads every entry whole and removes those that are damaged; how many.
pub fn remove_damaged(store: &dyn Store) -> io::Result<u64> {
    let mut removed = 0;
    for file in entries(store)? {
        let Some(bytes) = store.read(&file.name)? else { continue };
        if entry::decode(&bytes).is_err() && store.remove(&file.name)? {
            removed += 1;
        }
    }
    Ok(removed)
}

/// The leases of a store by what is known of their owners.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leases {
    /// Of processes of this machine that live, or of other machines: they may be compiling.
    pub held: u64,
    /// Of processes of this machine that have ended: who needs the program takes them over at once.
    pub dead: u64,
}

/// Who is compiling what others wait for.
pub fn leases(store: &dyn Store) -> io::Result<Leases> {
    let mut leases = Leases::default();
    for file in store.list()?.iter().filter(|f| f.name.ends_with(LEASE)) {
        let Some(content) = store.read(&file.name)? else { continue };
        match lease::is_dead(&content) {
            Some(true) => leases.dead += 1,
            Some(false) => leases.held += 1,
            None => {} // no lease of ours
        }
    }
    Ok(leases)
}

/// Removes leases and markers that nobody has touched for a day; how many.
pub fn remove_old_leases(store: &dyn Store) -> io::Result<u64> {
    let mut removed = 0;
    for file in store.list()?.iter().filter(|f| f.name.contains(LEASE)) {
        if file.modified.elapsed().is_ok_and(|age| age > LEASE_AGE) && store.remove(&file.name)? {
            removed += 1;
        }
    }
    Ok(removed)
}

/// Removes everything; how many entries there were and their bytes.
pub fn clear(store: &dyn Store) -> io::Result<Evicted> {
    let mut evicted = Evicted::default();
    for file in store.list()? {
        let entry = file.name.ends_with(ENTRY);
        if entry || file.name.contains(LEASE) {
            let removed = store.remove(&file.name)?;
            if removed && entry {
                evicted.entries += 1;
                evicted.bytes += file.size;
            }
        }
    }
    Ok(evicted)
}

/// Copies entries that another store has; how many and their bytes.
pub fn copy(from: &dyn Store, to: &dyn Store) -> io::Result<Copied> {
    let mut copied = Copied::default();
    for file in entries(from)? {
        if to.read_start(&file.name, HEADER)?.is_some() {
            copied.known += 1;
            continue;
        }
        let Some(bytes) = from.read(&file.name)? else { continue };
        match entry::decode(&bytes) {
            Ok((meta, _)) if file.name == format!("{}{ENTRY}", crate::key::hex(&meta.key.digest())) => {
                to.publish(&file.name, &bytes)?;
                copied.entries += 1;
                copied.bytes += bytes.len() as u64;
            }
            _ => copied.damaged += 1,
        }
    }
    Ok(copied)
}

/// What [`copy`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Entries copied.
    pub entries: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Entries that were there already.
    pub known: u64,
    /// Entries left out because they are damaged.
    pub damaged: u64,
}
