//! Machines at one object store: what is found there, who makes what is not, and a store that is away, silent or read-only.
//!
//! Started as `objects child ...` it is one of those machines.

mod common;

use common::server::{Mood, Server};
use common::{Bytes, Numbered, count, entries, get, numbered, open};
use oxitorch_cache::{Cache, Config, Remote, Shared, Source, Store, listing};
use parking_lot::Mutex;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    let tests: &[(&str, fn())] = &[
        ("what_one_machine_makes_others_find", what_one_machine_makes_others_find),
        ("plain_http_is_a_store_too", plain_http_is_a_store_too),
        ("a_store_does_what_a_folder_does", a_store_does_what_a_folder_does),
        ("four_machines_make_each_entry_once", four_machines_make_each_entry_once),
        ("a_long_wait_is_said_once", a_long_wait_is_said_once),
        ("a_dead_machine_is_overtaken", a_dead_machine_is_overtaken),
        ("a_damaged_object_is_refused_and_replaced", a_damaged_object_is_refused_and_replaced),
        ("a_store_that_is_away_is_a_warning", a_store_that_is_away_is_a_warning),
        ("a_store_that_fails_is_a_warning", a_store_that_fails_is_a_warning),
        ("a_silent_store_is_asked_once", a_silent_store_is_asked_once),
        ("a_store_that_falls_silent_holds_nothing_up", a_store_that_falls_silent_holds_nothing_up),
        ("the_end_of_a_process_waits_for_nothing_silent", the_end_of_a_process_waits_for_nothing_silent),
        ("a_read_only_store_is_read", a_read_only_store_is_read),
        ("what_cannot_be_a_store_is_refused", what_cannot_be_a_store_is_refused),
    ];
    common::run(child, tests)
}

/// Settings as the environment would have them.
fn settings(server: &Server) -> Vec<(String, String)> {
    let pairs = [
        ("AWS_ENDPOINT_URL", server.endpoint()),
        ("AWS_ACCESS_KEY_ID", "k".into()),
        ("AWS_SECRET_ACCESS_KEY", "s".into()),
        ("AWS_PAGER", "less".into()),
        ("HOME", "/".into()),
    ];
    pairs.map(|(name, value)| (name.to_owned(), value)).into()
}

const URL: &str = "s3://bucket/some/prefix";

fn remote(server: &Server) -> Remote {
    Remote::open(URL, &settings(server)).unwrap()
}

/// One that is not waited for as long.
fn impatient(server: &Server) -> Remote {
    remote(server).answering_within(Duration::from_millis(500))
}

/// What was warned of.
type Said = Arc<Mutex<Vec<String>>>;

fn configured(disk: &Path, remote: Remote) -> (Config, Said) {
    let said = Said::default();
    let listener = said.clone();
    let config = Config {
        disk: Some(disk.to_owned()),
        shared: Some(Shared::store(Arc::new(remote), URL)),
        warn: Arc::new(move |text: &str| listener.lock().push(text.to_owned())),
        ..Config::default()
    };
    (config, said)
}

fn machine(disk: &Path, server: &Server) -> (Bytes, Said) {
    let (config, said) = configured(disk, remote(server));
    (Cache::new(&config), said)
}

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// `DISK ENDPOINT LOG DELAY_MS NUMBER...`: gets the numbers, logs those it made, prints what happened.
fn child(args: &[String]) {
    let [disk, endpoint, log, delay, numbers @ ..] = args else { panic!("{args:?}") };
    let settings =
        [("AWS_ENDPOINT", endpoint.as_str()), ("AWS_ACCESS_KEY_ID", "k"), ("AWS_SECRET_ACCESS_KEY", "s")];
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let warn = Arc::new(|text: &str| eprintln!("warning: {text}"));
    let shared = Some(Shared::open(URL, &settings).unwrap());
    let cache: Bytes = Cache::new(&Config { warn, shared, disk: Some(disk.into()), ..Config::default() });
    for number in numbers {
        let delay = Duration::from_millis(delay.parse().unwrap());
        get(&cache, &Numbered { delay, log: Some(Path::new(log)), ..numbered(number.parse().unwrap()) });
    }
    cache.close();
    eprintln!("{:?}", cache.stats().counters());
}

fn spawn(disk: &Path, server: &Server, log: &Path, delay_ms: u64, numbers: &[u64]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg("child").arg(disk).arg(server.endpoint()).arg(log).arg(delay_ms.to_string());
    command.args(numbers.iter().map(u64::to_string)).stderr(Stdio::piped()).spawn().unwrap()
}

