//! One process: what is found where, what is done about damage, and the bounds.

mod common;

use common::{Bytes, Numbered, count, entries, get, key, numbered, on_disk, open};
use oxitorch_cache::{
    Cache, Config, Folder, Key, Shared, Sharing, Source, Store, Stored, listing, programs_folder,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io};

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Leaves the entry of number 0 and gives its path.
fn one_entry(dir: &Path) -> std::path::PathBuf {
    assert_eq!(get(&open(dir), &numbered(0)), Source::Made);
    let [path] = &entries(dir)[..] else { panic!("one entry was written") };
    path.clone()
}

#[test]
fn memory_then_disk_then_made() {
    let dir = temporary();
    let cache = open(dir.path());
    assert_eq!(get(&cache, &numbered(0)), Source::Made);
    assert_eq!(get(&cache, &numbered(0)), Source::Memory);
    let second = open(dir.path());
    assert_eq!(get(&second, &numbered(0)), Source::Disk);
    assert_eq!(get(&second, &numbered(1)), Source::Made);
    let stats = second.stats().counters();
    let of = |name| stats.iter().find(|(n, _)| *n == name).unwrap().1;
    assert_eq!((of("disk_hits"), of("made"), of("stored"), of("damaged"), of("errors")), (1, 1, 1, 0, 0));
    assert!(of("bytes_read") > 1000 && of("bytes_written") > 1000);
}

#[test]
fn damaged_cut_and_foreign_entries_are_made_anew() {
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let cut = |path: &Path| {
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    };
    let empty = |path: &Path| fs::write(path, b"").unwrap();
    let foreign = |path: &Path| fs::write(path, b"#!/bin/sh\necho hello\n").unwrap();
    let of_another_key = |path: &Path| {
        let other = temporary();
        get(&open(other.path()), &numbered(7));
        fs::copy(&entries(other.path())[0], path).unwrap();
    };
    let damages: [&dyn Fn(&Path); 5] = [&flip, &cut, &empty, &foreign, &of_another_key];
    for (i, damage) in damages.iter().enumerate() {
        let dir = temporary();
        damage(&one_entry(dir.path()));
        let cache = open(dir.path());
        assert_eq!(get(&cache, &numbered(0)), Source::Made, "damage {i}");
        assert_eq!(count(|s| &s.damaged, &cache), 1, "damage {i}");
        assert_eq!(get(&open(dir.path()), &numbered(0)), Source::Disk, "damage {i} was repaired");
    }
}

#[test]
fn an_entry_that_cannot_be_loaded_is_replaced() {
    let dir = temporary();
    one_entry(dir.path());
    let cache = open(dir.path());
    assert_eq!(get(&cache, &Numbered { refuse: true, ..numbered(0) }), Source::Made);
    assert_eq!(count(|s| &s.refused, &cache), 1);
}

#[test]
fn a_loader_that_never_succeeds_is_asked_three_times() {
    let dir = temporary();
    let cache = open(dir.path());
    (0..6).for_each(|n| _ = get(&cache, &numbered(n)));
    let said = Arc::new(Mutex::new(Vec::new()));
    let listener = said.clone();
    let warn = Arc::new(move |text: &str| listener.lock().push(text.to_owned()));
    let cache = Cache::new(&Config { warn, ..on_disk(dir.path()) });
    for number in 0..6 {
        assert_eq!(get(&cache, &Numbered { refuse: true, ..numbered(number) }), Source::Made);
    }
    assert_eq!((count(|s| &s.refused, &cache), count(|s| &s.stored, &cache)), (3, 3));
    let said = said.lock();
    assert!(said.len() == 1 && said[0].contains("refused"), "{said:?}");
    assert_eq!(get(&open(dir.path()), &numbered(5)), Source::Disk, "what was not looked for is still there");
}

#[test]
fn a_folder_in_place_of_an_entry_is_survived() {
    let dir = temporary();
    let path = one_entry(dir.path());
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(get(&open(dir.path()), &numbered(0)), Source::Made);
}

