//! What the tests of the cache share: a maker that leaves a trace each time it is followed.
#![allow(dead_code, reason = "each test binary uses a part")]

#[cfg(feature = "object-store")]
pub(crate) mod server;

use libtest_mimic::{Arguments, Failed, Trial};
use oxitorch_cache::{Cache, Config, Key, Maker, Source, Stats};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The tests of a binary that plays the part of another process when it is started with `child ARGUMENT...`.
pub(crate) fn run(child: fn(&[String]), tests: &[(&'static str, fn())]) -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|a| a == "child") {
        child(&args[2..]);
        return ExitCode::SUCCESS;
    }
    let trial = |&(name, test): &(&str, fn())| {
        let run = move || {
            test();
            Ok::<(), Failed>(())
        };
        Trial::test(name, run)
    };
    libtest_mimic::run(&Arguments::from_args(), tests.iter().map(trial).collect()).exit_code()
}

/// Makes `size` bytes that depend on the number, and appends the number to a log.
pub(crate) struct Numbered<'a> {
    pub(crate) number: u64,
    pub(crate) size: usize,
    pub(crate) delay: Duration,
    pub(crate) log: Option<&'a Path>,
    pub(crate) refuse: bool,
}

pub(crate) fn value(number: u64, size: usize) -> Vec<u8> {
    (0..size as u64).map(|i| (i.wrapping_mul(31) ^ number) as u8).collect()
}

impl Maker for Numbered<'_> {
    type Value = Arc<Vec<u8>>;
    type Error = std::io::Error;

    fn describe(&self) -> (String, Vec<(String, String)>) {
        (format!("number{}", self.number), vec![("size".into(), self.size.to_string())])
    }

    fn load(&self, payload: &[u8]) -> Result<(Self::Value, u64), String> {
        if self.refuse { Err("refused".into()) } else { Ok((Arc::new(payload.to_vec()), 1)) }
    }

    fn make(&self) -> Result<(Self::Value, u64), Self::Error> {
        if let Some(log) = self.log {
            let mut log = OpenOptions::new().append(true).create(true).open(log)?;
            log.write_all(format!("{}\n", self.number).as_bytes())?;
        }
        std::thread::sleep(self.delay);
        Ok((Arc::new(value(self.number, self.size)), 1))
    }

    fn save(&self, value: &Self::Value) -> Option<Vec<u8>> {
        Some(value.to_vec())
    }

    fn is_portable(&self) -> bool {
        true
    }
}

pub(crate) fn numbered(number: u64) -> Numbered<'static> {
    Numbered { number, size: 1000, delay: Duration::ZERO, log: None, refuse: false }
}

pub(crate) fn key(number: u64) -> Key {
    Key::new().with("version", b"1").with("number", &number.to_le_bytes())
}

pub(crate) type Bytes = Cache<Arc<Vec<u8>>>;

/// The value of a number, checked, and where it came from.
pub(crate) fn get(cache: &Bytes, maker: &Numbered<'_>) -> Source {
    let (held, source) = cache.get_or_make(&key(maker.number), maker).unwrap();
    assert_eq!(***held, value(maker.number, maker.size), "the value of {}", maker.number);
    source
}

pub(crate) fn on_disk(folder: &Path) -> Config {
    Config { disk: Some(folder.to_path_buf()), ..Config::default() }
}

pub(crate) fn open(folder: &Path) -> Bytes {
    Cache::new(&on_disk(folder))
}

pub(crate) fn count(counter: impl Fn(&Stats) -> &AtomicU64, cache: &Bytes) -> u64 {
    counter(cache.stats()).load(Relaxed)
}

/// The files in the folder of entries, by their endings.
pub(crate) fn files(folder: &Path, matching: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(oxitorch_cache::programs_folder(folder)).into_iter().flatten().flatten();
    let right = |p: &PathBuf| p.file_name().is_some_and(|n| matching(&n.to_string_lossy()));
    let mut found: Vec<_> = entries.map(|e| e.path()).filter(right).collect();
    found.sort();
    found
}

pub(crate) fn entries(folder: &Path) -> Vec<PathBuf> {
    files(folder, |n| n.ends_with(".oxi"))
}
