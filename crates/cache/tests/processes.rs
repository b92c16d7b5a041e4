//! Several processes at one folder: started together, killed, stopped, without space, without permission.
//!
//! Started as `processes child ...` it is one of those processes.

mod common;

use common::{Bytes, Numbered, count, entries, files, get, numbered, on_disk, open};
use oxitorch_cache::{Cache, Config, Shared, Source};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    let tests: &[(&str, fn())] = &[
        ("eight_processes_make_each_entry_once", eight_processes_make_each_entry_once),
        ("machines_that_share_a_folder_make_each_entry_once", machines_make_each_entry_once),
        ("a_writer_that_is_killed_leaves_nothing_harmful", a_killed_writer_leaves_nothing_harmful),
        ("a_maker_that_is_killed_is_overtaken_at_once", a_killed_maker_is_overtaken_at_once),
        ("a_maker_that_is_stopped_is_overtaken", a_stopped_maker_is_overtaken),
        ("nobody_waits_longer_than_the_bound", nobody_waits_longer_than_the_bound),
        ("a_full_disk_is_a_warning", a_full_disk_is_a_warning),
        ("a_read_only_folder_is_read_and_warns", a_read_only_folder_is_read_and_warns),
    ];
    common::run(child, tests)
}

/// `FOLDER SHARED|- SIZE DELAY_MS NUMBER...`: gets the numbers, logs those it made in `FOLDER/log`, prints what happened.
fn child(args: &[String]) {
    let [folder, shared, size, delay, numbers @ ..] = args else { panic!("{args:?}") };
    let folder = PathBuf::from(folder);
    let warn = Arc::new(|text: &str| eprintln!("warning: {text}"));
    let shared = (shared != "-").then(|| PathBuf::from(shared));
    let log = shared.as_deref().unwrap_or(&folder).join("log");
    let shared = shared.as_deref().map(Shared::folder);
    let cache: Bytes = Cache::new(&Config { warn, shared, ..on_disk(&folder) });
    for number in numbers {
        let recipe = Numbered {
            size: size.parse().unwrap(),
            delay: Duration::from_millis(delay.parse().unwrap()),
            log: Some(&log),
            ..numbered(number.parse().unwrap())
        };
        get(&cache, &recipe);
    }
    eprintln!("{:?}", cache.stats().counters());
}

fn command(folder: &Path, shared: Option<&Path>, size: usize, delay_ms: u64, numbers: &[u64]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg("child").arg(folder).arg(shared.unwrap_or(Path::new("-")));
    command.args([size as u64, delay_ms].map(|n| n.to_string()));
    command.args(numbers.iter().map(u64::to_string)).stderr(Stdio::piped());
    command
}

fn finish(child: Child) -> String {
    said(&child.wait_with_output().unwrap())
}

fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    text
}