#[test]
fn versions_live_side_by_side() {
    let dir = temporary();
    let path = one_entry(dir.path());
    // Another format has another folder, and another magic should the file be moved.
    let other = programs_folder(dir.path()).with_file_name("v99");
    fs::create_dir(&other).unwrap();
    let theirs = other.join(path.file_name().unwrap());
    fs::write(&theirs, b"oxicach9 and so on").unwrap();
    assert_eq!(get(&open(dir.path()), &numbered(0)), Source::Disk);
    assert_eq!(fs::read(&theirs).unwrap(), b"oxicach9 and so on", "another format's files are left alone");
    // Another version of the makers has other keys.
    let newer = Key::new().with("version", b"2").with("number", &0u64.to_le_bytes());
    let (_, source) = open(dir.path()).get_or_make(&newer, &numbered(0)).unwrap();
    assert_eq!(source, Source::Made);
    assert_eq!(entries(dir.path()).len(), 2);
    assert_eq!(get(&open(dir.path()), &numbered(0)), Source::Disk);
}

#[test]
fn the_limit_holds_and_what_was_used_last_stays() {
    let dir = temporary();
    let limit = 40_000;
    let cache = Cache::new(&Config { disk_bytes: limit, ..on_disk(dir.path()) });
    let pause = || std::thread::sleep(Duration::from_millis(10)); // file times are this coarse
    get(&cache, &numbered(0));
    for number in 1..60 {
        pause();
        get(&cache, &numbered(number));
        pause();
        assert_eq!(get(&open(dir.path()), &numbered(0)), Source::Disk, "used after number {number} was made");
    }
    let total: u64 = entries(dir.path()).iter().map(|p| fs::metadata(p).unwrap().len()).sum();
    assert!(total <= limit && total > limit / 2, "{total} bytes");
    assert!(count(|s| &s.evicted, &cache) > 10);
    assert_eq!(get(&open(dir.path()), &numbered(59)), Source::Disk);
    assert_eq!(get(&open(dir.path()), &numbered(1)), Source::Made);
}

#[test]
fn an_entry_larger_than_the_limit_is_not_written() {
    let dir = temporary();
    let cache: Bytes = Cache::new(&Config { disk_bytes: 500, ..on_disk(dir.path()) });
    assert_eq!(get(&cache, &numbered(0)), Source::Made);
    assert_eq!(entries(dir.path()).len(), 0);
    assert_eq!(count(|s| &s.unstored, &cache), 1);
}

#[test]
fn reading_goes_on_while_others_evict() {
    let dir = temporary();
    let config = Config { disk_bytes: 12_000, ..on_disk(dir.path()) };
    let made = std::thread::scope(|s| {
        let work = |seed: u64| {
            let config = config.clone();
            move || {
                let mut disk = 0;
                for i in 0..150 {
                    // A new cache each time: nothing is in memory, so everything is read from the folder.
                    let cache = Cache::new(&config);
                    let number = (i * 7 + seed) % 20;
                    disk += u32::from(get(&cache, &numbered(number)) == Source::Disk);
                    let (damaged, errors) = (count(|s| &s.damaged, &cache), count(|s| &s.errors, &cache));
                    assert_eq!((damaged, errors), (0, 0));
                }
                disk
            }
        };
        let threads: Vec<_> = (0..4).map(|seed| s.spawn(work(seed))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).sum::<u32>()
    });
    assert!(made > 0, "some were found");
}

#[test]
fn an_open_entry_survives_its_eviction() {
    let dir = temporary();
    let path = one_entry(dir.path());
    let mut file = fs::File::open(&path).unwrap();
    let store = Folder::new(programs_folder(dir.path()), Sharing::Machine);
    assert_eq!(listing::evict(&store, Some(1)).unwrap().entries, 1);
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut file, &mut bytes).unwrap();
    assert!(bytes.len() > 1000);
}

#[test]
fn a_folder_that_cannot_be_used_warns_once_and_work_goes_on() {
    let dir = temporary();
    let file = dir.path().join("file");
    fs::write(&file, b"not a folder").unwrap();
    let said = Arc::new(Mutex::new(Vec::new()));
    let listener = said.clone();
    let warn = Arc::new(move |text: &str| listener.lock().push(text.to_owned()));
    let cache = Cache::new(&Config { warn, ..on_disk(&file) });
    for number in 0..5 {
        assert_eq!(get(&cache, &numbered(number)), Source::Made);
    }
    let said = said.lock();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains(file.to_str().unwrap()), "{said:?}");
    assert!(count(|s| &s.errors, &cache) > 0);
}