fn counter(text: &str, name: &str) -> u64 {
    let rest = text.split(&format!("(\"{name}\", ")).nth(1).unwrap_or_else(|| panic!("{name} in {text}"));
    rest.split(')').next().unwrap().parse().unwrap()
}

fn what_one_machine_makes_others_find() {
    let (server, a, b) = (Server::start(), temporary(), temporary());
    let (first, said) = machine(a.path(), &server);
    assert_eq!(get(&first, &numbered(0)), Source::Made);
    first.close();
    assert_eq!(server.names().len(), 1, "the entry, and no lease: {:?}", server.names());
    let (second, _) = machine(b.path(), &server);
    assert_eq!(get(&second, &numbered(0)), Source::Shared);
    assert_eq!(get(&second, &numbered(0)), Source::Memory);
    assert_eq!(get(&second, &numbered(1)), Source::Made);
    server.requests();
    assert_eq!(get(&open(b.path()), &numbered(0)), Source::Disk, "what was shared is on the disk too");
    let (again, _) = machine(b.path(), &server);
    assert_eq!(get(&again, &numbered(0)), Source::Disk);
    second.close();
    let asked = server.requests();
    assert!(asked.iter().all(|r| !r.starts_with("GET")), "the disk is asked first: {asked:?}");
    assert_eq!(*said.lock(), [] as [String; 0]);
    assert!(server.names().iter().all(|n| n.ends_with(".oxi")));
}

fn plain_http_is_a_store_too() {
    let (server, a, b) = (Server::start(), temporary(), temporary());
    let url = format!("{}/bucket/x?key=secret", server.endpoint());
    let on = |disk: &Path| -> Bytes {
        let shared = Shared::open(&url, &[]).unwrap();
        assert_eq!(shared.place(), format!("{}/bucket/x", server.endpoint()), "without the secret");
        Cache::new(&Config { shared: Some(shared), disk: Some(disk.into()), ..Config::default() })
    };
    let first = on(a.path());
    assert_eq!(get(&first, &numbered(0)), Source::Made);
    first.close();
    assert_eq!(get(&on(b.path()), &numbered(0)), Source::Shared);
    assert_eq!(server.names().len(), 1, "{:?}", server.names());
}

fn a_store_does_what_a_folder_does() {
    let server = Server::start();
    let store = remote(&server);
    assert_eq!((store.read("x").unwrap(), store.read_start("x", 4).unwrap()), (None, None));
    assert_eq!(store.list().unwrap(), []);
    assert!(store.create("x", b"1").unwrap() && !store.create("x", b"2").unwrap());
    store.publish("x", b"12345").unwrap();
    store.publish("empty", b"").unwrap();
    assert_eq!(store.read("x").unwrap().unwrap(), b"12345");
    assert_eq!(store.read_start("x", 2).unwrap().unwrap(), (b"12".to_vec(), 5));
    assert_eq!(store.read_start("x", 100).unwrap().unwrap(), (b"12345".to_vec(), 5));
    assert_eq!(store.read_start("empty", 100).unwrap().unwrap(), (Vec::new(), 0));
    let mut names: Vec<_> = store.list().unwrap().into_iter().map(|f| (f.name, f.size)).collect();
    names.sort();
    assert_eq!(names, [("empty".to_owned(), 0), ("x".to_owned(), 5)]);
    store.remove("x").unwrap();
    store.remove("x").unwrap();
    assert_eq!(store.read("x").unwrap(), None);
    // What the command line does with a store.
    let (disk, dir) = (temporary(), temporary());
    let (cache, _) = machine(disk.path(), &server);
    get(&cache, &numbered(0));
    cache.close();
    assert_eq!(listing::list(&store).unwrap()[0].meta.name, "number0");
    let folder = oxitorch_cache::Folder::new(dir.path(), oxitorch_cache::Sharing::Machine);
    assert_eq!(listing::copy(&store, &folder).unwrap().entries, 1);
    assert_eq!(listing::clear(&store).unwrap().entries, 1);
}

