//! Where files of the cache are kept: a folder, or anything that can do as much.

use crate::entry::{FORMAT, HITS_AT};
use crate::owner::{self, Owner};
use crate::trust;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A file of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Without its folder.
    pub name: String,
    /// In bytes.
    pub size: u64,
    /// When it was written or touched last.
    pub modified: SystemTime,
}

/// Named contents with the little that the cache needs: no locks, no links, nothing that a network file system or an object
/// store would not do.
pub trait Store: Send + Sync {
    /// The content, or none.
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>>;

    /// At least the first `len` bytes, or all if there are fewer, and the length of the whole; or none.
    fn read_start(&self, name: &str, len: usize) -> io::Result<Option<(Vec<u8>, u64)>>;

    /// Writes or replaces as a whole: a reader sees the old content or the new, whatever happens meanwhile.
    fn publish(&self, name: &str, content: &[u8]) -> io::Result<()>;

    /// Writes if there is nothing of that name; false if there is. Of several that do so at once, one succeeds.
    fn create(&self, name: &str, content: &[u8]) -> io::Result<bool>;

    /// Removes; false if it is known that there was nothing.
    fn remove(&self, name: &str) -> io::Result<bool>;

    /// All files, in no order.
    fn list(&self) -> io::Result<Vec<Stored>>;

    /// Says that an entry was used.
    fn used(&self, name: &str);

    /// Removes what writers that died left behind.
    fn clean(&self);

    /// Whether it is asked over a network, bounded in time: then nobody waits for what can be done in the background, and
    /// a store that does not answer is left alone for a while.
    fn is_remote(&self) -> bool {
        false
    }

    /// The process ends: what waits for an answer to a reading call gets an error, now and later.
    fn end_reading(&self) {}

    /// The process ends: nothing waits for an answer any more.
    fn close(&self) {}
}

/// Who reads and writes a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// The processes of one machine: uses are counted in the entries.
    Machine,
    /// Machines, over a network: a use only makes an entry younger, once an hour.
    Network,
}

/// The folder of entries inside a cache folder. Other formats have other folders.
pub fn programs_folder(cache: &Path) -> PathBuf {
    cache.join("programs").join(format!("v{FORMAT}"))
}

/// A folder of files.
///
/// One of a machine is of its user alone: it is made so, and another is refused. Whatever is in it that is not a regular
/// file, and not of this user, has no content.
///
/// Nothing is synchronised to the disk: the checksum of an entry finds what a power failure tore, and a process that is
/// killed leaves what it has written to the kernel.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    /// The folders above it that are made with it.
    above: Vec<PathBuf>,
    sharing: Sharing,
}

const TEMPORARY: &str = ".tmp-";
/// Temporary files of a process that cannot be judged are left this long.
const TEMPORARY_AGE: Duration = Duration::from_secs(3600);

impl Folder {
    /// A folder that need not exist yet: the first write makes it.
    pub fn new(path: impl Into<PathBuf>, sharing: Sharing) -> Folder {
        Folder { path: path.into(), above: Vec::new(), sharing }
    }

    /// The folder of entries inside a cache folder.
    pub fn of_programs(cache: &Path, sharing: Sharing) -> Folder {
        Folder::within(cache, programs_folder(cache), sharing)
    }

    /// A folder inside a cache folder.
    pub(crate) fn within(cache: &Path, path: PathBuf, sharing: Sharing) -> Folder {
        let above = path.ancestors().skip(1).take_while(|p| p.starts_with(cache)).map(Path::to_owned);
        Folder { above: above.collect(), path, sharing }
    }

    /// Whether it may be used: an error that says who else can write to it, and what to do.
    pub fn check(&self) -> io::Result<()> {
        let check = match self.sharing {
            Sharing::Machine => trust::check_private,
            Sharing::Network => trust::check_not_public,
        };
        self.above.iter().chain([&self.path]).try_for_each(|folder| check(folder))
    }