fn sharing(disk: &Path, shared: &Path) -> Bytes {
    Cache::new(&Config { shared: Some(Shared::folder(shared)), ..on_disk(disk) })
}

#[test]
fn machines_share_a_folder() {
    let (a, b, shared) = (temporary(), temporary(), temporary());
    assert_eq!(get(&sharing(a.path(), shared.path()), &numbered(0)), Source::Made);
    assert_eq!(get(&sharing(b.path(), shared.path()), &numbered(0)), Source::Shared);
    assert_eq!(get(&open(b.path()), &numbered(0)), Source::Disk, "what was shared is on the disk too");
    fs::remove_dir_all(shared.path()).unwrap();
    assert_eq!(get(&sharing(b.path(), shared.path()), &numbered(0)), Source::Disk);
}

/// A store without folders: what an object store would be.
#[derive(Default)]
struct Objects(Mutex<BTreeMap<String, (Vec<u8>, SystemTime)>>);

impl Store for Objects {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.lock().get(name).map(|o| o.0.clone()))
    }

    fn read_start(&self, name: &str, len: usize) -> io::Result<Option<(Vec<u8>, u64)>> {
        Ok(self.0.lock().get(name).map(|(o, _)| (o[..len.min(o.len())].to_vec(), o.len() as u64)))
    }

    fn publish(&self, name: &str, content: &[u8]) -> io::Result<()> {
        self.0.lock().insert(name.into(), (content.into(), SystemTime::now()));
        Ok(())
    }

    fn create(&self, name: &str, content: &[u8]) -> io::Result<bool> {
        let mut all = self.0.lock();
        let new = !all.contains_key(name);
        if new {
            all.insert(name.into(), (content.into(), SystemTime::now()));
        }
        Ok(new)
    }

    fn remove(&self, name: &str) -> io::Result<bool> {
        Ok(self.0.lock().remove(name).is_some())
    }

    fn list(&self) -> io::Result<Vec<Stored>> {
        let all = self.0.lock();
        let stored = |(name, (o, time)): (&String, &(Vec<u8>, SystemTime))| Stored {
            name: name.clone(),
            size: o.len() as u64,
            modified: *time,
        };
        Ok(all.iter().map(stored).collect())
    }

    fn used(&self, _name: &str) {}

    fn clean(&self) {}
}

