//! Tests with real processes: the binary of a test starts itself once more for each, and they meet in a folder.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const PLACE: &str = "OXITORCH_TEST_PROCESS";

/// One of the processes of a test.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its number.
    pub index: usize,
    /// How many there are.
    pub count: usize,
    /// Where they meet.
    pub folder: PathBuf,
}

/// What came of a process.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Whether its part of the test passed.
    pub passed: bool,
    /// All that it printed.
    pub printed: String,
}

/// How long the processes of a test may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs `body` in so many processes, each of which is this test alone, and gives what came of them; in these processes
/// it does not return. `test` is the test's name with its modules.
///
/// # Panics
/// If a process cannot be started.
#[expect(
    clippy::disallowed_methods,
    reason = "a test's process is told its place, and runs nothing behind its part"
)]
pub fn run(test: &str, count: usize, body: impl FnOnce(&Process)) -> Vec<Ended> {
    if let Ok(place) = env::var(PLACE) {
        let (index, folder) = place.split_once(' ').expect("a number and a folder");
        let index = index.parse().expect("a number");
        body(&Process { index, count, folder: folder.into() });
        std::process::exit(0); // no other test runs here
    }
    let folder = env::temp_dir().join(format!("oxitorch-{}-{}", std::process::id(), test.replace("::", "-")));
    fs::create_dir_all(&folder).expect("a folder for the test");
    let start = |index: usize| {
        Command::new(env::current_exe()?)
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(PLACE, format!("{index} {}", folder.display()))
            .stdin(Stdio::null())
            .stdout(fs::File::create(folder.join(format!("out.{index}")))?)
            .stderr(fs::File::create(folder.join(format!("err.{index}")))?)
            .spawn()
    };
    let children: Vec<io::Result<Child>> = (0..count).map(start).collect();
    let until = Instant::now() + PATIENCE;
    let ended = children.into_iter().enumerate().map(|(index, child)| {
        let passed = wait(child.expect("the test's own binary starts"), until);
        let read =
            |name: &str| fs::read_to_string(folder.join(format!("{name}.{index}"))).unwrap_or_default();
        Ended { passed, printed: read("out") + &read("err") }
    });
    let ended: Vec<Ended> = ended.collect();
    let _ = fs::remove_dir_all(&folder); // a folder that is left harms nobody
    ended
}

/// As [`run`], for processes that all have to pass.
///
/// # Panics
/// If one does not.
pub fn all_pass(test: &str, count: usize, body: impl FnOnce(&Process)) {
    let ended = run(test, count, body);
    let failed = ended.iter().enumerate().filter(|(_, e)| !e.passed);
    let failed: Vec<String> = failed.map(|(i, e)| format!("--- process {i}\n{}", e.printed)).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Whether it ended well and in time.
fn wait(mut child: Child, until: Instant) -> bool {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(10)),
            _ => {
                let _ = child.kill(); // it may have ended just now
                let _ = child.wait();
                return false;
            }
        }
    }
}

/// Keys and values in a folder, for processes of one machine.
#[derive(Clone, Debug)]
pub struct FolderStore(PathBuf);

impl FolderStore {
    /// The store in a folder that is there.
    pub fn new(folder: &Path) -> FolderStore {
        FolderStore(folder.to_owned())
    }

    fn path(&self, key: &str) -> PathBuf {
        let plain =
            |c: char| if c.is_ascii_alphanumeric() { c.to_string() } else { format!("_{:x}", c as u32) };
        self.0.join(format!("key.{}", key.chars().map(plain).collect::<String>()))
    }

    /// The value of a key, if it is there.
    pub fn try_get(&self, key: &str) -> Option<Vec<u8>> {
        fs::read(self.path(key)).ok()
    }

    /// Waits for a value, but not longer than this.
    pub fn get(&self, key: &str, timeout: Duration) -> Option<Vec<u8>> {
        let until = Instant::now() + timeout;
        loop {
            match self.try_get(key) {
                None if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
                found => return found,
            }
        }
    }

    /// Gives a key its value.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn put(&self, key: &str, value: &[u8]) -> io::Result<()> {
        // Who reads finds all of it or nothing.
        let path = self.path(key);
        // Threads of a process write at once.
        static WRITTEN: AtomicUsize = AtomicUsize::new(0);
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let new = path.with_extension(format!("new{}.{number}", std::process::id()));
        fs::write(&new, value)?;
        fs::rename(new, path)
    }
}