    fn is_private(&self) -> bool {
        self.sharing == Sharing::Machine
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes temporary files whose writer died; how many.
    pub fn remove_stale(&self) -> io::Result<usize> {
        let mut removed = 0;
        for file in self.files()? {
            let Some(rest) = file.name.strip_prefix(TEMPORARY) else { continue };
            let dead = Owner::parse(rest).is_none_or(|o| o.is_dead());
            let old = file.modified.elapsed().is_ok_and(|age| age > TEMPORARY_AGE);
            if (dead || old) && self.remove(&file.name)? {
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// Removes the folder if nothing is in it.
    pub fn remove_if_empty(&self) {
        // Not empty, or not there, is not a failure.
        let _ = fs::remove_dir(&self.path);
    }

    fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Runs a write; makes the folder if that is what is missing.
    fn writing<T>(&self, write: impl Fn() -> io::Result<T>) -> io::Result<T> {
        self.check()?;
        match write() {
            Err(e) if e.kind() == ErrorKind::NotFound => {
                match self.sharing {
                    Sharing::Machine => trust::make_private(&self.path)?,
                    Sharing::Network => fs::create_dir_all(&self.path)?,
                }
                self.check()?;
                write()
            }
            other => other,
        }
    }

    fn files(&self) -> io::Result<Vec<Stored>> {
        self.check()?;
        let entries = match fs::read_dir(&self.path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut out = Vec::new();
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            // Gone since it was listed, by another process: not a failure.
            let Ok(meta) = entry.metadata() else { continue };
            if meta.is_file() {
                let modified = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                out.push(Stored { name, size: meta.size(), modified });
            }
        }
        Ok(out)
    }
}

fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(x) => Ok(Some(x)),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::StaleNetworkFileHandle) => Ok(None),
        Err(e) => Err(e),
    }
}

impl Store for Folder {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        self.check()?;
        found(trust::read(&self.at(name), self.is_private()))
    }

    fn read_start(&self, name: &str, len: usize) -> io::Result<Option<(Vec<u8>, u64)>> {
        self.check()?;
        let read = || {
            let file = trust::open(&self.at(name), OpenOptions::new().read(true), self.is_private())?;
            let Some(file) = file else { return Ok((Vec::new(), 0)) };
            let size = file.metadata()?.size();
            let mut start = Vec::new();
            file.take(len as u64).read_to_end(&mut start)?;
            Ok((start, size))
        };
        found(read())
    }

    fn publish(&self, name: &str, content: &[u8]) -> io::Result<()> {
        self.writing(|| {
            let temporary = self.at(&format!("{TEMPORARY}{}-{}", Owner::own().text(), owner::nonce()));
            let mut file = trust::create_new(&temporary, self.is_private())?;
            let written = file.write_all(content).and_then(|()| {
                drop(file); // a network file system reports a full disk here
                fs::rename(&temporary, self.at(name))
            });
            if written.is_err() {
                // What cannot be removed now is collected later.
                let _ = fs::remove_file(&temporary);
            }
            written
        })
    }