#[test]
fn machines_share_a_store_that_is_no_folder() {
    let objects = Arc::new(Objects::default());
    let shared = Some(Shared::store(objects.clone(), "objects"));
    let machine = |disk: Option<&Path>| -> Bytes {
        Cache::new(&Config { shared: shared.clone(), disk: disk.map(Path::to_owned), ..Config::default() })
    };
    let made: u32 = std::thread::scope(|s| {
        let slow = || Numbered { delay: Duration::from_millis(50), ..numbered(0) };
        let machine = &machine;
        let threads: Vec<_> = (0..4)
            .map(|_| s.spawn(move || u32::from(get(&machine(None), &slow()) == Source::Made)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).sum()
    });
    assert_eq!(made, 1);
    assert_eq!(objects.list().unwrap().len(), 1, "the entry, and no lease");
    let disk = temporary();
    assert_eq!(get(&machine(Some(disk.path())), &numbered(0)), Source::Shared);
    assert_eq!(get(&open(disk.path()), &numbered(0)), Source::Disk);
}

#[cfg(not(feature = "object-store"))]
#[test]
fn a_build_without_object_stores_says_how_to_get_them() {
    let said = Shared::open("s3://bucket/prefix", &[]).unwrap_err().to_string();
    assert!(said.contains("no object stores") && said.contains("--features object-store"), "{said}");
    assert_eq!(Shared::open("/a/folder", &[]).unwrap().place(), "/a/folder");
}

#[test]
fn closing_ends_a_wait() {
    let dir = temporary();
    let digest: String = key(0).digest().iter().map(|b| format!("{b:02x}")).collect();
    let store = Folder::new(programs_folder(dir.path()), Sharing::Machine);
    store.create(&format!("{digest}.lease"), b"n elsewhere-1-1 0\n").unwrap();
    let cache = open(dir.path());
    let took = std::thread::scope(|s| {
        let start = Instant::now();
        let waiting = s.spawn(|| get(&cache, &numbered(0)));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!waiting.is_finished());
        cache.close();
        assert_eq!(waiting.join().unwrap(), Source::Made);
        start.elapsed()
    });
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[test]
fn a_damaged_entry_on_the_disk_is_replaced_by_the_shared_one() {
    let (a, b, shared) = (temporary(), temporary(), temporary());
    get(&sharing(a.path(), shared.path()), &numbered(0));
    get(&sharing(b.path(), shared.path()), &numbered(0));
    fs::write(&entries(b.path())[0], b"nonsense").unwrap();
    let cache = sharing(b.path(), shared.path());
    assert_eq!(get(&cache, &numbered(0)), Source::Shared);
    assert_eq!(count(|s| &s.damaged, &cache), 1);
    assert_eq!(get(&open(b.path()), &numbered(0)), Source::Disk);
}

#[test]
fn entries_say_what_they_are() {
    let dir = temporary();
    get(&open(dir.path()), &numbered(3));
    get(&open(dir.path()), &numbered(3));
    let store = Folder::new(programs_folder(dir.path()), Sharing::Machine);
    let [entry] = &listing::list(&store).unwrap()[..] else { panic!("one entry") };
    assert_eq!((entry.meta.name.as_str(), entry.hits), ("number3", 1));
    assert_eq!(entry.meta.key, key(3));
    assert_eq!(entry.size, fs::metadata(&entries(dir.path())[0]).unwrap().len());
}

#[test]
fn entries_say_how_their_keys_differ() {
    let dir = temporary();
    let cache = open(dir.path());
    let key = |a: &str, b: &str| Key::new().with("a", a.as_bytes()).with("b", b.as_bytes());
    for (i, (a, b)) in [("1", "1"), ("1", "2"), ("3", "3")].into_iter().enumerate() {
        cache.get_or_make(&key(a, b), &numbered(i as u64)).unwrap();
    }
    let wanted = key("1", "9");
    let entries = cache.entries(usize::MAX);
    let mut near = entries.iter().filter(|e| e.meta.name == "number1");
    let differences = wanted.differences(&near.next().unwrap().meta.key);
    assert!(near.next().is_none());
    let [d] = &differences[..] else { panic!("{differences:?}") };
    let text = |c: Option<&oxitorch_cache::Component>| c.and_then(|c| c.text.clone()).unwrap();
    assert_eq!((d.name, text(d.ours), text(d.theirs)), ("b", "9".into(), "2".into()));
}

#[test]
fn of_many_entries_those_used_last_are_listed() {
    let dir = temporary();
    let cache = open(dir.path());
    (0..4).for_each(|n| _ = get(&cache, &numbered(n)));
    let all = cache.entries(4);
    let old = std::time::SystemTime::now() - Duration::from_secs(60);
    for entry in all.iter().filter(|e| e.meta.name == "number1" || e.meta.name == "number2") {
        let path = programs_folder(dir.path()).join(&entry.file);
        fs::File::options().append(true).open(path).unwrap().set_modified(old).unwrap();
    }
    let mut names: Vec<String> = cache.entries(2).into_iter().map(|e| e.meta.name).collect();
    names.sort();
    assert_eq!((all.len(), names), (4, vec!["number0".to_owned(), "number3".to_owned()]));
    assert!(cache.entries(0).is_empty());
}

#[test]
fn entries_are_copied_cleared_and_checked() {
    let (a, b) = (temporary(), temporary());
    let cache = open(a.path());
    (0..3).for_each(|n| _ = get(&cache, &numbered(n)));
    fs::write(&entries(a.path())[0], b"nonsense").unwrap();
    let store = |dir: &Path| Folder::new(programs_folder(dir), Sharing::Machine);
    let copied = listing::copy(&store(a.path()), &store(b.path())).unwrap();
    assert_eq!((copied.entries, copied.known, copied.damaged), (2, 0, 1));
    assert_eq!(listing::copy(&store(a.path()), &store(b.path())).unwrap().known, 2);
    assert_eq!(listing::remove_damaged(&store(a.path())).unwrap(), 1);
    assert_eq!(listing::clear(&store(a.path())).unwrap().entries, 2);
    assert_eq!(entries(a.path()).len(), 0);
    assert_eq!(listing::evict_older(&store(b.path()), Duration::from_secs(3600)).unwrap().entries, 0);
    assert_eq!(listing::evict_older(&store(b.path()), Duration::ZERO).unwrap().entries, 2);
}