fn four_machines_make_each_entry_once() {
    let (server, dir) = (Server::start(), temporary());
    let log = dir.path().join("log");
    let disks: Vec<PathBuf> = (0..4).map(|i| dir.path().join(i.to_string())).collect();
    let children: Vec<Child> = disks.iter().map(|d| spawn(d, &server, &log, 150, &[0, 1])).collect();
    let texts: Vec<String> = children
        .into_iter()
        .map(|c| {
            let done = c.wait_with_output().unwrap();
            assert!(done.status.success(), "{done:?}");
            String::from_utf8(done.stderr).unwrap()
        })
        .collect();
    let mut made: Vec<String> = fs::read_to_string(&log).unwrap().lines().map(str::to_owned).collect();
    made.sort();
    assert_eq!(made, ["0", "1"]);
    let sum = |name| texts.iter().map(|t| counter(t, name)).sum::<u64>();
    assert_eq!((sum("made"), sum("shared_hits"), sum("errors"), sum("overtaken")), (2, 6, 0, 0), "{texts:?}");
    assert!(sum("waits") > 0 && texts.iter().all(|t| !t.contains("warning")), "{texts:?}");
    assert_eq!(server.names().len(), 2, "{:?}", server.names());
    assert!(disks.iter().all(|d| entries(d).len() == 2));
}

/// A machine that is making number 0, and will be for a minute.
fn busy_machine(server: &Server, dir: &Path) -> Child {
    let child = spawn(&dir.join("theirs"), server, &dir.join("log"), 60_000, &[0]);
    let start = Instant::now();
    while !dir.join("log").exists() {
        assert!(start.elapsed() < Duration::from_secs(30), "the child makes it");
        std::thread::sleep(Duration::from_millis(2));
    }
    child
}

fn a_long_wait_is_said_once() {
    let (server, dir) = (Server::start(), temporary());
    let mut child = busy_machine(&server, dir.path());
    let (config, said) = configured(dir.path(), remote(&server));
    let (wait, say_after) = (Duration::from_millis(400), Duration::from_millis(100));
    let cache: Bytes = Cache::new(&Config { wait, say_after, ..config });
    let start = Instant::now();
    let source = get(&cache, &numbered(0));
    let took = start.elapsed();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((source, count(|s| &s.gave_up, &cache)), (Source::Made, 1));
    assert!(took >= wait && took < wait * 10, "{took:?}");
    let said = said.lock();
    assert!(
        said.len() == 1 && said[0].contains("waiting for another process that compiles `number0`"),
        "{said:?}"
    );
}

fn a_dead_machine_is_overtaken() {
    // A process of this machine is known to be dead at once.
    let (server, dir) = (Server::start(), temporary());
    let mut child = busy_machine(&server, dir.path());
    child.kill().unwrap();
    child.wait().unwrap();
    let (cache, said) = machine(dir.path(), &server);
    let start = Instant::now();
    assert_eq!(get(&cache, &numbered(0)), Source::Made);
    assert!(start.elapsed() < Duration::from_secs(3));
    cache.close();
    assert_eq!((count(|s| &s.overtaken, &cache), server.names().len()), (1, 1), "{:?}", server.names());
    // The claim of a machine that nobody can ask expires.
    server.change(|objects| {
        let entry = objects.keys().next().unwrap().clone();
        objects.remove(&entry);
        objects.insert(entry.replace(".oxi", ".lease"), b"n elsewhere-1-1 0\n".to_vec());
    });
    let elsewhere = temporary();
    let (config, _) = configured(elsewhere.path(), remote(&server));
    let dead_after = Duration::from_millis(50);
    let cache: Bytes = Cache::new(&Config { dead_after, ..config });
    let start = Instant::now();
    assert_eq!(get(&cache, &numbered(0)), Source::Made);
    assert!(start.elapsed() >= dead_after * 6, "{:?}", start.elapsed());
    assert_eq!(count(|s| &s.overtaken, &cache), 1);
    cache.close();
    assert_eq!(server.names().len(), 1, "{:?}", server.names());
    assert_eq!(*said.lock(), [] as [String; 0]);
}

fn a_damaged_object_is_refused_and_replaced() {
    let (server, a, b, c) = (Server::start(), temporary(), temporary(), temporary());
    let (first, _) = machine(a.path(), &server);
    get(&first, &numbered(0));
    first.close();
    server.change(|objects| *objects.values_mut().next().unwrap().last_mut().unwrap() ^= 1);
    let (second, said) = machine(b.path(), &server);
    assert_eq!(get(&second, &numbered(0)), Source::Made);
    second.close();
    assert_eq!((count(|s| &s.damaged, &second), &said.lock()[..]), (1, &[] as &[String]));
    assert_eq!(get(&machine(c.path(), &server).0, &numbered(0)), Source::Shared, "it was replaced");
}

/// Two machines' worth of work with a store that does not work: all of it is done, the disk has it, one warning says so.
fn works_without(remote: Remote, expected: &str) -> Duration {
    let dir = temporary();
    let (config, said) = configured(dir.path(), remote);
    let cache: Bytes = Cache::new(&config);
    let start = Instant::now();
    (0..5).for_each(|n| assert_eq!(get(&cache, &numbered(n)), Source::Made));
    let took = start.elapsed();
    cache.close();
    let said = said.lock();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains(URL) && said[0].contains(expected), "{said:?}");
    assert_eq!(entries(dir.path()).len(), 5);
    took
}