    fn create(&self, name: &str, content: &[u8]) -> io::Result<bool> {
        self.writing(|| {
            let path = self.at(name);
            let mut file = match trust::create_new(&path, self.is_private()) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => return Ok(false),
                other => other?,
            };
            let written = file.write_all(content);
            if written.is_err() {
                // A lease without content would make others wait.
                let _ = fs::remove_file(&path);
            }
            written.map(|()| true)
        })
    }

    fn remove(&self, name: &str) -> io::Result<bool> {
        self.check()?;
        let path = self.at(name);
        let removed = match fs::remove_file(&path) {
            // A folder in the place of a file: somebody else's, or nobody's.
            Err(e) if e.kind() == ErrorKind::IsADirectory => fs::remove_dir(&path),
            other => other,
        };
        Ok(found(removed)?.is_some())
    }

    fn list(&self) -> io::Result<Vec<Stored>> {
        Ok(self.files()?.into_iter().filter(|f| !f.name.starts_with(TEMPORARY)).collect())
    }

    fn used(&self, name: &str) {
        let count = || {
            let mut options = OpenOptions::new();
            let file = trust::open(&self.at(name), options.read(true).write(true), self.is_private())?;
            let Some(file) = file else { return Ok(()) };
            match self.sharing {
                Sharing::Machine => {
                    let mut hits = [0; 8];
                    file.read_exact_at(&mut hits, HITS_AT)?;
                    let hits = u64::from_le_bytes(hits).saturating_add(1);
                    file.write_all_at(&hits.to_le_bytes(), HITS_AT)
                }
                Sharing::Network => {
                    let modified = file.metadata()?.modified()?;
                    let recent = modified.elapsed().is_ok_and(|age| age < Duration::from_secs(3600));
                    if recent { Ok(()) } else { file.set_modified(SystemTime::now()) }
                }
            }
        };
        // A folder that cannot be written keeps no count.
        let _: io::Result<()> = count();
    }

    fn clean(&self) {
        // What cannot be removed now is in nobody's way.
        let _ = self.remove_stale();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn folder() -> (tempfile::TempDir, Folder) {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::new(dir.path().join("a/b"), Sharing::Machine);
        (dir, folder)
    }

    #[test]
    fn nothing_is_made_by_reading() {
        let (dir, folder) = folder();
        assert_eq!(folder.read("x").unwrap(), None);
        assert_eq!(folder.list().unwrap(), []);
        assert!(!folder.remove("x").unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_is_new_is_its_users_alone() {
        let (dir, folder) = folder();
        folder.publish("x", b"1").unwrap();
        folder.create("y", b"1").unwrap();
        let mode = |path: &str| fs::metadata(dir.path().join(path)).unwrap().mode() & 0o777;
        let modes = ["a", "a/b", "a/b/x", "a/b/y"].map(mode);
        assert_eq!(modes, [0o700, 0o700, 0o600, 0o600]);
    }

    #[test]
    fn what_others_can_write_is_neither_read_nor_written() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::of_programs(dir.path(), Sharing::Machine);
        folder.publish("x", b"1").unwrap();
        let chmod = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let folders = [dir.path(), folder.path().parent().unwrap(), folder.path()];
        for path in folders {
            for mode in [0o770, 0o702, 0o1777] {
                chmod(path, mode);
                let results = [
                    folder.read("x").map(drop),
                    folder.read_start("x", 1).map(drop),
                    folder.publish("y", b"1"),
                    folder.create("z", b"1").map(drop),
                    folder.list().map(drop),
                ];
                for result in results {
                    let e = result.unwrap_err().to_string();
                    assert!(e.contains("chmod go-w") && e.contains(&path.display().to_string()), "{e}");
                }
            }
            chmod(path, 0o700);
        }
        assert_eq!(folder.list().unwrap().len(), 1);
        chmod(&folder.at("x"), 0o666);
        assert_eq!(folder.read("x").unwrap().unwrap(), b"", "whoever wrote it");
        // Machines share theirs with a group, and with nobody else.
        let shared = Folder::new(folder.path(), Sharing::Network);
        chmod(shared.path(), 0o770);
        assert_eq!(shared.read("x").unwrap().unwrap(), b"1");
        chmod(shared.path(), 0o777);
        assert!(shared.read("x").unwrap_err().to_string().contains("chmod o-w"));
    }

    #[test]
    fn only_regular_files_have_content_and_nothing_waits() {
        let (dir, folder) = folder();
        folder.publish("file", b"1").unwrap();
        let at = |name: &str| folder.at(name);
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("nothing"), at("dangling")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let made = std::process::Command::new("mkfifo").arg(at("fifo")).status().unwrap();
        assert!(made.success());
        fs::create_dir(at("folder")).unwrap();
        for name in ["link", "dangling", "socket", "fifo", "folder"] {
            assert_eq!(folder.read(name).unwrap().unwrap(), b"", "{name}");
            assert_eq!(folder.read_start(name, 1).unwrap().unwrap(), (vec![], 0), "{name}");
            folder.used(name);
            assert!(!folder.create(name, b"2").unwrap(), "{name}");
            folder.remove(name).unwrap();
            assert_eq!(folder.read(name).unwrap(), None, "{name}");
        }
        assert_eq!(folder.read("file").unwrap().unwrap(), b"1");
    }

    #[test]
    fn publish_replaces_and_create_does_not() {
        let (_dir, folder) = folder();
        assert!(folder.create("x", b"1").unwrap());
        assert!(!folder.create("x", b"2").unwrap());
        folder.publish("x", b"3").unwrap();
        assert_eq!(folder.read("x").unwrap().unwrap(), b"3");
        assert_eq!(folder.read_start("x", 100).unwrap().unwrap(), (b"3".to_vec(), 1));
        assert_eq!(folder.list().unwrap().len(), 1);
    }

    #[test]
    fn temporary_files_of_the_dead_are_collected_and_those_of_the_living_are_not() {
        let (_dir, folder) = folder();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let own = Owner::own().text();
        let [machine, _, start] = own.split('-').collect::<Vec<_>>()[..] else { panic!("{own}") };
        let dead = format!("{TEMPORARY}{machine}-{}-{start}-n", child.id());
        child.wait().unwrap();
        let living = format!("{TEMPORARY}{own}-n");
        folder.publish(&dead, b"half").unwrap();
        folder.publish(&living, b"half").unwrap();
        assert_eq!(folder.remove_stale().unwrap(), 1);
        assert_eq!(folder.read(&dead).unwrap(), None);
        assert!(folder.read(&living).unwrap().is_some());
        assert_eq!(folder.list().unwrap(), [], "temporary files are no entries");
    }
}