fn counter(text: &str, name: &str) -> u64 {
    let rest = text.split(&format!("(\"{name}\", ")).nth(1).unwrap_or_else(|| panic!("{name} in {text}"));
    rest.split(')').next().unwrap().parse().unwrap()
}

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn logged(folder: &Path) -> Vec<String> {
    let mut lines: Vec<String> =
        fs::read_to_string(folder.join("log")).unwrap_or_default().lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn eight_processes_make_each_entry_once() {
    let dir = temporary();
    let numbers = [0, 1, 2, 3, 4];
    let start = || command(dir.path(), None, 1000, 60, &numbers).spawn().unwrap();
    let children: Vec<Child> = (0..8).map(|_| start()).collect();
    let texts: Vec<String> = children.into_iter().map(finish).collect();
    assert_eq!(logged(dir.path()), ["0", "1", "2", "3", "4"]);
    let sum = |name| texts.iter().map(|t| counter(t, name)).sum::<u64>();
    assert_eq!((sum("made"), sum("disk_hits")), (5, 35));
    assert!(sum("waits") > 0 && sum("saved_us") > 0);
    assert_eq!(sum("gave_up") + sum("overtaken") + sum("damaged") + sum("errors"), 0);
    assert_eq!(files(dir.path(), |n| !n.ends_with(".oxi")), [] as [PathBuf; 0], "no lease stays");
}

fn machines_make_each_entry_once() {
    let shared = temporary();
    let disks: Vec<_> = (0..4).map(|_| temporary()).collect();
    let start = |disk: &tempfile::TempDir| {
        command(disk.path(), Some(shared.path()), 1000, 100, &[0, 1]).spawn().unwrap()
    };
    let children: Vec<Child> = disks.iter().map(start).collect();
    let texts: Vec<String> = children.into_iter().map(finish).collect();
    assert_eq!(logged(shared.path()), ["0", "1"]);
    let sum = |name| texts.iter().map(|t| counter(t, name)).sum::<u64>();
    assert_eq!((sum("made"), sum("shared_hits")), (2, 6));
    assert!(disks.iter().all(|d| entries(d.path()).len() == 2));
}

fn a_killed_writer_leaves_nothing_harmful() {
    let dir = temporary();
    let size = 20 << 20;
    let half_written = || !files(dir.path(), |n| n.starts_with(".tmp-")).is_empty();
    let mut caught = 0;
    for round in 0..8 {
        let mut child = command(dir.path(), None, size, 0, &[round, round + 100]).spawn().unwrap();
        wait_for("a temporary file", || {
            half_written() || entries(dir.path()).len() >= 2 * round as usize + 2
        });
        child.kill().unwrap();
        assert!(child.wait().unwrap().signal().is_some() || !half_written());
        caught += u32::from(half_written());
        // The next process finds whole entries or none, and takes over the lease without waiting.
        let cache = open(dir.path());
        let start = Instant::now();
        get(&cache, &Numbered { size, ..numbered(round) });
        assert!(start.elapsed() < Duration::from_secs(5));
        assert_eq!(count(|s| &s.damaged, &cache), 0, "nothing is ever half written under an entry's name");
        get(&cache, &Numbered { size, ..numbered(round + 100) });
    }
    assert!(caught > 0, "some were killed while they wrote");
    get(&open(dir.path()), &numbered(1000)); // a process that writes collects what the dead left
    assert_eq!(files(dir.path(), |n| n.starts_with(".tmp-")), [] as [PathBuf; 0]);
    assert_eq!(files(dir.path(), |n| n.contains(".lease")), [] as [PathBuf; 0]);
}

/// A child that is making number 0, and will be for a minute.
fn busy_child(dir: &Path) -> Child {
    let child = command(dir, None, 1000, 60_000, &[0]).spawn().unwrap();
    wait_for("the child makes it", || logged(dir).len() == 1);
    child
}

fn a_killed_maker_is_overtaken_at_once() {
    let dir = temporary();
    let mut child = busy_child(dir.path());
    child.kill().unwrap();
    child.wait().unwrap();
    let cache = open(dir.path());
    let start = Instant::now();
    assert_eq!(get(&cache, &numbered(0)), Source::Made);
    assert!(start.elapsed() < Duration::from_secs(2));
    assert_eq!(count(|s| &s.overtaken, &cache), 1);
    assert_eq!(files(dir.path(), |n| !n.ends_with(".oxi")), [] as [PathBuf; 0]);
}

fn a_stopped_maker_is_overtaken() {
    let dir = temporary();
    let mut child = busy_child(dir.path());
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-STOP", &pid]).status().unwrap().success());
    let dead_after = Duration::from_millis(500);
    let cache = Cache::new(&Config { dead_after, ..on_disk(dir.path()) });
    let start = Instant::now();
    let source = get(&cache, &numbered(0));
    let took = start.elapsed();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((source, count(|s| &s.overtaken, &cache)), (Source::Made, 1));
    assert!(took >= dead_after && took < dead_after * 10, "{took:?}");
}

fn nobody_waits_longer_than_the_bound() {
    let dir = temporary();
    let mut child = busy_child(dir.path()); // alive and beating, but it takes too long
    let wait = Duration::from_millis(300);
    let cache = Cache::new(&Config { wait, ..on_disk(dir.path()) });
    let start = Instant::now();
    let source = get(&cache, &numbered(0));
    let took = start.elapsed();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((source, count(|s| &s.gave_up, &cache)), (Source::Made, 1));
    assert!(took >= wait && took < wait * 10, "{took:?}");
}

/// The limit of a file's size stands in for a full disk: a write ends short, and the next one fails.
fn a_full_disk_is_a_warning() {
    let dir = temporary();
    let inner = command(dir.path(), None, 100_000, 0, &[0, 1, 2]);
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 8; exec \"$0\" \"$@\""]);
    limited.arg(inner.get_program()).args(inner.get_args());
    let text = said(&limited.output().unwrap());
    assert_eq!(text.matches("warning: ").count(), 1, "{text}");
    assert!(text.contains("cannot write to the program cache"), "{text}");
    assert_eq!((counter(&text, "made"), counter(&text, "unstored")), (3, 3));
    assert_eq!(files(dir.path(), |_| true), [] as [PathBuf; 0], "nothing is left in the folder");
}

fn a_read_only_folder_is_read_and_warns() {
    const NOBODY: u32 = 65534;
    let dir = temporary();
    let folder = dir.path().join("cache");
    get(&open(&folder), &numbered(0));
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let is_root = fs::metadata(&folder).unwrap().uid() == 0;
    // Root may write everywhere: the child must be somebody else, and able to get there.
    let exe = dir.path().join("exe");
    fs::copy(std::env::current_exe().unwrap(), &exe).unwrap();
    [dir.path(), &folder, &folder.join("programs"), &exe].into_iter().for_each(|p| mode(p, 0o755));
    let programs = oxitorch_cache::programs_folder(&folder);
    // An image that is made by root for another user says so: entries are their maker's alone.
    fs::read_dir(&programs).unwrap().for_each(|e| mode(&e.unwrap().path(), 0o644));
    mode(&programs, 0o555);
    let inner = command(&folder, Some(&dir.path().join("absent")), 1000, 0, &[0]);
    let mut child = Command::new(&exe);
    child.args(inner.get_args()).arg("1").arg("2").stderr(Stdio::piped()).current_dir("/");
    // The log of what is made needs a place that can be written.
    let absent = dir.path().join("absent");
    fs::create_dir(&absent).unwrap();
    mode(&absent, 0o770);
    if is_root {
        std::os::unix::fs::chown(&absent, None, Some(NOBODY)).unwrap();
        child.uid(NOBODY).gid(NOBODY);
    }
    let text = said(&child.output().unwrap());
    mode(&programs, 0o755);
    assert_eq!((counter(&text, "disk_hits"), counter(&text, "made")), (1, 2));
    assert_eq!(text.matches("warning: ").count(), 1, "{text}");
    assert_eq!(entries(&folder).len(), 1);
    assert_eq!(entries(&absent).len(), 2, "the tier that can be written is");
}