fn a_store_that_is_away_is_a_warning() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut settings = settings(&Server::start());
    settings[0].1 = format!("http://127.0.0.1:{port}");
    let took = works_without(Remote::open(URL, &settings).unwrap(), "Connection refused");
    assert!(took < Duration::from_secs(4), "{took:?}");
}

fn a_store_that_fails_is_a_warning() {
    let server = Server::start();
    server.set(Mood::Failing);
    works_without(remote(&server), "500");
    let asked = server.requests();
    assert!(asked.len() <= 3, "one request and its retries, then it is left alone: {asked:?}");
}

fn a_silent_store_is_asked_once() {
    let server = Server::start();
    server.set(Mood::Hanging);
    let took = works_without(impatient(&server), "no answer within 0.500 s");
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(server.requests().len(), 1);
}

fn a_store_that_falls_silent_holds_nothing_up() {
    // Each of the requests of one entry in turn is the last one that is answered: look, take, look again, put, give back.
    for answered in 0..5 {
        let (server, dir) = (Server::start(), temporary());
        server.set(Mood::HangingAfter(answered));
        let (config, said) = configured(dir.path(), impatient(&server));
        let cache: Bytes = Cache::new(&config);
        let start = Instant::now();
        (0..3).for_each(|n| assert_eq!(get(&cache, &numbered(n)), Source::Made, "after {answered}"));
        assert!(start.elapsed() < Duration::from_secs(3), "after {answered}: {:?}", start.elapsed());
        cache.close();
        assert!(start.elapsed() < Duration::from_secs(6), "after {answered}: {:?}", start.elapsed());
        assert_eq!(said.lock().len(), 1, "after {answered}: {:?}", said.lock());
        assert_eq!(entries(dir.path()).len(), 3);
    }
}

fn the_end_of_a_process_waits_for_nothing_silent() {
    let (server, dir) = (Server::start(), temporary());
    server.set(Mood::Hanging);
    let (config, said) = configured(dir.path(), remote(&server).answering_within(Duration::from_secs(60)));
    let cache: Bytes = Cache::new(&config);
    std::thread::scope(|s| {
        let reading = s.spawn(|| get(&cache, &numbered(0)));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!reading.is_finished());
        let start = Instant::now();
        cache.close();
        assert_eq!(reading.join().unwrap(), Source::Made);
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    });
    // One that is still sending is given two seconds.
    let (server, dir) = (Server::start(), temporary());
    server.set(Mood::HangingAfter(3));
    let (config, _) = configured(dir.path(), remote(&server).answering_within(Duration::from_secs(60)));
    let cache: Bytes = Cache::new(&config);
    get(&cache, &numbered(0));
    let start = Instant::now();
    cache.close();
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    assert_eq!(*said.lock(), [] as [String; 0], "what the end cut off is no failure");
}

fn a_read_only_store_is_read() {
    let (server, a, b, c) = (Server::start(), temporary(), temporary(), temporary());
    let (first, _) = machine(a.path(), &server);
    get(&first, &numbered(0));
    first.close();
    server.set(Mood::ReadOnly);
    let (second, said) = machine(b.path(), &server);
    assert_eq!(get(&second, &numbered(0)), Source::Shared);
    assert_eq!(said.lock().len(), 0);
    assert_eq!(get(&second, &numbered(1)), Source::Made);
    assert_eq!(get(&second, &numbered(2)), Source::Made);
    second.close();
    let said = said.lock();
    assert!(
        said.len() == 1 && said[0].contains("cannot write") && said[0].contains("AccessDenied"),
        "{said:?}"
    );
    assert_eq!((entries(b.path()).len(), server.names().len()), (3, 1));
    assert_eq!(get(&machine(c.path(), &server).0, &numbered(0)), Source::Shared);
}

fn what_cannot_be_a_store_is_refused() {
    let error = |url: &str| Shared::open(url, &[]).unwrap_err().to_string();
    for url in ["ftp://host/x", "s3:///x", "memory:///x", "http://"] {
        assert!(error(url).contains(url), "{}", error(url));
    }
    assert_eq!(Shared::open("/some/folder", &[]).unwrap().place(), "/some/folder");
    assert_eq!(Shared::open("file:///some/folder", &[]).unwrap().place(), "/some/folder");
}
